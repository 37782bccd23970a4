"""Detects whether this process can still use its GPUs.

A kernel that writes to an invalid address, or fails in another way, makes its CUDA context unusable: every later call
of the process fails with the same error, and only a new process gets a new context. This module queries the driver's
library, whichever library loaded it (cupy, onnxruntime, a model's PyTorch); if none did, there is no context to lose.
All runtime libraries use a device's primary context.

Does not know what follows from a lost GPU. Callers: `cuda`, and the main loop of a worker process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

_LIBRARY: Final = "libcuda.so.1"
# The errors of which CUDA's documentation says that the process must be terminated and launched anew: contained,
# illegal address, timeout, assertion, the hardware's stack, instruction, alignment, address space, program counter,
# launch, a leak of tensor memory, the end of a client of MPS.
_LASTING: Final = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})


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
