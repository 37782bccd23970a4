"""Where instances go on machines with GPUs, and what they are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.config.instances import OFF, Gpus, instances_of
from flowserve.config.load import Draft, finish
from flowserve.config.types import Completion, InstanceGroup, ModelConfig, SourceMap

TENSORS = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
TWO = Gpus((0, 1))
# What onnxruntime says of itself: two instances on a CPU, one on a GPU.
USES_GPUS = Completion(instance_count=2, gpu_instance_count=1)
ON_CPU_ONLY = Completion(instance_count=1, gpu_instance_count=0)

Placed = Callable[..., list[tuple[str, tuple[int, ...]]]]


@pytest.fixture
def placed(draft: Callable[..., Draft]) -> Placed:
    """`placed(text, gpus, completion)`: every instance by name, with the GPU it is on."""

    def place(text: str, gpus: Gpus = TWO, completion: Completion = USES_GPUS) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, group.gpus) for name, group in instances_of(finish(draft(TENSORS + text), completion, gpus))]

    return place


def test_a_model_that_does_not_say_has_one_instance_on_each_gpu(placed: Placed) -> None:
    assert placed("") == [("m_0_gpu0", (0,)), ("m_0_gpu1", (1,))]
    assert placed("", Gpus()) == [("m_0", ()), ("m_1", ())]
    assert placed("instance_group { count: -1 }", Gpus()) == [("m_0_0", ()), ("m_0_1", ())], "less than one is not said"
    assert placed("", TWO, ON_CPU_ONLY) == [("m_0", ())], "its backend can do nothing with a GPU"


def test_as_many_instances_as_it_says_are_on_each_gpu_it_lists(placed: Placed) -> None:
    text = 'instance_group [ { name: "a" kind: KIND_GPU gpus: [ 1 ] count: 2 }, { name: "b" kind: KIND_CPU } ]'
    assert placed(text) == [("a_0_gpu1", (1,)), ("a_1_gpu1", (1,)), ("b_0", ()), ("b_1", ())]


def test_a_group_that_leaves_its_kind_open_is_on_its_gpus_where_all_of_them_are_there(placed: Placed) -> None:
    text = 'instance_group { name: "a" gpus: [ 0, 1 ] count: 1 }'
    assert placed(text) == [("a_0_gpu0", (0,)), ("a_0_gpu1", (1,))]
    assert placed(text, Gpus((0,))) == [("a_0", ())]


def test_with_gpus_off_everything_is_on_the_cpu(placed: Placed) -> None:
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
def test_every_gpu_of_a_group_has_its_count_of_instances_and_no_two_are_called_alike(group: InstanceGroup) -> None:
    config = ModelConfig("m", "python", "", 0, (), (), SourceMap("m"), instance_groups=(group,))
    found = instances_of(config)
    assert sorted(one.gpus[0] for _, one in found) == sorted([*group.gpus] * group.count)
    assert len({name for name, _ in found}) == len(found)
