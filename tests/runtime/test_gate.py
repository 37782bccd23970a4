"""The gate before a graph: room comes home, nobody waits beside it, the same question is asked once, in any order of
arrivals, answers, failures, departures and deadlines. The dispatcher is the real one, its clock the test's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.config.gate import GateOptions
from flowserve.errors import FlowserveError, ModelFailed, TooLarge, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import ModelKey
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import Statistics
from flowserve.runtime.cache import Cache, Lru
from flowserve.runtime.gate import Gate
from flowserve.runtime.ordered_gate import OrderedGate
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.scheduling.calls import CalledFlow
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.flows import Late
from flowserve.scheduling.router import Flow
from flowserve.testing.recorder import simple_model
from flowserve.testing.strategies import plain_graph
from flowserve.values import Request

MS = 1_000_000
F = TypeVar("F", bound=Flow)


class Server:
    """One model "a" behind a gate. Its answer to a request of the number n is [2 n]."""

    def __init__(
        self, options: GateOptions, cache: Cache | None = None, instances: int = 1, *, is_ordered: bool = False
    ) -> None:
        self.now = 0
        self.running: list[Batch] = []
        self.answered: list[Flow] = []
        self.runs = 0
        self.plan = make_plan(plain_graph(simple_model(0, max_batch_size=1)))
        self.dispatcher = Dispatcher(self._run, self._answered)
        key = ModelKey("a", 1)
        self.statistics = Statistics("a", 1)
        batcher = DynamicBatcher(BatchPolicy.simple(1))
        self.queue = ModelQueue(key, batcher, range(instances), observer=self.statistics, keeps_order=is_ordered)
        self.dispatcher.add(self.queue)
        slots = {"X": self.plan.output_slots[0]}
        kind = OrderedGate if is_ordered else Gate
        self.gate = kind(options, cache, key, slots, self.statistics, self.dispatcher, lambda: self.now)

    def _run(self, batch: Batch) -> None:
        self.runs += 1
        self.running.append(batch)

    def _answered(self, flow: Flow) -> None:
        self.answered.append(flow)
        self.gate.leave(flow)

    def ask(self, number: int, timeout_ms: int = 0) -> Flow:
        flow = self._flow(Flow, number, timeout_ms)
        self.gate.enter(flow)
        if flow.done:
            self.answered.append(flow)
        return flow

    def call(self, number: int) -> CalledFlow:
        """As a model does."""
        flow = self._flow(CalledFlow, number)
        self.gate.call(flow, partial(self.dispatcher.call, None))
        return flow

    def _flow(self, kind: type[F], number: int, timeout_ms: int = 0) -> F:
        array = np.full((1, 2), number, np.float32)
        request = Request({"X": array})
        flow = kind(self.plan, [self.queue], [Tensor(array, 0, 1)], self.now, 0, request, None, 0, timeout_ms * MS)
        flow.wanted = ("X",)
        return flow

    def turn(self) -> None:
        self.dispatcher.pump(self.now)
        self.dispatcher.pump(self.now)  # whoever was let in meanwhile
        self.dispatcher.check()

    def finish(self, error: FlowserveError | None = None, nth: int = 0) -> None:
        batch = self.running.pop(nth % len(self.running))
        flow = batch.tickets[0].flow
        made = flow.request.inputs["X"] * 2
        errors = {} if error is None else {0: error}
        self.dispatcher.batch_done(batch, [[None if errors else Tensor(made, 0, 1)]], errors, self.now)

    def leave(self, flow: Flow) -> None:
        if not flow.done:
            self.dispatcher.cancel(flow)
            self.gate.leave(flow, is_answered=False)

    def value(self, flow: Flow) -> float:
        assert flow.done
        assert flow.error is None
        value: float = flow.tensors[self.plan.output_slots[0]].array[0, 0]
        return value


def test_the_first_who_waits_is_let_in_first() -> None:
    server = Server(GateOptions(max_requests=1, waits=True), instances=4)
    flows = [server.ask(number) for number in range(3)]
    server.turn()
    assert len(server.running) == 1
    for flow in flows:
        server.finish()
        server.turn()
        assert flow.done
    assert server.answered == flows
    assert (server.gate.inside, server.gate.nbytes) == (0, 0)


def test_who_finds_no_room_is_refused_or_refused_for_good() -> None:
    server = Server(GateOptions(max_request_bytes=12))
    server.ask(1)
    with pytest.raises(Unavailable, match=r"^'a' is full: 8 bytes of requests are under way"):
        server.ask(2)
    small = Server(GateOptions(max_request_bytes=4))
    with pytest.raises(TooLarge, match="a request of 8 bytes can never be let in"):
        small.ask(1)
    assert server.statistics.failures["REJECTED"] == small.statistics.failures["REJECTED"] == 1


def test_a_deadline_counts_from_arrival_also_for_who_waits_at_the_gate() -> None:
    """Its batch does not count it once more."""
    server = Server(GateOptions(deadline_ms=10, max_requests=1, waits=True))
    runs, waits = server.ask(1), server.ask(2, timeout_ms=4)
    server.turn()
    server.now = 4 * MS
    server.turn()
    assert isinstance(waits.error, Late)
    assert "it had not begun" in str(waits.error)
    assert not runs.done
    server.now = 10 * MS
    server.turn()
    assert isinstance(runs.error, Late)
    assert server.statistics.left == {runs}
    assert server.gate.inside == 0
    assert server.statistics.failures["REJECTED"] == 2


@pytest.mark.fault("R13")
def test_a_failure_is_not_shared_nor_remembered() -> None:
    server = Server(GateOptions(), Lru(10_000), instances=4)
    flows = [server.ask(1) for _ in range(3)]
    server.turn()
    assert server.runs == 1
    server.finish(ModelFailed("no"))
    server.turn()
    assert server.runs == 3, "the others ran by themselves"
    server.finish()
    server.finish()
    assert [flow.error is None for flow in flows] == [False, True, True]


@pytest.mark.fault("D12")
def test_when_the_first_who_asked_leaves_the_next_runs_and_the_others_wait_for_that() -> None:
    server = Server(GateOptions(), Lru(10_000), instances=4)
    flows = [server.ask(1) for _ in range(3)]
    server.turn()
    server.leave(flows[0])
    server.turn()
    assert server.runs == 2
    server.finish()
    server.finish()
    server.turn()
    assert [server.value(flow) for flow in flows[1:]] == [2, 2]
    assert (server.statistics.cache_hits, server.statistics.cache_misses) == (1, 1)


def test_a_call_waits_neither_for_room_nor_for_somebody_else_s_answer_but_counts() -> None:
    server = Server(GateOptions(max_requests=1, waits=True), Lru(10_000), instances=4)
    first = server.ask(1)
    called = server.call(1)
    server.turn()
    assert server.runs == 2, "the first might be its caller's own"
    waits = server.ask(2)
    server.finish()
    server.turn()
    assert first.done
    assert not server.running[1:], "the call is inside, and counts"
    server.finish()
    server.turn()
    assert [server.value(flow) for flow in (first, called)] == [2, 2]
    server.finish()
    assert waits.done
    assert server.call(2).done, "what is remembered is remembered for models, too"
    assert (server.runs, server.gate.inside) == (3, 0)
    assert (server.statistics.cache_hits, server.statistics.cache_misses) == (1, 3)


@pytest.mark.fault("D11")
def test_a_remembered_answer_waits_for_those_who_came_before_where_order_is_kept() -> None:
    server = Server(GateOptions(), Lru(10_000), instances=3, is_ordered=True)
    server.ask(1)
    server.turn()
    server.finish()
    server.turn()
    assert server.ask(1).done, "nobody came before"
    assert server.call(1).done
    server.answered.clear()
    slow, remembered, quick, leaves, same = (server.ask(number) for number in (2, 1, 3, 1, 3))
    server.turn()
    assert server.call(1).done, "a model that calls waits for nobody, who might be waiting for it"
    server.finish(nth=2)
    server.finish(nth=1)
    server.leave(leaves)
    server.turn()
    assert server.answered == []
    server.finish()
    server.turn()
    assert server.answered == [slow, remembered, quick, same]
    assert [server.value(flow) for flow in server.answered] == [4, 2, 6, 6]
    assert (server.runs, server.statistics.cache_hits) == (4, 4)


def test_many_remembered_answers_leave_at_once() -> None:
    server = Server(GateOptions(), Lru(10_000), instances=2, is_ordered=True)
    server.ask(1)
    server.turn()
    server.finish()
    server.turn()
    flows = [server.ask(2), *(server.ask(1) for _ in range(3000))]
    server.turn()
    server.finish()
    server.turn()
    assert server.answered[1:] == flows


def test_a_call_is_bound_by_the_deadline_and_by_what_is_too_large() -> None:
    server = Server(GateOptions(deadline_ms=10, max_request_bytes=12))
    called = server.call(1)
    server.turn()
    server.now = 10 * MS
    server.turn()
    assert isinstance(called.error, Late)
    with pytest.raises(TooLarge):
        Server(GateOptions(max_request_bytes=4)).call(1)


def test_who_leaves_while_waiting_for_room_is_nobodys_answer() -> None:
    server = Server(GateOptions(max_requests=1, waits=True), Lru(10_000))
    server.ask(1)
    waits, same = server.ask(2), server.ask(2)
    server.turn()
    server.leave(waits)
    server.finish()
    server.turn()
    server.finish()
    server.turn()
    assert server.value(same) == 4
    assert server.value(server.ask(2)) == 4


@settings(deadline=None)
@given(
    st.builds(GateOptions, st.sampled_from([0, 7]), st.integers(0, 3), st.sampled_from([0, 8, 20]), st.booleans()),
    st.sampled_from([None, 0, 600, 5000]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 2 * MS)), max_size=50),
    st.booleans(),
)
def test_law_room_comes_home_and_each_gets_his_own_answer_once(
    options: GateOptions, cache_bytes: int | None, steps: list[tuple[int, int, int]], is_ordered: bool
) -> None:
    server = Server(options, None if cache_bytes is None else Lru(cache_bytes), instances=2, is_ordered=is_ordered)
    asked: list[tuple[Flow, int]] = []
    left: set[Flow] = set()
    refused = 0
    for kind, number, ns in steps:
        server.now += ns
        if kind < 3:
            try:
                asked.append((server.call(number) if kind == 2 else server.ask(number), number))
            except TooLarge:
                pass
            except Unavailable:
                refused += 1
        elif kind < 5 and server.running:
            server.finish(ModelFailed("no") if kind == 4 else None, number)
        elif kind == 5 and asked and not asked[number % len(asked)][0].done:
            left.add(asked[number % len(asked)][0])
            server.leave(asked[number % len(asked)][0])
        server.turn()
        _check(server, options)
    server.turn()
    while server.running:
        server.finish()
        server.turn()
    _check(server, options)
    assert not (refused and options.waits)
    assert all(flow.done for flow, _ in asked)
    assert server.dispatcher.in_flight == server.gate.inside == server.gate.nbytes == 0
    assert len(set(server.answered)) == len(server.answered)
    if is_ordered:
        ran = [flow for flow in server.answered if not isinstance(flow.error, Late | Unavailable)]
        came = [flow for flow, _ in asked if not isinstance(flow, CalledFlow)]
        assert [flow for flow in ran if flow in came] == [flow for flow in came if flow in ran], "out of order"
    for flow, number in asked:
        if flow.error is None and flow not in left:
            assert server.value(flow) == 2 * number


def _check(server: Server, options: GateOptions) -> None:
    gate: Any = server.gate
    called = [size for flow, size in gate._sizes.items() if isinstance(flow, CalledFlow)]
    assert not options.max_requests or gate.inside - len(called) <= options.max_requests
    assert not options.max_request_bytes or gate.nbytes - sum(called) <= options.max_request_bytes
    assert not gate._waiting or not gate._has_room(gate._waiting[0][1]), "somebody waits beside room"
    assert all(not flow.done for flow in (*gate._sizes, *gate._leading, *gate._following))
