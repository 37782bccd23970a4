"""CUDA memory of clients: opened by the handles that CUDA gives them for other processes, read and written by copies.

Decided here: that a handle is opened once, however often it is registered, and closed when the last region of it is
forgotten and the last request that named one is over; that no more is registered than the handle's memory holds, since
reading behind its end breaks the whole device for the server; and that tensors are copied through the host, like those
in the system's shared memory (client_memory.py), which also has the names, the bounds of each use and who is allowed.

Closing is put off until somebody is here again: what holds a region may end anywhere, in the collector too, where no
device is to be called.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Final

import numpy as np

from flowserve.errors import FlowserveError, Invalid
from flowserve.memory.device import OpenedMemory
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.devices import devices
from flowserve.memory.landing import carry
from flowserve.values import HOST_MEMORY

HANDLE_BYTES: Final = 64  # a cudaIpcMemHandle_t
_Key = tuple[int, bytes]


class _Opened:
    """What one handle leads to."""

    __slots__ = ("__weakref__", "memory", "opened")

    def __init__(self, memory: DeviceMemory, opened: OpenedMemory) -> None:
        self.memory = memory
        self.opened = opened


class CudaRegion:
    """One registered region. Whoever has it may copy."""

    def __init__(self, name: str, device: int, size: int, opened: _Opened) -> None:
        self.name = name
        self.device = device
        self.size = size
        self.offset = 0  # a handle is the whole of what was allocated
        self._opened = opened

    def read(self, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        if size:
            memory = self._opened.memory
            there = self._opened.opened.address + offset
            carry(memory, memory.place, HOST_MEMORY, _address(data), there, size)
        return data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if len(data):
            held = np.frombuffer(data, np.uint8)
            memory = self._opened.memory
            there = self._opened.opened.address + offset
            carry(memory, HOST_MEMORY, memory.place, there, held.ctypes.data, held.nbytes)


class CudaHandles:
    """The handles that are open. Touched from one thread only."""

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[_Key, _Opened] = weakref.WeakValueDictionary()
        self._over: deque[tuple[DeviceMemory, OpenedMemory]] = deque()

    def region(self, name: str, handle: bytes, device: int, size: int) -> CudaRegion:
        """Raises Invalid where there is no such GPU, the handle cannot be opened, or is of less memory."""
        self.close_what_is_over()
        if not devices().count:
            raise Invalid(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported: {devices().why_none}"
            )
        refused = f"failed to register CUDA shared memory region '{name}': invalid args"
        if len(handle) != HANDLE_BYTES:
            raise Invalid(f"{refused}: a CUDA IPC handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        try:
            memory = devices()[device]
        except FlowserveError as error:
            raise Invalid(f"{refused}: {error}") from None
        opened = self._open.get((device, handle))
        if opened is None:
            opened = self._open[device, handle] = self._opened(memory, handle, refused)
        there = opened.opened.nbytes
        if not 0 < size <= there:
            raise Invalid(f"{refused}: {size} bytes do not lie in an allocation of {there} bytes")
        return CudaRegion(name, device, size, opened)

    def close_what_is_over(self) -> None:
        """Give back what nobody has any more."""
        while self._over:
            memory, opened = self._over.popleft()
            memory.device.close_handle(opened)

    def _opened(self, memory: DeviceMemory, handle: bytes, refused: str) -> _Opened:
        try:
            found = memory.device.open_handle(handle)
        except ValueError as error:
            raise Invalid(f"{refused}: the handle cannot be opened: {error}") from error
        opened = _Opened(memory, found)
        weakref.finalize(opened, self._over.append, (memory, found)).atexit = False
        return opened


def _address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(data))
