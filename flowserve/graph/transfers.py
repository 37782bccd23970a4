"""Which tensors of a graph change their memory on the way, and which only change hands.

Decided here: in which memory each node's tensors lie, as its configuration says, and from that what every edge costs:
a *view* where both ends are in the same memory, a *copy* where they are not, and *shared* where another reader of the
same tensor in the same memory has it copied already. So how often a request's bytes cross to a device and back is a
property of the graph, known before anything runs and drawn with it. What comes with the request and what goes into the
answer lies on the host.

Several places of one node are alternatives: instances on several devices, of which a request takes one and stays there
where it can. BYTES lie on the host everywhere.

Carrying it out is runtime/device_host.py's and memory/stream.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.values import ANY_GPU, HOST_MEMORY, DType, MemoryPlace, TensorSpec, gpu_memory

MemoryPlaces = frozenset[MemoryPlace]
FORCE_CPU: Final = "FORCE_CPU_ONLY_INPUT_TENSORS"  # a parameter of Triton's Python backend
ON_HOST: Final[MemoryPlaces] = frozenset({HOST_MEMORY})

_IN_PYTHON: Final = frozenset({"python", "callable"})

# "depends": some of the instances that may run the two steps share a memory, and some do not.
Kind = Literal["view", "copy", "shared", "depends"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """How one edge's tensor gets from where it was made to where it is read. `row_bytes`: what one row of it weighs
    (the whole of it in a graph without batches), None where that differs from request to request.
    """

    kind: Kind
    source: tuple[MemoryPlace, ...]
    to: tuple[MemoryPlace, ...]
    row_bytes: int | None


def memory_places(config: ModelConfig) -> MemoryPlaces:
    """Where the tensors of a model's instances lie. An ensemble's lie where its steps' do."""
    places = {
        place
        for group in config.instance_groups
        if not group.passive
        for place in (_places_of(group) if stays_on_device(config) else (HOST_MEMORY,))
    }
    return frozenset(places) or ON_HOST


def stays_on_device(config: ModelConfig) -> bool:
    """Whether instances of a model on a GPU take and make tensors there: strings cannot lie there, ragged inputs are
    laid end to end on the host, state is kept there, a child process shares only the host's memory, and what is written
    in Python gets and gives arrays of the host's unless it says that it need not.
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
    """A `model.py` on a thread of the server's."""
    parameters = config.parameters
    return (
        config.backend == "python"
        and parameters.get(FORCE_CPU) == "no"
        and parameters.get("execution") == "thread"
        and not config.decoupled
    )


def transfers(graph: Graph, places: Sequence[MemoryPlaces]) -> tuple[Transfer, ...]:
    """One for each edge of the graph, in their order; `places[n]` are those of node n."""
    crossed: set[tuple[object, ...]] = set()
    return tuple(_transfer(graph, edge, places, crossed) for edge in graph.edges)


def _transfer(graph: Graph, edge: Edge, places: Sequence[MemoryPlaces], crossed: set[tuple[object, ...]]) -> Transfer:
    spec = (graph.inputs if edge.producer == GRAPH else graph.nodes[edge.producer].outputs)[edge.output]
    source = ON_HOST if edge.producer == GRAPH or spec.dtype is DType.BYTES else places[edge.producer]
    to = ON_HOST if edge.consumer == GRAPH or spec.dtype is DType.BYTES else places[edge.consumer]
    kind = _kind(source, to)
    if kind == "copy":
        # What changes its shape on the way to a device is another tensor there.
        changes = edge.conversion is not None and to != ON_HOST
        crossing = (edge.producer, edge.output, to, (edge.consumer, edge.input) if changes else ())
        kind = "shared" if crossing in crossed else "copy"
        crossed.add(crossing)
    return Transfer(kind, _in_order(source), _in_order(to), _row_bytes(spec))


def _kind(source: MemoryPlaces, to: MemoryPlaces) -> Kind:
    if source == to and (len(to) == 1 or all(place.is_gpu for place in to)):
        return "view"
    return "depends" if _may_meet(source, to) else "copy"


def _may_meet(source: MemoryPlaces, to: MemoryPlaces) -> bool:
    if source & to:
        return True
    # A group that lists no GPUs is on all there are.
    return any(ANY_GPU in one and any(place.is_gpu for place in other) for one, other in ((source, to), (to, source)))


def _places_of(group: InstanceGroup) -> Sequence[MemoryPlace]:
    if group.kind != "KIND_GPU":
        return (HOST_MEMORY,)
    return [gpu_memory(number) for number in group.gpus] or (ANY_GPU,)


def _in_order(places: MemoryPlaces) -> tuple[MemoryPlace, ...]:
    return tuple(sorted(places, key=lambda place: (place.is_gpu, place.number)))


def _row_bytes(spec: TensorSpec) -> int | None:
    if spec.is_variable or spec.dtype is DType.BYTES:
        return None
    return prod(spec.dims) * spec.dtype.itemsize
