"""Codec of Triton's BYTES tensors: each element is its length as four little-endian bytes, then its bytes.

Decides both directions, and the error for malformed data. An element is any byte string, NULs and invalid UTF-8
included, and round-trips exactly. Does not know where the bytes come from: callers pass the names of input and model
for the error message.
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


def flat_bytes(array: Array) -> Array:
    """The bytes of any array, one-dimensional: encoded for BYTES, else a view if the array is contiguous."""
    if array.dtype.hasobject:
        return np.frombuffer(encode(array), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
    # With `surrogateescape`, Python decodes invalid UTF-8 into surrogates; this restores the original bytes.
    return str(element).encode(errors="surrogateescape")
