"""Members of a batch that lie apart: run together or one by one, whichever is quicker, with the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from flowserve.backends.base import Work
from flowserve.backends.onnx_apart import MEMBER_BYTES_MIN, Ways
from flowserve.memory.tensor import Tensor
from flowserve.testing.backends import Opened, Repository, config_of, spec
from flowserve.testing.onnx_files import onnx_identity
from flowserve.values import DType, Request

Open = Callable[..., Opened]


def run(ways: Ways, batches: int, together_ns: int, apart_ns: int) -> list[bool]:
    """Which way each batch of four rows went, where a row costs so much."""
    gone: list[bool] = []
    for _ in range(batches):
        gone.append(ways.is_apart())
        ways.measured(4, 4 * (apart_ns if gone[-1] else together_ns))
    return gone


def test_the_quicker_way_is_found_soon_and_the_other_tried_ever_more_rarely() -> None:
    for together_ns, apart_ns in ((1000, 500), (500, 1000)):
        ways = Ways()
        gone = run(ways, 20_000, together_ns, apart_ns)
        quicker = apart_ns < together_ns
        assert gone[:4] == [False] * 4
        assert gone[4:8] == [True] * 4
        assert all(way == quicker for way in gone[8:40])
        assert 0 < sum(way != quicker for way in gone[8:]) < 20_000 / 200
        assert 0 < sum(way != quicker for way in gone[-10_000:]) <= 12


def test_what_changes_is_noticed() -> None:
    ways = Ways()
    before = run(ways, 500, 1000, 500)
    after = run(ways, 2000, 200, 500)
    assert sum(before[-50:]) > 40
    assert sum(after[-50:]) < 10


def test_where_both_are_about_as_quick_the_copy_is_saved() -> None:
    ways = Ways()
    run(ways, 8, 1000, 1050)
    assert ways.is_apart()


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**9)), max_size=300))
def test_laws_no_way_is_kept_for_ever_without_trying_the_other(measured: list[tuple[int, int]]) -> None:
    ways, gone = Ways(), []
    for rows, duration_ns in measured:
        gone.append(ways.is_apart())
        ways.measured(rows, duration_ns)
    for first in range(len(gone) - 140):  # within 300 batches the retry has not been doubled beyond 128
        assert len({*gone[first : first + 140]}) == 2


@pytest.fixture
def images(repository: Repository, opened: Open) -> Opened:
    repository.write("m", "1/model.onnx", onnx_identity(DType.FP32, ("N", "M")))
    width = MEMBER_BYTES_MIN // 4
    return opened(
        config_of("onnxruntime", max_batch_size=8, inputs=[spec("x", (width,))], outputs=[spec("y", (width,))])
    )


def test_large_members_are_answered_alike_whichever_way_they_run_and_copied_only_together(images: Opened) -> None:
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


def test_a_member_without_rows_is_answered_whichever_way_the_others_run(images: Opened) -> None:
    width = MEMBER_BYTES_MIN // 4
    members = [np.full((n, width), n, np.float32) for n in (1, 0, 2)]
    column: list[Tensor | None] = [Tensor(member, 0, len(member)) for member in members]
    work = Work([column], [1, 1, 2], [Request({}) for _ in members], [("y",)] * 3)  # the batcher counts it as one
    for _ in range(12):
        results = images.instance.run(work, time.monotonic_ns)
        assert [one.array.shape[0] for one in results.outputs[0] if one is not None] == [1, 0, 2]


def test_members_whose_values_say_how_their_answers_are_shaped_may_run_one_by_one(
    repository: Repository, opened: Open
) -> None:
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


def test_small_members_always_run_together(images: Opened, repository: Repository, opened: Open) -> None:
    repository.write("m", "1/model.onnx", onnx_identity(DType.FP32, ("N", "M")))
    small = opened(config_of("onnxruntime", max_batch_size=8, inputs=[spec("x", (4,))], outputs=[spec("y", (4,))]))
    for _ in range(12):
        results = small.run(*({"x": np.zeros((1, 4), np.float32)} for _ in range(3)))
        assert sum(results.copied) == 3 * 16
