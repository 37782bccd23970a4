"""A real engine over functions instead of model files, for tests of what happens around a model.

Decided here: how a Python function over arrays is put behind the instance interface, and how a chain of them becomes
an ensemble. The engine, its pump, its threads and its scheduling are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.assemble import gather, scatter
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.runtime.engine import Engine
from flowserve.runtime.instance import LocalHost
from flowserve.runtime.placement import Placement
from flowserve.scheduling.batcher import Batcher, BatchPolicy, DynamicBatcher
from flowserve.values import Array, DType, TensorSpec

Function = Callable[[Array], Array]


@dataclass
class FunctionInstance:
    """Applies `function` to its one gathered input. `batches` keeps the row counts it saw, in order."""

    function: Function
    batches: list[list[int]] = field(default_factory=list)
    is_open: bool = False
    pool: Pool = field(default_factory=Pool)

    def open(self) -> None:
        self.is_open = True

    def run(self, work: Work, clock: ClockNs) -> Results:
        self.batches.append(list(work.rows))
        present: list[Tensor] = [tensor for tensor in work.inputs[0] if tensor is not None]
        array, copied = gather(present, self.pool)
        gathered_ns = clock()
        made = self.function(array)
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[*scatter(made, work.rows)]]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=(copied,))

    def close(self) -> None:
        self.is_open = False


@dataclass
class FunctionModel:
    """Makes one instance of each function, in turn."""

    functions: Sequence[Function]
    is_pure: bool
    may_run_inline: bool = True
    instances: list[FunctionInstance] = field(default_factory=list)

    def instance(self, name: str, group: InstanceGroup) -> FunctionInstance:
        instance = FunctionInstance(self.functions[len(self.instances)])
        self.instances.append(instance)
        return instance

    def close(self) -> None:
        assert not any(instance.is_open for instance in self.instances)


def add_function(
    engine: Engine,
    name: str,
    functions: Sequence[Function],
    *,
    dims: tuple[int, ...] = (4,),
    max_batch_size: int = 16,
    batcher: Batcher | None = None,
    inline: bool = True,
    placement: Placement | None = None,
    is_pure: bool = False,
    keeps_order: bool = False,
) -> list[FunctionInstance]:
    """Serve a model made of functions, one instance for each, FP32 `dims` in and out. Blocks while instances open."""
    spec_in, spec_out = TensorSpec("IN", DType.FP32, dims), TensorSpec("OUT", DType.FP32, dims)
    model = FunctionModel(functions, is_pure)
    hosts = []
    for number in range(len(functions)):
        instance = model.instance(f"{name}_{number}", InstanceGroup(name))
        host = LocalHost(
            f"{name}_{number}", name, instance, 1, 1, placement, engine.clock, always_inline=inline, may_write=False
        )
        host.open(engine.completions)
        hosts.append(host)
    key = ModelKey(name, 1)
    queue = DynamicBatcher(BatchPolicy.simple(max_batch_size)) if batcher is None else batcher
    engine.add_model(key, queue, hosts, model, keeps_order=keeps_order)
    node = Node(0, name, key, (spec_in,), (spec_out,), max_batch_size)
    edges = (Edge("IN", GRAPH, 0, 0, 0), Edge("OUT", 0, 0, GRAPH, 0))
    config = _config(name, "functions", (spec_in,), (spec_out,), max_batch_size)
    engine.announce(config, Graph(name, 1, (spec_in,), (spec_out,), max_batch_size, (node,), edges))
    return model.instances


def add_chain(engine: Engine, name: str, models: Sequence[str]) -> None:
    """Serve an ensemble that sends IN through `models`, which were added before, and answers OUT."""
    parts = [engine.find(model) for model in models]
    nodes = tuple(
        Node(i, part.name, ModelKey(part.name, 1), part.graph.inputs, part.graph.outputs, part.graph.max_batch_size)
        for i, part in enumerate(parts)
    )
    edges = [Edge("IN", GRAPH, 0, 0, 0)]
    edges += [Edge(f"tensor_{i}", i - 1, 0, i, 0) for i in range(1, len(nodes))]
    edges.append(Edge("OUT", len(nodes) - 1, 0, GRAPH, 0))
    inputs, outputs = parts[0].graph.inputs, parts[-1].graph.outputs
    limit = min(part.graph.max_batch_size for part in parts)
    config = _config(name, "", inputs, outputs, limit)
    engine.announce(config, Graph(name, 1, inputs, outputs, limit, nodes, tuple(edges), is_ensemble=True))


def _config(
    name: str, backend: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], limit: int
) -> ModelConfig:
    return ModelConfig(name, backend, "" if backend else "ensemble", limit, inputs, outputs, SourceMap(name))
