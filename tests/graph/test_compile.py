"""Compilation of configurations into graphs: numbering, names, nesting; property tests of the plan's counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.config.convert import to_config
from flowserve.config.parse import config_message
from flowserve.config.types import Ensemble, EnsembleStep, ModelConfig, SourceMap
from flowserve.errors import Problems
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.plan import make_plan
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, compile_model
from tests.support.ensembles import Drawn, available, ensemble, ensembles, model

ADD = model("add", {"A": "FP32[4]", "B": "FP32[4]?"}, {"SUM": "FP32[4]"})
SPLIT = model("split", {"IN": "FP32[4]"}, {"LOW": "FP32[4]", "HIGH": "FP32[4]"})


def joints(graph: Graph) -> set[tuple[str, str, str]]:
    """Every edge as (writer, tensor, reader), by name."""
    names = {node.index: node.name for node in graph.nodes} | {GRAPH: "*"}
    return {(names[edge.producer], edge.tensor, names[edge.consumer]) for edge in graph.edges}


def test_a_plain_model_is_a_graph_of_one_node() -> None:
    graph = compile_model(SPLIT, 3)
    assert graph.nodes[0].model == ModelKey("split", 3)
    assert graph.edges == (
        Edge("IN", GRAPH, 0, 0, 0),
        Edge("LOW", 0, 0, GRAPH, 0),
        Edge("HIGH", 0, 1, GRAPH, 1),
    )
    assert not graph.is_ensemble


def test_nodes_are_numbered_in_running_order_and_ties_keep_the_order_of_the_file() -> None:
    config = ensemble(
        "e",
        {"x": "FP32[4]"},
        {"y": "FP32[4]"},
        [
            ("add", {"A": "left", "B": "right"}, {"SUM": "y"}),
            ("split", {"IN": "x"}, {"HIGH": "right"}),
            ("split", {"IN": "x"}, {"LOW": "left"}),
        ],
    )
    graph = compile_ensemble(config, 1, available(ADD, SPLIT))
    assert [node.name for node in graph.nodes] == ["split", "split#2", "add"]
    assert [str(node.place) for node in graph.nodes] == [
        str(config.source.places[f"ensemble_scheduling.step[{i}]"]) for i in (1, 2, 0)
    ]
    assert joints(graph) == {
        ("*", "x", "split"), ("*", "x", "split#2"), ("split", "right", "add"), ("split#2", "left", "add"),
        ("add", "y", "*"),
    }  # fmt: skip


def test_a_step_uses_its_version_and_the_latest_for_minus_one() -> None:
    config = ensemble(
        "e",
        {"x": "FP32[4]"},
        {"y": "FP32[4]"},
        [
            ("split", {"IN": "x"}, {"LOW": "half"}),
            ("split", {"IN": "half"}, {"LOW": "y"}),
        ],
        versions={0: 2},
    )
    graph = compile_ensemble(config, 1, {"split": {2: SPLIT, 10: SPLIT, 9: SPLIT}})
    assert [node.model.version for node in graph.nodes] == [2, 10]


def test_a_step_may_read_one_tensor_twice_and_one_tensor_may_have_many_readers() -> None:
    config = ensemble("e", {"x": "FP32[4]"}, {"y": "FP32[4]"}, [("add", {"A": "x", "B": "x"}, {"SUM": "y"})])
    plan = make_plan(compile_ensemble(config, 1, available(ADD)))
    assert plan.first == (0,)
    assert plan.readers[:1] == (1,)


def test_an_omitted_optional_input_has_no_edge() -> None:
    config = ensemble("e", {"x": "FP32[4]"}, {"y": "FP32[4]"}, [("add", {"A": "x"}, {"SUM": "y"})])
    plan = make_plan(compile_ensemble(config, 1, available(ADD)))
    assert plan.nodes[0].inputs == (0, NO_SLOT)


def test_an_input_of_the_ensemble_may_be_an_output() -> None:
    config = ensemble("e", {"x": "FP32[4]"}, {"x": "FP32[4]", "y": "FP32[4]"}, [("add", {"A": "x"}, {"SUM": "y"})])
    assert ("*", "x", "*") in joints(compile_ensemble(config, 1, available(ADD)))


def test_nested_ensembles_are_folded_in_and_their_nodes_have_a_path() -> None:
    halve = ensemble(
        "halve",
        {"in": "FP32[4]"},
        {"out": "FP32[4]"},
        [
            ("split", {"IN": "in"}, {"LOW": "low", "HIGH": "high"}),
            ("add", {"A": "low", "B": "high"}, {"SUM": "out"}),
        ],
    )
    config = ensemble(
        "e",
        {"x": "FP32[4]"},
        {"y": "FP32[4]"},
        [
            ("halve", {"in": "x"}, {"out": "half"}),
            ("halve", {"in": "half"}, {"out": "y"}),
        ],
    )
    graph = compile_ensemble(config, 1, available(halve, ADD, SPLIT))
    assert [node.name for node in graph.nodes] == ["halve/split", "halve/add", "halve#2/split", "halve#2/add"]
    assert [node.path for node in graph.nodes] == [("halve",)] * 4
    assert joints(graph) == {
        ("*", "x", "halve/split"),
        ("halve/split", "halve/low", "halve/add"), ("halve/split", "halve/high", "halve/add"),
        ("halve/add", "half", "halve#2/split"), ("halve#2/split", "halve#2/low", "halve#2/add"),
        ("halve#2/split", "halve#2/high", "halve#2/add"), ("halve#2/add", "y", "*"),
    }  # fmt: skip


def test_a_step_need_not_wait_for_all_of_a_nested_ensemble() -> None:
    pair = ensemble(
        "pair",
        {"a": "FP32[4]", "b": "FP32[4]"},
        {"c": "FP32[4]", "d": "FP32[4]"},
        [
            ("split", {"IN": "a"}, {"LOW": "c"}),
            ("split", {"IN": "b"}, {"LOW": "d"}),
        ],
    )
    config = ensemble(
        "e",
        {"x": "FP32[4]", "z": "FP32[4]"},
        {"d": "FP32[4]", "y": "FP32[4]"},
        [
            ("add", {"A": "c"}, {"SUM": "y"}),
            ("pair", {"a": "x", "b": "z"}, {"c": "c", "d": "d"}),
        ],
    )
    graph = compile_ensemble(config, 1, available(pair, ADD, SPLIT))
    assert [node.name for node in graph.nodes] == ["pair/split", "add", "pair/split#2"]


def test_an_omitted_optional_input_of_a_nested_ensemble_has_no_edge_inside() -> None:
    inner = ensemble(
        "inner",
        {"a": "FP32[4]", "b": "FP32[4]?"},
        {"sum": "FP32[4]"},
        [
            ("add", {"A": "a", "B": "b"}, {"SUM": "sum"}),
        ],
    )
    config = ensemble("e", {"x": "FP32[4]"}, {"y": "FP32[4]"}, [("inner", {"a": "x"}, {"sum": "y"})])
    graph = compile_ensemble(config, 1, available(inner, ADD))
    assert joints(graph) == {("*", "x", "inner/add"), ("inner/add", "y", "*")}


@given(ensembles())
def test_every_well_formed_ensemble_compiles_and_its_plan_has_the_right_counts(drawn: Drawn) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    plan = make_plan(graph)
    outputs = [spec.name for spec in graph.outputs]
    slots = {spec.name: i for i, spec in enumerate(graph.inputs)}
    for node, planned in zip(graph.nodes, plan.nodes, strict=True):
        slots.update(zip(drawn.writes[node.model.name], planned.outputs, strict=True))
    for node, planned in zip(graph.nodes, plan.nodes, strict=True):
        read = drawn.reads[node.model.name]
        assert planned.inputs == tuple(slots[name] for name in read)
        assert plan.missing[node.index] == len({name for name in read if slots[name] >= len(graph.inputs)})
        assert (node.index in plan.first) == (plan.missing[node.index] == 0)
    index = {node.model.name: node.index for node in graph.nodes}
    for name, slot in slots.items():
        readers = sorted(index[step] for step, read in drawn.reads.items() if name in read)
        assert sorted(plan.consumers[slot]) == readers
        assert plan.readers[slot] == len(readers) + outputs.count(name)
    assert plan.output_slots == tuple(slots[name] for name in outputs)


@given(ensembles())
def test_every_edge_runs_forward_and_every_input_is_fed_once(drawn: Drawn) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    assert all(edge.producer < edge.consumer for edge in graph.edges if edge.consumer != GRAPH)
    fed = Counter((edge.consumer, edge.input) for edge in graph.edges)
    ports = [(node.index, i) for node in graph.nodes for i in range(len(node.inputs))]
    ports += [(GRAPH, i) for i in range(len(graph.outputs))]
    assert fed == Counter(ports)


@given(ensembles(), st.data())
def test_the_order_of_steps_in_the_file_changes_the_numbering_only(drawn: Drawn, data: st.DataObject) -> None:
    assert drawn.config.ensemble is not None
    shuffled = tuple(data.draw(st.permutations(drawn.config.ensemble.steps)))
    again = replace(drawn.config, ensemble=Ensemble(shuffled))
    first, second = (compile_ensemble(config, 1, drawn.available) for config in (drawn.config, again))
    assert joints(first) == joints(second)


Mutation = Callable[[EnsembleStep], EnsembleStep]


def renamed(mapping: object, old: str, new: str) -> dict[str, str]:
    assert isinstance(mapping, dict)
    return {(new if port == old else port): tensor for port, tensor in mapping.items()}


# One careless edit of one step each, and the rules that may report it.
EDITS: dict[str, tuple[Mutation, set[str]]] = {
    "a missing model": (lambda s: replace(s, model="missing"), {"G2"}),
    "a version that is not there": (lambda s: replace(s, version=7), {"G4"}),
    "no version at all": (lambda s: replace(s, version=0), {"G4"}),
    "an input of another name": (lambda s: replace(s, input_map=renamed(s.input_map, "I0", "J0")), {"G5", "G7"}),
    "an output of another name": (lambda s: replace(s, output_map=renamed(s.output_map, "O0", "P0")), {"G6"}),
    "an input left out": (lambda s: replace(s, input_map={k: v for k, v in s.input_map.items() if k != "I0"}), {"G7"}),
    "a tensor without a writer": (lambda s: replace(s, input_map={**s.input_map, "I0": "nothing"}), {"G10"}),
    "its own output as input": (lambda s: replace(s, input_map={**s.input_map, "I0": s.output_map["O0"]}), {"G11"}),
    "an output without a reader": (lambda s: replace(s, output_map={**s.output_map, "O0": "spare"}), {"G12", "G13"}),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
@settings(max_examples=25)
@given(drawn=ensembles(), data=st.data())
def test_a_careless_edit_of_a_good_ensemble_is_refused_by_its_rule(
    edit: str, drawn: Drawn, data: st.DataObject
) -> None:
    assert drawn.config.ensemble is not None
    steps = list(drawn.config.ensemble.steps)
    index = data.draw(st.integers(0, len(steps) - 1))
    mutate, rules = EDITS[edit]
    steps[index] = mutate(steps[index])
    broken = replace(drawn.config, ensemble=Ensemble(tuple(steps)))
    with pytest.raises(Problems) as caught:
        compile_ensemble(broken, 1, drawn.available)
    assert rules & {problem.rule for problem in caught.value.problems}
    assert all(problem.rule and problem.place and problem.message for problem in caught.value.problems)


CONFIG_EDITS: dict[str, tuple[Callable[[ModelConfig], ModelConfig], str]] = {
    "more rows than a step takes": (lambda c: replace(c, max_batch_size=9), "G17"),
    "another rank": (lambda c: replace(c, inputs=(replace(c.inputs[0], dims=(1, 1, 1, 1)), *c.inputs[1:])), "G15"),
}


@pytest.mark.parametrize("edit", CONFIG_EDITS)
@settings(max_examples=25)
@given(drawn=ensembles())
def test_a_careless_edit_of_the_ensembles_own_fields_is_refused_by_its_rule(edit: str, drawn: Drawn) -> None:
    mutate, rule = CONFIG_EDITS[edit]
    with pytest.raises(Problems) as caught:
        compile_ensemble(mutate(drawn.config), 1, drawn.available)
    assert rule in {problem.rule for problem in caught.value.problems}


def test_the_order_of_maps_in_a_file_changes_nothing() -> None:
    """protobuf's maps have another order in each process."""
    ports = [f"Y{number}" for number in range(12)]
    many = model("many", {"X": "FP32[1]"}, dict.fromkeys(ports, "FP32[1]"))
    step = {
        "model_name": "many",
        "model_version": -1,
        "input_map": {"X": "X"},
        "output_map": {port: port for port in reversed(ports)},
    }
    fields = {
        "name": "e",
        "platform": "ensemble",
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": port, "data_type": "TYPE_FP32", "dims": [1]} for port in ports],
        "ensemble_scheduling": {"step": [step]},
    }
    config = to_config(config_message(fields, "e"), SourceMap("e"))
    assert [*config.steps[0].output_map] == sorted(ports)
    assert compile_ensemble(config, 1, available(many)).nodes[0].name == "many"
