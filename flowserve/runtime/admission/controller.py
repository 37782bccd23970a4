"""Admission control for one deployment: response cache, concurrency limit, deadline.

Decides which requests enter a deployment's graph. A request whose response is cached does not enter. A request equal to
one in flight waits for that response. Other requests enter within the limits; beyond them they wait or are refused. All
requests end at their deadline. Most deployments have neither limits nor a cache, and then no controller. A call from
another model never waits here, because it might wait for its own caller: it is counted, and enters at once.

Does not know keys or entries of the response cache (`cache`), batches or workers. Waiting requests are held by the
scheduler like all others in flight, so that cancellation, shutdown and deadlines need no second implementation. Frame
by the engine.

Invariants: (1) `inside` and `nbytes` are the number and bytes of the requests that entered and are not over, calls of
models included; (2) no request waits while the limits allow the first waiting one; (3) if the order of responses is
kept, the first request in that order has no response yet.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from flowserve.config.parameters import AdmissionOptions
from flowserve.errors import FlowserveError, TooLarge, Unavailable
from flowserve.observe.statistics import HIT, Statistics
from flowserve.runtime.admission.cache import CachedResponse, DeploymentCache, array_bytes
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import PLAIN, Levels
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.single_flight import SingleFlight


class AdmissionController:
    """Admission control of one loaded deployment. `cache`: its response cache, None if it has none. `output_slot`: the
    slots of its outputs in a request, by name. `levels`: the policies of its queue, if it is a plain model.

    `keeps_order`: responses leave in the order of their requests. Then a cached response waits for earlier ones, and
    no request waits for the response of an equal one, since it would run out of order if that one failed. The scheduler
    keeps the order of requests that run.
    """

    def __init__(
        self,
        options: AdmissionOptions,
        cache: DeploymentCache | None,
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
        self._output_slot = output_slot
        self._statistics = statistics
        self._scheduler = scheduler
        self._clock = clock
        self.inside = 0
        self.nbytes = 0
        self._sizes: dict[Frame, int] = {}  # the bytes of the requests inside
        self._waiting: OrderedDict[Frame, int] = OrderedDict()  # requests by arrival, with their bytes
        self._flights = SingleFlight()  # requests that wait for the response of an equal one
        self._missed: dict[Frame, Ticket] = {}  # requests that were looked up, and run
        self._keeps_order = keeps_order and cache is not None
        self._arrived: deque[Frame] = deque()  # if the order is kept: the unanswered requests in order of arrival
        self._known: dict[Frame, CachedResponse] = {}  # cached responses of requests in `_arrived` that need not run
        self._is_answering = False

    def enter(self, frame: Frame) -> None:
        """Admit a valid request; a cached response completes it at once. Raises Unavailable if the limits are reached
        and requests may not wait, TooLarge for a request that could never enter.
        """
        if self._keeps_order:
            self._arrived.append(frame)
        try:
            if self._cache is None or not self._find(self._cache, frame, may_follow=not self._keeps_order):
                self._admit(frame)
        except FlowserveError:
            if self._keeps_order:
                self._arrived.pop()  # it is the last: nothing has arrived since
            self._leave_cache(frame, is_answered=False)
            raise
        finally:
            self._answer_known()

    def would_wait(self, frame: Frame) -> bool:
        """Whether the request would have to wait for the limits if it entered now."""
        return bool(self._waiting) or not self._has_room(self._request_bytes(frame))

    def call(self, frame: Frame, take: Callable[[Frame], None]) -> None:
        """As `enter`, for a call from a model: a cached response completes it, else it enters by `take`. It is not part
        of the order of responses, since an earlier request may be its caller.
        """
        if self._cache is not None and self._find(self._cache, frame, may_follow=False):
            return
        try:
            size = self._checked_bytes(frame)
            take(frame)
        except FlowserveError:
            self._leave_cache(frame, is_answered=False)
            raise
        self._count(frame, size)
        self._limit_time(frame)

    def leave(self, frame: Frame, *, is_answered: bool = True) -> None:
        """A request is over; `is_answered` False: its caller left."""
        self._make_room(frame)
        self._leave_cache(frame, is_answered=is_answered)
        self._answer_known()

    # ------------------------------------------------------------------ room

    def _admit(self, frame: Frame) -> None:
        size = self._checked_bytes(frame)
        if not self._waiting and self._has_room(size):
            self._count(frame, size)
            self._scheduler.submit(frame)
        elif self._options.waits:
            self._waiting[frame] = size
            self._scheduler.hold(frame)
        else:
            raise Unavailable(self._full(size))
        self._limit_time(frame)

    def _limit_time(self, frame: Frame) -> None:
        """Set the deadline of the request: the graph's, or the request's own timeout if that is earlier. If requests
        are answered at their timeout, the timeout of its model's queue is a deadline too.
        """
        options = self._options
        if not (options.deadline_ms or options.answers_at_timeout):
            return
        limits = [options.deadline_ms * 1_000_000, frame.record.timeout_ns]
        if options.answers_at_timeout:
            policy = self._levels.policy_of(self._levels.of(frame.record.priority))
            limits.append(0 if policy.is_delayed else policy.timeout_of(frame))
        if allowed_ns := min(filter(None, limits), default=0):
            self._scheduler.due.add(frame, frame.record.arrived_ns + allowed_ns)

    def _checked_bytes(self, frame: Frame) -> int:
        size, most = self._request_bytes(frame), self._options.max_request_bytes
        if size > most > 0:
            limit = f"max_request_bytes of '{self._statistics.name}' is {most}"
            raise TooLarge(f"a request of {size} bytes can never be let in: {limit}")
        return size

    def _request_bytes(self, frame: Frame) -> int:
        """The bytes of its inputs, 0 if they are not limited."""
        if not self._options.max_request_bytes:
            return 0
        return sum([array_bytes(array) for array in frame.request.inputs.values()])

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
        return f"'{self._statistics.name}' is full: {what}; ask again later"

    def _count(self, frame: Frame, size: int) -> None:
        self._sizes[frame] = size
        self.inside += 1
        self.nbytes += size

    def _make_room(self, frame: Frame) -> None:
        size = self._sizes.pop(frame, None)
        if size is not None:
            self.inside -= 1
            self.nbytes -= size
        else:
            self._waiting.pop(frame, None)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._has_room(next(iter(self._waiting.values()))):
            frame, size = self._waiting.popitem(last=False)
            self._count(frame, size)
            self._scheduler.release(frame)

    # ------------------------------------------------------------------ the response cache

    def _find(self, cache: DeploymentCache, frame: Frame, *, may_follow: bool) -> bool:
        """Whether the request need not run: its response is cached, or it `may_follow` an equal request in flight."""
        began_ns = self._clock()
        ticket = Ticket(frame, frame.plan.nodes[0], 0, None)
        response = cache.find(ticket, frame.wanted, None)
        if response is not None:
            self._hit(cache, frame, response, began_ns)
            return True
        key = ticket.lookup[0] if ticket.lookup else None
        self._flights.waiting.append(ticket)
        if self._flights.run(ticket, key, may_follow=may_follow):
            self._missed[frame] = ticket
            return False
        self._scheduler.hold(frame)
        self._limit_time(frame)
        return True

    def _hit(self, cache: DeploymentCache, frame: Frame, response: CachedResponse, began_ns: int) -> None:
        """Complete a request with a cached response."""
        if len(self._arrived) > 1 and self._arrived[-1] is frame:  # earlier requests are not answered yet
            self._known[frame] = response
            self._scheduler.hold(frame)
            self._limit_time(frame)
            return
        self._fill(frame, response)
        frame.record.done = True
        cache.hit(frame.record.arrived_ns, began_ns)

    def _share(self, cache: DeploymentCache, frame: Frame, response: CachedResponse) -> None:
        """Complete a held request with this response."""
        self._fill(frame, response)
        frame.record.outcome = HIT
        cache.hit(frame.record.arrived_ns, frame.record.arrived_ns)
        self._scheduler.answer(frame)

    def _fill(self, frame: Frame, response: CachedResponse) -> None:
        tensors: list[Any] = [None] * len(frame.tensors)
        for name, tensor in response.tensors.items():
            tensors[self._output_slot[name]] = tensor
        frame.tensors = tensors
        frame.wanted = tuple(response.tensors)  # in the order of the response
        frame.parameters = response.parameters

    def _leave_cache(self, frame: Frame, *, is_answered: bool) -> None:
        """A request is over. If it ran, the requests that wait for its response are completed with it. An error is
        neither cached nor shared: each of them then runs by itself. If its caller left, the next of them leads.
        """
        cache = self._cache
        if cache is None:
            return
        self._known.pop(frame, None)
        ticket = self._missed.pop(frame, None)
        if ticket is None or not (is_answered or frame.record.error is not None):
            _, following = self._flights.withdraw(frame)
            while following and following[0].frame.record.done:  # it is about to leave
                _, following = self._flights.withdraw(following[0].frame)
        elif frame.record.error is not None:
            following = self._flights.fail(ticket)
        else:
            following = self._flights.land(ticket)
            if ticket.lookup:
                made = {name: frame.tensors[self._output_slot[name]] for name in frame.wanted}
                response = cache.keep(ticket, made, frame.parameters)
                if response is not None:
                    for one in following:
                        if not one.frame.record.done:
                            self._share(cache, one.frame, response)
                    return
        for one in following:
            if not one.frame.record.done:
                self._missed[one.frame] = one
                # It was admitted already, so it waits and is not refused.
                self._waiting[one.frame] = self._request_bytes(one.frame)
                self._admit_waiting()

    def _answer_known(self) -> None:
        """Complete the first requests in order whose responses are known. Not reentrant: each `leave` calls it."""
        if self._is_answering or not self._arrived:
            return
        self._is_answering = True
        try:
            while self._arrived and (self._arrived[0].record.done or self._arrived[0] in self._known):
                frame = self._arrived.popleft()
                if not frame.record.done:
                    assert self._cache is not None
                    self._share(self._cache, frame, self._known.pop(frame))
        finally:
            self._is_answering = False
