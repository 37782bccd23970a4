"""Segments: an actor with an instance of each model, which a batch passes as one hop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.elsewhere.placement import ModelPlace
from flowserve.errors import FlowserveError, InstanceDied, MachineLost
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from tests.support.clusters import (
    PURE_STEP,
    STEP,
    STEP_CODE,
    STEP_CONFIG,
    ask,
    is_running,
    local_cluster,
    row,
    serving,
    until,
    write_chain,
    write_ensemble,
    write_python,
)

SLOW = """
import os
import time


class TritonPythonModel:
    def initialize(self, args):
        open("BEGUN", "w").close()
        while not os.path.exists("GATE"):
            time.sleep(0.01)

    def execute(self, requests):
        pass

    def finalize(self):
        open("ENDED", "w").close()
"""
NAMES = ("first", "second", "third")


def placed(count: int = 1, names: Iterable[str] = NAMES) -> Mapping[str, ModelPlace]:
    return {name: ModelPlace(name, count, segment="text") for name in names}


class Seen:
    """An observer: the batches that are back, with their outcomes."""

    def __init__(self, engine: Engine) -> None:
        self.batches: list[tuple[Batch, Outcome]] = []
        engine.observers.append(self)

    def batched(self, batch: Batch, now_ns: int) -> None: ...
    def started(self, batch: Batch) -> None: ...
    def queued(self, frame: Frame) -> None: ...
    def finished(self, frame: Frame) -> None: ...
    def failed(self, frame: Frame) -> None: ...

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        made = [(results, len(results.outputs)) for results in outcome.made] if isinstance(outcome, Passed) else []
        self.batches.append((batch, outcome))
        self.sent = [count for _, count in made]

    def passed(self) -> list[tuple[int, int]]:
        """Of each batch since the last call, the stages of its route and those that it passed; (0, 0) without one."""
        found = [
            (len(batch.route), len(outcome.made)) if batch.route is not None and isinstance(outcome, Passed) else (0, 0)
            for batch, outcome in self.batches
        ]
        self.batches.clear()
        return found


def workers(engine: Engine, model: str) -> list[RemoteWorker]:
    (queue,) = engine.deployments.find(model).queues
    return [one for one in dict.fromkeys(queue.instances) if isinstance(one, RemoteWorker)]


def all_there(engine: Engine, names: Iterable[str] = NAMES) -> bool:
    return all(
        worker.port.connection and not queue.away
        for name in names
        for worker in workers(engine, name)
        for queue in engine.deployments.find(name).queues
    )


async def ask_each(engine: Engine, rows: Iterable[Any]) -> list[Any]:
    """The answers to requests that are asked at once: the value, or the error."""
    rows = [*rows]
    answers: list[Any] = [None] * len(rows)

    async def one(i: int) -> None:
        try:
            answers[i] = float((await ask(engine, "chain", rows[i]))["OUT"][0, 0])
        except FlowserveError as error:
            answers[i] = error

    async with trio.open_nursery() as nursery:
        for i in range(len(rows)):
            nursery.start_soon(one, i)
    return answers


async def test_a_batch_passes_a_segment_as_one_hop_and_only_what_is_read_elsewhere_travels(tmp_path: Path) -> None:
    write_chain(tmp_path)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed()) as (engine, _):
            seen = Seen(engine)
            pids = {int((await ask(engine, name, row(1, 9, 0)))["PID"].item()) for name in NAMES}
            answer = await ask(engine, "chain", row(1, 9, 0))
            assert {answer["PID"].item()} == pids, "one process"
            assert answer["OUT"].tolist() == [[8, 9, 0]]
            assert seen.passed()[-1] == (3, 3)
            assert seen.sent == [0, 0, 2]
            large = np.full((2, 100_000), 9.0, np.float32)
            assert ((await ask(engine, "chain", large))["OUT"][:, :2] == [72, 9]).all()
            assert seen.passed() == [(3, 3)]
            engine.deployments.counters()
            statistics = [engine.deployments.find(name).queues[0].statistics for name in NAMES]
            assert [one.execution_count for one in statistics] == [3, 3, 3]

            # Each end of a route but the last: what was made until then is used, and every request has one answer.
            for number in range(3):
                for what, passed, text in ((1, number + 1, "one fails"), (2, number, "all fail")):
                    (error,) = await ask_each(engine, [row(1, number, what)])
                    assert text in str(error)
                    assert seen.passed() == [(3, passed)]
                assert await ask_each(engine, [row(1, number, 5)]) == [8], "a shape of its own is no error"
                assert seen.passed() == [(3, 3)]
            engine.observers.remove(seen)
            watch = WantsOutputs(engine)
            assert await ask_each(engine, [row(1, 9, 0)]) == [8]
            assert watch.passed() == [(3, 1), (2, 1), (0, 0)], "an observer reads what each step made"


class WantsOutputs(Seen):
    """An observer that reads the outputs of every stage."""

    def batched(self, batch: Batch, now_ns: int) -> None:
        batch.wants_outputs = True

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        super().computed(batch, outcome, now_ns)
        results = outcome.made[-1] if isinstance(outcome, Passed) else outcome
        # A member of a stage's outputs, which the type leaves open.
        assert results.outputs[0][0] is not None  # type: ignore[union-attr]


async def test_a_member_that_fails_or_has_another_shape_leaves_the_route_with_its_batch(tmp_path: Path) -> None:
    write_chain(tmp_path, PURE_STEP)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed()) as (engine, _):
            seen = Seen(engine)
            for what, passed in ((1, 2), (2, 1), (5, 2)):
                answers = await ask_each(engine, [row(1, 9, 0), row(2, 1, what), row(3, 9, 0), row(4, 9, 0)])
                assert [answers[0], *answers[2:]] == [8, 24, 32], what
                assert answers[1] == 16 if what == 5 else isinstance(answers[1], FlowserveError)
                assert seen.passed()[0] == (3, passed)
                assert not engine.scheduler.in_flight


async def test_a_batch_on_its_route_is_recalled_for_requests_that_wait(tmp_path: Path) -> None:
    write_chain(tmp_path)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed()) as (engine, _):
            seen = Seen(engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(ask, engine, "chain", row(1, 1, 300)))
                (worker,) = workers(engine, "second")
                await until(lambda: worker.running)
                nursery.start_soon(partial(ask, engine, "first", row(1, 0, 20)))
                await until(lambda: len(workers(engine, "first")[0].batches) == 2)
                # No slot is free: it waits for the one that the batch on its route holds.
                assert (await ask(engine, "first", row(5, 9, 0)))["OUT"][0, 0] == 10
                assert worker.running, "released while the batch is at its second stage"
            assert [batch.is_recalled for batch, _ in seen.batches if batch.route is not None] == [True]
            assert seen.passed()[-2:] == [(3, 2), (0, 0)]
            assert await ask_each(engine, [row(3, 9, 0)]) == [24]
            assert seen.passed() == [(3, 3)]


async def test_an_actor_that_ends_ends_all_its_instances_and_is_started_again_as_one(tmp_path: Path) -> None:
    write_chain(tmp_path, PURE_STEP)
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, placed(2)) as (engine, _):
            seen = Seen(engine)
            for index in (0, 1):
                machines = {workers(engine, name)[index].port.machine for name in NAMES}
                assert len(machines) == 1, "the instances of one number are in one actor"
            assert {worker.port.machine for worker in workers(engine, "first")} == {"local-1", "local-2"}
            # Two requests are in two actors, each as one hop.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(ask, engine, "chain", row(1, 0, 300)))
                await until(lambda: any(one.running for one in workers(engine, "third")))
                nursery.start_soon(partial(ask, engine, "chain", row(1, 0, 300)))
            used = [{one.port.machine for one in batch.instances} for batch, _ in seen.batches]
            assert sorted(map(sorted, used)) == [["local-1"], ["local-2"]]
            assert seen.passed() == [(3, 3), (3, 3)]
            for number in (0, 2):
                (error,) = await ask_each(engine, [row(1, number, 3)])
                assert isinstance(error, InstanceDied), "not run again, although its models are pure"
                assert "exit status 7" in str(error)
                assert await ask_each(engine, [row(1, 9, 0)]) == [8], "in the other actor"
                await until(lambda: all_there(engine))
            answers = await ask_each(engine, [row(float(value), 9, 0) for value in range(20)])
            assert answers == [8.0 * value for value in range(20)]


@pytest.mark.parametrize("is_pure", [True, False])
async def test_a_batch_on_its_route_in_a_lost_machine_runs_once_more_if_all_models_are_pure(
    tmp_path: Path, is_pure: bool
) -> None:
    write_chain(tmp_path, PURE_STEP)
    if not is_pure:
        (tmp_path / "second" / "config.pbtxt").write_text(STEP_CONFIG)
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, placed()) as (engine, _):
            answers: list[Any] = []

            async def send() -> None:
                answers.extend(await ask_each(engine, [row(1, 0, 300)]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await until(lambda: workers(engine, "third")[0].running)
                os.kill(cluster.processes()[workers(engine, "first")[0].port.machine], signal.SIGKILL)
            if is_pure:
                assert answers == [8]
            else:
                assert isinstance(answers[0], MachineLost)
            await until(lambda: all_there(engine))
            assert await ask_each(engine, [row(1, 9, 0)]) == [8]


async def test_a_model_is_reloaded_in_its_actor_which_ends_with_its_last_model(tmp_path: Path) -> None:
    write_chain(tmp_path)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed()) as (engine, control):
            seen = Seen(engine)
            pid = int((await ask(engine, "chain", row(1, 9, 0)))["PID"].item())
            code = tmp_path / "second" / "1" / "model.py"
            code.write_text(code.read_text().replace("*= 2", "*= 3"))
            await control.load("second")
            seen.batches.clear()
            answer = await ask(engine, "chain", row(1, 9, 0))
            assert (answer["OUT"][0, 0], answer["PID"].item()) == (12, pid)
            assert seen.passed() == [(3, 3)]
            engine.observers.clear()  # what it holds would keep models from being closed
            # A version that cannot be opened, or whose load is given up, harms nothing that serves.
            code.write_text(
                "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('no licence')\n"
            )
            with pytest.raises(FlowserveError, match="no licence"):
                await control.load("second")
            slow = SLOW
            for name in ("begun", "gate", "ended"):
                slow = slow.replace(name.upper(), str(tmp_path / name))
            code.write_text(slow)
            async with trio.open_nursery() as nursery:

                async def load() -> None:
                    with pytest.raises(FlowserveError, match="it was unloaded while it was loading"):
                        await control.load("second")

                nursery.start_soon(load)
                await until((tmp_path / "begun").exists)
                assert (await ask(engine, "first", row(1, 9, 0)))["PID"].item() == pid
                await control.unload("second")
            (tmp_path / "gate").touch()  # what was given up ends its initialization all the same
            await until((tmp_path / "ended").exists)
            assert (await ask(engine, "third", row(1, 9, 0)))["PID"].item() == pid
            await control.unload("first")
            assert is_running(pid)
            await control.unload("third")
            await until(lambda: not is_running(pid))


async def test_a_diamond_is_one_hop_if_its_first_model_is_in_the_segment(tmp_path: Path) -> None:
    names = ("first", "left", "right", "join")
    write_chain(tmp_path, names=names[:3], pid=False)
    both = STEP_CONFIG.replace("output {", 'input { name: "MORE" data_type: TYPE_FP32 dims: [ -1 ] } output {', 1)
    code = STEP_CODE.replace(".copy()", '.copy() + pb_utils.get_input_tensor_by_name(request, "MORE").as_numpy()')
    write_python(tmp_path, "join", both, code.replace("NUMBER", "3"))
    (tmp_path / "chain" / "config.pbtxt").unlink()
    (tmp_path / "chain" / "1").rmdir()
    (tmp_path / "chain").rmdir()
    more = 'input_map { key: "MORE" value: "r" }'
    steps = [
        STEP.format("first", "IN", "a", ""),
        STEP.format("left", "a", "l", ""),
        STEP.format("right", "a", "r", ""),
        STEP.format("join", "l", "OUT", more),
    ]
    write_ensemble(tmp_path, steps, pid=False)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed(names=names)) as (engine, _):
            seen = Seen(engine)
            assert await ask_each(engine, [row(1, 9, 0)]) == [16]
            assert seen.passed() == [(4, 4)]
            # What the first made is read by two: neither may change it.
            (error,) = await ask_each(engine, [row(1, 2, 1)])
            assert "one fails" in str(error)
            assert seen.passed() == [(4, 3)]


async def test_a_segment_that_a_path_leaves_and_comes_back_to_is_run_step_by_step_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_chain(tmp_path, pid=False)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, placed(names=("first", "third"))) as (engine, _):
            (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
            assert warning == (
                "a path of 'chain' leaves segment 'text' and comes back: first -> second -> third: "
                "the steps of the segment run one by one [P7]"
            )
            seen = Seen(engine)
            (answer,) = await ask_each(engine, [row(1, 9, 0)])
            assert isinstance(answer, float)
            assert seen.passed() == [(0, 0)] * 3
