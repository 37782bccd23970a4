"""Limits on the size and duration of requests.

Decides the limits and their defaults. Sizes are bytes, times seconds. connection.py decides the effect of exceeding
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_BODY_BYTES: Final = 1 << 26
MAX_CHUNKS: Final = 65_536


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
