"""The engine: deployments by name, requests in, responses out.

Decided here: how a request finds its deployment, what a caller who leaves means, and the order in which the engine
ends. Scheduling is the dispatcher's, loading is loader.py's, computing is the hosts'. It does not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import trio
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.backends.base import LoadedModel, Results
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Invalid, NotFound, Unavailable
from flowserve.graph.types import Graph, ModelKey
from flowserve.observe.statistics import Statistics, rows_as_json
from flowserve.runtime.clock import running_clock, wall_clock_ms
from flowserve.runtime.deployment import Deployment, Entry
from flowserve.runtime.instance import Completions, Host, Outcome, record
from flowserve.runtime.pump import Pump
from flowserve.scheduling.batcher import Batcher
from flowserve.scheduling.dispatcher import Batch, Dispatcher, ModelQueue
from flowserve.scheduling.router import Flow
from flowserve.values import Request, Response


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator chose. `python_execution`: "thread" or "inline". `gpu` False maps KIND_GPU to the CPU."""

    python_execution: str = "thread"
    gpu: bool = True
    strict_readiness: bool = True


class Engine:
    """Serves deployments. Made by `open_engine`; touched only from its trio thread."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.entries: dict[str, Entry] = {}
        self.clock = running_clock()
        self.dispatcher = Dispatcher(self._start, self._answered)
        self.completions = Completions(trio.lowlevel.current_trio_token(), self._returned)
        self._hosts: list[Host] = []
        self._models: list[LoadedModel] = []
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._statistics: dict[ModelKey, Statistics] = {}
        self._pump = Pump(self.dispatcher, self.clock)
        self._stamps = count(1)
        self._is_loaded = False
        self._is_draining = False

    # ------------------------------------------------------------------ asking

    @property
    def is_live(self) -> bool:
        """The loop turns, or nobody could ask."""
        return True

    @property
    def is_ready(self) -> bool:
        """Everything that should serve does, and the server is not going away."""
        if not self._is_loaded or self._is_draining:
            return False
        return not self.options.strict_readiness or all(entry.state == "READY" for entry in self.entries.values())

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
        """Rows of the repository index: one per ready version, one per name that has none."""
        rows: list[dict[str, str]] = []
        for name, entry in sorted(self.entries.items()):
            rows += [{"name": name, "version": str(version), "state": "READY"} for version in entry.versions]
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

    async def infer(self, deployment: Deployment, request: Request) -> Response:
        """Run one request. Arrays of the answer include the batch dimension where the deployment batches.

        Raises Invalid for a request that does not fit the deployment, and whatever its steps failed with. A caller
        who is cancelled leaves: what is still queued for it is withdrawn, what runs runs out.
        """
        admission = deployment.admission
        if self._is_draining:
            raise Unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
        tensors = admission.admit(request)
        plan = deployment.plan if not request.outputs else deployment.plan_for(request.outputs)
        flow = Flow(plan, deployment.route, tensors, self.clock(), request.stamp, request, deployment)
        flow.wanted = admission.wanted(request)
        self.dispatcher.submit(flow)
        self._pump.arrived()
        if not flow.done:
            flow.waiter = current_task()

            def leave(_: RaiseCancelT) -> Abort:
                flow.waiter = None
                self.dispatcher.cancel(flow)
                deployment.statistics.cancel_count += 1
                return Abort.SUCCEEDED

            await wait_task_rescheduled(leave)
        if flow.error is not None:
            raise _own(flow.error, deployment)
        slots = flow.tensors
        outputs = {}
        for name in flow.wanted:
            tensor = slots[deployment.output_slot[name]]
            if tensor is not None:
                outputs[name] = tensor.array
        return Response(deployment.name, deployment.version, outputs, request.id)

    def _start(self, batch: Batch) -> None:
        host: Host = batch.instance
        outcome = host.start(batch)
        if outcome is not None:
            self._finished(batch, outcome)

    def _returned(self, batch: Batch, outcome: Outcome) -> None:
        self._finished(batch, outcome)
        self._pump.poke()

    def _finished(self, batch: Batch, outcome: Outcome) -> None:
        now_ns = self.clock()
        if isinstance(outcome, Results):
            record(batch.queue.observer, batch, outcome, now_ns)
            self.dispatcher.batch_done(batch, outcome.outputs, outcome.errors, now_ns)
        elif not self.dispatcher.batch_failed(batch, outcome):
            record(batch.queue.observer, batch, outcome, now_ns)

    def _answered(self, flow: Flow) -> None:
        if flow.plan.graph.is_ensemble:
            self._count_ensemble(flow)
        if flow.waiter is not None:
            waiter, flow.waiter = flow.waiter, None
            reschedule(waiter)

    def _count_ensemble(self, flow: Flow) -> None:
        statistics: Statistics = flow.owner.statistics
        now_ns = self.clock()
        if flow.error is not None:
            statistics.failed(1, now_ns - flow.arrived_ns)
            return
        rows = len(next(iter(flow.request.inputs.values()))) if flow.plan.graph.max_batch_size else 1
        durations = (flow.compute_input_ns, flow.compute_infer_ns, flow.compute_output_ns)
        statistics.executed(max(rows, 1), *durations, now_ms=wall_clock_ms())
        statistics.succeeded(1, now_ns - flow.arrived_ns, flow.queue_ns, *durations)

    # ------------------------------------------------------------------ beginning and ending

    def add_model(
        self, key: ModelKey, batcher: Batcher, hosts: Sequence[Host], model: LoadedModel, passive: Sequence[Host] = ()
    ) -> None:
        """Give a model version its queue; plans refer to it by `key`. The engine closes its instances in the end, the
        `passive` ones too, which get no work.
        """
        statistics = self._statistics.setdefault(key, Statistics(key.name, key.version))
        self._hosts += [*hosts, *passive]
        self._models.append(model)
        queue = ModelQueue(key, batcher, hosts, is_pure=model.is_pure, observer=statistics)
        self._queues[key] = queue
        self.dispatcher.add(queue)

    def announce(self, config: ModelConfig, graph: Graph) -> None:
        """From now on requests for this deployment are taken. The models it needs were added before."""
        key = ModelKey(graph.name, graph.version)
        entry = self.entries.setdefault(graph.name, Entry(graph.name))
        statistics = self._statistics.setdefault(key, Statistics(key.name, key.version))
        route = tuple(self._queues[node.model] for node in graph.nodes)
        entry.versions[:] = sorted({*entry.versions, graph.version})
        entry.ready[graph.version] = Deployment(config, graph, statistics, entry.versions, route)
        entry.state, entry.reason = "READY", ""

    def loaded(self) -> None:
        """Loading is over; from now on the state of each entry decides readiness."""
        self._is_loaded = True

    async def run_pump(self) -> None:
        await self._pump.run()

    async def drain(self, deadline: float) -> list[str]:
        """Refuse new requests, wait until none is in flight or the loop's time reaches `deadline`.

        Returns what did not finish: the instances that are still running then, or that requests wait in queues.
        """
        self._is_draining = True
        with trio.move_on_at(deadline) as patience:
            # Polled, because the hot path should pay for no "last one left" event and this happens once in a life.
            while self.dispatcher.in_flight:  # noqa: ASYNC110
                await trio.sleep(0.01)
        running = [host.name for host in self._hosts if host.running is not None]
        return running or (["requests that wait in queues"] if patience.cancelled_caught else [])

    async def close(self, deadline: float) -> list[str]:
        """Close every instance, those that still run last and only until `deadline`. Returns the ones that did not
        close.
        """
        self._is_draining = True
        self.dispatcher.fail_all("Server is stopping, scheduler for model has stopped accepting new inference requests")
        open_hosts = {host.name for host in self._hosts}

        async def close_one(host: Host) -> None:
            await trio.to_thread.run_sync(host.close, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
            open_hosts.discard(host.name)

        with trio.move_on_at(deadline):
            async with trio.open_nursery() as nursery:
                for host in self._hosts:
                    nursery.start_soon(close_one, host, name=f"close {host.name}")
            for model in self._models:
                await trio.to_thread.run_sync(model.close, abandon_on_cancel=True)
        return sorted(open_hosts)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20  # int() has a limit of its own, far beyond


def _own(error: FlowserveError, deployment: Deployment) -> FlowserveError:
    """An error of the caller's own: one failure may be raised in many tasks, and tracebacks must not pile up on it."""
    text = f"in ensemble '{deployment.name}', {error}" if deployment.graph.is_ensemble else str(error)
    return type(error)(text)


@asynccontextmanager
async def open_engine(
    options: EngineOptions, *, on_close: Callable[[list[str]], None] | None = None, exit_timeout_s: float = 30.0
) -> AsyncIterator[Engine]:
    """An engine whose pump runs, empty until something is loaded into it. Leaving the block closes every instance."""
    async with trio.open_nursery() as nursery:
        engine = Engine(options)
        nursery.start_soon(engine.run_pump, name="pump")
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                hung = await engine.close(trio.current_time() + exit_timeout_s)
            if on_close is not None:
                on_close(hung)
            nursery.cancel_scope.cancel()
