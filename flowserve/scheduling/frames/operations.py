"""Operations at the borders of spaces: which rows a space has, and the tensors that are made from others there.

Decides which operation on rows makes a spread or a tensor, and what an error says about its place. As the other modules
of this package, this one reads no tensor: `RowOperations` does, and returns handles and spreads. Called by borders.py.

A *spread* says which rows a space has. It has a slot as a tensor has, so a node, or an operation of the plan, is ready
when all slots that it reads are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flowserve.errors import FlowserveError, Internal, Invalid, ModelFailed
from flowserve.graph.plan import Plan
from flowserve.graph.regions import NO_SLOT, Operation
from flowserve.graph.types import GRAPH, Conversion, Derivation, Derived, Graph, Space

_TAKE, _ITEMS, _MERGE = Derivation.TAKE, Derivation.ITEMS, Derivation.MERGE
_GATHER, _PRESENT = Derivation.GATHER, Derivation.PRESENT


class Spread(Protocol):
    """The rows of a space: their number, `rows`, made from `parent_rows` rows of the space around it."""

    @property
    def rows(self) -> int: ...

    @property
    def parent_rows(self) -> int: ...

    def parent_of(self, row: int) -> int:
        """The row of the space around it that a row is made from."""


class RowOperations(Protocol):
    """Operations on rows, implemented by the owner of the tensors (`memory/rows`). A handle is None for a tensor that a
    model left out. Each operation raises a FlowserveError that names the tensor.
    """

    def open_space(self, space: Space, tensors: Sequence[Any], /) -> Any:
        """The spread of a space; `tensors` are those of `space.opens`. If the tensor of counts is None, no item is
        padding.
        """

    def open_together(self, space: Space, output: Sequence[Any], /) -> Sequence[Any]:
        """The spreads of a space for all members of a batch, from the model's output that the space tests; () if each
        member's space must be opened by itself.
        """

    def undecided(self, space: Space, parent_rows: int, /) -> Any:
        """The spread of a space whose tensors the request did not give: no row passes a test, and no row has items."""

    def take(self, tensor: Any, spread: Any, has_rows: bool, /) -> Any:
        """The rows of a parent space's tensor that belong to the space, at least one. `has_rows`, here and below:
        whether the tensors of the space that the result belongs to have a batch dimension.
        """

    def items(self, tensor: Any, spread: Any, /) -> Any:
        """The items of a tensor that a space divides into items, at least one."""

    def restricted(self, spread: Any, start: int, stop: int, parent_start: int, parent_stop: int, /) -> Any:
        """The rows `start` to `stop` of a space, as a space of its own among these rows of its parent."""

    def part(self, tensor: Any, start: int, stop: int, /) -> Any:
        """Some rows of a tensor."""

    def row(self, tensor: Any, index: int, /) -> Any:
        """One row of a tensor, without a batch dimension."""

    def join(self, tensors: Sequence[Any], name: str, /) -> Any:
        """The outputs of the parts of a step, in order, as one tensor with a batch dimension."""

    def merge(self, derived: Derived, tensors: Sequence[Any], spreads: Sequence[Any], has_rows: bool, /) -> Any:
        """One tensor from the outputs of several branches, each of which has only some of the rows. `spreads[i]` None:
        `tensors[i]` has all rows.
        """

    def gather(self, derived: Derived, tensor: Any, spread: Any, has_rows: bool, /) -> Any:
        """The items of each row as one row."""

    def present(self, derived: Derived, spreads: Sequence[Any], has_rows: bool, /) -> Any:
        """A BOOL tensor: which rows or items were written."""


class OpensSpaces(Protocol):
    """A frame in which spaces begin."""

    plan: Plan
    tensors: list[Any]

    def rows_of(self, space: int) -> int:
        """The number of rows of a space; 0 is the space around all others."""


def only_branch(operation: Operation, tensors: Sequence[Any]) -> Any:
    """The result of a merge if all rows are of one branch: the tensor of that branch. None if rows may be of
    several. `tensors`: by slot.
    """
    base = None
    for slot, of in operation.branches:
        if of == NO_SLOT:
            base = tensors[slot]
        elif rows := tensors[of].rows:
            return tensors[slot] if rows == tensors[of].parent_rows else None
    return base if base is not None and (base.stop >= 0 or not operation.has_rows) else None


def made(frame: OpensSpaces, rows: RowOperations, operation: Operation, tensors: Sequence[Any]) -> Any:
    """The spread of a space, or a tensor at its border, made from these tensors. Raises a FlowserveError that has the
    place of the space.
    """
    space, graph = operation.opens, frame.plan.graph
    try:
        if space is None:
            return _derived(frame, rows, operation, tensors)
        return _opened(frame, rows, operation, space, tensors)
    except FlowserveError as error:
        if space and isinstance(error, ModelFailed) and all(graph.made_by(ref)[0] == GRAPH for ref in space.opens):
            error = Invalid(str(error))  # the client sent these tensors
        error.lineage = error.lineage or _border(graph, operation)
        raise error from None
    except Exception as error:  # a fault in code that reads tensors fails this request, not the scheduler
        failed = Internal(f"rows cannot be chosen or put together: {type(error).__name__}: {error}")
        failed.lineage = _border(graph, operation)
        raise failed from None


def _border(graph: Graph, operation: Operation) -> str:
    """The place of an operation in the graph, for the text of an error: the innermost space of its tensors."""
    spaces, derived = graph.spaces, operation.derived
    if derived is None:
        return "" if operation.opens is None else _lineage(operation.opens)
    index = max((*derived.spaces, derived.space))
    return _lineage(spaces[index - 1]) if index else ""


def _opened(frame: OpensSpaces, rows: RowOperations, operation: Operation, space: Space, tensors: Sequence[Any]) -> Any:
    parent_rows = frame.rows_of(operation.around)
    if not parent_rows or (None in tensors and _is_undecided(frame.plan.graph, space, tensors)):
        return rows.undecided(space, parent_rows)
    return rows.open_space(space, tensors)


def _is_undecided(graph: Graph, space: Space, tensors: Sequence[Any]) -> bool:
    """Whether the request omitted the tensors of a space, which are optional inputs. Raises Internal if a model
    left one out, and Invalid if only some of the tensors that are divided into items together were given.
    """
    absent = [i for i, tensor in enumerate(tensors) if tensor is None]
    for i in absent:
        maker, _ = graph.made_by(space.opens[i])
        if maker != GRAPH:
            step = graph.nodes[maker].name
            raise Internal(f"`{space.title}` cannot be decided: step '{step}' left its tensor out")
    names = (space.test.tensor,) if space.test is not None else space.each.tensors if space.each is not None else ()
    lacking = [names[i] for i in absent if i < len(names)]
    if lacking and len(lacking) < len(names):
        raise Invalid(f"{_quoted(names)} are taken apart together, and {_quoted(lacking)} was not given")
    return bool(lacking)


def _derived(frame: OpensSpaces, rows: RowOperations, operation: Operation, tensors: Sequence[Any]) -> Any:
    """A tensor at the border of a space; None if there is none for these rows."""
    derived, held = operation.derived, frame.tensors
    assert derived is not None
    how = derived.how
    spreads = [held[slot] if slot != NO_SLOT else None for slot in operation.spreads]
    if how is _MERGE:
        return rows.merge(derived, tensors, spreads, operation.has_rows)
    if how is _GATHER:
        return rows.gather(derived, tensors[0], spreads[0], operation.has_rows)
    if how is _PRESENT:
        return rows.present(derived, spreads, operation.has_rows)
    (tensor,) = tensors
    if tensor is None:
        return None
    if how is _TAKE:
        return rows.take(tensor, spreads[0], operation.has_rows)
    if how is _ITEMS:
        return rows.items(tensor, spreads[0])
    return tensor.converted(Conversion(derived.reshapes))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _lineage(space: Space) -> str:
    return f" (`{space.title}`" + (f" at {space.place})" if space.place is not None else ")")
