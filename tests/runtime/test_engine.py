"""The engine in a running event loop. Decisions of the scheduler alone are tested in tests/scheduling."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.config.parameters import AdmissionOptions
from flowserve.errors import FlowserveError, Internal, Invalid, ModelFailed, NotFound, Overloaded, Unavailable
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.engine import accounting
from flowserve.runtime.engine.engine import Engine, Observer, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.workers.local import LocalWorker, Placement
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.queue import BatchPolicy, Order, Queue
from flowserve.values import Array, Request
from tests.support.engine import add_chain, add_function

HOUR_NS = 3_600_000_000_000
OPTIONS = EngineOptions()


@asynccontextmanager
async def running(options: EngineOptions = OPTIONS) -> AsyncIterator[Engine]:
    async with open_engine(options) as engine:
        await wait_all_tasks_blocked()  # the engine's loop is parked: requests of one iteration are scheduled together
        yield engine
        await wait_all_tasks_blocked()
        assert engine.scheduler.in_flight == 0
        engine.scheduler.check()


def request(engine: Engine, value: float = 1.0, rows: int = 1) -> Request:
    return Request({"IN": np.full((rows, 4), value, np.float32)}, stamp=engine.next_stamp())


async def ask(engine: Engine, name: str, value: float, answers: dict[float, float]) -> None:
    response = await engine.infer(engine.deployments.find(name), request(engine, value))
    assert response.outputs["OUT"].shape == (1, 4)
    answers[value] = float(response.outputs["OUT"][0, 0])


def double(array: Array) -> Array:
    return array * 2


def behind(gate: threading.Event) -> Callable[[Array], Array]:
    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array

    return wait


def poisoned(array: Array) -> Array:
    if (array == 13).any():
        raise ValueError("thirteen")
    return array * 2


async def test_requests_of_one_loop_iteration_stay_one_batch_through_the_chain() -> None:
    async with running() as engine:
        first = add_function(engine, "first", [double])[0]
        last = add_function(engine, "last", [lambda array: array + 1])[0]
        add_chain(engine, "chain", ["first", "last"])
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            for i in range(16):
                nursery.start_soon(ask, engine, "chain", float(i), answers)
        assert answers == {float(i): 2.0 * i + 1 for i in range(16)}
        assert first.batches == last.batches == [[1] * 16]


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
async def test_the_execution_place_does_not_change_the_response(inline: bool) -> None:
    async with running() as engine:
        add_function(engine, "double", [double, double], inline=inline)
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(ask, engine, "double", float(i), answers)
        assert answers == {float(i): 2.0 * i for i in range(40)}


@pytest.mark.fault("D9")
async def test_a_single_request_runs_when_its_queue_delay_is_over(autojump_clock: trio.testing.MockClock) -> None:
    async with running() as engine:
        batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=HOUR_NS))
        add_function(engine, "slow", [double], batcher=batcher)
        started = trio.current_time()
        await engine.infer(engine.deployments.find("slow"), request(engine))
        assert trio.current_time() - started == pytest.approx(3600)


async def test_a_cancelled_request_is_withdrawn_and_never_run(autojump_clock: trio.testing.MockClock) -> None:
    async with running() as engine:
        batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=HOUR_NS))
        instance = add_function(engine, "slow", [double], batcher=batcher)[0]
        with trio.move_on_after(1):
            await engine.infer(engine.deployments.find("slow"), request(engine))
        assert len(batcher) == 0
        await engine.infer(engine.deployments.find("slow"), request(engine, 3.0))
        assert instance.batches == [[1]]


async def test_a_request_cancelled_in_a_running_batch_affects_no_other() -> None:
    gate = threading.Event()
    entered = threading.Event()

    def wait(array: Array) -> Array:
        entered.set()
        assert gate.wait(10)
        return array * 2

    async with running() as engine:
        add_function(engine, "gated", [wait], inline=False)
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            leaver = trio.CancelScope()

            async def leave_early() -> None:
                with leaver:
                    await engine.infer(engine.deployments.find("gated"), request(engine, 1.0))

            nursery.start_soon(leave_early)
            nursery.start_soon(ask, engine, "gated", 2.0, answers)
            await trio.to_thread.run_sync(entered.wait, 10)
            leaver.cancel()
            await wait_all_tasks_blocked()
            gate.set()
        assert answers == {2.0: 4.0}


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
async def test_one_failing_request_of_a_pure_model_fails_alone_and_is_logged_once(
    inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as engine:
        add_function(engine, "pure", [poisoned], is_pure=True, inline=inline)
        answers: dict[float, float] = {}
        failures: list[str] = []

        async def ask_and_survive(value: float) -> None:
            try:
                await ask(engine, "pure", value, answers)
            except ModelFailed as error:
                failures.append(str(error))

        async with trio.open_nursery() as nursery:
            for i in range(16):
                nursery.start_soon(ask_and_survive, float(i))
        assert answers == {float(i): 2.0 * i for i in range(16) if i != 13}
        assert len(failures) == 1
        assert "thirteen" in failures[0]
        row = engine.deployments.statistics("pure")[0]["inference_stats"]
        assert (row["success"]["count"], row["fail"]["count"]) == (15, 1)
    told = "model 'pure', instance 'pure_0' failed"
    assert caplog.messages == [f"a request to 'pure' failed: {told}: thirteen"]
    assert caplog.text.count("ValueError: thirteen") == 1
    assert caplog.text.count("Traceback") == 1


async def test_an_exception_whose_caller_has_left_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    has_begun, may_raise = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def raises(_: Array) -> Array:
        token.run_sync_soon(has_begun.set)
        assert may_raise.wait(30)
        raise ValueError("too late")

    async with running() as engine:
        add_function(engine, "late", [raises], inline=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "late", 1.0, {})
            await has_begun.wait()
            nursery.cancel_scope.cancel()
        may_raise.set()
        with trio.fail_after(30):
            while not caplog.records:  # noqa: ASYNC110  # the log has no event
                await trio.sleep(0.01)
    assert caplog.messages == ["model 'late', instance 'late_0' failed: too late"]
    assert caplog.text.count("Traceback") == 1


@pytest.mark.fault("E7")
async def test_a_failing_step_fails_its_ensemble_with_its_own_error() -> None:
    async with running() as engine:
        add_function(engine, "first", [double])
        add_function(engine, "bad", [poisoned])
        add_chain(engine, "chain", ["first", "bad"])
        with pytest.raises(ModelFailed, match=r"^in ensemble 'chain', .*'bad'.*thirteen"):
            await engine.infer(engine.deployments.find("chain"), request(engine, 6.5))
        assert engine.deployments.statistics("chain")[0]["inference_stats"]["fail"]["count"] == 1
        assert engine.deployments.statistics("bad")[0]["inference_stats"]["fail"]["count"] == 1
        answers: dict[float, float] = {}
        await ask(engine, "chain", 1.0, answers)
        assert answers == {1.0: 4.0}


async def test_a_slow_model_does_not_delay_another_model() -> None:
    gate = threading.Event()
    async with running() as engine:
        add_function(engine, "stuck", [behind(gate)], inline=False)
        add_function(engine, "quick", [double], inline=False)
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "stuck", 5.0, answers)
            await ask(engine, "quick", 1.0, answers)
            assert answers == {1.0: 2.0}
            gate.set()
        assert answers == {1.0: 2.0, 5.0: 5.0}


async def test_two_instances_share_the_work_of_one_queue() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(array: Array) -> Array:
        both.wait()
        return array

    async with running() as engine:
        instances = add_function(engine, "pair", [meet, meet], inline=False, max_batch_size=1)
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "pair", 1.0, answers)
            nursery.start_soon(ask, engine, "pair", 2.0, answers)
        assert [instance.batches for instance in instances] == [[[1]], [[1]]]


async def test_a_node_measured_to_be_cheap_moves_onto_the_loop() -> None:
    threads: list[int] = []

    def note(array: Array) -> Array:
        threads.append(threading.get_ident())
        return array

    async with running() as engine:
        add_function(engine, "cheap", [note], inline=False, placement=Placement())
        for _ in range(20):
            await engine.infer(engine.deployments.find("cheap"), request(engine))
        assert threads[0] != threading.get_ident()
        assert threads[-1] == threading.get_ident()


async def test_draining_refuses_new_requests_and_waits_for_those_in_flight() -> None:
    gate = threading.Event()
    async with running() as engine:
        add_function(engine, "gated", [behind(gate)], inline=False)
        engine.deployments.is_loaded = True
        assert engine.deployments.is_ready
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "gated", 1.0, answers)
            await wait_all_tasks_blocked()
            assert await engine.drain(trio.current_time() + 0.05) == ["gated_0"]
            assert not engine.deployments.is_ready
            with pytest.raises(Unavailable, match="Server is stopping"):
                await engine.infer(engine.deployments.find("gated"), request(engine))
            gate.set()
            assert await engine.drain(trio.current_time() + 10) == []
        assert answers == {1.0: 1.0}


async def test_statistics_count_rows_batches_and_requests() -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        answers: dict[float, float] = {}
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(ask, engine, "double", float(i), answers)
        await engine.infer(engine.deployments.find("double"), request(engine, 1.0, rows=3))
        row = engine.deployments.statistics("double", "1")[0]
        assert (row["inference_count"], row["execution_count"]) == (7, 2)
        assert [size["batch_size"] for size in row["batch_stats"]] == [3, 4]
        assert row["inference_stats"]["success"]["count"] == 5
        assert row["last_inference"] > 0


async def test_errors_for_unknown_models_name_the_model_and_version() -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        assert engine.deployments.find("double", "1") is engine.deployments.find("double")
        with pytest.raises(NotFound, match="Request for unknown model: 'nope' is not found"):
            engine.deployments.find("nope")
        with pytest.raises(NotFound, match=r"unknown model: 'doubel' is not found \(did you mean 'double'\?\)$"):
            engine.deployments.find("doubel")
        with pytest.raises(NotFound, match="Request for unknown model: 'double' version 9 is not found"):
            engine.deployments.find("double", "9")
        engine.deployments.withdraw_name(
            "triple", "ensemble 'triple' contains models that are not there (did you mean 'double'?)"
        )
        with pytest.raises(Unavailable, match=r"'triple' is not at ready state: .* \(did you mean 'double'\?\)$"):
            engine.deployments.find("triple")
        for version in ("0", "-1", "abc", "1x", "99999999999999999999999"):
            with pytest.raises(Invalid, match="version"):
                engine.deployments.find("double", version)


async def test_errors_name_no_other_model_when_names_are_restricted() -> None:
    async with running(EngineOptions(tells_names=False)) as engine:
        add_function(engine, "double", [double])
        engine.deployments.withdraw_name(
            "triple", "ensemble 'triple' contains models that are not there (did you mean 'double'?)"
        )
        engine.deployments.not_loaded = frozenset({"later"})
        for name in ("doubel", "later"):
            with pytest.raises(NotFound, match=rf"unknown model: '{name}' is not found$"):
                engine.deployments.find(name)
        with pytest.raises(Unavailable, match=r"unknown model: 'triple' is not at ready state$"):
            engine.deployments.find("triple")


@pytest.mark.fault("R11")
async def test_a_wall_clock_that_jumps_back_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(1_000_000, 0, -1))
    monkeypatch.setattr("time.time", lambda: next(hours) * 3600.0)
    async with running() as engine:
        batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=20_000_000))
        add_function(engine, "slow", [double], batcher=batcher)
        started = trio.current_time()
        with trio.fail_after(5):
            for _ in range(3):
                await engine.infer(engine.deployments.find("slow"), request(engine))
        assert trio.current_time() - started >= 0.06


def lose_everything(work: Work, clock: ClockNs) -> Results:
    return Results([[]], gathered_ns=clock(), computed_ns=clock())


async def test_a_backend_that_returns_too_few_members_fails_only_its_batch() -> None:
    async with running() as engine:
        instance = add_function(engine, "broken", [double])[0]
        instance.run = lose_everything  # type: ignore[method-assign]  # like a faulty third-party backend
        add_function(engine, "double", [double])
        with pytest.raises(ModelFailed, match="'broken_0': its backend lost a member"):
            await engine.infer(engine.deployments.find("broken"), request(engine))
        answers: dict[float, float] = {}
        await ask(engine, "double", 2.0, answers)
        assert answers == {2.0: 4.0}


async def test_a_step_that_ends_after_the_exit_timeout_starts_no_next_step() -> None:
    gate, entered = threading.Event(), threading.Event()
    failed: list[str] = []
    async with open_engine(EngineOptions(), exit_timeout_s=5) as engine:

        def last(array: Array) -> Array:
            raise AssertionError("must not run")

        def first(array: Array) -> Array:
            entered.set()
            return behind(gate)(array)

        add_function(engine, "first", [first], inline=False)
        add_function(engine, "last", [last], inline=False)
        add_chain(engine, "chain", ["first", "last"])

        async def call() -> None:
            try:
                await engine.infer(engine.deployments.find("chain"), request(engine))
            except Unavailable as error:
                failed.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.to_thread.run_sync(entered.wait, 10)
            nursery.start_soon(engine.close, trio.current_time() + 5)
            await wait_all_tasks_blocked()
            gate.set()
    assert [text[:42] for text in failed] == ["in ensemble 'chain', Server is stopping, s"]


async def test_concurrent_requests_are_one_batch_after_requests_that_ran_alone() -> None:
    async with running() as engine:
        instance = add_function(engine, "double", [double])[0]
        deployment = engine.deployments.find("double")
        for _ in range(100):
            await engine.infer(deployment, request(engine))
            await wait_all_tasks_blocked()
        assert instance.batches == [[1]] * 100
        instance.batches.clear()
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for i in range(16):
                    nursery.start_soon(ask, engine, "double", float(i), {})
            await wait_all_tasks_blocked()
        assert instance.batches == [[1] * 16] * 2


async def test_requests_between_begin_events_and_end_events_are_one_batch_and_have_run_at_its_end() -> None:
    async with running() as engine:
        instance = add_function(engine, "double", [double])[0]
        deployment = engine.deployments.find("double")
        for size in (5, 1):
            engine.begin_events()
            frames = [engine.submit(deployment, request(engine, float(i))) for i in range(size)]
            engine.end_events()
            assert [engine.response(frame).outputs["OUT"][0, 0] for frame in frames] == [2.0 * i for i in range(size)]
        assert instance.batches == [[1] * 5, [1]]


async def test_an_exception_of_a_step_is_raised_by_end_events_and_the_loop_serves_all_requests_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a fault")

    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        engine.begin_events()
        frame = engine.submit(deployment, request(engine, 3.0))
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", fault)
            with pytest.raises(RuntimeError, match="a fault"):
                engine.end_events()
        with trio.fail_after(5):
            assert (await engine.infer(deployment, request(engine))).outputs["OUT"][0, 0] == 2
        assert engine.response(frame).outputs["OUT"][0, 0] == 6


async def test_a_batch_for_which_there_is_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Work:
        raise MemoryError("so many bytes")

    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        with monkeypatch.context() as patch:
            patch.setattr(LocalWorker, "_work_of", no_memory)
            engine.begin_events()
            frames = [engine.submit(deployment, request(engine)) for _ in range(3)]
            engine.end_events()
        for frame in frames:
            with pytest.raises(Overloaded, match="'double_0': a batch cannot be started: MemoryError: so many bytes"):
                engine.response(frame)
        assert (await engine.infer(deployment, request(engine))).outputs["OUT"][0, 0] == 2


def slips_once(patch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """Let the next call raise, as an internal error would."""
    does = getattr(where, name)

    def slip(*arguments: object, **more: object) -> object:
        patch.setattr(where, name, does)
        raise RuntimeError("a slip")

    patch.setattr(where, name, slip)


@pytest.mark.parametrize("keeps_order", [False, True], ids=["any-order", "keeps-order"])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
@pytest.mark.parametrize("where", ["before it is taken in", "in the middle"])
async def test_an_internal_error_while_a_batch_completes_fails_only_that_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, inline: bool, keeps_order: bool
) -> None:
    async with running() as engine:
        add_function(engine, "double", [double], inline=inline, keeps_order=keeps_order)
        deployment = engine.deployments.find("double")
        if where == "in the middle":
            slips_once(monkeypatch, *((Order, "hold") if keeps_order else (engine.scheduler, "_finish_alike")))
        else:
            slips_once(monkeypatch, engine.scheduler, "complete")
        with (
            trio.fail_after(5),
            pytest.raises(
                Internal, match="'double_0': the results of a batch cannot be processed: RuntimeError: a slip"
            ),
        ):
            await engine.infer(deployment, request(engine))
        with trio.fail_after(5):
            assert (await engine.infer(deployment, request(engine))).outputs["OUT"][0, 0] == 2
    assert "Traceback" in caplog.text


async def test_an_internal_error_in_the_statistics_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        slips_once(monkeypatch, accounting, "record_batch")
        deployment = engine.deployments.find("double")
        with trio.fail_after(5):
            for _ in range(2):
                assert (await engine.infer(deployment, request(engine))).outputs["OUT"][0, 0] == 2
        deployment.statistics.add_up()
        assert deployment.statistics.execution_count == 1
    assert "accounting for a batch failed" in caplog.text


async def test_a_fault_about_one_member_of_a_batch_leaves_no_member_without_a_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        finish = engine.scheduler._finish

        def fault(frame: Frame) -> None:
            if frame is frames[1] and frame.record.error is None:
                raise RuntimeError("a fault")
            finish(frame)

        monkeypatch.setattr(engine.scheduler, "_finish", fault)
        monkeypatch.setattr(engine.scheduler, "_finish_alike", lambda *_: 0)  # finish each member by itself
        engine.begin_events()
        frames = [engine.submit(deployment, request(engine)) for _ in range(3)]
        told: list[Frame] = []
        for frame in frames:
            frame.record.waiter = told.append
        engine.end_events()
        await wait_all_tasks_blocked()
        assert engine.response(frames[0]).outputs["OUT"][0, 0] == 2
        for frame in frames[1:]:
            with pytest.raises(Internal, match="'double_0': the results of a batch cannot be processed: RuntimeError"):
                engine.response(frame)
        assert [frame.record.done for frame in frames] == [True] * 3
        assert told == frames
        assert engine.scheduler.in_flight == 0


class FaultyObserver:
    """Raises at one of the points of `Observer`."""

    def __init__(self, point: str) -> None:
        self.point = point

    def __getattr__(self, point: str) -> Callable[..., None]:
        def observe(*_: object) -> None:
            if point == self.point:
                raise RuntimeError("a fault")

        return observe


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("batched", ""),
        ("started", ""),
        ("computed", ""),
        ("finished", ""),
        ("failed", "ValueError in a batch of 3 requests"),
    ],
)
async def test_an_exception_of_an_observer_changes_no_response(
    point: str, error: str, inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as engine:
        add_function(engine, "model", [poisoned], inline=inline)
        deployment = engine.deployments.find("model")
        observer = cast("Observer", FaultyObserver(point))
        engine.observers.append(observer)
        value = 13.0 if point == "failed" else 1.0
        told: list[Frame] = []
        engine.begin_events()
        frames = [engine.submit(deployment, request(engine, value)) for _ in range(3)]
        for frame in frames:
            frame.record.waiter = told.append
        engine.end_events()
        with trio.fail_after(5):
            while len(told) < 3:  # noqa: ASYNC110  # `waiter` sets no event
                await trio.sleep(0.001)
        assert told == frames
        for frame in frames:
            if error:
                with pytest.raises(FlowserveError, match=error):
                    engine.response(frame)
            else:
                assert engine.response(frame).outputs["OUT"][0, 0] == 2
        engine.observers.remove(observer)
        with trio.fail_after(5):
            assert (await engine.infer(deployment, request(engine))).outputs["OUT"][0, 0] == 2
    assert "RuntimeError: a fault" in caplog.text


async def test_a_failing_completion_callback_affects_no_other_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        told: list[object] = []

        def slip(frame: object) -> None:
            raise RuntimeError("a slip")

        for waiter in (slip, told.append):
            frame = engine.submit(deployment, request(engine))
            frame.record.waiter = waiter
        await wait_all_tasks_blocked()
        assert told == [frame]
    assert "a slip" in caplog.text


async def test_requests_waiting_for_admission_are_admitted_when_inline_models_complete() -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        options = AdmissionOptions(max_requests=1, waits=True)
        deployment.admission = AdmissionController(
            options, None, deployment.output_slot, deployment.statistics, engine.scheduler, engine.clock
        )
        with trio.fail_after(5):  # no other event wakes the engine
            async with trio.open_nursery() as nursery:
                for i in range(5):
                    nursery.start_soon(ask, engine, "double", float(i), {})


async def test_a_request_cancelled_after_its_unreported_deadline_is_counted_once() -> None:
    async with running() as engine:
        add_function(engine, "double", [double])
        deployment = engine.deployments.find("double")
        statistics = deployment.statistics
        deployment.admission = AdmissionController(
            AdmissionOptions(deadline_ms=1000, max_requests=1),
            None,
            deployment.output_slot,
            statistics,
            engine.scheduler,
            engine.clock,
        )
        frame = engine.submit(deployment, request(engine))
        frame.record.waiter = lambda _: None
        engine.scheduler._expire(engine.clock() + 2_000_000_000)  # as if a queue became full between two steps
        assert frame.record.done
        engine.withdraw(frame)
        await wait_all_tasks_blocked()
        assert sum(statistics.failures.values()) == 1
        assert (deployment.admission.inside, engine.scheduler.in_flight) == (0, 0)


async def test_the_callers_of_a_large_batch_are_told_between_other_work_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing each response takes time."""
    monkeypatch.setattr("flowserve.runtime.engine.engine.STEP_NS_MAX", 2_000_000)
    async with running() as engine:
        add_function(engine, "double", [double], max_batch_size=256)
        happened: list[str] = []
        deployment = engine.deployments.find("double")
        clock = engine.clock
        engine.clock = lambda: clock() + 100_000 * happened.count("told")  # each response takes 0.1 ms

        def told(_: Frame) -> None:
            happened.append("told")

        for i in range(256):
            engine.submit(deployment, request(engine, float(i))).record.waiter = told
        with trio.fail_after(10):
            while happened.count("told") < 256:
                happened.append("other work")
                await trio.lowlevel.checkpoint()
        assert "".join(what[0] for what in happened).strip("o").count("o") > 4
        assert engine.scheduler.in_flight == 0
