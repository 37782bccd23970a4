"""What each node and edge of a graph has carried: whether batches stayed together, and what was copied for it.

Decided here: what is counted for whom. A node counts the batches that its steps ran in and the rows those had, other
graphs' rows included: batchers belong to models. An edge counts the bytes that went from its producer to its consumer,
by what became of them:

* handed on: the consumer read them where they lay.
* copied: they were gathered into one piece first, because the batch's parts were no neighbours. Of these, `regathered`
  had come out of one batch of the producer's: a gap that a failed member left, answers that were not laid side by side
  when they were taken, a block that the consumer's process cannot see.

A node also counts, for each output, the bytes *placed*: a Python model's answers, one for each request, laid side by
side once when they are taken. That is counted for the tensor and not for its edges, of which there may be several.

A batch of which nothing was copied costs a few additions: what its edges carried follows from its rows. Written from
the loop's thread only, and every figure only ever grows, also for a reader on another thread. Rows that are answered to
a caller are sent from where they lie, so the edges that end in the answer have nothing to count and are left out.
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

    `row_bytes` is what one row weighs, 0 where that differs from batch to batch. `is_joined`: the consumer waits for
    other producers too. `handed_on` leaves out what follows from the node's `whole_rows`.
    """

    __slots__ = ("copied", "handed_on", "input", "is_joined", "producer", "regathered", "row_bytes", "tensor")

    def __init__(self, graph: Graph, edge: Edge) -> None:
        self.producer = REQUEST if edge.producer == GRAPH else graph.nodes[edge.producer].name
        self.tensor = edge.tensor
        self.input = edge.input
        self.row_bytes = _bytes_of(graph, edge)
        self.is_joined = any(
            other.consumer == edge.consumer and other.producer not in (edge.producer, GRAPH) for other in graph.edges
        )
        self.handed_on = 0
        self.copied = 0
        self.regathered = 0

    def carried(self, nbytes: int, copied: int, *, out_of_one: bool) -> None:
        """A batch took `nbytes` over this edge, `copied` of them gathered; `out_of_one`: although out of one batch."""
        self.handed_on += max(0, nbytes - copied)
        self.copied += copied
        if out_of_one:
            self.regathered += copied


class NodeTraffic:
    """One node of one graph. `rows` are those of its batches, other nodes' among them; `whole_rows` those of batches
    that were all its own and of which nothing was copied. `tensors[j]` names what the model's j-th output becomes, ""
    where nobody reads it. `most_inflight`: the most steps that were under way at once, of a request or of all that
    share a limit, where there is one.
    """

    __slots__ = ("batches", "edges", "is_fixed", "most_inflight", "name", "placed", "rows", "tensors", "whole_rows")

    def __init__(self, graph: Graph, node: Node) -> None:
        self.name = node.name
        self.batches = 0
        self.rows = 0
        self.whole_rows = 0
        self.most_inflight = 0
        self.edges = tuple(EdgeTraffic(graph, edge) for edge in graph.edges if edge.consumer == node.index)
        made = {edge.output: edge.tensor for edge in graph.edges if edge.producer == node.index}
        self.tensors = tuple(made.get(j, "") for j in range(len(node.outputs)))
        self.placed = [0] * len(node.outputs)
        # Whether its rows alone tell what every edge carried.
        self.is_fixed = all(edge.row_bytes for edge in self.edges)

    def ran(self, rows: int, placed: Sequence[int]) -> None:
        """A batch of `rows` rows ran, and `placed[j]` bytes of its j-th output were laid side by side."""
        self.batches += 1
        self.rows += rows
        if placed:
            for j, nbytes in enumerate(placed):
                self.placed[j] += nbytes

    def took_in(
        self, rows: int, sizes: Sequence[int] | None, copied: Sequence[int], *, out_of_one: bool = False
    ) -> None:
        """A batch that was all its own, of one request or out of one batch, brought so many `rows`, of which so many
        bytes of each input were `copied`. `sizes`: the bytes of each input; None where its rows tell (`is_fixed`).
        `out_of_one`: it came out of one batch.
        """
        if self.is_fixed and not any(copied):
            self.whole_rows += rows
            return
        for edge in self.edges:
            nbytes = rows * edge.row_bytes if sizes is None else sizes[edge.input]
            edge.carried(nbytes, copied[edge.input] if copied else 0, out_of_one=out_of_one)

    def handed_on(self, edge: EdgeTraffic) -> int:
        """Bytes that went over one of this node's edges as they lay."""
        return edge.handed_on + self.whole_rows * edge.row_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch_count": self.batches,
            "batch_rows": self.rows,
            "inputs": [
                {
                    "producer": edge.producer,
                    "tensor": edge.tensor,
                    "handed_on_bytes": self.handed_on(edge),
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


def share(nbytes: Sequence[int], own: int, rows: int) -> list[int]:
    """What falls to `own` of a batch's `rows` rows."""
    return [number * own // rows if rows else 0 for number in nbytes]


def _bytes_of(graph: Graph, edge: Edge) -> int:
    """What a row weighs that goes over an edge: what its consumer leaves open its producer may say. 0: neither does."""
    reader = graph.nodes[edge.consumer]
    spec = reader.inputs[edge.input]
    if spec.optional:
        return 0
    own = _row_bytes(spec)
    if own or edge.conversion is not None:
        return own
    maker = graph if edge.producer == GRAPH else graph.nodes[edge.producer]
    made = graph.inputs[edge.output] if edge.producer == GRAPH else graph.nodes[edge.producer].outputs[edge.output]
    return _row_bytes(made) if (maker.max_batch_size > 0) == (reader.max_batch_size > 0) else 0


def _row_bytes(spec: TensorSpec) -> int:
    if spec.is_variable:
        return 0
    return prod(spec.dims) * (spec.dtype.itemsize or _REFERENCE_BYTES)
