"""Detection of GPUs that are lost to the process, with a fake driver library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flowserve.memory.device import why_lost

ILLEGAL_ADDRESS, OUT_OF_MEMORY = 700, 2


class Driver:
    """`contexts[i]` is the state of the primary context on device i, None where the process has none."""

    def __init__(self, *contexts: int | None) -> None:
        self.contexts = contexts
        self.current: list[int] = []
        self.retained = 0
        self.events = 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.contexts)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxGetState(self, device: ctypes.c_int, flags: Any, is_active: Any) -> int:
        is_active._obj.value = self.contexts[device.value] is not None
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = device.value + 1
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.current.append((context.value or 0) - 1)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        status = self.contexts[self.current[-1]] or 0
        self.events += status == 0
        return status

    def cuEventDestroy_v2(self, event: ctypes.c_void_p) -> int:
        self.events -= 1
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0 if status == ILLEGAL_ADDRESS else 1


@pytest.mark.parametrize(
    ("contexts", "why"),
    [
        ((), ""),
        ((None,), ""),
        ((0, OUT_OF_MEMORY), ""),  # which passes
        ((0, ILLEGAL_ADDRESS), "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ((719,), "CUDA error 719"),
    ],
)
def test_a_lost_gpu_is_reported_with_the_drivers_error_name_and_nothing_leaks(
    contexts: tuple[int | None, ...], why: str
) -> None:
    driver = Driver(*contexts)
    assert why_lost(driver) == why
    assert (driver.current, driver.retained, driver.events) == ([], 0, 0)


def test_a_process_without_a_gpu_has_lost_none() -> None:
    assert why_lost() == ""
