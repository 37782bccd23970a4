"""The engine: requests in, responses out, one step at a time.

Decides how a request becomes a frame and a finished one a response, how a request is cancelled, and in which order the
engine shuts down. Every request runs through `step`: the engine processes completed batches, asks the scheduler for
decisions (scheduling/), executes them in order, and notifies the callers when no decision is left. Also decides how a
caller takes the responses of a stream (`ResponseIterator`), at which points observers are called (`Observer`), and on
which tasks an engine runs (`open_engine`). deployments.py decides which deployments exist, loading/ how models are
loaded, workers/ how batches run. Does not know HTTP. Used on the event loop's thread only.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, Self

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, Internal, ModelFailed, Unavailable, told
from flowserve.graph.plan import Plan
from flowserve.graph.types import ModelKey
from flowserve.observe.log_fields import of_request
from flowserve.observe.statistics import CANCELED, REJECTED
from flowserve.runtime.admission.steps import look_up_all
from flowserve.runtime.clock import running_clock, wall_clock_ms
from flowserve.runtime.engine.accounting import Accounting, record_batch, record_ended
from flowserve.runtime.engine.deployments import Deployment, Deployments, MakeFrame
from flowserve.runtime.engine.loaded import LoadedModels, NewModel
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.group import Group
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.model_calls.calls import Calls
from flowserve.runtime.tracing.traces import Traces
from flowserve.runtime.tracing.tracing import Watch
from flowserve.runtime.workers.base import (
    Completions,
    Outcome,
    Passed,
    Returned,
    Worker,
    WorkerContext,
    cannot_start,
    fields_of,
    log_failure,
    log_unnoticed,
)
from flowserve.runtime.workers.outputs import take_notes
from flowserve.runtime.workers.parameters import NONE, of_ensemble, take_parameters
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.batch import Batch, Grant, Notice, Recall, Responses, Stop, TicketRefused, Withdrawn
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.rate_limit.limiter import Limiter
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import Request, Response, shape_text

log = logging.getLogger("flowserve.runtime")

STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"
# Unfinished requests fail this long before the exit timeout, so that their callers still receive the error.
FAILURE_MARGIN_S: Final = 0.5
TRACES_S_MAX: Final = 5.0  # limit for writing traces; the rest are lost
# A step yields to the event loop after this time.
STEP_NS_MAX: Final = 2_000_000
_DELIVERED_AT_ONCE: Final = 4  # callers that are notified before the time is read again


class Observer(Protocol):
    """Frame on the event loop during a step; tracing is one. Neither an observer nor its exception, which is logged,
    changes the result of a batch. The engine's list of observers is empty without tracing.
    """

    def queued(self, frame: Frame) -> None:
        """A valid request was accepted, and is about to be given to admission control and the scheduler."""

    def batched(self, batch: Batch, now_ns: int) -> None:
        """A batch was formed, and is about to start. `batch.contexts` may be set here."""

    def started(self, batch: Batch) -> None:
        """A batch was passed to its worker, and may already have run."""

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        """A batch has returned; the scheduler is notified afterwards."""

    def finished(self, frame: Frame) -> None:
        """A request has finished with all its outputs; its caller has not been notified yet."""

    def failed(self, frame: Frame) -> None:
        """A request has failed with `frame.record.error`; its caller has not been notified yet."""


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
        # Frame around events that are processed together, without waiting.
        self.begin_events, self.end_events = self.loop.begin_events, self.loop.end_events
        token = trio.lowlevel.current_trio_token()
        self.completions = Completions(token, self._step_now)
        self.streams = ResponseStreams(token, self.scheduler, self.clock, self.loop.wake)
        self.post = self.streams.post  # runs a function on the event loop, after earlier posts; any thread
        self.calls = Calls(self)
        self.context = WorkerContext(
            token, self.clock, self.completions, self.loop.wake, self._release_stages, self.calls
        )
        self.loaded = LoadedModels(self.scheduler, self.context, self.loop, options.restarts)
        self._memory = self.loaded.memory
        self.deployments = Deployments(options, self.clock, self.scheduler, self.loaded)
        self.accounting = Accounting()
        self.observers: list[Observer] = []
        self.traces = Traces(options.trace, self.scheduler, self.streams, self.observers, self.clock)
        self.tracing, self._recent = self.traces.tracing, self.traces.recent_requests
        self.group: Group | None = None  # the other servers behind the same port
        self.stopping = trio.Event()  # for tasks that otherwise run as long as a client listens
        # Tasks that wait for responses that keep an order, to be woken one after the other.
        self._wake_in_order, self._ordered = trio.open_memory_channel[Task](math.inf)
        self._announced = 0  # requests that arrived and are not yet submitted
        self._to_notify: deque[Frame] = deque()  # requests whose caller is to be notified at the end of a step
        # An increasing number, drawn when a request is parsed: it orders the requests of one loop iteration.
        self.next_stamp: Callable[[], int] = count(1).__next__

    # ------------------------------------------------------------------ the step

    def step(self) -> int | None:
        """Complete batches, schedule and execute decisions until no decision is left; then notify the callers. Returns
        the latest time of the next step, in nanoseconds of the clock; None: at the next event.
        """
        if self._memory.awaits_activity:
            self._memory.note_activity()
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
                if decisions.lookups:
                    look_up_all(decisions.lookups)
            at_ns = 0 if completed else scheduler.next_deadline()
            if at_ns != 0:
                break
            now_ns = self.clock()
        if self._to_notify:
            self._deliver()
        if self.accounting.records:
            self.accounting.write()
        return 0 if self._to_notify else at_ns

    def _step_now(self) -> None:
        self.loop.begin_events()
        self.loop.end_events()

    def _run(self, batch: Batch) -> None:
        """Start a batch. If its worker runs it inline, it is complete afterwards."""
        worker: Worker = batch.instance
        if self.observers:
            self._observe("batched", batch, self.clock())
        try:
            outcome = worker.run(batch)
        except Exception as error:
            outcome = cannot_start(worker, batch, error)
        if self.observers:
            self._observe("started", batch)
        if outcome is not None:
            self.completions.waiting.append((batch, outcome))

    def _complete(self, batch: Batch, outcome: Outcome) -> None:
        """Process a completed batch. An internal error meanwhile fails its unfinished members."""
        try:
            worker: Worker = batch.instance
            again: Sequence[Ticket] = ()
            if worker.has_state:
                outcome, again = worker.finish(batch, outcome)
            now_ns = self.clock()
            if self.observers:
                self._observe("computed", batch, outcome, now_ns)
            if again:
                self.scheduler.reschedule(batch, again, now_ns)
            if isinstance(outcome, Returned):
                self.streams.returned(batch, outcome)
                return
            error: FlowserveError | None = None
            made: Sequence[Results] = ()  # results of the stages of its route; one without a route
            if isinstance(outcome, Results):
                made = (outcome,)
            elif isinstance(outcome, Passed):
                made, error = outcome.made, outcome.error
            else:
                error = outcome
            if made:
                self.accounting.computed(batch, made, now_ns, has_failed=error is not None)
                last = made[-1]
                if last.parameters or last.notes is not None:
                    self.accounting.write()  # before errors are added below
                    stage = batch.stage(len(made) - 1)
                    last.errors = take_parameters(stage, last.parameters, last.errors)
                    if last.notes is not None:
                        last.errors = take_notes(stage, last.notes, last.outputs, last.errors)
                if batch.queue.cache is not None:
                    batch.queue.cache.keep(batch, last)
            if error is None:
                self.scheduler.complete(batch, made, None, now_ns)
                if made[-1].raised is not None:
                    log_unnoticed(made[-1].raised, batch.stage(len(made) - 1))
            else:
                self._fail(batch, made, error, now_ns)
            for results in made:
                results.outputs = ()
        except Exception as fault:
            self._break_off(batch, fault)

    def _fail(self, batch: Batch, made: Sequence[Results], error: FlowserveError, now_ns: int) -> None:
        """A batch failed in the stage after those of `made`."""
        stage = batch.stage(len(made))
        if made:
            self.accounting.write()
            stage.begin_at(made[-1].computed_ns)
        if self.scheduler.complete(batch, made, error, now_ns):  # parts of it are retried
            return
        record_batch(stage.queue.statistics, stage, error, now_ns)
        log_unnoticed(error, stage)

    def _break_off(self, batch: Batch, error: Exception) -> None:
        """Handle an internal error in the completion of a batch; if it propagated, it would stop the server."""
        model, name = batch.queue.key.name, batch.instance.name
        log.error(
            "instance %s: the results of a batch cannot be processed", name, exc_info=error, extra=fields_of(batch)
        )
        reason = told(error, f"{type(error).__name__}: {error}", len(batch.tickets))
        what = f"the results of a batch cannot be processed: {reason}"
        try:
            self.scheduler.break_off(batch, Internal(f"model '{model}', instance '{name}': {what}"))
        except Exception:
            text = "not every member could be told that a batch of model '%s' failed"
            log.exception(text, model, extra=fields_of(batch))

    def _carry_out(self, notice: Notice) -> None:
        try:
            if isinstance(notice, TicketRefused | Withdrawn):
                self.accounting.noticed(notice, self.clock())
            elif isinstance(notice, Responses):
                self._has_responses(notice.stream)
            elif isinstance(notice, Grant):
                notice.sender.grant(notice.credits)
            elif isinstance(notice, Stop):
                notice.sender.withdraw()
            elif isinstance(notice, Recall):
                notice.batch.instance.recall(notice.batch)
        except Exception:  # it concerns one request; the others continue
            log.exception("%s could not be carried out", type(notice).__name__)

    def _has_responses(self, frame: RegionFrame) -> None:
        if not frame.stream.is_answered:
            frame.stream.is_answered = True
            if frame.plan.graph.is_ensemble:
                frame.record.owner.statistics.first_answered(self.clock() - frame.record.arrived_ns)
        if frame.record.waiter is not None:
            self._to_notify.append(frame)

    def _finish(self, frames: Sequence[Frame]) -> None:
        """Release what finished requests hold (a sequence, a place in admission control), report them to observers, and
        queue the notification of their callers.
        """
        now_ns = self.clock()
        has_failed = False
        over, pending = [*frames], deque(frames)
        while pending:
            frame = pending.popleft()
            if frame.record.waiter is not None:
                self._to_notify.append(frame)
            try:
                if frame.record.error is not None:
                    has_failed = True
                    if self._recent.is_open:
                        self._recent.failed(frame)  # before tracing, as an observer, forgets it
                if self.observers:
                    self._observe("finished" if frame.record.error is None else "failed", frame)
                owner: Deployment = frame.record.owner
                if owner.opening_sequences:
                    owner.sequence_request_over(frame)
                admission = owner.admission
                if admission is not None:
                    admission.leave(frame)
                    # Cached responses that waited for this one come before whatever finished after it.
                    answered = self.scheduler.take_finished()
                    pending.extendleft(reversed(answered))
                    over += answered
            except Exception:  # it concerns one request; the others are accounted for and delivered
                name = frame.plan.graph.name
                log.exception(
                    "accounting for a request of '%s' failed", name, extra=of_request(frame.request, model=name)
                )
        self.accounting.finished(over, now_ns)
        if has_failed and self.calls:  # running steps of these requests may have called other models
            self.calls.sweep()

    def _deliver(self) -> None:
        """Notify the callers, after free instances got their next batches, because writing responses takes time. The
        callers of a large batch are notified in several steps, between which the rest of the server runs.
        """
        waiting = self._to_notify
        began_ns = self.clock() if len(waiting) > _DELIVERED_AT_ONCE else 0
        for n in range(len(waiting)):
            if n and not n % _DELIVERED_AT_ONCE and self.clock() - began_ns > STEP_NS_MAX:
                break
            frame = waiting.popleft()
            waiter, frame.record.waiter = frame.record.waiter, None
            if waiter is not None:  # the caller may have left meanwhile
                try:
                    waiter(frame)
                except Exception:  # it concerns one caller; the others are notified
                    name = frame.plan.graph.name
                    extra = of_request(frame.request, model=name)
                    log.exception("delivering a response of '%s' failed", name, extra=extra)

    def _observe(self, point: str, *arguments: Any) -> None:
        """Call all observers at this point. Their exceptions change nothing."""
        for observer in [*self.observers]:
            try:
                getattr(observer, point)(*arguments)
            except Exception:
                log.exception("an observer failed at '%s'", point)

    def _release_stages(self, batch: Batch, stages: Sequence[int]) -> None:
        self.scheduler.routes.release(batch, stages)
        self.loop.wake()

    # ------------------------------------------------------------------ serving

    @contextmanager
    def announced(self) -> Iterator[bool]:
        """A request has arrived, and threads decode it in this block: a drain waits for the end of the block. Yields
        whether the request is accepted, which holds even if a drain begins meanwhile; the request is submitted right
        after the block, without waiting.
        """
        self._announced += 1
        try:
            yield not self.deployments.is_draining
        finally:
            self._announced -= 1

    async def infer(
        self, deployment: Deployment, request: Request, make: MakeFrame | None = None, *, is_accepted: bool = False
    ) -> Response:
        """Run one request. Arrays of the response include the batch dimension if the deployment batches. `make` and
        `is_accepted` are as in `submit`.

        Raises Invalid for a request that does not fit the deployment, and the errors of its steps. If the
        caller is cancelled, its queued steps are withdrawn and its running steps finish.
        """
        loop = self.loop
        loop.begin_events()
        frame: Frame | None = None
        try:
            frame = self.submit(deployment, request, make, is_accepted=is_accepted)
        finally:
            loop.put_off_events()
            # Tasks that keep an order are woken one after the other.
            takes_part = frame is not None and not frame.record.done and not deployment.keeps_order
            if not takes_part:
                loop.wake()
        if takes_part:
            try:
                await loop.take_part()  # the request is then done if its models run on the event loop
            except BaseException:
                if not frame.record.done:
                    self.withdraw(frame)
                raise
        if not frame.record.done:
            task = current_task()
            wake = self._wake_in_order.send_nowait if deployment.keeps_order else reschedule
            frame.record.waiter = lambda _: wake(task)

            def leave(_: RaiseCancelT) -> Abort:
                if frame.record.waiter is None:  # already notified: its wake-up is queued
                    return Abort.FAILED
                self.withdraw(frame)
                return Abort.SUCCEEDED

            await wait_task_rescheduled(leave)
        return self.response(frame)

    def stream(
        self, deployment: Deployment, request: Request, watch: Watch | None = None, *, is_accepted: bool = False
    ) -> ResponseIterator:
        """Begin one request with any number of responses, which are taken one by one. Raises as `submit` does. `watch`:
        records its trace; closed when no more responses are taken. `is_accepted` is as in `submit`.
        """
        make = deployment.make_stream if watch is None else watch.make(deployment.make_stream)
        return ResponseIterator(self, self.submit(deployment, request, make, is_accepted=is_accepted), watch)

    def call(self, batch: Batch | None, deployment: Deployment, request: Request, *, is_stream: bool) -> Frame:
        """Begin a request of a model, made during the execution of `batch` if that is not None. As `submit`, but also
        while the server drains, and without waiting for admission. Raises Unavailable if it could never be answered.
        """
        # If steps share slots, responses are taken one by one for `run` and `stream` alike.
        nested = deployment.make_stream if is_stream or not deployment.is_decoupled else deployment.make_frame
        request.stamp = self.next_stamp()
        if batch is not None and batch.tickets:
            request.trace_context = getattr(batch.tickets[0].frame.whole.request, "trace_context", "")
        made: list[Frame] = []

        def make(plan: Plan, *facts: Any) -> Frame:
            frame = nested(plan, *facts)
            if batch is not None and self.tracing.is_live:
                self.tracing.begin_call(batch, frame)
            made.append(frame)
            return frame

        try:
            frame = self.submit(deployment, request, make, partial(self.scheduler.call, batch))
        except FlowserveError:
            for one in made:  # it is valid, but too large to be admitted, or could never be answered
                self.tracing.end(one)
            raise
        if frame.record.done:  # answered from the cache: it is not queued
            self.tracing.end(frame)
        return frame

    def submit(
        self,
        deployment: Deployment,
        request: Request,
        make: MakeFrame | None = None,
        enqueue: Callable[[Any], None] | None = None,
        *,
        is_accepted: bool = False,
    ) -> Frame:
        """Begin one request without waiting for it. It may be done at once; otherwise `frame.record.waiter`, if set, is
        called with the request when it is done. `make` makes its frame, by default `deployment.make_frame`; `enqueue`
        queues it, by default in the scheduler. The server's own requests pass another `enqueue`, and are accepted
        during a drain too, as are requests that were accepted before it (`is_accepted`, `announced`).

        Raises Invalid for a request that does not fit the deployment, TooLarge and Unavailable for one that is not
        admitted, and Unsupported for a deployment that may respond any number of times, unless `make` is its
        `make_stream`.
        """
        if deployment.predecessor is not None:
            deployment = deployment.deployment_of(request)
        if (
            self.deployments.is_draining
            and enqueue is None
            and not (is_accepted and not self.scheduler.ending)
            and not deployment.continues_sequence(request)
        ):
            deployment.statistics.failed(1, 0, REJECTED)
            raise Unavailable(STOPPING)
        try:
            tensors = deployment.validator.validate(request)
        except FlowserveError as error:
            self._record_invalid(deployment, request, error)
            raise
        plan, wanted = deployment.plan, deployment.validator.outputs
        if request.outputs:
            plan, wanted = deployment.plan_for(request.outputs)
        frame = (make or deployment.make_frame)(
            plan,
            deployment.queues,
            tensors,
            self.clock(),
            request.stamp,
            request,
            deployment,
            request.priority,
            request.timeout_us * 1000,
        )
        frame.wanted = wanted
        if self.observers:
            self._observe("queued", frame)
        admission = deployment.admission
        try:
            if admission is None:
                (enqueue or self.scheduler.submit)(frame)
            elif enqueue is None:
                admission.enter(frame)
            else:
                admission.call(frame, enqueue)
        except FlowserveError as error:
            record_ended(frame, REJECTED, 0)
            if self._recent.is_open and not self.tracing.is_traced(frame):
                self._recent.refused(ModelKey(deployment.name, deployment.version), request.id, str(error))
            raise
        if request.sequence_start and deployment.sequences and not frame.record.done:
            deployment.sequence_begins(frame)
        self.loop.wake()
        return frame

    def check(self, deployment: Deployment, request: Request) -> None:
        """Raises `Invalid` if `submit` would. The inputs may be placeholders whose data is not read yet."""
        if deployment.predecessor is not None:
            deployment = deployment.deployment_of(request)
        try:
            deployment.validator.validate(request)
        except FlowserveError as error:
            self._record_invalid(deployment, request, error)
            raise

    def _record_invalid(self, deployment: Deployment, request: Request, error: FlowserveError) -> None:
        deployment.record_invalid(error)
        if self._recent.is_open:
            self._recent.refused(ModelKey(deployment.name, deployment.version), request.id, str(error))

    def withdraw(self, frame: Frame) -> None:
        """Cancel a request: its caller is not notified, and its queued tickets leave their queues."""
        frame.record.waiter = None
        self.tracing.end(frame, has_left=True)
        was_over = frame.record.done
        self.scheduler.cancel(frame)
        if frame.record.owner.opening_sequences:
            frame.record.owner.sequence_request_over(frame)
        if not was_over:
            record_ended(frame, CANCELED, self.clock() - frame.record.arrived_ns)
        if frame.record.owner.admission is not None and not was_over:  # a finished one leaves by itself
            frame.record.owner.admission.leave(frame, is_answered=False)
        if self.calls:
            self.calls.sweep()
        self.loop.wake()

    def response(self, frame: Frame) -> Response:
        """The response of a finished request. Raises the error of its steps."""
        if frame.record.error is not None:
            raise _own(frame.record.error, frame)
        return self.response_from(frame)

    def response_from(self, frame: Frame, *, is_final: bool = True) -> Response:
        """The response of a request that finished without error, or one of several (`RegionFrame.take`). `is_final`:
        whether it is the last.
        """
        deployment: Deployment = frame.record.owner
        slots = frame.tensors
        outputs = {}
        for name in frame.wanted:
            tensor = slots[deployment.output_slot[name]]
            if tensor is not None:
                if name in deployment.output_conversions:
                    try:
                        tensor = tensor.converted(deployment.output_conversions[name])
                    except ValueError:  # varying dims of both ends agree, and the actual shape does not
                        text = f"output '{name}' of '{deployment.name}' cannot be made of shape"
                        raise ModelFailed(f"{text} {shape_text(tensor.shape)}") from None
                outputs[name] = tensor.array
        request = frame.request
        parameters = of_ensemble(request) if deployment.graph.is_ensemble else frame.parameters or NONE
        return Response(deployment.name, deployment.version, outputs, request.id, parameters, is_final)

    def taken(self) -> None:
        """A caller took a response: models that wait for that may continue."""
        if self.scheduler.streams.is_due:
            self.loop.wake()

    # ------------------------------------------------------------------ start and end

    def add_model(self, new: NewModel) -> None:
        """Add a model version; graphs that are announced from now on use it."""
        cache = self.deployments.step_cache(new.key) if new.is_cached else None
        self.loaded.add(new, self.deployments.statistics_of(new.key), cache)

    async def unready(self, deployment: Deployment) -> str:
        """Why a loaded deployment is not ready, or "": it cannot serve at present, or one of its models says so."""
        if outage := self.deployments.outage(deployment):
            return outage
        return await self.loaded.objection(deployment.queues)

    def is_served(self, name: str, version: str) -> bool:
        """Whether this version is ready. Raises as `Deployments.find`."""
        return not self.deployments.outage(self.deployments.find(name, version))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks. Ends only by cancellation."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.loop.run, name="steps")
            nursery.start_soon(self._wake_ordered, name="ordered wake-up")
            await nursery.start(self.loaded.run)
            task_status.started()

    async def _wake_ordered(self) -> None:
        """Wake each task in a loop iteration of its own (`receive` ends one): trio runs the tasks that are ready in one
        iteration in any order.
        """
        async for task in self._ordered:
            reschedule(task)

    def refuse_new(self) -> None:
        """Refuse requests from now on, except those of open sequences. The server is no longer ready."""
        self.deployments.is_draining = True
        self.stopping.set()

    async def sequences_over(self, deadline: float) -> None:
        """Wait until no sequence is open, or the loop's time reaches `deadline`. After `refuse_new`."""
        await _poll(lambda: not any(one.live for one in self.scheduler.models.sequences), deadline)

    async def drain(self, deadline: float) -> list[str]:
        """Refuse new requests, wait until none is in flight or the loop's time reaches `deadline`. Shortly before the
        deadline, waiting requests and streams are failed.

        Returns a text about the unfinished work: the instances that still run, or the number of requests in flight.
        """
        self.refuse_new()
        left_s = max(deadline - trio.current_time(), 0)
        if await _poll(
            lambda: not (self.scheduler.in_flight or self._announced or self._to_notify),
            deadline - min(FAILURE_MARGIN_S, left_s / 5),
        ):
            return []
        running = self.loaded.busy()
        self.scheduler.fail_all(STOPPING)
        self.loop.wake()
        await trio.sleep_until(deadline)  # their callers are notified meanwhile
        return running or ["requests that wait in queues, or are answered many times"]

    async def close(self, deadline: float) -> list[str]:
        """Close every instance, running ones last and only until `deadline`. Returns those that did not close."""
        self.refuse_new()
        self.loaded.supervisor.stop()
        self.scheduler.fail_all(STOPPING)
        self.loop.wake()
        return await self.loaded.generations.close(deadline)


async def _poll(is_over: Callable[[], bool], deadline: float) -> bool:
    """Wait until `is_over`, or the loop's time reaches `deadline`. Returns the last result of `is_over`. Polled, so
    that the request path does not have to report its last request; this runs once per server.
    """
    with trio.move_on_at(deadline):
        while not is_over():  # noqa: ASYNC110
            await trio.sleep(0.01)
    return is_over()


def _own(error: FlowserveError, frame: Frame) -> FlowserveError:
    """A copy of the error for one caller: one error may be raised in many tasks, each of which would extend its
    traceback.
    """
    deployment: Deployment = frame.record.owner
    text = f"in ensemble '{deployment.name}', {error}{error.lineage}" if deployment.graph.is_ensemble else str(error)
    deployment.statistics.note_error(text, wall_clock_ms())
    if isinstance(error, Internal):  # the operator has to act, and the client may be someone else's
        extra = of_request(frame.request, model=deployment.name)
        log_failure("a request to '%s' failed: %s", deployment.name, text, error=error, extra=extra)
    return type(error)(text)


class ResponseIterator:
    """The responses to one request, one after the other, as its caller takes them: an async iterator, and a context
    manager: leaving it withdraws a request that is not over.

    Raises the error of the request after the earlier responses. For one task. Untaken responses cause backpressure: a
    decoupled model waits in send() once there are too many. A request to a deployment that responds once has one
    response.
    """

    def __init__(self, engine: Engine, frame: Frame, watch: Watch | None = None) -> None:
        self._engine = engine
        self._frame = frame
        self._watch = watch  # records the trace of the request, if it is traced
        self._is_taken = False  # whether the response of a request with only one was taken

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Withdraw the request. No effect after the last response."""
        if not self._frame.record.done:
            self._engine.withdraw(self._frame)
        else:
            self._engine.scheduler.cancel(self._frame)  # untaken responses are dropped
        if self._watch is not None:
            self._watch.close()

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> Response:
        frame = self._frame
        while True:
            if isinstance(frame, RegionFrame) and frame.is_stream:
                response = frame.take()
                if response is not None:
                    self._engine.taken()
                    return self._engine.response_from(response, is_final=frame.stream.has_ended)
            elif frame.record.done and not self._is_taken:
                self._is_taken = True
                return self._engine.response(frame)
            if frame.record.done:
                if frame.record.error is not None:
                    self._engine.response(frame)  # raises it
                raise StopAsyncIteration
            await self._wait()

    async def _wait(self) -> None:
        task = current_task()
        self._frame.record.waiter = lambda _: reschedule(task)

        def stop_waiting(_: RaiseCancelT) -> Abort:
            self._frame.record.waiter = None
            return Abort.SUCCEEDED

        await wait_task_rescheduled(stop_waiting)


@asynccontextmanager
async def open_engine(
    options: EngineOptions,
    *,
    on_close: Callable[[list[str]], None] | None = None,
    exit_timeout_s: float = 30.0,
    deadline: Callable[[], float] = lambda: math.inf,
) -> AsyncIterator[Engine]:
    """A running engine without models. Leaving the block closes every instance, within `exit_timeout_s` at most, and
    not past `deadline()` on the loop's clock, which is called at that time: a server that has drained requests before
    has less time left.
    """
    async with _machinery() as machinery:
        engine = Engine(options)
        await machinery.start(engine.run)
        if engine.loaded.processes is None:
            log.info("Python models run on threads and share one process: processes of their own need Linux 5.3")
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                hung = await engine.close(min(trio.current_time() + exit_timeout_s, deadline()))
                with trio.move_on_after(TRACES_S_MAX):
                    await trio.to_thread.run_sync(engine.traces.close, abandon_on_cancel=True)
                if on_close is not None:
                    on_close(hung)
                if engine.loaded.processes is not None:
                    await engine.loaded.processes.close()


@asynccontextmanager
async def _machinery() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that run until the block ends, even if the block is cancelled from outside, because closing
    needs them. An exception of one of them still ends the block.
    """

    async def work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as machinery:
            machinery.cancel_scope.shield = True
            task_status.started(machinery)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope(shield=True):  # cancelled, `start` would wait for the end of the task
            machinery = await nursery.start(work)
        try:
            yield machinery
        finally:
            machinery.cancel_scope.cancel()
