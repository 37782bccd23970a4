"""DLPack: exchange of tensors between libraries without a copy, in host or CUDA memory.

Decides which tensors are accepted (`import_capsule`): row-major order, a data type that flowserve has, host memory or a
CUDA device's; and how a capsule is created (`export_capsule`). Both use the standard's C structures, so that neither
needs the library that made the tensor. A tensor has one consumer at a time: while it is imported here, its capsule is
marked as used. Does not order streams. Callers: the Python backend, and the backends of libraries.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.memory.devices import devices
from flowserve.memory.pool import HOST
from flowserve.values import HOST_MEMORY, Array, DType

CPU: Final = 1
CUDA: Final = 2
PINNED: Final = 3
_NAME: Final = b"dltensor"
_CODES: Final = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT: Final = 4

_API: Final = ctypes.PyDLL(None)
_API.PyCapsule_GetPointer.restype = ctypes.c_void_p
_API.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_API.PyCapsule_GetName.restype = ctypes.c_void_p  # the name itself, which the capsule does not copy
_API.PyCapsule_GetName.argtypes = [ctypes.py_object]
_API.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_void_p]
_TAKEN: Final = ctypes.create_string_buffer(b"used_dltensor")  # the standard's name of a used capsule


class _Device(ctypes.Structure):
    _fields_: ClassVar[Any] = [("type", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_: ClassVar[Any] = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_: ClassVar[Any] = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTensor:
    """A tensor in another library's memory; `owner` keeps it alive. `device` is the GPU's number, -1 for the host."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    device: int
    owner: object

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def on_host(self) -> Array:
        """The tensor as an array: without a copy if it is in host memory, else copied from its GPU once all work there
        is complete, since it came without its stream. Raises Unsupported if this process has no such GPU.
        """
        if self.device >= 0:
            gpu = devices()[self.device]
            copy = HOST.take(self.nbytes).view(self.dtype).reshape(self.shape)
            gpu.device.settle()
            gpu.copy_and_wait(gpu.place, HOST_MEMORY, copy.ctypes.data, self.address, self.nbytes)
            return copy
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        memory: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        memory._owner = self.owner  # the array references the memory object, which references its owner
        array: Array = np.frombuffer(memory, self.dtype).reshape(self.shape)
        return array


class _Taken:
    """A capsule whose tensor is imported here. It is marked as used, because another consumer would free the tensor
    while it is read. The finaliser restores the capsule's name, and the capsule then frees the tensor itself.
    """

    __slots__ = ("_capsule", "_name", "_rename", "_taken")

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        self._name = _API.PyCapsule_GetName(capsule)
        # Both are referenced here, because this object may be finalised after the module.
        self._rename, self._taken = _API.PyCapsule_SetName, _TAKEN
        self._rename(capsule, ctypes.addressof(_TAKEN))

    def __del__(self) -> None:
        self._rename(self._capsule, self._name)


def import_capsule(capsule: Any) -> ForeignTensor:
    """The tensor in a capsule. No other consumer can take it while its `owner` is alive. Raises Invalid for an
    unsupported tensor and for a capsule that was already consumed.
    """
    try:
        pointer = _API.PyCapsule_GetPointer(capsule, _NAME)
    except (ValueError, TypeError) as error:
        raise Invalid("this is not a DLPack capsule, or its tensor was consumed already") from error
    tensor = ctypes.cast(pointer, ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and 0 not in shape and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise Invalid(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if tensor.device.type not in (CPU, CUDA, PINNED):
        raise Invalid(f"DLPack tensors in memory of type {tensor.device.type} are not supported; CPU and CUDA are")
    device = tensor.device.number if tensor.device.type == CUDA else -1
    return ForeignTensor((tensor.data or 0) + tensor.byte_offset, _dtype(tensor.dtype), shape, device, _Taken(capsule))


def export_capsule(tensor: ForeignTensor) -> Any:
    """A capsule over the tensor's memory. It references the owner until the consumer of the tensor is done, or until
    the capsule is finalised without a consumer.
    """
    # numpy creates the capsule, as if for an array of unsigned integers on the host; dtype and device are corrected
    # afterwards. So numpy's C code frees it: a capsule may be finalised while an exception propagates, when no Python
    # code may run.
    data_type = _data_type(tensor.dtype)
    bits = np.dtype(f"u{tensor.dtype.itemsize}")
    capsule = ForeignTensor(tensor.address, bits, tensor.shape, -1, tensor.owner).on_host().__dlpack__()
    view = ctypes.cast(_API.PyCapsule_GetPointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    view.dtype = data_type
    if tensor.device >= 0:
        view.device = _Device(CUDA, tensor.device)
    return capsule


def _is_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dtype(found: _DataType) -> np.dtype[Any]:
    if found.lanes == 1 and found.code == _BFLOAT and found.bits == 16:
        return DType.BF16.numpy
    for kind, code in _CODES.items():
        if found.lanes == 1 and found.code == code and found.bits in (8, 16, 32, 64):
            try:
                return np.dtype("?" if kind == "b" else f"{kind}{found.bits // 8}")
            except TypeError:
                break
    raise Invalid(f"DLPack type {found.code} of {found.bits} bits and {found.lanes} lanes is none that tensors have")


def _data_type(dtype: np.dtype[Any]) -> _DataType:
    if dtype == DType.BF16.numpy:
        return _DataType(_BFLOAT, 16, 1)
    if dtype.kind not in _CODES:
        raise Invalid(f"tensors of {dtype} cannot travel by DLPack")
    return _DataType(_CODES[dtype.kind], dtype.itemsize * 8, 1)
