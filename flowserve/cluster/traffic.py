"""What is under way between the server and one machine, and how much may be.

Decides that a large batch waits, on the thread that sends it, until those before it have been answered; that one batch
is always let through, however large; and that batches are let through in the order in which they came. Does not know
batches or connections. Callers: the sending and reading threads of runtime/workers/cluster, and its event loop, which
never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

MACHINE_BYTES_MAX: Final = 256 << 20


class MachineTraffic:
    """Of all connections to one machine. `batches` have been answered, and were `way_ns` on the way there and back,
    without the time in which they waited for others there or were computed. Used on any thread.
    """

    def __init__(self, most: int = MACHINE_BYTES_MAX) -> None:
        self._most = most
        self._taken = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self.batches = 0
        self.way_ns = 0

    def take(self, nbytes: int) -> None:
        """Count bytes that are sent at once."""
        with self._changed:
            self._taken += nbytes

    def wait(self, nbytes: int, gave_up: threading.Event) -> bool:
        """Count bytes as soon as there is room for them. Blocks. False if the caller `gave_up` (see `wake`)."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (self._taken and self._taken + nbytes > self._most):
                    if gave_up.is_set():
                        return False
                    self._changed.wait()
                self._taken += nbytes
                return True
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def give_back(self, nbytes: int) -> None:
        """Bytes are not under way any more."""
        if nbytes:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()

    def answered(self, way_ns: int) -> None:
        """Count a batch."""
        with self._changed:
            self.batches += 1
            self.way_ns += way_ns

    def wake(self) -> None:
        """Have those that wait look whether they gave up."""
        with self._changed:
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """The bytes that are under way to it."""
        return self._taken
