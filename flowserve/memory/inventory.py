"""The GPUs of this machine, counted without waking them.

Decided here: whom that is asked of (NVIDIA's driver itself), and what keeps its GPUs from being used. Nothing is
imported for it, nothing allocated, and where there is no driver it costs a failed look for one file. What is done with
a GPU is decided elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from flowserve.config.instances import Gpus

DRIVER: Final = "libcuda.so.1"
NO_CUPY: Final = "CuPy is not installed, with which flowserve uses them: pip install 'flowserve[gpu]'"


def find_gpus(open_driver: Callable[[str], Any] = ctypes.CDLL, has_cupy: Callable[[], bool] | None = None) -> Gpus:
    """Every GPU that the driver shows to this process (CUDA_VISIBLE_DEVICES counts), or why there are none to use."""
    try:
        driver = open_driver(DRIVER)
    except OSError:
        return Gpus(absence="this machine has no NVIDIA driver")
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return Gpus(absence=f"NVIDIA's driver finds none (CUDA error {status})")
    if count.value == 0:
        return Gpus(absence="NVIDIA's driver shows none to this process")
    if not (_has_cupy if has_cupy is None else has_cupy)():
        return Gpus(absence=NO_CUPY)
    return Gpus(tuple(range(count.value)))


def _has_cupy() -> bool:
    return find_spec("cupy") is not None
