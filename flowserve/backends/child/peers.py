"""The processes that this one hands batches on to.

Decided here: that a batch goes where the next process hears the server too, on the server's own end of that socket. So
it comes behind whatever the server has said before, for instance of the memory that it lies in, and costs that process
no second socket to listen to. This file does not know what is said.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence


class Peers:
    """Where they are reached, by the server's numbers for them."""

    def __init__(self) -> None:
        self._onward: dict[int, socket.socket] = {}

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
