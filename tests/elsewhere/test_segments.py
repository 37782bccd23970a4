"""Rule P7: a segment of a placement file is convex in every graph that uses it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.elsewhere.placement import parse_placement
from flowserve.elsewhere.segments import broken_segments, path_outside
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.types import GRAPH, Graph
from tests.support.ensembles import available, ensemble, ensembles, model

ONE = {"X": "FP32[-1]"}, {"Y": "FP32[-1]"}
TWO = {"X": "FP32[-1]", "Z": "FP32[-1]"}, {"Y": "FP32[-1]"}


def graph(*edges: tuple[str, str]) -> Graph:
    """Models "a", "b", ... with at most two inputs; the first reads the request."""
    names = sorted({name for edge in edges for name in edge})
    before = {name: [source for source, to in edges if to == name] or ["in"] for name in names}
    models = [model(name, *(TWO if len(before[name]) > 1 else ONE)) for name in names]
    ends = [name for name in names if all(source != name for source, _ in edges)]
    steps = [(name, dict(zip("XZ", before[name], strict=False)), {"Y": name}) for name in names]
    config = ensemble("pipe", {"in": "FP32[-1]"}, dict.fromkeys(ends, "FP32[-1]"), steps)
    return compile_ensemble(config, 1, available(*models))


CHAIN = graph(("a", "b"), ("b", "c"), ("c", "d"))
DIAMOND = graph(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))


@pytest.mark.parametrize(
    ("one", "models", "path"),
    [
        (CHAIN, "ab", ""),
        (CHAIN, "abcd", ""),
        (CHAIN, "ac", "abc"),
        (CHAIN, "ad", "abcd"),
        (CHAIN, "acx", "abc"),
        (CHAIN, "x", ""),
        (DIAMOND, "abc", ""),
        (DIAMOND, "bc", ""),
        (DIAMOND, "bcd", ""),
        (DIAMOND, "ad", "abd"),
        (DIAMOND, "abd", "acd"),
    ],
)
def test_the_shortest_path_that_leaves_and_comes_back(one: Graph, models: str, path: str) -> None:
    assert "".join(one.nodes[n].name for n in path_outside(one, models)) == path


def test_the_problem_is_where_the_file_names_the_model_that_the_path_comes_back_to() -> None:
    placement = parse_placement('place { model: "c" }\nsegment { name: "s" models: [ "b", "d", "a" ] count: 1 }', "f")
    (problem,) = broken_segments(placement, [CHAIN, DIAMOND, graph(("a", "b"))][:1])
    assert (str(problem.place), problem.rule) == ("f:2:36", "P7")
    assert problem.message == "a path of 'pipe' leaves segment 's' and comes back: b -> c -> d"
    assert problem.hint == "name 'c' in it too, or divide it into two segments"
    assert len([*broken_segments(placement, [CHAIN, DIAMOND])]) == 2, "one for each graph"
    assert [*broken_segments(placement, [graph(("a", "b"))])] == []


@given(st.data())
def test_properties_a_path_is_found_exactly_if_a_segment_is_not_convex(data: st.DataObject) -> None:
    drawn = data.draw(ensembles())
    one = compile_ensemble(drawn.config, 1, drawn.available)
    chosen = data.draw(st.sets(st.sampled_from([node.model.name for node in one.nodes])))
    found = path_outside(one, chosen)
    edges = {(edge.producer, edge.consumer) for edge in one.edges if GRAPH not in (edge.producer, edge.consumer)}
    net: Any = networkx.DiGraph()
    net.add_nodes_from(range(len(one.nodes)))
    net.add_edges_from(edges)
    inside = {node.index for node in one.nodes if node.model.name in chosen}
    outside = set(net) - inside
    between = {n for n in outside if networkx.descendants(net, n) & inside and networkx.ancestors(net, n) & inside}
    assert bool(found) == bool(between)
    if found:
        assert edges.issuperset(pairwise(found))
        assert {found[0], found[-1]} <= inside
        assert found[1:-1]
        assert inside.isdisjoint(found[1:-1])
