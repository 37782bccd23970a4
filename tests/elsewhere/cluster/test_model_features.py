"""Models on other machines that need the server during a batch: calls of other models, metrics, many responses, state
of sequences, and questions whether they are ready.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.elsewhere.actors import ClusterOptions
from flowserve.elsewhere.placement import ModelPlace
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.values import Request
from tests.support.calling import ACTOR, Served
from tests.support.clusters import (
    DOUBLE,
    STEP_CONFIG,
    local_cluster,
    row,
    serving,
    until,
    write_chain,
    write_python,
)
from tests.support.feature_models import (
    COUNTDOWN,
    COUNTS,
    DECOUPLED,
    FORKS,
    HEAD,
    REPEAT,
    SUM,
    SUMS,
    sent,
    streamed,
)


async def test_a_model_calls_models_of_the_server_and_of_other_machines(tmp_path: Path) -> None:
    with local_cluster(1) as cluster:
        async with open_engine(EngineOptions()) as engine:
            served = Served(engine, tmp_path, ACTOR, ClusterOptions(cluster))
            await served.add("twice", "return given * 2", place="thread")
            await served.add("far", "return value(request('twice', given).exec()) + 1")
            body = (
                "asked = [request(name, given).async_exec() for name in ('twice', 'far')]\n"
                "return sum(map(value, await asyncio.gather(*asked)))"
            )
            await served.add("caller", body)
            assert await served.ask("caller", 1, 2) == [2 + 3, 4 + 5]
            large = np.arange(500_000, dtype=np.float32)[None]
            assert (await served.ask_big("caller", large) == 4 * large + 1).all()

            await served.add("wrong", "return value(request('nobody', given).exec())")
            with pytest.raises(FlowserveError, match="Model 'nobody' is not ready"):
                await served.ask("wrong", 1)
            await served.add("own", "return value(request('own', given).exec())")
            with pytest.raises(FlowserveError, match="this call can never be answered"):
                await served.ask("own", 1)
            await served.add("knows", "return given + 10 * pb_utils.is_model_ready('far')")
            assert await served.ask("knows", 1) == [11]

            # A process that ends withdraws its calls.
            await served.add("gated", served.gated, place="thread")
            ends = "threading.Timer(0.2, os._exit, (3,)).start()\nreturn value(request('gated', given).exec())"
            await served.add("ends", ends)
            with pytest.raises(InstanceDied, match="exit status 3"):
                await served.ask("ends", 1)
            await until(lambda: not engine.calls)
            served.open_gate()
        assert not engine.scheduler.calls


async def test_a_model_whose_files_show_no_call_takes_two_batches_and_may_not_call(tmp_path: Path) -> None:
    with local_cluster(1) as cluster:
        async with open_engine(EngineOptions()) as engine:
            served = Served(engine, tmp_path, ACTOR, ClusterOptions(cluster))
            await served.add("twice", "return given * 2", place="thread")
            await served.add("plain", "return given")
            # The class has another name here: what calls is not seen.
            code = HEAD + (
                "class TritonPythonModel:\n    def execute(self, requests):\n"
                "        make = getattr(pb_utils, 'Inference' 'Request')\n"
                "        made = make(model_name='twice', requested_output_names=['OUT'], inputs=[])\n"
                "        return [pb_utils.InferenceResponse(error=made.exec().error()) for _ in requests]\n"
            )
            await served.add("hidden", "", text=code)
            await served.add("shown", "return value(request('twice', given).exec())")
            depths = {name: workers[0].depth for name, workers in served.workers.items() if name != "twice"}
            assert depths == {"plain": 1, "hidden": 2, "shown": 1}, "the test's own code has a function that calls"
            with pytest.raises(FlowserveError, match=r"no file in its folder shows .*move the code that calls"):
                await served.ask("hidden", 1)


async def test_forked_processes_of_a_model_call_models(tmp_path: Path) -> None:
    write_python(tmp_path, "twice")
    write_python(tmp_path, "forks", code=HEAD + FORKS, config=DOUBLE.replace(', output { name: "PID"', ""))
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"forks": ModelPlace("forks")}) as (engine, _):
            for _ in range(2):
                assert await sent(engine, "forks", row(1, 2, 3)) == [4, 8, 12]
            await until(lambda: not engine.calls)


async def test_metrics_of_a_model_are_those_of_the_server(tmp_path: Path) -> None:
    write_python(tmp_path, "counts", code=COUNTS)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"counts": ModelPlace("counts", 1)}) as (engine, control):
            metrics = engine.calls.server_requests.metrics
            assert await sent(engine, "counts", row(2)) == [2 + 1.5]
            assert await sent(engine, "counts", row(3)) == [5 + 2.5], "a value that was asked for is up to date"
            wanted = (
                b'elsewhere_counter{a="b"} 5\n',
                b"elsewhere_gauge 2.5\n",
                b'elsewhere_histogram_bucket{le="2.5"} 1\n',
            )
            await until(lambda: all(line in metrics.text() for line in wanted))
            await control.unload("counts")
            await until(lambda: b"elsewhere_gauge" not in metrics.text())


async def test_a_decoupled_model_streams_its_responses(tmp_path: Path) -> None:
    write_python(tmp_path, "repeat", DECOUPLED, REPEAT)
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"repeat": ModelPlace("repeat", 1)}) as (engine, _):
            for count in (0, 1, 5, 300):
                assert await streamed(engine, "repeat", count, 0) == [*range(count)]
            assert await streamed(engine, "repeat", 20, 3) == [*range(20)], "large responses"
            found: list[list[float]] = []

            async def one() -> None:
                found.append(await streamed(engine, "repeat", 40, 0))

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(one)
            assert found == [[*range(40)]] * 8
            with pytest.raises(FlowserveError, match="no more"):
                await streamed(engine, "repeat", 3, 2)

            # A client that leaves frees the instance, although its model would send many more.
            request = Request({"IN": row(1e4, 0)}, stamp=engine.next_stamp())
            async with engine.stream(engine.deployments.find("repeat"), request) as responses:
                assert float((await anext(responses)).outputs["OUT"].item()) == 0
            assert await streamed(engine, "repeat", 2, 0) == [0, 1]

            with pytest.raises(InstanceDied, match="exit status 4"):
                await streamed(engine, "repeat", 3, 1)
            await until(lambda: not engine.deployments.outage(engine.deployments.find("repeat")))
            assert await streamed(engine, "repeat", 3, 0) == [0, 1, 2]
            assert not engine.scheduler.in_flight


async def test_sequences_keep_their_state_and_iterative_ones_run_again(tmp_path: Path) -> None:
    write_python(tmp_path, "sums", SUMS, SUM)
    iterative = SUMS.split("sequence_batching")[0] + (
        'sequence_batching { iterative_sequence: true state { input_name: "OLD" output_name: "NEW" '
        "data_type: TYPE_FP32 dims: [ 1 ] } }"
    )
    write_python(tmp_path, "countdown", iterative, COUNTDOWN)
    places = {name: ModelPlace(name, 1) for name in ("sums", "countdown")}
    with local_cluster(2) as cluster:
        async with serving(tmp_path, cluster, places) as (engine, _):
            for i, total in enumerate((101, 102, 103)):
                flags = {"sequence_start": i == 0, "sequence_end": i == 2}
                both = [await sent(engine, "sums", row(1), sequence_id=n, **flags) for n in (7, 8)]
                assert both == [[total], [total]]
            assert await sent(engine, "sums", row(5), sequence_id=7, sequence_start=True, sequence_end=True) == [105]
            assert await sent(engine, "countdown", row(4)) == [40]
            found: list[float] = []

            async def one(number: int) -> None:
                found.extend(await sent(engine, "countdown", row(number)))

            async with trio.open_nursery() as nursery:
                for number in range(1, 7):
                    nursery.start_soon(one, number)
            assert sorted(found) == [10 * number for number in range(1, 7)]


async def test_a_model_says_that_it_is_not_ready(tmp_path: Path) -> None:
    code = HEAD + (
        "class TritonPythonModel:\n    def is_ready(self):\n"
        f"        return not os.path.exists({str(tmp_path / 'busy')!r})\n\n"
        "    def execute(self, requests):\n        return [made(OUT=given(request)) for request in requests]\n"
    )
    write_python(tmp_path / "models", "m", code=code)
    with local_cluster(1) as cluster:
        async with serving(tmp_path / "models", cluster, {"m": ModelPlace("m", 1)}) as (engine, _):
            deployment = engine.deployments.find("m")
            worker = deployment.queues[0].instances[0]
            assert isinstance(worker, RemoteWorker)
            await until(worker.readiness)
            assert await engine.unready(deployment) == ""
            (tmp_path / "busy").touch()
            assert "is_ready" in await engine.unready(deployment)
            pid = next(iter(cluster.processes().values()))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: worker.readiness() is None)


async def test_ragged_inputs_travel_apart(tmp_path: Path) -> None:
    config = DOUBLE.replace("dims: [ -1 ] }\noutput", "dims: [ -1 ] allow_ragged_batch: true }\noutput")
    assert "ragged" in config
    delay = "dynamic_batching { max_queue_delay_microseconds: 50000 }"
    write_python(tmp_path, "m", config.replace("dynamic_batching {}", delay))
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"m": ModelPlace("m", 1)}) as (engine, _):
            found: dict[int, list[float]] = {}

            async def one(size: int) -> None:
                found[size] = await sent(engine, "m", row(*range(size)))

            async with trio.open_nursery() as nursery:
                for size in (1, 2, 3, 4):
                    nursery.start_soon(one, size)
            assert found == {size: [2.0 * i for i in range(size)] for size in (1, 2, 3, 4)}
            (statistics,) = engine.deployments.statistics("m", "1")
            assert statistics["execution_count"] == 1


async def test_a_model_of_a_segment_that_calls_leaves_its_route(tmp_path: Path) -> None:
    write_chain(tmp_path, pid=False)
    write_python(tmp_path, "beside")
    code = (tmp_path / "second" / "1" / "model.py").read_text()
    call = (
        "            if what == 4:\n"
        "                tensors = [pb_utils.Tensor('IN', made)]\n"
        "                asked = pb_utils.InferenceRequest('beside', requested_output_names=['OUT'], inputs=tensors)\n"
        "                made = pb_utils.get_output_tensor_by_name(asked.exec(), 'OUT').as_numpy()\n"
    )
    code = code.replace("            if what == 5:", f"{call}            if what == 5:")
    code = code.replace("InferenceRequest('beside'", "InferenceRequest(model_name='beside'")
    (tmp_path / "second" / "1" / "model.py").write_text(code)
    assert "beside" in code
    assert STEP_CONFIG
    places = {name: ModelPlace(name, 1, segment="text") for name in ("first", "second", "third")}
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, places) as (engine, _):
            for _ in range(3):
                # Doubled by each of the three, and by the model that the second one calls.
                assert (await sent(engine, "chain", row(1, 1, 4)))[:1] == [16]
                assert (await sent(engine, "chain", row(1, 9, 4)))[:1] == [8]
            await until(lambda: not engine.scheduler.in_flight)
