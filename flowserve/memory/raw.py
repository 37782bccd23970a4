"""Raw tensor encoding of the protocols: little-endian elements in row-major order, each BYTES element after its length.

Decides which shapes are valid, how bytes become an array (a view if their address is aligned for the type) and an array
becomes bytes, and the errors for data that does not fit. Sizes are computed in Python's integers, which do not
overflow, before anything is allocated. Does not know HTTP or gRPC, its callers.

An element of Triton's BYTES tensors is its length as four little-endian bytes, then its bytes: any byte string, NULs
and invalid UTF-8 included, which round-trips exactly. Callers pass the names of input and model for the error messages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy import ndarray

from flowserve.errors import Internal, Invalid, TooLarge
from flowserve.values import BY_NUMPY, Array, BytesLike, DType

DIMENSIONS_MAX: Final = 64  # numpy's
_INT64_MAX: Final = 2**63 - 1
COPIED_BYTES_MAX: Final = 4096  # a small copy costs less than a view of one
# BYTES elements of one request, by default. Each is a Python object, and the event loop works 0.3 us for each where it
# encodes them for a worker process, beside the copying of their bytes.
BYTES_ELEMENTS_MAX: Final = 1 << 16
_DECODED_AT_ONCE: Final = 1 << 16
_LENGTH: Final = struct.Struct("<I")


def element_count(name: str, shape: tuple[int, ...], dtype: DType) -> int:
    """The number of elements of `shape`. Raises `Invalid` if it exceeds 64-bit sizes."""
    if len(shape) > DIMENSIONS_MAX:  # checked first: the product of very many dimensions takes minutes
        raise Invalid(
            f"the shape of input '{name}' cannot be used: it has {len(shape)} dimensions, and {DIMENSIONS_MAX} are the "
            "most"
        )
    count = math.prod(shape)
    if count > _INT64_MAX or max(shape, default=0) > _INT64_MAX:
        raise Invalid(
            f"the shape {list(shape)} of input '{name}' causes total element count to exceed "
            f"maximum size of {_INT64_MAX}"
        )
    if count * dtype.itemsize > _INT64_MAX:
        raise Invalid(f"byte size overflow for input '{name}': {count} elements of {dtype}")
    return count


def check_size(name: str, model: str, dtype: DType, count: int, nbytes: int) -> None:
    """Raises `Invalid` if `nbytes` cannot be the size of `count` elements. The BYTES elements of data that is large
    enough are counted while decoding.
    """
    if dtype is DType.BYTES:
        if nbytes < count * _LENGTH.size:
            raise Invalid(
                f"expected {count} string elements for inference input '{name}' for model '{model}', got "
                f"{nbytes // _LENGTH.size} at most, in {nbytes} bytes"
            )
    elif nbytes != count * dtype.itemsize:
        raise Invalid(
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * dtype.itemsize}, got {nbytes}"
        )


def check_bytes_elements(counts: Iterable[int], model: str, limit: int = BYTES_ELEMENTS_MAX) -> None:
    """`counts`: the elements of each BYTES input of a request, from its shape. Raises `TooLarge` if they are more than
    `limit` together. Called before the elements are made.
    """
    count = sum(counts)
    if count > limit:
        raise TooLarge(
            f"the BYTES inputs of the request for model '{model}' have {count} elements, at most {limit} are accepted "
            "(--max-bytes-elements)"
        )


def stand_in(name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
    """An array of this type and shape that takes no memory, to check an input before its data is read. Raises `Invalid`
    for a shape that numpy does not support.
    """
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError as error:
        raise _unshapeable(name, error) from None


def decode(data: BytesLike, name: str, model: str, dtype: DType, shape: tuple[int, ...], count: int) -> Array:
    """The input encoded by the whole of `data`, whose size was checked. Raises `Invalid`."""
    if dtype is DType.BYTES:
        return shaped(decode_bytes(data, count, name=name, model=model), name, shape)
    return numbers(data, 0, name, dtype, shape, count)


def numbers(data: BytesLike, offset: int, name: str, dtype: DType, shape: tuple[int, ...], count: int) -> Array:
    """The input of any type but BYTES that begins at `offset` of `data`. Raises `Invalid`."""
    if count == 0:
        return shaped(np.empty(0, dtype.numpy), name, shape)
    if dtype is DType.BOOL:
        # Every byte except 0 is true, but numpy's own routines rely on 0 and 1.
        return shaped(np.frombuffer(data, np.uint8, count, offset) != 0, name, shape)
    try:
        array: Array = np.ndarray(shape, dtype.numpy, data, offset)
    except ValueError as error:
        raise _unshapeable(name, error) from None
    return array if array.flags.aligned else array.copy()


class Extent(NamedTuple):
    """Precomputed position of a numeric input in a body. `start` is in bytes from the body's first input."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int


def numbers_at(data: BytesLike, offset: int, extents: Iterable[Extent]) -> dict[str, Array]:
    """All inputs of a body whose first input begins at `offset`, each as `numbers` would decode it. `data` is long
    enough for all; no input is BOOL or empty. Raises `Invalid`.
    """
    arrays: dict[str, Array] = {}
    for name, shape, dtype, start in extents:
        try:
            array: Array = ndarray(shape, dtype, data, offset + start)
        except ValueError as error:
            raise _unshapeable(name, error) from None
        arrays[name] = array if array.flags.aligned else array.copy()
    return arrays


def shaped(flat: Array, name: str, shape: tuple[int, ...]) -> Array:
    """`flat` in the shape of input `name`. Raises `Invalid` for a shape that numpy does not support."""
    try:
        return flat.reshape(shape)
    except ValueError as error:
        raise _unshapeable(name, error) from None


def datatype_of(array: Array, name: str, model: str) -> DType:
    """The data type of output `name`. Raises `Internal` for a numpy type without a data type."""
    dtype = BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise Internal(f"model '{model}' made output '{name}' of numpy type {array.dtype}, which no datatype is")
    return dtype


def encode(array: Array, dtype: DType) -> bytes | memoryview:
    """An output as bytes."""
    return encode_bytes(array) if dtype is DType.BYTES else block(array)


def block(array: Array) -> bytes | memoryview:
    """The bytes of a numeric array: a view if it is contiguous and large, otherwise a copy."""
    if array.nbytes <= COPIED_BYTES_MAX:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ---------------------------------------------------------------------------------------------- BYTES


def encode_bytes(array: Array) -> bytes:
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
        return np.frombuffer(encode_bytes(array), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decode_bytes(buffer: BytesLike, count: int, *, name: str, model: str) -> Array:
    """The `count` elements of `buffer`, as a one-dimensional object array of `bytes`.

    Raises `Invalid`, naming the input `name` and the `model`, when the buffer holds more or fewer elements or ends
    inside one.
    """
    view = memoryview(buffer).cast("B")
    end = len(view)
    unpack = _LENGTH.unpack_from
    elements: list[bytes] = []
    position = 0
    # `data` are the bytes from `begin` to `known`: slices of bytes are made in a third of the time of a memoryview's.
    data, begin, known = b"", 0, 0
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
        if start > known:
            data, begin = bytes(view[position : position + _DECODED_AT_ONCE]), position
            known = begin + len(data)
        position = start + unpack(data, position - begin)[0]
        if position > end:
            raise Invalid(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {position - start} but only {end - start} bytes available"
            )
        elements.append(data[start - begin : position - begin] if position <= known else bytes(view[start:position]))
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


def _unshapeable(name: str, error: ValueError) -> Invalid:
    return Invalid(f"the shape of input '{name}' cannot be used: {error}")
