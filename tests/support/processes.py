"""Models in processes of their own behind a real engine, for tests: small `model.py`s, loaded without a repository.

Decides the form of such a model, and that each has one instance, FP32 `IN` to `OUT` of one row size.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio

from flowserve.backends import registry
from flowserve.backends.base import Results
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.loaded import NewModel
from flowserve.runtime.factory import PROCESS, worker_maker
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.values import Array, DType, Request
from tests.support.backends import Repository, config_of, spec

T = TypeVar("T")

MODEL = """
import os, sys, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = 0
        self.kept = []

    def execute(self, requests):
        self.runs += 1
        return [self.answer(request, request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, request, given):
{body}
"""
OUT = "        return pb_utils.InferenceResponse([pb_utils.Tensor('OUT', {})])"


class ServedInProcesses:
    """An engine with models in processes, each FP32 `IN` to `OUT` of one row size."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.repository = Repository(folder)
        self.workers: dict[str, RemoteWorker] = {}
        self.results: dict[str, list[Results]] = {}  # results of each batch, as the engine gets them
        engine.observers.append(self)

    async def add(
        self,
        name: str,
        body: str,
        *,
        width: int = 64,
        dtype: DType = DType.FP32,
        inputs: Sequence[str] = ("IN",),
        limit: int = 16,
    ) -> RemoteWorker:
        """Load a model whose `answer(self, request, given)` has this body; `given` is its first input. `limit`: its
        `max_batch_size`.
        """
        self.repository.write(name, "1/model.py", MODEL.format(body=body))
        given, made = [spec(one, (width,), dtype) for one in inputs], spec("OUT", (width,), dtype)
        config = config_of(name=name, inputs=given, outputs=[made], max_batch_size=limit)
        model = registry.find("python").load(config, self.repository.files(name), {})
        engine = self.engine
        worker = worker_maker(config, model, PROCESS, engine.loaded.processes, engine.streams, engine.clock)(
            f"{name}_0", InstanceGroup(name, "KIND_CPU")
        )
        assert isinstance(worker, RemoteWorker)
        await trio.to_thread.run_sync(worker.open, engine.context)
        key = ModelKey(name, 1)
        engine.add_model(NewModel(key, Queue(BatchPolicy.simple(limit)), [worker], model))
        node = Node(0, name, key, tuple(given), (made,), limit)
        edges = (*(Edge(one, GRAPH, i, 0, i) for i, one in enumerate(inputs)), Edge("OUT", 0, 0, GRAPH, 0))
        engine.deployments.announce(config, Graph(name, 1, tuple(given), (made,), limit, (node,), edges))
        self.workers[name] = worker
        self.results[name] = []
        return worker

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        """As an observer of the engine."""
        made = outcome.made if isinstance(outcome, Passed) else [outcome]
        for i, results in enumerate(made):
            name = batch.stage(i).queue.key.name
            if isinstance(results, Results) and name in self.results:
                self.results[name].append(results)

    def queued(self, frame: Frame) -> None: ...
    def batched(self, batch: Batch, now_ns: int) -> None: ...
    def started(self, batch: Batch) -> None: ...
    def finished(self, frame: Frame) -> None: ...
    def failed(self, frame: Frame) -> None: ...

    def leave_out_routes(self) -> None:
        """Disable routes: batches return to the engine after every added model, from the first request on."""
        for queue in self.engine.scheduler.models.queues:
            queue.route_groups = None

    async def ask(self, name: str, array: Array, **facts: Any) -> Array:
        request = Request({"IN": array}, stamp=self.engine.next_stamp(), **facts)
        return (await self.engine.infer(self.engine.deployments.find(name), request)).outputs["OUT"]

    async def ask_all(self, name: str, arrays: Sequence[Array]) -> list[Array | FlowserveError]:
        return await all_at_once(partial(self.ask, name), arrays)

    def lent_bytes(self) -> int:
        """The used bytes of the models' arenas in the server."""
        return sum(worker.port.packer.arena.lent_bytes for worker in self.workers.values())


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """A context in which this process has its maximum number of open files."""
    import resource  # Linux only

    gc.collect()  # what other tests left in cycles would free descriptors meanwhile
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def all_at_once(ask: Callable[[Array], Awaitable[T]], arrays: Sequence[Array]) -> list[T | FlowserveError]:
    """The responses to these requests in order; all are sent in one loop iteration."""
    answers: dict[int, T | FlowserveError] = {}

    async def one(index: int) -> None:
        try:
            answers[index] = await ask(arrays[index])
        except FlowserveError as error:
            answers[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(arrays)):
            nursery.start_soon(one, index)
    return [answers[index] for index in range(len(arrays))]


def row(number: float, width: int = 64) -> Array:
    return np.full((1, width), number, np.float32)
