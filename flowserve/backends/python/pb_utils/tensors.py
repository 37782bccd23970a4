"""Tensors of Python models, with Triton's names, in host memory or on a GPU.

Decides which arrays a model may write to, and how tensors are exchanged with other libraries. A tensor in host memory
is a numpy array. A tensor on a GPU stays there: a model takes it by DLPack, and a response's tensor is copied to the
host when the response is taken over, unless it may stay. It does not know configurations beyond the spec of an input.

Callers: models, and the python backend.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from flowserve.backends.python.pb_utils.context import TritonModelException
from flowserve.errors import FlowserveError
from flowserve.graph.conversion import reshaped
from flowserve.memory import dlpack
from flowserve.memory.bytes_codec import to_bytes
from flowserve.memory.dlpack import ForeignTensor
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor as _Rows
from flowserve.values import BY_NUMPY, Array, DType, TensorSpec

TRITONSERVER_MEMORY_CPU: Final = 0
TRITONSERVER_MEMORY_GPU: Final = 1


class OnGpu(TritonModelException):
    """The elements of a tensor on a GPU were requested as a numpy array."""


class MemoryType:
    """Triton's constants."""

    TRITONSERVER_MEMORY_CPU: Final = TRITONSERVER_MEMORY_CPU
    TRITONSERVER_MEMORY_GPU: Final = TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """The memory in which a model would like the response to a request it makes. Responses are always in host memory,
    which a model must handle on Triton too.
    """

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class Tensor:
    """A named array. `numpy_array` is not copied. A model may change it again after it was sent in a response."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(numpy_array) is not np.ndarray:
            if not isinstance(numpy_array, np.ndarray):
                raise TypeError(f"Tensor '{name}' wants a numpy array, got {type(numpy_array).__name__}")
            numpy_array = np.asarray(numpy_array)  # the plain elements, of masked arrays too
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
        """A tensor over the memory of an object with DLPack support, or of a DLPack capsule."""
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == dlpack.CPU:
            try:
                return Tensor(name, np.from_dlpack(tensor))
            except (BufferError, RuntimeError):
                pass  # a data type that numpy does not import, such as BF16
        source = tensor if hasattr(tensor, "__dlpack__") else None
        found = _described(tensor if source is None else source.__dlpack__())
        return Tensor(name, found.on_host()) if found.device < 0 else GpuTensor(name, found, source)

    def to_dlpack(self) -> Any:
        """A DLPack capsule over this tensor's memory."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        array = self.as_numpy()
        if array.dtype == DType.BF16.numpy:
            return dlpack.export_capsule(ForeignTensor(array.ctypes.data, array.dtype, array.shape, -1, array))
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


class GpuTensor(Tensor):
    """A tensor on a GPU."""

    __slots__ = ("_source", "_there")

    def __init__(self, name: str, there: ForeignTensor, source: Any = None) -> None:
        """`source`: the object that the tensor came from, if it orders later readers after its own work."""
        self._name = name
        self._array = None
        self._there = there
        self._source = source

    def as_numpy(self) -> NoReturn:
        """Raises TritonModelException: the tensor is not in host memory."""
        raise OnGpu("Tensor is stored in GPU and cannot be converted to NumPy.")

    def dtype(self) -> np.dtype[Any]:
        return self._there.dtype

    def shape(self) -> list[int]:
        return list(self._there.shape)

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, **options: Any) -> Any:
        return dlpack.export_capsule(self._there) if self._source is None else self._source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._there.device


class _Input(Tensor):
    """An input tensor of a request: rows of a block, converted when the model reads them."""

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
            # A model may write into its inputs. Only the last reader of a block gets its memory, other readers get a
            # copy: no two arrays that may be written to share memory.
            flags = array.flags
            if not (self._may_write and flags.writeable and flags.aligned):
                array = HOST.copy_of(array)
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
    """The tensor, or a copy of it in host memory."""
    return Tensor(tensor._name, tensor._there.on_host()) if isinstance(tensor, GpuTensor) else tensor


def _described(capsule: Any) -> ForeignTensor:
    try:
        return dlpack.import_capsule(capsule)
    except FlowserveError as error:
        raise TritonModelException(str(error)) from error


def numpy_to_triton_type(data_type: Any) -> int:
    """The number in ModelConfig of a numpy dtype or scalar type; strings of any kind are TYPE_STRING."""
    dtype = np.dtype(data_type)
    return DType.BYTES.number if dtype.kind in "SU" else BY_NUMPY[dtype].number


def inner_shape(shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """The shape of an input as the model sees it, for an input that the configuration reshapes."""
    assert spec.reshape is not None
    outer = len(shape) - len(spec.dims)
    return shape[:outer] + reshaped(shape[outer:], spec.dims, spec.reshape)


def as_bytes(array: Array) -> Array:
    """An array of strings of any kind as an object array of `bytes`; the array itself if it is one already."""
    elements = array.ravel().tolist()
    if array.dtype.kind == "O" and set(map(type, elements)) <= {bytes}:
        return array
    converted = np.empty(len(elements), np.object_)
    converted[:] = [to_bytes(element) for element in elements]
    return converted.reshape(array.shape)
