"""Rows and items of simulated requests: which rows pass a condition, and how many items a row has.

Decides the rows and shapes of tensors at the borders of spaces from the shares and numbers that a test gives, so that
the scheduler runs the same code as in a server (scheduling/spaces.py). A share is spread evenly over the rows: of a
share of 0.3, three of ten rows in a row pass. Does not know the contents of tensors. Caller: `deployment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid
from flowserve.graph.types import Derived, Graph, Space
from flowserve.values import TensorSpec

Taken = Mapping[str, float | Callable[[int], float]]  # by the text of a condition; a function of the request's number
ItemCounts = Mapping[str, int | Callable[[int], int]]  # by the tensors that are divided into items


class SimulatedTensor:
    """A tensor without contents: rows and a shape. Variable dims are 1."""

    __slots__ = ("dims", "start", "stop")

    def __init__(self, spec: TensorSpec, rows: int) -> None:
        """`rows` -1: without a batch dimension."""
        self.start, self.stop = 0, rows
        self.dims = tuple(max(dim, 1) for dim in spec.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dims if self.stop < 0 else (self.stop - self.start, *self.dims)

    def converted(self, conversion: object) -> SimulatedTensor:
        """Itself: conversions do not change the simulated rows."""
        return self

    def with_rows(self, rows: int, dims: tuple[int, ...] | None = None) -> SimulatedTensor:
        """A tensor of the same kind with other rows, or other dims; `rows` -1: without a batch dimension."""
        made = SimulatedTensor.__new__(SimulatedTensor)
        made.start, made.stop = 0, rows
        made.dims = self.dims if dims is None else dims
        return made


class SimulatedSpread:
    """As `scheduling.spaces.Spread`."""

    __slots__ = ("parent_rows", "rows")

    def __init__(self, rows: int, parent_rows: int) -> None:
        self.rows = rows
        self.parent_rows = parent_rows

    def parent_of(self, row: int) -> int:
        """The parent's row from which a row is made; for a condition, as if the first rows passed."""
        return row if self.rows <= self.parent_rows else row * self.parent_rows // self.rows


class RowPlan:
    """The shares of conditions and the numbers of items of one simulation, for all of its requests."""

    def __init__(self, graph: Graph, taken: Taken, items: ItemCounts) -> None:
        """Raises Invalid for a name that the graph does not have."""
        known = [str(space.test) for space in graph.spaces if space.test is not None]
        taken_apart = [str(space.each) for space in graph.spaces if space.each is not None]
        for what, given, there in (("taken", taken, known), ("items", items, taken_apart)):
            for name in given:
                if name not in there:
                    hint = did_you_mean(name, there) or f"there are {', '.join(map(repr, there)) or 'none'}"
                    raise Invalid(f"{what} names '{name}', which is not in the graph ({hint})")
        self._spaces = graph.spaces
        self._taken = taken
        self._items = items
        self._left: dict[int, float] = {}  # by condition: the fraction of a row that is carried over

    def numbers_of(self, number: int) -> dict[int, float]:
        """The items of each row, and the share of rows, in each space of a request. Raises Invalid."""
        return {space.index: self._number_of(space, number) for space in self._spaces}

    def _number_of(self, space: Space, number: int) -> float:
        given: Any
        if space.each is not None:
            given = self._items.get(str(space.each), 1)
            given = given(number) if callable(given) else given
            if not isinstance(given, int) or given < 0:
                raise Invalid(f"items of '{space.each}' is a whole number from 0 on, not {given!r}")
            return given
        given = self._taken.get(str(space.test), 1.0)
        given = given(number) if callable(given) else given
        if not isinstance(given, int | float) or not 0 <= given <= 1:
            raise Invalid(f"taken of '{space.test}' is a share from 0 to 1, not {given!r}")
        return given

    def taken(self, space: Space, share: float, parent_rows: int) -> int:
        """How many of the parent's rows pass a condition."""
        whole = self._left.get(space.index, 0.0) + share * parent_rows
        rows = min(int(whole + 1e-9), parent_rows)
        self._left[space.index] = whole - rows
        return rows


class SimulatedRows:
    """The `RowOperations` of one request (scheduling/spaces.py)."""

    def __init__(self, plan: RowPlan, number: int) -> None:
        """Raises Invalid for a number out of range."""
        self._plan = plan
        self._numbers = plan.numbers_of(number)

    def open_space(self, space: Space, tensors: Sequence[SimulatedTensor]) -> SimulatedSpread:
        rows = max(tensors[0].stop - tensors[0].start, 1)
        number = self._numbers[space.index]
        if space.each is not None:
            return SimulatedSpread(rows * int(number), rows)
        return SimulatedSpread(self._plan.taken(space, number, rows), rows)

    def open_together(self, space: Space, output: Sequence[SimulatedTensor]) -> Sequence[SimulatedSpread]:
        return ()  # spaces are opened per request, each with its own shares

    def undecided(self, space: Space, parent_rows: int) -> SimulatedSpread:
        return SimulatedSpread(0, parent_rows)

    def take(self, tensor: SimulatedTensor, spread: SimulatedSpread, has_rows: bool) -> SimulatedTensor:
        return tensor.with_rows(spread.rows if has_rows else -1)

    def items(self, tensor: SimulatedTensor, spread: SimulatedSpread) -> SimulatedTensor:
        return tensor.with_rows(spread.rows, tensor.dims[1:])

    def part(self, tensor: SimulatedTensor, start: int, stop: int) -> SimulatedTensor:
        return tensor.with_rows(stop - start)

    def row(self, tensor: SimulatedTensor, index: int) -> SimulatedTensor:
        return tensor.with_rows(-1)

    def join(self, tensors: Sequence[SimulatedTensor], name: str) -> SimulatedTensor:
        return tensors[0].with_rows(sum(max(tensor.stop - tensor.start, 1) for tensor in tensors))

    def merge(
        self, derived: Derived, tensors: Sequence[Any], spreads: Sequence[SimulatedSpread | None], has_rows: bool
    ) -> SimulatedTensor:
        rows = next(spread.parent_rows for spread in spreads if spread is not None)
        return SimulatedTensor(derived.spec, rows if has_rows else -1)

    def gather(self, derived: Derived, tensor: Any, spread: SimulatedSpread, has_rows: bool) -> SimulatedTensor:
        return SimulatedTensor(derived.spec, spread.parent_rows if has_rows else -1)

    def present(self, derived: Derived, spreads: Sequence[SimulatedSpread], has_rows: bool) -> SimulatedTensor:
        return SimulatedTensor(derived.spec, spreads[0].parent_rows if has_rows else -1)
