"""Admission control: limits, deadlines and the response cache, for any order of arrivals, responses, failures,
cancellations and deadlines. The scheduler is the real one; the test sets its clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.backends.base import Results
from flowserve.config.parameters import AdmissionOptions
from flowserve.errors import DeadlineExceeded, FlowserveError, ModelFailed, TooLarge, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import ModelKey
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import REJECTED, Statistics
from flowserve.runtime.admission.cache import DeploymentCache, LruCache, ResponseCache, served_by
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.engine.accounting import record_ended
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import PLAIN, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import Request
from tests.support.growth import QUADRATIC_FROM, growth
from tests.support.recorder import simple_model
from tests.support.strategies import plain_graph

MS = 1_000_000


class Server:
    """One model "a" behind admission control. Its response to a request with the number n is [2 n]."""

    def __init__(
        self,
        options: AdmissionOptions,
        cache: ResponseCache | None = None,
        instances: int = 1,
        *,
        is_ordered: bool = False,
        levels: Levels = PLAIN,
    ) -> None:
        self.now = 0
        self.running: list[Batch] = []
        self.answered: list[Frame] = []
        self.called: set[Frame] = set()
        self.runs = 0
        self.plan = make_plan(plain_graph(simple_model(0, max_batch_size=1)))
        self.scheduler = Scheduler()
        key = ModelKey("a", 1)
        self.statistics = Statistics("a", 1)
        batcher = Queue(BatchPolicy.simple(1))
        self.queue = ModelQueue(key, batcher, range(instances), statistics=self.statistics, keeps_order=is_ordered)
        self.scheduler.models.add(self.queue)
        clock = lambda: self.now  # noqa: E731
        slots = {"X": self.plan.output_slots[0]}
        self.admission = AdmissionController(
            options,
            None if cache is None else DeploymentCache(cache, served_by(key), self.statistics, clock),
            slots,
            self.statistics,
            self.scheduler,
            clock,
            keeps_order=is_ordered,
            levels=levels,
        )

    def ask(self, number: int, timeout_ms: int = 0, width: int = 2) -> Frame:
        """Enter a request of `4 * width` bytes."""
        frame = self._frame(number, timeout_ms, width)
        self.admission.enter(frame)
        if frame.record.done:
            self.answered.append(frame)
        return frame

    def call(self, number: int) -> Frame:
        """Make a BLS call, as a model does."""
        frame = self._frame(number)
        self.called.add(frame)
        self.admission.call(frame, partial(self.scheduler.call, None))
        return frame

    def _frame(self, number: int, timeout_ms: int = 0, width: int = 2) -> Frame:
        array = np.full((1, width), number, np.float32)
        request = Request({"X": array})
        frame = request_frame(
            self.plan, [self.queue], [Tensor(array, 0, 1)], self.now, 0, request, self, 0, timeout_ms * MS
        )
        frame.wanted = ("X",)
        return frame

    def step(self) -> None:
        """Run the scheduler as the engine's step does."""
        while (decisions := self.scheduler.schedule(self.now)) is not None:
            finished = deque(decisions.finished)
            while finished:
                frame = finished.popleft()
                self.answered.append(frame)
                self.admission.leave(frame)
                finished.extendleft(reversed(self.scheduler.take_finished()))
                if isinstance(frame.record.error, DeadlineExceeded) and frame not in self.called:
                    record_ended(frame, REJECTED, self.now - frame.record.arrived_ns)
            self.runs += len(decisions.batches)
            self.running += decisions.batches
        self.scheduler.check()

    def finish(self, error: FlowserveError | None = None, nth: int = 0) -> None:
        batch = self.running.pop(nth % len(self.running))
        frame = batch.tickets[0].frame
        made = frame.request.inputs["X"] * 2
        errors = {} if error is None else {0: error}
        results = Results([[None if errors else Tensor(made, 0, 1)]], errors)
        self.scheduler.complete(batch, (results,), None, self.now)

    def leave(self, frame: Frame) -> None:
        if not frame.record.done:
            self.scheduler.cancel(frame)
            self.admission.leave(frame, is_answered=False)

    def value(self, frame: Frame) -> float:
        assert frame.record.done
        assert frame.record.error is None
        value: float = frame.tensors[self.plan.output_slots[0]].array[0, 0]
        return value


@pytest.mark.fault("W5")
def test_waiting_requests_that_leave_grow_linearly() -> None:
    def prepare(n: int) -> Callable[[], object]:
        server = Server(AdmissionOptions(max_requests=1, waits=True))
        frames = [server.ask(number) for number in range(n)]
        server.step()

        def leave() -> None:
            for frame in reversed(frames):
                server.leave(frame)

        return leave

    assert growth(prepare, 60) < QUADRATIC_FROM


@pytest.mark.fault("W5")
@pytest.mark.parametrize("is_reversed", [False, True])
def test_equal_requests_that_leave_grow_linearly(is_reversed: bool) -> None:
    """The running request leaves each time, and the next one runs."""

    def prepare(n: int) -> Callable[[], object]:
        server = Server(AdmissionOptions(), LruCache(10000))
        frames = [server.ask(1) for _ in range(n)]
        server.step()

        def leave() -> None:
            for frame in reversed(frames) if is_reversed else frames:
                server.leave(frame)

        return leave

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_waiting_requests_enter_in_order_of_arrival() -> None:
    server = Server(AdmissionOptions(max_requests=1, waits=True), instances=4)
    frames = [server.ask(number) for number in range(3)]
    server.step()
    assert len(server.running) == 1
    for frame in frames:
        server.finish()
        server.step()
        assert frame.record.done
    assert server.answered == frames
    assert (server.admission.inside, server.admission.nbytes) == (0, 0)


def test_a_request_over_the_remaining_bytes_is_refused_and_one_over_the_limit_is_too_large() -> None:
    server = Server(AdmissionOptions(max_request_bytes=12))
    server.ask(1)
    with pytest.raises(Unavailable, match=r"^'a' is full: 8 bytes of requests are under way"):
        server.ask(2)
    small = Server(AdmissionOptions(max_request_bytes=4))
    with pytest.raises(TooLarge, match="a request of 8 bytes can never be let in"):
        small.ask(1)


def test_a_deadline_counts_from_arrival_while_a_request_waits_for_admission() -> None:
    """Its batch does not count it again."""
    server = Server(AdmissionOptions(deadline_ms=10, max_requests=1, waits=True))
    runs, waits = server.ask(1), server.ask(2, timeout_ms=4)
    server.step()
    server.now = 4 * MS
    server.step()
    assert isinstance(waits.record.error, DeadlineExceeded)
    assert "it had not begun" in str(waits.record.error)
    assert not runs.record.done
    server.now = 10 * MS
    server.step()
    assert isinstance(runs.record.error, DeadlineExceeded)
    assert runs.record.outcome == REJECTED
    assert server.admission.inside == 0
    assert server.statistics.failures["REJECTED"] == 2


DEFAULT = Levels(policy=LevelPolicy(timeout_ns=6 * MS, may_override=True))
DELAYED = Levels(policy=LevelPolicy(timeout_ns=6 * MS, is_delayed=True))


@pytest.mark.fault("W7")
@pytest.mark.parametrize(
    ("options", "levels", "timeout_ms", "due_ms"),
    [
        (AdmissionOptions(answers_at_timeout=True), PLAIN, 8, 8),
        (AdmissionOptions(answers_at_timeout=True), PLAIN, 0, None),
        (AdmissionOptions(answers_at_timeout=True, deadline_ms=4), PLAIN, 8, 4),
        (AdmissionOptions(answers_at_timeout=True), DEFAULT, 0, 6),
        (AdmissionOptions(answers_at_timeout=True), DEFAULT, 5, 5),
        (AdmissionOptions(answers_at_timeout=True), DEFAULT, 7, 6),
        (AdmissionOptions(answers_at_timeout=True), DELAYED, 0, None),
        (AdmissionOptions(answers_at_timeout=True), DELAYED, 8, 8),
        (AdmissionOptions(), DEFAULT, 5, None),
        (AdmissionOptions(deadline_ms=7), DEFAULT, 0, 7),
    ],
)
def test_the_shortest_time_limit_of_a_running_request_is_its_deadline_if_timeouts_are_answered(
    options: AdmissionOptions, levels: Levels, timeout_ms: int, due_ms: int | None
) -> None:
    server = Server(options, levels=levels)
    frame = server.ask(1, timeout_ms)
    server.step()
    assert server.running
    assert server.scheduler.next_deadline() == (None if due_ms is None else due_ms * MS)
    if due_ms is not None:
        server.now = due_ms * MS
        server.step()
        assert isinstance(frame.record.error, DeadlineExceeded)
        assert not server.queue.free, "its batch has the instance"
    server.finish()
    server.step()
    assert server.answered == [frame]
    assert [*server.queue.free] == [0]


@pytest.mark.fault("R13")
def test_a_failure_is_neither_shared_nor_cached() -> None:
    server = Server(AdmissionOptions(), LruCache(10_000), instances=4)
    frames = [server.ask(1) for _ in range(3)]
    server.step()
    assert server.runs == 1
    server.finish(ModelFailed("no"))
    server.step()
    assert server.runs == 3, "each of the others ran"
    server.finish()
    server.finish()
    assert [frame.record.error is None for frame in frames] == [False, True, True]


@pytest.mark.fault("D12")
def test_when_the_request_that_runs_is_cancelled_the_next_equal_one_runs_and_the_rest_wait_for_it() -> None:
    server = Server(AdmissionOptions(), LruCache(10_000), instances=4)
    frames = [server.ask(1) for _ in range(3)]
    server.step()
    server.leave(frames[0])
    server.step()
    assert server.runs == 2
    server.finish()
    server.finish()
    server.step()
    assert [server.value(frame) for frame in frames[1:]] == [2, 2]
    assert (server.statistics.cache_hits, server.statistics.cache_misses) == (1, 1)


def test_a_bls_call_waits_neither_for_admission_nor_for_an_equal_request_but_counts_as_admitted() -> None:
    server = Server(AdmissionOptions(max_requests=1, waits=True), LruCache(10_000), instances=4)
    first = server.ask(1)
    called = server.call(1)
    server.step()
    assert server.runs == 2, "the first might be its caller's own"
    waits = server.ask(2)
    server.finish()
    server.step()
    assert first.record.done
    assert not server.running[1:], "the call is inside, and counts"
    server.finish()
    server.step()
    assert [server.value(frame) for frame in (first, called)] == [2, 2]
    server.finish()
    server.step()
    assert waits.record.done
    assert server.call(2).record.done, "a model's call gets a cached response, too"
    assert (server.runs, server.admission.inside) == (3, 0)
    assert (server.statistics.cache_hits, server.statistics.cache_misses) == (1, 3)


@pytest.mark.fault("D11")
def test_a_cached_response_waits_for_earlier_requests_where_the_order_of_responses_is_kept() -> None:
    server = Server(AdmissionOptions(), LruCache(10_000), instances=3, is_ordered=True)
    server.ask(1)
    server.step()
    server.finish()
    server.step()
    assert server.ask(1).record.done, "no request is before it"
    assert server.call(1).record.done
    server.answered.clear()
    slow, remembered, quick, leaves, same = (server.ask(number) for number in (2, 1, 3, 1, 3))
    server.step()
    assert server.call(1).record.done, "a call never waits: the request before it may be its caller"
    server.finish(nth=2)
    server.finish(nth=1)
    server.leave(leaves)
    server.step()
    assert server.answered == []
    server.finish()
    server.step()
    assert server.answered == [slow, remembered, quick, same]
    assert [server.value(frame) for frame in server.answered] == [4, 2, 6, 6]
    assert (server.runs, server.statistics.cache_hits) == (4, 4)


def test_thousands_of_cached_responses_leave_in_order_without_recursion() -> None:
    server = Server(AdmissionOptions(), LruCache(10_000), instances=2, is_ordered=True)
    server.ask(1)
    server.step()
    server.finish()
    server.step()
    frames = [server.ask(2), *(server.ask(1) for _ in range(3000))]
    server.step()
    server.finish()
    server.step()
    assert server.answered[1:] == frames


def test_a_bls_call_has_the_deadline_and_the_byte_limit() -> None:
    server = Server(AdmissionOptions(deadline_ms=10, max_request_bytes=12))
    called = server.call(1)
    server.step()
    server.now = 10 * MS
    server.step()
    assert isinstance(called.record.error, DeadlineExceeded)
    with pytest.raises(TooLarge):
        Server(AdmissionOptions(max_request_bytes=4)).call(1)


def test_a_request_cancelled_while_it_waits_for_admission_leads_no_equal_request() -> None:
    server = Server(AdmissionOptions(max_requests=1, waits=True), LruCache(10_000))
    server.ask(1)
    waits, same = server.ask(2), server.ask(2)
    server.step()
    server.leave(waits)
    server.finish()
    server.step()
    server.finish()
    server.step()
    assert server.value(same) == 4
    assert server.value(server.ask(2)) == 4


@settings(deadline=None)
@given(
    st.builds(
        AdmissionOptions,
        st.sampled_from([0, 7]),
        st.integers(0, 3),
        st.sampled_from([0, 8, 20]),
        st.booleans(),
        st.booleans(),
    ),
    st.sampled_from([None, 0, 600, 5000]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 2 * MS)), max_size=50),
    st.booleans(),
)
def test_property_capacity_is_returned_and_each_request_is_answered_once_with_its_own_response(
    options: AdmissionOptions, cache_bytes: int | None, steps: list[tuple[int, int, int]], is_ordered: bool
) -> None:
    server = Server(options, None if cache_bytes is None else LruCache(cache_bytes), instances=2, is_ordered=is_ordered)
    asked: list[tuple[Frame, int]] = []
    left: set[Frame] = set()
    refused = 0
    for kind, number, ns in steps:
        server.now += ns
        if kind < 3:
            try:
                asked.append((server.call(number) if kind == 2 else server.ask(number, ns // MS), number))
            except TooLarge:
                pass
            except Unavailable:
                refused += 1
        elif kind < 5 and server.running:
            server.finish(ModelFailed("no") if kind == 4 else None, number)
        elif kind == 5 and asked and not asked[number % len(asked)][0].record.done:
            left.add(asked[number % len(asked)][0])
            server.leave(asked[number % len(asked)][0])
        server.step()
        _check(server, options)
    server.step()
    while server.running:
        server.finish()
        server.step()
    _check(server, options)
    assert not (refused and options.waits)
    assert all(frame.record.done for frame, _ in asked)
    assert server.scheduler.in_flight == server.admission.inside == server.admission.nbytes == 0
    assert len(set(server.answered)) == len(server.answered)
    if is_ordered:
        ran = [frame for frame in server.answered if not isinstance(frame.record.error, DeadlineExceeded | Unavailable)]
        came = [frame for frame, _ in asked if frame not in server.called]
        assert [frame for frame in ran if frame in came] == [frame for frame in came if frame in ran], "out of order"
    for frame, number in asked:
        if frame.record.error is None and frame not in left:
            assert server.value(frame) == 2 * number


@settings(deadline=None)
@given(
    st.sampled_from([0, 3]),
    st.lists(
        st.tuples(st.sampled_from(["enter", "enter", "enter", "finish", "fail", "cancel"]), st.integers(1, 5)),
        min_size=20,
        max_size=60,
    ),
)
def test_property_a_small_request_never_overtakes_a_larger_one_that_waits(
    max_requests: int, steps: list[tuple[str, int]]
) -> None:
    """Otherwise a stream of small requests could starve a large one. Requests have 4 to 20 bytes."""
    options = AdmissionOptions(max_requests=max_requests, max_request_bytes=20, waits=True)
    server = Server(options, instances=100)
    waiting: list[Frame] = []  # in order of arrival
    entered: list[Frame] = []

    def step() -> None:
        server.step()
        inside = {batch.tickets[0].frame for batch in server.running}
        came = [frame for frame in waiting if frame in inside]
        assert came == waiting[: len(came)], "a later request entered first"
        entered.extend(came)
        del waiting[: len(came)]

    for what, size in steps:
        if what == "enter":
            waiting.append(server.ask(len(entered), width=size))
        elif what == "cancel" and waiting:
            server.leave(waiting.pop(size % len(waiting)))
        elif what in ("finish", "fail") and server.running:
            server.finish(ModelFailed("no") if what == "fail" else None, size)
        step()
        _check(server, options)
    while server.running:
        server.finish()
        step()
    assert not waiting, "every waiting request enters in the end"


def test_a_small_request_waits_behind_a_larger_one_although_it_would_fit() -> None:
    server = Server(AdmissionOptions(max_request_bytes=20, waits=True), instances=4)
    server.ask(1, width=3)
    large, small = server.ask(2, width=4), server.ask(3, width=1)
    assert server.admission.would_wait(small)
    server.step()
    assert len(server.running) == 1
    server.finish()
    server.step()
    assert [batch.tickets[0].frame for batch in server.running] == [large, small]


def _check(server: Server, options: AdmissionOptions) -> None:
    admission: Any = server.admission
    called = [size for frame, size in admission._sizes.items() if frame in server.called]
    assert not options.max_requests or admission.inside - len(called) <= options.max_requests
    assert not options.max_request_bytes or admission.nbytes - sum(called) <= options.max_request_bytes
    assert not admission._waiting or not admission._has_room(next(iter(admission._waiting.values()))), (
        "the first waiting request has room"
    )
    assert all(not frame.record.done for frame in (*admission._sizes, *admission._missed))
