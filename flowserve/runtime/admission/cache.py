"""The response cache: keys, entries, and what one loaded model or ensemble keeps in it.

Decides the key of a response (128 bits over all that it may depend on), that the least recently used responses are
evicted first, by bytes, that tensors in device memory are neither looked up nor kept, and what counts as a hit and as a
miss. A cached response owns its memory, so that it keeps no block of a batch alive, and is read-only. Requests and
steps of a model share its entries. Does not know which request or step runs (`scheduling.single_flight`), or how one
gets its response: `controller` does for requests, `steps` for steps of ensembles. They call this module.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from flowserve.graph.types import ModelKey
from flowserve.memory import raw
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.observe.log_fields import of_request
from flowserve.observe.statistics import Statistics
from flowserve.scheduling.frames.frame import Ticket
from flowserve.values import HOST_MEMORY, Array, Request

log = logging.getLogger("flowserve.runtime")

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
Served = tuple[str, int, int]

_loads = count(1)


def served_by(key: ModelKey) -> Served:
    """The part of the keys that identifies the load of a model or ensemble: a reloaded one may respond differently."""
    return key.name, key.version, next(_loads)


def cache_key(
    served: Served, request: Request, outputs: tuple[str, ...], inputs: Mapping[str, Array] | None = None
) -> bytes:
    """A 128-bit digest of all that a response depends on: the load of the deployment (`served`), the requested outputs,
    the name, data type, shape and contents of each input, and the parameters and sequence fields, which a model may
    read. Ids, priorities and timeouts are not part of it. `inputs`: those of a step of the request; None: its own.
    """
    inputs = request.inputs if inputs is None else inputs
    digest = blake2b(digest_size=16)
    facts = [*served, outputs, request.sequence_id, request.sequence_start, request.sequence_end]
    digest.update(repr((facts, sorted(request.parameters.items()))).encode())
    for name in sorted(inputs):
        array = inputs[name]
        contents = raw.flat_bytes(array).data
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
        array = tensor.array
        if isinstance(array, raw.EncodedBytes):
            copy = array.in_own_memory()
        else:
            copy = np.array(array, order="C")
            copy.flags.writeable = False
        copies[name] = Tensor(copy) if tensor.stop == WHOLE else Tensor(copy, 0, len(copy))
        total += array_bytes(copy)
    return CachedResponse(copies, parameters), total


def array_bytes(array: Array) -> int:
    """The bytes of an array; for strings including their contents."""
    if not array.dtype.hasobject or isinstance(array, raw.EncodedBytes):
        return array.nbytes
    return array.nbytes + sum([len(each) for each in array.ravel().tolist()])


class DeploymentCache:
    """The cached responses of one loaded model or ensemble. `served` identifies it in the keys (`served_by`)."""

    def __init__(
        self, responses: ResponseCache, served: Served, statistics: Statistics, clock: Callable[[], int]
    ) -> None:
        self.served = served
        self._responses = responses
        self._statistics = statistics
        self._clock = clock

    def find(
        self, ticket: Ticket, outputs: tuple[str, ...], inputs: Mapping[str, Tensor] | None, *, may_answer: bool = True
    ) -> CachedResponse | None:
        """The cached response of a step, or of a request (`inputs` None). Sets `ticket.lookup`: the key, and how long
        this took; () if there is no key. `may_answer` False: it has to run.
        """
        began_ns = self._clock()
        response = None
        ticket.lookup = ()
        request: Request = ticket.frame.request
        arrays = None
        if inputs is not None:
            if any(tensor.place != HOST_MEMORY for tensor in inputs.values()):
                return None
            arrays = {name: tensor.array for name, tensor in inputs.items()}
        try:
            key = cache_key(self.served, request, outputs, arrays)
            if may_answer:
                response = self._responses.get(key)
        except Exception:  # no memory for the bytes of a key: it runs
            self._log("a request or step of '%s' cannot be looked up in the response cache", request)
            return None
        ticket.lookup = key, self._clock() - began_ns
        return response

    def hit(self, since_ns: int, began_ns: int) -> None:
        """Count a cached response: of a request or step since `since_ns`, at the cache since `began_ns`."""
        now_ns = self._clock()
        self._statistics.hit(now_ns - since_ns, now_ns - began_ns)

    def keep(
        self, ticket: Ticket, tensors: Mapping[str, Tensor | None], parameters: Mapping[str, Any] | None
    ) -> CachedResponse | None:
        """Cache the response that a request or step made, and count its miss. None: it cannot be shared."""
        began_ns = self._clock()
        key, lookup_ns = ticket.lookup
        made = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        response = None
        if all(tensor.place == HOST_MEMORY for tensor in made.values()):
            try:
                response, nbytes = cached_copy(made, parameters)
                self._responses.put(key, response, nbytes)
            except Exception:  # no memory for a copy
                self._log("a response of '%s' cannot be cached", ticket.frame.request)
                response = None
        self._statistics.missed(lookup_ns + self._clock() - began_ns)
        return response

    def _log(self, text: str, request: Request) -> None:
        name = self.served[0]
        log.exception(text, name, extra=of_request(request, model=name))
