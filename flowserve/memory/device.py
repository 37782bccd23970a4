"""Interface to a GPU that holds tensors: memory, copies, streams and events.

Decides the methods that all device code uses, and what each side may assume. There are two implementations: the real
one (`cuda`), and one without hardware that raises wherever an ordering is missing (`tests/support/fake_device`). Code
that passes on the fake is correctly ordered on the real one, where such faults mostly pass unnoticed.

A *stream* is a queue of work for the device: work on one stream runs in order, work on two streams in any order. Adding
work to a stream returns at once. An *event* is a point in a stream: all work added before it. If a stream *waits* for
an event, the host is not blocked; if the host *synchronises* with one, the calling thread blocks.

All methods may be called from any thread, and one stream is used by one thread at a time. No method may be called from
a finaliser, because the garbage collector runs anywhere.

Decides also whether this process can still use its GPUs (`why_lost`). A kernel that writes to an invalid address, or
fails in another way, makes its CUDA context unusable: every later call of the process fails with the same error, and
only a new process gets a new context. The driver's library is queried, whichever library loaded it (cupy, onnxruntime,
a model's PyTorch); if none did, there is no context to lose. All runtime libraries use a device's primary context. Does
not know the consequences of a lost GPU. Callers: this package, and the main loop of a worker process.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flowserve.values import Array

_LIBRARY: Final = "libcuda.so.1"
# The errors of which CUDA's documentation says that the process must be terminated and launched anew: contained,
# illegal address, timeout, assertion, the hardware's stack, instruction, alignment, address space, program counter,
# launch, a leak of tensor memory, the end of a client of MPS.
_LASTING: Final = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})


class OutOfMemory(Exception):
    """No room for an allocation. Never reaches a client: pools fall back, or raise an error that names the purpose."""


@dataclass(slots=True, eq=False)
class Allocation:
    """`nbytes` bytes at `address`: an allocation of this process, at least 256-byte aligned, or one whole allocation of
    another process. `raw` is the library's owner, None if it has none.
    """

    address: int
    nbytes: int
    raw: Any = None


@dataclass(slots=True, eq=False)
class DeviceQueue:
    """A stream. `address` is the value libraries accept as a CUDA stream; never 0, which would be the default stream.
    `raw` is the library's stream.
    """

    address: int
    raw: Any = None


@dataclass(slots=True, eq=False)
class Event:
    """A point in `stream`. `raw` is the library's event, recorded there."""

    stream: DeviceQueue
    raw: Any = None


class Device(Protocol):
    """One GPU, by its number."""

    number: int

    def allocate(self, nbytes: int) -> Allocation:
        """Uninitialised device memory. Raises OutOfMemory."""

    def allocate_pinned(self, nbytes: int) -> Allocation:
        """Uninitialised pinned host memory; every device may copy from and to it. Raises OutOfMemory."""

    def free(self, memory: Allocation) -> None:
        """Return memory to the driver. The caller has synchronised with all work that used it."""

    def stream(self) -> DeviceQueue:
        """A new stream, not ordered with any other."""

    def close_stream(self, stream: DeviceQueue) -> None:
        """Close a stream. The caller has synchronised with all work on it."""

    def copy(self, to: int, source: int, nbytes: int, stream: DeviceQueue) -> None:
        """Add a copy to the stream. Each address is in host memory or memory of any device. If host memory is not
        pinned, this returns only when that side is no longer needed.
        """

    def record(self, stream: DeviceQueue) -> Event:
        """An event after all work on the stream so far."""

    def wait(self, stream: DeviceQueue, event: Event) -> None:
        """Work added to the stream from now on runs after the event, which may belong to another device."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event is complete."""

    def is_done(self, event: Event) -> bool:
        """Whether the event is complete. If so, the host may rely on it as after `synchronize`."""

    def open_handle(self, handle: bytes) -> Allocation:
        """Map the memory of another process's handle, on this device. Not twice before closing. Raises ValueError."""

    def close_handle(self, opened: Allocation) -> None:
        """Unmap the memory. The caller guarantees that no work reads or writes it."""

    def why_lost(self) -> str:
        """The error that makes the device unusable for the rest of this process, "" if usable. Does not block."""

    def current(self) -> AbstractContextManager[object]:
        """A context in which this is the thread's current CUDA device, for libraries that query it."""

    def settle(self) -> None:
        """Block the calling thread until all work on the device is complete, other libraries' work included: needed for
        tensors that those libraries pass on without an event.
        """

    def host_view(self, memory: Allocation) -> Array:
        """Pinned memory as writable bytes. Call it right before the access, and after synchronising with all other
        users of that memory.
        """


def why_lost(driver: Any = None) -> str:
    """The driver's name for the error of this process's contexts; "" if each is usable, or there is none. Does not
    block. `driver` replaces the loaded library in tests.
    """
    driver = driver or _loaded()
    if driver is None:
        return ""
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ""
    for number in range(count.value):
        status = _status(driver, number)
        if status in _LASTING:
            return _name(driver, status)
    return ""


def _status(driver: Any, number: int) -> int:
    """The status of creating an event in the device's primary context, which has no side effects; 0 if the process has
    no such context.
    """
    device, flags, is_active, context = ctypes.c_int(0), ctypes.c_uint(0), ctypes.c_int(0), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
        return 0
    if driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active)) != 0:
        return 0
    if not is_active.value:
        return 0
    if (status := int(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))) != 0:
        return status
    try:
        if (status := int(driver.cuCtxPushCurrent_v2(context))) != 0:
            return status
        event = ctypes.c_void_p()
        status = int(driver.cuEventCreate(ctypes.byref(event), 0))
        if status == 0:
            driver.cuEventDestroy_v2(event)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return status
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    if driver.cuGetErrorName(status, ctypes.byref(name)) != 0 or name.value is None:
        return f"CUDA error {status}"
    return name.value.decode("ascii", "replace")


def _loaded() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # the library is not loaded; a system without such a flag
        return None
