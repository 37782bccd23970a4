"""The sequence batcher of one model: assigns requests to sequences, and ends sequences.

Decides when a correlation id is live (from its START until its END is queued), and when a sequence ends: END, idle
timeout, timeout in the backlog, a cancelled request, a dead instance. Also decides the errors of requests of a sequence
that ended early, waiting or late: each gets one, with the reason. strategies.py decides which requests in slots form a
batch, slots.py which sequence gets a slot, sequence.py which request may begin a sequence. Does not know states. Called
by the scheduler.

Tickets of sequences are bound to an instance: the scheduler calls `take` for each free instance, and not again before
the batch that it returned is complete.

Always true after every call (see `check`):
  (1) a live sequence is in exactly one place: a slot, or the backlog;
  (2) the requests of a sequence leave in the order of arrival, all for the instance of its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from flowserve.errors import Cancelled, FlowserveError, InstanceDied, Unavailable
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import Deadlines, Tickets
from flowserve.scheduling.sequence.sequence import (
    RequestSequence,
    SequenceId,
    SequencePolicy,
    StateShapeKey,
    check_first,
)
from flowserve.scheduling.sequence.slots import SlotAllocator

# The number of ended sequences whose reason is kept for the error of a late request.
ENDINGS_MAX: Final = 1024

# Returns the sequence parameters of a request: its correlation id (0 or "" for none), START, END.
Identify = Callable[[Frame], tuple[SequenceId, bool, bool]]


class Sequences:
    """The base of both strategies. A strategy implements `_batch`; `_head_added` and `_head_removed` notify it of
    changes of the first waiting request of a sequence in a slot.
    """

    may_wait = False
    may_expire = True
    joins_max = 0
    is_shared = False

    def __init__(self, policy: SequencePolicy, identify: Identify) -> None:
        self.policy = policy
        self._identify = identify
        self._allocator = SlotAllocator(policy.slots, self._assigned)
        self.slots = self._allocator.slots  # of each instance, by number
        self._free_instances: Collection[Any] = ()
        self._live: dict[SequenceId, RequestSequence] = {}  # sequences that accept another request without START
        self._sequences: dict[RequestSequence, None] = {}  # every sequence that waits, runs or is live
        # In a slot: the end of its idle timeout. In the backlog: the end of its timeout.
        self._due: Deadlines[RequestSequence] = Deadlines()
        self._last_batch: dict[Any, list[RequestSequence]] = {}  # the sequences in the last batch of each instance
        self._retries: dict[Any, deque[list[Ticket]]] = {}  # parts of failed batches
        self._orphans: dict[Ticket, FlowserveError] = {}  # requests of ended sequences, each with its error
        self._tickets = Tickets()  # tickets that wait for a batch or for a retry, and the orphans
        self._endings: dict[SequenceId, str] = {}  # the reasons of the last `ENDINGS_MAX` sequences that ended early
        self.on_quiet: list[Callable[[], None]] = []  # called once, when no sequence is live any more
        self._now_ns = 0  # the time of the last call

    def serve(self, instances: Sequence[Any], free: Collection[Any]) -> None:
        """Set the instances; `free` is a live view of those without a batch. Called once, before any other method."""
        self._free_instances = free
        self._allocator.serve(instances)
        for instance in instances:
            self._last_batch[instance] = []
            self._retries[instance] = deque()

    # ------------------------------------------------------------------ queueing

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set. Raises Invalid if it belongs to no sequence."""
        self._now_ns = ticket.queued_ns
        sequence_id, is_start, is_end = self._identify(ticket.frame)
        sequence = self._live.get(sequence_id)
        if sequence is None or ticket.rows != 1:
            sequence = self._begin(ticket, sequence_id, is_start=is_start)
        ticket.sequence = sequence
        if self.policy.has_shapes:
            ticket.key = StateShapeKey(ticket.key, sequence, is_start=is_start)
        waiting = sequence.waiting
        waiting.append(ticket)
        self._tickets.append(ticket)
        sequence.last_ns = ticket.queued_ns
        if is_end:
            sequence.is_closed = True
            self._not_live(sequence)
        if sequence.slot is None:
            self._set_backlog_timeout(sequence, ticket)
        elif len(waiting) == 1:
            self._head_added(sequence)

    def _begin(self, ticket: Ticket, sequence_id: SequenceId, *, is_start: bool) -> RequestSequence:
        check_first(self.policy, ticket, sequence_id, is_start=is_start, ending=self._endings.get(sequence_id, ""))
        sequence = self._live[sequence_id] = RequestSequence(sequence_id)
        self._sequences[sequence] = None
        self._endings.pop(sequence_id, None)
        self._allocator.take(sequence)
        return sequence

    def _assigned(self, sequence: RequestSequence) -> None:
        sequence.last_ns = self._now_ns
        self._due.discard(sequence)
        self._due.add(sequence, self._now_ns + self.policy.idle_ns)
        if sequence.waiting:
            self._head_added(sequence)

    def _set_backlog_timeout(self, sequence: RequestSequence, ticket: Ticket) -> None:
        """A request waits in the backlog. The smallest timeout of its requests is the timeout of the sequence."""
        timeout_ns = ticket.frame.record.timeout_ns
        if timeout_ns:
            at_ns = ticket.queued_ns + timeout_ns
            if sequence.timeout_at_ns is None or at_ns < sequence.timeout_at_ns:
                sequence.timeout_at_ns = at_ns
                self._due.discard(sequence)
                self._due.add(sequence, at_ns)

    # ------------------------------------------------------------------ batches

    def take(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        self._now_ns = now_ns
        self._is_back(instance)
        again = self._retries[instance]
        while again:
            tickets = [ticket for ticket in again.popleft() if not ticket.frame.record.done]
            for ticket in tickets:
                self._tickets.discard(ticket)
                ticket.sequence.is_running = True
                self._last_batch[instance].append(ticket.sequence)
            if tickets:
                return tickets
        return self._batch(instance, now_ns)

    def _is_back(self, instance: Any) -> None:
        """The last batch of this instance is complete."""
        ran = self._last_batch[instance]
        for sequence in ran:
            sequence.is_running = False
            sequence.last_ns = self._now_ns
            if sequence.is_closed and not sequence.waiting:
                self._sequences.pop(sequence, None)
        ran.clear()

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch failed; its instance runs these parts of it next, each as a batch."""
        self._retries[instance].extendleft(reversed([part for part in parts if part]))
        for part in parts:
            for ticket in part:
                if not ticket.frame.record.done:
                    self._tickets.append(ticket)

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        raise NotImplementedError

    def _pop(self, sequence: RequestSequence) -> Ticket:
        """Move the first request of a sequence into a batch. A sequence whose last request left frees its slot."""
        ticket = sequence.waiting.popleft()
        self._tickets.discard(ticket)
        slot = sequence.slot
        assert slot is not None
        sequence.is_running = True
        self._last_batch[slot.instance].append(sequence)
        if sequence.is_closed and not sequence.waiting:
            self._due.discard(sequence)
            self._allocator.leave(sequence)
        return ticket

    def _head_added(self, sequence: RequestSequence) -> None:
        """A sequence in a slot has a new first request."""

    def _head_removed(self, sequence: RequestSequence) -> None:
        """The first request of a sequence in a slot is about to be removed or replaced."""

    def clear(self) -> list[Ticket]:
        """End every sequence and return all waiting tickets, to be refused."""
        everything = [ticket for sequence in self._sequences for ticket in sequence.waiting]
        everything += [ticket for parts in self._retries.values() for part in parts for ticket in part]
        for parts in self._retries.values():
            for part in parts:
                for ticket in part:
                    self._tickets.discard(ticket)
            parts.clear()
        for sequence in [*self._sequences]:
            self._drop_waiting(sequence)
        self._allocator.backlog.clear()  # before the slots are freed, which would assign them to the backlog
        for sequence in [*self._sequences]:
            self._end(sequence, "")
        return everything

    # ------------------------------------------------------------------ ends of sequences

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Requests whose sequence ended before they ran, each with the reason; each is returned once."""
        if not self._orphans:
            return ()
        orphans, self._orphans = self._orphans, {}
        for ticket in orphans:
            self._tickets.discard(ticket)
        return [*orphans.items()]

    def _orphan(self, tickets: Iterable[Ticket], error: FlowserveError) -> None:
        self._orphans.update((ticket, error) for ticket in tickets if not ticket.frame.record.done)

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        """End the idle sequences, and those whose timeout in the backlog passed. Their requests become `orphans`."""
        self._now_ns = now_ns
        for sequence in self._due.due(now_ns):
            if sequence in self._due:  # it got the slot of a sequence that this loop ended, and a new deadline
                continue
            if sequence.slot is None:
                text = f"timeout of the corresponding sequence has been expired: no slot of model '{self.policy.model}'"
                self._end(sequence, "it waited too long for a slot", Unavailable(f"{text} became free in time"))
                continue
            if sequence.waiting or sequence.is_running:
                sequence.last_ns = now_ns
            if sequence.last_ns + self.policy.idle_ns > now_ns:
                self._due.add(sequence, sequence.last_ns + self.policy.idle_ns)
                continue
            idle_s = self.policy.idle_ns / 1_000_000_000
            self._end(sequence, f"it was idle for {idle_s:g} s (max_sequence_idle_microseconds) and has ended")
        return ()

    def withdraw(self, *frames: Frame) -> int:
        """Remove the tickets of a request that is over, and end their sequences: the state of a later request would
        lack them. Tickets of a part that waits for a retry are left out when it runs.
        """
        gone = [ticket for frame in frames for ticket in self._tickets.withdraw(frame)]
        ended = dict.fromkeys(ticket.sequence for ticket in gone if self._orphans.pop(ticket, None) is None)
        reason = "a request of it was cancelled, and with it the sequence"
        for sequence in ended:
            self._end(sequence, reason, Cancelled(f"sequence {sequence.id}: {reason}"))
        return len(gone)

    def lost(self, instance: Any) -> None:
        """An instance without a batch became unavailable; the states of its sequences are lost."""
        self._is_back(instance)
        sequences = self._allocator.lost(instance)
        reason = f"the instance of model '{self.policy.model}' that had it has ended; begin again with START"
        error = InstanceDied(f"sequence lost: {reason}")
        for part in self._retries[instance]:
            self._orphan(part, error)
        self._retries[instance].clear()
        for sequence in sequences:
            self._end(sequence, reason, error)

    def found(self, instance: Any) -> None:
        """The instance is available again, with all its slots free."""
        self._allocator.found(instance)

    def _end(self, sequence: RequestSequence, reason: str, error: FlowserveError | None = None) -> None:
        """End a sequence before its END ran. Its waiting requests fail with `error`."""
        if error is not None:
            self._orphan(sequence.waiting, error)
        self._drop_waiting(sequence)
        if self._live.get(sequence.id) is sequence:
            self._not_live(sequence)
            if reason:
                self._endings[sequence.id] = reason
                if len(self._endings) > ENDINGS_MAX:
                    del self._endings[next(iter(self._endings))]
        sequence.is_closed = True
        self._due.discard(sequence)
        self._sequences.pop(sequence, None)
        self._allocator.leave(sequence)

    def _not_live(self, sequence: RequestSequence) -> None:
        del self._live[sequence.id]
        if self.on_quiet and not self._live:
            callbacks, self.on_quiet = self.on_quiet, []
            for callback in callbacks:
                callback()

    def _drop_waiting(self, sequence: RequestSequence) -> None:
        if sequence.waiting:
            if sequence.slot is not None:
                self._head_removed(sequence)
            for ticket in sequence.waiting:
                if ticket not in self._orphans:
                    self._tickets.discard(ticket)
            sequence.waiting.clear()

    # ------------------------------------------------------------------ queries

    @property
    def live(self) -> int:
        """The number of live sequences."""
        return len(self._live)

    def is_live(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._live

    def id_of(self, frame: Frame) -> SequenceId:
        """The correlation id of a request; 0 or "" for none."""
        return self._identify(frame)[0]

    def can_take(self, frame: Frame, kept: Collection[Any]) -> bool:
        """Whether a request could ever run if these batches never freed their instances. A request that begins a
        sequence may get a slot in any instance, including theirs.
        """
        sequence = self._live.get(self.id_of(frame))
        if sequence is None or sequence.slot is None:
            return not kept
        return all(batch.instance is not sequence.slot.instance for batch in kept)

    def deadline(self) -> int | None:
        return None

    def expiry(self) -> int | None:
        return self._due.soonest()

    def __len__(self) -> int:
        return len(self._tickets) - len(self._orphans)

    def check(self) -> None:
        self._allocator.check()
        backlog = self._allocator.backlog
        for sequence in self._live.values():
            assert not sequence.is_closed
            assert (sequence.slot is None) == (sequence in backlog), f"(1) {sequence} is in no place, or in two"
        assert all(sequence.waiting for sequence in backlog), "(1) a sequence in the backlog has no request"
        for sequence in self._sequences:
            assert not any(ticket.frame.record.done for ticket in sequence.waiting), (
                "a ticket of a finished request still waits"
            )
            assert all(ticket.sequence is sequence for ticket in sequence.waiting), "a ticket is in the wrong sequence"
            assert sequence.waiting or sequence.is_running or not sequence.is_closed, f"{sequence} was not removed"
        self._tickets.check()
        waiting = [id(ticket) for sequence in self._sequences for ticket in sequence.waiting]
        parts = [part for parts in self._retries.values() for part in parts]
        waiting += [id(ticket) for part in parts for ticket in part if not ticket.frame.record.done]
        assert sorted(waiting) == sorted(map(id, self._tickets)), "a ticket is lost or doubled"
        assert not self._orphans, "an orphaned request was not refused"
