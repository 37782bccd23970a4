"""Chunked request bodies: bytes in, body out, no waiting.

Decides what a well-formed chunk is (strictly: hexadecimal size, CRLF, data, CRLF), and the two limits that
bound the cost of a body of tiny chunks. Extensions and trailers are ignored. There is no record
per chunk: the data is appended to one growing buffer. This file knows no sockets.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from flowserve.http.server.limits import MAX_CHUNKS, body_too_large
from flowserve.http.server.request_head import Refused

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?")
_LINE_BYTES_MAX: Final = 4096
_TRAILER_BYTES_MAX: Final = 8192


class _Next(enum.Enum):
    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()


class ChunkedBody:
    """One body. Feed it until it is complete; then `body` is the body and `rest` the bytes after it."""

    def __init__(self, max_body_bytes: int) -> None:
        self.body = bytearray()
        self.rest = b""
        self._max_body_bytes = max_body_bytes
        self._next = _Next.SIZE
        self._left = 0  # bytes of the current chunk still to come
        self._chunks = 0
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bool:
        """Whether the body is complete. Raises `Refused` if it is malformed or over a limit."""
        data = self.rest + data
        at = 0
        while True:
            if self._next is _Next.DATA:
                piece = data[at : at + self._left]
                self.body += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    self.rest = b""
                    return False
                self._next = _Next.DATA_END
            end = data.find(b"\r\n", at)
            if end < 0 or end - at > _LINE_BYTES_MAX:
                return self._wait_for_line(data, at)
            line = data[at:end]
            at = end + 2
            if self._next is _Next.SIZE:
                self._start_chunk(line)
            elif self._next is _Next.DATA_END:
                if line:
                    raise Refused(400, "malformed chunked body: a chunk is longer than its size says")
                self._next = _Next.SIZE
            elif line:
                self._count_trailer(line)
            else:
                self.rest = data[at:]
                return True

    def _wait_for_line(self, data: bytes, at: int) -> bool:
        self.rest = data[at:]
        if len(self.rest) > _LINE_BYTES_MAX:
            raise Refused(400, f"malformed chunked body: a line is longer than {_LINE_BYTES_MAX} bytes")
        if self._next is _Next.DATA_END and len(self.rest) > 1:
            raise Refused(400, "malformed chunked body: a chunk is longer than its size says")
        return False

    def _start_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise Refused(400, "malformed chunked body: a chunk size is not a hexadecimal number")
        self._left = int(match[1], 16)
        if self._left == 0:
            self._next = _Next.TRAILER
            return
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise Refused(400, f"chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks")
        if len(self.body) + self._left > self._max_body_bytes:
            raise Refused(413, body_too_large(None, self._max_body_bytes))
        self._next = _Next.DATA

    def _count_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _TRAILER_BYTES_MAX or b"\n" in line:
            raise Refused(400, "malformed chunked body: the trailer is too long or not made of lines")
