"""Sequences of one model: whose request belongs where, and when a sequence is over.

Decided here: what a correlation id means (it is live from its START until its END is queued), and every way a sequence
ends: END, idleness, a timeout in the backlog, a request that was withdrawn, an instance that died. Which of the
requests in slots make a batch is decided in direct.py and oldest.py, who has a slot in seats.py, who may begin a
sequence in lines.py, what is told of one that ended early in endings.py. State is nobody's business here.

Tickets of sequences are bound to an instance, so this queue is asked for each free instance (`take_for`), and what it
gave for one is back before it is asked for that one again. `take` is for whoever refuses them all.

Always true after every call (see `check`):
  (1) a live sequence is in exactly one place: a slot, or the backlog;
  (2) the requests of a sequence leave in the order they came, all for the instance of its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowserve.errors import Cancelled, FlowserveError, InstanceDied, Unavailable
from flowserve.scheduling.deadlines import Deadlines
from flowserve.scheduling.endings import Endings
from flowserve.scheduling.lines import Line, SequenceId, SequencePolicy, Shaped, Slot, check_first
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.seats import Seats

# What a request says of itself: its correlation id (0 or "" for none), START, END.
Identify = Callable[[Flow], tuple[SequenceId, bool, bool]]


class Sequences:
    """What both strategies share. They decide in `take_for`, and hear through `_leads` and `_left` who is first."""

    may_wait = False
    may_expire = True

    def __init__(self, policy: SequencePolicy, identify: Identify) -> None:
        self.policy = policy
        self._identify = identify
        self._seats = Seats(policy.slots, self._seated)
        self._slots = self._seats.slots
        self._free_instances: Collection[Any] = ()
        self._live: dict[SequenceId, Line] = {}  # those that may get another request without START
        self._lines: dict[Line, None] = {}  # every line that waits, runs or is live
        # In a slot: when it may be idle. In the backlog: when its patience ends.
        self._due: Deadlines[Line] = Deadlines()
        self._ran: dict[Any, list[Line]] = {}  # the lines of what each instance was given last
        self._again: dict[Any, deque[list[Ticket]]] = {}  # parts of batches that raised
        self._endings = Endings()
        self.on_quiet: list[Callable[[], None]] = []  # called once, when no sequence is live any more
        self._count = 0
        self._now_ns = 0  # the latest moment that was heard of

    def serve(self, instances: Sequence[Any], free: Collection[Any]) -> None:
        """These run what is taken; `free` always holds those of them that run nothing. Called once, before anything."""
        self._free_instances = free
        self._seats.serve(instances)
        for instance in instances:
            self._ran[instance] = []
            self._again[instance] = deque()

    # ------------------------------------------------------------------ coming

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set. Raises Invalid where it belongs to no sequence."""
        self._now_ns = ticket.queued_ns
        sequence_id, is_start, is_end = self._identify(ticket.flow)
        line = self._live.get(sequence_id)
        if line is None or ticket.rows != 1:
            line = self._begin(ticket, sequence_id, is_start=is_start)
        ticket.line = line
        if self.policy.has_shapes:
            ticket.key = Shaped(ticket.key, line, is_start=is_start)
        waiting = line.waiting
        waiting.append(ticket)
        self._count += 1
        line.last_ns = ticket.queued_ns
        if is_end:
            line.is_closed = True
            self._not_live(line)
        if line.slot is None:
            self._be_patient(line, ticket)
        elif len(waiting) == 1:
            self._leads(line)

    def _begin(self, ticket: Ticket, sequence_id: SequenceId, *, is_start: bool) -> Line:
        check_first(self.policy, ticket, sequence_id, is_start=is_start, ending=self._endings.why(sequence_id))
        line = self._live[sequence_id] = Line(sequence_id)
        self._lines[line] = None
        self._endings.forget(sequence_id)
        self._seats.take(line)
        return line

    def _seated(self, line: Line) -> None:
        line.last_ns = self._now_ns
        self._due.discard(line)
        self._due.add(line, self._now_ns + self.policy.idle_ns)
        if line.waiting:
            self._leads(line)

    def _be_patient(self, line: Line, ticket: Ticket) -> None:
        """A request waits in the backlog. The smallest timeout of a sequence is that of all of it."""
        timeout_ns = ticket.flow.timeout_ns
        if timeout_ns:
            at_ns = ticket.queued_ns + timeout_ns
            if line.patience_ns is None or at_ns < line.patience_ns:
                line.patience_ns = at_ns
                self._due.discard(line)
                self._due.add(line, at_ns)

    # ------------------------------------------------------------------ going

    def take_for(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        """The next batch for an instance that is free, or None."""
        self._now_ns = now_ns
        self._is_back(instance)
        again = self._again[instance]
        while again:
            tickets = [ticket for ticket in again.popleft() if not ticket.flow.done]
            for ticket in tickets:
                ticket.line.is_running = True
                self._ran[instance].append(ticket.line)
            if tickets:
                return tickets
        return self._batch(instance, now_ns)

    def _is_back(self, instance: Any) -> None:
        """What it was given last has run."""
        ran = self._ran[instance]
        for line in ran:
            line.is_running = False
            line.last_ns = self._now_ns
            if line.is_closed and not line.waiting:
                self._lines.pop(line, None)
        ran.clear()

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch raised; its instance is to run these parts of it, each by itself, before anything else."""
        self._again[instance].extendleft(reversed([part for part in parts if part]))

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        raise NotImplementedError

    def _pop(self, line: Line) -> Ticket:
        """Take the first request of a line into the batch for its instance. Whose last one that is, is out."""
        ticket = line.waiting.popleft()
        self._count -= 1
        slot = line.slot
        assert slot is not None
        line.is_running = True
        self._ran[slot.instance].append(line)
        if line.is_closed and not line.waiting:
            self._due.discard(line)
            self._seats.leave(line)
        return ticket

    def _leads(self, line: Line) -> None:
        """A line in a slot has a new first request."""

    def _left(self, line: Line) -> None:
        """The waiting requests of a line in a slot are about to be dropped."""

    def take(self, now_ns: int) -> list[Ticket] | None:
        """All that waits, for whoever refuses it; every sequence is over. None: nobody waits."""
        everything = [ticket for line in self._lines for ticket in line.waiting]
        everything += [ticket for parts in self._again.values() for part in parts for ticket in part]
        for parts in self._again.values():
            parts.clear()
        for line in [*self._lines]:
            self._drop_waiting(line)
        self._seats.backlog.clear()  # first, or they would move in one after the other
        for line in [*self._lines]:
            self._end(line, "")
        return everything or None

    # ------------------------------------------------------------------ endings

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Requests whose sequence ended before they ran, each with the reason; they are given out once."""
        return self._endings.orphans()

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        """End what is idle, and what has waited too long in the backlog. Those who waited become `orphans`."""
        self._now_ns = now_ns
        for line in self._due.due(now_ns):
            if line in self._due:  # somebody before it has just left it a slot
                continue
            if line.slot is None:
                text = f"timeout of the corresponding sequence has been expired: no slot of model '{self.policy.model}'"
                self._end(line, "it waited too long for a slot", Unavailable(f"{text} became free in time"))
                continue
            if line.waiting or line.is_running:
                line.last_ns = now_ns
            if line.last_ns + self.policy.idle_ns > now_ns:
                self._due.add(line, line.last_ns + self.policy.idle_ns)
                continue
            idle_s = self.policy.idle_ns / 1_000_000_000
            self._end(line, f"it was idle for {idle_s:g} s (max_sequence_idle_microseconds) and has ended")
        return ()

    def withdraw(self, flow: Flow) -> int:
        """Drop the tickets of a flow that will not be answered. What comes after them in their sequence would miss
        them, so the sequence is over.
        """
        left = self._withdrawn_again()
        for line in self._lines:
            left += [ticket for ticket in line.waiting if ticket.flow.done]
        why = "a request of it was cancelled, and with it the sequence"
        for line in dict.fromkeys(ticket.line for ticket in left):
            self._end(line, why, Cancelled(f"sequence {line.id}: {why}"))
        return len(left) + self._endings.withdraw()

    def _withdrawn_again(self) -> list[Ticket]:
        """Take those who will not be answered out of what is to be tried again."""
        left: list[Ticket] = []
        for parts in self._again.values():
            for part in parts:
                left += [ticket for ticket in part if ticket.flow.done]
                part[:] = [ticket for ticket in part if not ticket.flow.done]
        return left

    def lost(self, instance: Any) -> None:
        """An instance that runs nothing is not there any more, nor is what it knew of its sequences."""
        self._is_back(instance)
        lines = self._seats.lost(instance)
        why = f"the instance of model '{self.policy.model}' that had it has ended; begin again with START"
        error = InstanceDied(f"sequence lost: {why}")
        for part in self._again[instance]:
            self._endings.orphaned(part, error)
        self._again[instance].clear()
        for line in lines:
            self._end(line, why, error)

    def found(self, instance: Any) -> None:
        """It is there again, with all its slots free."""
        self._seats.found(instance)

    def _end(self, line: Line, why: str, error: FlowserveError | None = None) -> None:
        """A sequence is over before its END came through. `error` is what its waiting requests are told."""
        if error is not None:
            self._endings.orphaned(line.waiting, error)
        self._drop_waiting(line)
        if self._live.get(line.id) is line:
            self._not_live(line)
            if why:
                self._endings.remember(line.id, why)
        line.is_closed = True
        self._due.discard(line)
        self._lines.pop(line, None)
        self._seats.leave(line)

    def _not_live(self, line: Line) -> None:
        del self._live[line.id]
        if self.on_quiet and not self._live:
            told, self.on_quiet = self.on_quiet, []
            for tell in told:
                tell()

    def _drop_waiting(self, line: Line) -> None:
        if line.waiting:
            if line.slot is not None:
                self._left(line)
            self._count -= len(line.waiting)
            line.waiting.clear()

    # ------------------------------------------------------------------ asking

    @property
    def live(self) -> int:
        """How many sequences have begun and may go on."""
        return len(self._live)

    @property
    def seated(self) -> int:
        """How many slots are taken."""
        return self._seats.taken

    def slots_of(self, instance: Any) -> Sequence[Slot]:
        """The slots of an instance, by number."""
        return self._slots[instance]

    def is_live(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._live

    def id_of(self, flow: Flow) -> SequenceId:
        """The sequence that a request is of; 0 or "" for none."""
        return self._identify(flow)[0]

    def can_take(self, flow: Flow, kept: Collection[Any]) -> bool:
        """Whether a request could ever run if these batches kept their instances for ever. One that begins a sequence
        may be given a slot in any instance, so also in one of theirs.
        """
        line = self._live.get(self.id_of(flow))
        if line is None or line.slot is None:
            return not kept
        return all(batch.instance is not line.slot.instance for batch in kept)

    def deadline(self) -> int | None:
        return None

    def expiry(self) -> int | None:
        return self._due.soonest()

    def __len__(self) -> int:
        return self._count + sum(len(part) for parts in self._again.values() for part in parts)

    def check(self) -> None:
        self._seats.check()
        backlog = self._seats.backlog
        for line in self._live.values():
            assert not line.is_closed
            assert (line.slot is None) == (line in backlog), f"(1) {line} is nowhere, or in two places"
        assert all(line.waiting for line in backlog), "(1) somebody waits in the backlog for nothing"
        for line in self._lines:
            assert not any(ticket.flow.done for ticket in line.waiting), "a ticket of an answered flow still waits"
            assert all(ticket.line is line for ticket in line.waiting), "a ticket stands in a wrong line"
            assert line.waiting or line.is_running or not line.is_closed, f"{line} is over and not forgotten"
        assert self._count == sum(len(line.waiting) for line in self._lines), "a ticket is lost or counted twice"
        self._endings.check()
