"""Ragged inputs round-trip through a flat array, and every kind of batch input matches Triton."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.assemble import BATCH_INPUTS, flatten, resolved_dims, unflatten
from flowserve.memory.column import scatter
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.values import DType

Shape = tuple[int, ...]
FOUR_LISTS: Sequence[Shape] = [(1, 2), (1, 4), (1, 1), (1, 3)]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def members(shapes: Sequence[Shape], dtype: Any = np.float32) -> list[Tensor]:
    """One member of each shape, all elements different, each in its own block."""
    stops = [*accumulate(map(prod, shapes), initial=0)]
    arrays = [
        np.arange(a, b).astype(dtype).reshape(shape) for (a, b), shape in zip(pairwise(stops), shapes, strict=True)
    ]
    return [Tensor(array, 0, len(array)) for array in arrays]


def made(kind: str, shapes: Sequence[Shape], dtype: DType = DType.INT32) -> list[Any]:
    array = BATCH_INPUTS[kind](shapes, dtype.numpy)
    assert array.dtype == dtype.numpy
    found: list[Any] = array.tolist()
    return found


@pytest.mark.parametrize("dtype", [DType.INT32, DType.FP32], ids=str)
@pytest.mark.parametrize(
    ("kind", "shapes", "expected"),
    [
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [(1, 3), (1, 4), (1, 5)], [3, 7, 12]),
        ("BATCH_ELEMENT_COUNT", FOUR_LISTS, [2, 4, 1, 3]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", FOUR_LISTS, [2, 6, 7, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", FOUR_LISTS, [0, 2, 6, 7, 10]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", FOUR_LISTS, [0, 0, 0, 0]),
        ("BATCH_ITEM_SHAPE", [(2, 1, 2), (1, 1, 2), (1, 2, 2)], [[1, 2], [1, 2], [1, 2], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [(1, 4, 1), (1, 1, 2), (1, 1, 2), (1, 2, 2)], [4, 1, 1, 2, 1, 2, 2, 2]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [(2, 1, 2), (1, 2, 2)], [1, 2, 1, 2, 2, 2]),
    ],
)
def test_every_kind_of_batch_input_matches_triton(
    kind: str, shapes: Sequence[Shape], expected: list[object], dtype: DType
) -> None:
    assert made(kind, shapes, dtype) == expected


def test_the_page_about_ragged_batches_shows_these_values(root: Path) -> None:
    rows = re.findall(r"^\| `(BATCH_\w+)` \| `(.*?)` \|", (root / "docs/ragged.md").read_text(), re.MULTILINE)
    assert {kind: json.loads(shown) for kind, shown in rows} == {kind: made(kind, FOUR_LISTS) for kind in BATCH_INPUTS}


def test_there_is_one_count_per_request_over_all_its_rows() -> None:
    shapes = [(2, 3), (1, 4)]
    assert made("BATCH_ELEMENT_COUNT", shapes) == [6, 4]
    assert made("BATCH_ACCUMULATED_ELEMENT_COUNT", shapes) == [6, 10]
    assert made("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", shapes) == [0] * 6


@pytest.mark.fault("D13")
def test_an_empty_row_counts_zero_and_a_request_without_rows_has_no_item() -> None:
    shapes = [(1, 2), (1, 0), (0, 5), (1, 3)]
    assert made("BATCH_ELEMENT_COUNT", shapes) == [2, 0, 0, 3]
    assert made("BATCH_ACCUMULATED_ELEMENT_COUNT", shapes) == [2, 2, 2, 5]
    assert made("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", shapes) == [0, 2, 2, 2, 5]
    assert made("BATCH_ITEM_SHAPE", shapes) == [[2], [0], [3]]
    assert made("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [(1, 0)]) == []
    assert BATCH_INPUTS["BATCH_ITEM_SHAPE"]([(0, 5, 2)], np.int32).shape == (0, 2)


def test_members_of_different_shapes_are_copied_together_once(pool: Pool) -> None:
    flat, copied = flatten(members([(1, 3), (2, 2), (1, 5)]), pool)
    assert flat.tolist() == [*range(12)]
    assert copied == flat.nbytes


def test_neighbours_in_one_block_are_passed_on_as_that_block(pool: Pool) -> None:
    block = np.arange(12, dtype=np.float32).reshape(4, 3)
    flat, copied = flatten(scatter(block, [1, 2, 1])[1:], pool)
    assert flat.tolist() == [*range(3, 12)]
    assert np.shares_memory(flat, block)
    assert copied == 0


def test_a_single_ragged_member_is_a_view_of_itself(pool: Pool) -> None:
    (member,) = members([(2, 3)])
    flat, copied = flatten([member], pool)
    assert flat.tolist() == [*range(6)]
    assert np.shares_memory(flat, member.block)
    assert copied == 0


def test_a_member_without_batch_dimension_is_flattened_whole(pool: Pool) -> None:
    flat, copied = flatten([Tensor(np.arange(6).reshape(2, 3))], pool)
    assert (flat.tolist(), copied) == ([*range(6)], 0)


def test_a_single_unaligned_member_is_copied(pool: Pool) -> None:
    odd = np.frombuffer(bytearray(4 * 4 + 1), np.uint8)[1:].view(np.float32).reshape(2, 2)
    flat, copied = flatten([Tensor(odd, 0, 2)], pool)
    assert flat.flags.aligned
    assert copied == 16


def test_column_major_members_are_copied_to_row_major_and_counted(pool: Pool) -> None:
    columns = np.arange(6, dtype=np.float32).reshape(2, 3).T
    flat, copied = flatten([Tensor(columns, 0, 3)], pool)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5]
    assert copied == columns.nbytes


def test_neighbouring_pieces_are_passed_on_as_their_flat_array(pool: Pool) -> None:
    flat = np.arange(12, dtype=np.float32)
    pieces = unflatten(flat, [(1, 3), (1, 4), (1, 5)], has_rows=True)
    again, copied = flatten(pieces, pool)
    assert again is flat
    assert copied == 0
    rest, copied = flatten(pieces[1:], pool)
    assert rest.tolist() == [*range(3, 12)]
    assert np.shares_memory(rest, flat)
    assert copied == 0


def test_pieces_with_a_gap_between_them_are_copied(pool: Pool) -> None:
    first, _, third = unflatten(np.arange(12, dtype=np.float32), [(1, 3), (1, 4), (1, 5)], has_rows=True)
    joined, copied = flatten([first, third], pool)
    assert joined.tolist() == [0, 1, 2, 7, 8, 9, 10, 11]
    assert copied == joined.nbytes


def test_pieces_beside_other_members_are_copied_with_them(pool: Pool) -> None:
    piece = unflatten(np.arange(3, dtype=np.float32), [(1, 3)], has_rows=True)
    for mixed in ([*piece, *members([(1, 3)])], [*members([(1, 3)]), *piece], [*members([(1, 2)]), *piece]):
        joined, copied = flatten(mixed, pool)
        assert joined.tolist() == [element for each in mixed for element in each.array.ravel().tolist()]
        assert copied == joined.nbytes


def test_a_piece_behaves_like_any_other_tensor() -> None:
    with_rows, _ = unflatten(np.arange(8), [(2, 3), (1, 2)], has_rows=True)
    assert (with_rows.start, with_rows.stop, with_rows.shape) == (0, 2, (2, 3))
    assert with_rows.array.tolist() == [[0, 1, 2], [3, 4, 5]]
    (whole,) = unflatten(np.arange(6), [(2, 3)], has_rows=False)
    assert (whole.stop, whole.shape) == (-1, (2, 3))


def test_varying_dims_are_resolved_from_the_same_axis() -> None:
    assert resolved_dims((-1, -1), (1, 4)) == (1, 4)
    assert resolved_dims((-1, 7, -1), (2, 3, 5)) == (2, 7, 5)
    assert resolved_dims((-1, -1, 24), (1, 4)) == (1, 4, 24)


@st.composite
def shape_lists(draw: st.DrawFn) -> list[Shape]:
    rank = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 4), min_size=rank, max_size=rank)
    shape = st.tuples(st.integers(0, 3), sizes).map(lambda pair: (pair[0], *pair[1]))
    return draw(st.lists(shape, min_size=1, max_size=6))


@given(shape_lists(), st.sampled_from([DType.FP32, DType.BF16, DType.BOOL, DType.BYTES]))
def test_flattening_and_unflattening_restores_all_members(shapes: list[Shape], dtype: DType) -> None:
    given_members = members(shapes, dtype.numpy)
    flat, _ = flatten(given_members, Pool())
    assert flat.shape == (sum(map(prod, shapes)),)
    back = unflatten(flat, shapes, has_rows=True)
    assert [each.shape for each in back] == shapes
    assert [each.array.tolist() for each in back] == [each.array.tolist() for each in given_members]
    once_more, copied = flatten(back, Pool())
    assert once_more.tolist() == flat.tolist()
    assert copied == 0


@given(shape_lists())
def test_the_counts_of_a_batch_add_up(shapes: list[Shape]) -> None:
    total = sum(map(prod, shapes))
    counts = made("BATCH_ELEMENT_COUNT", shapes)
    assert len(counts) == len(shapes)
    assert sum(counts) == total
    with_zero = made("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", shapes)
    assert [after - before for before, after in pairwise(with_zero)] == counts
    assert with_zero[1:] == made("BATCH_ACCUMULATED_ELEMENT_COUNT", shapes)
    assert made("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", shapes) == [0] * max(counts)
    items = made("BATCH_ITEM_SHAPE", shapes)
    assert len(items) == sum(shape[0] for shape in shapes)
    assert sum(prod(item) for item in items) == total
    assert made("BATCH_ITEM_SHAPE_FLATTEN", shapes) == [size for item in items for size in item]
