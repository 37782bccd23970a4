"""The real GPU, through cupy. This is the only module that imports cupy.

Decides how each method of `device.Device` maps to a CUDA call. flowserve's own pools (`blocks`) are built on it; cupy's
pools are not used, because they do not track the streams of other libraries. The current device is a property of the
thread, so every call that depends on it runs within `with Device(n)`, and nothing here awaits.

Does not know tensors or pools. Imported by `devices`, only if a driver is installed. docs/gpu.md lists what was run on
hardware.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from flowserve.memory.cuda_context import why_lost
from flowserve.memory.device import Allocation, Device, Event, OpenedMemory, OutOfMemory, Stream
from flowserve.values import Array

try:
    import cupy
except ImportError as error:  # also where its own libraries are missing
    cupy = None
    _WHY_NO_CUPY: Final = str(error)

_ANY_DIRECTION: Final = 4  # cudaMemcpyDefault: the driver derives it from the addresses
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation


def find_devices() -> tuple[Sequence[Device], str]:
    """The GPUs and "", or none and the reason."""
    if cupy is None:
        return (), f"a GPU is here but cupy is not ({_WHY_NO_CUPY}): pip install 'flowserve[gpu]'"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return (), f"a GPU is here but cannot be used: {error}"
    return [CudaDevice(number) for number in range(count)], ""


class CudaMemory:
    """`raw` is cupy's owner object if the memory is pinned, None for device memory."""

    __slots__ = ("address", "nbytes", "raw")

    def __init__(self, address: int, nbytes: int, raw: Any = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.raw = raw


class CudaStream:
    """`raw` is cupy's stream."""

    __slots__ = ("address", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.address: int = raw.ptr


class CudaEvent:
    """`raw` is cupy's event, recorded in `stream`."""

    __slots__ = ("raw", "stream")

    def __init__(self, raw: Any, stream: CudaStream) -> None:
        self.raw = raw
        self.stream = stream


class CudaDevice:
    """One GPU."""

    def __init__(self, number: int) -> None:
        self.number = number

    def allocate(self, nbytes: int) -> Allocation:
        try:
            with cupy.cuda.Device(self.number):
                return CudaMemory(cupy.cuda.runtime.malloc(nbytes), nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _translated(error) from error

    def allocate_pinned(self, nbytes: int) -> Allocation:
        try:
            with cupy.cuda.Device(self.number):
                raw = cupy.cuda.PinnedMemory(nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _translated(error) from error
        return CudaMemory(raw.ptr, nbytes, raw)

    def free(self, memory: Allocation) -> None:
        assert isinstance(memory, CudaMemory)
        if memory.raw is not None:
            memory.raw = None  # its finaliser frees the pages
            return
        with cupy.cuda.Device(self.number):
            cupy.cuda.runtime.free(memory.address)

    def stream(self) -> CudaStream:
        with cupy.cuda.Device(self.number):
            return CudaStream(cupy.cuda.Stream(non_blocking=True))

    def close_stream(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        stream.raw = None

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, stream.address)

    def record(self, stream: Stream) -> CudaEvent:
        assert isinstance(stream, CudaStream)
        with cupy.cuda.Device(self.number):
            # A thread that synchronises sleeps instead of spinning, so that other instances can use its core.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(stream.raw)
        return CudaEvent(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, CudaStream)
        assert isinstance(event, CudaEvent)
        stream.raw.wait_event(event.raw)

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.raw.synchronize()

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, CudaEvent)
        return bool(event.raw.done)

    def open_handle(self, handle: bytes) -> OpenedMemory:
        try:
            with cupy.cuda.Device(self.number):
                address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ValueError(str(error)) from error
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        found = (ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(*found) != 0:
            cupy.cuda.runtime.ipcCloseMemHandle(address)
            raise ValueError("the size of its memory cannot be determined")
        return OpenedMemory(address, base.value + size.value - address)

    def close_handle(self, opened: OpenedMemory) -> None:
        with cupy.cuda.Device(self.number):
            cupy.cuda.runtime.ipcCloseMemHandle(opened.address)

    def why_lost(self) -> str:
        return why_lost()

    def current(self) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = cupy.cuda.Device(self.number)
        return device

    def settle(self) -> None:
        cupy.cuda.Device(self.number).synchronize()

    def host_view(self, memory: Allocation) -> Array:
        return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))


def _translated(error: Exception) -> Exception:
    return OutOfMemory() if getattr(error, "status", None) == _OUT_OF_MEMORY else error
