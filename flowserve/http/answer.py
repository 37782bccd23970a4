"""An answer's head as bytes, and the answers the server gives by itself.

Decided here: how status and headers are written, and that nothing in a header can start a new line. Framing headers
(Content-Length, Transfer-Encoding, Connection) are chosen by the exchange (exchange.py) and passed in. No Date and no
Server header: nobody who calls a model reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from flowserve.http.errors import error_body

Headers = Iterable[tuple[bytes, bytes]]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Header lines by header, because most answers carry the same ones. Bounded, and emptied when full.
_LINES: Final[dict[tuple[bytes, bytes], bytes]] = {}
_KEPT_LINES: Final = 256
_KEPT_LINE_BYTES: Final = 128
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}


def head_bytes(status: int, headers: Headers, framing: bytes) -> bytes:
    """The head of an answer. `framing` is ready-made header lines, each with its line end."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    lines += [_LINES.get(header) or _line(header) for header in headers]
    lines += (framing, b"\r\n")
    return b"".join(lines)


def _line(header: tuple[bytes, bytes]) -> bytes:
    name, value = header
    if b"\n" in value or b"\r" in value or b"\n" in name:
        raise ValueError(f"a line break in the response header {name!r}")
    line = b"%b: %b\r\n" % header
    if len(line) <= _KEPT_LINE_BYTES:
        if len(_LINES) >= _KEPT_LINES:
            _LINES.clear()
        _LINES[header] = line
    return line


def refusal(status: int, text: str) -> bytes:
    """A whole answer that ends the connection."""
    body = error_body(text)
    framing = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return head_bytes(status, [(b"content-type", b"application/json")], framing) + body
