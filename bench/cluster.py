"""Instances on other machines: the cost of the round trip, and the effect of the end of an actor under load.

A `model.py` returns its input. One instance in a process of the server and one in an actor of a local cluster are
called alternately, one request at a time, in one engine; then 32 callers call three instances that take 5 ms a batch,
and one actor is killed. A chain of three such models, each in an actor of its own, is compared with the same chain as a
segment, one request at a time. The actors run on this machine: the cost of a network comes on top.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import trio

from flowserve.elsewhere.actors import ClusterOptions
from flowserve.elsewhere.cluster.agents import LocalCluster
from flowserve.elsewhere.placement import ModelPlace
from flowserve.elsewhere.wing import other_machines
from flowserve.errors import FlowserveError
from flowserve.graph.plan import make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.simulation.deployment import BatchResults
from flowserve.simulation.rows import SimulatedTensor
from flowserve.values import Array, DType, Request, TensorSpec

SIZES: Final = {"256 B": 64, "96 KB": 24_576, "602 KB": 150_528, "9.6 MB": 2_408_448}
CALLERS: Final = 32
_BATCH, _BATCHES = 8, 3000
_CHAINS: Final = ("single", "segment")
_STEPS: Final = 3
_SPEC: Final = TensorSpec("X", DType.FP32, (-1,))
_CONFIG: Final = """
backend: "python" max_batch_size: 16 dynamic_batching {}
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
"""
_ECHO: Final = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        FIRST
        made = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            pid = np.full((len(x), 1), os.getpid(), np.int32)
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x), pb_utils.Tensor("PID", pid)]))
        return made
"""


def measure_cluster(rounds: int, seconds: float, say: Callable[[str], None]) -> Iterator[str]:
    """Lines of a table, and of the effect of the end of an actor."""
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as folder:
        models = [(name, f"time.sleep({pause})") for name, pause in (("here", 0.0), ("there", 0.0), ("slow", 0.005))]
        models += [(f"{chain}{i}", "pass") for chain in _CHAINS for i in range(_STEPS)]  # sleep(0) takes 70 us
        for name, first in models:
            version = Path(folder) / name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(_ECHO.replace("FIRST", first))
            (version.parent / "config.pbtxt").write_text(_CONFIG)
        for chain in _CHAINS:
            version = Path(folder) / chain / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(_chain(chain))
        cluster = LocalCluster(3)
        try:
            yield from trio.run(_measure, Path(folder), cluster, rounds, seconds, say)
        finally:
            cluster.close()
    few, many = (min(_scheduling_us(count) for _ in range(rounds)) for count in (20, 2000))
    yield f"\nscheduling, a batch of {_BATCH}: {few:.0f} us with 20 instances, {many:.0f} us with 2,000"


def _chain(name: str) -> str:
    """An ensemble of `_STEPS` models, one after the other."""
    steps = ""
    for i in range(_STEPS):
        read, made = f"t{i}" if i else "X", f"t{i + 1}" if i < _STEPS - 1 else "Y"
        last = 'output_map { key: "PID" value: "PID" }' if made == "Y" else ""
        maps = f'input_map {{ key: "X" value: "{read}" }} output_map {{ key: "Y" value: "{made}" }} {last}'
        steps += f'step {{ model_name: "{name}{i}" model_version: -1 {maps} }}\n'
    config = _CONFIG.replace('backend: "python"', 'platform: "ensemble"').replace("dynamic_batching {}", "")
    return f"{config} ensemble_scheduling {{ {steps} }}"


def _scheduling_us(instances: int) -> float:
    """The time that the scheduler takes for one batch from its requests to their answers, while all `instances`, of two
    batches each, are busy.
    """
    policy = BatchPolicy.simple(_BATCH)
    node = Node(0, "a", ModelKey("a", 1), (_SPEC,), (_SPEC,), _BATCH)
    edges = (Edge("X", GRAPH, 0, 0, 0), Edge("X", 0, 0, GRAPH, 0))
    plan = make_plan(Graph("a", 1, (_SPEC,), (_SPEC,), _BATCH, (node,), edges))
    queue = ModelQueue(node.model, Queue(policy), [number for number in range(instances) for _ in range(2)])
    tensor = SimulatedTensor(_SPEC, 1)
    scheduler = Scheduler()
    scheduler.models.add(queue)
    stamps = count(1)
    running: deque[Batch] = deque()

    def turn(requests: int) -> None:
        for _ in range(requests):
            scheduler.submit(request_frame(plan, [queue], [tensor], 0, next(stamps), None, None, 0, 0))
        while (decisions := scheduler.schedule(0)) is not None:
            running.extend(decisions.batches)

    turn(2 * instances * _BATCH)
    began = time.perf_counter()
    for _ in range(_BATCHES):
        batch = running.popleft()
        scheduler.complete(batch, [BatchResults([[tensor] * _BATCH])], None, 0)
        turn(_BATCH)
        scheduler.take_finished()
    return (time.perf_counter() - began) / _BATCHES * 1e6


async def _measure(
    folder: Path, cluster: LocalCluster, rounds: int, seconds: float, say: Callable[[str], None]
) -> list[str]:
    places = {"there": ModelPlace("there", 1), "slow": ModelPlace("slow", 3)}
    for i in range(_STEPS):
        places[f"single{i}"] = ModelPlace(f"single{i}", 1)
        places[f"segment{i}"] = ModelPlace(f"segment{i}", 1, segment="segment")
    options = EngineOptions(wings=(other_machines(ClusterOptions(cluster), places),))
    lines = ["| in and out | in a process, ms | on another machine, ms | difference, ms |", "|---|---|---|---|"]
    async with (
        open_engine(options) as engine,
        open_control(engine, [folder], ControlOptions()) as control,
    ):
        failures = await control.start(lambda _: None)
        assert not failures, failures
        for title, length in SIZES.items():
            say(title)
            x = np.ones((1, length), np.float32)
            times: dict[str, list[float]] = {"here": [], "there": []}
            for _ in range(rounds):
                for name in times:
                    times[name].append(await _median_ms(engine, name, x, seconds))
            here, there = median(times["here"]), median(times["there"])
            lines.append(f"| {title} | {_range(times['here'])} | {_range(times['there'])} | {there - here:+.2f} |")
        say("a chain of three models")
        lines += await _compare_chains(engine, rounds, seconds)
        say("an actor is killed")
        lines += await _kill(engine)
    return lines


def _range(times: list[float]) -> str:
    return f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


async def _ask(engine: Engine, name: str, x: Array) -> int:
    request = Request({"X": x}, stamp=engine.next_stamp())
    return int((await engine.infer(engine.deployments.find(name), request)).outputs["PID"].item())


async def _median_ms(engine: Engine, name: str, x: Array, seconds: float) -> float:
    for _ in range(20):
        await _ask(engine, name, x)
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await _ask(engine, name, x)
        times.append(time.perf_counter() - began)
    return median(times) * 1000


async def _compare_chains(engine: Engine, rounds: int, seconds: float) -> list[str]:
    """Requests/s of three steps on other machines one by one, and as a segment, one request at a time."""
    head = f"| in and out | {_STEPS} single steps, requests/s | a segment of {_STEPS}, requests/s | ratio |"
    lines = ["", head, "|---|---|---|---|"]
    for title, length in SIZES.items():
        x = np.ones((1, length), np.float32)
        rates: dict[str, list[float]] = {name: [] for name in _CHAINS}
        for _ in range(rounds):
            for name in _CHAINS:
                rates[name].append(1000 / await _mean_ms(engine, name, x, seconds))
        single, segment = (
            f"{median(one):,.0f} ({min(one):,.0f} to {max(one):,.0f})" for one in (rates[name] for name in _CHAINS)
        )
        ratio = median(rates["segment"]) / median(rates["single"])
        lines.append(f"| {title} | {single} | {segment} | {ratio:.2f} |")
    return lines


async def _mean_ms(engine: Engine, name: str, x: Array, seconds: float) -> float:
    for _ in range(20):
        await _ask(engine, name, x)
    began, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        await _ask(engine, name, x)
        count += 1
    return (now - began) * 1000 / count


async def _kill(engine: Engine) -> list[str]:
    """The responses to the callers of a model when one of its three actors was killed."""
    x = np.ones((1, 64), np.float32)
    answered: list[float] = []
    failed: list[float] = []
    began = time.perf_counter()

    async def call() -> None:
        while True:
            try:
                await _ask(engine, "slow", x)
                answered.append(time.perf_counter() - began)
            except FlowserveError:
                failed.append(time.perf_counter() - began)

    killed_s, length_s = 3.0, 9.0
    async with trio.open_nursery() as nursery:
        for _ in range(CALLERS):
            nursery.start_soon(call)
        await trio.sleep(killed_s)
        os.kill(await _ask(engine, "slow", x), signal.SIGKILL)
        await trio.sleep(length_s - killed_s)
        nursery.cancel_scope.cancel()
    before = sum(1.0 < one <= killed_s for one in answered) / (killed_s - 1.0)
    windows = [(start / 4, sum(start / 4 < one <= start / 4 + 0.25 for one in answered) * 4) for start in range(36)]
    back = next((at - killed_s for at, rate in windows if at >= killed_s and rate >= 0.9 * before), float("nan"))
    least = min(rate for at, rate in windows if killed_s <= at < length_s - 0.5)
    asked = len(answered) + len(failed)
    return [
        "",
        f"{CALLERS} callers, three actors, 5 ms a batch: {before:.0f} requests/s",
        f"one actor was killed: {len(failed)} of {asked} requests failed",
        f"then at least {least:.0f} requests/s in each quarter of a second; 0.9 of the rate before after {back:.2f} s",
    ]
