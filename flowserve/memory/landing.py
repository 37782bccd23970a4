"""Tensors of other libraries come from a GPU to the host.

Decided here: that whoever hands one over without saying on which stream it was made is waited for, whole device and
all; it is done on a model's own thread or in its process, and its answers are what everybody waits for anyway. One
stream of each GPU serves all such copies, one at a time.
"""

from __future__ import annotations

import threading
from typing import Final

from flowserve.memory.device import Stream
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.devices import devices
from flowserve.memory.dlpack import Foreign
from flowserve.memory.pool import HOST
from flowserve.values import HOST_MEMORY, Array

_lock: Final = threading.Lock()
_streams: Final[dict[DeviceMemory, Stream]] = {}


def landed(tensor: Foreign) -> Array:
    """A copy of a tensor on the host. Raises Unsupported where this process has no such GPU."""
    memory = devices()[tensor.device]
    device = memory.device
    array: Array = HOST.take(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)
    with _lock:
        stream = _streams.get(memory)
        if stream is None:
            stream = _streams[memory] = device.stream()
        device.settle()
        device.copy(array.ctypes.data, tensor.address, tensor.nbytes, stream)
        device.synchronize(device.record(stream))
    memory.ledger.record(memory.place, HOST_MEMORY, tensor.nbytes)
    return array
