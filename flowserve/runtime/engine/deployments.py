"""Deployments by name, with their states and counters.

Decides how a name and a version are resolved to a deployment, the error if there is none, when a server is ready, and
which parts of a loaded model belong to its deployment (its queues, its admission control, its counters). Does not
know how models are loaded, nor how requests run. Used on the event loop's thread, by the engine, loading and front
ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flowserve.config.parameters import admission_options
from flowserve.config.suggest import meant
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, NotFound, Unavailable
from flowserve.graph.types import GRAPH, Graph, ModelKey
from flowserve.memory.arena import Arena
from flowserve.memory.devices import lost
from flowserve.observe.statistics import Statistics, rows_as_json
from flowserve.observe.summary import summarising
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.admission.response_cache import LruCache, ResponseCache
from flowserve.runtime.clock import ClockNs, wall_clock_ns
from flowserve.runtime.engine.deployment import NO_LABELS, Deployment, Entry
from flowserve.runtime.engine.generations import Generations
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.workers.local import LocalWorker
from flowserve.runtime.workers.process import ProcessWorker
from flowserve.runtime.workers.queues import keeps_order
from flowserve.runtime.workers.supervisor import Supervisor
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.scheduler import Scheduler


class Deployments:
    """The deployments that are served, by name and version."""

    def __init__(
        self,
        options: EngineOptions,
        clock: ClockNs,
        scheduler: Scheduler,
        generations: Generations,
        supervisor: Supervisor,
    ) -> None:
        self._options = options
        self._clock = clock
        self._scheduler = scheduler
        self._generations = generations
        self._supervisor = supervisor
        self.entries: dict[str, Entry] = {}
        self.is_draining = False
        self.not_loaded: Collection[str] = ()  # models in the repository that can be loaded
        self._is_loaded = False
        self._statistics: dict[ModelKey, Statistics] = {}
        self._make_statistics = summarising(clock) if options.summaries else Statistics
        self._cache: ResponseCache | None = None if options.cache_bytes is None else LruCache(options.cache_bytes)

    # ------------------------------------------------------------------ asking

    @property
    def is_live(self) -> bool:
        """Whether no GPU is lost. Only a new process can use a lost GPU again: the server must be restarted."""
        return not lost()

    @property
    def is_ready(self) -> bool:
        """Whether every deployment that should serve is ready, and the server is not stopping. Those are the
        deployments that the server was started with and all that have been ready since, except the unloaded ones.
        """
        if not self._is_loaded or self.is_draining:
            return False
        return not self._options.strict_readiness or all(
            entry.state == "READY" and not any(map(self.outage, entry.ready.values()))
            for entry in self.entries.values()
            if entry.is_wanted
        )

    def outage(self, deployment: Deployment) -> str:
        """Why a loaded deployment cannot serve just now, or "": no instance of a model it needs lives, or it is on a
        GPU that is lost.
        """
        why = lost()
        if why and any(worker.is_on_gpu for queue in deployment.queues for worker in queue.instances):
            return why
        return self._supervisor.outage(deployment.queues)

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
        if entry.state != "READY":
            why = entry.reason or ("it is being loaded" if entry.state == "LOADING" else "")
            reason = f": {why}" if why and self._options.tells_names else ""
            which = f" version {version}" if version else ""
            raise Unavailable(f"Request for unknown model: '{name}'{which} is not at ready state{reason}")
        if not version:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")

    def _hint(self, name: str) -> str:
        if not self._options.tells_names:
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
        epoch_ns = wall_clock_ns() - self._clock()
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
        waiting = self._scheduler.waiting()
        for one in self._statistics.values():
            one.add_up()
        return [(statistics, waiting.get(key, 0)) for key, statistics in self._statistics.items()]

    # ------------------------------------------------------------------ changing

    def statistics_of(self, key: ModelKey) -> Statistics:
        """The statistics of a model version or ensemble; new if there are none under that name."""
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
        runs_on = [self._generations[node.model] for node in graph.nodes]
        queues = tuple(generation.queue for generation in runs_on)
        pins = frozenset(one.pin for one in runs_on)
        deployment = Deployment(config, graph, statistics, versions, queues, pins, labels)
        deployment.arena = _arena_of(graph, queues)
        _share_outputs(graph, queues)
        options = admission_options(config.parameters)
        # A response of a sequence depends on the requests before.
        may_cache = deployment.plan.nesting is None and not deployment.sequences
        cache = self._cache if config.response_cache and may_cache else None
        if cache is not None or not options.is_unlimited:
            deployment.admission = AdmissionController(
                options,
                cache,
                key,
                deployment.output_slot,
                statistics,
                self._scheduler,
                self._clock,
                keeps_order=keeps_order(config),
            )
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


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20  # int() has a limit of its own, far beyond


def _share_outputs(graph: Graph, queues: Sequence[ModelQueue]) -> None:
    """From now on, outputs that models in processes read are placed where they can read them."""
    for edge in graph.edges:
        if GRAPH in (edge.producer, edge.consumer):
            continue
        if any(isinstance(worker, ProcessWorker) for worker in queues[edge.consumer].instances):
            for worker in queues[edge.producer].instances:
                if isinstance(worker, LocalWorker):
                    worker.share(edge.output)


def _arena_of(graph: Graph, queues: Sequence[ModelQueue]) -> Arena | None:
    """The memory that one model in processes reads, where no other model reads the request: its body is received
    there.
    """
    readers = {edge.consumer for edge in graph.edges if edge.producer == GRAPH}
    if len(readers) != 1 or GRAPH in readers:
        return None
    workers = queues[readers.pop()].instances
    return workers[0].packer.arena if workers and isinstance(workers[0], ProcessWorker) else None
