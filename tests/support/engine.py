"""A real engine over functions instead of model files, for tests of the code around a model.

Decides how a Python function over arrays implements the instance interface, on the host or on a fake device, and how a
chain of functions becomes an ensemble. The engine, its threads and its scheduling are not faked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flowserve.backends.base import ClockNs, DeviceWork, Instance, Results, Work
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.assemble import gather
from flowserve.memory.column import scatter
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.pool import Pool
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.loaded import NewModel
from flowserve.runtime.workers.gpu import GpuWorker
from flowserve.runtime.workers.local import LocalWorker, Placement
from flowserve.scheduling.queue import Batcher, BatchPolicy, Queue
from flowserve.values import Array, DType, MemoryPlace, TensorSpec
from tests.support.fake_device import FakeDevice

Function = Callable[[Array], Array]
Kernel = Callable[[Array, Array], None]


@dataclass
class FunctionInstance:
    """Applies `function` to its one gathered input. `batches` has the row count of each batch, in order."""

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
class KernelInstance:
    """Enqueues `kernel`, which gets the array to read and the one to write, on a stream of a fake device."""

    kernel: Kernel
    memory: DeviceMemory
    batches: list[list[int]] = field(default_factory=list)
    is_open: bool = False
    is_of_any_thread: bool = True

    @property
    def place(self) -> MemoryPlace:
        return self.memory.place

    def open(self) -> None:
        self._stream = DeviceStream(self.memory)
        self.is_open = True

    def run(self, work: Work, clock: ClockNs) -> Results:
        assert isinstance(work, DeviceWork)
        device = self.memory.device
        assert isinstance(device, FakeDevice)
        self.batches.append(list(work.rows))
        stream = self._stream
        with stream.batch():
            array, copied = stream.gather([tensor for tensor in work.inputs[0] if tensor is not None])
            gathered_ns = clock()
            made = stream.empty(array.dtype, array.shape)
            device.launch(stream.handle, [array], [made], self.kernel)
            outputs: list[list[Tensor | None]] = [[*stream.deliver([made], work.rows, work.read_at)[0]]]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=(copied,))

    def close(self) -> None:
        self._stream.close()
        self.is_open = False


@dataclass
class FunctionModel:
    """A model with these instances."""

    instances: Sequence[FunctionInstance | KernelInstance]
    is_pure: bool
    may_run_inline: bool = True

    def instance(self, name: str, group: InstanceGroup) -> Instance:
        raise NotImplementedError  # the instances already exist

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
    instances = [FunctionInstance(function) for function in functions]
    workers = [
        LocalWorker(f"{name}_{i}", name, one, 1, engine.clock, placement=placement, always_inline=inline)
        for i, one in enumerate(instances)
    ]
    queue = Queue(BatchPolicy.simple(max_batch_size)) if batcher is None else batcher
    model = FunctionModel(instances, is_pure)
    _serve(engine, name, model, workers, dims, max_batch_size, queue, keeps_order=keeps_order)
    return instances


def add_kernel(
    engine: Engine,
    name: str,
    kernels: Sequence[tuple[Kernel, DeviceMemory]],
    *,
    is_pure: bool = False,
    is_of_any_thread: bool = True,
) -> list[KernelInstance]:
    """As `add_function` for kernels, each on a fake device."""
    dims, max_batch_size = (4,), 32
    instances = [KernelInstance(kernel, memory, is_of_any_thread=is_of_any_thread) for kernel, memory in kernels]
    workers = [GpuWorker(f"{name}_{i}", name, one, 1, engine.clock) for i, one in enumerate(instances)]
    queue = Queue(BatchPolicy.simple(max_batch_size))
    _serve(engine, name, FunctionModel(instances, is_pure), workers, dims, max_batch_size, queue)
    return instances


def _serve(
    engine: Engine,
    name: str,
    model: FunctionModel,
    workers: Sequence[LocalWorker],
    dims: tuple[int, ...],
    max_batch_size: int,
    batcher: Batcher,
    *,
    keeps_order: bool = False,
) -> None:
    for worker in workers:
        worker.open(engine.context)
    spec_in, spec_out = TensorSpec("IN", DType.FP32, dims), TensorSpec("OUT", DType.FP32, dims)
    key = ModelKey(name, 1)
    engine.add_model(NewModel(key, batcher, workers, model, keeps_order=keeps_order))
    node = Node(0, name, key, (spec_in,), (spec_out,), max_batch_size)
    edges = (Edge("IN", GRAPH, 0, 0, 0), Edge("OUT", 0, 0, GRAPH, 0))
    config = _config(name, "functions", (spec_in,), (spec_out,), max_batch_size)
    engine.deployments.announce(config, Graph(name, 1, (spec_in,), (spec_out,), max_batch_size, (node,), edges))


def add_chain(engine: Engine, name: str, models: Sequence[str], *, shared_limit: int = 0) -> None:
    """Serve an ensemble that passes IN through `models`, which were added before, and returns OUT. `shared_limit`: the
    number of steps of each model that all requests together may have under way.
    """
    parts = [engine.deployments.find(model) for model in models]
    nodes = tuple(
        Node(
            i,
            part.name,
            ModelKey(part.name, 1),
            part.graph.inputs,
            part.graph.outputs,
            part.graph.max_batch_size,
            max_inflight=shared_limit,
        )
        for i, part in enumerate(parts)
    )
    edges = [Edge("IN", GRAPH, 0, 0, 0)]
    edges += [Edge(f"tensor_{i}", i - 1, 0, i, 0) for i in range(1, len(nodes))]
    edges.append(Edge("OUT", len(nodes) - 1, 0, GRAPH, 0))
    inputs, outputs = parts[0].graph.inputs, parts[-1].graph.outputs
    limit = min(part.graph.max_batch_size for part in parts)
    config = _config(name, "", inputs, outputs, limit)
    graph = Graph(name, 1, inputs, outputs, limit, nodes, tuple(edges), is_ensemble=True)
    engine.deployments.announce(config, replace(graph, shares_limits=shared_limit > 0))


def _config(
    name: str, backend: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], limit: int
) -> ModelConfig:
    return ModelConfig(name, backend, "" if backend else "ensemble", limit, inputs, outputs, SourceMap(name))
