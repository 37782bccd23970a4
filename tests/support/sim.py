"""A simulated server without event loop, clock or tensors: the real scheduler, simulated instances, simulated time.

`Sim` runs one random world of strategies.py. `step` advances to the next instant with an event, applies the events of
that instant, runs one step of the engine, and checks every property that is visible from outside the scheduler. One
seed always gives the same history, which is in `log`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Self

from flowserve.errors import DeadlineExceeded, FlowserveError, InstanceDied, Invalid, ModelFailed, Unavailable
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import ModelKey
from flowserve.scheduling.affinity import NO_DEVICE
from flowserve.scheduling.batch import Batch, Recall, TicketRefused
from flowserve.scheduling.frames.frame import Frame, Ticket, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.rate_limit.limiter import Limiter, Resource
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX
from flowserve.scheduling.route import RECALL_NS, Route
from flowserve.scheduling.scheduler import Scheduler
from flowserve.simulation.agenda import Agenda
from flowserve.simulation.deployment import BatchResults
from tests.support import strategies
from tests.support.strategies import Handle, SimModel, SimRequest, World

_POISON = "poison of "
STEPS_MAX = 100_000  # a longer history is a livelock
Step = tuple[int, int]  # the number of a request, and the index of a node of its plan
StepKey = tuple[object, ...]  # of steps with the same outcome


class Sim(Agenda):
    """`Sim(seed).run()` runs one world to its end. The first violated property raises AssertionError."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        super().__init__()
        random = Random(seed)
        self._random = random
        self.world = world or strategies.draw_world(random)
        self.log: list[tuple[object, ...]] = []
        self.queues: dict[ModelKey, ModelQueue] = {}
        self.frames: dict[int, Frame] = {}  # submitted requests that are not over
        self.over: set[int] = set()  # answered or cancelled
        self.batch_rows: dict[ModelKey, list[int]] = {}  # the batches of each model, in order
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.stayed = self.moved = 0  # steps run on the device of their tensors (or with none), and on another
        self._busy: set[tuple[ModelKey, int]] = set()
        self._away: set[tuple[ModelKey, int]] = set()
        self._finished: dict[int, set[int]] = {}  # request -> nodes whose step is done
        self._excused: set[int] = set()  # refused, or in a batch that an impure model failed as a whole
        self._begun: set[Step] = set()  # started steps
        self._running: set[Step] = set()
        self._tried: Counter[Step] = Counter()  # executions of a step, without those on routes
        self._again: dict[Step, int] = {}  # steps that wait for a retry, and since when
        self._has_ended = False  # the server stops: no new batches
        self._ordered: dict[ModelKey, OrderedModel] = {}  # models that keep order
        overtaken_max = self.world.overtaken_max
        limiter = None if overtaken_max is None else Limiter()
        self.scheduler = Scheduler(limiter, OVERTAKEN_MAX if overtaken_max is None else overtaken_max)
        self.routed: list[int] = []  # the number of requests of each batch on a route
        # The response cache of models that have one: by the key of a step, (content, width) of each output.
        self._cached: dict[StepKey, list[tuple[int, int] | None]] = {}
        self._keys: dict[Step, StepKey] = {}  # keys of steps that were looked up and not found
        self._failed: set[StepKey] = set()  # keys with a failed step: steps that waited for it run by themselves
        self._runs = count()
        self._runs_of: dict[Batch, RouteRun] = {}
        self._inline: list[Callable[[], None]] = []  # batches of duration 0 complete after all batches were started
        for model in self.world.models:
            self._add_model(model)
        self._routes = [tuple(self.queues[node.model] for node in graph.nodes) for graph in self.world.graphs]
        for request in self.world.requests:
            if request.follows is None:
                self.at(request.arrives_ns, partial(self._arrive, request))
        if self.world.ends_ns is not None:
            self.at(self.world.ends_ns, self._end)

    # ------------------------------------------------------------------------------------------------- events

    def run(self) -> Self:
        """Run until no event is left, then check the final state."""
        for _ in range(STEPS_MAX):
            if not self.step():
                self.check_end()
                return self
        raise AssertionError(f"no end after {STEPS_MAX} steps, at {self.now_ns} ns")

    def step(self) -> bool:
        """Advance the time to the next event or deadline and apply its events. False: there is none."""
        deadline = self.scheduler.next_deadline()
        assert deadline is None or deadline > self.now_ns, "a deadline passed unnoticed"
        is_event = self.advance(deadline)
        if is_event:
            self.turn()
        return is_event

    def turn(self) -> None:
        """One step of the engine, for all events of this instant. Then all properties are checked."""
        while (decisions := self.scheduler.schedule(self.now_ns)) is not None:
            for notice in decisions.notices:
                if isinstance(notice, TicketRefused):
                    self._refused(notice)
                elif isinstance(notice, Recall):
                    self._recall(notice.batch)
            for frame in decisions.finished:
                self._answered(frame)
            for batch in decisions.batches:
                self._run(batch)
            for queue, ticket in decisions.lookups:
                self._look_up(queue, ticket)
            inline, self._inline = self._inline, []
            for complete in inline:
                complete()
        self.check()

    def _add_model(self, model: SimModel) -> None:
        groups: dict[int, object] = {}
        if model.is_routed and self.world.overtaken_max is None:
            groups = {i: i if self.world.is_divided else "workers" for i in range(model.instances)}
        queue = ModelQueue(
            model.key,
            model.batcher(),
            range(model.instances),
            is_pure=model.is_pure,
            needs=model.needs,
            keeps_order=model.keeps_order,
            route_groups=groups,
            cache=self._cached if model.is_cached else None,
        )
        if model.keeps_order:
            self._ordered[model.key] = OrderedModel()
        self.queues[model.key] = queue
        self.batch_rows[model.key] = []
        self.scheduler.models.add(queue)

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
        own = request.priority, request.timeout_ns
        frame = request_frame(plan, route, inputs, self.now_ns, request.number, request, None, *own)
        self.frames[request.number] = frame
        self._finished[request.number] = set()
        self._note("arrives", request.number)
        self.scheduler.submit(frame)
        if request.due_after_ns is not None:
            self.scheduler.due.add(frame, self.now_ns + request.due_after_ns)
        if request.leaves_after_ns is not None:
            self.at(self.now_ns + request.leaves_after_ns, partial(self._leave, request))

    def _end(self) -> None:
        self._note("the server ends")
        self._has_ended = True
        self.scheduler.fail_all("the server ends")

    def _leave(self, request: SimRequest) -> None:
        frame = self.frames.get(request.number)
        if frame is not None and not frame.record.done:  # else its result is under way
            self._note("leaves", request.number)
            self.scheduler.cancel(frame)
            self.scheduler.cancel(frame)  # a repeated call has no effect
            self._over(request)

    def _run(self, batch: Batch) -> None:
        if batch.route is not None:
            self._run_route(batch)
            return
        model = self.world.by_key[batch.queue.key]
        self._check_batch(batch, model)
        if model.devices:
            self._check_device(batch, model)
        self._busy.add((model.key, batch.instance))
        self._running.update(map(step_of, batch.tickets))
        self._tried.update(map(step_of, batch.tickets))
        self._check_single_flight(model)
        self.batch_rows[model.key].append(batch.rows)
        self._note("runs", model.key.name, batch.instance, *map(number_of, batch.tickets))
        self._begin(batch, model)
        outcome = self._make(batch, model, {})  # inputs are read now: they may be released when it returns
        ns = self._random.randint(model.shortest_ns, model.longest_ns)
        if ns:
            self.at(self.now_ns + ns, partial(self._return, batch, model, outcome))
        else:
            self._inline.append(partial(self._return, batch, model, outcome))

    def _begin(self, batch: Batch, model: SimModel) -> None:
        """These tickets leave their queue before their timeout; retries of a failed batch left it before."""
        first = [ticket for ticket in batch.tickets if step_of(ticket) not in self._begun]
        self._begun.update(map(step_of, first))
        for ticket in batch.tickets:
            self._again.pop(step_of(ticket), None)
        if model.keeps_order:
            self._ordered[model.key].tickets += first
        for ticket in first:
            timeout_ns = model.effective_timeout_ns(ticket.frame.request)
            assert timeout_ns is None or self.now_ns < ticket.queued_ns + timeout_ns, "served after its deadline"

    def _refused(self, notice: TicketRefused) -> None:
        if self._has_ended:
            return
        queue, ticket = notice.queue, notice.ticket
        model, request = self.world.by_key[queue.key], ticket.frame.request
        timeout_ns = model.effective_timeout_ns(request)
        if timeout_ns is not None and self.now_ns >= ticket.queued_ns + timeout_ns:
            self._note("expires", request.number)
        else:
            assert model.level_policy(request).max_size > 0, "refused by a queue without a size limit"
            self._note("finds no room", request.number)
        self._excused.add(request.number)
        self._failed.update({self._keys[step_of(ticket)]} if step_of(ticket) in self._keys else ())

    def _make(
        self, batch: Batch, model: SimModel, made: Mapping[tuple[int, int], Handle | None]
    ) -> list[list[Handle | None]] | None:
        block = next(self._runs)
        device = model.devices[batch.instance] if model.devices else NO_DEVICE
        outputs: list[list[Handle | None]] = [[] for _ in model.outputs]
        start = 0
        for m, ticket in enumerate(batch.tickets):
            request: SimRequest = ticket.frame.request
            found = [  # outputs of an earlier stage, or tensors of its request
                made[m, slot] if (m, slot) in made else ticket.tensors[slot] if slot != NO_SLOT else None
                for slot in ticket.node.inputs
            ]
            contents = tuple(strategies.NOTHING if handle is None else handle.content for handle in found)
            width = next((handle.width for handle in found if handle is not None), strategies.FIXED)
            stop = start + ticket.rows if model.max_batch_size else -1
            for j, spec in enumerate(model.outputs):
                wide = strategies.FIXED if spec.dims == (strategies.FIXED,) else width
                handle = self._handle(model.content(j, contents), wide, start if stop >= 0 else 0, stop, block, device)
                outputs[j].append(None if strategies.is_omitted(model, request, j) else handle)
            start += ticket.rows
        if any(model.key in ticket.frame.request.poison for ticket in batch.tickets):
            return None
        return outputs

    def _return(self, batch: Batch, model: SimModel, outputs: list[list[Handle | None]] | None) -> None:
        self._busy.remove((model.key, batch.instance))
        self._running.difference_update(map(step_of, batch.tickets))
        numbers = [number_of(ticket) for ticket in batch.tickets]
        if outputs is None:
            self._failed.update(self._keys[step] for step in map(step_of, batch.tickets) if step in self._keys)
            again = model.is_pure and len(numbers) > 1 and not all(ticket.frame.record.done for ticket in batch.tickets)
            self._note("raises", model.key.name, *numbers)
            if not again and len(numbers) > 1:
                self._excused.update(numbers)
            if not again and model.keeps_order:
                self._ordered[model.key].back.update(dict.fromkeys(batch.tickets, False))
            if again:
                self._try_again(batch.tickets)
            is_retried = self.scheduler.complete(batch, [], self._raised(batch, model), self.now_ns)
            assert is_retried == again
            return
        self._note("returns", model.key.name, *numbers)
        errors: dict[int, FlowserveError] = {}
        for m, ticket in enumerate(batch.tickets):
            if model.key in ticket.frame.request.faults:
                errors[m] = ModelFailed("a fault of its own")
                self._failed.update({self._keys[step_of(ticket)]} if step_of(ticket) in self._keys else ())
            elif not ticket.frame.record.done and not model.keeps_order:
                self._finished[number_of(ticket)].add(ticket.node.index)
        if model.keeps_order:
            self._ordered[model.key].back.update((ticket, m not in errors) for m, ticket in enumerate(batch.tickets))
        for m, ticket in enumerate(batch.tickets):
            if m not in errors and step_of(ticket) in self._keys:
                self._keep(batch.queue, ticket, [column[m] for column in outputs])
        self.scheduler.complete(batch, [BatchResults(outputs, errors)], None, self.now_ns)

    def _raised(self, batch: Batch, model: SimModel) -> FlowserveError:
        """The error of a batch that raised. Its text has the numbers of the requests to blame, as a model's exception
        has their values; a backend hides it if it knows that several clients would get it.
        """
        blamed = [number_of(ticket) for ticket in batch.tickets if model.key in ticket.frame.request.poison]
        text = f"{_POISON}{' '.join(map(str, blamed))}"
        if model.number % 2:
            return Invalid(text)
        return ModelFailed(text if model.is_pure or len(batch.tickets) == 1 else "one of several")

    # ------------------------------------------------------------------------------------------------ response cache

    def _look_up(self, queue: ModelQueue, ticket: Ticket) -> None:
        if ticket.frame.record.done:
            return
        key = self._key_of(ticket)
        made = self._cached.get(key) if queue.may_answer else None
        if made is not None:
            self._answer_step(ticket, made)
        else:
            self._keys[step_of(ticket)] = key
            self.scheduler.run_step(ticket, key, self.now_ns)
            if queue.flights is not None and ticket in queue.flights.waiting:
                self._note("waits for an equal step", step_of(ticket))

    def _key_of(self, ticket: Ticket) -> StepKey:
        """The facts on which the outcome of a step depends, its faults included."""
        request, model = ticket.frame.request, ticket.node.model
        held = [ticket.tensors[slot] if slot != NO_SLOT else None for slot in ticket.node.inputs]
        inputs = [None if handle is None else (handle.content, handle.width) for handle in held]
        fates = model in request.poison, model in request.faults, model in request.omits
        return model, ticket.rows, ticket.node.wanted, *inputs, *fates

    def _keep(self, queue: ModelQueue, ticket: Ticket, outputs: Sequence[Handle | None]) -> None:
        """Cache the outputs of a step, unless there is no room, and answer the steps that waited for it."""
        made = [None if handle is None else (handle.content, handle.width) for handle in outputs]
        key = self._keys.pop(step_of(ticket))
        if self._random.random() < 0.8:  # else there is no room
            self._cached[key] = made
        assert queue.flights is not None
        for follower in queue.flights.land(ticket):
            if (
                follower.frame.record.done
            ):  # another step of its request was answered before, and the next one was refused
                continue
            if self._random.random() < 0.9:
                self._answer_step(follower, made)
            else:  # no memory for a copy
                self._failed.add(key)
                self.scheduler.run_step(follower, None, self.now_ns)

    def _answer_step(self, ticket: Ticket, made: Sequence[tuple[int, int] | None]) -> None:
        request: SimRequest = ticket.frame.request
        model = self.world.by_key[ticket.node.model]
        assert not ticket.frame.record.done, "a step of a request that is over is answered"
        self._note("is known", model.key.name, request.number)
        self._keys.pop(step_of(ticket), None)
        stop = ticket.rows if model.max_batch_size else -1
        block = object()  # separate memory, as that of a request
        outputs = [[None if one is None else self._handle(*one, 0, stop, block)] for one in made]
        if model.keeps_order:
            self._ordered[model.key].tickets.append(ticket)
            self._ordered[model.key].back[ticket] = True
        else:
            self._finished[request.number].add(ticket.node.index)
        self.scheduler.answer_step(ticket, outputs, None, self.now_ns)

    def _check_single_flight(self, model: SimModel) -> None:
        """Check that of equal steps one runs at a time."""
        if not model.is_cached or model.keeps_order:
            return
        live = [self._keys[step] for step in self._running if step in self._keys and step[0] in self.frames]
        keys = [key for key in live if key[0] == model.key and key not in self._failed]
        assert len(set(keys)) == len(keys), f"equal steps of {model.key} run at the same time"

    def _try_again(self, tickets: Iterable[Ticket]) -> None:
        self._again.update((step_of(ticket), self.now_ns) for ticket in tickets if not ticket.frame.record.done)

    # -------------------------------------------------------------------------------------------------------- routes

    def _run_route(self, batch: Batch) -> None:
        """A batch takes its route: determine its last stage and the time of its return."""
        route = batch.route
        assert route is not None
        self._check_route(batch, route)
        self.routed.append(len(batch.tickets))
        self._begin(batch, self.world.by_key[batch.queue.key])
        for i in range(len(route)):
            stage = batch.stage(i)
            self._busy.add((stage.queue.key, stage.instance))
            self._running.update(map(step_of, stage.tickets))
        run = RouteRun(batch, route)
        self._runs_of[batch] = run
        self._pass(run)
        for queue in route.queues[: run.reached]:
            self.batch_rows[queue.key].append(batch.rows)
        self._note("takes a route", *[queue.key.name for queue in route.queues], *map(number_of, batch.tickets))
        models = [self.world.by_key[queue.key] for queue in route.queues]
        ns = sum(self._random.randint(model.shortest_ns, model.longest_ns) for model in models[: run.reached])
        if self._random.random() < 0.1:
            i = self._random.randrange(len(models))
            self.at(self.now_ns + self._random.randint(0, ns), partial(self._worker_ends, run, i))
        elif self._random.random() < 0.5:
            ns += RECALL_NS + self._random.randint(0, 100)  # a slow stage: it may be recalled
        if ns:
            self.at(self.now_ns + ns, partial(self._route_returns, run))
        else:
            self._inline.append(partial(self._route_returns, run))

    def _check_route(self, batch: Batch, route: Route) -> None:
        assert len(route.nodes) == len(route.queues) == len(batch.instances) > 1
        assert len({*batch.instances}) == 1 or not self.world.is_divided, "a route leaves its group"
        assert all(ticket.frame.request.due_after_ns is None for ticket in batch.tickets), (
            "no deadline passes on a route"
        )
        assert len({queue.key for queue in route.queues}) == len(route), "a route contains a model twice"
        nodes, plan = {node.index for node in route.nodes}, batch.tickets[0].frame.plan
        for node in route.nodes[:-1]:
            for slot in node.outputs:
                assert slot == NO_SLOT or nodes.issuperset(plan.consumers[slot]), (
                    "a step outside the route reads an inner output"
                )
                assert slot == NO_SLOT or slot not in plan.output_slots, "an inner output is an output of the graph"
        for i, queue in enumerate(route.queues):
            model = self.world.by_key[queue.key]
            self._check_batch(batch.stage(i), model)
            waiting = queue.batcher.tickets() if isinstance(queue.batcher, Queue) else ()
            late = all(ticket.queued_ns == self.now_ns for ticket in waiting)  # queued after this was decided
            assert late, f"a route overtakes a ticket that waits for {queue.key}"
            own = {*map(step_of, batch.tickets)}
            before = [step for step, at in self._again.items() if at < self.now_ns and step not in own]
            retried = [step for step in before if self._model_of(step) == queue.key]
            assert not retried, f"a route overtakes a retry of {queue.key}"
            assert not model.devices, f"{queue.key} has tickets bound to devices"
            assert not model.keeps_order, f"{queue.key} keeps the order of requests"
            takes_all = model.levels is None and model.policy == BatchPolicy.simple(model.max_batch_size)
            assert i == 0 or takes_all or len(batch.tickets) == 1, f"{queue.key} would decide about each request"

    def _model_of(self, step: Step) -> ModelKey | None:
        number, index = step
        frame = self.frames.get(number)
        return None if frame is None else frame.plan.nodes[index].model

    def _pass(self, run: RouteRun) -> None:
        """Run the models of a route until a stage raises, a member fails, or the batch returns early."""
        route = run.route
        made: dict[tuple[int, int], Handle | None] = {}
        turns = self._random.randrange(len(route)) if self._random.random() < 0.15 else -1
        for i, node in enumerate(route.nodes):
            stage = run.batch.stage(i)
            model = self.world.by_key[stage.queue.key]
            outputs = self._make(stage, model, made)
            if outputs is None:
                run.raises = True
                return
            errors: dict[int, FlowserveError] = {}
            returns = i == turns
            for m, ticket in enumerate(stage.tickets):
                if model.key in ticket.frame.request.faults:
                    errors[m] = ModelFailed("a fault of its own")
                returns |= any(strategies.is_omitted(model, ticket.frame.request, j) for j in range(len(model.outputs)))
                made.update({(m, slot): outputs[j][m] for j, slot in enumerate(node.outputs) if slot != NO_SLOT})
            following = route.nodes[i + 1] if i + 1 < len(route) else None
            if following is not None:  # outputs that do not form one tensor are not passed on
                specs = stage.tickets[0].frame.plan.graph.nodes[following.index].inputs
                for slot, spec in zip(following.inputs, specs, strict=True):
                    widths = {handle.width for m in range(len(stage.tickets)) if (handle := made.get((m, slot)))}
                    returns |= len(widths) > 1 or (spec.dims == (strategies.FIXED,) and widths != {strategies.FIXED})
            run.made.append(BatchResults(outputs, errors))
            if errors or returns:
                return

    def _recall(self, batch: Batch) -> None:
        """Recall a batch from its route: it returns after its current stage."""
        run = self._runs_of.get(batch)
        if run is None or run.is_over:
            return
        self._note("is recalled", *map(number_of, batch.tickets))
        last = self._random.randrange(run.reached)
        if last < len(run.made) and last < run.reached - 1:
            run.made, run.raises = run.made[: last + 1], False
        for i in range(len(run.route)):
            if i != last and self._random.random() < 0.8:
                self.at(self.now_ns + self._random.randint(0, 40), partial(self._acknowledge, run, i))

    def _acknowledge(self, run: RouteRun, i: int) -> None:
        if not run.is_over and i not in run.batch.released:
            self._release(run, [i])

    def _worker_ends(self, run: RouteRun, i: int) -> None:
        """The worker of a stage dies while it runs the batch, which fails."""
        if run.is_over:
            return
        batch = run.batch
        self._note("dies", batch.stage(i).queue.key.name, batch.instances[i])
        self._over_with(run)
        self._excused.update(map(number_of, batch.tickets))
        instance, queue = batch.instances[i], batch.stage(i).queue
        is_known_first = self._random.random() < 0.5
        if is_known_first:  # before its batch completes
            queue.take_away(instance)
        self._release(run, [one for one in range(len(batch.instances)) if one not in batch.released])
        is_retried = self.scheduler.complete(batch, [], InstanceDied("died"), self.now_ns)
        assert not is_retried
        if not is_known_first:
            queue.take_away(instance)
        self._away.add((queue.key, instance))
        self.at(self.now_ns + self._random.randint(0, 100), partial(self._worker_is_back, queue.key, instance))

    def _worker_is_back(self, key: ModelKey, instance: int) -> None:
        self._note("is back", key.name, instance)
        self._away.remove((key, instance))
        self.queues[key].give_back(instance)

    def _route_returns(self, run: RouteRun) -> None:
        if run.is_over:
            return
        batch, route = run.batch, run.route
        numbers = [number_of(ticket) for ticket in batch.tickets]
        self._release(run, [i for i in range(len(route)) if i not in batch.released])
        self._over_with(run)
        for node, results in zip(route.nodes, run.made, strict=False):
            for m, ticket in enumerate(batch.tickets):
                if m not in results.errors and not ticket.frame.record.done:
                    self._finished[numbers[m]].add(node.index)
        self._begun.update((number, node.index) for number in numbers for node in route.nodes[: run.reached])
        if not run.raises:
            is_whole = len(run.made) == len(route) and not run.made[-1].errors
            self._note("passes its route" if is_whole else "returns early", *numbers)
            is_retried = self.scheduler.complete(batch, run.made, None, self.now_ns)
            assert not is_retried
            return
        stage = batch.stage(len(run.made))
        model = self.world.by_key[stage.queue.key]
        self._note("raises on its route", model.key.name, *numbers)
        may_again = model.is_pure and len(numbers) > 1
        if not may_again and len(numbers) > 1:
            self._excused.update(numbers)
        again = self.scheduler.complete(batch, run.made, self._raised(stage, model), self.now_ns)
        assert not again or may_again
        if again:
            self._try_again(stage.tickets)

    def _release(self, run: RouteRun, stages: Sequence[int]) -> None:
        for i in stages:
            stage = run.batch.stage(i)
            self._busy.remove((stage.queue.key, stage.instance))
        if run.is_over or len(stages) == 1:
            self.scheduler.routes.release(run.batch, stages)

    def _over_with(self, run: RouteRun) -> None:
        run.is_over = True
        del self._runs_of[run.batch]
        for i in range(len(run.batch.instances)):
            self._running.difference_update(map(step_of, run.batch.stage(i).tickets))

    # ------------------------------------------------------------------------------------------------------- results

    def _answered(self, frame: Frame) -> None:
        request: SimRequest = frame.request
        assert self.frames.get(request.number) is frame, (
            f"request {request.number} was answered twice, or after it left"
        )
        right = self.world.right_answer(request)
        told = str(frame.record.error)
        assert not told.startswith(_POISON) or told == f"{_POISON}{request.number}", (
            f"request {request.number} got the error of others: {told}"
        )
        is_late = isinstance(frame.record.error, DeadlineExceeded)
        was_ended = self._has_ended and isinstance(frame.record.error, Unavailable)
        if frame.record.error is None:
            assert frame.open == 0, "answered while a step was unfinished"
            held = [frame.tensors[slot] if slot != NO_SLOT else None for slot in frame.plan.output_slots]
            assert [None if handle is None else handle.content for handle in held] == right, (
                f"request {request.number} got a wrong answer, or none"
            )
        elif is_late:
            due_ns = self._due_ns(frame)
            assert due_ns is not None, "a request without a deadline exceeded it"
            assert self.now_ns >= due_ns, "answered before its deadline"
            if any(number == request.number for number, _ in self._running):
                self._note("is late while it runs", request.number)
        else:
            assert right is None or was_ended or request.number in self._excused, (
                f"request {request.number} has no fault and failed: {frame.record.error}"
            )
        # The end of the server and a deadline ignore the order.
        for model in () if was_ended or is_late else self._ordered.values():
            model.check_answered(frame)
        self._note("is answered", request.number, type(frame.record.error).__name__)
        self._over(request)

    def _due_ns(self, frame: Frame) -> int | None:
        """The deadline of a request."""
        after_ns: int | None = frame.request.due_after_ns
        return None if after_ns is None else frame.record.arrived_ns + after_ns

    def _over(self, request: SimRequest) -> None:
        del self.frames[request.number]
        self._follow(request)

    def _follow(self, request: SimRequest) -> None:
        """The request is over: the requests that follow it arrive."""
        self.over.add(request.number)
        for following in self.world.requests:
            if following.follows == request.number:
                self.at(self.now_ns, partial(self._arrive, following))

    def _handle(
        self, content: int, width: int, start: int, stop: int, block: object, device: int = NO_DEVICE
    ) -> Handle:
        handle = Handle(content, width, start, stop, block, device)
        self.handles.add(handle)
        return handle

    def _note(self, *what: object) -> None:
        self.log.append((self.now_ns, *what))

    # ------------------------------------------------------------------------------------------------ checks of a batch

    def _check_batch(self, batch: Batch, model: SimModel) -> None:
        tickets = batch.tickets
        assert tickets, "an empty batch"
        assert (model.key, batch.instance) not in self._busy | self._away, "an instance was given two batches"
        assert batch.instance not in batch.queue.free, "an instance that runs is free"
        assert all(ticket.node.model == model.key for ticket in tickets), "a ticket is in a batch of another model"
        assert len({ticket.key for ticket in tickets}) == 1, "one key per batch"
        assert len({id(ticket) for ticket in tickets}) == len(tickets), "a ticket is in its batch twice"
        if model.policy is None:
            assert len(tickets) == 1, "the default scheduler ran several requests in one batch"
        else:
            assert sum(ticket.rows or 1 for ticket in tickets) <= model.max_batch_size, "a batch above its limit"
        for ticket in tickets:
            is_decided = bool(ticket.tensors)  # it ended after its batch was decided, in the same step
            assert not ticket.frame.record.done or is_decided, "a step of a request that is over was started"
            assert ticket.node.index not in self._finished[number_of(ticket)], "a step ran twice"
            halvings = (model.max_batch_size - 1).bit_length() if model.is_pure and model.max_batch_size else 0
            assert self._tried[step_of(ticket)] <= halvings, "a step is retried more often than its batch is halved"
            assert step_of(ticket) not in self._running, "a step runs twice at a time"
            assert not self._has_ended or step_of(ticket) in self._begun, "a step was started after the end"

    def _check_device(self, batch: Batch, model: SimModel) -> None:
        """A batch leaves the device of its tensors only if that device is busy, and after waiting as long as the copies
        of its tensors take.
        """
        first = [ticket for ticket in batch.tickets if step_of(ticket) not in self._begun]
        homes = [home_of(ticket, model.devices) for ticket in first]
        if not homes or {home for home, _ in homes} <= {NO_DEVICE, model.devices[batch.instance]}:
            self.stayed += len(homes)
            return
        self.moved += len(homes)
        assert len({home for home, _ in homes}) == 1, "tickets of two devices in one batch"
        free = {model.devices[instance] for instance in batch.queue.free}
        assert homes[0][0] not in free, "a batch left its device although an instance of it was free"
        waited_ns = self.now_ns - first[0].queued_ns
        assert waited_ns >= sum(strategies.COPY_COST.cost_ns(nbytes) for _, nbytes in homes), "moved too early"

    # ------------------------------------------------------------------------------------------ checks after every step

    def check(self) -> None:
        """Check every invariant of scheduling after a step."""
        self.scheduler.check()
        assert self.scheduler.in_flight == len(self.frames)
        for model in self._ordered.values():
            for ticket in model.advance():
                self._finished[number_of(ticket)].add(ticket.node.index)
        for key, queue in self.queues.items():
            self._check_queue(key, queue)
        for frame in self.frames.values():
            due_ns = self._due_ns(frame)
            assert due_ns is None or self.now_ns < due_ns, "a request has no response at its deadline"
            frame.check()
            self._check_counts(frame)
            self._check_tensors(frame)

    def _check_queue(self, key: ModelKey, queue: ModelQueue) -> None:
        busy = [instance for model, instance in self._busy if model == key]
        away = [instance for model, instance in self._away if model == key]
        assert sorted([*queue.free, *busy, *away]) == list(queue.instances), f"{key}: an instance is lost or doubled"
        expiry = queue.batcher.expiry()
        assert expiry is None or expiry > self.now_ns, f"{key}: a ticket waits after its timeout"
        if queue.free and len(queue.batcher) and not self._is_short(queue):
            deadline = queue.batcher.deadline()
            assert deadline is not None, f"{key}: a ticket waits without a deadline although an instance is free"
            assert deadline > self.now_ns, f"{key}: a ticket waits after its deadline although an instance is free"

    def _is_short(self, queue: ModelQueue) -> bool:
        """Whether the rate limiter may leave a free instance of this queue idle. Also checks the held resources."""
        if self.scheduler.rate_limit is None:
            return False
        counts, held = self.most_needed(), Counter[Resource]()
        for key, instance in self._busy:
            held.update(self.world.by_key[key].needs[instance].amounts)
        assert all(count <= counts[resource] for resource, count in held.items()), "a resource is over-granted"
        needs = [self.world.by_key[queue.key].needs[instance].amounts for instance in queue.free]
        lacks = [any(held[resource] + count > counts[resource] for resource, count in one.items()) for one in needs]
        return all(lacks) or bool(self.scheduler.rate_limit.waited_for())

    def most_needed(self) -> Counter[Resource]:
        """The number of copies of each resource: the most that an instance needs."""
        counts = Counter[Resource]()
        for model in self.world.models:
            for needs in model.needs:
                counts |= Counter(needs.amounts)
        return counts

    def _check_counts(self, frame: Frame) -> None:
        """The counts of a request match its finished steps: missing inputs, remaining readers, open steps."""
        plan, finished = frame.plan, self._finished[frame.request.number]
        if not (frame.open or finished):
            return  # it has not been scheduled yet
        made_by = {slot: node.index for node in plan.nodes for slot in node.outputs if slot != NO_SLOT}
        needed = [node for node in plan.nodes if node.writes]
        for node in needed:
            waits_for = [slot for slot in node.distinct_inputs if slot in made_by and made_by[slot] not in finished]
            is_over = node.index in finished
            assert frame.is_over(node.index) == is_over, f"step {node.name} is over or not"
            assert is_over or frame.missing[node.index] == len(waits_for), (
                f"step {node.name} does not wait for its unfinished steps"
            )
        for slot, consumers in enumerate(plan.consumers):
            left = sum(index not in finished for index in consumers) + plan.output_slots.count(slot)
            assert frame.readers[slot] == left, f"slot {slot} does not count its unfinished readers"
        open_ = sum(not frame.missing[node.index] and node.index not in finished for node in needed)
        assert frame.open == open_, "the open steps are not those that are ready and unfinished"

    def _check_tensors(self, frame: Frame) -> None:
        """A tensor is held from when it is written until its last reader ends."""
        plan, finished = frame.plan, self._finished[frame.request.number]
        written = {slot for index in finished for slot in plan.nodes[index].outputs}
        for slot, handle in enumerate(frame.tensors):
            has_readers = slot in plan.output_slots or any(index not in finished for index in plan.consumers[slot])
            is_there = slot < len(plan.graph.inputs) or slot in written
            is_unread = plan.readers[slot] == 0  # an input that only unwanted steps read stays with its request
            assert handle is None or has_readers or is_unread, f"slot {slot} is held without a reader"
            if is_there and has_readers and handle is None:
                self._check_left_out(frame, slot)

    def _check_left_out(self, frame: Frame, slot: int) -> None:
        request: SimRequest = frame.request
        if slot < len(request.widths):
            assert request.widths[slot] is None, f"input {slot} was released before its last reader was done"
            return
        node = next(node for node in frame.plan.nodes if slot in node.outputs)
        model = self.world.by_key[node.model]
        assert strategies.is_omitted(model, request, node.outputs.index(slot)), (
            f"slot {slot} was released before its last reader"
        )

    # ------------------------------------------------------------------------------------------------ checks at the end

    def check_end(self) -> None:
        """Check the final state: every request is over, and no instance, resource, ticket or tensor is held."""
        assert self.over == {request.number for request in self.world.requests}, "a request was never answered"
        assert not self._busy, "an instance was never freed"
        assert not self._running, "a step is never over"
        if self.scheduler.rate_limit is not None:
            limiter = self.scheduler.rate_limit.limiter
            assert limiter.total == self.most_needed()
            assert not limiter.held(), "a resource was never freed"
        assert not any(queue.waiting for queue in self.scheduler.models.queues), "a ticket still waits"
        assert not len(self.handles), f"{len(self.handles)} tensors are held after everything is over"


@dataclass(eq=False)
class RouteRun:
    """A batch on its route. `made[i]` are the results of its i-th stage; if `raises`, the stage after those raises."""

    batch: Batch
    route: Route
    made: list[BatchResults] = field(default_factory=list)
    raises: bool = False
    is_over: bool = False

    @property
    def reached(self) -> int:
        """The number of stages that ran the batch."""
        return len(self.made) + self.raises


class OrderedModel:
    """The started tickets of a model that keeps order, until their outcome may leave. `back`: the tickets whose batch
    is complete, and whether they succeeded.
    """

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.back: dict[Ticket, bool] = {}

    def advance(self) -> list[Ticket]:
        """Remove the tickets that are next in order, and return those that succeeded."""
        gone = []
        while self.tickets and (self.tickets[0] in self.back or self.tickets[0].frame.record.done):
            ticket = self.tickets.pop(0)
            if self.back.pop(ticket, False) and not ticket.frame.record.done:
                gone.append(ticket)
        self.back = {ticket: went for ticket, went in self.back.items() if not ticket.frame.record.done}
        return gone

    def check_answered(self, frame: Frame) -> None:
        """A request of a plain model is answered only after all earlier ones."""
        if frame.plan.graph.is_ensemble:
            return
        for n, ticket in enumerate(self.tickets):
            if ticket.frame is frame:
                for earlier in self.tickets[:n]:
                    is_ensemble = earlier.frame.plan.graph.is_ensemble
                    assert earlier.frame.record.done or (is_ensemble and earlier in self.back), "answered out of order"


def home_of(ticket: Ticket, devices: Sequence[int]) -> tuple[int, int]:
    """The device with most bytes of a step's inputs, and their number. NO_DEVICE if it is none of `devices`: the step
    must copy them.
    """
    sizes: dict[int, int] = {}
    for slot in {slot for slot in ticket.node.inputs if slot != NO_SLOT}:
        handle = ticket.tensors[slot]
        if handle is not None:
            device, nbytes = strategies.handle_residence(handle)
            sizes[device] = sizes.get(device, 0) + nbytes
    sizes.pop(NO_DEVICE, None)
    home, nbytes = max(sizes.items(), key=lambda pair: (pair[1], -pair[0]), default=(NO_DEVICE, 0))
    return (home, nbytes) if home in devices else (NO_DEVICE, 0)


def number_of(ticket: Ticket) -> int:
    request: SimRequest = ticket.frame.request
    return request.number


def step_of(ticket: Ticket) -> Step:
    return number_of(ticket), ticket.node.index
