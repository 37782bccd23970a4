"""Devices and names of instances on machines with GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.config.load import Draft, finish
from flowserve.config.types import OFF, Completion, Gpus, InstanceGroup, ModelConfig, SourceMap, instances_of

TENSORS = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
TWO = Gpus((0, 1))
# onnxruntime's defaults: two instances on a CPU, one on a GPU.
USES_GPUS = Completion(instance_count=2, gpu_instance_count=1)
ON_CPU_ONLY = Completion(instance_count=1, gpu_instance_count=0)

Placed = Callable[..., list[tuple[str, tuple[int, ...]]]]


@pytest.fixture
def placed(draft: Callable[..., Draft]) -> Placed:
    """`placed(text, gpus, completion)`: every instance by name, with its GPU."""

    def place(text: str, gpus: Gpus = TWO, completion: Completion = USES_GPUS) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, group.gpus) for name, group in instances_of(finish(draft(TENSORS + text), completion, gpus))]

    return place


def test_a_model_has_one_instance_per_gpu_by_default(placed: Placed) -> None:
    assert placed("") == [("m_0_gpu0", (0,)), ("m_0_gpu1", (1,))]
    assert placed("", Gpus()) == [("m_0", ()), ("m_1", ())]
    assert placed("instance_group { count: -1 }", Gpus()) == [("m_0_0", ()), ("m_0_1", ())], "less than one is not said"
    assert placed("", TWO, ON_CPU_ONLY) == [("m_0", ())], "its backend can do nothing with a GPU"


def test_count_is_the_number_of_instances_per_listed_gpu(placed: Placed) -> None:
    text = 'instance_group [ { name: "a" kind: KIND_GPU gpus: [ 1 ] count: 2 }, { name: "b" kind: KIND_CPU } ]'
    assert placed(text) == [("a_0_gpu1", (1,)), ("a_1_gpu1", (1,)), ("b_0", ()), ("b_1", ())]


def test_a_group_without_a_kind_uses_its_gpus_if_all_exist(placed: Placed) -> None:
    text = 'instance_group { name: "a" gpus: [ 0, 1 ] count: 1 }'
    assert placed(text) == [("a_0_gpu0", (0,)), ("a_0_gpu1", (1,))]
    assert placed(text, Gpus((0,))) == [("a_0", ())]


def test_with_gpus_off_all_instances_are_on_the_cpu(placed: Placed) -> None:
    assert placed("instance_group { kind: KIND_GPU gpus: [ 0 ] count: 1 }", OFF) == [("m_0_0", ())]
    assert placed("", OFF) == [("m_0", ()), ("m_1", ())]


def test_the_configuration_that_clients_see_lists_the_gpus(draft: Callable[..., Draft]) -> None:
    (group,) = finish(draft(TENSORS), USES_GPUS, TWO).json["instance_group"]
    assert (group["kind"], group["gpus"], group["count"]) == ("KIND_GPU", [0, 1], 1)


groups = st.builds(
    InstanceGroup,
    st.sampled_from("abc"),
    st.just("KIND_GPU"),
    st.integers(1, 3),
    st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=4).map(tuple),
)


@given(groups)
def test_every_gpu_of_a_group_has_count_instances_with_unique_names(group: InstanceGroup) -> None:
    config = ModelConfig("m", "python", "", 0, (), (), SourceMap("m"), instance_groups=(group,))
    found = instances_of(config)
    assert sorted(one.gpus[0] for _, one in found) == sorted([*group.gpus] * group.count)
    assert len({name for name, _ in found}) == len(found)
