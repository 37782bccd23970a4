"""The budget of a server: bytes of requests in it at once, over HTTP and gRPC, and HTTP connections at once.

Decides what counts and for how long. A request over HTTP reserves the bytes of its body once the body needs a buffer of
its own, which is when it does not arrive together with its head in one read (16 KiB): a body with a Content-Length
reserves all of it before the buffer is allocated, a chunked body as it grows, and a compressed one also its expanded
form as it grows. The reservation ends with the response, or with the connection. Smaller bodies are bounded by the
number of connections. A gRPC message of more than 16 KiB reserves its bytes when grpcio delivers it, which is when it
is complete and decompressed, until its request is over.

Does not know sockets, nor the effect of a refusal. Callers: the front ends; the codecs of compressed bodies, on threads
of their own.
"""

from __future__ import annotations

import threading
from typing import Final

from flowserve.errors import Cancelled, Overloaded

UNLIMITED: Final = 1 << 62
COUNTED_BYTES_MIN: Final = 16_384  # size of a counted message


class Budget:
    """`max_body_bytes` and `max_connections`; the counters `body_bytes` (reserved now), `connections` (open now),
    `refused_bodies` and `refused_connections` (since the start).
    """

    def __init__(self, max_body_bytes: int = UNLIMITED, max_connections: int = UNLIMITED) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_connections = max_connections
        self.body_bytes = 0
        self.connections = 0
        self.refused_bodies = 0
        self.refused_connections = 0
        self._lock = threading.RLock()  # the garbage collector may end a reservation on a thread that holds it

    def _reserve(self, nbytes: int) -> bool:
        """Reserve part of the budget. False if there is no room."""
        with self._lock:
            if self.body_bytes + nbytes > self.max_body_bytes:
                self.refused_bodies += 1
                return False
            self.body_bytes += nbytes
            return True

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self.body_bytes -= nbytes


class Reservation:
    """The part of the budget that one request has. `grow` may be called on any thread. Ends with the object at the
    latest.
    """

    __slots__ = ("_budget", "_is_over", "_lock", "_nbytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._nbytes = 0
        self._is_over = False
        self._lock = threading.Lock()

    def grow(self, nbytes: int) -> None:
        """Reserve `nbytes` more. Raises Overloaded if the budget is used up, Cancelled once the request is over."""
        with self._lock:
            if self._is_over:
                raise Cancelled("the request is over")
            if not self._budget._reserve(nbytes):
                raise Overloaded(
                    f"the server holds requests of {self._budget.body_bytes} bytes, and {nbytes} more are beyond "
                    f"its limit of {self._budget.max_body_bytes} bytes; --http-max-total-input-size sets it"
                )
            self._nbytes += nbytes

    def __del__(self) -> None:
        self.end()  # also of a dropped message

    def end(self) -> None:
        """Release all of it. Later calls of `grow` raise."""
        with self._lock:
            self._is_over = True
            self._budget._release(self._nbytes)
            self._nbytes = 0
