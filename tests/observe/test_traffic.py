"""Traffic counters of a graph's nodes and edges."""

from __future__ import annotations

from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.observe.traffic import node_traffics, share
from flowserve.values import DType, TensorSpec

FIXED = TensorSpec("X", DType.FP32, (3, 4))
TEXT = TensorSpec("T", DType.BYTES, (2,))
WIDE = TensorSpec("W", DType.FP32, (-1,))
MAYBE = TensorSpec("M", DType.FP32, (4,), optional=True)


def node(index: int, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...] = (FIXED,)) -> Node:
    return Node(index, "abcd"[index], ModelKey("abcd"[index], 1), inputs, outputs, 8)


DIAMOND = Graph(
    "diamond",
    1,
    (FIXED,),
    (FIXED,),
    8,
    (node(0, (FIXED,)), node(1, (FIXED,)), node(2, (FIXED,), (FIXED, FIXED)), node(3, (FIXED, FIXED))),
    (
        Edge("x", GRAPH, 0, 0, 0),
        Edge("top", 0, 0, 1, 0),
        Edge("top", 0, 0, 2, 0),
        Edge("left", 1, 0, 3, 0),
        Edge("right", 2, 1, 3, 1),
        Edge("y", 3, 0, GRAPH, 0),
    ),
    is_ensemble=True,
)


def test_every_edge_into_a_node_is_counted_and_none_into_the_response() -> None:
    edges = [(edge.producer, edge.tensor, one.name) for one in node_traffics(DIAMOND) for edge in one.edges]
    assert edges == [
        ("", "x", "a"),
        ("a", "top", "b"),
        ("a", "top", "c"),
        ("b", "left", "d"),
        ("c", "right", "d"),
    ]


def test_only_edges_with_another_producer_at_their_consumer_are_joined() -> None:
    assert [[edge.is_joined for edge in one.edges] for one in node_traffics(DIAMOND)] == [
        [False],
        [False],
        [False],
        [True, True],
    ]


def test_an_output_without_a_reader_has_no_tensor() -> None:
    assert [one.tensors for one in node_traffics(DIAMOND)] == [("top",), ("left",), ("", "right"), ("y",)]


def test_row_sizes_follow_from_specs_and_varying_rows_are_measured() -> None:
    edges = tuple(Edge(f"t{i}", GRAPH, i, 0, i) for i in range(4))
    specs = (FIXED, TEXT, WIDE, MAYBE)
    (one,) = node_traffics(Graph("g", 1, specs, (FIXED,), 8, (node(0, specs),), edges))
    assert [edge.row_bytes for edge in one.edges] == [48, 16, 0, 0]
    assert not one.is_fixed
    one.whole_rows += 3
    one.edges[2].carried(100, 60, out_of_one=True)
    one.edges[2].carried(10, 20, out_of_one=False)  # copied BYTES can be larger than the references to them
    assert [one.handed_on(edge) for edge in one.edges] == [3 * 48, 3 * 16, 40, 0]
    assert (one.edges[2].copied, one.edges[2].regathered) == (80, 60)


def test_only_copies_from_one_batch_are_regathered() -> None:
    one = node_traffics(DIAMOND)[1]
    one.ran(2, (), [96], [96], range(1))
    one.ran(3, (), [144], [144])
    (edge,) = one.edges
    assert (one.handed_on(edge), edge.copied, edge.regathered) == (0, 240, 96)


def test_the_cost_of_a_mixed_batch_is_divided_by_rows() -> None:
    assert share([100, 10], 3, 4) == [75, 7]
    assert share([100], 0, 0) == [0]
