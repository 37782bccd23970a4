"""Copies to and from a GPU that somebody waits for, beside those of instances (stream.py): for tensors of other
libraries and of clients.

Decided here: that whoever hands over a tensor without saying on which stream it was made is waited for, whole device
and all; it is done on a model's own thread or in its process, and its answers are what everybody waits for anyway. One
stream of each GPU serves all such copies, one at a time.
"""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakKeyDictionary

from flowserve.memory.device import Stream
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.devices import devices
from flowserve.memory.dlpack import Foreign
from flowserve.memory.pool import HOST
from flowserve.values import HOST_MEMORY, Array, MemoryPlace

_lock: Final = threading.Lock()
_streams: Final[WeakKeyDictionary[DeviceMemory, Stream]] = WeakKeyDictionary()


def landed(tensor: Foreign) -> Array:
    """A copy of a tensor on the host. Raises Unsupported where this process has no such GPU."""
    memory = devices()[tensor.device]
    array: Array = HOST.take(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)
    memory.device.settle()
    carry(memory, memory.place, HOST_MEMORY, array.ctypes.data, tensor.address, tensor.nbytes)
    return array


def carry(memory: DeviceMemory, source: MemoryPlace, to: MemoryPlace, target: int, origin: int, nbytes: int) -> None:
    """Copy between the host and the GPU of `memory`, and wait for it."""
    device = memory.device
    with _lock:
        stream = _streams.get(memory)
        if stream is None:
            stream = _streams[memory] = device.stream()
        device.copy(target, origin, nbytes, stream)
        device.synchronize(device.record(stream))
    memory.ledger.record(source, to, nbytes)
