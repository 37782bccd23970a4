"""DLPack: how tensors are handed from one library to another without a copy, whatever memory they lie in.

Decided here: what a capsule says (`described`), how one is made (`capsule_of`), and what is taken of others: tensors in
row-major order, of a type that tensors have here, in the host's memory or a CUDA device's. It is done with the
structures that the standard lays down, so that neither needs the library the tensor comes from. A tensor is in one
taker's hands at a time: while it is in ours, its capsule says so. Nothing here reads what the tensors hold, nor orders
anybody's streams.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.values import Array, DType

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
_TAKEN: Final = ctypes.create_string_buffer(b"used_dltensor")  # the standard's word for it


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
class Foreign:
    """A tensor in somebody's memory; `owner` keeps it there. `device` is the GPU's number, -1 for the host."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    device: int
    owner: object

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def on_host(self) -> Array:
        """The array over the memory itself, which is the host's."""
        assert self.device < 0
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        memory: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        memory._owner = self.owner  # the array holds the memory, and that its owner
        array: Array = np.frombuffer(memory, self.dtype).reshape(self.shape)
        return array


class _Taken:
    """A capsule whose tensor is in our hands: nobody else can take it, who would free it while we read it. When this
    goes, the capsule is as it was, and gives the tensor back in its own way.
    """

    __slots__ = ("_capsule", "_name", "_rename", "_taken")

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        self._name = _API.PyCapsule_GetName(capsule)
        # Both are held here: this may go after the module.
        self._rename, self._taken = _API.PyCapsule_SetName, _TAKEN
        self._rename(capsule, ctypes.addressof(_TAKEN))

    def __del__(self) -> None:
        self._rename(self._capsule, self._name)


def described(capsule: Any) -> Foreign:
    """What a capsule holds. As long as its `owner` lives, nobody else takes it. Raises Invalid for what tensors are not
    here, and for what somebody has taken.
    """
    try:
        pointer = _API.PyCapsule_GetPointer(capsule, _NAME)
    except (ValueError, TypeError) as error:
        raise Invalid("this is no DLPack capsule, or somebody has taken its tensor already") from error
    tensor = ctypes.cast(pointer, ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and 0 not in shape and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise Invalid(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if tensor.device.type not in (CPU, CUDA, PINNED):
        raise Invalid(f"DLPack tensors in memory of type {tensor.device.type} are not supported; CPU and CUDA are")
    device = tensor.device.number if tensor.device.type == CUDA else -1
    return Foreign((tensor.data or 0) + tensor.byte_offset, _dtype(tensor.dtype), shape, device, _Taken(capsule))


def capsule_of(tensor: Foreign) -> Any:
    """A capsule over the tensor's memory, which holds its owner until whoever takes the tensor is done with it, or
    until it goes itself.
    """
    # numpy makes it, as of an array of bits on the host, and what it says is set right. So numpy's own code gives it
    # back: a capsule may go while an exception is on its way, and nothing of Python's may run then.
    data_type = _data_type(tensor.dtype)
    bits = np.dtype(f"u{tensor.dtype.itemsize}")
    capsule = Foreign(tensor.address, bits, tensor.shape, -1, tensor.owner).on_host().__dlpack__()
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
