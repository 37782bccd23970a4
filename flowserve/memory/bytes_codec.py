"""Triton's BYTES encoding: each element is its length as four little-endian bytes, then its bytes.

Decided here: both directions, and what is wrong with bytes that do not follow it. An element is any bytes at all,
NULs and broken UTF-8 included, and comes back exactly. This file does not know where the bytes came from; its callers
say which input of which model they read.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.values import Array

_LENGTH: Final = struct.Struct("<I")


def encode(array: Array) -> bytes:
    """The elements of `array` (of bytes, str or objects) in row-major order, each as `to_bytes` has it."""
    pack = _LENGTH.pack
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        data = element if type(element) is bytes else to_bytes(element)
        parts.append(pack(len(data)))
        parts.append(data)
    return b"".join(parts)


def decode(buffer: bytes | bytearray | memoryview, count: int, *, name: str, model: str) -> Array:
    """The `count` elements of `buffer`, as a one-dimensional object array of `bytes`.

    Raises `Invalid`, naming the input `name` and the `model`, when the buffer holds more or fewer elements or ends
    inside one.
    """
    view = memoryview(buffer).cast("B")
    end = len(view)
    unpack = _LENGTH.unpack_from
    elements: list[bytes] = []
    position = 0
    # Runs over the buffer, not to `count`: a stated count of 2**60 must cost nothing.
    while position < end:
        if end - position < 4:
            raise Invalid(
                f"incomplete string length indicator for inference input '{name}' for model '{model}', "
                f"expecting 4 bytes but only {end - position} bytes available"
            )
        if len(elements) == count:
            raise Invalid(
                f"unexpected number of string elements {count + 1} for inference input '{name}' for model '{model}', "
                f"expecting {count}"
            )
        start = position + 4
        position = start + unpack(view, position)[0]
        if position > end:
            raise Invalid(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {position - start} but only {end - start} bytes available"
            )
        elements.append(bytes(view[start:position]))
    if len(elements) != count:
        raise Invalid(
            f"expected {count} string elements for inference input '{name}' for model '{model}', got {len(elements)}"
        )
    array = np.empty(count, np.object_)
    array[:] = elements
    return array


def to_bytes(element: object) -> bytes:
    """One element: bytes as they are, str as UTF-8, anything else as its `str()`, as Triton's clients do it."""
    if isinstance(element, bytes):
        return bytes(element)
    # Python reads broken UTF-8 into surrogates where it is asked to keep them; they go back to what they were.
    return str(element).encode(errors="surrogateescape")
