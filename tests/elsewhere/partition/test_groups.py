"""Groups of neighbours that could run as one step."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from flowserve.elsewhere.partition.groups import Link, convex_groups

Drawn = tuple[list[int], set[Link], set[Link]]


@st.composite
def placed_graphs(draw: st.DrawFn) -> Drawn:
    """Steps in topological order, on the server and two kinds of machines."""
    places = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    pairs = [(a, b) for b in range(len(places)) for a in range(b)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    joinable = draw(st.sets(st.sampled_from(sorted(edges)))) if edges else set()
    return places, edges, joinable


def quotient(edges: set[Link], groups: list[tuple[int, ...]], count: int) -> networkx.DiGraph[int]:
    """The graph in which each group is one step."""
    of = {step: group[0] for group in groups for step in group}
    found: networkx.DiGraph[int] = networkx.DiGraph()
    found.add_nodes_from(of.get(step, step) for step in range(count))
    found.add_edges_from((of.get(a, a), of.get(b, b)) for a, b in edges if of.get(a, a) != of.get(b, b))
    return found


@given(placed_graphs())
def test_no_path_leaves_a_group_and_comes_back(drawn: Drawn) -> None:
    places, edges, joinable = drawn
    groups = convex_groups(places, edges, joinable)
    graph: networkx.DiGraph[int] = networkx.DiGraph(sorted(edges))
    for group in groups:
        after = set().union(*(networkx.descendants(graph, step) for step in group)) - {*group}
        before = set().union(*(networkx.ancestors(graph, step) for step in group)) - {*group}
        assert not after & before
    assert networkx.is_directed_acyclic_graph(quotient(edges, groups, len(places)))


@given(placed_graphs())
def test_a_group_is_connected_on_one_kind_of_machine_and_cannot_be_larger(drawn: Drawn) -> None:
    places, edges, joinable = drawn
    groups = convex_groups(places, edges, joinable)
    assert len({step for group in groups for step in group}) == sum(map(len, groups))
    for group in groups:
        assert len(group) > 1
        assert len({places[step] for step in group}) == 1
        assert places[group[0]] != 0
        inside = networkx.Graph([(a, b) for a, b in joinable if a in group and b in group])
        assert {*inside} == {*group}
        assert networkx.is_connected(inside)
    whole = quotient(edges, groups, len(places))
    of = {step: group for group in groups for step in group}
    for a, b in joinable:
        first, second = of.get(a, (a,)), of.get(b, (b,))
        if places[a] == places[b] != 0 and first != second:
            larger = [one for one in groups if one not in (first, second)] + [tuple(sorted((*first, *second)))]
            assert not networkx.is_directed_acyclic_graph(quotient(edges, larger, len(places)))
    assert networkx.is_directed_acyclic_graph(whole)


def test_a_chain_is_one_group_and_a_step_in_the_server_divides_it() -> None:
    chain = {(0, 1), (1, 2), (2, 3)}
    assert convex_groups([1, 1, 1, 1], chain, chain) == [(0, 1, 2, 3)]
    assert convex_groups([1, 1, 0, 1], chain, chain) == [(0, 1)]
    detour = chain | {(1, 3)}
    assert convex_groups([1, 1, 0, 1], detour, detour) == [(0, 1)]
