"""Requests as bytes: heads and chunked bodies become records, and the limits on their size and duration.

Decides which heads are served (in HTTP/1.1 those with exactly one Host), and the framing of the body: exactly one
Content-Length, or exactly "chunked", or no body. The syntax is checked by llhttp (through httptools, in its strict
mode). Clients mostly repeat the same head, so records are cached by their bytes (`HeadCache`) and never changed.

Decides what a well-formed chunk is (strictly: hexadecimal size, CRLF, data, CRLF), and the two limits that bound the
cost of a body of tiny chunks. Extensions and trailers are ignored. There is no record per chunk: the data is appended
to one growing buffer.

Decides the limits and their defaults; sizes are bytes, times seconds. connection.py decides the effect of exceeding
one. Knows no sockets and does not wait. Called by the connection.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import httptools

MAX_BODY_BYTES: Final = 1 << 26
MAX_CHUNKS: Final = 65_536
SENT_NAMES: Final = "flowserve.header_names"  # in the ASGI scope: the headers' names as they were sent, in order
TRACEPARENT: Final = b"traceparent"
HEAD_END: Final = b"\r\n\r\n"
_CACHED_HEADS: Final = 512
_CACHED_HEAD_BYTES: Final = 2048
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?")
_LINE_BYTES_MAX: Final = 4096
_CR: Final = ord("\r")
_TRAILER_BYTES_MAX: Final = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_body_bytes` also bounds chunked bodies, by counting. `header_timeout_s` runs from a request's first byte
    to the end of its head.

    `body_timeout_s` is the time for a body, plus a second for every `body_bytes_per_s` received: a slow connection
    is served, a trickle is not. `write_timeout_s` is the longest time in which a client may read nothing of its
    response. `idle_timeout_s` is the time between two requests.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    max_head_bytes: int = 65_536
    max_headers: int = 256
    max_url_bytes: int = 8192
    header_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    body_bytes_per_s: int = 16_384
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0


def body_too_large(size: int | None, limit: int) -> str:
    """The error text for a body over the limit; `size` None if it was not announced."""
    found = "request body" if size is None else f"request body of {size} bytes"
    return f"{found} exceeds the maximum allowed size of {limit} bytes; --http-max-input-size sets it"


class Refused(Exception):
    """The bytes are not a request this server reads. The client gets `status` and the text, then the connection
    closes."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Head:
    """One request's head.

    `scope` is the ASGI scope without the fields of the connection. `content_length` is 0 for no body, and
    meaningless when `is_chunked`. `anchor` is the offset in the body that should be aligned in memory: where the
    first binary tensor starts.
    """

    def __init__(self, scope: dict[str, Any], *, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_head = scope["method"] == "HEAD"
        self.is_http_1_0 = scope["http_version"] == "1.0"
        self.content_length = 0
        self.is_chunked = False
        self.expects_continue = False
        self.anchor = 0


class HeadParser:
    """Reads one head, in any number of pieces. Raises `Refused` as soon as it is invalid. `rest`: the bytes
    after it.
    """

    def __init__(self, limits: Limits) -> None:
        self.rest = b""
        self._limits = limits
        self._size = 0
        self._tail = b""  # the end of a head may itself come in pieces
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._names: list[bytes] = []
        self._messages = 0
        self._is_complete = False
        self._has_body = False
        self._keeps_alive = False
        self._parser = httptools.HttpRequestParser(self)

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_url(self, url: bytes) -> None:
        self._url += url  # comes in pieces where the bytes do

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._names.append(name)

    def on_headers_complete(self) -> None:
        self._is_complete = True
        # Asked now: where there is no body the message ends here, and llhttp forgets its flags.
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._has_body = True

    # The interface for the connection.

    def take(self, data: bytes) -> Head | None:
        """Parse the next bytes. Returns the head once it is complete."""
        end = (self._tail + data).find(HEAD_END)
        if end >= 0:
            end += 4 - len(self._tail)
            self.rest = data[end:]
            self.feed(data[:end])
            return self.finish()
        self.feed(data)
        self._size += len(data)
        if self._size > self._limits.max_head_bytes:
            raise Refused(431, f"the request's head is longer than {self._limits.max_head_bytes} bytes")
        self._tail = (self._tail + data)[-3:]
        return None

    def feed(self, data: bytes) -> None:
        """The next bytes, none of them past the head's end."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a request to change the protocol, which a server may ignore
        except httptools.HttpParserError as error:
            raise Refused(400, f"malformed HTTP request: {error}") from None
        if len(self._url) > self._limits.max_url_bytes:
            raise Refused(414, f"the URL is longer than {self._limits.max_url_bytes} bytes")
        if len(self._headers) > self._limits.max_headers:
            raise Refused(431, f"more than {self._limits.max_headers} headers")

    def finish(self) -> Head:
        """The record, once everything up to the empty line was fed."""
        version = self._checked_version()
        path, query = _split_url(self._url)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": _decoded(path),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": tuple(self._headers),
            SENT_NAMES: tuple(self._names),
        }
        head = Head(scope, keep_alive=self._keeps_alive)
        for name, value in self._headers:
            if name == b"content-length":
                head.content_length = int(value)  # llhttp let digits through and nothing else, and one such header only
            elif name == b"transfer-encoding":
                if head.is_chunked or value.lower() != b"chunked" or head.is_http_1_0:
                    what = "the only Transfer-Encoding is 'chunked', once, in HTTP/1.1"
                    raise Refused(400, f"malformed HTTP request: {what}")
                head.is_chunked = True
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    raise Refused(417, "the only expectation this server can meet is '100-continue'")
                head.expects_continue = not head.is_http_1_0
            elif name == b"inference-header-content-length" and value.isdigit() and len(value) < 10:
                head.anchor = int(value)  # only a hint about memory here; the codec checks its value
        return head

    def _checked_version(self) -> str:
        """The version of HTTP of a head that is complete and has the Host header that its version requires."""
        # More than one message, or body bytes, means llhttp saw the head's end before we did.
        if not self._is_complete or self._messages != 1 or self._has_body:
            raise Refused(400, "malformed HTTP request: the head does not end where its empty line is")
        version: str = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refused(505, f"HTTP version {version} is not supported; use 1.1")
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Refused(400, f"malformed HTTP request: {hosts or 'no'} Host headers; HTTP/1.1 requires exactly one")
        return version


class HeadCache:
    """Heads by their bytes. Bounded, and emptied when full: simpler than choosing, and as good for clients that
    repeat themselves."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.by_text: dict[bytes, Head] = {}

    def parse(self, data: bytes) -> Head:
        """The record of a whole head, its empty line included, which is then in `by_text`."""
        parser = HeadParser(self._limits)
        parser.feed(data)
        head = parser.finish()
        if len(data) <= _CACHED_HEAD_BYTES:
            if len(self.by_text) >= _CACHED_HEADS:
                self.by_text.clear()
            self.by_text[data] = head
        return head


def _split_url(url: bytes) -> tuple[bytes, bytes]:
    if not url.startswith(b"/") and b"://" in url:
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise Refused(400, "malformed HTTP request: the URL cannot be read") from None
        return parsed.path or b"/", parsed.query or b""
    path, _, query = url.partition(b"?")
    return path, query


def _decoded(path: bytes) -> str:
    try:
        return unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, "malformed HTTP request: the URL is not percent-encoded UTF-8") from None


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
            end = data.find(b"\n", at)
            if end < 0 or end - at > _LINE_BYTES_MAX:
                return self._wait_for_line(data, at)
            if end == at or data[end - 1] != _CR:
                raise Refused(400, "malformed chunked body: a line ends with a bare line feed, not with CR and LF")
            line = data[at : end - 1]
            at = end + 1
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
        if self._trailer_bytes > _TRAILER_BYTES_MAX or b"\r" in line:
            raise Refused(400, "malformed chunked body: the trailer is too long or not made of lines")


def trace_context(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The trace context of a request, "" for none."""
    return next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT), "")
