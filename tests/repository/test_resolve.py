"""Deployments that can be served together: order, and the consequences of a failure."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Internal
from flowserve.repository.resolve import Resolution, resolve
from tests.support.ensembles import ensemble, model


def chain(name: str, *links: str) -> ModelConfig:
    """An ensemble that passes one tensor through the named models."""
    tensors = ["x", *(f"t{i}" for i in range(1, len(links))), "y"]
    steps = [(link, {"x": tensors[i]}, {"y": tensors[i + 1]}) for i, link in enumerate(links)]
    return ensemble(name, {"x": "FP32[4]"}, {"y": "FP32[4]"}, steps)


def plain(name: str) -> ModelConfig:
    return model(name, {"x": "FP32[4]"}, {"y": "FP32[4]"})


def resolved(*configs: ModelConfig, failed: Mapping[str, FlowserveError] | None = None) -> Resolution:
    return resolve({config.name: config for config in configs}, {config.name: (1,) for config in configs}, failed or {})


def test_an_ensemble_comes_after_everything_it_contains() -> None:
    answer = resolved(chain("a", "b", "m"), chain("b", "c"), chain("c", "m"), plain("m"))
    assert answer.models == ("m",)
    assert answer.ensembles == ("c", "b", "a")
    assert set(answer.graphs) == {"a", "b", "c", "m"}
    assert not answer.failed


def test_a_deployment_has_one_graph_per_version() -> None:
    answer = resolve({"m": plain("m")}, {"m": (3, 7)}, {})
    assert [graph.version for graph in answer.graphs["m"].values()] == [3, 7]


def test_a_failure_reaches_every_ensemble_above_it_and_nothing_else() -> None:
    answer = resolved(
        chain("low", "bad"),
        chain("high", "low", "good"),
        chain("beside", "good"),
        plain("good"),
        plain("bad"),
        failed={"bad": Internal("no kernel\nfor this device")},
    )
    assert set(answer.graphs) == {"good", "beside"}
    assert set(answer.failed) == {"bad", "low", "high"}
    assert (
        "ensemble 'low' depends on 'bad' which is not valid. Model 'bad' failed with error: no kernel (and 1 more)"
        in str(answer.failed["low"])
    )
    assert "ensemble 'high' depends on 'low' which is not valid." in str(answer.failed["high"])


def test_a_nested_failure_is_reported_once_at_any_depth() -> None:
    links = [chain(f"n{depth}", f"n{depth - 1}" if depth else "bad") for depth in range(5)]
    answer = resolved(*links, plain("bad"), failed={"bad": Internal("no kernel")})
    assert str(answer.failed["n4"]).endswith(
        "ensemble 'n4' depends on 'n3' which is not valid. Model 'n3' failed with error:"
        " Model 'bad' failed with error: no kernel [G3]"
    )


@pytest.mark.fault("E6")
def test_an_ensemble_of_a_missing_model_fails_alone() -> None:
    answer = resolved(chain("e", "goood"), plain("good"))
    assert answer.models == ("good",)
    text = str(answer.failed["e"])
    assert "ensemble e contains models that are not available or ambiguous: goood" in text
    assert 'did you mean "good"?' in text


@pytest.mark.fault("E4")
def test_each_ensemble_of_a_cycle_names_it_and_those_above_refer_to_it() -> None:
    answer = resolved(chain("a", "b"), chain("b", "a"), chain("top", "a"), chain("fine", "m"), plain("m"))
    assert answer.ensembles == ("fine",)
    assert "circular dependency between ensembles: a -> b -> a" in str(answer.failed["a"])
    assert "circular dependency between ensembles: b -> a -> b" in str(answer.failed["b"])
    assert "depends on 'a' which is not valid" in str(answer.failed["top"])


@given(st.data())
def test_property_more_failures_never_serve_more_and_results_are_deterministic(data: st.DataObject) -> None:
    names = [f"m{i}" for i in range(4)]
    configs = [plain(name) for name in names]
    for i in range(data.draw(st.integers(1, 6))):
        links = data.draw(st.lists(st.sampled_from([config.name for config in configs]), min_size=1, max_size=3))
        configs.append(chain(f"e{i}", *links))
    failed = {name: Internal("broken") for name in data.draw(st.sets(st.sampled_from(names)))}
    some, all_good = resolved(*configs, failed=failed), resolved(*configs)
    assert set(all_good.graphs) == {config.name for config in configs}
    assert set(some.graphs) | set(some.failed) == set(all_good.graphs)
    assert not set(some.graphs) & set(some.failed)
    assert all(node.model.name not in failed for graphs in some.graphs.values() for node in graphs[1].nodes)
    assert some.graphs == resolved(*configs, failed=failed).graphs


@pytest.mark.fault("C13")
def test_five_hundred_deployments_resolve_quickly() -> None:
    models = [plain(f"m{i}") for i in range(250)]
    flat = [chain(f"e{i}", *(f"m{(i + k) % 250}" for k in range(4))) for i in range(150)]
    nested = [chain(f"n{i}", f"e{i}", f"n{i - 1}" if i % 10 else "m0") for i in range(100)]
    started = time.perf_counter()
    answer = resolved(*models, *flat, *nested)
    assert len(answer.graphs) == 500
    assert time.perf_counter() - started < 10  # a second on an idle machine; the row asks for 60 with everything else
