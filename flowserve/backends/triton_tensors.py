"""Tensors as a Python model written for Triton holds them, in whatever memory they lie.

Decided here: which arrays a model may write to, and how tensors come from and go to other libraries. On the host a
tensor is a numpy array. One on a GPU is never one by itself: a model that wants it there takes it by DLPack, and what a
model answers with from there is brought to the host when its answer is taken, unless it may stay. Names that start with
an underscore are not for models.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from flowserve.errors import FlowserveError
from flowserve.graph.conversion import reshaped
from flowserve.memory import dlpack
from flowserve.memory.dlpack import Foreign
from flowserve.memory.landing import landed
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor as _Rows
from flowserve.values import BY_NUMPY, Array, DType, TensorSpec

TRITONSERVER_MEMORY_CPU: Final = 0
TRITONSERVER_MEMORY_GPU: Final = 1


class TritonModelException(Exception):
    """What Triton raises inside models, and what they may raise themselves."""


class OnGpu(TritonModelException):
    """A tensor's elements were asked for as numpy's, and lie on a GPU."""


class MemoryType:
    """Triton's constants."""

    TRITONSERVER_MEMORY_CPU: Final = TRITONSERVER_MEMORY_CPU
    TRITONSERVER_MEMORY_GPU: Final = TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Where a model would like the answers to a request it makes. It gets them on the host, which it must be ready for
    on Triton too.
    """

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class Tensor:
    """A named array. `numpy_array` is kept as it is; whoever answers with it need not keep it unchanged afterwards."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(numpy_array) is not np.ndarray:
            if not isinstance(numpy_array, np.ndarray):
                raise TypeError(f"Tensor '{name}' wants a numpy array, got {type(numpy_array).__name__}")
            numpy_array = np.asarray(numpy_array)  # its elements, whatever a masked array makes of them
        self._name = name
        self._array: Array | None = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The tensor as a writable array; BYTES tensors are object arrays of `bytes`."""
        assert self._array is not None
        return self._array

    def dtype(self) -> np.dtype[Any]:
        return self.as_numpy().dtype

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self.dtype())

    def shape(self) -> list[int]:
        return list(self.as_numpy().shape)

    def is_cpu(self) -> bool:
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of any object that speaks DLPack, or of a DLPack capsule."""
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == dlpack.CPU:
            try:
                return Tensor(name, np.from_dlpack(tensor))
            except (BufferError, RuntimeError):
                pass  # of a type that numpy does not take so, but may have
        source = tensor if hasattr(tensor, "__dlpack__") else None
        found = _described(tensor if source is None else source.__dlpack__())
        return Tensor(name, found.on_host()) if found.device < 0 else GpuTensor(name, found, source)

    def to_dlpack(self) -> Any:
        """A DLPack capsule over this tensor's memory."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        array = self.as_numpy()
        if array.dtype == DType.BF16.numpy:
            return dlpack.capsule_of(Foreign(array.ctypes.data, array.dtype, array.shape, -1, array))
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


class GpuTensor(Tensor):
    """A tensor that lies on a GPU."""

    __slots__ = ("_source", "_there")

    def __init__(self, name: str, there: Foreign, source: Any = None) -> None:
        """`source`: what the tensor came from, where that orders whoever reads it."""
        self._name = name
        self._array = None
        self._there = there
        self._source = source

    def as_numpy(self) -> NoReturn:
        """Raises TritonModelException: it is not on the host."""
        raise OnGpu("Tensor is stored in GPU and cannot be converted to NumPy.")

    def dtype(self) -> np.dtype[Any]:
        return self._there.dtype

    def shape(self) -> list[int]:
        return list(self._there.shape)

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, **options: Any) -> Any:
        return dlpack.capsule_of(self._there) if self._source is None else self._source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._there.device


class _Input(Tensor):
    """A tensor of a request: rows of a block, looked at when the model asks for them."""

    __slots__ = ("_may_write", "_rows", "_spec")

    def __init__(self, spec: TensorSpec, rows: _Rows, may_write: bool) -> None:
        self._name = spec.name
        self._array = None
        self._spec = spec
        self._rows = rows
        self._may_write = may_write

    def as_numpy(self) -> Array:
        array = self._array
        if array is None:
            array = self._rows.array
            # A model may write into its input. The memory itself is given only to its last reader, everybody else gets
            # a copy; so no two arrays that somebody may write to ever share memory.
            flags = array.flags
            if not (self._may_write and flags.writeable and flags.aligned):
                array = _copy(array)
            if self._spec.reshape is not None:
                array = array.reshape(inner_shape(array.shape, self._spec))
            self._array = array
        return array

    def dtype(self) -> np.dtype[Any]:
        return self._rows.block.dtype

    def shape(self) -> list[int]:
        shape = self._rows.shape
        return list(shape if self._spec.reshape is None else inner_shape(shape, self._spec))


def on_host(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that lies on the host."""
    return Tensor(tensor._name, landed(tensor._there)) if isinstance(tensor, GpuTensor) else tensor


def _described(capsule: Any) -> Foreign:
    try:
        return dlpack.described(capsule)
    except FlowserveError as error:
        raise TritonModelException(str(error)) from error


def numpy_to_triton_type(data_type: Any) -> int:
    """The number in ModelConfig of a numpy dtype or scalar type; strings of any kind are TYPE_STRING."""
    dtype = np.dtype(data_type)
    return DType.BYTES.number if dtype.kind in "SU" else BY_NUMPY[dtype].number


def _copy(array: Array) -> Array:
    if array.nbytes < POOLED_BYTES_MIN or array.dtype.hasobject:
        return array.copy()
    copy = HOST.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def inner_shape(shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """The shape a model sees where the configuration reshapes an input."""
    assert spec.reshape is not None
    outer = len(shape) - len(spec.dims)
    return shape[:outer] + reshaped(shape[outer:], spec.dims, spec.reshape)
