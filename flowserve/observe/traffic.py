"""Traffic counters of a graph's nodes and edges: rows per batch, bytes passed on and bytes copied.

Decides what is counted. A node counts the batches that its steps ran in and their rows, including rows of other graphs,
because batchers belong to models. An edge counts the bytes from its producer to its consumer:

* passed on ("handed on" in names of counters): the consumer read them in place.
* copied: they were gathered into one array first, because the batch's parts were not neighbours. Of these,
  `regathered` came from one batch of the producer: a gap left by a failed member, outputs that were not placed
  contiguously, a block that the consumer's process cannot see.

A node also counts, for each output, the bytes *placed*: outputs of a Python model, one per request, that are written
contiguously once on receipt. They are counted per tensor and not per edge, of which there may be several.

A batch without a copy costs a few additions: the traffic of its edges follows from its rows. Written only on the event
loop's thread; every figure only grows, also for a reader on another thread. Output rows are sent to the caller from
where they are, so edges to the graph's outputs have no counters. Callers: `runtime` (writes), `statistics`,
`deployment_metrics`, the live page (read).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from math import prod
from typing import Any, Final

from flowserve.graph.types import GRAPH, Edge, Graph, Node, Space
from flowserve.values import TensorSpec

ITEM_EDGES: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
REQUEST = ""  # as a producer: the request itself
_REFERENCE_BYTES = 8  # a BYTES element in host memory is a reference; gather never copies the bytes themselves


class EdgeTraffic:
    """One tensor from `producer` to one consumer's `input` (an index into the model's inputs).

    `row_bytes` is the size of one row, 0 if it differs between batches. `is_joined`: the consumer waits for other
    producers too. `handed_on` excludes the bytes that follow from the node's `whole_rows`.
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
        """Count `nbytes` of a batch, `copied` of them gathered; `out_of_one`: they came from one batch."""
        self.handed_on += max(0, nbytes - copied)
        self.copied += copied
        if out_of_one:
            self.regathered += copied


class SpaceTraffic:
    """The rows of one space of a graph: `taken` of the `offered` rows of the space around it. A space of items counts
    the items of `requests` in `items`, those up to each of `ITEM_EDGES`, and last those above.
    """

    __slots__ = ("is_of_items", "items", "name", "offered", "requests", "taken")

    def __init__(self, space: Space) -> None:
        self.name = space.name
        self.is_of_items = space.each is not None
        self.taken = 0
        self.offered = 0
        self.requests = 0
        self.items = [0] * (len(ITEM_EDGES) + 1)

    def began(self, rows: int, parent_rows: int, requests: int) -> None:
        """Count the space of so many requests, of `parent_rows` rows each."""
        self.requests += requests
        self.taken += rows * requests
        self.offered += parent_rows * requests
        if self.is_of_items:
            self.items[bisect_left(ITEM_EDGES, rows)] += requests

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "requests": self.requests, "rows": self.taken, "parent_rows": self.offered}


class NodeTraffic:
    """One node of one graph. `rows` are the rows of its batches, including those of other nodes; `whole_rows` those of
    batches that belonged to it alone and needed no copy. `tensors[j]` is the tensor name of the model's j-th output, ""
    without a reader. `skipped`: requests of which no row was in the node's space. `most_inflight`: the maximum number
    of concurrent steps, per request or over all that share a limit, if there is a limit.
    """

    __slots__ = (
        "batches",
        "edges",
        "is_fed",
        "is_fixed",
        "most_inflight",
        "name",
        "placed",
        "rows",
        "skipped",
        "tensors",
        "whole_rows",
    )

    def __init__(self, graph: Graph, node: Node) -> None:
        self.name = node.name
        self.batches = 0
        self.rows = 0
        self.whole_rows = 0
        self.most_inflight = 0
        self.skipped = 0
        # A tensor that is derived from several has an edge from each, and is one input.
        read = {edge.input: edge for edge in reversed(graph.edges) if edge.consumer == node.index}
        self.edges = tuple(EdgeTraffic(graph, edge) for edge in graph.edges if edge in read.values())
        made = {
            edge.output: edge.tensor
            for edge in graph.edges
            if edge.producer == node.index and not graph.is_presence(edge)
        }
        self.tensors = tuple(made.get(j, "") for j in range(len(node.outputs)))
        self.placed = [0] * len(node.outputs)
        self.is_fed = any(edge.producer != REQUEST for edge in self.edges)  # by another node
        # Whether the traffic of every edge follows from the rows alone.
        self.is_fixed = all(edge.row_bytes for edge in self.edges)

    def ran(
        self,
        rows: int,
        placed: Sequence[int],
        sizes: Sequence[int] | None = None,
        copied: Sequence[int] = (),
        regathered: Collection[int] = (),
    ) -> None:
        """Count a batch of `rows` rows; `placed[j]` bytes of its j-th output were placed contiguously.

        If it belonged to this node alone, count its inputs too. `sizes`: the bytes of each input; not read for those
        that follow from the rows. `copied`: the bytes of each that were copied. `regathered`: the inputs that came from
        one batch and were copied.
        """
        self.batches += 1
        self.rows += rows
        for j, nbytes in enumerate(placed):
            self.placed[j] += nbytes
        if sizes is None:
            return
        if not any(copied):
            if self.is_fixed:
                self.whole_rows += rows
                return
            for edge in self.edges:
                edge.handed_on += rows * edge.row_bytes or sizes[edge.input]
            return
        for edge in self.edges:
            i = edge.input
            nbytes = rows * edge.row_bytes or sizes[i]
            more = copied[i]
            edge.copied += more
            if nbytes > more:  # copied BYTES can be larger than the references to them
                edge.handed_on += nbytes - more
            if i in regathered:
                edge.regathered += more

    def handed_on(self, edge: EdgeTraffic) -> int:
        """Bytes passed on over one of this node's edges without a copy."""
        return edge.handed_on + self.whole_rows * edge.row_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch_count": self.batches,
            "batch_rows": self.rows,
            **({"skipped_count": self.skipped} if self.skipped else {}),
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
    """The counters of a graph, by node index."""
    return tuple(NodeTraffic(graph, node) for node in graph.nodes)


def share(nbytes: Sequence[int], own: int, rows: int) -> list[int]:
    """The part of `nbytes` for `own` of a batch's `rows` rows."""
    return [number * own // rows if rows else 0 for number in nbytes]


def _bytes_of(graph: Graph, edge: Edge) -> int:
    """The size of a row on an edge, by the consumer's dims, else the producer's; 0 if both vary."""
    reader = graph.nodes[edge.consumer]
    spec = reader.inputs[edge.input]
    if spec.optional:
        return 0
    own = _row_bytes(spec)
    if own or edge.conversion is not None:
        return own
    if edge.derived >= 0 or reader.space:
        return _row_bytes(graph.written(edge))
    maker = graph if edge.producer == GRAPH else graph.nodes[edge.producer]
    return _row_bytes(graph.written(edge)) if (maker.max_batch_size > 0) == (reader.max_batch_size > 0) else 0


def _row_bytes(spec: TensorSpec) -> int:
    if spec.is_variable:
        return 0
    return prod(spec.dims) * (spec.dtype.itemsize or _REFERENCE_BYTES)
