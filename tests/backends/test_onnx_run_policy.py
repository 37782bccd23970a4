"""Members of a batch that are not contiguous run merged or separately, whichever is faster, with equal outputs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from flowserve.backends.base import Work
from flowserve.backends.onnx.instance import MEMBER_BYTES_MIN, RunPolicy
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, Request
from tests.support.backends import Opened, Repository, config_of, spec
from tests.support.onnx_files import onnx_identity

Open = Callable[..., Opened]


def run(policy: RunPolicy, batches: int, merged_ns: int, separate_ns: int) -> list[bool]:
    """Whether each batch of four rows ran separately, given the times per row of both kinds."""
    separate: list[bool] = []
    for _ in range(batches):
        separate.append(policy.is_separate())
        policy.measured(4, 4 * (separate_ns if separate[-1] else merged_ns))
    return separate


def test_the_faster_kind_is_found_soon_and_the_other_tried_less_and_less() -> None:
    for merged_ns, separate_ns in ((1000, 500), (500, 1000)):
        policy = RunPolicy()
        separate = run(policy, 20_000, merged_ns, separate_ns)
        is_faster = separate_ns < merged_ns
        assert separate[:4] == [False] * 4
        assert separate[4:8] == [True] * 4
        assert all(way == is_faster for way in separate[8:40])
        assert 0 < sum(way != is_faster for way in separate[8:]) < 20_000 / 200
        assert 0 < sum(way != is_faster for way in separate[-10_000:]) <= 12


def test_a_change_of_speed_is_noticed() -> None:
    policy = RunPolicy()
    before = run(policy, 500, 1000, 500)
    after = run(policy, 2000, 200, 500)
    assert sum(before[-50:]) > 40
    assert sum(after[-50:]) < 10


def test_at_equal_speed_the_copy_is_saved() -> None:
    policy = RunPolicy()
    run(policy, 8, 1000, 1050)
    assert policy.is_separate()


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**9)), max_size=300))
def test_property_the_other_kind_is_retried_without_end(measured: list[tuple[int, int]]) -> None:
    policy, separate = RunPolicy(), []
    for rows, duration_ns in measured:
        separate.append(policy.is_separate())
        policy.measured(rows, duration_ns)
    for first in range(len(separate) - 140):  # within 300 batches the retry has not been doubled beyond 128
        assert len({*separate[first : first + 140]}) == 2


@pytest.fixture
def images(repository: Repository, opened: Open) -> Opened:
    repository.write("m", "1/model.onnx", onnx_identity(DType.FP32, ("N", "M")))
    width = MEMBER_BYTES_MIN // 4
    return opened(
        config_of("onnxruntime", max_batch_size=8, inputs=[spec("x", (width,))], outputs=[spec("y", (width,))])
    )


def test_large_members_have_equal_outputs_in_both_kinds_and_are_copied_only_when_merged(images: Opened) -> None:
    width = MEMBER_BYTES_MIN // 4
    copied = set()
    for turn in range(12):
        rows = (1, 2, 1)
        members = [np.full((n, width), turn * 10 + m, np.float32) for m, n in enumerate(rows)]
        results = images.run(*({"x": member} for member in members))
        for m, member in enumerate(members):
            tensor = results.outputs[0][m]
            assert tensor is not None
            np.testing.assert_array_equal(tensor.array, member)
        copied.add(sum(results.copied))
    assert copied == {0, 4 * MEMBER_BYTES_MIN}


def test_a_member_without_rows_is_answered_in_both_kinds(images: Opened) -> None:
    width = MEMBER_BYTES_MIN // 4
    members = [np.full((n, width), n, np.float32) for n in (1, 0, 2)]
    column: list[Tensor | None] = [Tensor(member, 0, len(member)) for member in members]
    # The batcher counts an empty member as one row.
    work = Work([Column.of(column, [1, 1, 2])], [1, 1, 2], [Request({}) for _ in members], [("y",)] * 3)
    for _ in range(12):
        results = images.instance.run(work, time.monotonic_ns)
        assert [one.array.shape[0] for one in results.outputs[0] if one is not None] == [1, 0, 2]


def test_members_with_outputs_of_different_shapes_may_run_separately(repository: Repository, opened: Open) -> None:
    width = MEMBER_BYTES_MIN // 4
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["count"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["count", "zero"], ["end"]),
        helper.make_node("Slice", ["x", "zero", "end", "one"], ["y"]),
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", end]) for name, end in (("x", width), ("y", "K"))
    ]
    numbers = [helper.make_tensor(name, TensorProto.INT64, [1], [n]) for n, name in enumerate(("zero", "one"))]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], numbers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    repository.write("m", "1/model.onnx", model.SerializeToString())
    cut = opened(config_of("onnxruntime", max_batch_size=8, inputs=[spec("x", (width,))], outputs=[spec("y", (-1,))]))
    for _ in range(12):
        results = cut.run(*({"x": np.full((1, width), k, np.float32)} for k in (2, 5)))
        made = [one.array for one in results.outputs[0] if one is not None]
        assert [(array[0, 0], len(array)) for array in made] == [(2, 1), (5, 1)]


def test_small_members_always_run_merged(images: Opened, repository: Repository, opened: Open) -> None:
    repository.write("m", "1/model.onnx", onnx_identity(DType.FP32, ("N", "M")))
    small = opened(config_of("onnxruntime", max_batch_size=8, inputs=[spec("x", (4,))], outputs=[spec("y", (4,))]))
    for _ in range(12):
        results = small.run(*({"x": np.zeros((1, 4), np.float32)} for _ in range(3)))
        assert sum(results.copied) == 3 * 16
