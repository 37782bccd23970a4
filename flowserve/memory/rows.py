"""Rows of tensors at the borders of spaces: which rows pass a test, the items of a tensor, and how they become rows of
the parent again.

Decides which rows pass a test, what counts as an item, how the rows of several conditions become one tensor, how items
become one row again, and the values of rows and items that no step wrote. A condition that all rows or none pass copies
nothing; neither do items, which are a view of their tensor. Rows that are picked from a tensor are copied where a batch
reads them (`recipe`). Does not know graphs, steps or requests beyond the records that it is given. The caller,
`scheduling/frames`, gets this module as its `RowOperations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from flowserve.config.types import RowTest
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.types import Derived, Space
from flowserve.memory.column import Column
from flowserve.memory.recipe import Joined, Picked, Recipe, host_array
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array


class Spread:
    """The rows of a space. `picked`: for each row the parent's row that it is made from, in order; None: all rows, in
    order. `counts`: for a space of items, the number of items of each parent row.
    """

    __slots__ = ("counts", "parent_rows", "picked", "rows")

    def __init__(self, rows: int, parent_rows: int, picked: Array | None, counts: Array | None = None) -> None:
        self.rows = rows
        self.parent_rows = parent_rows
        self.picked = picked
        self.counts = counts

    def parent_of(self, row: int) -> int:
        """The parent's row that a row is made from."""
        return row if self.picked is None else int(self.picked[row])


def open_space(space: Space, tensors: Sequence[Tensor]) -> Spread:
    """The rows of a space; `tensors` are those of its `opens`. Raises a FlowserveError."""
    if space.test is not None:
        return _tested(space.test, space.others, tensors[0])
    assert space.each is not None
    names = space.each.tensors
    has_count = len(tensors) > len(names)
    return _taken_apart(space, tensors[: len(names)], tensors[-1] if has_count else None)


def open_together(space: Space, output: Sequence[Tensor | None]) -> list[Spread]:
    """The rows of a space with a test, for each member of a batch, by one comparison of the model's output for all of
    them. Empty if that output is not one array on the host with one number for each row.
    """
    column = output if type(output) is Column else Column.of([*output], [])
    block = column.block
    assert space.test is not None
    rows = column.rows or [tensor.stop - tensor.start for tensor in column if tensor is not None]
    if not isinstance(block, np.ndarray) or not block.size == len(block) == sum(rows):
        return []
    taken = _taken(space.test, space.others, block.reshape(-1))
    if rows.count(1) == len(rows):
        none, one = _NONE_OR_ALL
        return [one if passes else none for passes in taken.tolist()]
    return [_chosen(taken[stop - n : stop]) for n, stop in zip(rows, accumulate(rows), strict=True)]


def undecided(space: Space, parent_rows: int) -> Spread:
    """The rows of a space whose tensors the request did not give: none, or all if its test is an `otherwise`."""
    if space.test is not None and space.test.otherwise:
        return Spread(parent_rows, parent_rows, None)
    return Spread(0, parent_rows, _NO_ROWS, np.zeros(parent_rows, np.intp))


_NO_ROWS = np.zeros(0, np.intp)
_NONE_OR_ALL = Spread(0, 1, _NO_ROWS), Spread(1, 1, None)  # for a request of one row


def _tested(test: RowTest, others: Sequence[RowTest], tensor: Tensor) -> Spread:
    array = host_array(tensor)
    count = 1 if tensor.stop == WHOLE else len(array)
    if array.size != count:
        raise ModelFailed(f"a test needs one number for each row, and '{test.tensor}' has shape {[*array.shape]}")
    return _chosen(_taken(test, others, array.reshape(count)))


def _taken(test: RowTest, others: Sequence[RowTest], numbers: Array) -> Array:
    """Which numbers pass a test; `others` are the other tests of an `otherwise`."""
    if not test.otherwise:
        return _passing(test, numbers)
    taken = np.zeros(len(numbers), bool)
    for other in others:
        taken |= _passing(other, numbers)
    return ~taken


def _chosen(taken: Array) -> Spread:
    picked = taken.nonzero()[0]
    rows, count = len(picked), len(taken)
    if count == 1:
        return _NONE_OR_ALL[rows]
    return Spread(rows, count, None if rows == count else picked)


def _passing(test: RowTest, numbers: Array) -> Array:
    """Which numbers pass; as `RowTest.passes`. They are compared as 64-bit numbers, because rounding to fewer bits
    would change the limit of a test.
    """
    found: Array
    is_whole = numbers.dtype.kind in "bui"
    if not is_whole:
        numbers = numbers.astype(np.float64, copy=False)
    if test.equals:
        found = numbers == test.equals[0]
        for number in test.equals[1:]:
            found |= numbers == number
    elif test.above is not None:
        found = numbers > test.above
        if test.below is not None:
            found &= numbers < test.below
    elif test.below is not None:
        found = numbers < test.below
    else:
        found = numbers.astype(bool, copy=False)
    if test.negate:
        found = ~found
    if not is_whole:  # NaN passes no test
        found = found & (numbers == numbers)
    return found


def _taken_apart(space: Space, tensors: Sequence[Tensor], count: Tensor | None) -> Spread:
    each = space.each
    assert each is not None
    shapes = [tensor.shape if tensor.stop != WHOLE else (1, *tensor.shape) for tensor in tensors]
    for name, shape in zip(each.tensors, shapes, strict=True):
        if len(shape) < 2:
            raise ModelFailed(f"'{name}' has shape {[*shape]}, in which nothing is an item")
    rows, most = shapes[0][0], shapes[0][1]
    for name, shape in zip(each.tensors, shapes, strict=True):
        if shape[:2] != (rows, most):
            raise ModelFailed(
                f"'{each.tensors[0]}' and '{name}' are taken apart together, and have {most} and {shape[1]} items"
            )
    counts = np.full(rows, most, np.intp)
    if count is not None:
        given = host_array(count).reshape(-1)
        if len(given) != rows:
            raise ModelFailed(f"the count '{each.count}' has {len(given)} numbers for {rows} rows")
        for row, number in enumerate(given.tolist()):
            if not 0 <= number <= most:
                raise ModelFailed(f"the count '{each.count}' is {number} of {most} items in row {row}")
        counts = given.astype(np.intp)
    items = int(counts.sum())
    if items > each.at_most:
        raise Invalid(f"the request has {items} items, at most {each.at_most} are accepted")
    return Spread(items, rows, np.repeat(np.arange(rows), counts), counts)


def take(tensor: Tensor, spread: Spread, has_rows: bool) -> Tensor:
    """The rows of a parent space's tensor that belong to the space, at least one. `has_rows`: whether the tensors of
    the space have a batch dimension. Raises ModelFailed if the tensor has other rows than those that the space was made
    from; models without a batch dimension may write such a tensor.
    """
    if has_rows:
        tensor = _with_rows(tensor)
        if tensor.stop - tensor.start != spread.parent_rows:
            raise ModelFailed(
                f"these rows were chosen among {spread.parent_rows}, and a tensor that is read for them has "
                f"{tensor.stop - tensor.start}"
            )
    return tensor if spread.picked is None else Picked(tensor, spread.picked)


def _with_rows(tensor: Tensor) -> Tensor:
    """A tensor with a batch dimension, of one row if it has none."""
    return tensor.viewed((1, *tensor.shape), has_rows=True) if tensor.stop == WHOLE else tensor


def items(tensor: Tensor, spread: Spread) -> Tensor:
    """The items of a tensor that a space divides into items, at least one: a view, unless a count leaves some out."""
    flat = _as_items(_with_rows(tensor))
    if spread.rows == flat.stop:
        return flat
    assert spread.counts is not None
    starts = np.arange(spread.parent_rows) * (flat.stop // spread.parent_rows)
    rows = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, spread.counts, strict=True)])
    return Picked(flat, rows)


def _as_items(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Recipe):
        return Joined([_as_items(part) for part in tensor.parts()])
    rows, most, *dims = tensor.shape
    return tensor.viewed((rows * most, *dims), has_rows=True)


def restricted(spread: Spread, start: int, stop: int, parent_start: int, parent_stop: int) -> Spread:
    """The rows `start` to `stop` of a space, as a space of its own among these rows of its parent."""
    rows, parent_rows = stop - start, parent_stop - parent_start
    picked = None if spread.picked is None else spread.picked[start:stop] - parent_start
    if picked is not None and spread.counts is not None:
        return Spread(rows, parent_rows, picked, np.bincount(picked, minlength=parent_rows))
    return Spread(rows, parent_rows, None if rows == parent_rows else picked)


def part(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The rows `start` to `stop` of a tensor; no copy."""
    return tensor if start == 0 and stop == tensor.stop - tensor.start else tensor.part(start, stop)


def row(tensor: Tensor, index: int) -> Tensor:
    """One row of a tensor, without its batch dimension."""
    one = tensor.part(index, index + 1)
    if isinstance(one, Recipe):
        (one,) = one.parts()
    return one.viewed(one.shape[1:], has_rows=False)


def join(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The outputs of the parts of a step, in order, as one tensor with a batch dimension. Raises ModelFailed if their
    shapes differ.
    """
    tensors = [*map(_with_rows, tensors)]
    first = tensors[0]
    if len(tensors) == 1:
        return first
    _same_shapes(tensors, name)
    if type(first) is Tensor and all(
        after.block is before.block and after.start == before.stop for before, after in pairwise(tensors)
    ):
        return Tensor(first.block, first.start, tensors[-1].stop)
    return Joined(tensors)


def _same_shapes(tensors: Sequence[Tensor], name: str) -> None:
    for tensor in tensors:
        if tensor.shape[1:] != tensors[0].shape[1:]:
            shapes = f"{[*tensors[0].shape[1:]]} and {[*tensor.shape[1:]]}"
            raise ModelFailed(f"rows of tensor '{name}' have different shapes, {shapes}, and cannot be one tensor")


def merge(
    derived: Derived, tensors: Sequence[Tensor | None], spreads: Sequence[Spread | None], has_rows: bool
) -> Tensor | None:
    """One tensor of those that steps of several conditions wrote, each for other rows, and none for all rows unless its
    model left the tensor out. `spreads[i]` None: `tensors[i]` has all rows, and the rows that pass no condition come
    from it. Rows that no step wrote get the value of `fill`; the tensor is None if there is no `fill`, or if models
    left it out for all rows. Raises ModelFailed if the shapes differ, or if models left the tensor out for some rows.
    """
    base = None
    written: list[tuple[Tensor, Spread]] = []
    count = rows = left_out = 0
    for tensor, spread in zip(tensors, spreads, strict=True):
        if spread is None:
            base = tensor
            continue
        rows = spread.parent_rows
        if not spread.rows:
            continue
        if tensor is None:
            left_out += spread.rows
        else:
            written.append((tensor, spread))
            count += spread.rows
    if left_out:
        if left_out == rows:
            return None
        raise ModelFailed(f"models left out tensor '{derived.spec.name}' for {left_out} of {rows} rows")
    if base is not None:
        if has_rows:
            base = _with_rows(base)
        if not written:
            return base
        if has_rows:
            _check_rows(base, rows, derived.spec.name)
    elif count < rows and derived.fill is None:
        return None  # no row of the request passes a condition
    made = [tensor for tensor, _ in written]
    if base is not None:
        made.append(base)
    _same_shapes(made, derived.spec.name)
    if base is None or not has_rows:
        base = _filled(derived, made[0] if made else None, rows, has_rows=has_rows)
    return _in_order(written, base) if written and has_rows else base


def _check_rows(base: Tensor, rows: int, name: str) -> None:
    if base.stop - base.start != rows:
        raise ModelFailed(
            f"the rows of tensor '{name}' were chosen among {rows}, and the step without a condition wrote "
            f"{base.stop - base.start}"
        )


def _filled(derived: Derived, alike: Tensor | None, rows: int, *, has_rows: bool) -> Tensor:
    """All rows with the value of `fill`, of the data type and shape of a tensor that was written, if there is one."""
    if alike is not None:
        dims, dtype = alike.shape[1:], alike.dtype
    else:
        dims, dtype = tuple(1 if dim == -1 else dim for dim in derived.spec.dims), derived.spec.dtype.numpy
    if not has_rows:
        return Tensor(_full(dims, dtype, derived.fill))
    return Tensor(_repeated(dims, dtype, derived.fill, rows), 0, rows)


def _in_order(written: Sequence[tuple[Tensor, Spread]], others: Tensor) -> Tensor:
    """The rows of several conditions as rows of their parent, in order. Rows that pass no condition come from `others`,
    which has all rows.
    """
    rows = others.stop - others.start
    source = np.full(rows, len(written))
    position = np.arange(rows)
    for k, (_, spread) in enumerate(written):
        source[spread.picked] = k
        position[spread.picked] = np.arange(spread.rows)
    sources = [*(tensor for tensor, _ in written), others]
    ends = np.flatnonzero((np.diff(source) != 0) | (np.diff(position) != 1)) + 1
    starts = [0, *ends.tolist(), rows]
    found = []
    for a, b in pairwise(starts):
        start = int(position[a])
        found.append(part(sources[source[a]], start, start + b - a))
    return found[0] if len(found) == 1 else Joined(found)


def _repeated(dims: tuple[int, ...], dtype: np.dtype[Any], value: float | bytes | None, rows: int) -> Array:
    """Rows of one value, in the memory of one row."""
    return np.broadcast_to(_full(dims, dtype, value), (rows, *dims))


def gather(derived: Derived, tensor: Tensor | None, spread: Spread, has_rows: bool) -> Tensor | None:
    """The items of each row as one row: `[rows, items, …]`, padded to the largest number of items. None if the model
    left the tensor out. Raises ModelFailed if a decoupled model sent more or fewer rows than it was given.
    """
    spec = derived.spec
    counts = spread.counts
    assert counts is not None
    most = int(counts.max(initial=0))
    if tensor is None:
        if spread.rows:
            return None
        dims = tuple(max(dim, 0) for dim in spec.dims[1:])
        array = _full((spread.parent_rows, 0, *dims), spec.dtype.numpy, derived.fill)
    else:
        found = host_array(tensor)
        if len(found) != spread.rows:
            raise ModelFailed(f"tensor '{spec.name}' has {len(found)} rows for {spread.rows} items")
        if spread.rows == most * spread.parent_rows:
            array = found.reshape((spread.parent_rows, most, *found.shape[1:]))
        else:
            array = _full((spread.parent_rows, most, *found.shape[1:]), found.dtype, derived.fill)
            array[_real(counts, most)] = found
    return Tensor(array, 0, len(array)) if has_rows else Tensor(array[0])


def present(derived: Derived, spreads: Sequence[Spread], has_rows: bool) -> Tensor:
    """A BOOL tensor: which rows, or items, were written. `fill` 1: all rows were."""
    counts = spreads[0].counts
    if counts is not None:
        most = int(counts.max(initial=0))
        array = _real(counts, most)[..., None]
        return Tensor(array, 0, len(array)) if has_rows else Tensor(array[0])
    array = np.full((spreads[0].parent_rows, 1), bool(derived.fill))
    for spread in spreads:
        array[slice(None) if spread.picked is None else spread.picked] = True
    return Tensor(array, 0, len(array)) if has_rows else Tensor(array[0])


def _real(counts: Array, most: int) -> Array:
    """For each row and position whether it is an item, not padding."""
    real: Array = np.arange(most) < counts[:, None]
    return real


def _full(shape: tuple[int, ...], dtype: np.dtype[Any], value: float | bytes | None) -> Array:
    array: Array = np.empty(shape, dtype)
    array.fill((b"" if dtype.hasobject else 0) if value is None else value)
    return array
