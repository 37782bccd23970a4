"""A whole server without a loop, a clock or a tensor: the real scheduling machines, simulated instances, a `time`.

Decided here: what happens in which order in a world of `strategies.py`. `step` jumps to the next instant at which
anything can happen, applies what happens then, pumps once (a turn of the loop), and checks every promise that can be
seen from outside (sim_laws.py). What becomes of relays is decided in sim_relays.py. One seed gives one history: `log`
holds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import partial
from itertools import count
from random import Random

from flowserve.errors import FlowserveError, ModelFailed, Unavailable
from flowserve.graph.plan import NO_SLOT
from flowserve.scheduling.affinity import NOWHERE
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import DynamicBatcher
from flowserve.scheduling.crowd import Crowd
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Limiter
from flowserve.scheduling.relays import RelayingDispatcher
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.sim_laws import Line, number_of, step_of
from flowserve.testing.sim_relays import Relays
from flowserve.testing.sim_world import FIXED, NOTHING, Handle, SimModel, SimRequest, World, is_omitted
from flowserve.testing.strategies import draw_world

STEPS_MAX = 100_000  # a history longer than this has stopped getting anywhere


class Sim(Relays):
    """`Sim(seed).run()` lives through one world to its end. The first broken promise raises AssertionError."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        random = Random(seed)
        super().__init__(random, world or draw_world(random))
        self.dispatcher: Dispatcher
        if self.world.overtaken_max is None:
            self.dispatcher = RelayingDispatcher(self._run, self._answered, self._refused, relay=self._relay)
        else:
            self.dispatcher = LimitedDispatcher(
                self._run, self._answered, Limiter(), self.world.overtaken_max, self._refused
            )
        self._runs = count()
        for model in self.world.models:
            self._add_model(model)
        self._routes = [tuple(self.queues[node.model] for node in graph.nodes) for graph in self.world.graphs]
        for request in self.world.requests:
            if request.follows is None:
                self._at(request.arrives_ns, partial(self._arrive, request))
        if self.world.ends_ns is not None:
            self._at(self.world.ends_ns, self._end)

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

    def _add_model(self, model: SimModel) -> None:
        queue = ModelQueue(
            model.key,
            model.batcher(),
            range(model.instances),
            is_pure=model.is_pure,
            needs=model.needs,
            keeps_order=model.keeps_order,
        )
        queue.passes_on, queue.receives = model.passes_on, model.receives
        if model.least and isinstance(queue.batcher, DynamicBatcher) and queue.batcher.takes_all:
            queue.batcher.crowd = Crowd(lambda: self.dispatcher.begun, lambda: True, model.least)
        if model.keeps_order:
            self._lines[model.key] = Line()
        self.queues[model.key] = queue
        self.batch_rows[model.key] = []
        self.dispatcher.add(queue)

    def _arrive(self, request: SimRequest) -> None:
        if self._has_ended:
            self._note("comes too late", request.number)
            self._follow(request)
            return
        plan = self.world.plans[request.number]
        batching = self.world.graphs[request.graph].max_batch_size > 0
        stop = request.rows if batching else -1
        inputs = [
            None if width is None else self._handle(request.content(i), width, 0, stop, request)
            for i, width in enumerate(request.widths)
        ]
        route = self._routes[request.graph]
        patience = request.priority, request.timeout_ns
        flow = Flow(plan, route, inputs, self.time, request.number, request, None, *patience)
        self.flows[request.number] = flow
        self._finished[request.number] = set()
        self._note("arrives", request.number)
        if not self._goes_alone(flow):
            self.dispatcher.submit(flow)
        self._most = max(self._most, self.dispatcher.in_flight)
        if request.leaves_after_ns is not None:
            self._at(self.time + request.leaves_after_ns, partial(self._leave, request))

    def _end(self) -> None:
        self._note("the server ends")
        self._has_ended = True
        self.dispatcher.fail_all("the server ends")

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
        self._running.update(map(step_of, batch.tickets))
        self.batch_rows[model.key].append(batch.rows)
        self._note("runs", model.key.name, batch.instance, *map(number_of, batch.tickets))
        self._begin(batch, model)
        outcome = self._compute(batch, model)
        ns = self._random.randint(model.shortest_ns, model.longest_ns)
        if ns:
            self._at(self.time + ns, partial(self._return, batch, model, outcome))
        else:
            self._return(batch, model, outcome)

    def _begin(self, batch: Batch, model: SimModel) -> None:
        """Whoever leaves its queue now had the patience to wait for it, and half of all with it at most where some
        are left to the next batch. Halves of a batch that raised have left it.
        """
        first = [ticket for ticket in batch.tickets if step_of(ticket) not in self._begun]
        if first and model.least and model.takes_all and batch.tickets[0].flow.plan.is_apart:
            assert len(first) <= max(model.least, -(-self._most // 2)), "nobody was left to the next batch"
        self._begun.update(map(step_of, first))
        self._again.difference_update(map(step_of, batch.tickets))
        if model.keeps_order:
            self._lines[model.key].tickets += first
        for ticket in first:
            patience_ns = model.patience_ns(ticket.flow.request)
            assert patience_ns is None or self.time < ticket.queued_ns + patience_ns, "served after its deadline"

    def _refused(self, queue: ModelQueue, ticket: Ticket, error: FlowserveError) -> None:
        if self._has_ended:
            return
        model, request = self.world.by_key[queue.key], ticket.flow.request
        patience_ns = model.patience_ns(request)
        if patience_ns is not None and self.time >= ticket.queued_ns + patience_ns:
            self._note("expires", request.number)
        else:
            assert 0 < model.level_policy(request).max_size <= len(queue.batcher), "refused, and there is room"
            self._note("finds no room", request.number)
        self._excused.add(request.number)

    def _compute(self, batch: Batch, model: SimModel) -> list[list[Handle | None]] | None:
        """The outputs, or None where the batch raises. Reads the inputs now: they may be gone when it returns."""
        return self._make(batch, model, {})

    def _make(
        self, batch: Batch, model: SimModel, made: Mapping[tuple[int, int], Handle | None]
    ) -> list[list[Handle | None]] | None:
        block = next(self._runs)
        device = model.devices[batch.instance] if model.devices else NOWHERE
        outputs: list[list[Handle | None]] = [[] for _ in model.outputs]
        start = 0
        for m, ticket in enumerate(batch.tickets):
            request: SimRequest = ticket.flow.request
            found = [_read(ticket, m, slot, made) for slot in ticket.node.inputs]
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
        self._running.difference_update(map(step_of, batch.tickets))
        numbers = [number_of(ticket) for ticket in batch.tickets]
        if outputs is None:
            again = model.is_pure and len(numbers) > 1 and any(number in self.flows for number in numbers)
            self._note("raises", model.key.name, *numbers)
            if not again and len(numbers) > 1:
                self._excused.update(numbers)
            if not again and model.keeps_order:
                self._lines[model.key].back.update(dict.fromkeys(batch.tickets, False))
            if again:
                self._try_again(batch.tickets)
            assert self.dispatcher.batch_failed(batch, ModelFailed("poison")) == again
            return
        self._note("returns", model.key.name, *numbers)
        errors: dict[int, FlowserveError] = {}
        for m, ticket in enumerate(batch.tickets):
            if model.key in ticket.flow.request.faults:
                errors[m] = ModelFailed("a fault of its own")
            elif not ticket.flow.done and not model.keeps_order:
                self._finished[number_of(ticket)].add(ticket.node.index)
        if model.keeps_order:
            self._lines[model.key].back.update((ticket, m not in errors) for m, ticket in enumerate(batch.tickets))
        self.dispatcher.batch_done(batch, outputs, errors, self.time)

    def _answered(self, flow: Flow) -> None:
        request: SimRequest = flow.request
        assert self.flows.get(request.number) is flow, f"request {request.number} was answered twice, or after it left"
        right = self.world.right_answer(request)
        was_ended = self._has_ended and isinstance(flow.error, Unavailable)
        if flow.error is None:
            assert flow.open == 0, "answered while a step was still going"
            held = [flow.tensors[slot] if slot != NO_SLOT else None for slot in flow.plan.output_slots]
            assert [None if handle is None else handle.content for handle in held] == right, (
                f"request {request.number} got somebody else's answer, or none"
            )
        else:
            assert right is None or was_ended or request.number in self._excused, (
                f"request {request.number} has no fault and failed: {flow.error}"
            )
        for line in () if was_ended else self._lines.values():  # who is told that all ends waits for nobody
            line.check_answered(flow)
        self._note("is answered", request.number, type(flow.error).__name__)
        self._over(request)

    def _over(self, request: SimRequest) -> None:
        del self.flows[request.number]
        self._follow(request)

    def _follow(self, request: SimRequest) -> None:
        """It is over; whoever waited for that comes."""
        self.over.add(request.number)
        for following in self.world.requests:
            if following.follows == request.number:
                self._at(self.time, partial(self._arrive, following))

    def _handle(self, content: int, width: int, start: int, stop: int, block: object, device: int = NOWHERE) -> Handle:
        handle = Handle(content, width, start, stop, block, device)
        self.handles.add(handle)
        return handle


def _read(ticket: Ticket, m: int, slot: int, made: Mapping[tuple[int, int], Handle | None]) -> Handle | None:
    """What the m-th member reads: of the relay that it is in, or of its flow."""
    if (m, slot) in made:
        return made[m, slot]
    found: Handle | None = ticket.flow.tensors[slot] if slot != NO_SLOT else None
    return found
