"""Static analysis of tensor transfers between host and GPUs, per edge of a graph.

Decides in which memory each node's tensors are, by its configuration, and the cost of each edge: a *view* if both ends
are in the same memory, a *copy* if not, *shared* if another reader of the tensor in the same memory has copied it
already. So the number of copies per request is a property of the graph, known before it runs and drawn with it. Inputs
of requests and outputs of responses are on the host, as are BYTES tensors everywhere.

Several places of one node are alternatives: instances on several devices, of which a request uses one, and stays on it
if possible. Does not copy (`runtime/workers`, `memory/stream`). Callers: `runtime`, `render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from flowserve.config.parameters import FORCE_CPU
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.values import ANY_GPU, HOST_MEMORY, DType, MemoryPlace, TensorSpec, gpu_memory

MemoryPlaces = frozenset[MemoryPlace]
ON_HOST: Final[MemoryPlaces] = frozenset({HOST_MEMORY})

_IN_PYTHON: Final = frozenset({"python", "callable"})

# "depends": some of the instances that may run the two steps share a memory, and some do not.
Kind = Literal["view", "copy", "shared", "depends"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one edge's tensor from its producer to its consumer. `row_bytes`: the size of one row (of the
    whole tensor in a graph without batches), None if it differs between requests.
    """

    kind: Kind
    source: tuple[MemoryPlace, ...]
    to: tuple[MemoryPlace, ...]
    row_bytes: int | None


def memory_places(config: ModelConfig) -> MemoryPlaces:
    """The memories of the tensors of a model's instances. An ensemble has those of its steps."""
    places = {
        place
        for group in config.active_groups
        for place in (_places_of(group) if stays_on_device(config) else (HOST_MEMORY,))
    }
    return frozenset(places) or ON_HOST


def stays_on_device(config: ModelConfig) -> bool:
    """Whether GPU instances of a model read and write tensors in device memory. BYTES cannot be there, ragged inputs
    are concatenated on the host, sequence state is kept on the host, a worker process shares only host memory, and
    Python models use host arrays unless their configuration says otherwise.
    """
    specs = (*config.inputs, *config.outputs)
    return (
        (config.backend not in _IN_PYTHON or _takes_device_tensors(config))
        and config.parameters.get("execution") != "process"
        and config.sequence is None
        and not config.batch_inputs
        and not config.batch_outputs
        and not any(spec.dtype is DType.BYTES or spec.ragged for spec in specs)
    )


def _takes_device_tensors(config: ModelConfig) -> bool:
    """A `model.py` on a thread of the server that declares support for device tensors."""
    parameters = config.parameters
    return (
        config.backend == "python"
        and parameters.get(FORCE_CPU) == "no"
        and parameters.get("execution") == "thread"
        and not config.decoupled
    )


def transfers(graph: Graph, places: Sequence[MemoryPlaces]) -> tuple[Transfer, ...]:
    """One transfer for each edge of the graph, in order; `places[n]` are the memories of node n."""
    crossed: set[tuple[object, ...]] = set()
    return tuple(_transfer(graph, edge, places, crossed) for edge in graph.edges)


def _transfer(graph: Graph, edge: Edge, places: Sequence[MemoryPlaces], crossed: set[tuple[object, ...]]) -> Transfer:
    spec = graph.written(edge)
    source = ON_HOST if edge.producer == GRAPH or spec.dtype is DType.BYTES else places[edge.producer]
    to = ON_HOST if edge.consumer == GRAPH or spec.dtype is DType.BYTES else places[edge.consumer]
    kind = _kind(source, to)
    if kind == "copy":
        # A tensor that is converted on the way to a device is a separate tensor there.
        changes = edge.conversion is not None and to != ON_HOST
        crossing = (edge.producer, edge.output, to, (edge.consumer, edge.input) if changes else ())
        kind = "shared" if crossing in crossed else "copy"
        crossed.add(crossing)
    return Transfer(kind, _in_order(source), _in_order(to), bytes_of_row(spec))


def bytes_of_row(spec: TensorSpec) -> int | None:
    """The size of one row of a tensor (of the whole one without batches), None if it differs between requests."""
    is_fixed = not spec.is_variable and spec.dtype is not DType.BYTES
    return prod(spec.dims) * spec.dtype.itemsize if is_fixed else None


def _kind(source: MemoryPlaces, to: MemoryPlaces) -> Kind:
    if source == to and (len(to) == 1 or all(place.is_gpu for place in to)):
        return "view"
    # A group without a list of GPUs uses all of them.
    may_meet = source & to or any(
        ANY_GPU in one and any(place.is_gpu for place in other) for one, other in ((source, to), (to, source))
    )
    return "depends" if may_meet else "copy"


def _places_of(group: InstanceGroup) -> Sequence[MemoryPlace]:
    if group.kind != "KIND_GPU":
        return (HOST_MEMORY,)
    return [gpu_memory(number) for number in group.gpus] or (ANY_GPU,)


def _in_order(places: MemoryPlaces) -> tuple[MemoryPlace, ...]:
    return tuple(sorted(places, key=lambda place: (place.is_gpu, place.number)))
