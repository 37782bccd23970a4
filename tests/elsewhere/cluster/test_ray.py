"""Models in actors of Ray: a cluster of three nodes on this machine, with tokens."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.backends.base import ModelFiles
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.elsewhere.actors import ClusterOptions
from flowserve.elsewhere.cluster.agents import RayCluster
from flowserve.elsewhere.cluster.base import ActorJob, InstanceJob, MachineNeeds
from flowserve.elsewhere.cluster.files import digest_of
from flowserve.elsewhere.placement import ModelPlace
from flowserve.elsewhere.wing import other_machines
from flowserve.errors import FlowserveError, InstanceDied, Invalid, Unavailable
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.runtime.remote.worker import RemoteWorker
from tests.support.clusters import PURE, ask, is_running, row, until, write_python
from tests.support.feature_models import DECOUPLED, FORKS, HEAD, REPEAT, SUM, SUMS, sent, streamed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'flowserve[ray]', or tox -e ray"),
]
_STORE_BYTES = 100 * 2**20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster with the nodes "a" and "b", named by the label `zone`, beside its head."""
    before = dict(os.environ)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    }
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False},
    )
    for zone in ("a", "b"):
        cluster.add_node(num_cpus=3, object_store_memory=_STORE_BYTES, labels={"zone": zone})
    try:
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@asynccontextmanager
async def serving(
    nodes: Any, repository: Path, places: Mapping[str, ModelPlace], give_up_s: float = 30.0
) -> AsyncIterator[tuple[Engine, Control, RayCluster]]:
    cluster = RayCluster(nodes.address)
    options = EngineOptions(wings=(other_machines(ClusterOptions(cluster, give_up_s), places),))
    try:
        async with (
            open_engine(options) as engine,
            open_control(engine, [repository], ControlOptions("explicit", ("*",))) as control,
        ):
            with trio.fail_after(60):
                assert await control.start(lambda _: None) == {}
            yield engine, control, cluster
    finally:
        cluster.close()


def workers_of(engine: Engine, model: str) -> Sequence[RemoteWorker]:
    (queue,) = engine.deployments.find(model).queues
    return [one for one in dict.fromkeys(queue.instances) if isinstance(one, RemoteWorker)]


async def test_instances_are_where_their_labels_say_and_an_actor_that_is_killed_fails_its_batch_only(
    nodes: Any, tmp_path: Path
) -> None:
    write_python(tmp_path, "m")
    places = {"m": ModelPlace("m", 2, {"CPU": 1}, {"zone": "a"})}
    async with serving(nodes, tmp_path, places) as (engine, _, _):
        value = np.arange(150_528, dtype=np.float32)[None]
        assert ((await ask(engine, "m", value))["OUT"] == 2 * value).all()
        assert len({worker.port.machine for worker in workers_of(engine, "m")}) == 1
        answers: list[Any] = []

        async def send(number: int) -> None:
            try:
                answers.append((await ask(engine, "m", row(-20.0, number)))["PID"].item())
            except FlowserveError as error:
                answers.append(error)

        pid = int((await ask(engine, "m", row(1.0)))["PID"].item())
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(send, number)
                if number == 30:
                    os.kill(pid, signal.SIGKILL)
                await trio.sleep(0.005)
        failed = [one for one in answers if isinstance(one, FlowserveError)]
        assert all(isinstance(one, InstanceDied) for one in failed)
        assert len(failed) <= 2 * 8, "the batches that it had, at most two of eight requests"
        assert "Worker unexpectedly exits" in str(failed[0])
        await until(lambda: all(worker.port.connection for worker in workers_of(engine, "m")))
        assert pid not in {int((await ask(engine, "m", row(1.0)))["PID"].item()) for _ in range(6)}


async def test_a_segment_is_one_actor_with_what_all_its_models_need(nodes: Any, tmp_path: Path) -> None:
    names = ("one", "two", "three")
    for name in names:
        write_python(tmp_path, name)
    places = {name: ModelPlace(name, 2, {"CPU": 3}, {}, segment="text") for name in names}  # two nodes have three each
    async with serving(nodes, tmp_path, places) as (engine, control, _):
        for index in (0, 1):
            assert len({workers_of(engine, name)[index].port.machine for name in names}) == 1
        assert len({worker.port.machine for worker in workers_of(engine, "one")}) == 2
        pids = {name: {int((await ask(engine, name, row(1.0)))["PID"].item()) for _ in range(4)} for name in names}
        assert pids["one"] == pids["two"] == pids["three"]
        with pytest.raises(InstanceDied):
            await ask(engine, "two", row(-3.0))
        await until(lambda: all(one.port.connection for name in names for one in workers_of(engine, name)), 60)
        for name in names:
            await control.unload(name)
        await until(lambda: not any(map(is_running, pids["one"])))


async def test_the_agent_that_is_killed_under_load_fails_nothing(nodes: Any, tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    async with serving(nodes, tmp_path, {"m": ModelPlace("m", 2)}) as (engine, _, cluster):
        agent = cluster.process
        answers: list[float] = []

        async def send(number: int) -> None:
            answers.append(float((await ask(engine, "m", row(-5.0, number)))["OUT"][0, 1]))

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(send, number)
                if number == 20:
                    os.kill(agent, signal.SIGKILL)
                await trio.sleep(0.01)
        assert sorted(answers) == [2 * number for number in range(100)]
        with trio.fail_after(30):
            assert await trio.to_thread.run_sync(lambda: cluster.process) != agent
        # The next agent knows the actors of the former one.
        pid = int((await ask(engine, "m", row(1.0)))["PID"].item())
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not all(worker.port.connection for worker in workers_of(engine, "m")))
        await until(lambda: all(worker.port.connection for worker in workers_of(engine, "m")))


async def test_a_cluster_without_room_says_what_it_has(nodes: Any, tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    cluster = RayCluster(nodes.address)
    places = {"m": ModelPlace("m", 1, {"CPU": 64}, {"zone": "a"})}
    options = EngineOptions(wings=(other_machines(ClusterOptions(cluster, 3.0), places),))
    try:
        async with (
            open_engine(options) as engine,
            open_control(engine, [tmp_path], ControlOptions("explicit", ())) as control,
        ):
            await control.start(lambda _: None)
            with pytest.raises(Invalid, match=r"asks for CPU 64 on a machine with zone=a, .*CPU [0-9.]+ free of 6"):
                await control.load("m")
    finally:
        cluster.close()


async def test_files_that_a_machine_does_not_have_are_sent_to_it_and_compared(nodes: Any, tmp_path: Path) -> None:
    folder = write_python(tmp_path, "m")
    (folder / "big.bin").write_bytes(bytes(9_000_000))
    files = ModelFiles(tmp_path, folder, 1)
    cluster = RayCluster(nodes.address)
    config = ModelConfig("m", "python", "", 8, (), (), SourceMap("m"))
    job = InstanceJob(1, "m_0", config, InstanceGroup("m"), files, digest_of(files), {})
    (folder / "big.bin").write_bytes(bytes(9_000_001))  # neither this machine nor the archive has what was announced
    try:
        actor = ActorJob("m_0", bytes(32))
        started = await trio.to_thread.run_sync(cluster.start, actor, MachineNeeds(), 20.0)
        with pytest.raises(Unavailable, match="the files changed while they were sent"):
            await trio.to_thread.run_sync(cluster.add, started, job)
        await trio.to_thread.run_sync(cluster.kill, started)
    finally:
        cluster.close()


async def test_models_call_others_stream_responses_and_keep_state(nodes: Any, tmp_path: Path) -> None:
    write_python(tmp_path, "twice")
    write_python(tmp_path, "forks", code=HEAD + FORKS)
    write_python(tmp_path, "repeat", DECOUPLED, REPEAT)
    write_python(tmp_path, "sums", SUMS, SUM)
    places = {name: ModelPlace(name, 1, {"CPU": 1}) for name in ("forks", "repeat", "sums")}
    async with serving(nodes, tmp_path, places) as (engine, _, _):
        assert await sent(engine, "forks", row(1, 2, 3)) == [4, 8, 12]
        assert await streamed(engine, "repeat", 300, 0) == [*range(300)]
        for i, total in enumerate((101, 102, 103)):
            flags = {"sequence_start": i == 0, "sequence_end": i == 2}
            assert await sent(engine, "sums", row(1), sequence_id=7, **flags) == [total]


async def test_no_process_is_left_when_the_server_ends(nodes: Any, tmp_path: Path) -> None:
    write_python(tmp_path, "m")
    async with serving(nodes, tmp_path, {"m": ModelPlace("m", 1)}) as (engine, _, _):
        pid = int((await ask(engine, "m", row(1.0)))["PID"].item())
        assert is_running(pid)
    await until(lambda: not is_running(pid))


async def test_a_node_that_is_lost_fails_nothing_of_a_pure_model(nodes: Any, tmp_path: Path) -> None:
    """The last test: the cluster has a node less afterwards, and then no head."""
    write_python(tmp_path, "m", PURE)
    async with serving(nodes, tmp_path, {"m": ModelPlace("m", 4, {"CPU": 1})}) as (engine, _, _):
        machines = {worker.port.machine for worker in workers_of(engine, "m")}
        assert len(machines) == 2
        lost = nodes.list_all_nodes()[-1]
        answers: list[float] = []

        async def send(number: int) -> None:
            answers.append(float((await ask(engine, "m", row(-30.0, number)))["OUT"][0, 1]))

        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(send, number)
                if number == 30:
                    await trio.to_thread.run_sync(lambda: nodes.remove_node(lost, allow_graceful=False))
                await trio.sleep(0.02)
        assert sorted(answers) == [2 * number for number in range(150)]
        # Without Ray's head, connections go on.
        await trio.to_thread.run_sync(nodes.head_node.kill_gcs_server)
        for number in range(20):
            assert (await ask(engine, "m", row(-5.0, number)))["OUT"][0, 1] == 2 * number
