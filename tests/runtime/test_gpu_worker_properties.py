"""For any graph and any placement of its models: the responses are correct, the copies are those of the plan, and no
memory is held afterwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.config.types import ModelConfig, SourceMap
from flowserve.graph.transfers import ON_HOST, transfers
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.devices import Devices
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.values import DType, Request, TensorSpec
from tests.support.engine import add_function, add_kernel
from tests.support.fake_device import FakeMachine, add_one

SPEC = TensorSpec("IN", DType.FP32, (4,))


@dataclass(frozen=True)
class Tree:
    """Node n reads the output of node `sources[n]`, or the request if that is GRAPH; `gpus[n]` is its GPU, None for the
    host. Unread outputs and those in `answered` are graph outputs.
    """

    sources: tuple[int, ...]
    gpus: tuple[int | None, ...]
    answered: frozenset[int]

    @property
    def outputs(self) -> list[int]:
        return [n for n in range(len(self.sources)) if n in self.answered or n not in self.sources]

    def depth(self, n: int) -> int:
        return 0 if n == GRAPH else 1 + self.depth(self.sources[n])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 5))
    sources = tuple(draw(st.integers(GRAPH, n - 1)) for n in range(count))
    gpus = tuple(draw(st.sampled_from([None, 0, 0, 1])) for _ in range(count))
    return Tree(sources, gpus, draw(st.frozensets(st.integers(0, count - 1))))


def _serve(engine: Engine, tree: Tree, devices: Devices) -> Graph:
    nodes = []
    for n, gpu in enumerate(tree.gpus):
        name = f"m{n}"
        if gpu is None:
            add_function(engine, name, [lambda array: array + 1], max_batch_size=32)
        else:
            add_kernel(engine, name, [(add_one, devices[gpu])])
        nodes.append(Node(n, name, ModelKey(name, 1), (SPEC,), (TensorSpec("OUT", DType.FP32, (4,)),), 32))
    edges = [Edge(f"t{source}", source, 0, n, 0) for n, source in enumerate(tree.sources)]
    edges += [Edge(f"t{n}", n, 0, GRAPH, i) for i, n in enumerate(tree.outputs)]
    answers = tuple(TensorSpec(f"OUT{n}", DType.FP32, (4,)) for n in tree.outputs)
    graph = Graph("tree", 1, (SPEC,), answers, 32, tuple(nodes), tuple(edges), is_ensemble=True)
    engine.deployments.announce(
        ModelConfig("tree", "", "ensemble", 32, graph.inputs, answers, SourceMap("tree")), graph
    )
    return graph


@settings(max_examples=40)
@given(trees(), st.sampled_from([1, 3]))
def test_property_responses_are_correct_and_copies_follow_the_plan(tree: Tree, rows: int) -> None:
    devices = Devices(FakeMachine(2).devices)

    async def ask() -> Graph:
        async with open_engine(EngineOptions()) as engine:
            graph = _serve(engine, tree, devices)
            request = Request({"IN": np.full((rows, 4), 7, np.float32)}, stamp=engine.next_stamp())
            response = await engine.infer(engine.deployments.find("tree"), request)
            for n in tree.outputs:
                assert (response.outputs[f"OUT{n}"] == 7 + tree.depth(n)).all()
            return graph

    graph = trio.run(ask)
    places = [ON_HOST if gpu is None else frozenset({devices[gpu].place}) for gpu in tree.gpus]
    planned = Counter(
        (transfer.source[0].is_gpu, str(transfer.to[0]) if transfer.to[0].is_gpu else "")
        for transfer in transfers(graph, places)
        if transfer.kind == "copy"
    )
    crossed: Counter[tuple[bool, str]] = Counter()
    for (source, to), (copies, _) in devices.ledger.entries().items():
        crossed[source.is_gpu, str(to) if to.is_gpu else ""] += copies
    assert crossed == planned
    assert all(pool.lent_bytes == 0 for pool in devices.statistics().values())
