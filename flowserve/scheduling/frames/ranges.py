"""The rows of a frame whose decoupled step runs for some rows only: those that one row of a space is made from.

Decides which rows of each space these are, and makes spreads and tensors with only them. The rows of a space that are
made from one row of its parent are neighbours, so they are a range. Called by borders.py.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from flowserve.errors import ModelFailed


class RowRanges:
    """The rows that a frame has of the frame `above`: those that `row` of a space is made from, and all that are made
    from the same row of the request.
    """

    __slots__ = ("_above", "_ranges")

    def __init__(self, above: Any, space: int, row: int) -> None:
        self._above = above
        spaces = above.plan.graph.spaces
        self._ranges = {space: (row, row + 1)}
        while space:
            row, space = above.spreads[space].parent_of(row), spaces[space - 1].parent
            self._ranges[space] = row, row + 1

    def spread(self, space: int) -> Any:
        """The rows of a space that is open in the frame above, as a space of this frame."""
        spread = self._above.spreads[space]
        around = self._ranges[self._above.plan.graph.spaces[space - 1].parent]
        if space not in self._ranges:
            rows = range(spread.rows)
            start, stop = (bisect_left(rows, end, key=spread.parent_of) for end in around)
            self._ranges[space] = start, stop
        return self._above.stream.rows.restricted(spread, *self._ranges[space], *around)

    def tensor(self, slot: int, tensor: Any) -> Any:
        """The rows of a tensor of the frame above; None if there are none. Raises ModelFailed if the tensor has another
        number of rows than its space.
        """
        space = self._above.regions.space_of[slot]
        if not self._above.plan.graph.has_rows(space) or tensor.stop < 0:
            return tensor
        start, stop = self._ranges.get(space, (0, 0))
        if start == stop:
            return None
        rows = self._above.rows_of(space)
        if tensor.stop - tensor.start != rows:
            text = f"a tensor of {rows} rows is needed for the responses of each row, and one has"
            raise ModelFailed(f"{text} {tensor.stop - tensor.start}")
        return self._above.stream.rows.part(tensor, start, stop)
