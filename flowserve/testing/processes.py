"""Models in processes of their own behind a real engine, for tests: small `model.py`s, loaded without a repository.

Decided here: what such a model looks like, and that each has one instance, FP32 `IN` to `OUT` of one row size.
"""

from __future__ import annotations

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
from flowserve.runtime.engine import Engine
from flowserve.runtime.hosts import PROCESS, host_maker
from flowserve.runtime.process_host import ProcessHost
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.testing.backends import Repository, config_of, spec
from flowserve.values import Array, DType, Request

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
        self.hosts: dict[str, ProcessHost] = {}
        self.results: dict[str, list[Results]] = {}

    async def add(
        self,
        name: str,
        body: str,
        *,
        width: int = 64,
        dtype: DType = DType.FP32,
        inputs: Sequence[str] = ("IN",),
        limit: int = 16,
    ) -> ProcessHost:
        """Load a model whose `answer(self, request, given)` has this body; `given` is its first input. `limit`: its
        `max_batch_size`.
        """
        self.repository.write(name, "1/model.py", MODEL.format(body=body))
        given, made = [spec(one, (width,), dtype) for one in inputs], spec("OUT", (width,), dtype)
        config = config_of(name=name, inputs=given, outputs=[made], max_batch_size=limit)
        model = registry.find("python").load(config, self.repository.files(name), {})
        engine = self.engine
        host = host_maker(config, model, PROCESS, engine.processes, engine.streaming, engine.clock)(
            f"{name}_0", InstanceGroup(name, "KIND_CPU")
        )
        assert isinstance(host, ProcessHost)
        await trio.to_thread.run_sync(host.open, engine.completions)
        key = ModelKey(name, 1)
        engine.add_model(key, DynamicBatcher(BatchPolicy.simple(limit)), [host], model)
        node = Node(0, name, key, tuple(given), (made,), limit)
        edges = (*(Edge(one, GRAPH, i, 0, i) for i, one in enumerate(inputs)), Edge("OUT", 0, 0, GRAPH, 0))
        engine.announce(config, Graph(name, 1, tuple(given), (made,), limit, (node,), edges))
        self.hosts[name] = host
        self._listen(host)
        return host

    def _listen(self, host: ProcessHost) -> None:
        """Keep the results of each batch, as the engine gets them."""
        found = self.results.setdefault(host.name.removesuffix("_0"), [])
        completions = self.engine.completions
        finished = completions.finished

        def listening(batch: Any, outcome: Any) -> None:
            if batch.instance is host and isinstance(outcome, Results):
                found.append(outcome)
            finished(batch, outcome)

        completions.finished = listening

    async def ask(self, name: str, array: Array, **facts: Any) -> Array:
        request = Request({"IN": array}, stamp=self.engine.next_stamp(), **facts)
        return (await self.engine.infer(self.engine.find(name), request)).outputs["OUT"]

    async def ask_all(self, name: str, arrays: Sequence[Array]) -> list[Array | FlowserveError]:
        return await all_at_once(partial(self.ask, name), arrays)

    def lent_bytes(self) -> int:
        """What the models' arenas on this side have in somebody's hands."""
        return sum(host._packer.arena.lent_bytes for host in self.hosts.values())


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """This process has as many files open as it may."""
    import resource  # Linux's, as all of this

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def all_at_once(ask: Callable[[Array], Awaitable[T]], arrays: Sequence[Array]) -> list[T | FlowserveError]:
    """What is answered to each of them, in their order, asked in one turn of the loop."""
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
