"""Which GPUs this process has.

Decided here: they are looked for once, when somebody first asks: the driver's own library first, so that a machine
without one never imports anything heavy, then cupy. A GPU belongs to the process and not to an engine, as its driver
sees it: all engines of a process share its pools. Tests put machines of their own in that place.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from flowserve.config.instances import Gpus
from flowserve.errors import Unsupported
from flowserve.memory.blocks import BlockPool, BlockStatistics
from flowserve.memory.device import Device
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.ledger import Ledger
from flowserve.values import PINNED_MEMORY, MemoryPlace

log = logging.getLogger("flowserve.memory")

GPU_POOL_BYTES: Final = 1 << 30  # what lies between the steps of pipelines, of each GPU
PINNED_POOL_BYTES: Final = 1 << 28  # as tritonserver's
LOST: Final = "the GPU cannot be used by this process any more ({why}); restart it"
NO_DRIVER: Final = "this machine has no GPU that can be used: no NVIDIA driver is installed"


class Devices:
    """The GPUs by their numbers, with their pools. `why_none` is why there is none."""

    def __init__(
        self,
        devices: Sequence[Device],
        why_none: str = "",
        *,
        gpu_bytes: int = GPU_POOL_BYTES,
        pinned_bytes: int = PINNED_POOL_BYTES,
    ) -> None:
        self.why_none = why_none
        self.lost = ""  # why this process cannot use them any more
        self.ledger = Ledger()
        # One for all: what is pinned, every device may copy from and to.
        self.pinned = BlockPool(devices[0], PINNED_MEMORY, pinned_bytes) if devices else None
        self._memories = [
            DeviceMemory(device, gpu_bytes, self.pinned, self.ledger) for device in devices if self.pinned is not None
        ]

    @property
    def gpus(self) -> Gpus:
        """What configurations are told of them."""
        return Gpus(tuple(range(self.count)), self.why_none)

    @property
    def count(self) -> int:
        return len(self._memories)

    def __getitem__(self, number: int) -> DeviceMemory:
        """Raises Unsupported where there is no such GPU."""
        if 0 <= number < len(self._memories):
            return self._memories[number]
        if not self._memories:
            raise Unsupported(self.why_none)
        raise Unsupported(f"there is no GPU {number} here: they are numbered from 0 to {len(self._memories) - 1}")

    def limit(self, pinned_bytes: int | None, gpu_bytes: Mapping[int, int]) -> None:
        """How much the pools may hold from now on: the pinned one, and each GPU's that is named. None: as it is."""
        if self.pinned is not None and pinned_bytes is not None:
            self.pinned.limit(pinned_bytes)
        for number, budget in gpu_bytes.items():
            if number < self.count:
                self[number].pool.limit(budget)
            else:
                log.warning("there is no GPU %d here whose pool could be limited", number)

    def look_for_loss(self) -> None:
        """Ask the devices, and say once what is found."""
        if self.lost:
            return
        for memory in self._memories:
            why = memory.device.why_lost()
            if why:
                self.lost = LOST.format(why=why)
                log.error("%s. Until then the server says that it is not live", self.lost)
                return

    def statistics(self) -> Mapping[MemoryPlace, BlockStatistics]:
        """Of every pool there is."""
        pools = [] if self.pinned is None else [self.pinned, *(memory.pool for memory in self._memories)]
        return {pool.place: pool.statistics() for pool in pools}


_current: Devices | None = None


def devices() -> Devices:
    """This process's GPUs. The first call may take a second; it never raises."""
    global _current  # looked for once, like the driver itself
    if _current is None:
        _current = _look()
    return _current


@contextmanager
def using(found: Devices) -> Iterator[Devices]:
    """Within the block, these are the process's GPUs."""
    global _current  # see above
    before, _current = _current, found
    try:
        yield found
    finally:
        _current = before


def lost() -> str:
    """Why this process cannot use its GPUs any more, "" where it can, or never did."""
    return "" if _current is None else _current.lost


def look_for_loss() -> None:
    """Something failed: was it a GPU? May be called from any thread, and costs nothing where none is in use."""
    if _current is not None and _current.count:
        _current.look_for_loss()


def _look() -> Devices:
    why = _why_no_driver()
    if why:
        return Devices((), why)
    from flowserve.memory import cuda  # heavy, and only where there is a driver

    found, why = cuda.find()
    return Devices(found, why)


def _why_no_driver() -> str:
    """Empty where the driver finds a GPU. Asks the driver itself: a library that probes the GPU may keep it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "this machine has no GPU that can be used: its NVIDIA driver finds none"
    return ""
