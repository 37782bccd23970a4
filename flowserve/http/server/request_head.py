"""Request heads: bytes become one record.

Decides which heads are served, and the framing of the body: exactly one Content-Length, or exactly "chunked", or no
body. The syntax is checked by llhttp (through httptools, in its strict mode). Clients mostly repeat the same head,
so records are cached by their bytes (`HeadCache`) and never changed. Knows no sockets. Called by the connection.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote_to_bytes

import httptools

from flowserve.http.server.limits import Limits, body_too_large

HEAD_END: Final = b"\r\n\r\n"
_CACHED_HEADS: Final = 512
_CACHED_HEAD_BYTES: Final = 2048
_NO_ANCHOR: Final = 0


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

    __slots__ = (
        "anchor",
        "content_length",
        "expects_continue",
        "is_chunked",
        "is_head",
        "is_http_1_0",
        "keep_alive",
        "scope",
    )

    def __init__(self, scope: dict[str, Any], *, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_head = scope["method"] == "HEAD"
        self.is_http_1_0 = scope["http_version"] == "1.0"
        self.content_length = 0
        self.is_chunked = False
        self.expects_continue = False
        self.anchor = _NO_ANCHOR


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
            pass  # an offer to change the protocol, which one may ignore
        except httptools.HttpParserError as error:
            raise Refused(400, f"malformed HTTP request: {error}") from None
        if len(self._url) > self._limits.max_url_bytes:
            raise Refused(414, f"the URL is longer than {self._limits.max_url_bytes} bytes")
        if len(self._headers) > self._limits.max_headers:
            raise Refused(431, f"more than {self._limits.max_headers} headers")

    def finish(self) -> Head:
        """The record, once everything up to the empty line was fed."""
        # More than one message, or body bytes, means llhttp saw the head's end before we did.
        if not self._is_complete or self._messages != 1 or self._has_body:
            raise Refused(400, "malformed HTTP request: the head does not end where its empty line is")
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refused(505, f"HTTP version {version} is not supported; use 1.1")
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
        }
        head = Head(scope, keep_alive=self._keeps_alive)
        for name, value in self._headers:
            _FRAMING.get(name, _ignore)(head, value)
        return head


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


def body_refused(nbytes: int, limits: Limits) -> Refused:
    """The refusal of a body that is too large by its announced length alone."""
    return Refused(413, body_too_large(nbytes, limits.max_body_bytes))


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


def _content_length(head: Head, value: bytes) -> None:
    head.content_length = int(value)  # llhttp let digits through and nothing else, and one such header only


def _transfer_encoding(head: Head, value: bytes) -> None:
    if head.is_chunked or value.lower() != b"chunked" or head.is_http_1_0:
        raise Refused(400, "malformed HTTP request: the only Transfer-Encoding is 'chunked', once, in HTTP/1.1")
    head.is_chunked = True


def _expect(head: Head, value: bytes) -> None:
    if value.lower() != b"100-continue":
        raise Refused(417, "the only expectation this server can meet is '100-continue'")
    head.expects_continue = not head.is_http_1_0


def _inference_header_content_length(head: Head, value: bytes) -> None:
    # Only a hint about memory here; the codec checks its value.
    if value.isdigit() and len(value) < 10:
        head.anchor = int(value)


def _ignore(head: Head, value: bytes) -> None:
    pass


_FRAMING: Final = {
    b"content-length": _content_length,
    b"transfer-encoding": _transfer_encoding,
    b"expect": _expect,
    b"inference-header-content-length": _inference_header_content_length,
}
