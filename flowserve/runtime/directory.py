"""Deployments by name: what is there, in which state, and what it has done.

Decided here: how a name and a version become a deployment, what is said where they do not, when a server is ready, and
what of a loaded model belongs to its deployment (its queues, its gate, its counters). It does not know how models are
loaded, nor how requests run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flowserve.config.gate import gate_options
from flowserve.config.suggest import meant
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, NotFound, Unavailable
from flowserve.graph.types import GRAPH, Graph, ModelKey
from flowserve.memory.arena import Arena
from flowserve.memory.devices import lost
from flowserve.observe.statistics import Statistics, rows_as_json
from flowserve.observe.summary import summarising
from flowserve.runtime.batchers import keeps_order
from flowserve.runtime.cache import Cache, Lru
from flowserve.runtime.clock import ClockNs, wall_clock_ns
from flowserve.runtime.deployment import NO_LABELS, Deployment, Entry
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.fast_path import FastPath, OnTheSpot
from flowserve.runtime.gate import Gate
from flowserve.runtime.hosts import Processes
from flowserve.runtime.instance import LocalHost
from flowserve.runtime.lifecycle import Generations
from flowserve.runtime.lone_accounts import Ledger
from flowserve.runtime.lone_relays import LoneRelays
from flowserve.runtime.ordered_gate import OrderedGate
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.supervisor import Supervisor
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.relays import RelayingDispatcher


class Directory:
    """What is served under which name. Touched only from the engine's trio thread."""

    def __init__(
        self,
        options: EngineOptions,
        clock: ClockNs,
        dispatcher: Dispatcher,
        generations: Generations,
        supervisor: Supervisor,
        processes: Processes | None,
    ) -> None:
        self.options = options
        self.clock = clock
        self.dispatcher = dispatcher
        self.generations = generations
        self.supervisor = supervisor
        self.processes = processes
        self.entries: dict[str, Entry] = {}
        self.is_draining = False
        self.not_loaded: Collection[str] = ()  # what lies in the repository for whoever asks for its load
        self._is_loaded = False
        self._statistics: dict[ModelKey, Statistics] = {}
        self._ledger = Ledger()  # what is not counted in these yet
        self._has_fast_paths = options.rate_limit is None  # what runs past the dispatcher asks no limiter
        self._make_statistics = summarising(clock) if options.summaries else Statistics
        self._cache: Cache | None = None if options.cache_bytes is None else Lru(options.cache_bytes)

    # ------------------------------------------------------------------ asking

    @property
    def is_live(self) -> bool:
        """The loop turns, or nobody could ask; and no GPU is lost, which only another process gets back."""
        return not lost()

    @property
    def is_ready(self) -> bool:
        """Everything that should serve does, and the server is not going away.

        What should serve: all that the server was started with, and all that has served since, unless it was unloaded.
        """
        if not self._is_loaded or self.is_draining:
            return False
        return not self.options.strict_readiness or all(
            entry.state == "READY" and not any(map(self.outage, entry.ready.values()))
            for entry in self.entries.values()
            if entry.is_wanted
        )

    def outage(self, deployment: Deployment) -> str:
        """Why a deployment that is loaded does not answer just now, or "": no instance of a model it needs lives, or it
        is on a GPU that is lost.
        """
        why = lost()
        if why and any(host.is_on_gpu for queue in deployment.route for host in queue.instances):
            return why
        return self.supervisor.outage(deployment.route)

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
            raise NotFound(f"Request for unknown model: '{name}' is not found{self._hint(name)}")
        if version and int(version) in entry.ready:
            return entry.ready[int(version)]
        if entry.state != "READY":
            why = entry.reason or ("it is being loaded" if entry.state == "LOADING" else "")
            reason = f": {why}" if why and self.options.tells_names else ""
            which = f" version {version}" if version else ""
            raise Unavailable(f"Request for unknown model: '{name}'{which} is not at ready state{reason}")
        if not version:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")

    def _hint(self, name: str) -> str:
        if not self.options.tells_names:
            return ""
        if name in self.not_loaded:
            load = f"a client's load_model('{name}') or POST /v2/repository/models/{name}/load loads it"
            return f" (it is in the model repository, but not loaded: {load})"
        return meant(name, self._served())

    def _served(self) -> Iterator[str]:
        return (name for name, entry in self.entries.items() if entry.ready)

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
        epoch_ns = wall_clock_ns() - self.clock()
        self._ledger.settle()
        if not name:
            return rows_as_json(list(self._statistics.values()), epoch_ns)
        entry = self.entries.get(name)
        if entry is None or not entry.ready:
            raise Invalid(f"requested model '{name}' is not available")
        if not version:
            return rows_as_json([deployment.statistics for deployment in entry.ready.values()], epoch_ns)
        if not _is_version(version) or int(version) not in entry.ready:
            raise Invalid(f"requested model version is not available for model '{name}'")
        return rows_as_json([entry.ready[int(version)].statistics], epoch_ns)

    def counters(self) -> list[tuple[Statistics, int]]:
        """Every deployment version's counters, and how many requests wait in its model's queue (0 for an ensemble)."""
        waiting = self.dispatcher.waiting()
        self._ledger.settle()
        for one in self._statistics.values():
            one.add_up()
        return [(statistics, waiting.get(key, 0)) for key, statistics in self._statistics.items()]

    # ------------------------------------------------------------------ changing

    def statistics_of(self, key: ModelKey) -> Statistics:
        """What a model version, or an ensemble, counts into; new where nothing of that name was counted yet."""
        return self._statistics.setdefault(key, self._make_statistics(key.name, key.version))

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
        statistics = self.statistics_of(key)
        runs_on = [self.generations[node.model] for node in graph.nodes]
        route = tuple(generation.queue for generation in runs_on)
        pins = frozenset(one.pin for one in runs_on)
        deployment = Deployment(config, graph, statistics, versions, route, pins, labels)
        deployment.arena = _arena_of(graph, route)
        _share_outputs(graph, route)
        options = gate_options(config.parameters)
        may_remember = deployment.plan.nesting is None and not deployment.sequences  # an answer depends on those before
        cache = self._cache if config.response_cache and may_remember else None
        if cache is not None or not options.is_open:
            kind = OrderedGate if cache is not None and keeps_order(config) else Gate
            deployment.gate = kind(options, cache, key, deployment.output_slot, statistics, self.dispatcher, self.clock)
        if self._has_fast_paths:
            deployment.fast_path = self._fast_path(deployment)
        return deployment

    def _fast_path(self, deployment: Deployment) -> OnTheSpot | None:
        if FastPath.leads_through(deployment):
            return FastPath(deployment, self.clock)
        processes, dispatcher = self.processes, self.dispatcher
        if processes is None or not isinstance(dispatcher, RelayingDispatcher):
            return None
        if LoneRelays.lead_through(deployment):
            return LoneRelays(dispatcher, processes.occupancy, processes.relays, self._ledger, self.clock)
        return None

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


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20  # int() has a limit of its own, far beyond


def _share_outputs(graph: Graph, route: Sequence[ModelQueue]) -> None:
    """What models in processes read of others lies where they can read it, from now on: whoever has once been joined to
    a process may be again, and it costs the others next to nothing.
    """
    for edge in graph.edges:
        if GRAPH in (edge.producer, edge.consumer):
            continue
        if any(isinstance(host, ProcessHost) for host in route[edge.consumer].instances):
            for host in route[edge.producer].instances:
                if isinstance(host, LocalHost):
                    host.share(edge.output)


def _arena_of(graph: Graph, route: Sequence[ModelQueue]) -> Arena | None:
    """That of the one model in processes that reads all of a request; a body holds what is meant for nobody else."""
    readers = {edge.consumer for edge in graph.edges if edge.producer == GRAPH}
    if len(readers) != 1 or GRAPH in readers:
        return None
    hosts = route[readers.pop()].instances
    return hosts[0].arena if hosts and isinstance(hosts[0], ProcessHost) else None
