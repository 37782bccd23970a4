"""Answers that are remembered: what makes two requests the same, and which answers make room for others.

Decided here: the key (128 bits over everything that an answer may depend on), and that the answers used longest ago go
first, by bytes. What is kept owns its memory: it pins no block that a batch was computed in, and nobody can write to
it. Who asks and when is gate.py's.
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

# What an entry costs besides its tensors: key, records, array headers. So that small answers are bounded too.
ENTRY_BYTES: Final = 512


class Lru(Generic[K, V]):
    """Things by key that weigh at most `capacity` bytes together; the one used longest ago goes first.

    Always true: `nbytes` is the sum of what is held, and at most `capacity`.
    """

    __slots__ = ("_entries", "capacity", "nbytes")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """What was put under `key`, used now; None where it is not (any more)."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, nbytes: int) -> bool:
        """Keep it in place of what was there. False, with nothing changed, for what is larger than everything."""
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


class Kept(NamedTuple):
    """An answer: its tensors by output, and what a plain model's response says besides them."""

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any] | None


Cache = Lru[bytes, Kept]


def key_of(served: tuple[str, int, int], request: Request, outputs: tuple[str, ...]) -> bytes:
    """128 bits for what an answer depends on: which load of which deployment (`served`), the outputs asked for, and
    each input's name, data type, shape and contents. A model may read a request's parameters and sequence too, so that
    they count; ids, priorities and timeouts do not.
    """
    digest = blake2b(digest_size=16)
    facts = [*served, outputs, request.sequence_id, request.sequence_start, request.sequence_end]
    digest.update(repr((facts, sorted(request.parameters.items()))).encode())
    for name in sorted(request.inputs):
        array = request.inputs[name]
        contents = bytes_codec.encode(array) if array.dtype.hasobject else _flat(array)
        digest.update(repr((name, array.dtype.str, array.shape, len(contents))).encode())
        digest.update(contents)
    return digest.digest()


def kept(tensors: Mapping[str, Tensor], parameters: Mapping[str, Any] | None = None) -> tuple[Kept, int]:
    """Copies that own their memory and cannot be written to, and what they weigh in bytes."""
    copies = {}
    total = ENTRY_BYTES + sum([len(key) + len(str(value)) for key, value in (parameters or {}).items()])
    for name, tensor in tensors.items():
        copy = np.array(tensor.array, order="C")
        copy.flags.writeable = False
        copies[name] = Tensor(copy) if tensor.stop == WHOLE else Tensor(copy, 0, len(copy))
        total += weight(copy)
    return Kept(copies, parameters), total


def weight(array: Array) -> int:
    """The bytes of an array; of strings those that they hold."""
    if not array.dtype.hasobject:
        return array.nbytes
    return array.nbytes + sum([len(each) for each in array.ravel().tolist()])


def _flat(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
