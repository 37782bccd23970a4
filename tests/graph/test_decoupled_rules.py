"""Graphs with decoupled steps: nesting levels, and rules G20 and G21."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowserve.config.types import Ensemble, InstanceGroup, ModelConfig
from flowserve.errors import Problems
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.plan import make_plan
from flowserve.graph.types import Graph, compile_model
from tests.support.ensembles import Step, available, ensemble, model

IN, OUT = {"I": "FP32[3]"}, {"O": "FP32[3]"}
JOIN = model("join", {"I": "FP32[3]", "J": "FP32[3]"}, OUT)
PLAIN = model("plain", IN, OUT)
MANY = replace(model("many", IN, OUT), decoupled=True)
MORE = replace(model("more", IN, OUT), decoupled=True)


def step(name: str, reads: str, writes: str) -> Step:
    mapping = dict(zip("IJ", reads.split(), strict=False))
    return name, mapping, {"O": writes}


def compiled(*steps: Step, outputs: str = "out", limit: int = 0, instances: int = 1, shared: bool = False) -> Graph:
    config = ensemble("e", {"in": "FP32[3]"}, dict.fromkeys(outputs.split(), "FP32[3]"), steps)
    assert config.ensemble is not None
    parameters = {"max_inflight_scope": "shared"} if shared else {}
    config = replace(config, ensemble=Ensemble(config.ensemble.steps, limit), parameters=parameters)
    groups = (InstanceGroup("g", count=instances),)
    models = [replace(one, instance_groups=groups) for one in (JOIN, PLAIN, MANY, MORE)]
    return compile_ensemble(config, 1, available(*models))


def refused(*steps: Step, **options: Any) -> str:
    with pytest.raises(Problems) as caught:
        compiled(*steps, **options)
    (problem,) = caught.value.problems
    return f"[{problem.rule}] {problem.message}"


def test_mistakes_found_after_folding_are_reported_together() -> None:
    """A nested ensemble whose -1 hides another size, and two steps whose responses cannot be combined."""
    wide = model("wide", {"I": "FP32[5]"}, OUT)
    inner = ensemble("inner", {"i": "FP32[-1]"}, {"o": "FP32[3]"}, [("wide", {"I": "i"}, {"O": "o"})])
    steps = [
        ("inner", {"i": "in"}, {"o": "a"}),
        step("many", "a", "b"),
        step("more", "a", "c"),
        step("join", "b c", "out"),
    ]
    outer = ensemble("e", {"in": "FP32[3]"}, {"out": "FP32[3]"}, steps)
    with pytest.raises(Problems) as caught:
        compile_ensemble(outer, 1, available(JOIN, MANY, MORE, wide, inner))
    assert [problem.rule for problem in caught.value.problems] == ["G15", "G20"]


def test_the_level_of_a_step_is_the_deepest_of_its_inputs() -> None:
    graph = compiled(
        step("plain", "in", "a"),
        step("many", "a", "b"),
        step("plain", "b", "c"),
        step("more", "c", "d"),
        step("join", "d b", "e"),
        step("join", "e a", "out"),
    )
    plan = make_plan(graph)
    assert plan.regions is not None
    assert plan.regions.depth == (0, 0, 1, 1, 2, 2)
    assert plan.regions.splits == (1, 3)
    assert [node.name for node in graph.nodes if node.decoupled] == ["many", "more"]
    assert graph.is_decoupled


def test_unrequested_outputs_start_no_iterations() -> None:
    graph = compiled(step("plain", "in", "out"), step("many", "in", "other"), outputs="out other")
    assert make_plan(graph, ["out"]).regions is None
    assert make_plan(graph, ["other"]).regions is not None


def test_without_decoupled_steps_there_is_no_nesting_unless_a_limit_is_shared() -> None:
    steps = (step("plain", "in", "mid"), step("plain", "mid", "out"))
    assert make_plan(compiled(*steps, limit=4)).regions is None
    shared = make_plan(compiled(*steps, limit=4, shared=True)).regions
    assert shared is not None
    assert shared.limits == (4, 4)


def test_a_plain_model_may_be_decoupled_and_a_limit_applies_only_to_repeated_steps() -> None:
    plan = make_plan(compile_model(MANY, 1))
    assert plan.regions is not None
    assert plan.regions.splits == (0,)
    graph = compiled(step("many", "in", "mid"), step("plain", "mid", "out"), limit=3)
    regions = make_plan(graph).regions
    assert regions is not None
    assert regions.limits == (0, 3)


def test_the_smallest_limit_of_nested_ensembles_applies() -> None:
    inner = ensemble("inner", {"in": "FP32[3]"}, {"out": "FP32[3]"}, [step("plain", "in", "out")])
    outer = ensemble("outer", {"in": "FP32[3]"}, {"out": "FP32[3]"}, [step("many", "in", "mid"), _nested("mid", "out")])
    for inside, outside, found in ((0, 0, 0), (4, 0, 4), (0, 5, 5), (4, 5, 4), (6, 5, 5)):
        configs = [_limited(inner, inside), replace(MANY, instance_groups=(InstanceGroup("g"),)), PLAIN]
        graph = compile_ensemble(_limited(outer, outside), 1, available(*configs))
        assert [node.max_inflight for node in graph.nodes] == [outside, found]


def _nested(reads: str, writes: str) -> Step:
    return "inner", {"in": reads}, {"out": writes}


def _limited(config: ModelConfig, limit: int) -> ModelConfig:
    assert config.ensemble is not None
    return replace(config, ensemble=Ensemble(config.ensemble.steps, limit))


def test_rule_G20_responses_of_two_parallel_decoupled_steps_cannot_be_joined() -> None:
    assert refused(step("many", "in", "a"), step("more", "in", "b"), step("join", "a b", "out")) == (
        "[G20] in ensemble e, step of model 'join' receives inputs originated from different decoupled models: "
        "'many' and 'more'"
    )
    assert refused(step("many", "in", "a"), step("more", "in", "b"), outputs="a b").startswith(
        "[G20] in ensemble e, its outputs are originated from different decoupled models"
    )


def test_rule_G21_a_limited_step_may_not_need_the_only_instance_of_its_producer() -> None:
    steps = (step("many", "in", "a"), step("plain", "a", "b"), step("many", "b", "out"))
    assert refused(*steps, limit=2) == (
        "[G21] in ensemble e, max_inflight_requests 2 can never be kept: step 'many' keeps the only instance of model "
        "'many' while it waits in its send until step 'many#2' is over, which needs that instance"
    )
    assert compiled(*steps, limit=0).is_decoupled
    assert compiled(*steps, limit=2, instances=2).is_decoupled
