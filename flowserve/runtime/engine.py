"""The engine: requests in, responses out.

Decided here: how a request becomes a flow and a flow an answer, what a caller who leaves means, and in which order all
ends. Which deployments there are is directory.py's, scheduling the dispatcher's, loading loader.py's, computing the
hosts'. It does not know HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import trio
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.backends.base import LoadedModel, Results
from flowserve.errors import FlowserveError, Unavailable
from flowserve.graph.plan import Plan
from flowserve.graph.types import ModelKey
from flowserve.observe.statistics import CANCELED, OTHER, REJECTED
from flowserve.runtime.accounts import (
    leave_batch,
    record_batch,
    record_ensemble,
    record_refused,
    record_together,
)
from flowserve.runtime.answers import Answers
from flowserve.runtime.asks import Asks
from flowserve.runtime.calls import Calls
from flowserve.runtime.carriers import Carrier, join
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.clock import running_clock, wall_clock_ms
from flowserve.runtime.crowds import share
from flowserve.runtime.deployment import Deployment, MakeFlow
from flowserve.runtime.directory import Directory
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.hosts import Processes
from flowserve.runtime.instance import Completions, Host, Outcome, as_told, break_off, cannot_start, note_failure
from flowserve.runtime.lifecycle import Generation, Generations
from flowserve.runtime.parameters import NONE, of_ensemble, take_parameters
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.pump import Bursts, NoBursts, Pump
from flowserve.runtime.relay_runs import Arrivals
from flowserve.runtime.relays_here import RelaysHere
from flowserve.runtime.relays_on_gpu import RelaysOnGpu
from flowserve.runtime.streaming import Returned, Streaming
from flowserve.runtime.supervisor import Supervisor, WarmUp
from flowserve.runtime.traces import Traces
from flowserve.runtime.tracing import Tracing
from flowserve.runtime.turnstile import Turnstile
from flowserve.runtime.watch import Watch
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import Batcher
from flowserve.scheduling.calls import Called, CalledFlow
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Limiter, Needs
from flowserve.scheduling.relays import Relay, RelayingDispatcher
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow
from flowserve.values import Request, Response

log = logging.getLogger("flowserve.runtime")

STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"
# Of the exit timeout: what is left, when time is up, for telling those who still wait.
LAST_WORDS_S: Final = 0.5


class Engine(Directory):
    """Serves deployments. Made by `open_engine`; touched only from its trio thread."""

    def __init__(self, options: EngineOptions) -> None:
        self.clock = running_clock()
        self.limiter = None if options.rate_limit is None else Limiter(options.rate_limit)
        self.dispatcher: Dispatcher
        if self.limiter is not None:
            self.dispatcher = LimitedDispatcher(
                self._start,
                self._answered,
                self.limiter,
                refused=self._refused,
                told=self._has_answers,
                withdrawn=_withdrawn,
            )
        else:
            self.dispatcher = RelayingDispatcher(
                self._start, self._answered, self._refused, self._has_answers, _withdrawn, relay=self._relay
            )
        self._pump = Pump(self.dispatcher, self.clock, self._tell)
        # Around what came at once and is taken in without a wait, by whoever knows that.
        self.begin_burst, self.end_burst = self._pump.begin_burst, self._pump.end_burst
        self.completions = Completions(trio.lowlevel.current_trio_token(), self._returned, self._broke, self._pump)
        self.generations = Generations(self._forget)
        processes = Processes(self.clock, self._pump) if SUPPORTED else None
        self._carriers: list[Carrier] = []
        if isinstance(self.dispatcher, RelayingDispatcher):
            arrivals, poke = Arrivals(self.dispatcher, self._take_in, self.clock), self._pump.poke
            token = self.completions.token
            self._carriers.append(RelaysHere(self.dispatcher, arrivals, poke, self.clock))
            self._carriers.append(RelaysOnGpu(self.dispatcher, arrivals, token, self._pump, poke, self.clock))
            if processes is not None:
                processes.relays.serve(self.dispatcher, poke)
                self._carriers.append(processes.relays)
        self.streaming = Streaming(self.completions.token, self.dispatcher, self.clock, self._pump.poke)
        self.calls = self.completions.calls = Calls(self)
        self.asks = self.calls.asks = Asks(self)
        self.supervisor = Supervisor(self.dispatcher, self.completions, self._pump.poke, self.clock, options.restarts)
        super().__init__(options, self.clock, self.dispatcher, self.generations, self.supervisor, processes)
        self.tracing = Tracing(
            self.dispatcher,
            self.completions,
            self.streaming,
            self.clock,
            self._start,
            self._finished,
            self._answered,
        )
        self.traces = Traces(options.trace, self.tracing)
        self._turnstile = Turnstile()
        self._told: list[Flow] = []  # answered, and whoever waits for them is not told yet
        self._together: list[Flow] | None = None  # ensembles' requests that are answered out of the batch that is back
        self._answers: Bursts = NoBursts()
        self._stamps = count(1)
        self.stopping = trio.Event()  # for whatever would go on for as long as somebody listens

    def tell_around(self, answers: Bursts) -> None:
        """Who sends answers hears from now on which of them are told of together."""
        self._answers = answers

    def next_stamp(self) -> int:
        """A number that grows; drawn while a request is parsed, it orders requests of one turn of the loop."""
        return next(self._stamps)

    # ------------------------------------------------------------------ serving

    async def infer(self, deployment: Deployment, request: Request, make: MakeFlow | None = None) -> Response:
        """Run one request. Arrays of the answer include the batch dimension where the deployment batches. `make` is as
        in `submit`.

        Raises Invalid for a request that does not fit the deployment, and whatever its steps failed with. A caller
        who is cancelled leaves: what is still queued for it is withdrawn, what runs runs out.
        """
        answered = self.ask(deployment, request) if make is None else self.submit(deployment, request, make)
        if isinstance(answered, Response):
            return answered
        flow = answered
        if not flow.done:
            task = current_task()
            wake = self._turnstile.let_in if deployment.keeps_order else reschedule
            flow.waiter = lambda _: wake(task)

            def leave(_: RaiseCancelT) -> Abort:
                if flow.waiter is None:  # told, and its turn to go on is near
                    return Abort.FAILED
                self.withdraw(flow)
                return Abort.SUCCEEDED

            await wait_task_rescheduled(leave)
        return self.response(flow)

    def ask(self, deployment: Deployment, request: Request) -> Response | Flow:
        """Begin one request as `submit` does, or answer it on the spot, where it is alone and there is a way."""
        path = deployment.fast_path
        if (
            path is not None
            and path.is_free
            and deployment.elder is None
            and not self.is_draining
            and self._pump.takes_alone()
        ):
            answered = path.answer(deployment, request)
            if answered is not None:
                self._pump.went_alone()
                return answered
        return self.submit(deployment, request)

    def stream(self, deployment: Deployment, request: Request, watch: Watch | None = None) -> Answers:
        """Begin one request whose answers are taken one by one, however many there are. Raises as `infer` does for what
        is refused at the door. `watch`: where it is traced; closed when nobody takes answers any more.
        """
        make = deployment.make_stream if watch is None else watch.make(deployment.make_stream)
        return Answers(self, self.submit(deployment, request, make), watch)

    def call(self, batch: Batch | None, deployment: Deployment, request: Request, *, is_stream: bool) -> Called:
        """Begin a request that a model makes, in the execution of `batch` if in any. As `submit`, but also while the
        server drains, and without waiting at the gate. Raises Unavailable where it could never be answered.
        """
        # Where steps share slots, the answer is taken however it is asked for.
        nested = deployment.make_stream if is_stream or not deployment.is_decoupled else deployment.make_flow
        request.stamp = self.next_stamp()
        made: list[Flow] = []

        def make(plan: Plan, *facts: Any) -> Flow:
            flow: Flow = (CalledFlow if plan.nesting is None else nested)(plan, *facts)
            if batch is not None and self.tracing.is_live:
                self.tracing.begin_call(batch, flow)
            made.append(flow)
            return flow

        try:
            flow = self.submit(deployment, request, make, partial(self.dispatcher.call, batch))
        except FlowserveError:
            for one in made:  # it fits, and is too large for the gate, or could never be answered
                self.tracing.end(one)
                one.owner.statistics.failed(1, 0, REJECTED)
            raise
        if flow.done:  # what is remembered at the gate goes no further
            self.tracing.end(flow)
        return flow  # type: ignore[return-value]  # what `make` makes

    def submit(
        self,
        deployment: Deployment,
        request: Request,
        make: MakeFlow | None = None,
        take: Callable[[Any], None] | None = None,
    ) -> Flow:
        """Begin one request without waiting for it. It may be done at once; otherwise `flow.waiter`, where it is set,
        is called with the flow when it is. Raises as `infer` does for what is refused at the door; Unsupported for a
        deployment that may answer any number of times, unless `make` is its `make_stream`. `take`: what queues it, for
        requests of the server's own, which are begun also while it drains.
        """
        if deployment.elder is not None:
            deployment = deployment.place_of(request)
        admission = deployment.admission
        if self.is_draining and take is None and not deployment.goes_on(request):
            deployment.statistics.failed(1, 0, REJECTED)
            raise Unavailable(STOPPING)
        try:
            tensors = admission.admit(request)
        except FlowserveError as error:
            deployment.statistics.failed(1, 0, OTHER)
            deployment.statistics.told(str(error), wall_clock_ms())
            raise
        plan = deployment.plan if not request.outputs else deployment.plan_for(request.outputs)
        flow = (make or deployment.make_flow)(
            plan,
            deployment.route,
            tensors,
            self.clock(),
            request.stamp,
            request,
            deployment,
            request.priority,
            request.timeout_us * 1000,
        )
        flow.wanted = admission.wanted(request)
        gate = deployment.gate
        if gate is None:
            (take or self.dispatcher.submit)(flow)
        else:
            if take is None:
                gate.enter(flow)
            else:
                gate.call(flow, take)  # type: ignore[arg-type]  # `make` made it for that
            if flow.done:
                return flow
        self._pump.arrived()
        return flow

    def withdraw(self, flow: Flow) -> None:
        """Its caller left: nobody is told, and what is still queued of it leaves its queues."""
        flow.waiter = None
        self.tracing.end(flow, has_left=True)
        was_over, has_begun = flow.done, flow.open > 0
        is_counted = was_over
        if isinstance(flow, StreamFlow) and flow.is_over and not flow.plan.graph.is_ensemble:
            is_counted = True  # its last answer came just before
        left = self.dispatcher.cancel(flow)
        if has_begun and not left and not flow.plan.graph.is_ensemble and not isinstance(flow, StreamFlow):
            is_counted = leave_batch(flow, flow.owner.statistics, self.dispatcher)
        if not is_counted:
            flow.owner.statistics.failed(1, self.clock() - flow.arrived_ns, CANCELED)
        if flow.owner.gate is not None and not was_over:  # it has left when it was
            flow.owner.gate.leave(flow, is_answered=False)
        if self.calls:
            self.calls.sweep()
        self._pump.poke()

    def response(self, flow: Flow) -> Response:
        """What a flow that is done came to. Raises what its steps failed with."""
        if flow.error is not None:
            raise _own(flow.error, flow.owner)
        return self.response_from(flow)

    def response_from(self, flow: Flow) -> Response:
        """What the tensors of a flow that is done make; or those of one of its answers (`StreamFlow.take`)."""
        deployment: Deployment = flow.owner
        slots = flow.tensors
        outputs = {}
        for name in flow.wanted:
            tensor = slots[deployment.output_slot[name]]
            if tensor is not None:
                if name in deployment.output_conversions:
                    tensor = tensor.converted(deployment.output_conversions[name])
                outputs[name] = tensor.array
        request = flow.request
        parameters = of_ensemble(request) if deployment.graph.is_ensemble else flow.parameters or NONE
        return Response(deployment.name, deployment.version, outputs, request.id, parameters)

    def _start(self, batch: Batch) -> None:
        host: Host = batch.instance
        try:
            outcome = host.start(batch)
        except Exception as error:
            outcome = cannot_start(host, batch, error)
        if outcome is not None:
            try:
                self._finished(batch, outcome)
            except Exception as error:
                self._broke(batch, error)
            del outcome  # the frames of an error hold this one, and with it the batch

    def _returned(self, batch: Batch, outcome: Outcome) -> None:
        self._finished(batch, outcome)
        self._pump.poke()

    def _broke(self, batch: Batch, error: Exception) -> None:
        """A mistake of ours about what came of a batch: raised further it would end the server, and all in it."""
        break_off(self.dispatcher, batch, error)
        self._pump.poke()

    def _finished(self, batch: Batch, outcome: Outcome) -> None:
        now_ns = self.clock()
        if isinstance(outcome, Results):
            record_batch(batch.queue.observer, batch, outcome, now_ns)
            if outcome.parameters:
                outcome.errors = take_parameters(batch, outcome.parameters, outcome.errors)
            self._take_in(now_ns, self.dispatcher.batch_done, batch, outcome.outputs, outcome.errors)
        elif isinstance(outcome, Returned):
            self.streaming.returned(batch, outcome)
        else:
            self._failed(batch, outcome, now_ns)

    def _take_in(self, now_ns: int, take_in: Callable[..., None], *outcome: Any) -> None:
        """Have the dispatcher take in what came of a batch now. Who is answered by that is written down together."""
        together = self._together = []
        try:
            take_in(*outcome, now_ns)
        finally:
            self._together = None
            if together:
                record_together(together, now_ns)

    def _failed(self, batch: Batch, error: FlowserveError, now_ns: int) -> None:
        is_tried_again = self.dispatcher.batch_failed(batch, as_told(error))
        note_failure(batch, error, now_ns, is_tried_again=is_tried_again)

    def _relay(self, relay: Relay) -> bool:
        carrier: Carrier = relay.way.queues[0].carrier
        return not self.tracing.is_live and carrier.start(relay)  # what is traced is told step by step

    def _refused(self, queue: ModelQueue, ticket: Ticket, error: FlowserveError) -> None:
        record_refused(queue.observer, ticket, error, self.clock())

    def _answered(self, flow: Flow) -> None:
        is_counted = False
        self._ready(flow)  # before those who wait for its answer
        if flow.owner.gate is not None:
            is_counted = flow.owner.gate.leave(flow)
            self._pump.poke()  # others may be let in
        if flow.plan.graph.is_ensemble and not is_counted:
            if self._together is not None and flow.error is None and type(flow) is Flow:
                self._together.append(flow)
            else:
                record_ensemble(flow, self.clock())
        if flow.error is not None and self.calls:  # what runs of it may have called others
            self.calls.sweep()

    def _ready(self, flow: Flow) -> None:
        """It is over, or some of its answers can be taken. Whoever waits is told."""
        if flow.waiter is not None:
            # Told after the pump has given the free instances their next batches: answers take time to write.
            self._told.append(flow)
            self._pump.poke()

    def _has_answers(self, flow: StreamFlow) -> None:
        if not flow.is_answered:
            flow.is_answered = True
            if flow.plan.graph.is_ensemble:
                flow.owner.statistics.first_answered(self.clock() - flow.arrived_ns)
        self._ready(flow)

    def taken(self) -> None:
        """Somebody took an answer: models that wait for that may go on."""
        if self.dispatcher.streams.is_due:
            self._pump.poke()

    def _tell(self) -> None:
        told, self._told = self._told, []
        if not told:
            return
        self._answers.begin_burst(len(told))
        for flow in told:
            waiter, flow.waiter = flow.waiter, None
            if waiter is not None:  # its caller may have left in between
                try:
                    waiter(flow)
                except Exception:  # each answers for itself: here the others are told all the same
                    log.exception("telling of an answer of '%s' failed", flow.plan.graph.name)
        self._answers.end_burst()

    # ------------------------------------------------------------------ beginning and ending

    def add_model(
        self,
        key: ModelKey,
        batcher: Batcher,
        hosts: Sequence[Host],
        model: LoadedModel,
        passive: Sequence[Host] = (),
        files: object = None,
        needs: Sequence[Needs] = (),
        *,
        keeps_order: bool = False,
        execution_timeout_ns: int = 0,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Give a model version its queue; graphs announced from now on run on it where they name `key`.

        The `passive` instances are closed in the end as the others are, but get no work. `files` is held until then.
        `needs` are those of each host at the rate limiter, where there is one. `keeps_order`: answers leave in the
        order in which requests came. `execution_timeout_ns`: a process whose batch runs longer is killed; 0: none is.
        `warm_up`: what an instance runs that is started again, before it serves.
        """
        statistics = self.statistics_of(key)
        queue = ModelQueue(
            key, batcher, hosts, is_pure=model.is_pure, observer=statistics, needs=needs, keeps_order=keeps_order
        )
        if not (keeps_order or execution_timeout_ns):
            join(queue, self._carriers)
        self.dispatcher.add(queue)
        self.generations.add(Generation(queue, [*hosts, *passive], model, files))
        mortals = [host for host in hosts if isinstance(host, ProcessHost)]
        if len(mortals) == len(hosts):
            share(batcher, mortals, lambda: self.dispatcher.begun)
        self.supervisor.watch(queue, mortals, execution_timeout_ns, warm_up)

    def _forget(self, queue: ModelQueue) -> None:
        """Nothing reaches the queue any more; its instances are about to be closed."""
        self.dispatcher.remove(queue)
        self.supervisor.release(queue)

    async def run_pump(self) -> None:
        await self._pump.run()

    async def run_turnstile(self) -> None:
        await self._turnstile.run()

    def refuse_new(self) -> None:
        """From now on requests are refused, but for those of sequences that are open. Not ready any more."""
        self.is_draining = True
        self.stopping.set()

    async def sequences_over(self, deadline: float) -> None:
        """Wait until no sequence is open, or the loop's time reaches `deadline`. After `refuse_new`."""
        with trio.move_on_at(deadline):
            while self.dispatcher.open_sequences:  # noqa: ASYNC110  # as in `drain`
                await trio.sleep(0.01)

    async def drain(self, deadline: float) -> list[str]:
        """Refuse new requests, wait until none is in flight or the loop's time reaches `deadline`. A moment before that
        whoever waits in a queue, or reads a stream, is told that it is over.

        Returns what did not finish: the instances that are still running then, or that requests are under way.
        """
        self.refuse_new()
        left_s = max(deadline - trio.current_time(), 0)
        if await self._emptied(deadline - min(LAST_WORDS_S, left_s / 5)):
            return []
        running = self.busy()
        self.dispatcher.fail_all(STOPPING)
        self._pump.poke()
        await trio.sleep_until(deadline)  # they are told meanwhile
        return running or ["requests that wait in queues, or are answered many times"]

    def busy(self) -> list[str]:
        """The instances that compute elsewhere than on the loop, also those whose callers have all left."""
        return [host.name for host in self.generations.hosts() if host.running is not None]

    async def _emptied(self, deadline: float) -> bool:
        with trio.move_on_at(deadline):
            # Polled, because the hot path should pay for no "last one left" event and this happens once in a life.
            while self.dispatcher.in_flight:  # noqa: ASYNC110
                await trio.sleep(0.01)
        return not self.dispatcher.in_flight

    async def close(self, deadline: float) -> list[str]:
        """Close every instance, those that still run last and only until `deadline`. Returns the ones that did not
        close.
        """
        self.refuse_new()
        self.supervisor.stop()
        self.dispatcher.fail_all(STOPPING)
        return await self.generations.close(deadline)


def _withdrawn(queue: ModelQueue) -> None:
    queue.observer.failed(1, 0, CANCELED)


def _own(error: FlowserveError, deployment: Deployment) -> FlowserveError:
    """An error of the caller's own: one failure may be raised in many tasks, and tracebacks must not pile up on it."""
    text = f"in ensemble '{deployment.name}', {error}{error.lineage}" if deployment.graph.is_ensemble else str(error)
    deployment.statistics.told(text, wall_clock_ms())
    return type(error)(text)
