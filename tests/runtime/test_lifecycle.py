"""Generations of a model: which one a request runs on, and when an old one is freed. A real engine over functions."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve import Engine as EngineOfFiles
from flowserve.errors import ModelFailed, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.runtime.embedding.embedded import engine_of
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array, Request
from tests.support.backends import Repository
from tests.support.engine import Function, FunctionInstance, add_chain, add_function


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    """An engine whose generations are freed by reference counts alone: the garbage collector is off."""
    gc.collect()
    gc.disable()
    try:
        async with open_engine(EngineOptions()) as engine:
            yield engine
    finally:
        gc.enable()


def times(factor: float, gate: threading.Event | None = None) -> Function:
    def function(array: Array) -> Array:
        if gate is not None:
            assert gate.wait(10)
        return array * np.float32(factor)

    return function


async def ask(engine: Engine, name: str, answers: list[float]) -> None:
    request = Request(inputs={"IN": np.full((1, 4), 1, np.float32)}, stamp=engine.next_stamp())
    response = await engine.infer(engine.deployments.find(name), request)
    answers.append(float(response.outputs["OUT"][0, 0]))


async def closed(instance: FunctionInstance) -> bool:
    """Whether the instance is closed within five seconds."""
    with trio.move_on_after(5):
        while instance.is_open:  # noqa: ASYNC110, the instance is closed on a thread
            await trio.sleep(0.001)
    return not instance.is_open


@pytest.mark.fault("L6")
async def test_a_request_finishes_on_the_generation_it_started_with_and_the_next_runs_on_the_new_one() -> None:
    gate = threading.Event()
    answers: list[float] = []
    async with running() as engine, trio.open_nursery() as nursery:
        (old,) = add_function(engine, "m", [times(2, gate)], inline=False)
        nursery.start_soon(ask, engine, "m", answers)
        await wait_all_tasks_blocked()
        add_function(engine, "m", [times(3)])
        await ask(engine, "m", answers)
        assert answers == [3.0]
        assert old.is_open
        gate.set()
        assert await closed(old)
        assert answers == [3.0, 2.0]


@pytest.mark.fault("L6")
async def test_requests_in_the_old_queue_are_answered_by_the_old_generation() -> None:
    gate = threading.Event()
    answers: list[float] = []
    async with running() as engine, trio.open_nursery() as nursery:
        (old,) = add_function(engine, "m", [times(2, gate)], max_batch_size=1, inline=False)
        for _ in range(5):
            nursery.start_soon(ask, engine, "m", answers)
        await wait_all_tasks_blocked()
        add_function(engine, "m", [times(3)])
        assert sum(queued.requests for _, queued in engine.deployments.counters()) == 4
        gate.set()
        assert await closed(old)
        assert answers == [2.0] * 5


async def test_the_load_counts_busy_instances_and_waiting_rows() -> None:
    gate = threading.Event()
    answers: list[float] = []
    async with running() as engine, trio.open_nursery() as nursery:
        add_function(engine, "m", [times(2, gate), times(2, gate)], max_batch_size=2, inline=False)
        add_chain(engine, "chain", ["m"])
        loads = []
        for count in (0, 1, 6):
            for _ in range(count):
                nursery.start_soon(ask, engine, "m", answers)
            await wait_all_tasks_blocked()
            loads.append({statistics.name: queued.load for statistics, queued in engine.deployments.counters()})
        gate.set()
    # First one of two instances is busy; then both, and the waiting rows are compared with two batches of two.
    assert loads[:2] == [{"m": 0.0, "chain": 0.0}, {"m": 0.5, "chain": 0.5}]
    assert loads[2]["m"] == loads[2]["chain"] > 1
    assert len(answers) == 7


async def test_an_ensemble_keeps_the_step_it_was_compiled_with_until_it_is_compiled_again() -> None:
    answers: list[float] = []
    async with running() as engine:
        (old,) = add_function(engine, "step", [times(2)])
        add_chain(engine, "chain", ["step", "step"])
        add_function(engine, "step", [times(3)])
        await ask(engine, "chain", answers)
        await ask(engine, "step", answers)
        assert answers == [4.0, 3.0]
        assert old.is_open
        add_chain(engine, "chain", ["step", "step"])
        assert await closed(old)
        await ask(engine, "chain", answers)
        assert answers[-1] == 9.0


async def test_a_deployment_found_before_its_replacement_still_serves() -> None:
    async with running() as engine:
        (old,) = add_function(engine, "m", [times(2)])
        deployment = engine.deployments.find("m")
        add_function(engine, "m", [times(3)])
        response = await engine.infer(deployment, Request(inputs={"IN": np.ones((1, 4), np.float32)}))
        assert response.outputs["OUT"][0, 0] == 2.0
        assert old.is_open
        del deployment
        assert await closed(old)


async def test_a_cancelled_request_does_not_keep_the_old_generation() -> None:
    gate = threading.Event()
    async with running() as engine:
        (old,) = add_function(engine, "m", [times(2, gate)], inline=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, "m", [])
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        add_function(engine, "m", [times(3)])
        gate.set()
        assert await closed(old)


async def test_inline_worker_does_not_hold_the_old_generation() -> None:
    answers: list[float] = []
    async with running() as engine:
        (old,) = add_function(engine, "m", [times(2)], is_pure=True)
        for _ in range(40):
            await ask(engine, "m", answers)
            await wait_all_tasks_blocked()
        assert old.batches == [[1]] * 40
        (new,) = add_function(engine, "m", [times(3)], is_pure=True)
        assert await closed(old)
        assert new.is_open


async def test_a_failed_request_does_not_keep_the_old_generation() -> None:
    def fail(array: Array) -> Array:
        raise ModelFailed("no")

    async with running() as engine:
        (old,) = add_function(engine, "m", [fail])
        for _ in range(3):
            # Not pytest.raises: it keeps the traceback, and with it the frames that hold the deployment.
            with suppress(ModelFailed):
                await ask(engine, "m", [])
        assert engine.deployments.statistics()[0]["inference_stats"]["fail"]["count"] == 3
        add_function(engine, "m", [times(3)])
        assert await closed(old)


async def test_a_withdrawn_name_is_refused_with_the_reason_and_its_statistics_are_removed() -> None:
    async with running() as engine:
        (instance,) = add_function(engine, "m", [times(2)])
        engine.deployments.is_loaded = True
        await ask(engine, "m", [])
        assert len(engine.deployments.statistics()) == 1
        engine.deployments.withdraw_name("m", "unloaded")
        generation = engine.loaded.generations.retire(ModelKey("m", 1))
        with pytest.raises(Unavailable, match="'m' is not at ready state: unloaded"):
            engine.deployments.find("m")
        await generation.closed.wait()
        assert not instance.is_open
        assert engine.deployments.statistics() == []
        row = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        assert engine.deployments.index() == [row]


async def test_an_engine_that_ends_closes_old_generations_too() -> None:
    gate = threading.Event()
    async with running() as engine:
        (old,) = add_function(engine, "m", [times(2, gate)], inline=False)
        deployment = engine.deployments.find("m")
        add_function(engine, "m", [times(3)])
    assert not old.is_open
    assert deployment.version == 1


def frames() -> list[Frame]:
    return [one for one in gc.get_objects() if isinstance(one, Frame)]


async def test_the_frame_of_an_ensemble_whose_requests_share_slots_is_freed_with_its_response() -> None:
    async with running() as engine:
        for name in ("double", "triple"):
            add_function(engine, name, [times(len(name) - 4)])
        add_chain(engine, "chain", ["double", "triple"], shared_limit=1)
        answers: list[float] = []
        before = frames()  # of other tests
        for _ in range(3):
            await ask(engine, "chain", answers)
        assert answers == [4, 4, 4]
        assert [one for one in frames() if not any(one is other for other in before)] == []
        histogram, _ = engine.deployments.find("chain").statistics.until_first_response()
        assert sum(histogram.counts) == 3


RUNS_FOR_EVER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        for request in requests:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [None for _ in requests]
"""
ITERATIVE = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "execution" value { string_value: "thread" } }
sequence_batching { iterative_sequence: true }
"""


async def test_cancelled_request_of_an_iterative_sequence_does_not_block_unload(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.write("again", "config.pbtxt", ITERATIVE)
    repository.write("again", "1/model.py", RUNS_FOR_EVER)
    async with EngineOfFiles(tmp_path) as engine:
        with trio.move_on_after(0.05):
            await engine.infer("again", {"IN": np.ones((1, 1), np.float32)})
        with trio.fail_after(10):
            await engine.unload("again")


RAISES = """
class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("as it was told")
"""


@pytest.mark.parametrize("place", ["thread", "inline"])
async def test_exception_of_a_model_holds_neither_request_nor_model(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "flowserve")  # pytest would keep the log records, which hold the request
    repository = Repository(tmp_path)
    config = ITERATIVE.replace("sequence_batching { iterative_sequence: true }", "").replace("thread", place)
    repository.write("raises", "config.pbtxt", config)
    repository.write("raises", "1/model.py", RAISES)
    async with EngineOfFiles(tmp_path) as engine:
        gc.collect()
        gc.disable()
        try:
            with suppress(ModelFailed):  # pytest.raises would keep the exception
                await engine.infer("raises", {"IN": np.ones((1, 1), np.float32)})
            assert engine.statistics("raises")[0]["inference_stats"]["fail"]["count"] == 1
            with trio.fail_after(10):
                await engine.unload("raises")
        finally:
            gc.enable()


WAITS = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.gate = Path(args["model_repository"]).parent / "gate"

    def execute(self, requests):
        while not self.gate.exists():
            time.sleep(0.001)
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()) for request in requests]

    def answer(self, array):
        if array[0, 0] < 0:
            raise ValueError("below zero")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])
"""
ADDS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().any():
            self.total = 0
        self.total = self.total + array
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.total)])
"""
ADDS_CONFIG = ITERATIVE.replace(
    "iterative_sequence: true",
    """
    max_sequence_idle_microseconds: 600000000
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    """,
)
WAITS_AND_ADDS = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
  step {
    model_name: "waits" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "waited" }
  }
  step {
    model_name: "adds" model_version: -1
    input_map { key: "IN" value: "waited" } output_map { key: "OUT" value: "OUT" }
  }
}
"""


@pytest.mark.parametrize("end", ["answered", "failed", "cancelled"])
async def test_a_sequence_whose_first_request_has_not_come_to_its_step_goes_on_after_a_reload(
    tmp_path: Path, end: str
) -> None:
    repository = Repository(tmp_path)
    repository.write("waits", "config.pbtxt", ITERATIVE.replace("sequence_batching { iterative_sequence: true }", ""))
    repository.write("waits", "1/model.py", WAITS)
    repository.write("adds", "config.pbtxt", ADDS_CONFIG)
    repository.write("adds", "1/model.py", ADDS)
    repository.write("both", "config.pbtxt", WAITS_AND_ADDS)
    (tmp_path / "both" / "1").mkdir()
    totals: dict[int, float] = {}  # trio wakes callers of one step in any order

    async def send(number: int, *, is_first: bool = False, is_last: bool = False) -> None:
        with scope if is_first else nullcontext():
            array = np.full((1, 1), number, np.float32)
            made = await engine.infer(
                "both", {"IN": array}, sequence_id=7, sequence_start=is_first, sequence_end=is_last
            )
            totals[number] = float(made["OUT"][0, 0])

    scope = trio.CancelScope()
    async with EngineOfFiles(tmp_path) as engine:
        generations = engine_of(engine).loaded.generations
        with suppress(BaseExceptionGroup) if end == "failed" else nullcontext():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(send, -1 if end == "failed" else 1, is_first=True))
                await wait_all_tasks_blocked()
                repository.write("adds", "config.pbtxt", ADDS_CONFIG + 'parameters { key: "new" }')
                await engine.load("adds")
                assert len(generations.workers()) == 3  # also the instance that the sequence will run in
                if end == "answered":
                    nursery.start_soon(partial(send, 2))
                    await wait_all_tasks_blocked()
                if end == "cancelled":
                    scope.cancel()
                (tmp_path / "gate").touch()
        if end == "answered":
            assert totals == {1: 1, 2: 3}
            await send(4, is_last=True)
        assert totals == ({1: 1, 2: 3, 4: 7} if end == "answered" else {})
        with trio.fail_after(10):  # the old instance is closed when no sequence is left in it
            while len(generations.workers()) > 2:  # noqa: ASYNC110  # closing has no event
                await trio.sleep(0.001)


def test_opening_an_engine_in_a_cancelled_scope_ends() -> None:
    ended = threading.Event()

    async def open_cancelled() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with open_engine(EngineOptions()):
                await trio.sleep_forever()

    def run() -> None:
        trio.run(open_cancelled)
        ended.set()

    threading.Thread(target=run, daemon=True).start()  # a hanging one could not be cancelled
    assert ended.wait(10)
