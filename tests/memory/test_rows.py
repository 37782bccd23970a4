"""Rows at the borders of spaces: tests, items, and their way back; what is copied and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowserve.config.types import EachItem, RowTest
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.types import Derivation, Derived, Space
from flowserve.memory import rows
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column
from flowserve.memory.pool import Pool
from flowserve.memory.raw import EncodedBytes, encode_bytes
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, TensorSpec


def tensor(array: Any, dtype: Any = np.float32) -> Tensor:
    made = np.asarray(array, dtype)
    return Tensor(made, 0, len(made))


def condition(numbers: Any, dtype: Any = np.float32, others: tuple[RowTest, ...] = (), **test: Any) -> list[int]:
    """The rows that pass a test."""
    space = Space(1, 0, "when", ((0, 0),), RowTest("T", **test), others)
    spread = rows.open_space(space, [tensor(numbers, dtype)])
    return [*range(spread.parent_rows)] if spread.picked is None else spread.picked.tolist()


@pytest.mark.parametrize(
    ("test", "passing"),
    [
        ({"above": 0.5}, [2, 3]),
        ({"below": 0.5}, [0, 1]),
        ({"above": 0.25, "below": 1.5}, [2]),
        ({"above": 0.25, "below": 1.5, "negate": True}, [0, 1, 3]),
        ({"equals": (1, 2)}, [2, 3]),
        ({"negate": True}, [0]),
        ({}, [1, 2, 3]),
        ({"otherwise": True}, [0, 1, 4]),
    ],
)
def test_rows_that_pass_a_test_and_nan_only_otherwise(test: dict[str, Any], passing: list[int]) -> None:
    others = (RowTest("T", equals=(1,)), RowTest("T", above=1.5))
    assert condition([[0], [0.25], [1], [2], [np.nan]], others=others, **test) == passing


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32])
def test_a_limit_of_a_test_is_not_rounded_to_the_type_of_its_tensor(dtype: DType) -> None:
    numbers = np.array([[2048], [2050]]).astype(dtype.numpy)
    assert condition(numbers, dtype.numpy, equals=(2049,)) == []
    assert condition(numbers[:1], dtype.numpy, above=2047.99) == [0]


def test_a_test_of_more_than_one_number_in_a_row_is_the_fault_of_the_model() -> None:
    with pytest.raises(ModelFailed, match=r"'T' has shape \[2, 3\]"):
        condition([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [2, 0, 1, 1], [4], [3, 1]])
@pytest.mark.parametrize("test", [{}, {"negate": True}, {"above": 0.5, "below": 1.5}, {"otherwise": True}])
def test_a_batch_is_tested_together_as_each_of_its_members_alone(counts: list[int], test: dict[str, Any]) -> None:
    space = Space(1, 0, "when", ((0, 0),), RowTest("T", **test), (RowTest("T", above=1.5), RowTest("T", equals=(1,))))
    output = Column.whole(np.array([[0], [1], [2], [np.nan]], np.float32), counts)
    for given in (output, [*output]):
        found = rows.open_together(space, given)
        assert len(found) == len(counts)
        for spread, member in zip(found, output, strict=True):
            assert member is not None
            alone = rows.open_space(space, [member])
            assert (spread.rows, spread.parent_rows) == (alone.rows, alone.parent_rows)
            assert [*map(spread.parent_of, range(spread.rows))] == [*map(alone.parent_of, range(alone.rows))]


def test_members_whose_numbers_are_in_several_arrays_or_too_many_are_tested_alone() -> None:
    space = Space(1, 0, "when", ((0, 0),), RowTest("T"))
    one = tensor([[1]])
    for output in ([one, tensor([[0]])], [one, None], [Tensor(np.ones(1, np.float32))], [tensor([[1, 2]])]):
        assert not rows.open_together(space, output)


def apart(*tensors: Tensor, count: Tensor | None = None, at_most: int = 100) -> rows.Spread:
    names = tuple("abc"[: len(tensors)])
    each = EachItem(names, "n" if count is not None else "", at_most)
    space = Space(1, 0, "each", (), each=each)
    return rows.open_space(space, [*tensors, *([count] if count is not None else [])])


CROPS = tensor(np.arange(24).reshape(2, 3, 4))


def test_items_are_a_view_of_their_tensor() -> None:
    spread = apart(CROPS)
    found = rows.items(CROPS, spread)
    assert found is not None
    assert np.shares_memory(found.array, CROPS.array)
    assert found.array.tolist() == np.arange(24).reshape(6, 4).tolist()
    assert rows.part(found, 2, 4).block is found.block  # parts of it are neighbours in one block


def test_a_count_leaves_items_out() -> None:
    spread = apart(CROPS, count=tensor([[1], [2]], np.int32))
    found = rows.items(CROPS, spread)
    assert found is not None
    assert found.array[:, 0].tolist() == [0, 12, 16]
    assert rows.part(found, 1, 3).array[:, 0].tolist() == [12, 16]


@pytest.mark.parametrize(
    ("tensors", "count", "text"),
    [
        ([CROPS], [[1], [4]], "the count 'n' is 4 of 3 items in row 1"),
        ([CROPS], [[-1], [3]], "the count 'n' is -1 of 3 items in row 0"),
        ([CROPS], [[3]], "the count 'n' has 1 numbers for 2 rows"),
        ([CROPS, tensor(np.zeros((2, 2, 1)))], None, "'a' and 'b' are taken apart together, and have 3 and 2 items"),
    ],
)
def test_items_that_cannot_be_counted_are_the_fault_of_the_model(tensors: list[Tensor], count: Any, text: str) -> None:
    with pytest.raises(ModelFailed, match=text):
        apart(*tensors, count=None if count is None else tensor(count, np.int32))


def test_a_request_has_a_limit_of_items() -> None:
    with pytest.raises(Invalid, match="the request has 6 items, at most 5 are accepted"):
        apart(CROPS, at_most=5)


def test_picked_rows_are_copied_only_where_they_are_read() -> None:
    source = tensor(np.arange(100).reshape(100, 1))
    spread = rows.Spread(50, 100, np.arange(0, 100, 2))
    picked = rows.take(source, spread, has_rows=True)
    assert picked is not None
    assert picked.shape == (50, 1)
    part = rows.part(picked, 10, 14)
    assert part.array.ravel().tolist() == [20, 22, 24, 26]
    assert part.array is part.array


@pytest.mark.parametrize("dtype", [np.float32, object])
def test_a_batch_copies_picked_rows_once(dtype: Any) -> None:
    source = tensor([[f"{n}".encode() if dtype is object else n] for n in range(10)], dtype)
    chosen = [rows.take(source, rows.Spread(len(picked), 10, np.array(picked)), True) for picked in ([1, 2, 5], [9])]
    assert chosen[0] is not None
    column = Column.of([*chosen, Tensor(source.block, 3, 4), rows.part(chosen[0], 2, 3)], [3, 1, 1, 1])
    assert [len(piece) for piece in column.pieces] == [2, 1, 1, 1, 1]
    assert all(np.shares_memory(piece, source.block) for piece in column.pieces)
    found, copied = gather(column, Pool())
    assert [int(one) for one in found.ravel()] == [1, 2, 5, 9, 3, 5]
    assert copied == found.nbytes
    assert chosen[0].nbytes == 3 * source.block.itemsize
    assert len(chosen[0].array) == 3
    assert column.pieces[0] is chosen[0].array


def test_all_rows_are_the_tensor_itself_and_none_are_nothing() -> None:
    assert rows.take(CROPS, rows.Spread(2, 2, None), has_rows=True) is CROPS


def merged(dims: tuple[int, ...] = (1,), fill: Any = None, dtype: DType = DType.INT32) -> Derived:
    return Derived(Derivation.MERGE, 0, TensorSpec("T", dtype, dims), (), (), fill)


def spread_of(*picked: int, of: int) -> rows.Spread:
    return rows.Spread(len(picked), of, np.array(picked, np.intp))


def test_conditions_are_merged_and_the_rest_is_filled() -> None:
    one, other = tensor([[1], [2]], np.int32), tensor([[3]], np.int32)
    spreads = [spread_of(0, 3, of=5), spread_of(2, of=5)]
    found = rows.merge(merged(fill=-1.0), [one, other], spreads, True)
    assert found is not None
    assert found.array.ravel().tolist() == [1, -1, 3, 2, -1]
    assert found.array.dtype == np.int32


def test_a_tensor_of_all_rows_gives_those_that_no_condition_wrote() -> None:
    base, some = tensor([[1], [2], [3]], np.int32), tensor([[9]], np.int32)
    found = rows.merge(merged(), [base, some], [None, spread_of(1, of=3)], True)
    assert found is not None
    assert found.array.ravel().tolist() == [1, 9, 3]
    assert base.array.ravel().tolist() == [1, 2, 3]  # it has other readers


def test_text_is_filled_with_text_and_varying_dims_with_those_of_other_rows() -> None:
    text = tensor([[b"a", b"b"]], np.object_)
    found = rows.merge(merged((-1,), b"-", DType.BYTES), [text], [spread_of(1, of=2)], True)
    assert found is not None
    assert found.array.tolist() == [[b"-", b"-"], [b"a", b"b"]]
    nothing = rows.merge(merged((-1, 2), 0.0), [None], [spread_of(of=3)], True)
    assert nothing is not None
    assert nothing.shape == (3, 1, 2)


def test_rows_of_different_shapes_cannot_be_one_tensor() -> None:
    one, other = tensor([[1, 2]], np.int32), tensor([[3]], np.int32)
    with pytest.raises(ModelFailed, match=r"rows of tensor 'T' have different shapes, \[2\] and \[1\]"):
        rows.merge(merged((-1,), 0.0), [one, other], [spread_of(0, of=2), spread_of(1, of=2)], True)


def test_items_are_gathered_and_filled_up() -> None:
    spread = apart(CROPS, count=tensor([[1], [3]], np.int32))
    made = rows.gather(merged((-1, 1), -1.0), tensor([[1], [2], [3], [4]], np.int32), spread, True)
    assert made is not None
    assert made.array[..., 0].tolist() == [[1, -1, -1], [2, 3, 4]]
    real = rows.present(merged((-1, 1), 0.0, DType.BOOL), [spread], True)
    assert real.array[..., 0].tolist() == [[True, False, False], [True, True, True]]


def test_no_items_are_an_empty_tensor_of_the_declared_dims() -> None:
    spread = apart(tensor(np.zeros((2, 0, 4))))
    made = rows.gather(merged((-1, -1, 3), 0.0), None, spread, True)
    assert made is not None
    assert made.shape == (2, 0, 0, 3)


def test_without_a_batch_dimension_items_become_one() -> None:
    whole = Tensor(np.arange(6, dtype=np.float32).reshape(3, 2))
    spread = apart(whole)
    found = rows.items(whole, spread)
    assert found is not None
    assert found.shape == (3, 2)
    made = rows.gather(merged((-1, 2), 0.0), found, spread, False)
    assert made is not None
    assert made.shape == (3, 2)


def test_large_text_that_stayed_encoded_is_read_where_rows_are_picked() -> None:
    texts = np.array([[b"a"], [b"bc"], [b""]], np.object_)
    encoded = EncodedBytes.of(encode_bytes(texts), "T", "m", (3, 1))
    picked = rows.take(Tensor(encoded, 0, 3), spread_of(0, 2, of=3), has_rows=True)
    assert picked is not None
    assert picked.array.tolist() == [[b"a"], [b""]]


def test_a_tensor_of_other_rows_than_those_a_test_was_made_for_is_refused() -> None:
    one = spread_of(0, of=1)  # as of a model without a batch dimension, which writes one number for all rows
    with pytest.raises(ModelFailed, match="were chosen among 1, and a tensor that is read for them has 4"):
        rows.take(tensor(np.zeros((4, 2))), one, True)


def test_a_tensor_without_a_dimension_of_items_is_refused() -> None:
    with pytest.raises(ModelFailed, match=r"has shape \[2\], in which nothing is an item"):
        apart(tensor(np.zeros(2)))


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_conditions_do_not_replace_rows_of_a_tensor_with_another_number_of_rows(count: int) -> None:
    base = tensor(np.arange(count).reshape(count, 1), np.int32)
    with pytest.raises(ModelFailed, match=f"chosen among 2, and the step without a condition wrote {count}"):
        rows.merge(merged(), [base, tensor([[9]], np.int32)], [None, spread_of(1, of=2)], True)
