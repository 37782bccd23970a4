"""Compressed bodies, both ways: gzip and deflate.

Decides the supported encodings, which one an Accept-Encoding prefers, when a response is worth compressing, and that
expansion stops at the limit on bodies, regardless of the compressed content. As in Triton, a body may be a gzip or a
zlib stream under either name. Nothing here waits; large bodies are work for a thread.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from flowserve.errors import Invalid, TooLarge
from flowserve.http.server.request_parser import body_too_large
from flowserve.values import BytesLike

Headers = Sequence[tuple[bytes, bytes]]

CONTENT_ENCODING: Final = b"content-encoding"
ACCEPT_ENCODING: Final = b"accept-encoding"
GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"
_IDENTITY: Final = b"identity"
_READ: Final = frozenset({GZIP, b"x-gzip", DEFLATE})
_WINDOW: Final = {GZIP: 31, DEFLATE: 15}  # what zlib calls the two containers
_EITHER: Final = 47
_WORTH_BYTES: Final = 1024  # below, the headers are most of what is sent
_PIECE_BYTES: Final = 65_536  # expanded at a time, so that the rest of a large body is not copied again and again
_EXPANDED_BYTES: Final = 1 << 20  # of output per call of zlib
_SAMPLE_BYTES: Final = 8192
_WORTH_RATIO: Final = 0.9
_FAST: Final = 1  # level 6 takes three times as long for a few per cent
_QUALITY: Final = re.compile(rb"q\s*=\s*([01](?:\.[0-9]{0,3})?)")


class UnknownEncoding(Invalid):
    """An unknown Content-Encoding: 415."""


def is_compressed(headers: Headers) -> bool:
    """Whether the request's body is compressed. Raises `UnknownEncoding`."""
    for name, value in headers:
        if name == CONTENT_ENCODING:
            encoding = value.strip().lower()
            if encoding in _READ:
                return True
            if encoding not in (b"", _IDENTITY):
                text = f"unknown Content-Encoding '{encoding[:40].decode('latin-1')}'"
                raise UnknownEncoding(f"{text}; send the body as it is, or as gzip or deflate")
    return False


def wanted(headers: Headers) -> bytes:
    """The encoding of the response, b"" for none."""
    return next((accepted(value) for name, value in headers if name == ACCEPT_ENCODING), b"")


def accepted(value: bytes) -> bytes:
    """The encoding an Accept-Encoding prefers, the first of equals; b"" for none."""
    best, best_quality = b"", 0.0
    for one in value.lower().split(b","):
        encoding, _, parameters = one.partition(b";")
        encoding = encoding.strip()
        if encoding not in _WINDOW and encoding != _IDENTITY:
            continue
        quality = 1.0
        if parameters:
            found = _QUALITY.fullmatch(parameters.strip())
            quality = float(found[1]) if found else 0.0
        if quality > best_quality:
            best, best_quality = encoding, quality
    return best if best in _WINDOW else b""


def expand(body: BytesLike, limit: int, reserve: Callable[[int], object] = lambda nbytes: None) -> bytearray:
    """The expanded body. `reserve` is called with the bytes of each part of it, and may raise. Raises `TooLarge` past
    `limit` bytes, `Invalid` for a body that is not exactly one whole stream (millions of empty streams in one body
    would take hours).
    """
    stream = zlib.decompressobj(_EITHER)
    made = bytearray()
    source = memoryview(body)
    try:
        for start in range(0, len(source), _PIECE_BYTES):
            piece: BytesLike = source[start : start + _PIECE_BYTES]
            while piece:
                expanded = stream.decompress(piece, _EXPANDED_BYTES)
                reserve(len(expanded))
                made += expanded
                if len(made) > limit:
                    raise TooLarge(f"decompressed {body_too_large(None, limit)}")
                if stream.eof:
                    if stream.unused_data or start + _PIECE_BYTES < len(source):
                        raise Invalid("the request body goes on after its compressed data ends")
                    return made
                piece = stream.unconsumed_tail
    except zlib.error as error:
        raise Invalid(f"the request body is not what its Content-Encoding says: {error}") from None
    raise Invalid("the request body is cut short: its compressed data goes on")


def compress(parts: Sequence[Any], encoding: bytes) -> bytes | None:
    """The joined `parts` in that encoding, None if it would save too little: too small, or not compressible."""
    size = sum(map(len, parts))
    if size < _WORTH_BYTES:
        return None
    body = b"".join(parts)
    # A sample from the middle: a response begins with its JSON, which does not represent the tensors after it.
    start = max(size // 2 - _SAMPLE_BYTES // 2, 0)
    sample = body[start : start + _SAMPLE_BYTES]
    if len(zlib.compress(sample, _FAST)) > _WORTH_RATIO * len(sample):
        return None
    stream = zlib.compressobj(_FAST, zlib.DEFLATED, _WINDOW[encoding])
    made = stream.compress(body) + stream.flush()
    return made if len(made) < size else None
