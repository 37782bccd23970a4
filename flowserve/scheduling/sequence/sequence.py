"""The sequences of one model, the slots of all its instances, and the backlog of sequences without a slot.

Decides which requests may begin a sequence, which slot a sequence gets (the lowest free number of all instances) and
which sequence of the backlog gets a freed slot (the oldest). Only the sequence that holds a slot can free it.
batcher.py decides when a sequence begins and ends.

Always true after every call (see `SlotAllocator.check`):
  (1) a slot holds at most one sequence, and a sequence in a slot refers to that slot;
  (2) the backlog is empty while a slot of an available instance is free;
  (3) every slot of an available instance that holds no sequence is in the free list once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
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


class SlotAllocator:
    """`count` slots per instance. `on_assigned` is called with each sequence that gets a slot, immediately or later."""

    def __init__(self, count: int, on_assigned: Callable[[RequestSequence], None]) -> None:
        self.slots: dict[Any, list[Slot]] = {}  # of each instance, by number
        self.backlog: OrderedDict[RequestSequence, None] = OrderedDict()
        self._count = count
        self._on_assigned = on_assigned
        self._free: list[Slot] = []  # a heap

    def serve(self, instances: Sequence[Any]) -> None:
        """Set the instances. Called once, before any other method."""
        for rank, instance in enumerate(instances):
            self.slots[instance] = [Slot(instance, number, rank) for number in range(self._count)]
        self._free = sorted(slot for slots in self.slots.values() for slot in slots)

    def take(self, sequence: RequestSequence) -> None:
        """Assign a slot to a sequence, or add it to the backlog."""
        if self._free:
            self._assign(sequence, heappop(self._free))
        else:
            self.backlog[sequence] = None

    def leave(self, sequence: RequestSequence) -> None:
        """Remove a sequence from its slot or from the backlog. No effect if it is in neither."""
        slot = sequence.slot
        if slot is None:
            self.backlog.pop(sequence, None)
        elif slot.sequence is sequence:
            sequence.slot = slot.sequence = None
            if not slot.is_away:
                self._offer(slot)

    def lost(self, instance: Any) -> list[RequestSequence]:
        """An instance became unavailable. Returns the sequences in its slots."""
        for slot in self.slots[instance]:
            slot.is_away = True
        self._free = sorted(slot for slot in self._free if not slot.is_away)
        return [slot.sequence for slot in self.slots[instance] if slot.sequence is not None]

    def found(self, instance: Any) -> None:
        """The instance is available again, with all its slots free."""
        for slot in self.slots[instance]:
            slot.is_away = False
        for slot in self.slots[instance]:
            self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        if not self.backlog:
            heappush(self._free, slot)
            return
        sequence, _ = self.backlog.popitem(last=False)
        self._assign(sequence, slot)

    def _assign(self, sequence: RequestSequence, slot: Slot) -> None:
        slot.sequence = sequence
        sequence.slot = slot
        self._on_assigned(sequence)

    def check(self) -> None:
        slots = [slot for slots in self.slots.values() for slot in slots]
        for slot in slots:
            assert slot.sequence is None or slot.sequence.slot is slot, "(1) a sequence does not refer to its slot"
        assert all(sequence.slot is None for sequence in self.backlog), "(1) a sequence with a slot is in the backlog"
        free = sorted(slot for slot in slots if slot.sequence is None and not slot.is_away)
        assert not (free and self.backlog), "(2) a sequence waits although a slot is free"
        assert free == sorted(self._free), "(3) a slot is lost, or in the free list twice"


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
