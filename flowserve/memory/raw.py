"""Raw tensor encoding of the protocols: little-endian elements in row-major order, each BYTES element after its length.

Decides which shapes are valid, how bytes become an array (a view if their address is aligned for the type) and an array
becomes bytes, and the errors for data that does not fit. Sizes are computed in Python's integers, which do not
overflow, before anything is allocated. Does not know HTTP or gRPC, its callers.

An element of Triton's BYTES tensors is its length as four little-endian bytes, then its bytes: any byte string, NULs
and invalid UTF-8 included, which round-trips exactly. Callers pass the names of input and model for the error messages.
A large BYTES tensor between a client and worker processes stays in this form, as an `EncodedBytes` in place of an
array: its elements become objects only when they are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy import ndarray

from flowserve.errors import Internal, Invalid, TooLarge
from flowserve.values import BY_NUMPY, Array, BytesLike, DType

DIMENSIONS_MAX: Final = 64  # the limit of numpy
_INT64_MAX: Final = 2**63 - 1
COPIED_BYTES_MAX: Final = 4096  # a small copy costs less than a view of one
# BYTES elements of one request, by default. Each is a Python object of 40 bytes and more, beside its contents, and
# takes the interpreter 0.3 us to make.
BYTES_ELEMENTS_MAX: Final = 1 << 16
# A BYTES tensor of more bytes is not decoded on the event loop. A smaller one takes at most 40 ms, if all elements are
# empty.
ENCODED_BYTES_MIN: Final = 1 << 18
# The number of elements of outputs that are encoded on the event loop: up to 10 ms for BYTES, 3 ms for numbers as JSON.
INLINE_ELEMENTS_MAX: Final = 1 << 15
INLINE_OUTPUT_BYTES_MAX: Final = 1 << 20  # of BYTES elements, and of outputs for the client's memory
_DECODED_AT_ONCE: Final = 1 << 16
_ELEMENTS_AT_ONCE: Final = 1 << 12  # between two pauses
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
    """`counts`: the elements of each BYTES input of a request, from its shape. Raises `TooLarge` if their sum exceeds
    `limit`. Called before the elements are created.
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


def decode_large(
    data: BytesLike,
    name: str,
    model: str,
    dtype: DType,
    shape: tuple[int, ...],
    count: int,
    pause: Callable[[], None],
    *,
    stays_encoded: bool,
) -> Array:
    """As `decode`, on a thread. `stays_encoded`: large BYTES are only checked, because a worker process reads them."""
    if not (stays_encoded and dtype is DType.BYTES and len(data) > ENCODED_BYTES_MIN):
        return decode(data, name, model, dtype, shape, count)
    encoded = EncodedBytes.of(data, name, model, shape)
    encoded.checked(pause)
    array: Array = encoded
    return array


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


def encode(array: Array, dtype: DType, pause: Callable[[], None] | None = None) -> bytes | memoryview:
    """An output as bytes. On a thread with a `pause`, which is called between steps. Raises `Internal` for an
    `EncodedBytes` that is not valid.
    """
    if dtype is not DType.BYTES:
        return block(array)
    if isinstance(array, EncodedBytes):
        return array.checked(pause or _no_pause)
    return encode_bytes(array) if pause is None else encode_in_steps(array, pause)


def block(array: Array) -> bytes | memoryview:
    """The bytes of a numeric array: a view if it is contiguous and large, otherwise a copy."""
    if array.nbytes <= COPIED_BYTES_MAX:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ---------------------------------------------------------------------------------------------- BYTES


def encode_bytes(array: Array) -> bytes:
    """The elements of a numpy array (of bytes, str or objects) in row-major order, each encoded by `to_bytes`."""
    pack = _LENGTH.pack
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        data = element if type(element) is bytes else to_bytes(element)
        parts.append(pack(len(data)))
        parts.append(data)
    return b"".join(parts)


def encode_in_steps(array: Array, pause: Callable[[], None]) -> memoryview:
    """As `encode_bytes`, with a call of `pause` between steps."""
    flat = array.ravel()
    pieces: list[bytes] = []
    for first in range(0, flat.size, _ELEMENTS_AT_ONCE):
        pieces.append(encode_bytes(flat[first : first + _ELEMENTS_AT_ONCE]))
        pause()
    data = np.empty(sum(map(len, pieces)), np.uint8).data  # filled step by step, unlike a join
    start = 0
    for piece in pieces:
        data[start : start + len(piece)] = piece
        start += len(piece)
        pause()
    return data


def flat_bytes(array: Array) -> Array:
    """The bytes of any array, one-dimensional: encoded for BYTES, else a view if the array is contiguous."""
    if isinstance(array, EncodedBytes):
        return np.frombuffer(array.data, np.uint8)
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


def bytes_in(array: Array) -> int:
    """The approximate size of all elements of a BYTES output."""
    if isinstance(array, EncodedBytes):
        return array.nbytes
    elements = array.ravel().tolist()
    try:
        return sum(map(len, elements))
    except TypeError:  # models may return other objects
        return sum(len(one) for one in elements if isinstance(one, (bytes, str)))  # for the oldest Python of models


def is_long(array: Array) -> bool:
    """Whether to encode a BYTES output on a thread."""
    return array.size > INLINE_ELEMENTS_MAX or bytes_in(array) > INLINE_OUTPUT_BYTES_MAX


class _Flags(NamedTuple):
    """The flags of an `EncodedBytes`, for code that examines an array's flags before it uses the memory: it has none
    for elements.
    """

    aligned: bool = False
    c_contiguous: bool = False
    owndata: bool = False
    writeable: bool = False


class _Encoded:
    """The wire form of a whole tensor of `count` elements, and the known offsets of elements."""

    __slots__ = ("count", "data", "is_output", "model", "name", "offsets")

    def __init__(self, data: BytesLike, count: int, name: str, model: str, *, is_output: bool) -> None:
        self.data = memoryview(data).cast("B")
        self.count = count
        self.name = name
        self.model = model
        self.is_output = is_output
        self.offsets = {0: 0}

    def offset(self, element: int, pause: Callable[[], None]) -> int:
        """The offset of that element. Raises as `refuse` does."""
        known, position = max(one for one in [*self.offsets.items()] if one[0] <= element)
        data, unpack = self.data, _LENGTH.unpack_from
        try:
            for first in range(known, element, _ELEMENTS_AT_ONCE):
                for _ in range(min(_ELEMENTS_AT_ONCE, element - first)):
                    position += 4 + unpack(data, position)[0]
                pause()
        except struct.error:
            self.refuse()
        if position > len(data) or (element == self.count and position < len(data)):
            self.refuse()
        self.offsets[element] = position
        return position

    def refuse(self) -> None:
        """Raises `Invalid` for an input, `Internal` for an output: the data does not have its number of elements."""
        try:
            decode_bytes(self.data, self.count, name=self.name, model=self.model)
        except Invalid as error:
            if not self.is_output:
                raise
            raise Internal(f"model '{self.model}' made output '{self.name}' of invalid BYTES: {error}") from None


class EncodedBytes:
    """A large BYTES tensor in its wire form, in place of an array of objects: it has an array's shape and those of its
    methods that need no elements; `copy` and `numpy.asarray` decode it, on the thread of the reader.
    """

    __slots__ = ("_encoded", "_first", "shape", "size")
    dtype: Final = DType.BYTES.numpy
    flags: Final = _Flags()
    base: Final = None

    def __init__(self, encoded: _Encoded, first: int, shape: tuple[int, ...]) -> None:
        self._encoded = encoded
        self._first = first
        self.shape = shape
        self.size = math.prod(shape)

    @classmethod
    def of(cls, data: BytesLike, name: str, model: str, shape: tuple[int, ...], *, is_output: bool = False) -> Any:
        """The tensor of this name, input of a model or its output, encoded by the whole of `data`, which is not checked
        here. Declared as an array for its readers. Raises `Invalid` for a shape that numpy does not support.
        """
        stand_in(name, DType.BYTES, shape)
        return cls(_Encoded(data, math.prod(shape), name, model, is_output=is_output), 0, shape)

    @property
    def data(self) -> memoryview:
        """The elements in wire form. Their lengths are not checked if this is the whole tensor."""
        encoded = self._encoded
        if self.size == encoded.count:
            return encoded.data
        return self.checked(_no_pause)

    def checked(self, pause: Callable[[], None]) -> memoryview:
        """The same, valid. Raises `Invalid` for an input, `Internal` for an output of a model."""
        encoded = self._encoded
        start = encoded.offset(self._first, pause)
        return encoded.data[start : encoded.offset(self._first + self.size, pause)]

    def copy(self) -> Array:
        """Its elements: an array of `bytes`. Raises as `checked` does."""
        data = self.checked(_no_pause)
        encoded = self._encoded
        return decode_bytes(data, self.size, name=encoded.name, model=encoded.model).reshape(self.shape)

    def in_own_memory(self) -> Any:
        """A copy, still encoded."""
        encoded = self._encoded
        return EncodedBytes.of(bytes(self.data), encoded.name, encoded.model, self.shape, is_output=encoded.is_output)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The approximate size: a share of the whole tensor's bytes."""
        return len(self._encoded.data) * self.size // (self._encoded.count or 1)

    def reshape(self, *shape: Any) -> EncodedBytes:
        """The same elements in another shape."""
        wanted = stand_in(self._encoded.name, DType.BYTES, self.shape).reshape(*shape).shape
        return EncodedBytes(self._encoded, self._first, wanted)

    def ravel(self) -> Array:
        """Its elements in one dimension, decoded."""
        return self.copy().reshape(-1)

    def tolist(self) -> Any:
        """As `numpy.ndarray.tolist`."""
        return self.copy().tolist()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> EncodedBytes:
        """Some rows."""
        start, stop, _ = rows.indices(len(self))
        row = math.prod(self.shape[1:])
        return EncodedBytes(self._encoded, self._first + start * row, (max(stop - start, 0), *self.shape[1:]))

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self.copy()


def _no_pause() -> None:
    """The `pause` of data that is decoded without pauses."""


def to_bytes(element: object) -> bytes:
    """One element: bytes as they are, str as UTF-8, anything else as its `str()`, as Triton's clients do it."""
    if isinstance(element, bytes):
        return bytes(element)
    # With `surrogateescape`, Python decodes invalid UTF-8 into surrogates; this restores the original bytes.
    return str(element).encode(errors="surrogateescape")


def _unshapeable(name: str, error: ValueError) -> Invalid:
    return Invalid(f"the shape of input '{name}' cannot be used: {error}")
