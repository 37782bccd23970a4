"""The processes that this one hands batches on to.

Decided here: that a batch goes where the next process hears the server too, on the server's own end of that socket. So
it comes behind whatever the server has said before, for instance of the memory that it lies in, and costs that process
no second socket to listen to. What is the same for all that go the same path is known here, too. This file does not
know what is said.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

# By which numbers others know this one's segments, the peer that follows, what it reads, and what it is asked for.
Onward = tuple[dict[int, int], int, list[tuple[int, int]], tuple[str, ...]]


class Peers:
    """Where they are reached, by the server's numbers for them; `paths` is what follows on each path."""

    def __init__(self) -> None:
        self._onward: dict[int, socket.socket] = {}
        self.paths: dict[int, Onward] = {}

    def lead(
        self,
        path: int,
        names: dict[int, int],
        peer: int,
        inputs: list[tuple[int, int]],
        wanted: tuple[str, ...],
        gone: Sequence[int],
    ) -> None:
        """What follows on a path; those that are `gone` nothing takes any more."""
        for one in gone:
            self.paths.pop(one, None)
        self.paths[path] = names, peer, inputs, wanted

    def know(self, number: int, gone: Sequence[int], fd: int) -> None:
        """Whom the server calls `number` is reached there; those it calls so are no more. Takes `fd`."""
        for one in gone:
            self._onward.pop(one).close()
        self._onward[number] = socket.socket(fileno=fd)

    def send(self, number: int, message: bytes) -> bool:
        """Hand on. False where nobody is there any more, or reads just now."""
        try:
            self._onward[number].send(message)  # without a wait: the server's sockets are like that
        except OSError:
            return False
        return True
