"""How GPUs are counted, by a driver that is not there."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

from flowserve.config.instances import Gpus
from flowserve.memory.inventory import NO_CUPY, find_gpus


class Driver:
    """NVIDIA's driver: as many GPUs as it is made with, or an error where it is initialised."""

    def __init__(self, count: int, error: int = 0) -> None:
        self._count = count
        self._error = error
        self._is_initialised = False

    def cuInit(self, flags: int) -> int:  # the driver's own name
        self._is_initialised = self._error == 0
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:  # as above
        assert self._is_initialised, "asked before it was initialised"
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int)).contents.value = self._count
        return 0


def found(driver: Driver, *, has_cupy: bool = True) -> Gpus:
    return find_gpus(lambda _: driver, lambda: has_cupy)


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_every_gpu_that_the_driver_shows_is_there() -> None:
    assert found(Driver(2)) == Gpus((0, 1))


def test_without_gpus_it_says_why() -> None:
    assert find_gpus(no_library).absence == "this machine has no NVIDIA driver"
    assert found(Driver(1, error=100)).absence == "NVIDIA's driver finds none (CUDA error 100)"
    assert found(Driver(0)).absence == "NVIDIA's driver shows none to this process"
    assert found(Driver(1), has_cupy=False) == Gpus(absence=NO_CUPY)


def test_counting_imports_nothing_that_uses_a_gpu() -> None:
    look = "import flowserve.memory.inventory as i, sys; i.find_gpus(); print({'cupy', 'onnxruntime'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"
