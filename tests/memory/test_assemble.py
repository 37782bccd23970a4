"""Contiguous batches are passed on without a copy; any other input is copied once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.assemble import gather
from flowserve.memory.column import scatter
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.values import DType


@pytest.fixture
def pool() -> Pool:
    return Pool()


def block(rows: int, width: int = 3) -> np.ndarray:
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


def test_a_batch_that_stayed_whole_is_passed_on_as_the_same_block(pool: Pool) -> None:
    array = block(6)
    joined, copied = gather(scatter(array, [1, 2, 3]), pool)
    assert joined is array
    assert copied == 0


def test_neighbours_in_the_middle_of_a_block_are_a_view_of_it(pool: Pool) -> None:
    array = block(6)
    joined, copied = gather(scatter(array, [1, 2, 1, 2])[1:3], pool)
    assert np.shares_memory(joined, array)
    assert joined.tolist() == array[1:4].tolist()
    assert copied == 0


def test_a_single_member_is_a_view_of_its_block(pool: Pool) -> None:
    array = block(4)
    joined, copied = gather([Tensor(array, 2, 3)], pool)
    assert joined.tolist() == array[2:3].tolist()
    assert np.shares_memory(joined, array)
    assert copied == 0


def test_a_member_without_batch_dimension_is_its_block_scalars_included(pool: Pool) -> None:
    scalar = np.array(7, np.int64)
    assert gather([Tensor(scalar)], pool) == (scalar, 0)


def test_a_gap_left_by_a_failed_member_copies_the_input_once_without_its_rows(pool: Pool) -> None:
    array = block(4)
    first, _, third, fourth = scatter(array, [1, 1, 1, 1])
    joined, copied = gather([first, third, fourth], pool)
    assert joined.tolist() == array[[0, 2, 3]].tolist()
    assert copied == joined.nbytes


def test_neighbours_in_the_wrong_order_are_not_neighbours(pool: Pool) -> None:
    array = block(2)
    first, second = scatter(array, [1, 1])
    joined, copied = gather([second, first], pool)
    assert joined.tolist() == array[::-1].tolist()
    assert copied == array.nbytes


def test_equal_rows_of_two_blocks_are_copied_together(pool: Pool) -> None:
    joined, copied = gather([Tensor(block(2), 0, 1), Tensor(block(2), 1, 2)], pool)
    assert joined.tolist() == block(2).tolist()
    assert copied == joined.nbytes


def test_the_same_rows_twice_are_copied(pool: Pool) -> None:
    tensor = Tensor(block(2), 0, 2)
    joined, _ = gather([tensor, tensor], pool)
    assert joined.tolist() == [*block(2).tolist(), *block(2).tolist()]


def test_a_large_copy_uses_a_pooled_buffer(pool: Pool) -> None:
    parts = [Tensor(np.full((1, 40_000), i, np.float32), 0, 1) for i in range(3)]
    joined, copied = gather(parts, pool)
    assert pool.lent_bytes >= copied
    assert copied == joined.nbytes == 480_000
    assert joined[:, -1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("width", [3, 30_000])
def test_a_view_into_a_request_body_at_an_odd_address_is_copied_to_an_aligned_one(pool: Pool, width: int) -> None:
    body = bytearray(1 + 4 * width)
    tensor = np.frombuffer(body, np.float32, offset=1).reshape(1, width)
    assert not tensor.flags.aligned
    joined, copied = gather([Tensor(tensor, 0, 1)], pool)
    assert joined.flags.aligned
    assert joined.tolist() == tensor.tolist()
    assert copied == tensor.nbytes


@pytest.mark.fault("S5")
def test_members_of_no_rows_and_rows_of_no_elements_assemble(pool: Pool) -> None:
    empty = np.zeros((3, 0), np.int32)
    assert gather(scatter(empty, [1, 2]), pool)[0] is empty
    joined, _ = gather([Tensor(block(0), 0, 0), Tensor(block(2), 0, 2)], pool)
    assert joined.tolist() == block(2).tolist()


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_data_type_survives_a_copy(pool: Pool, dtype: DType) -> None:
    values = [b"", b"a\0\xff"] if dtype is DType.BYTES else [0, 1]
    parts = [Tensor(np.array([value], dtype.numpy), 0, 1) for value in values]
    joined, _ = gather(parts, pool)
    assert joined.dtype == dtype.numpy
    assert joined.tolist() == np.array(values, dtype.numpy).tolist()


@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=8), data=st.data())
def test_gathering_any_members_is_concatenating_their_rows(rows: list[int], data: st.DataObject) -> None:
    array = block(sum(rows))
    shares = scatter(array, rows)
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=8))
    joined, copied = gather([shares[i] for i in chosen], Pool())
    assert joined.tolist() == np.concatenate([shares[i].array for i in chosen]).tolist()
    assert copied in (0, joined.nbytes)
    assert (copied == 0) == np.shares_memory(joined, array) or joined.size == 0


def test_scattered_tensors_know_their_shapes_without_being_sliced() -> None:
    assert [share.shape for share in scatter(block(3), [1, 2])] == [(1, 3), (2, 3)]
