"""Deployments by name, with their states and counters.

A deployment is one servable version of one name: its configuration, its graph, its admission control and its counters.
Decides how a name and a version are resolved to a deployment, the error if there is none, when a server is ready, which
parts of a loaded model belong to its deployment (its queues, its admission control, its counters), and how a request
becomes a frame there.

Does not know how models are loaded, nor how requests run. Used on the event loop's thread, by the engine, loading and
front ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from weakref import ref

import trio

from flowserve.config.parameters import admission_options
from flowserve.config.suggest import meant
from flowserve.config.types import ModelConfig, is_same_but_versions
from flowserve.errors import FlowserveError, Invalid, NotFound, Unavailable, Unsupported
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.types import GRAPH, Graph, ModelKey
from flowserve.memory import rows
from flowserve.memory.arena import Arena
from flowserve.memory.devices import lost
from flowserve.observe.combined import THERE
from flowserve.observe.statistics import OTHER, Queued, Statistics, summarising
from flowserve.observe.traffic import NodeTraffic, SpaceTraffic, node_traffics
from flowserve.runtime.admission.cache import DeploymentCache, LruCache, ResponseCache, served_by
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.admission.steps import StepCache
from flowserve.runtime.clock import ClockNs, wall_clock_ms, wall_clock_ns
from flowserve.runtime.engine.loaded import LoadedModels
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.engine.validation import Validator
from flowserve.runtime.workers.policies import keeps_order, levels_of
from flowserve.scheduling.frames.borders import region_frame
from flowserve.scheduling.frames.frame import Frame, request_frame
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.values import Request, TensorSpec

_PLANS_MAX: Final = 64
# Triton's text, the beginning of its HTTP endpoint's error.
ONE_ANSWER: Final = "HTTP end point doesn't support models with decoupled transaction policy"
MakeFrame = Callable[..., Frame]
NO_LABELS: Final[Mapping[str, Sequence[str]]] = {}
UNLOADED: Final = "unloaded"
NOTHING_RETIRED: Final[Mapping[int, trio.Event]] = {}


class Deployments:
    """The deployments that are served, by name and version."""

    def __init__(
        self,
        options: EngineOptions,
        clock: ClockNs,
        scheduler: Scheduler,
        loaded: LoadedModels,
    ) -> None:
        self._options = options
        self._clock = clock
        self._scheduler = scheduler
        self._loaded = loaded
        self.entries: dict[str, Entry] = {}
        self.is_draining = False
        self.is_leaving = False  # not ready, because a drain is about to begin
        self.not_loaded: Collection[str] = ()  # models in the repository that can be loaded
        self.is_loaded = False  # True: loading is over, and the state of each entry decides readiness
        self._statistics: dict[ModelKey, Statistics] = {}
        self._make_statistics = summarising(clock) if options.summaries else Statistics
        self._cache: ResponseCache | None = None if options.cache_bytes is None else LruCache(options.cache_bytes)

    # ------------------------------------------------------------------ queries

    @property
    def is_live(self) -> bool:
        """Whether no GPU is lost. Only a new process can use a lost GPU again: the server must be restarted."""
        return not lost()

    @property
    def is_ready(self) -> bool:
        """Whether every deployment that should serve is ready, and the server is not stopping. Those are the
        deployments that the server was started with and all that have been ready since, except the unloaded ones.
        """
        if not self.is_loaded or self.is_draining or self.is_leaving:
            return False
        return not self._options.strict_readiness or all(
            entry.state == "READY" and not any(map(self.outage, entry.ready.values()))
            for entry in self.entries.values()
            if entry.is_wanted
        )

    def outage(self, deployment: Deployment) -> str:
        """Why a loaded deployment cannot serve at present, or "": no instance of a model that it needs is available, or
        it is on a lost GPU.
        """
        why = lost()
        if why and any(worker.is_on_gpu for queue in deployment.queues for worker in queue.instances):
            return why
        if outage := self._loaded.supervisor.outage(deployment.queues):
            return outage
        for queue in deployment.queues:
            outages: list[str] = [worker.outage() for worker in queue.instances]
            if outages and all(outages):
                return outages[0]
        return ""

    def find(self, name: str, version: str = "") -> Deployment:
        """The deployment of that name; its latest version if `version` is empty.

        Raises NotFound for an unknown name or version, Unavailable for one that is not ready, Invalid for a version
        that is no number.
        """
        entry = self.entries.get(name)
        if entry is not None and not version and entry.versions:
            return entry.ready[entry.versions[-1]]
        return self._find_version(entry, name, version)

    def _find_version(self, entry: Entry | None, name: str, version: str) -> Deployment:
        if version and not (_is_version(version) and int(version) > 0):
            raise Invalid(
                f"failed to get model version from specified version string '{version}': not a positive number"
            )
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found{self._hint(name)}")
        if version and int(version) in entry.ready:
            return entry.ready[int(version)]
        idle = entry.idle.get(int(version)) if version else None
        if idle is not None or entry.state != "READY":
            state, why = (entry.state, entry.reason) if idle is None else idle.now()
            why = why or ("it is being loaded" if state == "LOADING" else "")
            reason = f": {why}" if why and self._options.tells_names else ""
            which = f" version {version}" if version else ""
            raise Unavailable(f"Request for unknown model: '{name}'{which} is not at ready state{reason}")
        if not version:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        known = f" (it has {', '.join(map(str, entry.versions))})" if self._options.tells_names else ""
        raise NotFound(f"Request for unknown model: '{name}' version {version} is not found{known}")

    def _hint(self, name: str) -> str:
        if not self._options.tells_names:
            return ""
        if name in self.not_loaded:
            load = f"a client's load_model('{name}') or POST /v2/repository/models/{name}/load loads it"
            return f" (it is in the model repository, but not loaded: {load})"
        return meant(name, (name for name, entry in self.entries.items() if entry.ready))

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Rows of the repository index: one per version that is served or was to be served at some time, and one per
        name of which no version is known.
        """
        rows: list[dict[str, str]] = []
        for name, entry in sorted(self.entries.items()):
            for version in sorted({*entry.versions, *(() if ready_only else entry.idle)}):
                row = {"name": name, "version": str(version)}
                if version in entry.idle:
                    row["state"], row["reason"] = entry.idle[version].now()
                    rows.append(row)
                elif not (outage := self.outage(entry.ready[version])):
                    reason = entry.outdated.get(version)
                    rows.append({**row, "state": "READY", **({"reason": reason} if reason else {})})
                elif not ready_only:
                    rows.append({**row, "state": "UNAVAILABLE", "reason": outage})
            if not entry.versions and not entry.idle and not ready_only:
                rows.append({"name": name, "state": entry.state, "reason": entry.reason})
        return rows

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Rows of the statistics extension: for one name, one version, or all that are ready."""
        epoch_ns = wall_clock_ns() - self._clock()
        return [one.as_json(epoch_ns) for one in self._counted(name, version)]

    def graph_statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Rows of what is counted besides (`Statistics.graph_json`), with the counters of another server for a model
        that runs there.
        """
        return [{**one.graph_json(), **self._counted_there(one)} for one in self._counted(name, version)]

    def _counted_there(self, statistics: Statistics) -> dict[str, Any]:
        entry = self.entries.get(statistics.name)
        deployment = None if entry is None else entry.ready.get(statistics.version)
        if deployment is not None and not deployment.graph.is_ensemble:
            for worker in deployment.queues[0].instances[:1]:
                if there := worker.counted_there():
                    return {THERE: there}
        return {}

    def _counted(self, name: str, version: str) -> list[Statistics]:
        """The counters of one name, of one version or of all, by name and version."""
        found = self._statistics.values() if not name else self._counted_of(name, version)
        return sorted(found, key=lambda one: (one.name, one.version))

    def _counted_of(self, name: str, version: str) -> list[Statistics]:
        entry = self.entries.get(name)
        if entry is None or not entry.ready:
            raise Invalid(f"requested model '{name}' is not available")
        if not version:
            return [deployment.statistics for deployment in entry.ready.values()]
        if not _is_version(version) or int(version) not in entry.ready:
            raise Invalid(f"requested model version is not available for model '{name}'")
        return [entry.ready[int(version)].statistics]

    def counters(self) -> list[tuple[Statistics, Queued]]:
        """Every deployment version's counters, and the state of its model's queue. An ensemble has none; its load is
        the largest of its models.
        """
        # A reloaded model may still have its previous queue.
        waiting: dict[ModelKey, int] = {}
        occupied: dict[ModelKey, tuple[int, int]] = {}  # instances that run a batch, and all that are available
        for queue in self._scheduler.models.queues:
            key = queue.key
            busy, available = occupied.get(key, (0, 0))
            here = len(queue.instances) - len(queue.away)
            occupied[key] = busy + max(here - len(queue.free), 0), available + here
            waiting[key] = waiting.get(key, 0) + queue.waiting
        loads = {key: _load(waiting[key], *occupied[key], self._rows_of(key)) for key in waiting}
        for entry in self.entries.values():
            for version, deployment in entry.ready.items():
                if deployment.graph.is_ensemble:
                    models = (loads.get(node.model, 0.0) for node in deployment.graph.nodes)
                    loads[ModelKey(entry.name, version)] = max(models, default=0.0)
        for one in self._statistics.values():
            one.add_up()
        return [
            (statistics, Queued(waiting.get(key, 0), loads.get(key, 0.0)))
            for key, statistics in self._statistics.items()
        ]

    def _rows_of(self, key: ModelKey) -> int:
        """The rows that a batch of a model may have."""
        entry = self.entries.get(key.name)
        deployment = entry.ready.get(key.version) if entry is not None else None
        return (deployment.graph.max_batch_size if deployment is not None else 0) or 1

    # ------------------------------------------------------------------ changes

    def statistics_of(self, key: ModelKey) -> Statistics:
        """The statistics of a model version or ensemble; new if there are none under that name."""
        return self._statistics.setdefault(key, self._make_statistics(key.name, key.version))

    def step_cache(self, key: ModelKey) -> StepCache | None:
        """The response cache of a model that is about to be added, for its steps; None on a server without a cache."""
        if self._cache is None:
            return None
        responses = DeploymentCache(self._cache, served_by(key), self.statistics_of(key), self._clock)
        return StepCache(responses, self._scheduler, self._clock)

    def announce(
        self,
        config: ModelConfig,
        *graphs: Graph,
        labels: Mapping[str, Sequence[str]] = NO_LABELS,
        retired: Mapping[int, trio.Event] = NOTHING_RETIRED,
    ) -> None:
        """Serve this name with these graphs from now on, one for each version. The models that they need were added
        before. `labels` are those of the graphs' outputs. `retired`: by version that is not served any more, when its
        last request has finished.

        A version for which nothing changed keeps its deployment.
        """
        entry = self.entries.setdefault(config.name, Entry(config.name))
        versions = sorted(graph.version for graph in graphs)
        self._forget_statistics(entry, versions)
        former, latest = entry.ready, entry.latest
        entry.ready = {
            graph.version: self._deployment(config, graph, versions, labels, former.get(graph.version))
            for graph in graphs
        }
        for version, deployment in entry.ready.items():
            predecessor = former.get(version, latest)
            if predecessor is not None and predecessor is not deployment:
                deployment.replaces(predecessor)
        for version in former.keys() - entry.ready.keys():
            entry.idle[version] = Idle("UNAVAILABLE", UNLOADED, retired.get(version))
        entry.idle = {version: one for version, one in entry.idle.items() if version not in entry.ready}
        entry.versions, entry.outdated = versions, {}
        entry.state, entry.reason, entry.is_wanted = "READY", "", True

    def _deployment(
        self,
        config: ModelConfig,
        graph: Graph,
        versions: list[int],
        labels: Mapping[str, Sequence[str]],
        former: Deployment | None,
    ) -> Deployment:
        """The deployment of a graph: `former`, which serves that version now, if nothing changed for it."""
        key = ModelKey(graph.name, graph.version)
        runs_on = [self._loaded.generations[node.model] for node in graph.nodes]
        pins = frozenset(one.pin for one in runs_on)
        if former is not None and former.is_like(config, graph, pins, labels):
            former.config, former.versions = _as_it_responds(config, graph), versions
            return former
        queues = tuple(generation.queue for generation in runs_on)
        statistics = self.statistics_of(key)
        deployment = Deployment(config, graph, statistics, versions, queues, pins, labels)
        deployment.arena = _arena_of(graph, queues)
        _share_outputs(graph, queues)
        options = admission_options(config.parameters, answers_at_timeout=self._options.answers_at_timeout)
        # A response of a sequence depends on earlier requests.
        may_cache = not _is_repeated(deployment.plan) and not deployment.sequences
        cache: DeploymentCache | None = None
        if self._cache is not None and config.response_cache and may_cache:
            if graph.is_ensemble or queues[0].cache is None:
                cache = DeploymentCache(self._cache, served_by(key), statistics, self._clock)
            else:
                cache = queues[0].cache.responses
        if cache is not None or not options.is_unlimited:
            deployment.admission = AdmissionController(
                options,
                cache,
                deployment.output_slot,
                statistics,
                self._scheduler,
                self._clock,
                keeps_order=keeps_order(config),
                levels=levels_of(config),
            )
        return deployment

    def withdraw_name(self, name: str, reason: str, retired: Mapping[int, trio.Event] = NOTHING_RETIRED) -> None:
        """Refuse requests for this name from now on, with this reason. Those in flight finish; `retired` as for
        `announce`.
        """
        entry = self.entries.setdefault(name, Entry(name))
        self._forget_statistics(entry, ())
        for version, one in entry.idle.items():
            entry.idle[version] = Idle("UNAVAILABLE", reason, one.retired)
        for version in entry.versions:
            entry.idle[version] = Idle("UNAVAILABLE", reason, retired.get(version))
        entry.ready, entry.versions, entry.outdated = {}, [], {}
        entry.state, entry.reason = "UNAVAILABLE", reason

    def _forget_statistics(self, entry: Entry, versions: Collection[int]) -> None:
        for version in entry.versions:
            if version not in versions:
                self._statistics.pop(ModelKey(entry.name, version), None)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20  # int() has a limit of its own, far beyond


def _share_outputs(graph: Graph, queues: Sequence[ModelQueue]) -> None:
    """From now on, outputs that models in processes read are placed in memory that these can read."""
    for edge in graph.edges:
        if GRAPH in (edge.producer, edge.consumer):
            continue
        if any(worker.arena is not None for worker in queues[edge.consumer].instances):
            for worker in queues[edge.producer].instances:
                worker.share(edge.output, graph.nodes[edge.producer].outputs[edge.output])


def _arena_of(graph: Graph, queues: Sequence[ModelQueue]) -> Arena | None:
    """The memory of the model in processes that reads the request, if no other model does: large bodies are received
    there.
    """
    readers = {edge.consumer for edge in graph.edges if edge.producer == GRAPH}
    if len(readers) != 1 or GRAPH in readers:
        return None
    workers = queues[readers.pop()].instances
    return workers[0].arena if workers else None


class Deployment:
    """A version that serves. `inputs` and `outputs` are its specs by name, in the configuration's order."""

    def __init__(
        self,
        config: ModelConfig,
        graph: Graph,
        statistics: Statistics,
        versions: list[int],
        queues: tuple[ModelQueue, ...],
        pins: frozenset[object] = frozenset(),
        labels: Mapping[str, Sequence[str]] = NO_LABELS,
    ) -> None:
        self.name = graph.name
        self.version = graph.version
        self.config = _as_it_responds(config, graph)
        self.graph = graph
        self.plan: Plan = make_plan(graph)
        self._plans: dict[tuple[str, ...], tuple[Plan, tuple[str, ...]]] = {}  # plans by requested outputs
        self.queues = queues  # the queue of each node's model
        self.keeps_order = any(queue.order is not None for queue in queues)
        self.pins = pins  # keep the generations of these queues open while this deployment is referenced
        self.validator = Validator(graph)
        self.is_decoupled = graph.is_decoupled
        self.sequences = tuple(queue.bound for queue in queues if isinstance(queue.bound, Sequences))
        self.predecessor: Deployment | None = None  # the replaced deployment, while its sequences continue
        self.successor: ref[Deployment] | None = None  # has this one as predecessor
        # The requests that begin a sequence, until they are over: the batcher of a sequence knows it only when its
        # first request is queued there, after earlier steps.
        self.opening_sequences: dict[int | str, Frame] = {}
        self.admission: AdmissionController | None = None  # None without limits and cache
        # The memory in which a large request is received: that of the process that reads it. None: any memory.
        self.arena: Arena | None = None
        self.statistics = statistics
        self.traffic: tuple[NodeTraffic, ...] = node_traffics(graph)
        # The functions that make a request's frame, by the kind of its graph. `make_frame` is for one response,
        # `make_stream` for any number.
        self.make_frame, self.make_stream = _frame_makers(graph, self.plan, self.traffic)
        self.space_traffic = statistics.spaces = tuple(map(SpaceTraffic, graph.spaces))
        statistics.nodes = self.traffic  # of the newest graph; requests on an older graph use its own counters
        self.platform = config.platform or config.backend
        self.versions = versions  # all ready versions of the name, shared between its deployments
        self.inputs: Mapping[str, TensorSpec] = {spec.name: spec for spec in graph.inputs}
        self.outputs: Mapping[str, TensorSpec] = {spec.name: spec for spec in graph.outputs}
        self.labels = labels  # by output: the labels of its indices
        self.output_slot = {spec.name: self.plan.output_slots[i] for i, spec in enumerate(graph.outputs)}
        # Conversions of outputs whose shape differs between client and producer; usually none.
        self.output_conversions = {
            graph.outputs[edge.input].name: edge.conversion
            for edge in graph.edges
            if edge.consumer == GRAPH and edge.conversion is not None
        }

    def is_like(
        self, config: ModelConfig, graph: Graph, pins: frozenset[object], labels: Mapping[str, Sequence[str]]
    ) -> bool:
        """Whether a deployment made of these would serve as this one does, on the same instances."""
        return (
            pins == self.pins
            and graph == self.graph
            and labels == self.labels
            and is_same_but_versions(_as_it_responds(config, graph), self.config)
        )

    def deployment_of(self, request: Request) -> Deployment:
        """The deployment that runs a request: the one where its sequence began, else this one."""
        if request.sequence_id and not request.sequence_start:
            place: Deployment | None = self
            while place is not None:
                if place.continues_sequence(request):
                    return place
                place = place.predecessor
        return self

    def record_invalid(self, error: FlowserveError) -> None:
        """Count an invalid request."""
        self.statistics.failed(1, 0, OTHER)
        self.statistics.note_error(str(error), wall_clock_ms())

    def continues_sequence(self, request: Request) -> bool:
        """Whether a request belongs to a sequence that is open here, or about to be."""
        return not request.sequence_start and (
            request.sequence_id in self.opening_sequences
            or any(one.is_live(request.sequence_id) for one in self.sequences)
        )

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence is open here, or about to be."""
        return bool(self.opening_sequences) or any(one.live for one in self.sequences)

    def sequence_begins(self, frame: Frame) -> None:
        """A request that begins a sequence was submitted."""
        self.opening_sequences[frame.request.sequence_id] = frame

    def sequence_request_over(self, frame: Frame) -> None:
        """A request that may have begun a sequence is over."""
        if self.opening_sequences.get(frame.request.sequence_id) is frame:
            del self.opening_sequences[frame.request.sequence_id]
            if self.successor is not None and not self.has_sequences:
                _look_again(self.successor)

    def replaces(self, predecessor: Deployment | None) -> None:
        """This deployment gets the requests from now on; sequences that began in `predecessor`, or in its predecessors,
        continue there until the last of them has ended.
        """
        while predecessor is not None and (predecessor.queues == self.queues or not predecessor.has_sequences):
            predecessor = predecessor.predecessor
        self.predecessor = predecessor
        if predecessor is not None:
            predecessor.successor = ref(self)  # which may itself have been replaced by now
            for sequences in predecessor.sequences:
                sequences.on_quiet.append(partial(_look_again, ref(self)))

    def plan_for(self, outputs: tuple[str, ...]) -> tuple[Plan, tuple[str, ...]]:
        """The plan without the steps that no requested output needs, and the requested outputs in the configuration's
        order. `outputs` are names of outputs.
        """
        found = self._plans.get(outputs)
        if found is None:
            if len(self._plans) >= _PLANS_MAX:  # clients may request outputs in any order and number
                self._plans.clear()
            wanted = tuple([name for name in self.validator.outputs if name in outputs])
            is_part = self.graph.is_ensemble and len(wanted) < len(self.graph.outputs)
            found = self._plans[outputs] = (make_plan(self.graph, outputs) if is_part else self.plan), wanted
        return found


def _as_it_responds(config: ModelConfig, graph: Graph) -> ModelConfig:
    """An ensemble is decoupled if one of its steps is, regardless of its own file; its metadata say so."""
    if not (graph.is_ensemble and graph.is_decoupled):
        return config
    return replace(config, json={**config.json, "model_transaction_policy": {"decoupled": True}})


def _frame_makers(graph: Graph, plan: Plan, gauges: Sequence[NodeTraffic]) -> tuple[MakeFrame, MakeFrame]:
    """The functions that make the frame of a request with one response, and of one whose responses are read one by
    one.
    """
    regions = plan.regions
    if regions is None and not graph.is_decoupled:
        return request_frame, request_frame
    shared = InflightSlots(regions.limits, gauges) if regions is not None and regions.is_shared else None

    def make(plan: Plan, *facts: Any, is_whole: bool) -> Frame:
        if plan.regions is None:
            return request_frame(plan, *facts)
        return region_frame(plan, *facts, rows=rows, shared=shared, gauges=gauges, is_read_whole=is_whole)

    def refuse(*_: Any) -> Frame:
        how = "generate_stream asks for a stream of answers, as do gRPC's ModelStreamInfer and an engine's stream()"
        raise Unsupported(f"{ONE_ANSWER}: '{graph.name}' may answer any number of times; {how}")

    return (refuse if graph.is_decoupled else partial(make, is_whole=True)), partial(make, is_whole=False)


def _is_repeated(plan: Plan) -> bool:
    """Whether steps run in several frames of a request, or share limits with other requests."""
    return plan.regions is not None and bool(plan.regions.splits or plan.regions.is_shared)


def _look_again(place: ref[Deployment]) -> None:
    """Drop predecessors that were kept for sequences, once these have ended."""
    deployment = place()
    if deployment is not None:
        deployment.replaces(deployment.predecessor)


@dataclass(slots=True)
class Idle:
    """A version that does not serve: its state in the repository index, and why. `retired`: when its last request has
    finished.
    """

    state: str
    reason: str = ""
    retired: trio.Event | None = None

    def now(self) -> tuple[str, str]:
        """The present state and its reason."""
        is_unloading = self.state == "UNAVAILABLE" and self.retired is not None and not self.retired.is_set()
        return "UNLOADING" if is_unloading else self.state, self.reason

    def stop_loading(self, reason: str) -> None:
        """It is not being loaded any more, if it was, for this reason."""
        if self.state == "LOADING":
            self.state, self.reason = "UNAVAILABLE", reason


@dataclass(slots=True)
class Entry:
    """The entry of one name: its ready versions, or why it has none. `state` is READY with ready versions.

    `idle`: the versions that were to be served, or were served, and are not. `outdated`: why ready versions were not
    replaced by the last load. `is_wanted`: the server is not ready without it.
    """

    name: str
    state: str = "LOADING"
    reason: str = ""
    is_wanted: bool = False
    ready: dict[int, Deployment] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    idle: dict[int, Idle] = field(default_factory=dict)
    outdated: dict[int, str] = field(default_factory=dict)

    @property
    def latest(self) -> Deployment | None:
        return self.ready[self.versions[-1]] if self.versions else None


def _load(waiting: int, busy: int, instances: int, rows: int) -> float:
    """The share of instances that run a batch, and the waiting requests as a share of the rows that all could run."""
    return busy / instances + waiting / (instances * rows) if instances else float(waiting)
