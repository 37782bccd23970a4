"""The response cache: its keys, its entries, and which entries it evicts.

Decides the key (128 bits over all that a response may depend on), and that the least recently used responses
are evicted first, by bytes. A cached response owns its memory, so that it keeps no block of a batch alive, and is
read-only. Does not know when a request is looked up (controller.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from flowserve.memory import bytes_codec
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array, Request

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# The size of an entry besides its tensors (key, records, array headers), so that small responses are bounded too.
ENTRY_BYTES: Final = 512


class LruCache(Generic[K, V]):
    """Values by key, of at most `capacity` bytes in total; the least recently used is evicted first.

    Invariant: `nbytes` is the sum over all values, and at most `capacity`.
    """

    __slots__ = ("_entries", "capacity", "nbytes")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of `key`, which becomes the most recently used; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, nbytes: int) -> bool:
        """Replace the value of `key`. False, with nothing changed, for a value larger than the capacity."""
        if nbytes > self.capacity:
            return False
        former = self._entries.pop(key, None)
        if former is not None:
            self.nbytes -= former[1]
        while self.nbytes + nbytes > self.capacity:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed
        self._entries[key] = value, nbytes
        self.nbytes += nbytes
        return True

    def __len__(self) -> int:
        return len(self._entries)


class CachedResponse(NamedTuple):
    """The tensors of a response by output, and the parameters of a plain model's response."""

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any] | None


ResponseCache = LruCache[bytes, CachedResponse]


def cache_key(served: tuple[str, int, int], request: Request, outputs: tuple[str, ...]) -> bytes:
    """A 128-bit digest of all that a response depends on: the load of the deployment (`served`), the requested outputs,
    the name, data type, shape and contents of each input, and the parameters and sequence fields, which a model may
    read. Ids, priorities and timeouts are not part of it.
    """
    digest = blake2b(digest_size=16)
    facts = [*served, outputs, request.sequence_id, request.sequence_start, request.sequence_end]
    digest.update(repr((facts, sorted(request.parameters.items()))).encode())
    for name in sorted(request.inputs):
        array = request.inputs[name]
        contents = bytes_codec.flat_bytes(array).data
        digest.update(repr((name, array.dtype.str, array.shape, len(contents))).encode())
        digest.update(contents)
    return digest.digest()


def cached_copy(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Any] | None = None
) -> tuple[CachedResponse, int]:
    """A read-only copy of a response that owns its memory, and its bytes."""
    copies = {}
    total = ENTRY_BYTES + sum([len(key) + len(str(value)) for key, value in (parameters or {}).items()])
    for name, tensor in tensors.items():
        copy = np.array(tensor.array, order="C")
        copy.flags.writeable = False
        copies[name] = Tensor(copy) if tensor.stop == WHOLE else Tensor(copy, 0, len(copy))
        total += array_bytes(copy)
    return CachedResponse(copies, parameters), total


def array_bytes(array: Array) -> int:
    """The bytes of an array; for strings including their contents."""
    if not array.dtype.hasobject:
        return array.nbytes
    return array.nbytes + sum([len(each) for each in array.ravel().tolist()])
