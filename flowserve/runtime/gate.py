"""Between a deployment's door and its graph: remembered answers, how many may be inside, and until when.

Decided here: a request whose answer is remembered never enters; one that is being answered already waits for that
answer; the others enter while there is room and wait, or are refused, while there is none; and all of them have until
their deadline. Most deployments have nothing of this, and then no gate: their requests cost nothing here. A call that
another model makes waits for nobody here, who might be waiting for its caller: it counts, and enters at once.

Who waits here is held by the dispatcher like everybody else in flight, so that leaving, ending and deadlines need no
second way. Always true: (1) `inside` and `nbytes` are the number and bytes of the requests that were let in and are
not over, calls of models among them; (2) nobody waits while there is room for the first who waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from flowserve.config.gate import GateOptions
from flowserve.errors import FlowserveError, TooLarge, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.observe.statistics import REJECTED, Statistics
from flowserve.runtime.accounts import leave_batch
from flowserve.runtime.cache import Cache, Kept, kept, key_of, weight
from flowserve.scheduling.calls import Called
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.flows import Late
from flowserve.scheduling.router import Flow

log = logging.getLogger("flowserve.runtime")

_loads = count(1)


class _Leader:
    """A request that is being answered, and those who wait for the same answer."""

    __slots__ = ("followers", "key", "lookup_ns")

    def __init__(self, key: bytes, lookup_ns: int) -> None:
        self.key = key
        self.lookup_ns = lookup_ns
        self.followers: list[Flow] = []


class Gate:
    """The gate of one loaded deployment. `output_slot`: where its outputs lie in a flow, by name."""

    _may_follow = True  # whoever asks what somebody is being answered

    def __init__(
        self,
        options: GateOptions,
        cache: Cache | None,
        key: ModelKey,
        output_slot: dict[str, int],
        statistics: Statistics,
        dispatcher: Dispatcher,
        clock: Callable[[], int],
    ) -> None:
        self._options = options
        self._cache = cache
        self._served = (key.name, key.version, next(_loads))  # what is loaded again may answer otherwise
        self._output_slot = output_slot
        self._statistics = statistics
        self._dispatcher = dispatcher
        self._clock = clock
        self.inside = 0
        self.nbytes = 0
        self._sizes: dict[Flow, int] = {}  # of those inside
        self._waiting: deque[tuple[Flow, int]] = deque()
        self._leaders: dict[bytes, Flow] = {}
        self._leading: dict[Flow, _Leader] = {}
        self._following: set[Flow] = set()

    def enter(self, flow: Flow) -> None:
        """Take a request that was admitted. It may be done afterwards. Raises Unavailable where it is full and nobody
        waits, TooLarge for what could never enter.
        """
        if self._cache is not None and self._find(self._cache, flow, may_follow=self._may_follow):
            return
        try:
            self._let_in(flow)
        except FlowserveError:
            self._statistics.failed(1, 0, REJECTED)
            self._lead_no_more(flow, passing_on=True)
            raise

    def would_wait(self, flow: Flow) -> bool:
        """Whether it would have to wait for room if it entered now."""
        return bool(self._waiting) or not self._has_room(self._weight(flow))

    def call(self, flow: Called, take: Callable[[Called], None]) -> None:
        """As `enter`, for a request that a model makes: a remembered answer is its answer, else it enters by `take`."""
        if self._cache is not None and self._find(self._cache, flow, may_follow=False):
            return
        try:
            size = self._checked_weight(flow)
            take(flow)
        except FlowserveError:
            self._lead_no_more(flow, passing_on=True)
            raise
        self._count(flow, size)
        self._limit_time(flow)

    def leave(self, flow: Flow, *, is_answered: bool = True) -> bool:
        """A request is over; or not `is_answered`: its caller left. Returns whether it is counted already."""
        self._make_room(flow)
        late = flow.error if isinstance(flow.error, Late) and not flow.plan.graph.is_ensemble else None
        if late is not None and not (late.is_running and leave_batch(flow, self._statistics, self._dispatcher)):
            self._statistics.failed(1, self._clock() - flow.arrived_ns, REJECTED)
        if flow in self._following:
            self._following.discard(flow)
            return flow.error is None
        leader = self._leading.get(flow)
        if leader is not None:
            if is_answered and flow.error is None:
                self._answer_followers(flow, leader)
            else:
                self._lead_no_more(flow, passing_on=True)
        return False

    # ------------------------------------------------------------------ room

    def _let_in(self, flow: Flow) -> None:
        options = self._options
        size = self._checked_weight(flow)
        if not self._waiting and self._has_room(size):
            self._count(flow, size)
            self._dispatcher.submit(flow)
        elif options.waits:
            self._waiting.append((flow, size))
            self._dispatcher.hold(flow)
        else:
            raise Unavailable(self._full(size))
        self._limit_time(flow)

    def _limit_time(self, flow: Flow) -> None:
        """The graph's own deadline, or the request's timeout where that is sooner: for all its steps together."""
        if self._options.deadline_ms:
            allowed_ns = self._options.deadline_ms * 1_000_000
            if flow.timeout_ns:
                allowed_ns = min(allowed_ns, flow.timeout_ns)
            self._dispatcher.due_by(flow, flow.arrived_ns + allowed_ns)

    def _checked_weight(self, flow: Flow) -> int:
        size, most = self._weight(flow), self._options.max_request_bytes
        if size > most > 0:
            limit = f"max_request_bytes of '{self._served[0]}' is {most}"
            raise TooLarge(f"a request of {size} bytes can never be let in: {limit}")
        return size

    def _weight(self, flow: Flow) -> int:
        """The bytes of its inputs, where anybody counts them."""
        if not self._options.max_request_bytes:
            return 0
        return sum([weight(array) for array in flow.request.inputs.values()])

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
        elif self._waiting:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not flow)
        self._let_in_who_waits()

    def _let_in_who_waits(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][1]):
            flow, size = self._waiting.popleft()
            self._count(flow, size)
            self._dispatcher.release(flow)

    # ------------------------------------------------------------------ remembered answers

    def _find(self, cache: Cache, flow: Flow, *, may_follow: bool) -> bool:
        """Whether the request need not be run: its answer is there, or will be, where it `may_follow` another."""
        began_ns = self._clock()
        key = key_of(self._served, flow.request, flow.wanted)
        answer = cache.get(key)
        if answer is not None:
            self._hit(flow, answer, began_ns)
            return True
        leader = self._leaders.get(key)
        if leader is not None and not may_follow:
            self._statistics.missed(self._clock() - began_ns)
            return False
        if leader is not None:
            self._leading[leader].followers.append(flow)
            self._following.add(flow)
            self._dispatcher.hold(flow)
            self._limit_time(flow)
            return True
        self._leaders[key] = flow
        self._leading[flow] = _Leader(key, self._clock() - began_ns)
        return False

    def _hit(self, flow: Flow, answer: Kept, began_ns: int) -> None:
        """What it asks is remembered."""
        self._answer(flow, answer)
        flow.done = True
        now_ns = self._clock()
        self._statistics.hit(now_ns - flow.arrived_ns, now_ns - began_ns)

    def _share(self, follower: Flow, answer: Kept) -> None:
        """Who was held for it gets it now."""
        self._answer(follower, answer)
        total_ns = self._clock() - follower.arrived_ns
        self._statistics.hit(total_ns, total_ns)
        self._dispatcher.answer(follower)

    def _answer(self, flow: Flow, answer: Kept) -> None:
        tensors: list[Any] = [None] * len(flow.tensors)
        for name, tensor in answer.tensors.items():
            tensors[self._output_slot[name]] = tensor
        flow.tensors = tensors
        flow.parameters = answer.parameters

    def _answer_followers(self, flow: Flow, leader: _Leader) -> None:
        """An answer is remembered and shared."""
        cache = self._cache
        assert cache is not None
        began_ns = self._clock()
        slots = {name: self._output_slot[name] for name in flow.wanted}
        made = {name: flow.tensors[slot] for name, slot in slots.items() if flow.tensors[slot] is not None}
        try:
            answer, nbytes = kept(made, flow.parameters)
            cache.put(leader.key, answer, nbytes)
        except Exception:  # there is no memory for a copy: nothing is remembered, and somebody else leads
            log.exception("an answer of '%s' cannot be remembered", flow.plan.graph.name)
            self._lead_no_more(flow, passing_on=True)
            return
        self._statistics.missed(leader.lookup_ns + self._clock() - began_ns)
        self._lead_no_more(flow, passing_on=False)
        for follower in leader.followers:
            if not follower.done:
                self._share(follower, answer)

    def _lead_no_more(self, flow: Flow, *, passing_on: bool) -> None:
        """A failure is neither remembered nor shared: whoever waited for it runs alone. Where only the caller left, the
        next leads.
        """
        leader = self._leading.pop(flow, None)
        if leader is None:
            return
        self._leaders.pop(leader.key, None)
        if passing_on:
            followers = [follower for follower in leader.followers if not follower.done]
            is_failure = flow.error is not None
            for follower in followers:
                self._following.discard(follower)
                self._run_after_all(follower, leader.key, alone=is_failure)

    def _run_after_all(self, follower: Flow, key: bytes, *, alone: bool) -> None:
        if not alone:
            first = self._leaders.get(key)
            if first is not None:
                self._leading[first].followers.append(follower)
                self._following.add(follower)
                return
            self._leaders[key] = follower
            self._leading[follower] = _Leader(key, 0)
        self._waiting.append((follower, self._weight(follower)))  # it was let in to wait, so that it is not refused now
        self._let_in_who_waits()
