"""What each node and edge of a graph has carried: whether batches stayed together, and what was copied for it.

Decided here: what is counted for whom. A node counts the batches that its steps ran in and the rows those had, other
graphs' rows included: batchers belong to models. An edge counts the bytes that went from its producer to its consumer,
by what became of them:

* handed on: the consumer read them where they lay.
* copied: they were gathered into one piece first, because the batch's parts were no neighbours. Of these, `regathered`
  came from batches whose members had become ready in the same moment, that is out of one batch: a gap that a failed
  member left, or answers that were not laid side by side when they were taken.

A node also counts, for each output, the bytes *placed*: a Python model's answers, one for each request, laid side by
side once when they are taken. That is counted for the tensor and not for its edges, of which there may be several.

Whether a batch is of one graph's one node, and what each input weighs, is looked up once for a batch and not for its
requests. Written from the loop's thread only. Rows that are answered to a caller are sent from where they lie, so the
edges that end in the answer have nothing to count and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.values import TensorSpec

REQUEST = ""  # the producer of what came with the request
_REFERENCE_BYTES = 8  # a BYTES element in host memory is a reference; what it refers to is never copied by a gather


class EdgeTraffic:
    """One tensor on its way from `producer` to one consumer's `input` (an index into the model's inputs).

    `row_bytes` is what one row weighs, 0 where that differs from batch to batch.
    """

    __slots__ = ("copied", "handed_on", "input", "producer", "regathered", "row_bytes", "tensor")

    def __init__(self, graph: Graph, edge: Edge) -> None:
        self.producer = REQUEST if edge.producer == GRAPH else graph.nodes[edge.producer].name
        self.tensor = edge.tensor
        self.input = edge.input
        self.row_bytes = _row_bytes(graph.nodes[edge.consumer].inputs[edge.input])
        self.handed_on = 0
        self.copied = 0
        self.regathered = 0

    def carried(self, nbytes: int, copied: int, *, stayed: bool) -> None:
        """A batch took `nbytes` over this edge, `copied` of them gathered. `stayed`: its members came together."""
        if copied:
            self.copied += copied
            if stayed and self.producer != REQUEST:
                self.regathered += copied
        if nbytes > copied:
            self.handed_on += nbytes - copied


class NodeTraffic:
    """One node of one graph. `tensors[j]` names what the model's j-th output becomes, "" where nobody reads it."""

    __slots__ = ("batches", "edges", "is_fixed", "name", "placed", "rows", "tensors")

    def __init__(self, graph: Graph, node: Node) -> None:
        self.name = node.name
        self.batches = 0
        self.rows = 0
        self.edges = tuple(EdgeTraffic(graph, edge) for edge in graph.edges if edge.consumer == node.index)
        made = {edge.output: edge.tensor for edge in graph.edges if edge.producer == node.index}
        self.tensors = tuple(made.get(j, "") for j in range(len(node.outputs)))
        self.placed = [0] * len(node.outputs)
        # Whether the rows of a batch tell what every edge carried.
        self.is_fixed = all(edge.row_bytes for edge in self.edges) and not any(spec.optional for spec in node.inputs)

    def ran(
        self,
        rows: int,
        own: int,
        sizes: Sequence[int] | None,
        copied: Sequence[int],
        placed: Sequence[int],
        *,
        stayed: bool,
    ) -> None:
        """A batch of `rows` rows ran, `own` of them this node's. `sizes` are the bytes of the node's own rows for each
        of its edges, None where `is_fixed`; `copied` and `placed` are the whole batch's, as in `Results`.
        """
        self.batches += 1
        self.rows += rows
        for k, edge in enumerate(self.edges):
            nbytes = own * edge.row_bytes if sizes is None else sizes[k]
            more = copied[edge.input] if copied else 0
            edge.carried(nbytes, more if own == rows else _share(more, own, rows), stayed=stayed)
        for j, nbytes in enumerate(placed):
            self.placed[j] += nbytes if own == rows else _share(nbytes, own, rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch_count": self.batches,
            "batch_rows": self.rows,
            "inputs": [
                {
                    "producer": edge.producer,
                    "tensor": edge.tensor,
                    "handed_on_bytes": edge.handed_on,
                    "copied_bytes": edge.copied,
                    "regathered_bytes": edge.regathered,
                }
                for edge in self.edges
            ],
            "outputs": [
                {"tensor": tensor, "placed_bytes": placed}
                for tensor, placed in zip(self.tensors, self.placed, strict=True)
                if tensor
            ],
        }


def node_traffics(graph: Graph) -> tuple[NodeTraffic, ...]:
    """What to count for a graph, by node index."""
    return tuple(NodeTraffic(graph, node) for node in graph.nodes)


def _share(nbytes: int, own: int, rows: int) -> int:
    return nbytes * own // rows if rows else 0


def _row_bytes(spec: TensorSpec) -> int:
    if spec.is_variable:
        return 0
    return prod(spec.dims) * (spec.dtype.itemsize or _REFERENCE_BYTES)
