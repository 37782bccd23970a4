"""The compiled graph of a deployment: frozen, numbered model calls connected by tensors.

Decides the records Graph, Node and Edge and their numbering. A plain model is a graph of one node, which is compiled
here: `compile`, for ensembles, imports networkx and is not loaded by a server without ensembles. Nested ensembles are
already folded in: a node's `path` names the ensembles that contained it. `plan` derives the data for the request path.
Callers: every package above `graph`.

Decides too which edges need a conversion, because their two ends declare the tensor differently (few; the others have
None and cost nothing), and how the shape changes: by an ensemble's `reshape`, and by a leading 1 that is added or
removed between a model with a batch dimension and one without. Which edges do is derived from the configurations: the
ranks at both ends show whether a dimension is missing. Does not convert tensors (`memory/tensor`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Final

from flowserve.config.types import EachItem, ModelConfig, RowTest
from flowserve.errors import Place
from flowserve.values import TensorSpec

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Each of `reshapes` is applied first, from dims to dims without the batch dimension. Then, with `batch` 1, a
    leading 1 is added if the shape fits `wanted`; with `batch` -1 a leading 1 is removed if it does not. The actual
    shape decides, as on Triton, because a `model.py` may return another one than its configuration has.
    """

    reshapes: tuple[tuple[Dims, Dims], ...] = ()
    batch: int = 0
    wanted: Dims = ()


def conversion(
    reshapes: tuple[tuple[Dims, Dims], ...], dims: Dims, batches: bool, wanted: Dims, wants_batches: bool
) -> Conversion | None:
    """The conversion of an edge whose producer writes `dims` (after the reshapes) and whose consumer reads `wanted`.

    If only one end batches, equal ranks mean that the batch dimension is missing at the other end; otherwise the other
    end's dims are the full shape.
    """
    batch = 0
    if batches != wants_batches and len(dims) == len(wanted):
        batch = 1 if wants_batches else -1
    return Conversion(reshapes, batch, wanted if batch else ()) if reshapes or batch else None


def inside(spec: TensorSpec) -> TensorSpec:
    """An ensemble's input or output as its steps see it, after `reshape`."""
    return spec if spec.reshape is None else replace(spec, dims=spec.reshape, reshape=None)


def reshaped(shape: Dims, dims: Dims, target: Dims) -> Dims:
    """`shape`, which matches `dims`, converted to `target`: the sizes of varying dims fill those of the target in
    order.
    """
    varying = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(varying) if dim == -1 else dim for dim in target)


def inner_shape(shape: Dims, spec: TensorSpec) -> Dims:
    """The shape of a tensor as the model sees it, reshaped as configured. With or without batch dimension."""
    if spec.reshape is None:
        return shape
    batch = len(shape) - len(spec.dims)
    return shape[:batch] + reshaped(shape[batch:], spec.dims, spec.reshape)


def outer_shape(shape: Dims, spec: TensorSpec, *, batches: bool) -> Dims:
    """The shape for requests of a tensor that the model returned in this `shape`: the inverse of `inner_shape`.

    As on Triton, dims replace all but the batch dimension of any shape; the varying ones have the sizes that are at the
    places of those of `reshape`. Raises ValueError if there is no such place, or the number of elements differs.
    """
    if spec.reshape is None:
        return shape
    lead = shape[:1] if batches else ()
    inner = shape[len(lead) :]
    if len(inner) < len(spec.reshape) and -1 in spec.reshape[len(inner) :]:
        raise ValueError(f"no size for a varying dimension in {[*shape]}")
    varying = iter([size for size, dim in zip(inner, spec.reshape, strict=False) if dim == -1])
    outer = lead + tuple([next(varying) if dim == -1 else dim for dim in spec.dims])
    if prod(outer) != prod(shape):
        raise ValueError(f"shape {[*shape]} cannot become {[*outer]}")
    return outer


GRAPH: Final = -1  # as a producer or consumer: the graph's own inputs or outputs
DERIVED: Final = -2  # as the first number of a `Ref`: a derived tensor
DEPTH_LIMIT: Final = 100  # of nested ensembles, in files and in Python


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """A model and the exact version that a graph was compiled against."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class Node:
    """One model call. `index` is its number in the graph, in topological order, ties by place in the file.

    `inputs` and `outputs` are the model's own specs, in its configuration's order; an edge's ports index into them.
    `name` is unique in its graph: the model's name, "name#2" for its second step, "outer/name" inside a nested
    ensemble `outer`. `decoupled`: a step sends any number of responses. `max_inflight`: concurrent executions of its
    step for one request, 0 for no limit.
    """

    index: int
    name: str
    model: ModelKey
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    path: tuple[str, ...] = ()
    place: Place | None = field(default=None, compare=False)  # a comment in a file moves it
    decoupled: bool = False
    max_inflight: int = 0
    space: int = 0


Ref = tuple[
    int, int
]  # a tensor: (producer, output) as of an edge, or (DERIVED, index into the graph's derived tensors)


@dataclass(frozen=True, slots=True)
class Space:
    """The rows for which some nodes run, made from those of its `parent`: the rows that pass `test`, or a row for each
    item of `each`; exactly one of the two is given. Space 0 is the request's own rows and has no record.

    `opens` are the tensors that decide which rows these are: the tested one, or those that are divided into items, and
    then the count of their items if `each` names one. `others`: the other tests of an `otherwise`. `has_rows`: whether
    its tensors have a batch dimension. `name` is unique in the graph; it is in `depth` nested ensembles.
    """

    index: int
    parent: int
    name: str
    opens: tuple[Ref, ...]
    test: RowTest | None = None
    others: tuple[RowTest, ...] = ()
    each: EachItem | None = None
    has_rows: bool = True
    place: Place | None = field(default=None, compare=False)
    depth: int = 0

    @property
    def title(self) -> str:
        return f"when {self.test}" if self.test is not None else f"each {self.each}"


class Derivation(Enum):
    """How a derived tensor is made: TAKE, the rows of a parent space's tensor that belong to the space; ITEMS, the
    items of a tensor that the space divides; MERGE, one tensor of those written in several conditions; GATHER, the
    items of each row as one row; PRESENT, whether rows or items were written; RESHAPE, the same rows in the shape that
    they have outside or inside of nested ensembles.
    """

    TAKE = "take"
    ITEMS = "items"
    MERGE = "merge"
    GATHER = "gather"
    PRESENT = "present"
    RESHAPE = "reshape"


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor at the border of a space, made from others without a model.

    It is a tensor of `space`, declared by `spec`. `reads` are the tensors it is made from. `spaces[i]` is the space
    below that `reads[i]` belongs to or enters; of a MERGE also `space` itself, for rows that pass no condition. `fill`:
    the value of rows and items that no step wrote, None if that cannot occur or the whole tensor is then left out.
    `reshapes`: of a RESHAPE, as of a `Conversion`. `of`: of a PRESENT, the tensors that were written or not.
    """

    how: Derivation
    space: int
    spec: TensorSpec
    reads: tuple[Ref, ...]
    spaces: tuple[int, ...]
    fill: float | bytes | None = None
    reshapes: tuple[tuple[Dims, Dims], ...] = ()
    of: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor from its producer to one consumer.

    `producer` is a node's index, or GRAPH with `output` an index into the graph's inputs. `consumer` is a node's
    index, or GRAPH with `input` an index into the graph's outputs. `tensor` is the ensemble tensor's name.
    `conversion`: how its shape changes along the edge, None if it does not. `derived`: the consumer reads this derived
    tensor, which is made from the producer's and perhaps others (then each has an edge); -1: the tensor itself.
    """

    tensor: str
    producer: int
    output: int
    consumer: int
    input: int
    conversion: Conversion | None = None
    derived: int = -1


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled deployment. Every edge's dtype and shape match at both ends, every tensor has a producer and a reader,
    and there is no cycle.

    `max_batch_size` is the maximum number of rows of a request; 0 without a batch dimension. `shares_limits`: the
    nodes' `max_inflight` applies to all requests together, not to each separately. `spaces`: those below the request's
    own rows, each after its parent, numbered from 1.
    """

    name: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    is_ensemble: bool = False
    shares_limits: bool = False
    spaces: tuple[Space, ...] = ()
    derived: tuple[Derived, ...] = ()

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may get any number of responses."""
        return any(node.decoupled for node in self.nodes)

    def around(self, space: int) -> list[Space]:
        """A space and those around it, outermost first."""
        found: list[Space] = []
        while space:
            found.append(self.spaces[space - 1])
            space = found[-1].parent
        return found[::-1]

    def has_rows(self, space: int) -> bool:
        """Whether the tensors of a space have a batch dimension."""
        return self.spaces[space - 1].has_rows if space else self.max_batch_size > 0

    def made_by(self, ref: Ref) -> Ref:
        """The producer and output that a tensor is made from; for a merged tensor the first."""
        while ref[0] == DERIVED:
            ref = self.derived[ref[1]].reads[0]
        return ref

    def is_presence(self, edge: Edge) -> bool:
        """Whether an edge only says whether its producer wrote the tensor."""
        return edge.derived >= 0 and self.derived[edge.derived].how is Derivation.PRESENT

    def written(self, edge: Edge) -> TensorSpec:
        """The declaration of an edge's tensor as the consumer receives it."""
        if edge.derived >= 0:
            return self.derived[edge.derived].spec
        return (self.inputs if edge.producer == GRAPH else self.nodes[edge.producer].outputs)[edge.output]


def node_of(config: ModelConfig, version: int, index: int, name: str, place: Place) -> Node:
    """A call of a model, in no nested ensemble and without a limit."""
    sides = config.inputs, config.outputs, config.max_batch_size
    return Node(index, name, ModelKey(config.name, version), *sides, place=place, decoupled=config.decoupled)


def compile_model(config: ModelConfig, version: int) -> Graph:
    """A plain model as a graph of one node, fed by the graph's inputs in order."""
    node = node_of(config, version, 0, config.name, config.source.place(""))
    edges = [Edge(spec.name, GRAPH, i, 0, i) for i, spec in enumerate(config.inputs)]
    edges += [Edge(spec.name, 0, j, GRAPH, j) for j, spec in enumerate(config.outputs)]
    return Graph(
        config.name, version, config.inputs, config.outputs, config.max_batch_size, nodes=(node,), edges=tuple(edges)
    )
