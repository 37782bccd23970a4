"""The plan of one graph with two branches: a -> b -> OUT1, a -> c -> OUT2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.values import DType, TensorSpec

IN, OUT, REST = (TensorSpec(name, DType.FP32, (4,)) for name in ("IN", "OUT", "REST"))


def node(index: int, name: str) -> Node:
    return Node(index, name, ModelKey(name, 1), (IN,), (OUT, REST), 8)


@pytest.fixture
def branching() -> Graph:
    edges = (
        Edge("IN", GRAPH, 0, 0, 0),
        Edge("middle", 0, 0, 1, 0),
        Edge("rest", 0, 1, 2, 0),
        Edge("OUT1", 1, 0, GRAPH, 0),
        Edge("OUT2", 2, 0, GRAPH, 1),
    )
    outputs = (TensorSpec("OUT1", DType.FP32, (4,)), TensorSpec("OUT2", DType.FP32, (4,)))
    nodes = (node(0, "a"), node(1, "b"), node(2, "c"))
    return Graph("E", 1, (IN,), outputs, 8, nodes, edges, is_ensemble=True)


def runs(plan: Plan) -> set[str]:
    """The nodes that become ready when all their producers are done."""
    ready = {*plan.first}
    for one in plan.nodes:
        if one.index in ready:
            ready |= {consumer for slot in one.outputs if slot != NO_SLOT for consumer in plan.consumers[slot]}
    return {plan.nodes[index].name for index in ready}


def test_every_reader_of_a_tensor_is_counted_once(branching: Graph) -> None:
    plan = make_plan(branching)
    assert runs(plan) == {"a", "b", "c"}
    assert plan.first == (0,)
    assert plan.missing == (0, 1, 1)  # inputs of the request are present from the start
    assert plan.readers == (1, 1, 1, 1, 1)
    assert plan.nodes[1].outputs[1] == NO_SLOT
    assert plan.nodes[1].wanted == ("OUT",)


@pytest.mark.fault("E9")
def test_steps_that_serve_only_unwanted_outputs_are_never_ready(branching: Graph) -> None:
    everything = make_plan(branching)
    plan = make_plan(branching, ("OUT1",))
    assert runs(plan) == {"a", "b"}
    assert plan.nodes[0].wanted == ("OUT",)
    assert plan.output_slots == (everything.output_slots[0], NO_SLOT)
    assert plan.nodes[0].outputs == (everything.nodes[0].outputs[0], NO_SLOT)
    assert runs(make_plan(branching, ("OUT2", "OUT1"))) == {"a", "b", "c"}


def test_no_step_runs_if_only_an_input_is_requested() -> None:
    edges = (Edge("x", GRAPH, 0, 0, 0), Edge("x", GRAPH, 0, GRAPH, 0), Edge("y", 0, 0, GRAPH, 1))
    through = Graph("E", 1, (IN,), (IN, OUT), 8, (node(0, "a"),), edges, is_ensemble=True)
    assert make_plan(through).first == (0,)
    plan = make_plan(through, ("IN",))
    assert plan.first == ()
    assert plan.output_slots == (0, NO_SLOT)


def test_steps_without_a_reader_that_leads_to_an_output_are_never_ready() -> None:
    # The state of a nested ensemble of which the outer one reads only some outputs.
    edges = (Edge("IN", GRAPH, 0, 0, 0), Edge("IN", GRAPH, 0, 1, 0), Edge("t", 1, 0, 2, 0), Edge("OUT", 0, 0, GRAPH, 0))
    nodes = (node(0, "a"), replace(node(1, "b"), decoupled=True), node(2, "c"))
    plan = make_plan(Graph("E", 1, (IN,), (OUT,), 8, nodes, edges, is_ensemble=True))
    assert runs(plan) == {"a"}
    assert plan.regions is None
