"""Models whose instances are on other machines, here processes: batches, errors, ends, restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.elsewhere.placement import ModelPlace
from flowserve.errors import FlowserveError, InstanceDied, MachineLost, ModelFailed, Unavailable
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.remote.worker import RemoteWorker
from tests.support.clusters import (
    DOUBLE,
    DOUBLE_CODE,
    PURE,
    ask,
    is_running,
    local_cluster,
    row,
    serving,
    until,
    write_python,
)

BYTES = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
ECHO_CODE = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            out = [pb_utils.Tensor("OUT", value)]
            facts = {"id": request.request_id(), "given": request.parameters()}
            responses.append(pb_utils.InferenceResponse(out, parameters={"facts": facts["id"] + facts["given"]}))
        return responses
"""
CHAIN = """
platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "first" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "a" } }
  step { model_name: "second" model_version: -1
    input_map { key: "IN" value: "a" } output_map { key: "OUT" value: "b" } }
  step { model_name: "third" model_version: -1
    input_map { key: "IN" value: "b" } output_map { key: "OUT" value: "OUT" } }
}
"""


def worker_of(engine: Engine, model: str, number: int = 0) -> RemoteWorker:
    (queue,) = engine.deployments.find(model).queues
    workers = [*dict.fromkeys(queue.instances)]
    worker = workers[number]
    assert isinstance(worker, RemoteWorker)
    return worker


async def ask_all(engine: Engine, model: str, values: Sequence[Any]) -> list[Any]:
    """The outputs or the error for each value, asked for at the same time."""
    answers: list[Any] = [None] * len(values)

    async def one(i: int) -> None:
        try:
            answers[i] = await ask(engine, model, values[i])
        except FlowserveError as error:
            answers[i] = error

    async with trio.open_nursery() as nursery:
        for i in range(len(values)):
            nursery.start_soon(one, i)
    return answers


def is_served(engine: Engine, model: str) -> bool:
    return not engine.deployments.outage(engine.deployments.find(model))


async def test_a_model_on_another_machine_answers_as_one_here(tmp_path: Path) -> None:
    write_python(tmp_path, "there")
    write_python(tmp_path, "here")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"there": ModelPlace("there")}) as (engine, _):
            for size in (1, 0, 64, 200_000):
                value = np.arange(size, dtype=np.float32)[None]
                there, here = await ask(engine, "there", value), await ask(engine, "here", value)
                assert (there["OUT"] == value * 2).all()
                assert there["OUT"].shape == here["OUT"].shape
                assert there["PID"].item() != here["PID"].item()


async def test_strings_ids_and_parameters_travel_both_ways(tmp_path: Path) -> None:
    write_python(tmp_path, "m", BYTES, ECHO_CODE)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m")}) as (engine, _):
            value = np.array([[b"", "é".encode(), b"x" * 100_000]], np.object_)
            assert (await ask(engine, "m", value, id="seven", parameters={"a": 1}))["OUT"].tolist() == value.tolist()


async def test_a_batch_crosses_as_a_whole_and_errors_are_of_single_requests(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            # While two sleep, the rest waits, and goes as one batch.
            values = [row(-50.0), row(-50.0, 0), row(1.0), row(2.0), row(-1.0), row(3.0)]
            answers = await ask_all(engine, "m", values)
            assert [one["OUT"][0, 0] for one in answers if isinstance(one, dict)] == [-100, -100, 2, 4, 6]
            assert isinstance(answers[4], FlowserveError)
            assert "minus one" in str(answers[4])
            statistics = engine.deployments.find("m").queues[0].statistics
            assert statistics.execution_count < len(values)
            with pytest.raises(ModelFailed, match="minus two"):
                await ask(engine, "m", row(-2.0))
            assert (await ask(engine, "m", row(4.0)))["OUT"][0, 0] == 8


async def test_two_batches_are_under_way_to_one_instance(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            worker = worker_of(engine, "m")
            assert engine.deployments.find("m").queues[0].instances == (worker, worker)
            most = 0
            async with trio.open_nursery() as nursery:
                for size in (1, 2, 3):  # batches of different shapes
                    nursery.start_soon(ask, engine, "m", row(*[-100.0] * size))
                with trio.move_on_after(0.25):
                    while True:
                        connection = worker.port.connection
                        assert connection is not None
                        most = max(most, len(connection.runs))
                        await trio.sleep(0.005)
            assert most == 2


async def test_an_actor_that_ends_fails_its_batches_only_and_is_started_again(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=2)}) as (engine, _):
            assert {worker_of(engine, "m", i).port.machine for i in (0, 1)} == {"local-1", "local-2"}
            with pytest.raises(InstanceDied, match=r"instance 'm_[01]'.*exit status 7.*machine 'local-[12]'"):
                await ask(engine, "m", row(-3.0))
            assert (await ask(engine, "m", row(1.0)))["OUT"][0, 0] == 2  # of the other instance
            await until(lambda: all(worker_of(engine, "m", i).port.connection for i in (0, 1)))
            answers = await ask_all(engine, "m", [row(float(i)) for i in range(20)])
            assert [one["OUT"][0, 0] for one in answers] == [2 * i for i in range(20)]


async def test_batches_of_a_pure_model_run_once_more_when_a_machine_is_lost(tmp_path: Path) -> None:
    write_python(tmp_path, "m", PURE)
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=2)}) as (engine, _):
            assert engine.deployments.find("m").queues[0].is_pure
            answers: list[Any] = []

            async def send() -> None:
                answers.extend(await ask_all(engine, "m", [row(-300.0, float(i)) for i in range(12)]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await until(lambda: all(worker_of(engine, "m", i).running for i in (0, 1)))
                os.kill(cluster.processes()["local-1"], signal.SIGKILL)
            assert [one["OUT"][0, 1] for one in answers] == [2 * i for i in range(12)]
            assert cluster.machines() == ["local-2"]
            await until(lambda: all(worker_of(engine, "m", i).port.connection for i in (0, 1)))
            assert {worker_of(engine, "m", i).port.machine for i in (0, 1)} == {"local-2"}


async def test_batches_of_any_other_model_fail_with_the_name_of_the_lost_machine(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            assert cluster.is_reachable
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    with pytest.raises(MachineLost, match="machine 'local-1' is lost"):
                        await ask(engine, "m", row(-5000.0))

                nursery.start_soon(send)
                await until(lambda: worker_of(engine, "m").running)
                os.kill(cluster.processes()["local-1"], signal.SIGKILL)
            await until(lambda: not cluster.is_reachable)
            left = "no machine of the cluster is left"
            await until(lambda: left in engine.deployments.outage(engine.deployments.find("m")))
            with pytest.raises(Unavailable):
                await ask(engine, "m", row(1.0))


async def test_no_more_bytes_are_under_way_to_a_machine_than_may_be(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    traffic = {"local-1": (machine := MachineTraffic(1))}  # one batch at a time
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=2)}, traffic=traffic) as (engine, _):
            seen: list[int] = []

            async def watch() -> None:
                while True:
                    seen.append(len(machine._under_way))
                    await trio.sleep(0.001)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                answers = await ask_all(engine, "m", [np.full((1, 500_000), i, np.float32) for i in range(24)])
                nursery.cancel_scope.cancel()
            assert [one["OUT"][0, 0] for one in answers] == [2 * i for i in range(24)]
            assert max(seen) == 1  # although two instances could take four
            assert machine.nbytes == 0
            (statistics,) = engine.deployments.statistics("m", "1")
            assert machine.batches == statistics["execution_count"]
            assert machine.way_ns > 0


async def test_the_bytes_of_a_batch_that_is_lost_are_not_counted_any_more(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    traffic = {"local-1": (machine := MachineTraffic(1))}  # one batch at a time
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}, traffic=traffic) as (engine, _):
            answers = await ask_all(engine, "m", [np.full((1, 300_000), -3, np.float32) for _ in range(3)])
            assert all(isinstance(one, InstanceDied) for one in answers[:1])
            await until(lambda: is_served(engine, "m"))
            assert (await ask(engine, "m", row(4.0)))["OUT"].item() == 8
            assert machine.nbytes == 0


async def test_a_machine_that_falls_silent_is_lost(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            pid = int((await ask(engine, "m", row(1.0)))["PID"].item())
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            with trio.fail_after(15), pytest.raises(MachineLost, match="does not answer"):
                await ask(engine, "m", row(2.0))
            await until(lambda: is_served(engine, "m"))
            assert int((await ask(engine, "m", row(1.0)))["PID"].item()) != pid


async def test_steps_of_a_graph_are_on_several_machines(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        write_python(tmp_path, name)
    (tmp_path / "chain" / "1").mkdir(parents=True)
    (tmp_path / "chain" / "config.pbtxt").write_text(CHAIN)
    places = {"first": ModelPlace("first"), "third": ModelPlace("third")}
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, places) as (engine, _):
            answers = await ask_all(engine, "chain", [row(float(i), 7.0) for i in range(16)])
            assert [one["OUT"].tolist() for one in answers] == [[[8.0 * i, 56.0]] for i in range(16)]
            assert (await ask(engine, "chain", np.ones((1, 300_000), np.float32)))["OUT"].sum() == 8 * 300_000


async def test_a_model_that_cannot_be_opened_is_not_loaded_with_its_own_reason(tmp_path: Path) -> None:
    write_python(tmp_path, "good")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"bad": ModelPlace("bad"), "good": ModelPlace("good")}) as (_, control):
            code = "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('no licence')\n"
            write_python(tmp_path, "bad", code=code)
            with pytest.raises(FlowserveError, match="no licence"):
                await control.load("bad")


async def test_other_versions_on_the_machine_are_the_reason_of_a_load_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_python(tmp_path, "here")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"there": ModelPlace("there")}) as (_, control):
            write_python(tmp_path, "there")
            monkeypatch.setattr("flowserve.elsewhere.tcp.versions", lambda: ["9.9", "3.99", "7"])
            with pytest.raises(
                FlowserveError, match=r"numpy 9\.9, 3\.99, 7, the machine of .* install the same versions"
            ):
                await control.load("there")


async def test_a_model_is_reloaded_and_unloaded_without_a_process_left(tmp_path: Path) -> None:
    folder = write_python(tmp_path, "m")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, control):
            before = int((await ask(engine, "m", row(1.0)))["PID"].item())
            (folder / "1" / "model.py").write_text((folder / "1" / "model.py").read_text().replace("* 2", "* 3"))
            await control.load("m")
            answer = await ask(engine, "m", row(1.0))
            assert answer["OUT"][0, 0] == 3
            after = int(answer["PID"].item())
            await control.unload("m")
            await until(lambda: not (is_running(before) or is_running(after)))


async def test_connections_may_be_encrypted(tmp_path: Path, papers: Path) -> None:
    write_python(tmp_path / "models", "m")
    tls = (str(papers / "server.pem"), str(papers / "server.key"), str(papers / "server.pem"))
    with local_cluster(1) as cluster:
        async with serving(tmp_path / "models", cluster, {"m": ModelPlace("m")}, tls=tls) as (engine, _):
            for size in (1, 500_000):
                value = np.arange(size, dtype=np.float32)[None]
                assert ((await ask(engine, "m", value))["OUT"] == value * 2).all()


async def test_an_execution_that_takes_too_long_ends_the_instance(tmp_path: Path) -> None:
    limit = 'parameters { key: "execution_timeout" value { string_value: "0.5" } }'
    write_python(tmp_path, "m", DOUBLE + limit)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            with trio.fail_after(10), pytest.raises(InstanceDied, match=r"longer than 0\.5 s"):
                await ask(engine, "m", row(-60_000.0))
            await until(lambda: is_served(engine, "m"))
            # Of batches that wait there behind another, only the time in which they run counts.
            answers = await ask_all(engine, "m", [row(*[-300.0] * size) for size in (1, 2, 3)])
            assert [one["OUT"].shape[1] for one in answers] == [1, 2, 3]


async def test_a_restarted_instance_is_warmed_up_before_it_serves(tmp_path: Path) -> None:
    warm_up = """
    model_warmup { name: "zero" batch_size: 1 inputs { key: "IN" value {
      data_type: TYPE_FP32 dims: [ 1 ] zero_data: true
    } } }
    """
    code = DOUBLE_CODE.replace("value * 2", "value * 2 + self.count()").replace(
        "    def execute",
        "    runs = 0\n\n    def count(self):\n        self.runs += 1\n        return self.runs\n\n    def execute",
    )
    write_python(tmp_path, "m", DOUBLE + warm_up, code)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            assert (await ask(engine, "m", row(0.0)))["OUT"][0, 0] == 2, "the second run"
            with pytest.raises(InstanceDied):
                await ask(engine, "m", row(-3.0))
            await until(lambda: is_served(engine, "m"))
            assert (await ask(engine, "m", row(0.0)))["OUT"][0, 0] == 2


async def test_a_request_that_is_cancelled_while_its_batch_is_away_leaves_nothing(tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", count=1)}) as (engine, _):
            with trio.move_on_after(0.1):
                await ask(engine, "m", row(-300.0))
            assert (await ask(engine, "m", row(1.0)))["OUT"][0, 0] == 2
            connection = worker_of(engine, "m").port.connection
            assert connection is not None
            await until(lambda: not connection.runs)
            assert not engine.scheduler.in_flight
