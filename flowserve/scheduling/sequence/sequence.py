"""Records of the sequence batcher: a sequence, a slot, the policy, and the checks of a first request.

Decides which requests may begin a sequence, and the order in which slots are assigned. slots.py decides which sequence
gets a slot, batcher.py when a sequence ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.scheduling.flow import Ticket

SequenceId = int | str
ID_CHARACTERS_MAX: Final = 128
ID_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """`slots`: per instance. `idle_ns`: a sequence without a request for this time ends. `id_control` is the control
    input for the correlation id and `id_type` its data type ("UINT64", "BYTES"); "" if there is none. `has_shapes`:
    sequences whose `RequestSequence.shapes` differ do not share a batch.
    """

    model: str
    slots: int
    idle_ns: int
    id_control: str = ""
    id_type: str = ""
    has_shapes: bool = False


class RequestSequence:
    """One sequence and its waiting requests, in order of arrival. It holds its slot while `slot.sequence` refers to it.

    `memory` belongs to the runtime: the states of the sequence, released with it. `shapes`: the shapes of these states.
    `rescheduled`: a request that ran and will run again (iterative.py).
    """

    __slots__ = (
        "__weakref__",
        "id",
        "is_closed",
        "is_running",
        "last_ns",
        "memory",
        "rescheduled",
        "shapes",
        "slot",
        "timeout_at_ns",
        "waiting",
    )

    def __init__(self, sequence_id: SequenceId) -> None:
        self.id = sequence_id
        self.slot: Slot | None = None
        self.waiting: deque[Ticket] = deque()
        self.is_closed = False  # it accepts no further request
        self.is_running = False  # one of its requests is in the running batch of its instance
        self.last_ns = 0  # the last time at which it was not idle
        self.timeout_at_ns: int | None = None  # when its timeout in the backlog passes
        self.rescheduled: Ticket | None = None
        self.memory: Any = None
        self.shapes: Hashable = None

    def __repr__(self) -> str:
        return f"RequestSequence({self.id!r}, {len(self.waiting)} waiting, {self.slot})"


class Slot:
    """A place for one sequence in an instance. Slot 0 of every instance is assigned before slot 1 of any."""

    __slots__ = ("instance", "is_away", "number", "rank", "sequence")

    def __init__(self, instance: Any, number: int, rank: int) -> None:
        self.instance = instance
        self.number = number
        self.rank = rank
        self.sequence: RequestSequence | None = None
        self.is_away = False  # its instance is unavailable

    def __lt__(self, other: Slot) -> bool:
        return (self.number, self.rank) < (other.number, other.rank)

    def __repr__(self) -> str:
        return f"slot {self.number} of {self.instance}"


class StateShapeKey:
    """A batching key that includes the shapes of a sequence's states, which are known only when a batch is formed."""

    __slots__ = ("_is_start", "_key", "_line")

    def __init__(self, key: Hashable, sequence: RequestSequence, *, is_start: bool) -> None:
        self._key = key
        self._line = sequence
        self._is_start = is_start

    def rescheduled(self) -> StateShapeKey:
        """The key of the same request after it was rescheduled."""
        return StateShapeKey(self._key, self._line, is_start=False)

    def _now(self) -> Hashable:
        return self._key, None if self._is_start else self._line.shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateShapeKey) and self._now() == other._now()

    def __hash__(self) -> int:
        return hash(self._key)


def check_first(
    policy: SequencePolicy, ticket: Ticket, sequence_id: SequenceId, *, is_start: bool, ending: str
) -> None:
    """Raise Invalid if a request cannot begin a sequence: Triton's rules, in its order. `ending` is why the last
    sequence of that id ended, "" if that is not known.
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
        return not any("\ud800" <= one <= "\udfff" for one in given)  # half of a surrogate pair is not valid text
    return isinstance(given, Integral) and 0 < int(given) <= ID_MAX


def without_start(policy: SequencePolicy, sequence_id: SequenceId, reason: str = "") -> Invalid:
    """The error of a request that would begin a sequence without START."""
    return Invalid(
        f"inference request for sequence {sequence_id} to model '{policy.model}' must specify the START flag on the "
        "first request of the sequence" + (f": {reason}" if reason else "")
    )
