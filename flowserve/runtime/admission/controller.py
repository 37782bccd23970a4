"""Admission control for one deployment: response cache, concurrency limit, deadline.

Decides which requests enter a deployment's graph. A request whose response is cached does not enter. A request equal to
one in flight waits for that response. Other requests enter within the limits; beyond them they wait or are refused. All
requests end at their deadline. Most deployments have neither limits nor a cache, and then no controller. A call from
another model never waits here, because it might wait for its own caller: it is counted, and enters at once.

Decides the key of a cached response too (128 bits over all that a response may depend on), and that the least recently
used responses are evicted first, by bytes. A cached response owns its memory, so that it keeps no block of a batch
alive, and is read-only.

Does not know batches or workers. Waiting requests are held by the scheduler like all others in flight, so that
cancellation, shutdown and deadlines need no second implementation. Called by the engine.

Invariants: (1) `inside` and `nbytes` are the number and bytes of the requests that entered and are not over, calls of
models included; (2) no request waits while the limits allow the first waiting one; (3) if the order of responses is
kept, the first request in that order has no response yet.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from flowserve.config.parameters import AdmissionOptions
from flowserve.errors import FlowserveError, TooLarge, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.memory import raw
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.observe.log_fields import of_request
from flowserve.observe.statistics import REJECTED, Statistics
from flowserve.scheduling.call_graph import Called
from flowserve.scheduling.flow import Flow
from flowserve.scheduling.queue import PLAIN, Levels
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.single_flight import SingleFlight
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


log = logging.getLogger("flowserve.runtime")


class AdmissionController:
    """Admission control of one loaded deployment. `served`: the first part of its keys (`served_by`). `output_slot`:
    the slots of its outputs in a flow, by name. `levels`: the policies of its queue, if it is a plain model.

    `keeps_order`: responses leave in the order of their requests. Then a cached response waits for earlier ones, and
    no request waits for the response of an equal one, since it would run out of order if that one failed. The scheduler
    keeps the order of requests that run.
    """

    def __init__(
        self,
        options: AdmissionOptions,
        cache: ResponseCache | None,
        served: Served,
        output_slot: dict[str, int],
        statistics: Statistics,
        scheduler: Scheduler,
        clock: Callable[[], int],
        *,
        keeps_order: bool = False,
        levels: Levels = PLAIN,
    ) -> None:
        self._options = options
        self._levels = levels
        self._cache = cache
        self._served = served
        self._output_slot = output_slot
        self._statistics = statistics
        self._scheduler = scheduler
        self._clock = clock
        self.inside = 0
        self.nbytes = 0
        self._sizes: dict[Flow, int] = {}  # the bytes of the requests inside
        self._waiting: OrderedDict[Flow, int] = OrderedDict()  # requests by arrival, with their bytes
        self._flights: SingleFlight[Flow] = SingleFlight()
        self._missed: dict[Flow, tuple[bytes, int]] = {}  # by leader: the key, and how long its lookup took
        self._following: set[Flow] = set()  # requests that are answered without running
        self._keeps_order = keeps_order and cache is not None
        self._arrived: deque[Flow] = deque()  # if the order is kept: the unanswered requests in order of arrival
        self._known: dict[Flow, CachedResponse] = {}  # cached responses of requests in `_arrived` that need not run
        self._is_answering = False

    def enter(self, flow: Flow) -> None:
        """Admit a valid request; a cached response completes it at once. Raises Unavailable if the limits are reached
        and requests may not wait, TooLarge for a request that could never enter.
        """
        if self._keeps_order:
            self._arrived.append(flow)
        try:
            if self._cache is None or not self._find(self._cache, flow, may_follow=not self._keeps_order):
                self._admit(flow)
        except FlowserveError:
            if self._keeps_order:
                self._arrived.pop()  # it is the last: nothing has arrived since
            self._statistics.failed(1, 0, REJECTED)
            self._stop_leading(flow)
            raise
        finally:
            self._answer_known()

    def would_wait(self, flow: Flow) -> bool:
        """Whether the request would have to wait for the limits if it entered now."""
        return bool(self._waiting) or not self._has_room(self._request_bytes(flow))

    def call(self, flow: Called, take: Callable[[Called], None]) -> None:
        """As `enter`, for a call from a model: a cached response completes it, else it enters by `take`. It is not part
        of the order of responses, since an earlier request may be its caller.
        """
        if self._cache is not None and self._find(self._cache, flow, may_follow=False):
            return
        try:
            size = self._checked_bytes(flow)
            take(flow)
        except FlowserveError:
            self._stop_leading(flow)
            raise
        self._count(flow, size)
        self._limit_time(flow)

    def leave(self, flow: Flow, *, is_answered: bool = True) -> bool:
        """A request is over; `is_answered` False: its caller left. Returns whether it is counted already."""
        is_counted = False
        self._make_room(flow)
        if flow in self._following:
            self._following.discard(flow)
            self._flights.leave(flow, has_failed=False)
            is_counted = flow.error is None
        elif flow in self._missed:
            if is_answered and flow.error is None:
                self._answer_followers(flow)
            else:
                self._stop_leading(flow)
        self._known.pop(flow, None)
        self._answer_known()
        return is_counted

    # ------------------------------------------------------------------ room

    def _admit(self, flow: Flow) -> None:
        size = self._checked_bytes(flow)
        if not self._waiting and self._has_room(size):
            self._count(flow, size)
            self._scheduler.submit(flow)
        elif self._options.waits:
            self._waiting[flow] = size
            self._scheduler.hold(flow)
        else:
            raise Unavailable(self._full(size))
        self._limit_time(flow)

    def _limit_time(self, flow: Flow) -> None:
        """Set the deadline of the request: the graph's, or the request's own timeout if that is earlier. If requests
        are answered at their timeout, the timeout of its model's queue is a deadline too.
        """
        options = self._options
        if not (options.deadline_ms or options.answers_at_timeout):
            return
        limits = [options.deadline_ms * 1_000_000, flow.timeout_ns]
        if options.answers_at_timeout:
            policy = self._levels.policy_of(self._levels.of(flow.priority))
            limits.append(0 if policy.is_delayed else policy.timeout_of(flow))
        if allowed_ns := min(filter(None, limits), default=0):
            self._scheduler.due.add(flow, flow.arrived_ns + allowed_ns)

    def _checked_bytes(self, flow: Flow) -> int:
        size, most = self._request_bytes(flow), self._options.max_request_bytes
        if size > most > 0:
            limit = f"max_request_bytes of '{self._served[0]}' is {most}"
            raise TooLarge(f"a request of {size} bytes can never be let in: {limit}")
        return size

    def _request_bytes(self, flow: Flow) -> int:
        """The bytes of its inputs, 0 if they are not limited."""
        if not self._options.max_request_bytes:
            return 0
        return sum([array_bytes(array) for array in flow.request.inputs.values()])

    def _has_room(self, size: int) -> bool:
        options = self._options
        if options.max_requests and self.inside >= options.max_requests:
            return False
        return not options.max_request_bytes or self.nbytes + size <= options.max_request_bytes

    def _full(self, size: int) -> str:
        options = self._options
        what = f"{self.inside} requests are under way (max_requests {options.max_requests})"
        if options.max_request_bytes and self.nbytes + size > options.max_request_bytes:
            what = f"{self.nbytes} bytes of requests are under way (max_request_bytes {options.max_request_bytes})"
        return f"'{self._served[0]}' is full: {what}; ask again later"

    def _count(self, flow: Flow, size: int) -> None:
        self._sizes[flow] = size
        self.inside += 1
        self.nbytes += size

    def _make_room(self, flow: Flow) -> None:
        size = self._sizes.pop(flow, None)
        if size is not None:
            self.inside -= 1
            self.nbytes -= size
        else:
            self._waiting.pop(flow, None)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._has_room(next(iter(self._waiting.values()))):
            flow, size = self._waiting.popitem(last=False)
            self._count(flow, size)
            self._scheduler.release(flow)

    # ------------------------------------------------------------------ the response cache

    def _find(self, cache: ResponseCache, flow: Flow, *, may_follow: bool) -> bool:
        """Whether the request need not run: its response is cached, or it `may_follow` an equal request in flight."""
        began_ns = self._clock()
        key = cache_key(self._served, flow.request, flow.wanted)
        response = cache.get(key)
        if response is not None:
            self._hit(flow, response, began_ns)
            return True
        lookup_ns = self._clock() - began_ns
        if not may_follow and key in self._flights:
            self._statistics.missed(lookup_ns)
            return False
        if self._flights.join(key, flow):
            self._missed[flow] = key, lookup_ns
            return False
        self._following.add(flow)
        self._scheduler.hold(flow)
        self._limit_time(flow)
        return True

    def _hit(self, flow: Flow, response: CachedResponse, began_ns: int) -> None:
        """Complete a request with a cached response."""
        if len(self._arrived) > 1 and self._arrived[-1] is flow:  # earlier requests are not answered yet
            self._following.add(flow)
            self._known[flow] = response
            self._scheduler.hold(flow)
            self._limit_time(flow)
            return
        self._fill(flow, response)
        flow.done = True
        now_ns = self._clock()
        self._statistics.hit(now_ns - flow.arrived_ns, now_ns - began_ns)

    def _share(self, follower: Flow, response: CachedResponse) -> None:
        """Complete a held request with this response."""
        self._fill(follower, response)
        total_ns = self._clock() - follower.arrived_ns
        self._statistics.hit(total_ns, total_ns)
        self._scheduler.answer(follower)

    def _fill(self, flow: Flow, response: CachedResponse) -> None:
        tensors: list[Any] = [None] * len(flow.tensors)
        for name, tensor in response.tensors.items():
            tensors[self._output_slot[name]] = tensor
        flow.tensors = tensors
        flow.wanted = tuple(response.tensors)  # in the order of the response
        flow.parameters = response.parameters

    def _answer_followers(self, flow: Flow) -> None:
        """Cache a response, and complete the requests that wait for it."""
        cache = self._cache
        assert cache is not None
        key, lookup_ns = self._missed[flow]
        began_ns = self._clock()
        slots = {name: self._output_slot[name] for name in flow.wanted}
        made = {name: flow.tensors[slot] for name, slot in slots.items() if flow.tensors[slot] is not None}
        try:
            response, nbytes = cached_copy(made, flow.parameters)
            cache.put(key, response, nbytes)
        except Exception:  # no memory for a copy: nothing is cached, and another request leads
            name = flow.plan.graph.name
            log.exception("a response of '%s' cannot be cached", name, extra=of_request(flow.request, model=name))
            self._stop_leading(flow)
            return
        self._statistics.missed(lookup_ns + self._clock() - began_ns)
        del self._missed[flow]
        for follower in self._flights.land(flow):
            if not follower.done:
                self._share(follower, response)

    def _stop_leading(self, flow: Flow) -> None:
        """A leader is over without a response for its followers. An error is neither cached nor shared: each follower
        then runs by itself. If the leader's caller left, the next follower leads.
        """
        missed = self._missed.pop(flow, None)
        if missed is None:
            return
        has_failed = flow.error is not None
        following = self._flights.leave(flow, has_failed=has_failed)
        while not has_failed and following and following[0].done:  # it is about to leave
            self._following.discard(following[0])
            following = self._flights.leave(following[0], has_failed=False)
        for follower in following:
            self._following.discard(follower)
            if follower.done:
                continue
            if not has_failed:
                self._missed[follower] = missed[0], 0
            # It was admitted already, so it waits and is not refused.
            self._waiting[follower] = self._request_bytes(follower)
            self._admit_waiting()

    def _answer_known(self) -> None:
        """Complete the first requests in order whose responses are known. Not reentrant: each `leave` calls it."""
        if self._is_answering or not self._arrived:
            return
        self._is_answering = True
        try:
            while self._arrived and (self._arrived[0].done or self._arrived[0] in self._known):
                flow = self._arrived.popleft()
                if not flow.done:
                    self._share(flow, self._known.pop(flow))
        finally:
            self._is_answering = False
