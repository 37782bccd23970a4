"""Python models that call other models, each in an execution place of its own: the models, and an engine with them.

Decides how a model is written from the body of its answer, and where it runs: on a thread, in a process, or in an actor
of a local cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trio

from flowserve.backends import registry
from flowserve.config.types import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy
from flowserve.elsewhere.actors import ActorPort, ClusterActor, ClusterModel, ClusterOptions
from flowserve.elsewhere.cluster.base import MachineNeeds
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.loaded import NewModel
from flowserve.runtime.factory import MakeWorker, worker_maker
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.policies import batcher_for
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.values import Array, Request
from tests.support.backends import Repository, config_of, spec

ACTOR = "actor"
NO_PARAMETERS: Mapping[str, str] = {}

MODEL = """
import asyncio, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def request(model, array, **facts):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)], **facts)

def value(response):
    if response.has_error():
        raise RuntimeError(f"{{int(response.error().code())}} {{response.error().message()}}")
    return pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()

def number(response):
    return value(response)[0, 0] if response.has_error() or response.output_tensors() else -1

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    {a}def execute(self, requests):
        responses = []
        for given in [request.inputs()[0].as_numpy() for request in requests]:
            try:
                made = {a_await}self.answer(given)
            except RuntimeError as error:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)]))
        return responses

    {a}def answer(self, given):
{body}
"""


class Served:
    """An engine with models FP32 `IN` to `OUT`, all in one place. `cluster`: of the place ACTOR."""

    def __init__(self, engine: Engine, folder: Path, place: str, cluster: ClusterOptions | None = None) -> None:
        self.engine = engine
        self.cluster = cluster
        self.place = place
        self.repository = Repository(folder)
        self.workers: dict[str, list[Any]] = {}
        self._opened = folder / "opened"

    @property
    def gated(self) -> str:
        """The body of a model that returns its input once `open_gate` was called."""
        return f"while not os.path.exists({str(self._opened)!r}): time.sleep(0.002)\nreturn given"

    def open_gate(self) -> None:
        self._opened.touch()

    async def add(
        self,
        name: str,
        body: str,
        *,
        instances: int = 1,
        place: str = "",
        needs: Sequence[Needs] = (),
        text: str = "",
        decoupled: bool = False,
        may_time_out: bool = False,
        parameters: Mapping[str, str] = NO_PARAMETERS,
        remembers: bool = False,
    ) -> None:
        is_async = "await " in body
        body = "\n".join(" " * 8 + line for line in body.splitlines())
        text = text or MODEL.format(body=body, a="async " if is_async else "", a_await="await " if is_async else "")
        self.repository.write(name, "1/model.py", text)
        given, made = spec("IN", (-1,)), spec("OUT", (-1,))
        config = config_of(name=name, inputs=[given], outputs=[made], max_batch_size=4, decoupled=decoupled)
        policy = QueuePolicy(default_timeout_us=may_time_out * 10_000_000, allow_timeout_override=may_time_out)
        config = replace(config, dynamic_batching=DynamicBatching((4,), default_queue_policy=policy))
        config = replace(config, parameters=parameters, response_cache=remembers)
        place = place or self.place
        engine = self.engine
        model: Any
        make: MakeWorker
        if place == ACTOR:
            model = ClusterModel(config, self.repository.files(name), {"execution": "thread"}, is_alone=True)
            make = self._maker(config, model)
        else:
            model = registry.find("python").load(config, self.repository.files(name), {"execution": place})
            make = worker_maker(config, model, place, engine.loaded.processes, engine.streams, engine.clock)
        workers = [make(f"{name}_{number}", InstanceGroup(name, "KIND_CPU")) for number in range(instances)]
        for worker in workers:
            await trio.to_thread.run_sync(worker.open, engine.context)
        key = ModelKey(name, 1)
        engine.add_model(NewModel(key, batcher_for(config), workers, model, needs=needs))
        node = Node(0, name, key, (given,), (made,), 4, decoupled=decoupled)
        edges = (Edge("IN", GRAPH, 0, 0, 0), Edge("OUT", 0, 0, GRAPH, 0))
        engine.deployments.announce(config, Graph(name, 1, (given,), (made,), 4, (node,), edges))
        self.workers[name] = workers

    def _maker(self, config: ModelConfig, model: ClusterModel) -> MakeWorker:
        engine, cluster = self.engine, self.cluster
        assert cluster is not None

        def make(name: str, group: InstanceGroup) -> RemoteWorker:
            actor = ClusterActor(name, MachineNeeds(), cluster, engine.clock)
            is_plain = not config.decoupled
            port = ActorPort(name, model, group, actor, depth=model.depth(is_limited=False), is_plain=is_plain)
            return RemoteWorker(name, config, port, engine.clock, streams=None if is_plain else engine.streams)

        return make

    async def ask(self, name: str, *values: float) -> list[float]:
        request = Request({"IN": np.array([values], np.float32)}, stamp=self.engine.next_stamp())
        with trio.fail_after(60):
            answer = await self.engine.infer(self.engine.deployments.find(name), request)
        found: list[float] = answer.outputs["OUT"][0].tolist()
        return found

    async def ask_big(self, name: str, array: Array) -> Array:
        request = Request({"IN": array}, stamp=self.engine.next_stamp())
        with trio.fail_after(60):
            return (await self.engine.infer(self.engine.deployments.find(name), request)).outputs["OUT"]

    def is_busy(self, name: str) -> bool:
        return any(worker.running is not None for worker in self.workers[name])

    def counted(self, name: str) -> tuple[int, int]:
        """Successes and failures of a model."""
        (row,) = self.engine.deployments.statistics(name)
        stats = row["inference_stats"]
        return stats["success"]["count"], stats["fail"]["count"]


def reasons(served: Served, name: str) -> dict[str, int]:
    """Failures of a model by reason."""
    (row,) = served.engine.deployments.graph_statistics(name)
    return {reason: count for reason, count in row["failures"].items() if count}
