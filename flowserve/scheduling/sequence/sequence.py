"""The records of a sequence: its policy, its waiting requests and its slot, and the key that its states' shapes add.

Decides which requests may begin a sequence. `slots` decides which slot a sequence gets, `batcher` when a sequence
begins and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.scheduling.frames.frame import Ticket

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


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class RequestSequence:
    """One sequence and its waiting requests, in order of arrival. It holds its slot while `slot.sequence` refers to it.

    `memory` belongs to the runtime: the states of the sequence, released with it. `shapes`: the shapes of these states.
    `rescheduled`: a request that ran and will run again (strategies.py).
    """

    id: SequenceId
    slot: Slot | None = None
    waiting: deque[Ticket] = field(default_factory=deque)
    is_closed: bool = False  # it accepts no further request
    is_running: bool = False  # one of its requests is in the running batch of its instance
    last_ns: int = 0  # the last time at which it was not idle
    timeout_at_ns: int | None = None  # when its timeout in the backlog passes
    rescheduled: Ticket | None = None
    memory: Any = None
    shapes: Hashable = None

    def __repr__(self) -> str:
        return f"RequestSequence({self.id!r}, {len(self.waiting)} waiting, {self.slot})"


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """A place for one sequence in an instance. Slot 0 of every instance is assigned before slot 1 of any."""

    instance: Any
    number: int
    rank: int
    sequence: RequestSequence | None = None
    is_away: bool = False  # its instance is unavailable

    def __lt__(self, other: Slot) -> bool:
        return (self.number, self.rank) < (other.number, other.rank)

    def __repr__(self) -> str:
        return f"slot {self.number} of {self.instance}"


@dataclass(slots=True, eq=False)
class StateShapeKey:
    """A batching key that includes the shapes of a sequence's states, which are known only when a batch is formed."""

    key: Hashable
    sequence: RequestSequence
    is_start: bool

    def _now(self) -> Hashable:
        return self.key, None if self.is_start else self.sequence.shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateShapeKey) and self._now() == other._now()

    def __hash__(self) -> int:
        return hash(self.key)


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
