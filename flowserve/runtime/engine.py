"""The engine: deployments by name, requests in, responses out.

Decided here: how a request finds its deployment, what a caller who leaves means, and the order in which the engine
ends. Scheduling is the dispatcher's, loading is loader.py's, computing is the hosts'. It does not know HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import trio
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.backends.base import LoadedModel, Results
from flowserve.config.gate import gate_options
from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Invalid, NotFound, Unavailable
from flowserve.graph.plan import Plan
from flowserve.graph.types import GRAPH, Graph, ModelKey
from flowserve.memory.arena import Arena
from flowserve.observe.statistics import CANCELED, OTHER, REJECTED, Statistics, rows_as_json
from flowserve.observe.summary import summarising
from flowserve.runtime.accounts import record_batch, record_ensemble
from flowserve.runtime.answers import Answers
from flowserve.runtime.cache import Cache, Lru
from flowserve.runtime.calls import Calls
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.clock import running_clock, wall_clock_ms
from flowserve.runtime.deployment import NO_LABELS, Deployment, Entry, MakeFlow
from flowserve.runtime.gate import Gate
from flowserve.runtime.hosts import PYTHON_EXECUTION, Processes
from flowserve.runtime.instance import Completions, Host, Outcome
from flowserve.runtime.lifecycle import Generation, Generations
from flowserve.runtime.parameters import NONE, of_ensemble, take_parameters
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.pump import Pump
from flowserve.runtime.streaming import Returned, Streaming
from flowserve.runtime.supervisor import Supervisor, WarmUp
from flowserve.runtime.traces import TraceOptions, Traces
from flowserve.runtime.tracing import Tracing
from flowserve.runtime.turnstile import Turnstile
from flowserve.runtime.watch import Watch
from flowserve.scheduling.backoff import DELAYS, Delays
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import Batcher
from flowserve.scheduling.calls import Called, CalledFlow
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Available, Limiter, Needs
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow
from flowserve.values import Request, Response

log = logging.getLogger("flowserve.runtime")

STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"
# Of the exit timeout: what is left, when time is up, for telling those who still wait.
LAST_WORDS_S: Final = 0.5

TRACES_S_MAX: Final = 5.0  # what is not written by then is lost


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator chose. `python_execution`: "process", "thread" or "inline". `gpus` are those that
    instances may be on.
    `rate_limit`: None is off; else the resources that were given, none of them meaning that models' own needs decide.
    `backend_settings`: by backend, what the operator says for all its models ("default-max-batch-size", and what the
    backend knows); of whole numbers where the backend is onnxruntime.
    `cache_bytes`: how much the answers that are remembered may weigh, None for no such cache.
    `summaries`: quantiles of the last minute's durations are worked out.
    `model_config_name`: which of the configurations that models have by name counts, where they have it.
    """

    python_execution: str = PYTHON_EXECUTION
    gpus: Gpus = NO_GPUS
    strict_readiness: bool = True
    rate_limit: tuple[Available, ...] | None = None
    restarts: Delays = DELAYS
    cache_bytes: int | None = None
    backend_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    trace: TraceOptions = field(default_factory=TraceOptions)
    summaries: bool = False
    model_config_name: str = ""


class Engine:
    """Serves deployments. Made by `open_engine`; touched only from its trio thread."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.entries: dict[str, Entry] = {}
        self.clock = running_clock()
        self.limiter = None if options.rate_limit is None else Limiter(options.rate_limit)
        if self.limiter is None:
            self.dispatcher = Dispatcher(self._start, self._answered, self._refused, self._has_answers)
        else:
            self.dispatcher = LimitedDispatcher(
                self._start, self._answered, self.limiter, refused=self._refused, told=self._has_answers
            )
        self.completions = Completions(trio.lowlevel.current_trio_token(), self._returned)
        self.generations = Generations(self._forget)
        self.processes = Processes(self.clock) if SUPPORTED else None
        self._statistics: dict[ModelKey, Statistics] = {}
        self._make_statistics = summarising(self.clock) if options.summaries else Statistics
        self._cache: Cache | None = None if options.cache_bytes is None else Lru(options.cache_bytes)
        self._pump = Pump(self.dispatcher, self.clock, self._tell)
        self.streaming = Streaming(self.completions.token, self.dispatcher, self.clock, self._pump.poke)
        self.calls = self.completions.calls = Calls(self)
        self.supervisor = Supervisor(self.dispatcher, self.completions, self._pump.poke, self.clock, options.restarts)
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
        self._stamps = count(1)
        self._is_loaded = False
        self._is_draining = False
        self.stopping = trio.Event()  # for whatever would go on for as long as somebody listens

    # ------------------------------------------------------------------ asking

    @property
    def is_live(self) -> bool:
        """The loop turns, or nobody could ask."""
        return True

    @property
    def is_ready(self) -> bool:
        """Everything that should serve does, and the server is not going away.

        What should serve: all that the server was started with, and all that has served since, unless it was unloaded.
        """
        if not self._is_loaded or self._is_draining:
            return False
        return not self.options.strict_readiness or all(
            entry.state == "READY" and not any(map(self.outage, entry.ready.values()))
            for entry in self.entries.values()
            if entry.is_wanted
        )

    def outage(self, deployment: Deployment) -> str:
        """Why a deployment that is loaded does not answer just now, or "": no instance of a model it needs lives."""
        return self.supervisor.outage(deployment.route)

    def next_stamp(self) -> int:
        """A number that grows; drawn while a request is parsed, it orders requests of one turn of the loop."""
        return next(self._stamps)

    def find(self, name: str, version: str = "") -> Deployment:
        """The deployment of that name, its latest version where none is asked for.

        Raises NotFound for an unknown name or version, Unavailable for one that is not ready, Invalid for a version
        that is no number.
        """
        entry = self.entries.get(name)
        if entry is not None and not version:
            latest = entry.latest
            if latest is not None:
                return latest
        return self._find_version(entry, name, version)

    def _find_version(self, entry: Entry | None, name: str, version: str) -> Deployment:
        if version and not (_is_version(version) and int(version) > 0):
            raise Invalid(
                f"failed to get model version from specified version string '{version}': not a positive number"
            )
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version and int(version) in entry.ready:
            return entry.ready[int(version)]
        if entry.state != "READY":
            reason = f": {entry.reason}" if entry.reason else ""
            which = f" version {version}" if version else ""
            raise Unavailable(f"Request for unknown model: '{name}'{which} is not at ready state{reason}")
        if not version:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Rows of the repository index: one per loaded version, one per name that has none."""
        rows: list[dict[str, str]] = []
        for name, entry in sorted(self.entries.items()):
            reason = {"reason": entry.reason} if entry.reason else {}
            for version in entry.versions:
                outage = self.outage(entry.ready[version])
                if not outage:
                    rows.append({"name": name, "version": str(version), "state": "READY", **reason})
                elif not ready_only:
                    rows.append({"name": name, "version": str(version), "state": "UNAVAILABLE", "reason": outage})
            if not entry.versions and not ready_only:
                rows.append({"name": name, "state": entry.state, "reason": entry.reason})
        return rows

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Rows of the statistics extension: of one name, one version, or of everything that is ready."""
        if not name:
            return rows_as_json(list(self._statistics.values()))
        entry = self.entries.get(name)
        if entry is None or not entry.ready:
            raise Invalid(f"requested model '{name}' is not available")
        if not version:
            return rows_as_json([deployment.statistics for deployment in entry.ready.values()])
        if not _is_version(version) or int(version) not in entry.ready:
            raise Invalid(f"requested model version is not available for model '{name}'")
        return rows_as_json([entry.ready[int(version)].statistics])

    def counters(self) -> list[tuple[Statistics, int]]:
        """Every deployment version's counters, and how many requests wait in its model's queue (0 for an ensemble)."""
        waiting = self.dispatcher.waiting()
        return [(statistics, waiting.get(key, 0)) for key, statistics in self._statistics.items()]

    # ------------------------------------------------------------------ serving

    async def infer(self, deployment: Deployment, request: Request, make: MakeFlow | None = None) -> Response:
        """Run one request. Arrays of the answer include the batch dimension where the deployment batches. `make` is as
        in `submit`.

        Raises Invalid for a request that does not fit the deployment, and whatever its steps failed with. A caller
        who is cancelled leaves: what is still queued for it is withdrawn, what runs runs out.
        """
        flow = self.submit(deployment, request, make)
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
        nested = deployment.make_stream if is_stream else deployment.make_flow
        request.stamp = self.next_stamp()

        def make(plan: Plan, *facts: Any) -> Flow:
            flow: Flow = (CalledFlow if plan.nesting is None else nested)(plan, *facts)
            if batch is not None and self.tracing.is_live:
                self.tracing.begin_call(batch, flow)
            return flow

        def take(flow: Called) -> None:
            try:
                self.dispatcher.call(batch, flow)
            except FlowserveError:
                self.tracing.end(flow)
                raise

        begun: Called = self.submit(deployment, request, make, take)  # type: ignore[assignment]
        return begun

    def submit(
        self,
        deployment: Deployment,
        request: Request,
        make: MakeFlow | None = None,
        take: Callable[[Any], None] | None = None,
    ) -> Flow:
        """Begin one request without waiting for it. It may be done at once; otherwise `flow.waiter`, where it is set,
        is called with the flow when it is. Raises as `infer` does for what is refused at the door; Unsupported for a
        deployment that may answer any number of times, unless `make` is its `make_stream`. `take` is for `call`.
        """
        if deployment.elder is not None:
            deployment = deployment.place_of(request)
        admission = deployment.admission
        if self._is_draining and take is None and not deployment.goes_on(request):
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
        now_ns = self.clock()
        for queue in self.dispatcher.cancel(flow):
            if flow.plan.graph.is_ensemble:
                queue.observer.failed(1, 0, CANCELED)
        flow.owner.statistics.failed(1, now_ns - flow.arrived_ns, CANCELED)
        if flow.owner.gate is not None:
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
        outcome = host.start(batch)
        if outcome is not None:
            self._finished(batch, outcome)

    def _returned(self, batch: Batch, outcome: Outcome) -> None:
        self._finished(batch, outcome)
        self._pump.returned()

    def _finished(self, batch: Batch, outcome: Outcome) -> None:
        now_ns = self.clock()
        if isinstance(outcome, Results):
            record_batch(batch.queue.observer, batch, outcome, now_ns)
            if outcome.parameters:
                outcome.errors = take_parameters(batch, outcome.parameters, outcome.errors)
            self.dispatcher.batch_done(batch, outcome.outputs, outcome.errors, now_ns)
        elif isinstance(outcome, Returned):
            self.streaming.returned(batch, outcome)
        elif not self.dispatcher.batch_failed(batch, outcome):
            record_batch(batch.queue.observer, batch, outcome, now_ns)

    def _refused(self, queue: ModelQueue, ticket: Ticket, now_ns: int) -> None:
        queue.observer.failed(1, now_ns - ticket.queued_ns, REJECTED)

    def _answered(self, flow: Flow) -> None:
        is_counted = False
        if flow.owner.gate is not None:
            is_counted = flow.owner.gate.leave(flow)
            self._pump.poke()  # others may be let in
        if flow.plan.graph.is_ensemble and not is_counted:
            record_ensemble(flow, self.clock())
        if flow.error is not None and self.calls:  # what runs of it may have called others
            self.calls.sweep()
        self._ready(flow)

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
        for flow in told:
            waiter, flow.waiter = flow.waiter, None
            if waiter is not None:  # its caller may have left in between
                waiter(flow)

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
        statistics = self._statistics.setdefault(key, self._make_statistics(key.name, key.version))
        queue = ModelQueue(
            key, batcher, hosts, is_pure=model.is_pure, observer=statistics, needs=needs, keeps_order=keeps_order
        )
        self.dispatcher.add(queue)
        self.generations.add(Generation(queue, [*hosts, *passive], model, files))
        mortals = [host for host in hosts if isinstance(host, ProcessHost)]
        self.supervisor.watch(queue, mortals, execution_timeout_ns, warm_up)

    def _forget(self, queue: ModelQueue) -> None:
        """Nothing reaches the queue any more; its instances are about to be closed."""
        self.dispatcher.remove(queue)
        self.supervisor.release(queue)

    def announce(self, config: ModelConfig, *graphs: Graph, labels: Mapping[str, Sequence[str]] = NO_LABELS) -> None:
        """From now on requests for this name run on these graphs, one for each version, and on no others. The models
        they need were added before. `labels` are those of the graphs' outputs.
        """
        entry = self.entries.setdefault(config.name, Entry(config.name))
        versions = sorted(graph.version for graph in graphs)
        self._forget_statistics(entry, versions)
        former, latest = entry.ready, entry.latest
        entry.ready = {graph.version: self._deployment(config, graph, versions, labels) for graph in graphs}
        for version, deployment in entry.ready.items():
            elder = former.get(version, latest)
            if elder is not None:
                deployment.replaces(elder)
        entry.versions = versions
        entry.state, entry.reason, entry.is_wanted = "READY", "", True

    def _deployment(
        self, config: ModelConfig, graph: Graph, versions: list[int], labels: Mapping[str, Sequence[str]]
    ) -> Deployment:
        key = ModelKey(graph.name, graph.version)
        statistics = self._statistics.setdefault(key, self._make_statistics(key.name, key.version))
        runs_on = [self.generations[node.model] for node in graph.nodes]
        route = tuple(generation.queue for generation in runs_on)
        pins = frozenset(one.pin for one in runs_on)
        deployment = Deployment(config, graph, statistics, versions, route, pins, labels)
        deployment.arena = _arena_of(graph, route)
        options = gate_options(config.parameters)
        may_remember = deployment.plan.nesting is None and not deployment.sequences  # an answer depends on those before
        cache = self._cache if config.response_cache and may_remember else None
        if cache is not None or not options.is_open:
            deployment.gate = Gate(options, cache, key, deployment.output_slot, statistics, self.dispatcher, self.clock)
        return deployment

    def withdraw_name(self, name: str, reason: str) -> None:
        """From now on requests for this name are refused, with the reason. Those in flight finish."""
        entry = self.entries.setdefault(name, Entry(name))
        self._forget_statistics(entry, ())
        entry.ready, entry.versions = {}, []
        entry.state, entry.reason = "UNAVAILABLE", reason

    def _forget_statistics(self, entry: Entry, versions: Collection[int]) -> None:
        for version in entry.versions:
            if version not in versions:
                self._statistics.pop(ModelKey(entry.name, version), None)

    def loaded(self) -> None:
        """Loading is over; from now on the state of each entry decides readiness."""
        self._is_loaded = True

    async def run_pump(self) -> None:
        await self._pump.run()

    async def run_turnstile(self) -> None:
        await self._turnstile.run()

    def refuse_new(self) -> None:
        """From now on requests are refused, but for those of sequences that are open. Not ready any more."""
        self._is_draining = True
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
        running = [host.name for host in self.generations.hosts() if host.running is not None]
        self.dispatcher.fail_all(STOPPING)
        self._pump.poke()
        await trio.sleep_until(deadline)  # they are told meanwhile
        return running or ["requests that wait in queues, or are answered many times"]

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


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20  # int() has a limit of its own, far beyond


def _arena_of(graph: Graph, route: Sequence[ModelQueue]) -> Arena | None:
    """That of the one model in processes that reads all of a request; a body holds what is meant for nobody else."""
    readers = {edge.consumer for edge in graph.edges if edge.producer == GRAPH}
    if len(readers) != 1 or GRAPH in readers:
        return None
    hosts = route[readers.pop()].instances
    return hosts[0].arena if hosts and isinstance(hosts[0], ProcessHost) else None


def _own(error: FlowserveError, deployment: Deployment) -> FlowserveError:
    """An error of the caller's own: one failure may be raised in many tasks, and tracebacks must not pile up on it."""
    text = f"in ensemble '{deployment.name}', {error}{error.lineage}" if deployment.graph.is_ensemble else str(error)
    deployment.statistics.told(text, wall_clock_ms())
    return type(error)(text)


@asynccontextmanager
async def open_engine(
    options: EngineOptions, *, on_close: Callable[[list[str]], None] | None = None, exit_timeout_s: float = 30.0
) -> AsyncIterator[Engine]:
    """An engine whose pump runs, empty until something is loaded into it. Leaving the block closes every instance."""
    async with _machinery() as machinery:
        engine = Engine(options)
        machinery.start_soon(engine.run_pump, name="pump")
        machinery.start_soon(engine.run_turnstile, name="turnstile")
        machinery.start_soon(engine.generations.run, name="reaper")
        await machinery.start(engine.supervisor.run, name="supervisor")
        if engine.processes is not None:
            await machinery.start(engine.processes.run, name="processes")
        else:
            log.info("Python models run on threads and share one process: processes of their own need Linux 5.3")
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                hung = await engine.close(trio.current_time() + exit_timeout_s)
                with trio.move_on_after(TRACES_S_MAX):
                    await trio.to_thread.run_sync(engine.traces.close, abandon_on_cancel=True)
                if on_close is not None:
                    on_close(hung)
                if engine.processes is not None:
                    await engine.processes.close()


@asynccontextmanager
async def _machinery() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that go on until the block ends, also where it is cancelled from outside: closing needs
    them. What one of them raises still ends the block.
    """

    async def work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as machinery:
            machinery.cancel_scope.shield = True
            task_status.started(machinery)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        machinery = await nursery.start(work)
        try:
            yield machinery
        finally:
            machinery.cancel_scope.cancel()
