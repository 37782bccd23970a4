"""Branches of a graph whose models can compute at the same time are never on one route."""

from __future__ import annotations

from itertools import chain, pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import GRAPH, Graph
from flowserve.scheduling.batch import Batch
from tests.support.recorder import Recorder, simple_model, step_graph

DIAMOND = step_graph("ab", "ac", "bd", "cd")
LATE = step_graph("ab", "bc", "bd", "ce", "de")
CHAIN = step_graph("ab", "bc", "cd")
CHAINS = step_graph("ab", "ac", "bd", "ce", "df", "eg", "fh", "gh")
SHORT_CUT = step_graph("ab", "ac", "bc")


class Served(Recorder):
    """A server of a graph, for one request. `computes_apart`: its models can compute at the same time."""

    def __init__(self, graph: Graph, *, computes_apart: bool) -> None:
        super().__init__()
        self.graph = graph
        for node in graph.nodes:
            self.serve(simple_model(node.index, inputs=node.inputs), is_routed=True, computes_apart=computes_apart)

    def ask(self) -> list[str]:
        """The batches of one request: those that run at the same time, each as the names of its stages."""
        self.submit(self.graph, len(self.started))
        self.turn()
        seen = []
        while self.running:
            seen.append("+".join(sorted(map(self.path, self.running))))
            for batch in [*self.running]:
                self.done(batch)
            self.turn()
        assert self.answers[-1].error is None
        return seen

    def path(self, batch: Batch) -> str:
        nodes = [batch.tickets[0].node] if batch.route is None else batch.route.nodes
        return "".join(node.model.name for node in nodes)


@pytest.mark.parametrize(
    ("graph", "batches"),
    [
        (CHAIN, ["abcd"]),
        (SHORT_CUT, ["abc"]),
        (DIAMOND, ["a", "b+c", "d"]),
        (LATE, ["ab", "c+d", "e"]),
        (CHAINS, ["a", "bdf+ceg", "h"]),
    ],
)
def test_a_batch_passes_chains_and_branches_run_at_the_same_time(graph: Graph, batches: list[str]) -> None:
    assert Served(graph, computes_apart=True).ask() == batches


@pytest.mark.parametrize("graph", [CHAIN, DIAMOND])
def test_branches_that_compute_one_after_the_other_in_any_case_are_on_one_route(graph: Graph) -> None:
    assert Served(graph, computes_apart=False).ask() == ["abcd"]


@given(st.data())
def test_properties_each_stage_of_a_route_reads_the_one_before_it(data: st.DataObject) -> None:
    names = "abcdefg"[: data.draw(st.integers(2, 7))]
    edges = ["".join(pair) for pair in pairwise(names)]
    chosen = [
        one + names[n]
        for n in range(1, len(names))
        for one in sorted(data.draw(st.sets(st.sampled_from(names[:n]), min_size=1, max_size=3)))
    ]
    drawn = step_graph(*(chosen if data.draw(st.booleans()) else edges))
    net = networkx.DiGraph((edge.producer, edge.consumer) for edge in drawn.edges if edge.producer != GRAPH)
    passed = [path for step in Served(drawn, computes_apart=True).ask() for path in step.split("+")]
    assert sorted(chain(*passed)) == [*names], "each step runs once"
    for before, after in chain(*map(pairwise, passed)):
        assert net.has_edge(names.index(before), names.index(after))
