"""The engine: requests in, responses out, one step at a time.

Decides how a request becomes a flow and a finished flow a response, how a request is cancelled, and in which order the
engine shuts down. Every request runs through `step`: the engine processes completed batches, asks the scheduler for
decisions (scheduling/), executes them in order, and notifies the callers when no decision is left. Which deployments
there are is decided in deployments.py, loading in loading/, running in workers/. Does not know HTTP. Used on the event
loop's thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import trio
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.backends.base import LoadedModel, Results
from flowserve.errors import FlowserveError, Internal, ModelRaised, Unavailable
from flowserve.graph.plan import Plan
from flowserve.graph.types import ModelKey
from flowserve.observe.statistics import CANCELED, OTHER, REJECTED
from flowserve.runtime.clock import running_clock, wall_clock_ms
from flowserve.runtime.engine.accounting import (
    leave_batch,
    record_batch,
    record_finished,
    record_late,
    record_refused,
    record_stages,
    who_stayed,
)
from flowserve.runtime.engine.deployment import Deployment, MakeFlow
from flowserve.runtime.engine.deployments import Deployments
from flowserve.runtime.engine.generations import Generation, Generations
from flowserve.runtime.engine.observer import Observer
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.engine.ordered_wakeup import OrderedWakeup
from flowserve.runtime.engine.responses import ResponseIterator
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.model_calls.calls import Calls
from flowserve.runtime.model_calls.server_requests import ServerRequests
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.tracing.traces import Traces
from flowserve.runtime.tracing.tracing import Tracing
from flowserve.runtime.tracing.watch import Watch
from flowserve.runtime.workers.base import Completions, Worker, WorkerContext, cannot_start, log_raised, reported
from flowserve.runtime.workers.outcome import Outcome, Passed, Returned
from flowserve.runtime.workers.parameters import NONE, of_ensemble, take_parameters
from flowserve.runtime.workers.process import ProcessWorker
from flowserve.runtime.workers.process_pool import ProcessPool
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.runtime.workers.supervisor import Supervisor, WarmUp
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.call_graph import Called, CalledFlow
from flowserve.scheduling.decisions import Grant, Notice, Recall, Refused, Responses, Stop, Withdrawn
from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.queue import Batcher
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs
from flowserve.scheduling.scheduler import DeadlineExceeded, Scheduler
from flowserve.scheduling.streaming.iterations import StreamFlow
from flowserve.values import Request, Response

log = logging.getLogger("flowserve.runtime")

STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"
# Unfinished requests fail this long before the exit timeout, so that their callers still receive the error.
LAST_WORDS_S: Final = 0.5
# A step yields to the event loop after this time.
STEP_NS_MAX: Final = 2_000_000


class Engine:
    """Serves deployments. Made by `open_engine`.

    `deployments`: the deployments by name. `observers` are called at the points of `Observer`, in order.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.clock = running_clock()
        self.limiter = None if options.rate_limit is None else Limiter(options.rate_limit)
        self.scheduler = Scheduler(self.limiter)
        self.loop = StepLoop(self.step, self.clock)
        # Around events that are taken in together, without waiting.
        self.begin_events, self.end_events = self.loop.begin_events, self.loop.end_events
        token = trio.lowlevel.current_trio_token()
        self.completions = Completions(token, self._step_now)
        self.streams = ResponseStreams(token, self.scheduler, self.clock, self.loop.wake)
        self.server_requests = ServerRequests(self._is_served)
        self.calls = Calls(self, self.server_requests)
        self.context = WorkerContext(
            token, self.clock, self.completions, self.loop.wake, self._release_stages, self.calls
        )
        self.processes = ProcessPool(self.clock, self.loop) if SUPPORTED else None
        self.generations = Generations(self._forget)
        self.supervisor = Supervisor(self.scheduler, self.context, options.restarts)
        self.deployments = Deployments(options, self.clock, self.scheduler, self.generations, self.supervisor)
        self.observers: list[Observer] = []
        self.tracing = Tracing(self.scheduler, self.streams, self.observers, self.clock)
        self.traces = Traces(options.trace, self.tracing)
        self.stopping = trio.Event()  # for tasks that would go on for as long as a client listens
        self._ordered_wakeup = OrderedWakeup()
        self._waiting: list[Flow] = []  # flows whose caller is to be notified at the end of the step
        # A number that grows; drawn while a request is parsed, it orders the requests of one loop iteration.
        self.next_stamp: Callable[[], int] = count(1).__next__

    # ------------------------------------------------------------------ the step

    def step(self) -> int | None:
        """Complete batches, schedule and execute decisions until no decision is left; then notify the callers. Returns
        the latest time of the next step, in nanoseconds of the clock; None: at the next event.
        """
        completed, scheduler = self.completions.waiting, self.scheduler
        now_ns = began_ns = self.clock()
        at_ns: int | None = 0
        while now_ns - began_ns < STEP_NS_MAX:
            while completed:
                self._complete(*completed.popleft())
            decisions = scheduler.schedule(now_ns)
            if decisions is not None:
                for notice in decisions.notices:
                    self._carry_out(notice)
                if decisions.finished:
                    self._finish(decisions.finished)
                for batch in decisions.batches:
                    self._run(batch)
            at_ns = 0 if completed else scheduler.next_deadline()
            if at_ns != 0:
                break
            now_ns = self.clock()
        if self._waiting:
            self._deliver()
        return at_ns

    def _step_now(self) -> None:
        self.loop.begin_events()
        self.loop.end_events()

    def _run(self, batch: Batch) -> None:
        """Start a batch. Where its worker runs it on the spot, it is back afterwards."""
        worker: Worker = batch.instance
        try:
            for observer in self.observers:
                observer.batched(batch, self.clock())
            outcome = worker.run(batch)
        except Exception as error:
            outcome = cannot_start(worker, batch, error)
        try:
            for observer in self.observers:
                observer.started(batch)
        except Exception:  # the batch is with its worker all the same
            log.exception("observing the start of a batch of model '%s' failed", batch.queue.key.name)
        if outcome is not None:
            self.completions.waiting.append((batch, outcome))

    def _complete(self, batch: Batch, outcome: Outcome) -> None:
        """A batch is back. A fault of the server while it is taken in fails the members that are not finished."""
        try:
            worker: Worker = batch.instance
            again: Sequence[Ticket] = ()
            if worker.has_state:
                outcome, again = worker.finish(batch, outcome)
            now_ns = self.clock()
            for observer in self.observers:
                observer.computed(batch, outcome, now_ns)
            if again:
                # A flow whose caller left ends here: no later batch would remove it from the statistics.
                who_stayed(batch.queue.observer, again)
                self.scheduler.reschedule(batch, again, now_ns)
            if type(outcome) is Results:
                record_batch(batch.queue.observer, batch, outcome, now_ns)
                if outcome.parameters:
                    outcome.errors = take_parameters(batch, outcome.parameters, outcome.errors)
                self.scheduler.complete(batch, (outcome,), None, now_ns)
            elif isinstance(outcome, Returned):
                self.streams.returned(batch, outcome)
            elif isinstance(outcome, Passed):
                self._complete_route(batch, outcome, now_ns)
            elif isinstance(outcome, FlowserveError):
                self._fail(batch, batch, (), outcome, now_ns)
        except Exception as error:
            self._break_off(batch, error)

    def _complete_route(self, batch: Batch, passed: Passed, now_ns: int) -> None:
        made = passed.made
        since_ns = record_stages(batch, made, passed.error, now_ns)
        if made and made[-1].parameters:
            last = batch.stage(len(made) - 1)
            made[-1].errors = take_parameters(last, made[-1].parameters, made[-1].errors)
        if passed.error is None:
            self.scheduler.complete(batch, made, None, now_ns)
        else:
            stage = batch.stage(len(made))
            if made:
                stage.begin_at(since_ns)
            self._fail(batch, stage, made, passed.error, now_ns)

    def _fail(self, batch: Batch, stage: Batch, made: Sequence[Results], error: FlowserveError, now_ns: int) -> None:
        """A batch failed, in this stage of its route where it has one."""
        observer = stage.queue.observer
        told = reported(error)
        if self.scheduler.complete(batch, made, told, now_ns):
            who_stayed(observer, stage.tickets)  # parts of it are tried again
            error.__cause__ = error.__context__ = None  # its frames hold the batch
            return
        record_batch(observer, stage, told, now_ns)
        if isinstance(error, ModelRaised):
            log_raised(error, stage.queue.key.name, stage.instance.name)

    def _break_off(self, batch: Batch, error: Exception) -> None:
        """Handle an internal error in the completion of a batch; if it propagated, it would stop the server."""
        model, name = batch.queue.key.name, batch.instance.name
        log.error("instance %s: what came of a batch cannot be taken in", name, exc_info=error)
        what = f"what came of a batch cannot be taken in: {type(error).__name__}: {error}"
        try:
            self.scheduler.break_off(batch, Internal(f"model '{model}', instance '{name}': {what}"))
        except Exception:
            log.exception("not every member could be told that a batch of model '%s' failed", model)

    def _carry_out(self, notice: Notice) -> None:
        try:
            if isinstance(notice, Refused):
                record_refused(notice.queue.observer, notice.ticket, notice.error, self.clock())
            elif isinstance(notice, Withdrawn):
                notice.queue.observer.failed(1, 0, CANCELED)
            elif isinstance(notice, Responses):
                self._has_responses(notice.stream)
            elif isinstance(notice, Grant):
                notice.sender.grant(notice.credits)
            elif isinstance(notice, Stop):
                notice.sender.withdraw()
            elif isinstance(notice, Recall):
                notice.batch.instance.recall(notice.batch)
        except Exception:  # it concerns one request; the others go on
            log.exception("%s could not be carried out", type(notice).__name__)

    def _has_responses(self, flow: StreamFlow) -> None:
        if not flow.is_answered:
            flow.is_answered = True
            if flow.plan.graph.is_ensemble:
                flow.owner.statistics.first_answered(self.clock() - flow.arrived_ns)
        if flow.waiter is not None:
            self._waiting.append(flow)

    def _finish(self, flows: Sequence[Flow]) -> None:
        """Account for finished flows, and queue the notification of their callers."""
        now_ns = self.clock()
        uncounted: list[Flow] = []
        has_failed = False
        pending = deque(flows)
        while pending:
            flow = pending.popleft()
            if flow.waiter is not None:
                self._waiting.append(flow)
            has_failed = has_failed or flow.error is not None
            try:
                for observer in self.observers:
                    (observer.finished if flow.error is None else observer.failed)(flow)
                admission = flow.owner.admission
                is_counted = False
                if admission is not None:
                    is_counted = admission.leave(flow)
                    # Cached responses that waited for this one come before whatever finished after it.
                    pending.extendleft(reversed(self.scheduler.take_finished()))
                if flow.plan.graph.is_ensemble:
                    if not is_counted:
                        uncounted.append(flow)
                elif isinstance(flow.error, DeadlineExceeded):
                    record_late(flow, is_running=flow.error.is_running, scheduler=self.scheduler, now_ns=now_ns)
            except Exception:  # it concerns one request; the others are accounted for and delivered
                log.exception("accounting for a request of '%s' failed", flow.plan.graph.name)
        if uncounted:
            record_finished(uncounted, now_ns)
        if has_failed and self.calls:  # running steps of these flows may have called other models
            self.calls.sweep()

    def _deliver(self) -> None:
        """Tell the callers: after free instances got their next batches, since writing responses takes time."""
        waiting, self._waiting = self._waiting, []
        for flow in waiting:
            waiter, flow.waiter = flow.waiter, None
            if waiter is not None:  # its caller may have left in between
                try:
                    waiter(flow)
                except Exception:  # it concerns one caller; the others are notified
                    log.exception("delivering a response of '%s' failed", flow.plan.graph.name)

    def _release_stages(self, batch: Batch, stages: Sequence[int]) -> None:
        self.scheduler.release_stages(batch, stages)
        self.loop.wake()

    # ------------------------------------------------------------------ serving

    async def infer(self, deployment: Deployment, request: Request, make: MakeFlow | None = None) -> Response:
        """Run one request. Arrays of the answer include the batch dimension where the deployment batches. `make` is as
        in `submit`.

        Raises Invalid for a request that does not fit the deployment, and the errors of its steps. If the
        caller is cancelled, its queued steps are withdrawn and its running steps finish.
        """
        flow = self.submit(deployment, request, make)
        if not flow.done:
            task = current_task()
            wake = self._ordered_wakeup.wake if deployment.keeps_order else reschedule
            flow.waiter = lambda _: wake(task)

            def leave(_: RaiseCancelT) -> Abort:
                if flow.waiter is None:  # already notified; its wake-up is queued
                    return Abort.FAILED
                self.withdraw(flow)
                return Abort.SUCCEEDED

            await wait_task_rescheduled(leave)
        return self.response(flow)

    def stream(self, deployment: Deployment, request: Request, watch: Watch | None = None) -> ResponseIterator:
        """Begin one request whose responses are taken one by one, however many there are. Raises as `submit` does.
        `watch`: where it is traced; closed when no more responses are taken.
        """
        make = deployment.make_stream if watch is None else watch.make(deployment.make_stream)
        return ResponseIterator(self, self.submit(deployment, request, make), watch)

    def call(self, batch: Batch | None, deployment: Deployment, request: Request, *, is_stream: bool) -> Called:
        """Begin a request that a model makes, in the execution of `batch` if in any. As `submit`, but also while the
        server drains, and without waiting for admission. Raises Unavailable where it could never be answered.
        """
        # If steps share slots, responses are taken one by one for `run` and `stream` alike.
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
            flow = self.submit(deployment, request, make, partial(self.scheduler.call, batch))
        except FlowserveError:
            for one in made:  # it is valid, and too large to be admitted, or could never be answered
                self.tracing.end(one)
                one.owner.statistics.failed(1, 0, REJECTED)
            raise
        if flow.done:  # a cached response goes no further
            self.tracing.end(flow)
        return flow  # type: ignore[return-value]  # the type that `make` returns

    def submit(
        self,
        deployment: Deployment,
        request: Request,
        make: MakeFlow | None = None,
        take: Callable[[Any], None] | None = None,
    ) -> Flow:
        """Begin one request without waiting for it. It may be done at once; otherwise `flow.waiter`, where it is set,
        is called with the flow when it is. `take` queues it; the server's own requests pass their own, which is
        accepted during a drain too.

        Raises Invalid for a request that does not fit the deployment, TooLarge and Unavailable for one that is not
        admitted, and Unsupported for a deployment that may respond any number of times, unless `make` is its
        `make_stream`.
        """
        if deployment.elder is not None:
            deployment = deployment.deployment_of(request)
        if self.deployments.is_draining and take is None and not deployment.goes_on(request):
            deployment.statistics.failed(1, 0, REJECTED)
            raise Unavailable(STOPPING)
        validator = deployment.validator
        try:
            tensors = validator.validate(request)
        except FlowserveError as error:
            deployment.statistics.failed(1, 0, OTHER)
            deployment.statistics.note_error(str(error), wall_clock_ms())
            raise
        flow = (make or deployment.make_flow)(
            deployment.plan if not request.outputs else deployment.plan_for(request.outputs),
            deployment.queues,
            tensors,
            self.clock(),
            request.stamp,
            request,
            deployment,
            request.priority,
            request.timeout_us * 1000,
        )
        flow.wanted = request.outputs or validator.outputs
        for observer in self.observers:
            observer.queued(flow)
        admission = deployment.admission
        if admission is None:
            (take or self.scheduler.submit)(flow)
        elif take is None:
            admission.enter(flow)
        else:
            admission.call(flow, take)  # type: ignore[arg-type]  # `make` made it for that
        self.loop.wake()
        return flow

    def withdraw(self, flow: Flow) -> None:
        """Cancel a flow: its caller is not notified, and its queued tickets leave their queues."""
        flow.waiter = None
        self.tracing.end(flow, has_left=True)
        was_over, has_begun = flow.done, flow.open > 0
        is_counted = was_over
        if isinstance(flow, StreamFlow) and flow.is_over and not flow.plan.graph.is_ensemble:
            is_counted = True  # its last response came just before
        left = self.scheduler.cancel(flow)
        if has_begun and not left and not flow.plan.graph.is_ensemble and not isinstance(flow, StreamFlow):
            is_counted = leave_batch(flow, flow.owner.statistics, self.scheduler)
        if not is_counted:
            flow.owner.statistics.failed(1, self.clock() - flow.arrived_ns, CANCELED)
        if flow.owner.admission is not None and not was_over:  # one that is over leaves by itself
            flow.owner.admission.leave(flow, is_answered=False)
        if self.calls:
            self.calls.sweep()
        self.loop.wake()

    def drop_responses(self, flow: Flow) -> None:
        """The responses of a flow that is over and were not taken are not wanted any more."""
        self.scheduler.cancel(flow)

    def response(self, flow: Flow) -> Response:
        """The response of a finished flow. Raises the error of its steps."""
        if flow.error is not None:
            raise _own(flow.error, flow.owner)
        return self.response_from(flow)

    def response_from(self, flow: Flow) -> Response:
        """The response of a flow that is done and did not fail, or one of several (`StreamFlow.take`)."""
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

    def taken(self) -> None:
        """A caller took a response: models that wait for that may go on."""
        if self.scheduler.streams.is_due:
            self.loop.wake()

    # ------------------------------------------------------------------ for models that call others

    def post(self, what: Callable[[], None]) -> None:
        """Run `work` on the event loop, after all earlier posts. On any thread."""
        self.streams.post(what)

    def _is_served(self, name: str, version: str) -> bool:
        return not self.deployments.outage(self.deployments.find(name, version))

    # ------------------------------------------------------------------ beginning and ending

    def add_model(
        self,
        key: ModelKey,
        batcher: Batcher,
        workers: Sequence[Worker],
        model: LoadedModel,
        passive: Sequence[Worker] = (),
        files: object = None,
        needs: Sequence[Needs] = (),
        *,
        keeps_order: bool = False,
        execution_timeout_ns: int = 0,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Give a model version its queue; graphs announced from now on run on it where they name `key`.

        The `passive` instances are closed in the end as the others are, but get no work. `files` is held until then.
        `needs` are those of each worker at the rate limiter, where there is one. `keeps_order`: responses leave in the
        order in which requests came. `execution_timeout_ns`: a process whose batch runs longer is killed; 0: none is.
        `warm_up`: runs on a restarted instance before it serves.
        """
        groups = {worker.route_group for worker in workers}
        queue = ModelQueue(
            key,
            batcher,
            workers,
            is_pure=model.is_pure,
            observer=self.deployments.statistics_of(key),
            needs=needs,
            keeps_order=keeps_order,
            route_group=groups.pop() if len(groups) == 1 and not execution_timeout_ns else None,
        )
        self.scheduler.add(queue)
        self.generations.add(Generation(queue, [*workers, *passive], model, files))
        mortals = [worker for worker in workers if isinstance(worker, ProcessWorker)]
        self.supervisor.watch(queue, mortals, execution_timeout_ns, warm_up)

    def _forget(self, queue: ModelQueue) -> None:
        """Nothing reaches the queue any more; its instances are about to be closed."""
        self.scheduler.remove(queue)
        self.supervisor.release(queue)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Everything that goes on in the background, for ever. Ends only by cancellation."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.loop.run, name="steps")
            nursery.start_soon(self._ordered_wakeup.run, name="ordered wake-up")
            nursery.start_soon(self.generations.run, name="closing of models")
            await nursery.start(self.supervisor.run)
            if self.processes is not None:
                await nursery.start(self.processes.run)
            task_status.started()

    def refuse_new(self) -> None:
        """From now on requests are refused, but for those of sequences that are open. Not ready any more."""
        self.deployments.is_draining = True
        self.stopping.set()

    async def sequences_over(self, deadline: float) -> None:
        """Wait until no sequence is open, or the loop's time reaches `deadline`. After `refuse_new`."""
        with trio.move_on_at(deadline):
            while self.scheduler.open_sequences:  # noqa: ASYNC110  # as in `drain`
                await trio.sleep(0.01)

    async def drain(self, deadline: float) -> list[str]:
        """Refuse new requests, wait until none is in flight or the loop's time reaches `deadline`. A moment before that
        requests that wait in queues, and streams, are ended with an error.

        Returns a text about the unfinished work: the instances that still run, or the number of requests in flight.
        """
        self.refuse_new()
        left_s = max(deadline - trio.current_time(), 0)
        if await self._emptied(deadline - min(LAST_WORDS_S, left_s / 5)):
            return []
        running = self.busy()
        self.scheduler.fail_all(STOPPING)
        self.loop.wake()
        await trio.sleep_until(deadline)  # their callers are notified meanwhile
        return running or ["requests that wait in queues, or are answered many times"]

    def busy(self) -> list[str]:
        """The instances that compute elsewhere than on the event loop, also those whose callers have all left."""
        return [worker.name for worker in self.generations.workers() if worker.running is not None]

    async def _emptied(self, deadline: float) -> bool:
        with trio.move_on_at(deadline):
            # Polled, because the hot path should pay for no "last one left" event and this happens once in a life.
            while self.scheduler.in_flight:  # noqa: ASYNC110
                await trio.sleep(0.01)
        return not self.scheduler.in_flight

    async def close(self, deadline: float) -> list[str]:
        """Close every instance, those that still run last and only until `deadline`. Returns the ones that did not
        close.
        """
        self.refuse_new()
        self.supervisor.stop()
        self.scheduler.fail_all(STOPPING)
        self.loop.wake()
        return await self.generations.close(deadline)


def _own(error: FlowserveError, deployment: Deployment) -> FlowserveError:
    """An error of the caller's own: one failure may be raised in many tasks, and tracebacks must not pile up on it."""
    text = f"in ensemble '{deployment.name}', {error}{error.lineage}" if deployment.graph.is_ensemble else str(error)
    deployment.statistics.note_error(text, wall_clock_ms())
    return type(error)(text)
