"""A whole server without a loop, a clock or a tensor: the real scheduling machines, simulated instances, a `time`.

Decided here: what happens in which order in a world of `strategies.py`, and what is looked at after every step. `step`
jumps to the next instant at which anything can happen, applies what happens then, pumps once (a turn of the loop), and
checks every promise that can be seen from outside. One seed gives one history: `log` holds it.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random

from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.plan import NO_SLOT
from flowserve.graph.types import ModelKey
from flowserve.scheduling.affinity import NOWHERE
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Limiter, Resource
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.strategies import (
    FIXED,
    MOVES,
    NOTHING,
    SimModel,
    SimRequest,
    World,
    draw_world,
    is_omitted,
    residence,
)

STEPS_MAX = 100_000  # a history longer than this has stopped getting anywhere


class Handle:
    """What stands for a tensor: facts, what it holds, and the block it lies in. `block` is the run that made it, and
    `device` where that was.
    """

    __slots__ = ("__weakref__", "block", "content", "device", "start", "stop", "width")

    def __init__(
        self, content: int, width: int, start: int, stop: int, block: object = None, device: int = NOWHERE
    ) -> None:
        self.content = content
        self.width = width
        self.start = start
        self.stop = stop
        self.block = block
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,) if self.stop < 0 else (self.stop - self.start, self.width)


class Sim:
    """`Sim(seed).run()` lives through one world to its end. The first broken promise raises AssertionError."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        self._random = Random(seed)
        self.world = world or draw_world(self._random)
        self.time = 0
        self.log: list[tuple[object, ...]] = []
        if self.world.overtaken_max is None:
            self.dispatcher = Dispatcher(self._run, self._answered, self._refused)
        else:
            self.dispatcher = LimitedDispatcher(
                self._run, self._answered, Limiter(), self.world.overtaken_max, self._refused
            )
        self.queues: dict[ModelKey, ModelQueue] = {}
        self.flows: dict[int, Flow] = {}  # submitted, neither answered nor given up
        self.over: set[int] = set()  # answered or given up
        self.batch_rows: dict[ModelKey, list[int]] = {}  # what each model ran, in order
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.stayed = self.moved = 0  # steps run where their tensors lay (or lay nowhere), and elsewhere
        self._busy: set[tuple[ModelKey, int]] = set()
        self._finished: dict[int, set[int]] = {}  # request -> nodes whose step is done
        self._excused: set[int] = set()  # refused, or stood in a batch that an impure model failed as a whole
        self._begun: set[tuple[int, int]] = set()  # request and node of steps that were started
        self._lines: dict[ModelKey, Line] = {}  # of models that keep order
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()
        self._runs = count()
        for model in self.world.models:
            self._add_model(model)
        for request in self.world.requests:
            if request.follows is None:
                self._at(request.arrives_ns, partial(self._arrive, request))

    # ------------------------------------------------------------------------------------------------- what happens

    def run(self) -> Sim:
        """Until nothing can happen any more; then everything must be home."""
        for _ in range(STEPS_MAX):
            if not self.step():
                self.check_end()
                return self
        raise AssertionError(f"no end after {STEPS_MAX} steps, at {self.time} ns")

    def step(self) -> bool:
        """Jump to the next instant at which something can happen and let it. False: nothing ever will."""
        deadline = self.dispatcher.next_deadline()
        instants = [self._agenda[0][0]] if self._agenda else []
        if deadline is not None:
            assert deadline > self.time, "a deadline that is over was slept through"
            instants.append(deadline)
        if not instants:
            return False
        self.time = min(instants)
        while self._agenda and self._agenda[0][0] == self.time:
            heapq.heappop(self._agenda)[2]()
        self.turn()
        return True

    def turn(self) -> None:
        """One turn of the loop: what happened is looked at together. Then every promise is."""
        self.dispatcher.wake(self.time)
        self.dispatcher.pump(self.time)
        self.check()

    def _at(self, time: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._tie), act))

    def _add_model(self, model: SimModel) -> None:
        queue = ModelQueue(
            model.key,
            model.batcher(),
            range(model.instances),
            is_pure=model.is_pure,
            needs=model.needs,
            keeps_order=model.keeps_order,
        )
        if model.keeps_order:
            self._lines[model.key] = Line()
        self.queues[model.key] = queue
        self.batch_rows[model.key] = []
        self.dispatcher.add(queue)

    def _arrive(self, request: SimRequest) -> None:
        plan = self.world.plans[request.number]
        batching = self.world.graphs[request.graph].max_batch_size > 0
        stop = request.rows if batching else -1
        inputs = [
            None if width is None else self._handle(request.content(i), width, 0, stop, request)
            for i, width in enumerate(request.widths)
        ]
        route = [self.queues[node.model] for node in plan.nodes]
        patience = request.priority, request.timeout_ns
        flow = Flow(plan, route, inputs, self.time, request.number, request, None, *patience)
        self.flows[request.number] = flow
        self._finished[request.number] = set()
        self._note("arrives", request.number)
        self.dispatcher.submit(flow)
        if request.leaves_after_ns is not None:
            self._at(self.time + request.leaves_after_ns, partial(self._leave, request))

    def _leave(self, request: SimRequest) -> None:
        flow = self.flows.get(request.number)
        if flow is not None:
            self._note("leaves", request.number)
            self.dispatcher.cancel(flow)
            self.dispatcher.cancel(flow)  # twice is harmless
            self._over(request)

    def _run(self, batch: Batch) -> None:
        model = self.world.by_key[batch.queue.key]
        self._check_batch(batch, model)
        if model.devices:
            self._check_device(batch, model)
        self._busy.add((model.key, batch.instance))
        self.batch_rows[model.key].append(batch.rows)
        self._note("runs", model.key.name, batch.instance, *map(_number, batch.tickets))
        self._begin(batch, model)
        outcome = self._compute(batch, model)
        ns = self._random.randint(model.shortest_ns, model.longest_ns)
        if ns:
            self._at(self.time + ns, partial(self._return, batch, model, outcome))
        else:
            self._return(batch, model, outcome)

    def _begin(self, batch: Batch, model: SimModel) -> None:
        """Whoever leaves its queue now had the patience to wait for it. Halves of a batch that raised have left it."""
        first = [ticket for ticket in batch.tickets if (_number(ticket), ticket.node.index) not in self._begun]
        self._begun.update((_number(ticket), ticket.node.index) for ticket in first)
        if model.keeps_order:
            self._lines[model.key].tickets += first
        for ticket in first:
            patience_ns = model.patience_ns(ticket.flow.request)
            assert patience_ns is None or self.time < ticket.queued_ns + patience_ns, "served after its deadline"

    def _refused(self, queue: ModelQueue, ticket: Ticket, now_ns: int) -> None:
        model, request = self.world.by_key[queue.key], ticket.flow.request
        patience_ns = model.patience_ns(request)
        if patience_ns is not None and now_ns >= ticket.queued_ns + patience_ns:
            self._note("expires", request.number)
        else:
            assert 0 < model.level_policy(request).max_size <= len(queue.batcher), "refused, and there is room"
            self._note("finds no room", request.number)
        self._excused.add(request.number)

    def _compute(self, batch: Batch, model: SimModel) -> list[list[Handle | None]] | None:
        """The outputs, or None where the batch raises. Reads the inputs now: they may be gone when it returns."""
        block = next(self._runs)
        device = model.devices[batch.instance] if model.devices else NOWHERE
        outputs: list[list[Handle | None]] = [[] for _ in model.outputs]
        start = 0
        for ticket in batch.tickets:
            request: SimRequest = ticket.flow.request
            found = [ticket.flow.tensors[slot] if slot != NO_SLOT else None for slot in ticket.node.inputs]
            contents = tuple(NOTHING if handle is None else handle.content for handle in found)
            width = next((handle.width for handle in found if handle is not None), FIXED)
            stop = start + ticket.rows if model.max_batch_size else -1
            for j, spec in enumerate(model.outputs):
                wide = FIXED if spec.dims == (FIXED,) else width
                handle = self._handle(model.content(j, contents), wide, start if stop >= 0 else 0, stop, block, device)
                outputs[j].append(None if is_omitted(model, request, j) else handle)
            start += ticket.rows
        if any(model.key in ticket.flow.request.poison for ticket in batch.tickets):
            return None
        return outputs

    def _return(self, batch: Batch, model: SimModel, outputs: list[list[Handle | None]] | None) -> None:
        self._busy.remove((model.key, batch.instance))
        numbers = [_number(ticket) for ticket in batch.tickets]
        if outputs is None:
            again = model.is_pure and len(numbers) > 1 and any(number in self.flows for number in numbers)
            self._note("raises", model.key.name, *numbers)
            if not again and len(numbers) > 1:
                self._excused.update(numbers)
            if not again and model.keeps_order:
                self._lines[model.key].back.update(dict.fromkeys(batch.tickets, False))
            assert self.dispatcher.batch_failed(batch, ModelFailed("poison")) == again
            return
        self._note("returns", model.key.name, *numbers)
        errors: dict[int, FlowserveError] = {}
        for m, ticket in enumerate(batch.tickets):
            if model.key in ticket.flow.request.faults:
                errors[m] = ModelFailed("a fault of its own")
            elif not ticket.flow.done and not model.keeps_order:
                self._finished[_number(ticket)].add(ticket.node.index)
        if model.keeps_order:
            self._lines[model.key].back.update((ticket, m not in errors) for m, ticket in enumerate(batch.tickets))
        self.dispatcher.batch_done(batch, outputs, errors, self.time)

    def _answered(self, flow: Flow) -> None:
        request: SimRequest = flow.request
        assert self.flows.get(request.number) is flow, f"request {request.number} was answered twice, or after it left"
        right = self.world.right_answer(request)
        if flow.error is None:
            assert flow.open == 0, "answered while a step was still going"
            held = [flow.tensors[slot] if slot != NO_SLOT else None for slot in flow.plan.output_slots]
            assert [None if handle is None else handle.content for handle in held] == right, (
                f"request {request.number} got somebody else's answer, or none"
            )
        else:
            assert right is None or request.number in self._excused, (
                f"request {request.number} has no fault and failed: {flow.error}"
            )
        for line in self._lines.values():
            line.check_answered(flow)
        self._note("is answered", request.number, type(flow.error).__name__)
        self._over(request)

    def _over(self, request: SimRequest) -> None:
        del self.flows[request.number]
        self.over.add(request.number)
        for following in self.world.requests:
            if following.follows == request.number:
                self._at(self.time, partial(self._arrive, following))

    def _handle(self, content: int, width: int, start: int, stop: int, block: object, device: int = NOWHERE) -> Handle:
        handle = Handle(content, width, start, stop, block, device)
        self.handles.add(handle)
        return handle

    def _note(self, *what: object) -> None:
        self.log.append((self.time, *what))

    # --------------------------------------------------------------------------------------------- what is looked at

    def check(self) -> None:
        """Every promise of DESIGN section 8 that scheduling keeps, after a turn."""
        self.dispatcher.check()
        assert self.dispatcher.in_flight == len(self.flows)
        for line in self._lines.values():
            for ticket in line.go_on():
                self._finished[_number(ticket)].add(ticket.node.index)
        for key, queue in self.queues.items():
            busy = {instance for model, instance in self._busy if model == key}
            assert sorted([*queue.free, *busy]) == list(queue.instances), f"{key}: an instance is lost or doubled"
            expiry = queue.batcher.expiry()
            assert expiry is None or expiry > self.time, f"{key}: somebody waits whose time is over"
            if queue.free and len(queue.batcher) and not self._is_short(queue):
                deadline = queue.batcher.deadline()
                assert deadline is not None, f"{key}: somebody waits beside a free instance, and for nothing"
                assert deadline > self.time, f"{key}: somebody waits beside a free instance, and too long"
        for flow in self.flows.values():
            flow.check()
            self._check_tensors(flow)

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

    def _check_batch(self, batch: Batch, model: SimModel) -> None:
        tickets = batch.tickets
        assert tickets, "an empty batch"
        assert (model.key, batch.instance) not in self._busy, "an instance was given two batches"
        assert all(ticket.node.model == model.key for ticket in tickets), "a ticket came to the wrong model"
        assert len({ticket.key for ticket in tickets}) == 1, "one key per batch"
        assert len({id(ticket) for ticket in tickets}) == len(tickets), "a ticket stands twice in its batch"
        if model.policy is None:
            assert len(tickets) == 1, "the default scheduler runs one by one"
        else:
            assert sum(ticket.rows or 1 for ticket in tickets) <= model.max_batch_size, "a batch above its limit"
        for ticket in tickets:
            assert not ticket.flow.done, "a step of a flow that is over was started"
            assert ticket.node.index not in self._finished[_number(ticket)], "a step ran twice"

    def _check_device(self, batch: Batch, model: SimModel) -> None:
        """A batch leaves the device its tensors lie on only where that device is busy, and after waiting as long as the
        copies of its tensors take.
        """
        first = [ticket for ticket in batch.tickets if (_number(ticket), ticket.node.index) not in self._begun]
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

    def check_end(self) -> None:
        """When nothing can happen any more, everything is home."""
        assert self.over == {request.number for request in self.world.requests}, "a request was never answered"
        assert not self._busy, "an instance never came home"
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


def _number(ticket: Ticket) -> int:
    request: SimRequest = ticket.flow.request
    return request.number
