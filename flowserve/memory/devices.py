"""The GPUs of this process.

Decides: detection runs once, at the first call: first the driver's own library, so that a machine without one never
imports anything heavy, then cupy. GPUs belong to the process and not to an engine, because the driver treats them so:
all engines of a process share the pools. Tests replace the devices with `using`. Does not know models or instances.
Callers: configuration loading, GPU workers, statistics.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from flowserve.config.types import Gpus
from flowserve.errors import Unsupported
from flowserve.memory.device import Device
from flowserve.memory.device_memory import BlockPool, BlockStatistics, DeviceMemory, Ledger
from flowserve.values import PINNED_MEMORY, MemoryPlace

log = logging.getLogger("flowserve.memory")

GPU_POOL_BYTES: Final = 1 << 30  # per GPU: tensors between the steps of pipelines
PINNED_POOL_BYTES: Final = 1 << 28  # as tritonserver's
LOST: Final = "the GPU cannot be used by this process any more ({why}); restart it"
NO_DRIVER: Final = "this machine has no GPU that can be used: no NVIDIA driver is installed"


class Devices:
    """The GPUs by number, with their pools. `why_none` is the reason if there is none."""

    def __init__(
        self,
        devices: Sequence[Device],
        why_none: str = "",
        *,
        gpu_bytes: int = GPU_POOL_BYTES,
        pinned_bytes: int = PINNED_POOL_BYTES,
    ) -> None:
        self.why_none = why_none
        self.lost = ""  # the reason why this process cannot use them any more
        self.ledger = Ledger()
        # One pool for all: every device may copy from and to pinned memory.
        self.pinned = BlockPool(devices[0], PINNED_MEMORY, pinned_bytes) if devices else None
        self._memories = [
            DeviceMemory(device, gpu_bytes, self.pinned, self.ledger) for device in devices if self.pinned is not None
        ]

    @property
    def pools(self) -> Sequence[BlockPool]:
        """Every pool: of pinned memory, and of each GPU."""
        return [] if self.pinned is None else [self.pinned, *(memory.pool for memory in self._memories)]

    @property
    def gpus(self) -> Gpus:
        """The GPUs as the configuration package sees them."""
        return Gpus(tuple(range(self.count)), self.why_none)

    @property
    def count(self) -> int:
        return len(self._memories)

    def __getitem__(self, number: int) -> DeviceMemory:
        """Raises Unsupported if there is no such GPU."""
        if 0 <= number < len(self._memories):
            return self._memories[number]
        if not self._memories:
            raise Unsupported(self.why_none)
        raise Unsupported(f"there is no GPU {number} here: they are numbered from 0 to {len(self._memories) - 1}")

    def limit(self, pinned_bytes: int | None, gpu_bytes: Mapping[int, int]) -> None:
        """Set the budgets of the pinned pool (None: unchanged) and of the pools of the named GPUs."""
        if self.pinned is not None and pinned_bytes is not None:
            self.pinned.limit(pinned_bytes)
        for number, budget in gpu_bytes.items():
            if number < self.count:
                self[number].pool.limit(budget)
            else:
                log.warning("there is no GPU %d here whose pool could be limited", number)

    def check_for_loss(self) -> None:
        """Query the devices, and log a loss once."""
        if self.lost:
            return
        for memory in self._memories:
            why = memory.device.why_lost()
            if why:
                self.lost = LOST.format(why=why)
                log.error("%s. Until then the server says that it is not live", self.lost)
                return

    def statistics(self) -> Mapping[MemoryPlace, BlockStatistics]:
        """The statistics of every pool, by place."""
        return {pool.place: pool.statistics() for pool in self.pools}


_current: Devices | None = None


def devices() -> Devices:
    """This process's GPUs. Never raises. The first call may take a second."""
    global _current  # detected once, like the driver itself
    if _current is None:
        _current = _look()
    return _current


@contextmanager
def using(found: Devices) -> Iterator[Devices]:
    """A context in which `found` are the process's GPUs."""
    global _current  # see above
    before, _current = _current, found
    try:
        yield found
    finally:
        _current = before


def pools() -> Sequence[BlockPool]:
    """The pools of this process's GPUs and of pinned memory; none before the first call of `devices`."""
    return () if _current is None else _current.pools


def lost() -> str:
    """The reason why this process cannot use its GPUs any more, "" if it can or never used them."""
    return "" if _current is None else _current.lost


def check_for_loss() -> None:
    """After a failure, check whether a GPU was lost. May be called from any thread; free if no GPU is in use."""
    if _current is not None and _current.count:
        _current.check_for_loss()


def _look() -> Devices:
    why = _why_no_driver()
    if why:
        return Devices((), why)
    from flowserve.memory import cuda  # heavy, so only if there is a driver

    found, why = cuda.find_devices()
    return Devices(found, why)


def _why_no_driver() -> str:
    """Empty if the driver finds a GPU. Queries the driver itself: a library that probes the GPU may occupy it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "this machine has no GPU that can be used: its NVIDIA driver finds none"
    return ""
