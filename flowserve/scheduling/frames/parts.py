"""The rows of one step in parts that its model accepts.

Decides how many rows a part has, and which tensors it reads. A part is a ticket of its own: it is queued, batched,
retried and withdrawn as the step of a request is. Which parts are queued, and when, is decided by borders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowserve.graph.plan import PlanNode
from flowserve.graph.regions import NO_SLOT
from flowserve.scheduling.frames.operations import RowOperations, Spread


class PartedStep:
    """One step of a space, of a `frame` of borders.py, while its parts are under way. `size`: the rows of a part.
    `outputs[p]` are those of part p. `waiting` are the numbers of the parts that are not queued yet, `left` the number
    of those that are not over.
    """

    __slots__ = ("_frame", "has_rows", "left", "node", "outputs", "size", "space", "spread", "tensors", "waiting")

    def __init__(self, frame: Any, node: PlanNode, spread: Spread) -> None:
        graph = frame.plan.graph
        self._frame = frame
        self.node = node
        self.spread = spread
        self.space = graph.nodes[node.index].space
        self.has_rows = graph.has_rows(self.space)
        # Each row of a decoupled step has responses of its own.
        is_whole = self.has_rows and not graph.nodes[node.index].decoupled
        self.size = (node.max_batch_size or 1) if is_whole else 1
        self.left = -(-spread.rows // self.size)
        self.waiting = deque(range(self.left))
        self.outputs: list[Sequence[Any]] = [()] * self.left
        written = {own: slot for slot, own, _ in node.converts}
        slots = {written.get(slot, slot) for slot in node.inputs if slot != NO_SLOT}
        self.tensors = {slot: frame.tensors[slot] for slot in slots}

    @property
    def live(self) -> int:
        """The number of parts under way."""
        return self.left - len(self.waiting)

    def next_part(self, rows: RowOperations) -> Part:
        """The next part that was not queued."""
        number = self.waiting.popleft()
        start = number * self.size
        part = Part(self, number, start, min(self.size, self.spread.rows - start))
        held = part.tensors
        for slot, tensor in self.tensors.items():
            if tensor is None or not self.has_rows:
                held[slot] = tensor
            elif self.node.max_batch_size:
                held[slot] = rows.part(tensor, start, start + part.rows)
            else:
                held[slot] = rows.row(tensor, start)
        return part

    def in_words(self, start: int, count: int) -> str:
        """Rows of the step in words: as items of the nearest space of items, or else as rows of the request."""
        spaces = self._frame.plan.graph.spaces
        index, first, last, of = self.space, start, start + count - 1, self.spread.rows
        while index and spaces[index - 1].each is None:
            spread = self._frame.spreads[index]
            first, last, of = spread.parent_of(first), spread.parent_of(last), spread.parent_rows
            index = spaces[index - 1].parent
        what = "item" if index else "row"
        return f"{what} {first} of {of}" if count == 1 else f"{what}s {first} to {last} of {of}"


class Part:
    """Some rows of one step, from row `start` on. `number`: its position among the parts of the step. `tensors` has
    only the slots that the step reads.
    """

    __slots__ = ("number", "rows", "start", "step", "tensors")

    def __init__(self, step: PartedStep, number: int, start: int, rows: int) -> None:
        self.step = step
        self.number = number
        self.start = start
        self.rows = rows
        self.tensors: dict[int, Any] = dict.fromkeys((*step.node.inputs, *step.node.distinct_inputs))

    def in_words(self) -> str:
        """Which rows these are, for the text of an error."""
        return self.step.in_words(self.start, self.rows)
