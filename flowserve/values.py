"""The nouns every room shares: data types, tensor specifications, requests, responses.

Decided here: the fourteen data types and their spellings (configuration, wire, numpy), what kinds of memory there are,
and the two records that cross the engine's door. A tensor's facts are those of its numpy array: dtype and shape; BYTES
is an object array of `bytes`. This file does not know how tensors come from one memory into another (memory/) nor how
they are encoded (http/).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

try:
    from ml_dtypes import bfloat16
except ImportError:  # in a model's own Python environment, where a model that has such tensors is refused
    bfloat16 = np.dtype([("bfloat16", np.uint16)])

Array = np.ndarray[Any, np.dtype[Any]]
Parameter = str | int | float | bool


def fits_64_bits(number: int) -> bool:
    """Whether a parameter may be this integer, signed or unsigned. Python has larger ones, which answers cannot say."""
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
        """By its name: other versions of Python and numpy have other values, and read this too."""
        return getattr, (DType, self.name)


BY_WIRE: Final[Mapping[str, DType]] = {dtype.wire: dtype for dtype in DType}
BY_NUMBER: Final[Mapping[int, DType]] = {dtype.number: dtype for dtype in DType}
BY_NUMPY: Final[Mapping[np.dtype[Any], DType]] = {dtype.numpy: dtype for dtype in DType}


class MemoryKind(enum.Enum):
    """HOST is what every program has; PINNED is host memory that stays where it is, so that a GPU can copy from and to
    it by itself; GPU is a device's own.
    """

    HOST = "host"
    PINNED = "pinned"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Which memory a tensor lies in. `number` is the device's, 0 for the host's; -1 is any GPU, where it is not said
    which.
    """

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
    """What a model or graph promises about one of its inputs or outputs.

    `dims` leaves out the batch dimension; -1 is a dimension that varies. `reshape`, where given, is the shape the
    backend sees instead of `dims`. `labels` is a label file's path relative to the model's folder, "" for none.
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
    """One inference call as the engine takes it. Arrays include the batch dimension where the model batches.

    `outputs` are the requested output names, None for all. `timeout_us` 0 means none. `stamp` orders requests that
    arrive in one turn of the loop: the front end draws it while parsing (trio shuffles tasks that are ready together).
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


@dataclass(slots=True, eq=False)
class Response:
    """One answer: output arrays by name in the model's (or the request's) order, batch dimension included."""

    model: str
    version: int
    outputs: dict[str, Array]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
