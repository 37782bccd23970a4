"""What a deployment means: one frozen, numbered graph of model calls joined by tensors.

Decided here: the records Graph, Node, Edge and the integers they are numbered by. A plain model is a graph of one node.
Nested ensembles are already folded in: a node's `path` names the ensembles it came through. Nothing here computes;
compile.py makes these records, rules.py judges them, plan.py turns them into what the hot path reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowserve.errors import Place
from flowserve.graph.conversion import Conversion
from flowserve.values import TensorSpec

GRAPH: Final = -1  # as a producer or consumer: the graph's own inputs or outputs
DEPTH_LIMIT: Final = 100  # of ensembles in each other, however they are written


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """A model and the exact version a graph compiled against."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class Node:
    """One model call. `index` is its number in the graph, in topological order, ties by place in the file.

    `inputs` and `outputs` are the model's own specs, in its configuration's order; an edge's ports index into them.
    `name` is unique in its graph: the model's name, "name#2" for its second step, "outer/name" inside a nested
    ensemble `outer`. `decoupled`: a step of it answers any number of times. `max_inflight`: how many of its steps one
    request may have under way, 0 for no limit.
    """

    index: int
    name: str
    model: ModelKey
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    path: tuple[str, ...] = ()
    place: Place | None = None
    decoupled: bool = False
    max_inflight: int = 0

    @property
    def is_batching(self) -> bool:
        return self.max_batch_size > 0


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor from its producer to one consumer.

    `producer` is a node's index, or GRAPH with `output` an index into the graph's inputs. `consumer` is a node's
    index, or GRAPH with `input` an index into the graph's outputs. `tensor` is the ensemble tensor's name.
    `conversion`: how its shape changes on the way, None for not at all.
    """

    tensor: str
    producer: int
    output: int
    consumer: int
    input: int
    conversion: Conversion | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled deployment. Every edge's dtype and shape agree at both ends, every tensor has a producer and a
    reader, no cycles.

    `max_batch_size` is what a request to this deployment may carry; 0 where it has no batch dimension.
    `shares_limits`: all requests together keep within the nodes' `max_inflight`, not each by itself.
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

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may get any number of answers."""
        return any(node.decoupled for node in self.nodes)
