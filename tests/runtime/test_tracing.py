"""The events of traced requests, and no work for others."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.backends.base import Work
from flowserve.config.parameters import AdmissionOptions
from flowserve.errors import FlowserveError
from flowserve.graph.plan import make_plan
from flowserve.graph.types import ModelKey
from flowserve.observe.trace import (
    ADMISSION,
    AGAIN,
    BUSY,
    DELAYED,
    FULL,
    HANDOVER,
    LIMITER,
    ORDER,
    SAME_REQUEST,
    SEQUENCE,
    SIZED,
    TURN,
    BusyPeriods,
    Trace,
    Wait,
    by_reason,
)
from flowserve.runtime.admission.cache import DeploymentCache, LruCache, ResponseCache, served_by
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.tracing.tracing import waits_in_queue
from flowserve.runtime.workers.local import LocalWorker
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.rate_limit.limiter import Available, Limiter, Needs
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.sequence.sequence import SequencePolicy
from flowserve.scheduling.sequence.strategies import Oldest
from flowserve.values import Array, Request
from tests.support.engine import add_chain, add_function
from tests.support.recorder import simple_model
from tests.support.strategies import plain_graph

MS = 1_000_000


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    async with open_engine(EngineOptions()) as engine:
        await (
            wait_all_tasks_blocked()
        )  # the loop's task sleeps: requests that a test submits in one iteration are scheduled together
        yield engine
        await wait_all_tasks_blocked()
        assert not engine.tracing.is_live
        assert engine.observers == []
        assert engine.streams.observer is None


async def ask(
    engine: Engine,
    name: str,
    value: float = 1.0,
    rows: int = 1,
    told: list[Trace] | None = None,
    trace_id: int = 0,
) -> Trace:
    """The trace of one request; also appended to `told`."""
    deployment = engine.deployments.find(name)
    watch = engine.tracing.watch(*([] if told is None else [told.append]), trace_id=trace_id)
    request = Request({"IN": np.full((rows, 4), value, np.float32)}, stamp=engine.next_stamp())
    try:
        await engine.infer(deployment, request, watch.make(deployment.make_frame))
    except FlowserveError:
        pass
    finally:
        watch.close()
    assert watch.trace is not None
    return watch.trace


async def plain(engine: Engine, name: str) -> None:
    await engine.infer(
        engine.deployments.find(name), Request({"IN": np.ones((1, 4), np.float32)}, stamp=engine.next_stamp())
    )


def double(array: Array) -> Array:
    return array * 2


def reasons(waits: list[Wait]) -> set[str]:
    return set(by_reason(waits))


def check(trace: Trace) -> None:
    """Check that the times of a request are in order, and its waits have no gaps."""
    assert trace.arrived_ns <= trace.ended_ns
    for step in trace.steps:
        ran = step.execution
        moments = [step.ready_ns, step.queued_ns, ran.taken_ns]
        if ran.ended_ns:
            moments += [ran.started_ns, ran.gathered_ns, ran.computed_ns, ran.ended_ns]
            assert ran.ended_ns <= step.ended_ns <= trace.ended_ns
            assert sum(wait.ns for wait in step.waits) == ran.started_ns - step.ready_ns
        assert moments == sorted(moments)


async def test_members_of_one_batch_name_each_other_and_stay_together_through_the_chain() -> None:
    async with running() as engine:
        add_function(engine, "first", [double])
        add_function(engine, "last", [double], inline=False)
        add_chain(engine, "chain", ["first", "last"])
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, engine, "chain", 1.0, 2, told)
            nursery.start_soon(plain, engine, "chain")
        numbers = [trace.number for trace in told]
        for trace in told:
            check(trace)
            assert [step.node.name for step in trace.steps] == ["first", "last"]
            for step in trace.steps:
                assert (step.execution.requests, step.execution.rows) == (4, 7)
                assert sorted(step.execution.members) == sorted(numbers)
            assert reasons(trace.steps[1].waits) <= {HANDOVER, TURN}
        assert len({execution for trace in told for execution in trace.executions()}) == 2


@pytest.mark.parametrize("has_span", [False, True])
async def test_a_traced_batch_that_cannot_be_started_fails_alone(
    monkeypatch: pytest.MonkeyPatch, has_span: bool
) -> None:
    def no_memory(*_: object) -> Work:
        raise MemoryError("so many bytes")

    async with running() as engine:
        add_function(engine, "double", [double])
        with monkeypatch.context() as patch:
            patch.setattr(LocalWorker, "_work_of", no_memory)
            trace = await ask(engine, "double", trace_id=int(has_span))
        assert "a batch cannot be started: MemoryError: so many bytes" in trace.error
        assert trace.steps[0].error == trace.error
        await plain(engine, "double")


async def test_a_trace_shows_the_wait_for_a_busy_instance() -> None:
    gate = threading.Event()

    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array

    async with running() as engine:
        add_function(engine, "slow", [wait], inline=False, batcher=Queue(BatchPolicy.simple(1)))
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, engine, "slow", 1.0, 1, told)
            await wait_all_tasks_blocked()
            await trio.sleep(0.02)
            gate.set()
        first, second = told
        assert BUSY not in reasons(first.steps[0].waits)
        waited = by_reason(second.steps[0].waits)
        assert waited[BUSY] >= 19 * MS
        assert next(iter(waited)) == BUSY
        for trace in told:
            check(trace)


async def test_a_trace_shows_the_reason_a_forming_batch_waited(autojump_clock: trio.testing.MockClock) -> None:
    async with running() as engine:
        policy = BatchPolicy(8, (3, 8), 50 * MS)
        add_function(engine, "model", [double], batcher=Queue(policy), max_batch_size=8)
        alone = await ask(engine, "model")
        assert by_reason(alone.steps[0].waits) == {DELAYED: 50 * MS}

        told: list[Trace] = []
        for count, reason in ((3, SIZED), (8, FULL)):
            told.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, "model", 1.0, 1, told)
                await trio.sleep(0.01)
                nursery.start_soon(ask, engine, "model", 1.0, count - 1, told)
            assert max((by_reason(trace.steps[0].waits) for trace in told), key=len) == {reason: 10 * MS}
        for trace in told:
            check(trace)


async def test_the_retried_halves_of_a_failed_batch_are_separate_steps() -> None:
    def poisoned(array: Array) -> Array:
        if (array == 13).any():
            raise ValueError("thirteen")
        return array

    async with running() as engine:
        add_function(engine, "pure", [poisoned], is_pure=True)
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for value in (1.0, 13.0):
                nursery.start_soon(ask, engine, "pure", value, 1, told)
        good = next(trace for trace in told if not trace.error)
        bad = next(trace for trace in told if trace.error)
        for trace in told:
            check(trace)
            assert [step.execution.requests for step in trace.steps] == [2, 1]
            assert AGAIN in reasons(trace.steps[1].waits)
            assert "ValueError in a batch of 2 requests" in trace.steps[0].error  # the text is about one of them
        assert not good.steps[1].error
        assert "thirteen" in bad.steps[1].error
        assert "thirteen" in bad.error


@pytest.mark.parametrize("leaves_at", ["the queue", "the instance"])
async def test_a_cancelled_request_ends_its_trace(leaves_at: str) -> None:
    gate = threading.Event()

    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array

    async with running() as engine:
        delay_ns = 3_600_000_000_000 if leaves_at == "the queue" else 0
        batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=delay_ns))
        add_function(engine, "slow", [wait], inline=False, batcher=batcher)
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "slow", 1.0, 1, told)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        gate.set()
        (trace,) = told
        assert trace.error == "its caller left"
        assert len(trace.steps) == (leaves_at == "the instance")
        check(trace)
        await wait_all_tasks_blocked()
        if leaves_at == "the instance":
            await plain(engine, "slow")


async def test_a_trace_shows_the_wait_for_admission() -> None:
    gate = threading.Event()

    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array

    async with running() as engine:
        add_function(engine, "slow", [wait], inline=False)
        _limit(engine, "slow", AdmissionOptions(max_requests=1, waits=True))
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, engine, "slow", 1.0, 1, told)
            await wait_all_tasks_blocked()
            await trio.sleep(0.02)
            gate.set()
        assert reasons(told[0].waits) <= {TURN}
        waited = by_reason(told[1].waits)
        assert waited[ADMISSION] >= 19 * MS
        for trace in told:
            check(trace)


async def test_a_trace_shows_the_wait_of_an_ordered_response() -> None:
    gate = threading.Event()

    computed = threading.Event()

    def wait(array: Array) -> Array:
        if array[0, 0] > 1:
            computed.set()
        else:
            assert gate.wait(10)
        return array

    async with running() as engine:
        one_by_one = Queue(BatchPolicy.simple(1))
        add_function(engine, "ordered", [wait, wait], inline=False, batcher=one_by_one, keeps_order=True)
        add_chain(engine, "chain", ["ordered"])
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for value in (1.0, 2.0):
                nursery.start_soon(ask, engine, "chain", value, 1, told)
                await wait_all_tasks_blocked()
            assert await trio.to_thread.run_sync(computed.wait, 10)
            await trio.sleep(0.02)
            gate.set()
        first, second = told
        assert first.steps[0].pauses == []
        assert by_reason(second.steps[0].pauses)[ORDER] >= 19 * MS
        for trace in told:
            check(trace)


async def test_the_trace_of_a_cached_or_shared_response_has_no_steps() -> None:
    gate = threading.Event()

    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array

    async with running() as engine:
        add_function(engine, "slow", [wait], inline=False)
        _limit(engine, "slow", AdmissionOptions(), LruCache(1 << 20))
        told: list[Trace] = []
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, engine, "slow", 1.0, 1, told)
                await wait_all_tasks_blocked()
            await trio.sleep(0.02)
            gate.set()
        told.sort(key=lambda trace: trace.number)
        assert [(len(trace.steps), trace.is_cached) for trace in told] == [(1, False), (0, True)]
        assert by_reason(told[1].waits)[SAME_REQUEST] >= 19 * MS
        found = await ask(engine, "slow")
        assert (found.steps, found.is_cached, found.error) == ([], True, "")


def test_a_trace_shows_the_wait_of_a_sequence_request() -> None:
    plan = make_plan(plain_graph(simple_model(0, max_batch_size=1)))
    queue = ModelQueue(ModelKey("a", 1), Queue(BatchPolicy.simple(1)), ["a_0"])
    queue.bound = Oldest(SequencePolicy("a", 1, 0), lambda _: (0, False, False), BatchPolicy.simple(1))
    batch = Batch(queue, "a_0", [Ticket(request_frame(plan, (queue,), (None,), 0), plan.nodes[0], 1, None)], 50)
    scheduler = Scheduler()
    assert waits_in_queue(scheduler, batch, 10, 50, BusyPeriods()) == [Wait(SEQUENCE, 10, 50)]


def test_a_trace_shows_the_wait_for_the_rate_limiter_while_an_instance_is_free() -> None:
    plan = make_plan(plain_graph(simple_model(0, max_batch_size=1)))
    scheduler = Scheduler(Limiter([Available("R", 1)]))
    for needs, reason in (([Needs({("R", 0): 1})], LIMITER), ([], TURN)):
        queue = ModelQueue(ModelKey("a", 1), Queue(BatchPolicy.simple(1)), ["a_0"], needs=needs)
        ticket = Ticket(request_frame(plan, (queue,), (None,), 0), plan.nodes[0], 1, None)
        ticket.queued_ns = 10
        spells = BusyPeriods()
        spells.begin(5)
        spells.end(20)
        batch = Batch(queue, "a_0", [ticket], 50)
        assert waits_in_queue(scheduler, batch, 10, 50, spells) == [Wait(BUSY, 10, 20), Wait(reason, 20, 50)]


async def test_a_trace_lists_a_bounded_number_of_steps_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowserve.runtime.tracing.tracing.TRACED_STEPS_MAX", 1)
    async with running() as engine:
        add_function(engine, "one", [double])
        add_chain(engine, "chain", ["one", "one"])
        trace = await ask(engine, "chain")
        assert (len(trace.steps), trace.omitted) == (1, 1)


def _limit(engine: Engine, name: str, options: AdmissionOptions, cache: ResponseCache | None = None) -> None:
    deployment = engine.deployments.find(name)
    served, statistics = served_by(deployment.graph.nodes[0].model), deployment.statistics
    responses = None if cache is None else DeploymentCache(cache, served, statistics, engine.clock)
    deployment.admission = AdmissionController(
        options, responses, deployment.output_slot, statistics, engine.scheduler, engine.clock
    )
