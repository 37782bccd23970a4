"""The processes beside this one: whom a batch is handed on to, and who hands batches on to this one.

Decided here: in which order a process listens. What the server says comes first, since it may be about memory that a
batch from elsewhere lies in. Who is gone is forgotten: that the batch it had will not come is the server's to notice.
This file does not know what is said.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence


class Peers:
    """The sockets of one process besides the server's, which it waits for together with that one."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._heard: dict[int, socket.socket] = {}  # by descriptor: those who hand on to this one
        self._onward: dict[int, socket.socket] = {}  # by the server's number for it: those handed on to
        self._poll = select.poll()
        self._poll.register(server, select.POLLIN)

    def hear(self, fd: int) -> None:
        """Somebody hands on batches there. Takes `fd`."""
        self._heard[fd] = socket.socket(fileno=fd)
        self._poll.register(fd, select.POLLIN)

    def know(self, number: int, gone: Sequence[int], fd: int) -> None:
        """Whom the server calls `number` is reached there; those it calls so are no more. Takes `fd`."""
        for one in gone:
            self._onward.pop(one).close()
        self._onward[number] = socket.socket(fileno=fd)

    def wait(self) -> socket.socket:
        """Whom to read from next. Blocks."""
        ready = [fd for fd, _ in self._poll.poll()]
        return self._server if self._server.fileno() in ready else self._heard[ready[0]]

    def pending(self) -> socket.socket | None:
        """A peer who has said something, if any."""
        return next((self._heard[fd] for fd, _ in self._poll.poll(0) if fd in self._heard), None)

    def lost(self, peer: socket.socket) -> None:
        """It has closed its end."""
        self._poll.unregister(peer)
        del self._heard[peer.fileno()]
        peer.close()

    def send(self, number: int, message: bytes) -> bool:
        """Hand on. False where nobody is there any more."""
        try:
            self._onward[number].send(message)
        except OSError:
            return False
        return True
