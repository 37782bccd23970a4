"""Messages to a process that may not be reading just now.

Decides that messages leave in their order: at once, or as soon as the process reads again. Does not know their
contents. Used by channel.py and by the calls of models (model_calls/process_calls.py), on the event loop.
"""

from __future__ import annotations

import os
import socket
from collections import deque

from flowserve.runtime.ipc.poller import Readiness


class Outbox:
    """The unsent messages of one non-blocking socket that `readiness` watches."""

    def __init__(self, sock: socket.socket, readiness: Readiness) -> None:
        self._socket = sock
        self._readiness = readiness
        self._unsent: deque[tuple[bytes, int]] = deque()

    def send(self, message: bytes, fd: int = -1) -> None:
        """Send this, with a descriptor where one is given, which is closed then. Dropped where the process has closed
        its end: the reader of the socket learns of that.
        """
        if self._unsent:
            self._unsent.append((message, fd))
            return
        try:
            if fd < 0:
                self._socket.send(message)
            else:
                self._send(message, fd)
        except BlockingIOError:
            self._unsent.append((message, fd))
            self._readiness.when_writable(self._socket.fileno(), self._send_unsent)
        except ConnectionError:
            return

    def clear(self) -> None:
        """Drop the unsent messages."""
        for _, fd in self._unsent:
            if fd >= 0:
                os.close(fd)
        self._unsent.clear()

    def _send_unsent(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                self._send(*unsent[0])
            except BlockingIOError:
                self._readiness.when_writable(self._socket.fileno(), self._send_unsent)
                return
            except ConnectionError:
                self.clear()
                return
            unsent.popleft()

    def _send(self, message: bytes, fd: int) -> None:
        if fd < 0:
            self._socket.send(message)
            return
        try:
            socket.send_fds(self._socket, [message], [fd])
        except BlockingIOError:
            raise
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
