"""What must be true of a simulated server (sim.py): looked at when a batch starts, after every turn, and in the end.

Decided here: every promise that can be seen from outside, and what is remembered of a history to be able to tell. What
happens, and when, is decided by those that build upon it.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from flowserve.graph.plan import NO_SLOT
from flowserve.graph.types import ModelKey
from flowserve.scheduling.affinity import NOWHERE
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Resource
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.sim_world import MOVES, Handle, SimModel, SimRequest, World, is_omitted, residence

Step = tuple[int, int]  # the number of a request, and the index of a node of its plan


class Laws:
    """A world, what has happened in it, and whether that was right. The first broken promise raises AssertionError."""

    dispatcher: Dispatcher

    def __init__(self, random: Random, world: World) -> None:
        self._random = random
        self.world = world
        self.time = 0
        self.log: list[tuple[object, ...]] = []
        self.queues: dict[ModelKey, ModelQueue] = {}
        self.flows: dict[int, Flow] = {}  # submitted, neither answered nor given up
        self.over: set[int] = set()  # answered or given up
        self.batch_rows: dict[ModelKey, list[int]] = {}  # what each model ran, in order
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.stayed = self.moved = 0  # steps run where their tensors lay (or lay nowhere), and elsewhere
        self._most = 0  # that were in flight at once
        self._busy: set[tuple[ModelKey, int]] = set()
        self._away: set[tuple[ModelKey, int]] = set()
        self._finished: dict[int, set[int]] = {}  # request -> nodes whose step is done
        self._excused: set[int] = set()  # refused, or stood in a batch that an impure model failed as a whole
        self._begun: set[Step] = set()  # those that were started
        self._running: set[Step] = set()
        self._again: set[Step] = set()  # those that wait to be tried again
        self._has_ended = False  # and starts nothing new
        self._lines: dict[ModelKey, Line] = {}  # of models that keep order
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()

    def _at(self, time: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._tie), act))

    def _note(self, *what: object) -> None:
        self.log.append((self.time, *what))

    # ------------------------------------------------------------------------------------------------ as it happens

    def _check_batch(self, batch: Batch, model: SimModel) -> None:
        tickets = batch.tickets
        assert tickets, "an empty batch"
        assert (model.key, batch.instance) not in self._busy | self._away, "an instance was given two batches"
        assert batch.instance not in batch.queue.free, "an instance that runs is free"
        assert all(ticket.node.model == model.key for ticket in tickets), "a ticket came to the wrong model"
        assert len({ticket.key for ticket in tickets}) == 1, "one key per batch"
        assert len({id(ticket) for ticket in tickets}) == len(tickets), "a ticket stands twice in its batch"
        if model.policy is None:
            assert len(tickets) == 1, "the default scheduler runs one by one"
        else:
            assert sum(ticket.rows or 1 for ticket in tickets) <= model.max_batch_size, "a batch above its limit"
        for ticket in tickets:
            assert not ticket.flow.done, "a step of a flow that is over was started"
            assert ticket.node.index not in self._finished[number_of(ticket)], "a step ran twice"
            assert step_of(ticket) not in self._running, "a step runs twice at a time"
            assert not self._has_ended or step_of(ticket) in self._begun, "a step was started after the end"

    def _check_device(self, batch: Batch, model: SimModel) -> None:
        """A batch leaves the device its tensors lie on only where that device is busy, and after waiting as long as the
        copies of its tensors take.
        """
        first = [ticket for ticket in batch.tickets if step_of(ticket) not in self._begun]
        homes = [home_of(ticket, model.devices) for ticket in first]
        if not homes or {home for home, _ in homes} <= {NOWHERE, model.devices[batch.instance]}:
            self.stayed += len(homes)
            return
        self.moved += len(homes)
        assert len({home for home, _ in homes}) == 1, "tickets of two devices in one batch"
        free = {model.devices[instance] for instance in batch.queue.free}
        assert homes[0][0] not in free, "a batch left its device, and that had an instance free"
        waited_ns = self.time - first[0].queued_ns
        assert waited_ns >= sum(MOVES.cost_ns(nbytes) for _, nbytes in homes), "moved too early"

    # --------------------------------------------------------------------------------------------- after every turn

    def check(self) -> None:
        """Every promise of DESIGN section 8 that scheduling keeps, after a turn."""
        self.dispatcher.check()
        assert self.dispatcher.in_flight == len(self.flows)
        for line in self._lines.values():
            for ticket in line.go_on():
                self._finished[number_of(ticket)].add(ticket.node.index)
        for key, queue in self.queues.items():
            self._check_queue(key, queue)
        for flow in self.flows.values():
            flow.check()
            self._check_counts(flow)
            self._check_tensors(flow)

    def _check_queue(self, key: ModelKey, queue: ModelQueue) -> None:
        busy = [instance for model, instance in self._busy if model == key]
        away = [instance for model, instance in self._away if model == key]
        assert sorted([*queue.free, *busy, *away]) == list(queue.instances), f"{key}: an instance is lost or doubled"
        expiry = queue.batcher.expiry()
        assert expiry is None or expiry > self.time, f"{key}: somebody waits whose time is over"
        if queue.free and len(queue.batcher) and not self._is_short(queue):
            deadline = queue.batcher.deadline()
            assert deadline is not None, f"{key}: somebody waits beside a free instance, and for nothing"
            assert deadline > self.time, f"{key}: somebody waits beside a free instance, and too long"

    def _is_short(self, queue: ModelQueue) -> bool:
        """Whether the rate limiter may leave a free instance of this queue idle. On the way: nobody holds too much."""
        if not isinstance(self.dispatcher, LimitedDispatcher):
            return False
        counts, held = self.most_needed(), Counter[Resource]()
        for key, instance in self._busy:
            held.update(self.world.by_key[key].needs[instance].amounts)
        assert all(count <= counts[resource] for resource, count in held.items()), "a resource is over-granted"
        needs = [self.world.by_key[queue.key].needs[instance].amounts for instance in queue.free]
        lacks = [any(held[resource] + count > counts[resource] for resource, count in one.items()) for one in needs]
        return all(lacks) or bool(self.dispatcher.waited_for())

    def most_needed(self) -> Counter[Resource]:
        """How many copies of each resource there are: the most that anybody needs."""
        counts = Counter[Resource]()
        for model in self.world.models:
            for needs in model.needs:
                counts |= Counter(needs.amounts)
        return counts

    def _check_counts(self, flow: Flow) -> None:
        """What a flow counts is what was done: whom each step waits for, who still reads each tensor, what is open."""
        plan, finished = flow.plan, self._finished[flow.request.number]
        if not (flow.open or finished):
            return  # nothing of it has been looked at yet
        made_by = {slot: node.index for node in plan.nodes for slot in node.outputs if slot != NO_SLOT}
        needed = [node for node in plan.nodes if node.writes]
        for node in needed:
            waits_for = [slot for slot in node.distinct_inputs if slot in made_by and made_by[slot] not in finished]
            assert flow.missing[node.index] == len(waits_for), f"step {node.name} waits for others than those not done"
        for slot, consumers in enumerate(plan.consumers):
            left = sum(index not in finished for index in consumers) + plan.output_slots.count(slot)
            assert flow.readers[slot] == left, f"slot {slot} is read by others than those not done"
        open_ = sum(not flow.missing[node.index] and node.index not in finished for node in needed)
        assert flow.open == open_, "steps are open that nobody runs, or run that are not open"

    def _check_tensors(self, flow: Flow) -> None:
        """A tensor is held exactly from its writing to the end of its last reader."""
        plan, finished = flow.plan, self._finished[flow.request.number]
        written = {slot for index in finished for slot in plan.nodes[index].outputs}
        for slot, handle in enumerate(flow.tensors):
            has_readers = slot in plan.output_slots or any(index not in finished for index in plan.consumers[slot])
            is_there = slot < len(plan.graph.inputs) or slot in written
            is_unread = plan.readers[slot] == 0  # an input that only unwanted steps read stays with its request
            assert handle is None or has_readers or is_unread, f"slot {slot} is held for nobody"
            if is_there and has_readers and handle is None:
                self._check_left_out(flow, slot)

    def _check_left_out(self, flow: Flow, slot: int) -> None:
        request: SimRequest = flow.request
        if slot < len(request.widths):
            assert request.widths[slot] is None, f"input {slot} was released before its last reader was done"
            return
        node = next(node for node in flow.plan.nodes if slot in node.outputs)
        model = self.world.by_key[node.model]
        assert is_omitted(model, request, node.outputs.index(slot)), f"slot {slot} was released before its last reader"

    # --------------------------------------------------------------------------------------------------- in the end

    def check_end(self) -> None:
        """When nothing can happen any more, everything is home."""
        assert self.over == {request.number for request in self.world.requests}, "a request was never answered"
        assert not self._busy, "an instance never came home"
        assert not self._running, "a step is never over"
        if isinstance(self.dispatcher, LimitedDispatcher):
            assert self.dispatcher.limiter.counts() == self.most_needed()
            assert not self.dispatcher.limiter.held(), "a resource never came home"
        assert not any(self.dispatcher.waiting().values()), "a ticket of nobody still waits"
        assert not len(self.handles), f"{len(self.handles)} tensors are held after everything is over"


class Line:
    """What a model that keeps order ran, in the order it was started, as far as it may not be handed on yet. `back`:
    which of it has come back, and whether it went well.
    """

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.back: dict[Ticket, bool] = {}

    def go_on(self) -> list[Ticket]:
        """Those whose turn it is and that went well; who has gone is waited for by nobody."""
        gone = []
        while self.tickets and (self.tickets[0] in self.back or self.tickets[0].flow.done):
            ticket = self.tickets.pop(0)
            if self.back.pop(ticket, False) and not ticket.flow.done:
                gone.append(ticket)
        self.back = {ticket: went for ticket, went in self.back.items() if not ticket.flow.done}
        return gone

    def check_answered(self, flow: Flow) -> None:
        """Nobody of a plain model is answered while an earlier one is not."""
        if flow.plan.graph.is_ensemble:
            return
        for n, ticket in enumerate(self.tickets):
            if ticket.flow is flow:
                for earlier in self.tickets[:n]:
                    is_ensemble = earlier.flow.plan.graph.is_ensemble
                    assert earlier.flow.done or (is_ensemble and earlier in self.back), "answered before its turn"


def home_of(ticket: Ticket, devices: Sequence[int]) -> tuple[int, int]:
    """The device with most bytes of a step's inputs, and how many these are. Nowhere, where that is none of `devices`:
    the step must take them elsewhere.
    """
    sizes: dict[int, int] = {}
    for slot in {slot for slot in ticket.node.inputs if slot != NO_SLOT}:
        handle = ticket.flow.tensors[slot]
        if handle is not None:
            device, nbytes = residence(handle)
            sizes[device] = sizes.get(device, 0) + nbytes
    sizes.pop(NOWHERE, None)
    home, nbytes = max(sizes.items(), key=lambda pair: (pair[1], -pair[0]), default=(NOWHERE, 0))
    return (home, nbytes) if home in devices else (NOWHERE, 0)


def number_of(ticket: Ticket) -> int:
    request: SimRequest = ticket.flow.request
    return request.number


def step_of(ticket: Ticket) -> Step:
    return number_of(ticket), ticket.node.index
