"""Response heads as bytes, and the server's own responses.

Decides how status and headers are written, that no header value can start a new line, and the one shape of an
error's body. Framing headers (Content-Length, Transfer-Encoding, Connection) are chosen by the connection. There is no
Date and no Server header, because clients of models read neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

import orjson

HeaderTuple = tuple[tuple[bytes, bytes], ...]
HeaderList = Iterable[tuple[bytes, bytes]]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Header lines by header, because most responses carry the same ones. Bounded, and emptied when full.
_LINES: Final[dict[tuple[bytes, bytes], bytes]] = {}
_KEPT_LINES: Final = 256
_KEPT_LINE_BYTES: Final = 128
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}


def head_bytes(status: int, headers: HeaderList, framing: bytes) -> bytes:
    """The head of a response. `framing` is ready-made header lines, each with its line end."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    for header in headers:
        lines.append(_LINES.get(header) or _line(header))  # noqa: PERF401  # a comprehension is one more call
    lines += (framing, b"\r\n")
    return b"".join(lines)


def _line(header: tuple[bytes, bytes]) -> bytes:
    name, value = header
    if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
        raise ValueError(f"a line break in the response header {name!r}")
    line = b"%b: %b\r\n" % header
    if len(line) <= _KEPT_LINE_BYTES:
        if len(_LINES) >= _KEPT_LINES:
            _LINES.clear()
        _LINES[header] = line
    return line


def refusal(status: int, text: str) -> bytes:
    """A whole response that ends the connection."""
    body = error_body(text)
    framing = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return head_bytes(status, [(b"content-type", b"application/json")], framing) + body


def error_body(text: str) -> bytes:
    """`{"error": text}`. Text that is not Unicode (a lone surrogate from a client's name) is escaped, not refused."""
    try:
        return orjson.dumps({"error": text})
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": text.encode("utf-8", "backslashreplace").decode("utf-8")})
