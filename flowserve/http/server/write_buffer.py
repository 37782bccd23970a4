"""Bytes that were written to a socket and that the kernel has not accepted yet.

Decides how bytes are written: small buffers are joined into one `send`, large ones are sent by `sendmsg`, not joined.
Never waits and knows no HTTP. Called by the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

_JOINED_BYTES_MAX: Final = 16_384  # below this one copy is cheaper than a longer list of buffers
_PARTS_MAX: Final = 512  # sendmsg takes 1024


class WriteBuffer:
    """Writes to one non-blocking socket, in order."""

    __slots__ = ("_sock", "_unsent")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: list[memoryview] = []

    def send(self, parts: Sequence[Any]) -> bool:
        """Write buffers of bytes. Returns whether the kernel has everything. Raises OSError if the kernel refuses."""
        if not self._unsent and sum(map(len, parts)) <= _JOINED_BYTES_MAX:
            data = b"".join(parts)
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._unsent.append(memoryview(data)[sent:])
            return not self._unsent
        self._unsent += [memoryview(part).cast("B") for part in parts if len(part)]
        return self.flush()

    def flush(self) -> bool:
        """Write the remaining bytes. Returns and raises as `send` does."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self._sock.sendmsg(unsent[:_PARTS_MAX])
            except BlockingIOError:
                return False
            done = 0
            while done < len(unsent) and sent >= len(unsent[done]):
                sent -= len(unsent[done])
                done += 1
            del unsent[:done]
            if sent:
                unsent[0] = unsent[0][sent:]
        return True
