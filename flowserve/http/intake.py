"""A request as it comes over the line: its head, and its body.

Decided here: where the bytes of a request lie until all of them are there (a large body in pooled memory, from its
first byte on), how a head that comes in pieces is read, and how much longer a body may take for what has come of it.
Who waits for requests, and what becomes of them, is decided in connection.py.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from flowserve.http.answer import CONTINUE
from flowserve.http.chunks import ChunkedBody
from flowserve.http.exchange import Buffer, Exchange
from flowserve.http.head import HEAD_END, Head, HeadParser, Refused, check_body_size
from flowserve.http.line import Phase
from flowserve.memory.pool import ALIGNMENT, POOLED_BYTES_MIN

if TYPE_CHECKING:
    from flowserve.http.server import Server


class Intake(Exchange):
    """What of the client's requests has come."""

    __slots__ = ("_buffer", "_received")

    def __init__(self, server: Server, sock: socket.socket) -> None:
        super().__init__(server, sock)
        self._buffer = b""  # received, not yet looked at
        # Where a large body lies, and how much of it has come, until the task goes on with it.
        self._received: tuple[memoryview, int] | None = None

    async def _rest_of_head(self, data: bytes) -> Head:
        self.enter(Phase.HEAD, self.server.limits.header_timeout_s)
        limits = self.server.limits
        parser = HeadParser(limits)
        size = 0
        tail = b""  # the end of a head may itself come in pieces
        while True:
            end = (tail + data).find(HEAD_END)
            if end >= 0:
                end += 4 - len(tail)
                parser.feed(data[:end])
                self._buffer = data[end:]
                return parser.finish()
            parser.feed(data)
            size += len(data)
            if size > limits.max_head_bytes:
                raise Refused(431, f"the request's head is longer than {limits.max_head_bytes} bytes")
            tail = (tail + data)[-3:]
            data = await self.receive_some()

    async def _read_body(self, head: Head) -> Buffer:
        if head.is_chunked:
            return await self._read_chunks(head)
        size = head.content_length
        buffer = self._buffer
        if size == 0:
            return b""
        check_body_size(head, self.server.limits)
        if size <= len(buffer):
            self._buffer = buffer[size:]
            return buffer[:size]
        await self._enter_body(head)
        return await self._receive_body(size, head)

    async def _receive_body(self, size: int, head: Head) -> Buffer:
        """`size` bytes straight into one buffer, placed so that its first tensor is aligned in memory.

        The buffer is the request's alone, and writable: a model that is its last reader may work in it.
        """
        is_large = size >= POOLED_BYTES_MIN
        if self._received is not None:
            (target, got), self._received = self._received, None
        else:
            target = self._make_room(size, head) if is_large else memoryview(bytearray(size))
            got = len(self._buffer)
            target[:got] = self._buffer
            self._buffer = b""
        self.deadline += got / self.server.limits.body_bytes_per_s
        if is_large:
            self.server.arrivals.watch_input(self, is_wanted=False)  # it would be told of every piece
        await self.receive_into(target[got:], self.server.limits.body_bytes_per_s)
        if is_large:
            self.server.arrivals.watch_input(self, is_wanted=True)
        return target if is_large else bytes(target)

    def _make_room(self, size: int, head: Head) -> memoryview:
        pad = -head.anchor % ALIGNMENT
        room = self.server.room
        block = None if room is None else room(head.scope, size + pad)
        if block is None:
            block = self.server.pool.take(size + pad)
        return block.data[pad:]

    async def _read_chunks(self, head: Head) -> Buffer:
        limits = self.server.limits
        body = ChunkedBody(limits.max_body_bytes)
        data = self._buffer
        await self._enter_body(head)
        while not body.feed(data):
            data = await self.receive_some()
            self.deadline += len(data) / limits.body_bytes_per_s
        self._buffer = body.rest
        return bytes(body.body) if len(body.body) < POOLED_BYTES_MIN else memoryview(body.body)

    async def _enter_body(self, head: Head) -> None:
        self.enter(Phase.BODY, self.server.limits.body_timeout_s)
        if head.expects_continue and not self._buffer:
            await self.write([CONTINUE])
            self.enter(Phase.BODY, self.server.limits.body_timeout_s)
