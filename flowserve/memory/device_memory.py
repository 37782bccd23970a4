"""All the memory that work on one GPU may use: its own, pinned, and what is left when both are spent.

Decided here: the order in which memories are tried, and what is said when the first has no room: one warning, and work
that goes on, more slowly. Budgets are blocks.py's.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from flowserve.memory.blocks import Block, BlockPool
from flowserve.memory.device import Device, Stream
from flowserve.memory.ledger import Ledger
from flowserve.memory.pool import HOST
from flowserve.values import HOST_MEMORY, gpu_memory

log = logging.getLogger("flowserve.memory")

_UNBOUNDED: Final = 1 << 62  # the host's own memory; nothing is allocated by that pool


class DeviceMemory:
    """One GPU's pools. `pinned` and `ledger` are shared by all GPUs of a server; `sharing` is held by whoever copies a
    tensor here that others want too.
    """

    def __init__(self, device: Device, budget_bytes: int, pinned: BlockPool, ledger: Ledger) -> None:
        self.device = device
        self.place = gpu_memory(device.number)
        self.pool = BlockPool(device, self.place, budget_bytes)
        self.pinned = pinned
        self.ledger = ledger
        self.sharing = threading.Lock()
        self._adopted_host = BlockPool(device, HOST_MEMORY, _UNBOUNDED)
        self._has_warned = False

    def take(self, nbytes: int, stream: Stream) -> Block:
        """A block that work on `stream` may read and write: of the device's memory, else pinned, else of the host's."""
        block = self.pool.take(nbytes, stream)
        if block is not None:
            return block
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the pool of %s (%d bytes) has no room for %d bytes more: tensors lie in host memory meanwhile",
                self.place,
                self.pool.statistics().budget_bytes,
                nbytes,
            )
        return self.take_on_host(nbytes, stream)

    def take_on_host(self, nbytes: int, stream: Stream | None) -> Block:
        """The same of the host's memory: pinned, where there is room. `stream` None: the host writes it first."""
        return self.pinned.take(nbytes, stream) or self._pageable(nbytes)

    def _pageable(self, nbytes: int) -> Block:
        array = HOST.take(nbytes)
        return self._adopted_host.adopt(array, array.ctypes.data, nbytes)
