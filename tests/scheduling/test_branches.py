"""Branches of a graph whose models compute at the same time: on one route if they compute for a short time, in batches
of their own otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import GRAPH, Graph
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import RETURN_NS
from flowserve.testing.simulation import BatchResults
from flowserve.testing.strategies import Handle
from tests.support.recorder import Recorder, simple_model, step_graph

MS = 1_000_000


DIAMOND = step_graph("ab", "ac", "bd", "cd")
LATE = step_graph("ab", "bc", "bd", "ce", "de")
CHAIN = step_graph("ab", "bc", "cd")
CHAINS = step_graph("ab", "ac", "bd", "ce", "df", "eg", "fh", "gh")


class Served(Recorder):
    """A server of a graph, one request after another. `compute_ns`: how long each model computes."""

    def __init__(self, graph: Graph, compute_ns: Sequence[int], *, computes_apart: bool = True) -> None:
        super().__init__()
        self.graph = graph
        for node in graph.nodes:
            self.serve(simple_model(node.index, inputs=node.inputs), is_routed=True, computes_apart=computes_apart)
        self.compute_ns = compute_ns

    def ask(self) -> list[str]:
        """The batches of one request: those that run at the same time, each as the names of its stages."""
        self.submit(self.graph, len(self.started))
        self.turn()
        seen = []
        while self.running:
            seen.append("+".join(sorted(map(self.path, self.running))))
            for batch in [*self.running]:
                self.come_back(batch)
            self.turn()
        assert self.answers[-1].error is None
        return seen

    def path(self, batch: Batch) -> str:
        nodes = [batch.tickets[0].node] if batch.route is None else batch.route.nodes
        return "".join(node.model.name for node in nodes)

    def come_back(self, batch: Batch) -> None:
        self.running.remove(batch)
        stages = 1 if batch.route is None else len(batch.route)
        made = []
        for i in range(stages):
            node = batch.stage(i).tickets[0].node
            column = [Handle(0, 2, 0, 1, object())]
            made.append(BatchResults([column], gathered_ns=5, computed_ns=5 + self.compute_ns[node.index]))
        self.scheduler.complete(batch, made, None, 0)


def test_branches_that_compute_for_long_run_at_the_same_time() -> None:
    server = Served(DIAMOND, [MS, 20 * MS, 20 * MS, MS])
    for _ in range(30):
        assert server.ask() == ["a", "b+c", "d"]


def test_short_branches_are_on_one_route_once_their_times_are_known() -> None:
    server = Served(DIAMOND, [20_000] * 4)
    assert server.ask() == ["a", "b+c", "d"]
    asked = [server.ask() for _ in range(40)]
    assert asked[-1] == ["abcd"]
    assert asked == sorted(asked, key=len, reverse=True), "it does not go to and fro"
    server.compute_ns = [20_000, MS, MS, 20_000]
    assert [server.ask() for _ in range(40)][-1] == ["a", "b+c", "d"]


def test_one_slow_branch_beside_a_short_one_is_on_the_route() -> None:
    server = Served(DIAMOND, [0, 20 * MS, 10_000, 0])
    assert [server.ask() for _ in range(40)][-1] == ["abcd"]


def test_a_single_slow_batch_does_not_divide_a_route() -> None:
    server = Served(DIAMOND, [0, 0, 0, 0])
    assert [server.ask() for _ in range(60)][-1] == ["abcd"]
    server.compute_ns = [0, MS, MS, 0]
    server.ask()
    server.compute_ns = [0, 0, 0, 0]
    assert server.ask() == ["abcd"]


def test_the_steps_before_the_branches_are_a_route() -> None:
    server = Served(LATE, [MS] * 5)
    assert server.ask() == ["ab", "c+d", "e"]


def test_a_route_saves_the_returns_of_batches_and_not_of_each_stage() -> None:
    """A branch that is a chain takes one batch."""
    server = Served(CHAINS, [100_000] * 8)
    assert [server.ask() for _ in range(40)][-1] == ["a", "bdf+ceg", "h"]
    server.compute_ns = [20_000] * 8
    assert [server.ask() for _ in range(40)][-1] == ["abcdefgh"]


@pytest.mark.parametrize("graph", [CHAIN, DIAMOND])
def test_a_route_without_branches_and_workers_that_compute_one_after_the_other_need_no_times(graph: Graph) -> None:
    server = Served(graph, [20 * MS] * 4, computes_apart=graph is CHAIN)
    for _ in range(3):
        assert server.ask() == ["abcd"]


@given(st.data())
def test_properties_a_route_loses_no_more_time_than_it_saves(data: st.DataObject) -> None:
    names = "abcdefg"[: data.draw(st.integers(2, 7))]
    edges = ["".join(pair) for pair in pairwise(names)]
    chosen = [
        one + names[n]
        for n in range(1, len(names))
        for one in sorted(data.draw(st.sets(st.sampled_from(names[:n]), min_size=1, max_size=3)))
    ]
    drawn = step_graph(*(chosen if data.draw(st.booleans()) else edges))
    compute_ns = data.draw(st.lists(st.sampled_from([0, 30_000, 90_000, 400_000]), min_size=7, max_size=7))
    server = Served(drawn, compute_ns)
    inner = [(edge.producer, edge.consumer) for edge in drawn.edges if GRAPH not in (edge.producer, edge.consumer)]
    net = networkx.DiGraph(inner)
    net.add_nodes_from(range(len(drawn.nodes)))
    apart = [batch for step in server.ask() for batch in step.split("+")]  # no compute time is known yet
    for _ in range(60):
        asked = server.ask()
    passed = [[names.index(name) for name in path] for step in asked for path in step.split("+")]
    assert sorted(chain(*passed)) == [*net], "each step runs once"
    for path in passed:
        inside = net.subgraph(path)
        ends: dict[int, int] = {}
        for n in networkx.topological_sort(inside):
            ends[n] = compute_ns[n] + max([ends[before] for before in inside.predecessors(n)], default=0)
        lost_ns = sum(compute_ns[n] for n in path) - max(ends.values())
        saved = sum(any(names.index(name) in path for name in batch) for batch in apart) - 1
        assert lost_ns <= RETURN_NS * saved + len(path) * 8, "8: the precision of the average"
