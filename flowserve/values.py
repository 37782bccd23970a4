"""Records that all packages share: data types, tensor specifications, memory places, requests, responses.

Decides the fourteen data types and their spellings (configuration, wire, numpy), the kinds of memory, the two records
that enter and leave the engine, whether a shape agrees with dims, and how messages write a shape. A tensor's dtype and
shape are those of its numpy array; BYTES is an object array of `bytes`. Does not know how tensors move between memories
(`memory`) or how they are encoded (`http`, `grpc`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

try:
    from ml_dtypes import bfloat16
except ImportError:  # in a model's own Python environment; a model with such tensors is refused there
    bfloat16 = np.dtype([("bfloat16", np.uint16)])

Array = np.ndarray[Any, np.dtype[Any]]
BytesLike = bytes | bytearray | memoryview
Parameter = str | int | float | bool


def fits_64_bits(number: int) -> bool:
    """Whether a parameter can have this value: a signed or unsigned 64-bit integer, as responses encode it."""
    return -(2**63) <= number < 2**64


class DType(enum.Enum):
    """A tensor's element type.

    `wire` is the KServe v2 name ("FP32", "BYTES"); `config_name` is the ModelConfig name ("TYPE_FP32", "TYPE_STRING");
    `number` the ModelConfig enum number; `numpy` the numpy dtype; `itemsize` bytes per element, 0 for BYTES.
    """

    BOOL = ("BOOL", 1, np.dtype(np.bool_))
    UINT8 = ("UINT8", 2, np.dtype(np.uint8))
    UINT16 = ("UINT16", 3, np.dtype(np.uint16))
    UINT32 = ("UINT32", 4, np.dtype(np.uint32))
    UINT64 = ("UINT64", 5, np.dtype(np.uint64))
    INT8 = ("INT8", 6, np.dtype(np.int8))
    INT16 = ("INT16", 7, np.dtype(np.int16))
    INT32 = ("INT32", 8, np.dtype(np.int32))
    INT64 = ("INT64", 9, np.dtype(np.int64))
    FP16 = ("FP16", 10, np.dtype(np.float16))
    FP32 = ("FP32", 11, np.dtype(np.float32))
    FP64 = ("FP64", 12, np.dtype(np.float64))
    BYTES = ("BYTES", 13, np.dtype(np.object_))
    BF16 = ("BF16", 14, np.dtype(bfloat16))

    def __init__(self, wire: str, number: int, numpy: np.dtype[Any]) -> None:
        self.wire = wire
        self.number = number
        self.numpy = numpy
        self.itemsize: int = 0 if wire == "BYTES" else numpy.itemsize
        self.config_name = "TYPE_STRING" if wire == "BYTES" else f"TYPE_{wire}"

    def __str__(self) -> str:
        return self.wire

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle by name: other versions of Python and numpy have other values, and unpickle this too."""
        return getattr, (DType, self.name)


BY_WIRE: Final[Mapping[str, DType]] = {dtype.wire: dtype for dtype in DType}
BY_NUMBER: Final[Mapping[int, DType]] = {dtype.number: dtype for dtype in DType}
BY_NUMPY: Final[Mapping[np.dtype[Any], DType]] = {dtype.numpy: dtype for dtype in DType}


class MemoryKind(enum.Enum):
    """HOST is ordinary memory; PINNED is page-locked host memory, which a GPU can read and write directly; GPU is
    device memory.
    """

    HOST = "host"
    PINNED = "pinned"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """The memory that holds a tensor. `number` is the device number, 0 for host memory; -1 means any GPU."""

    kind: MemoryKind
    number: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.kind is MemoryKind.GPU

    def __str__(self) -> str:
        return f"gpu{self.number}" if self.is_gpu and self.number >= 0 else self.kind.value


HOST_MEMORY: Final = MemoryPlace(MemoryKind.HOST)
PINNED_MEMORY: Final = MemoryPlace(MemoryKind.PINNED)
ANY_GPU: Final = MemoryPlace(MemoryKind.GPU, -1)


def gpu_memory(number: int) -> MemoryPlace:
    """The memory of one GPU."""
    return MemoryPlace(MemoryKind.GPU, number)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The declaration of one input or output of a model or graph.

    `dims` excludes the batch dimension; -1 is a varying dimension. `reshape`, if given, is the shape for the backend
    instead of `dims`. `labels` is a label file's path relative to the model's folder, "" for none.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    reshape: tuple[int, ...] | None = None
    labels: str = ""

    @property
    def is_variable(self) -> bool:
        return -1 in self.dims


@dataclass(slots=True, eq=False)
class Request:
    """One inference call to the engine. Arrays include the batch dimension if the model batches.

    `outputs` are the requested output names, None for all. `timeout_us` 0 means none. `stamp` orders requests that
    arrive in one iteration of the event loop: the front end assigns it while parsing, because trio shuffles tasks that
    become ready together. `trace_context` is the `traceparent` of the span that the request belongs to: its caller's,
    or its own if it is exported as spans; "" for none.
    """

    inputs: dict[str, Array]
    outputs: tuple[str, ...] | None = None
    id: str = ""
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    stamp: int = 0
    trace_context: str = ""


@dataclass(slots=True, eq=False)
class Response:
    """One response: output arrays by name in the model's (or the request's) order, batch dimension included.
    `is_final`: the final flag came with it, so that no response of its request follows.
    """

    model: str
    version: int
    outputs: dict[str, Array]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    is_final: bool = True


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether `dims` allow `shape`, both without batch dimension; -1 allows any size."""
    # Most models have fixed shapes: then comparing two tuples suffices.
    if shape == dims:
        return True
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - a generator costs more than the comparison
        if dim not in (-1, size):
            return False
    return True


def shape_text(shape: Iterable[int]) -> str:
    """The text of a shape, as Triton writes it: `[-1,3,224]`."""
    return f"[{','.join(str(size) for size in shape)}]"


def unexpected_shape(tensor: str, model: str, dims: Sequence[int], shape: Iterable[int], *, batches: bool) -> str:
    """Triton's text about an input of another shape than its `dims` (those of one row if the model batches)."""
    expected = shape_text((-1, *dims) if batches else dims)
    text = f"unexpected shape for input '{tensor}' for model '{model}'. Expected {expected}, got {shape_text(shape)}"
    return f"{text}. {_NOTE}" if batches else text


_NOTE: Final = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def implied_shape(dims: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The shape with these dims that `count` elements in a flat list have: the last varying dimension takes the rest,
    other varying ones are 1. None if the count does not fit.
    """
    shape = [max(dim, 1) for dim in dims]
    varying = [axis for axis, dim in enumerate(dims) if dim == -1]
    if varying:
        shape[varying[-1]] = count // math.prod(shape)
    return tuple(shape) if math.prod(shape) == count else None
