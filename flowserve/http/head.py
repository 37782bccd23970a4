"""A request's head: bytes become one record, once.

Decided here: which heads are well-formed enough to be served, and what the rest of the server reads of them. The
syntax is llhttp's business (through httptools, in its strict mode); the framing that follows from it is decided here
and nowhere else, so that there is one opinion on where a body ends: exactly one Content-Length, or exactly
"chunked", or no body.

A client's heads are mostly the same bytes again, so records are kept by those bytes (`HeadCache`). A record is
therefore never changed. This file knows no sockets.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote_to_bytes

import httptools

from flowserve.http.limits import Limits, body_too_large

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

    `scope` is the ASGI scope but for what depends on the connection. `content_length` is 0 for no body, and
    meaningless when `is_chunked`. `anchor` is the offset in the body that should be aligned in memory: where the
    first binary tensor starts. `is_plain`: its answer has a body, and nothing is said of the connection in it.
    """

    __slots__ = (
        "anchor",
        "content_length",
        "expects_continue",
        "is_chunked",
        "is_head",
        "is_http_1_0",
        "is_plain",
        "keep_alive",
        "scope",
    )

    def __init__(self, scope: dict[str, Any], *, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_head = scope["method"] == "HEAD"
        self.is_http_1_0 = scope["http_version"] == "1.0"
        self.is_plain = keep_alive and not self.is_head and not self.is_http_1_0
        self.content_length = 0
        self.is_chunked = False
        self.expects_continue = False
        self.anchor = _NO_ANCHOR


class HeadParser:
    """Reads one head, in as many pieces as it comes. Raises `Refused` as soon as it cannot become one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._messages = 0
        self._is_complete = False
        self._has_body = False
        self._keeps_alive = False
        self._parser = httptools.HttpRequestParser(self)

    # What httptools calls.

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

    # What the connection calls.

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
        self._heads: dict[bytes, Head] = {}

    def parse(self, data: bytes) -> Head:
        """The record of a whole head, its empty line included."""
        head = self._heads.get(data)
        if head is None:
            parser = HeadParser(self._limits)
            parser.feed(data)
            head = parser.finish()
            self.keep(data, head)
        return head

    def keep(self, data: bytes, head: Head) -> None:
        """Remember `head` if it is small."""
        if len(data) > _CACHED_HEAD_BYTES:
            return
        if len(self._heads) >= _CACHED_HEADS:
            self._heads.clear()
        self._heads[data] = head


def check_body_size(head: Head, limits: Limits) -> None:
    """Refuse a body that is too large from its announced length alone."""
    if head.content_length > limits.max_body_bytes:
        raise Refused(413, body_too_large(head.content_length, limits.max_body_bytes))


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
    # Only a hint about memory here; whether it makes sense is for the codec to say.
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
