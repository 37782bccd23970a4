"""How a response is written: its head, its framing, and the responses of the server itself.

Decides how status and headers become bytes, that no header value can start a new line, the one shape of an error's body
(`{"error": text}`), and that a refused request is told when to try again. The Server header has the version; there is
no Date, because clients of models do not read it. Does not know connections or routes. Called by the connection, the
server and the routes.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Final

import orjson

from flowserve.version import __version__

HeaderTuple = tuple[tuple[bytes, bytes], ...]
RETRY_AFTER: Final = (b"retry-after", b"1")  # seconds
NO_MEMORY: Final = "the server has no memory for this request"
_SERVER: Final = f"server: flowserve/{__version__}\r\n".encode("ascii")
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") + _SERVER for status in HTTPStatus
}


@lru_cache(256)  # most responses carry the same headers
def head_bytes(status: int, headers: HeaderTuple, framing: bytes) -> bytes:
    """The head of a response. `framing` is ready-made header lines, each with its line end. Raises ValueError for a
    line break in a header.
    """
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n%b" % (status, _SERVER)]
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
            raise ValueError(f"a line break in the response header {name!r}")
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join([*lines, framing, b"\r\n"])


def refusal(status: int, text: str) -> bytes:
    """A whole response that ends the connection. With 503 it says when to try again."""
    body = error_body(text)
    framing = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    headers: HeaderTuple = ((b"content-type", b"application/json"),)
    return head_bytes(status, (*headers, RETRY_AFTER) if status == 503 else headers, framing) + body


def no_memory(error: MemoryError) -> str:
    """The text of the response to a request for which there is no memory, and of the log."""
    return f"{NO_MEMORY}: {error}" if str(error) else NO_MEMORY


def error_body(text: str) -> bytes:
    """`{"error": text}`. Text that is not Unicode (a lone surrogate from a client's name) is escaped, not refused."""
    try:
        return orjson.dumps({"error": text})
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": text.encode("utf-8", "backslashreplace").decode("utf-8")})
