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
from typing import Final

import numpy as np

from flowserve.memory.device import Allocation, Device, DeviceQueue, Event, OutOfMemory, why_lost
from flowserve.values import Array

try:
    import cupy
except ImportError as error:  # also if libraries that cupy needs are missing
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


class CudaDevice:
    """One GPU."""

    def __init__(self, number: int) -> None:
        self.number = number

    def allocate(self, nbytes: int) -> Allocation:
        try:
            with cupy.cuda.Device(self.number):
                return Allocation(cupy.cuda.runtime.malloc(nbytes), nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _translated(error) from error

    def allocate_pinned(self, nbytes: int) -> Allocation:
        try:
            with cupy.cuda.Device(self.number):
                raw = cupy.cuda.PinnedMemory(nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _translated(error) from error
        return Allocation(raw.ptr, nbytes, raw)

    def free(self, memory: Allocation) -> None:
        if memory.raw is not None:
            memory.raw = None  # its finaliser frees the pages
            return
        with cupy.cuda.Device(self.number):
            cupy.cuda.runtime.free(memory.address)

    def stream(self) -> DeviceQueue:
        with cupy.cuda.Device(self.number):
            raw = cupy.cuda.Stream(non_blocking=True)
        return DeviceQueue(raw.ptr, raw)

    def close_stream(self, stream: DeviceQueue) -> None:
        stream.raw = None

    def copy(self, to: int, source: int, nbytes: int, stream: DeviceQueue) -> None:
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, stream.address)

    def record(self, stream: DeviceQueue) -> Event:
        with cupy.cuda.Device(self.number):
            # A thread that synchronises sleeps instead of spinning, so that other instances can use its core.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(stream.raw)
        return Event(stream, event)

    def wait(self, stream: DeviceQueue, event: Event) -> None:
        stream.raw.wait_event(event.raw)

    def synchronize(self, event: Event) -> None:
        event.raw.synchronize()

    def is_done(self, event: Event) -> bool:
        return bool(event.raw.done)

    def open_handle(self, handle: bytes) -> Allocation:
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
        return Allocation(address, base.value + size.value - address)

    def close_handle(self, opened: Allocation) -> None:
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
