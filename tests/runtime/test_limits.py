"""Which models the rate limiter refuses, the location in its errors, and the device instances are counted on."""

from __future__ import annotations

import pytest

from flowserve.config.types import InstanceGroup, LimitedResource, ModelConfig, RateLimiter, SourceMap
from flowserve.errors import Place, Problems
from flowserve.runtime.workers.policies import needs_of, refuse_what_never_runs
from flowserve.scheduling.rate_limit.limiter import Available, Limiter

LINE = Place("m/config.pbtxt", 7, 3)


def model(name: str, *groups: InstanceGroup) -> ModelConfig:
    source = SourceMap(f"{name}/config.pbtxt", {"instance_group[1].rate_limiter": LINE})
    return ModelConfig(name, "python", "", 0, (), (), source, instance_groups=groups)


def wants(name: str, count: int = 1, *, is_global: bool = False, passive: bool = False) -> InstanceGroup:
    limits = RateLimiter((LimitedResource(name, count, is_global=is_global),))
    return InstanceGroup("g", rate_limiter=limits, passive=passive)


def test_instances_on_the_cpu_count_on_device_zero_and_others_on_their_own() -> None:
    limits = RateLimiter((LimitedResource("R", 2),), priority=3)
    assert needs_of(InstanceGroup("g", rate_limiter=limits)).amounts == {("R", 0): 2}
    assert needs_of(InstanceGroup("g", "KIND_GPU", gpus=(1,), rate_limiter=limits)).amounts == {("R", 1): 2}


@pytest.mark.fault("R9")
def test_an_instance_group_that_could_never_run_is_refused_at_its_line() -> None:
    limiter = Limiter([Available("R", 2)])
    refused = model("m", wants("R", 2), wants("R", 3))
    with pytest.raises(Problems) as caught:
        refuse_what_never_runs(limiter, refused, [refused])
    (problem,) = caught.value.problems
    assert problem.place == LINE
    assert problem.message.startswith('Resource count for "R" is limited to 2')


def test_a_passive_group_needs_no_resources() -> None:
    refuse_what_never_runs(Limiter([Available("R", 2)]), model("m", wants("R", 3, passive=True)), [])


@pytest.mark.fault("R9")
def test_of_two_contradicting_models_the_later_by_name_is_refused() -> None:
    models = [model("b", wants("R", is_global=True)), model("a", wants("R")), model("c", wants("R"))]
    limiter = Limiter()
    for accepted in (models[1], models[2]):
        refuse_what_never_runs(limiter, accepted, models)
    with pytest.raises(Problems, match="is present as both global and device-specific resource"):
        refuse_what_never_runs(limiter, models[0], models)


@pytest.mark.fault("R9")
def test_a_model_that_contradicts_a_loaded_one_is_refused() -> None:
    limiter = Limiter()
    limiter.add([needs_of(wants("R"))])
    with pytest.raises(Problems, match="is present as both global and device-specific resource"):
        refuse_what_never_runs(limiter, model("a", wants("R", is_global=True)), [])
