"""One sequence and its place: what is known of a correlation id, a slot, and who may begin.

Decided here: what a request must be to begin a sequence, and in which order slots are taken. Who gets one is decided in
seats.py, when a sequence is over in sequences.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.scheduling.router import Ticket

SequenceId = int | str
ID_CHARACTERS_MAX: Final = 128
ID_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """`slots`: of each instance. `idle_ns`: after so long without a request a sequence is over. `id_control` is the
    input that takes the correlation id and `id_type` its data type ("UINT64", "BYTES"); "" where there is none.
    `has_shapes`: sequences whose `Line.shapes` differ do not share a batch.
    """

    model: str
    slots: int
    idle_ns: int
    id_control: str = ""
    id_type: str = ""
    has_shapes: bool = False


class Line:
    """One sequence: its waiting requests, first come first. It holds its slot for as long as the slot says so, too.

    `memory` is the runtime's, what the model remembers of it; nothing here reads it. It goes when the line goes.
    `shapes`: of what is remembered. `going_on`: a request that has run and will again (iterative.py).
    """

    __slots__ = (
        "__weakref__",
        "going_on",
        "id",
        "is_closed",
        "is_running",
        "last_ns",
        "memory",
        "patience_ns",
        "shapes",
        "slot",
        "waiting",
    )

    def __init__(self, sequence_id: SequenceId) -> None:
        self.id = sequence_id
        self.slot: Slot | None = None
        self.waiting: deque[Ticket] = deque()
        self.is_closed = False  # nobody joins it any more
        self.is_running = False  # one of its requests is in the batch that its instance runs
        self.last_ns = 0  # when it was last known not to be idle
        self.patience_ns: int | None = None  # when it is given up in the backlog
        self.going_on: Ticket | None = None
        self.memory: Any = None
        self.shapes: Hashable = None

    def __repr__(self) -> str:
        return f"Line({self.id!r}, {len(self.waiting)} waiting, {self.slot})"


class Slot:
    """A place for one sequence in an instance. Slot 0 of every instance is taken before slot 1 of any."""

    __slots__ = ("instance", "is_away", "line", "number", "rank")

    def __init__(self, instance: Any, number: int, rank: int) -> None:
        self.instance = instance
        self.number = number
        self.rank = rank
        self.line: Line | None = None
        self.is_away = False  # its instance is

    def __lt__(self, other: Slot) -> bool:
        return (self.number, self.rank) < (other.number, other.rank)

    def __repr__(self) -> str:
        return f"slot {self.number} of {self.instance}"


class Shaped:
    """A ticket's key where the shape of a sequence's state counts too. That is known when a batch is made."""

    __slots__ = ("_is_start", "_key", "_line")

    def __init__(self, key: Hashable, line: Line, *, is_start: bool) -> None:
        self._key = key
        self._line = line
        self._is_start = is_start

    def going_on(self) -> Shaped:
        """The key of the same request when it runs again."""
        return Shaped(self._key, self._line, is_start=False)

    def _now(self) -> Hashable:
        return self._key, None if self._is_start else self._line.shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shaped) and self._now() == other._now()

    def __hash__(self) -> int:
        return hash(self._key)


def check_first(
    policy: SequencePolicy, ticket: Ticket, sequence_id: SequenceId, *, is_start: bool, ending: str
) -> None:
    """Raise Invalid where a request cannot begin a sequence: Triton's rules, in its order. `ending` is what became of
    the last sequence of that id, where that is known.
    """
    model = policy.model
    if ticket.rows != 1:
        raise Invalid(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence "
            f"batcher: it has {ticket.rows} rows"
        )
    if not sequence_id:
        raise Invalid(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID: give each "
            "sequence a sequence_id of its own, and sequence_start with its first request"
        )
    if not _is_id(sequence_id):
        raise Invalid(
            f"correlation ID {sequence_id!r} of an inference request to model '{model}' is neither a text nor a whole "
            f"number from 1 to {ID_MAX}"
        )
    if isinstance(sequence_id, str) and len(sequence_id) > ID_CHARACTERS_MAX:
        raise Invalid(
            f"string correlation ID cannot be longer than {ID_CHARACTERS_MAX} characters: model '{model}' got one "
            f"of {len(sequence_id)}"
        )
    kind = "BYTES" if isinstance(sequence_id, str) else "UINT64"
    if policy.id_type and (kind == "BYTES") != (policy.id_type == "BYTES"):
        raise Invalid(
            f"sequence batching control '{policy.id_control}' data-type is '{kind}', but model '{model}' "
            f"expects '{policy.id_type}'"
        )
    if not is_start:
        raise without_start(policy, sequence_id, ending)


def _is_id(given: object) -> bool:
    if isinstance(given, str):
        return not any("\ud800" <= one <= "\udfff" for one in given)  # half of a surrogate pair is no text
    return isinstance(given, Integral) and 0 < int(given) <= ID_MAX


def without_start(policy: SequencePolicy, sequence_id: SequenceId, why: str = "") -> Invalid:
    """What a request is told that begins a sequence and does not say so."""
    return Invalid(
        f"inference request for sequence {sequence_id} to model '{policy.model}' must specify the START flag on the "
        "first request of the sequence" + (f": {why}" if why else "")
    )
