"""Figures for the live page: the list of deployments, and the present load of one deployment's graph.

Decides which figures exist, and that they are computed once for all viewers. Counters are read when a viewer polls and
the last reading is old enough; without viewers nothing runs. Only the readings of the last few seconds are kept.

Decides also which counters are sampled, and how the rates and percentiles of a recent period are computed from two
samples. Nothing is counted additionally, so a page without viewers costs nothing. Where several servers are behind one
port, the samples of all are added up before (`figures`, `observe/combined.py`). A counter that decreased (its
deployment was replaced) has restarted at zero. Percentiles come from histograms, with linear interpolation between two
edges. `routes` sends the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import orjson
import trio

from flowserve.config.types import ModelConfig
from flowserve.graph.types import ModelKey
from flowserve.observe.combined import FIGURES, PRESENT
from flowserve.observe.statistics import FINE_DURATION_EDGES_NS, Statistics
from flowserve.render.jsontext import graph_document
from flowserve.runtime.clock import SECOND_NS, wall_clock_ms
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.group import Group
from flowserve.runtime.workers.base import batches_of
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.values import Array

_NS_PER_MS: Final = 1_000_000
_DIGITS: Final = 4  # significant digits of a figure; further ones would be noise


@dataclass(frozen=True, slots=True, eq=False)
class CounterSample:
    """One deployment's counters at one time. `nodes[i]` are (batches, rows) of node i, `spaces[i]`
    (requests, rows, rows around) of space i + 1, and `edges[i]` the (passed on,
    copied) bytes of each edge into it.
    """

    requests: int
    failures: int
    rows: int
    batches: int
    total: Array  # the counts of each histogram
    queue: Array
    compute: Array
    nodes: tuple[tuple[int, int], ...]
    spaces: tuple[tuple[int, int, int], ...]
    edges: tuple[tuple[tuple[int, int], ...], ...]


def read(one: Statistics, before: CounterSample | None = None) -> CounterSample:
    """The current counters; the object `before` itself if nothing ran and nothing failed since."""
    if before is not None and _is_still(one, before):
        return before
    return CounterSample(
        one.success_count,
        one.fail_count,
        one.inference_count,
        one.execution_count,
        np.array(one.request_duration.counts),
        np.array(one.queue_duration.counts),
        np.array(one.compute_duration.counts),
        tuple((node.batches, node.rows) for node in one.nodes),
        tuple((space.requests, space.taken, space.offered) for space in one.spaces),
        tuple(tuple((node.handed_on(edge), edge.copied) for edge in node.edges) for node in one.nodes),
    )


def figures(engine: Engine) -> dict[str, Any]:
    """This server's counters as JSON, to be added to those of others. Keys of deployments are NAME/VERSION."""
    entries = engine.deployments.entries
    shown: dict[str, Any] = {}
    for one, _ in engine.deployments.counters():
        sample = read(one)
        deployment = entries[one.name].ready.get(one.version) if one.name in entries else None
        is_plain = deployment is not None and not deployment.graph.is_ensemble
        shown[f"{one.name}/{one.version}"] = {
            "counts": [sample.requests, sample.failures, sample.rows, sample.batches],
            "durations": [sample.total.tolist(), sample.queue.tolist(), sample.compute.tolist()],
            "nodes": sample.nodes,
            "spaces": sample.spaces,
            "edges": sample.edges,
            "last_error": [one.last_error_ms, one.last_error],
            PRESENT: _now(deployment.queues[0]) if deployment is not None and is_plain else {},
        }
    return {PRESENT: {"in_flight": engine.scheduler.in_flight}, "deployments": shown}


def _sample_of(shown: Mapping[str, Any]) -> CounterSample:
    """The sample of one deployment in `figures`."""
    requests, failures, rows, batches = shown["counts"]
    total, queue, compute = (np.array(counts) for counts in shown["durations"])
    return CounterSample(
        requests,
        failures,
        rows,
        batches,
        total,
        queue,
        compute,
        tuple((batches, rows) for batches, rows in shown["nodes"]),
        tuple((requests, rows, around) for requests, rows, around in shown["spaces"]),
        tuple(tuple((whole, copied) for whole, copied in edges) for edges in shown["edges"]),
    )


def _is_still(one: Statistics, before: CounterSample) -> bool:
    if one.success_count != before.requests or one.fail_count != before.failures:
        return False
    return one.execution_count == before.batches and [node.batches for node in one.nodes] == [
        batches for batches, _ in before.nodes
    ]


def deployment_figures(
    old: CounterSample, new: CounterSample, seconds: float, edges_ns: Sequence[int]
) -> dict[str, Any]:
    """Requests and failures per second, and latencies `p50` and `p99` in milliseconds, None without requests.
    `edges_ns` are the histograms' edges.
    """
    if old is new:
        return {"rate": 0.0, "failing": 0.0, "p50": None, "p99": None}
    return {
        "rate": _per_second(old.requests, new.requests, seconds),
        "failing": _per_second(old.failures, new.failures, seconds),
        **_latencies("", old.total, new.total, edges_ns),
    }


def model_figures(old: CounterSample, new: CounterSample, seconds: float, edges_ns: Sequence[int]) -> dict[str, Any]:
    """A model's figures over all its users: as `deployment_figures`, with queue and compute times separately."""
    return {
        **deployment_figures(old, new, seconds, edges_ns),
        "mean_batch": _mean(old.rows, new.rows, old.batches, new.batches),
        **_latencies("queue_", old.queue, new.queue, edges_ns),
        **_latencies("compute_", old.compute, new.compute, edges_ns),
    }


def node_figures(old: CounterSample, new: CounterSample, index: int, seconds: float) -> dict[str, Any]:
    """The batches per second of one node of a graph, and their mean number of rows."""
    was = old.nodes[index] if len(old.nodes) == len(new.nodes) else (0, 0)
    batches, rows = new.nodes[index]
    return {"batches": _per_second(was[0], batches, seconds), "mean_batch": _mean(was[1], rows, was[0], batches)}


def space_figures(old: CounterSample, new: CounterSample, index: int) -> dict[str, float | None]:
    """The share of the rows around a space that are in it, and its mean rows per request; None without requests."""
    was = old.spaces[index] if len(old.spaces) == len(new.spaces) else (0, 0, 0)
    requests, rows, around = new.spaces[index]
    return {"share": _mean(was[1], rows, was[2], around), "rows": _mean(was[1], rows, was[0], requests)}


def edge_figures(old: CounterSample, new: CounterSample, index: int, seconds: float) -> list[dict[str, Any]]:
    """For each edge into one node: its bytes per second, and the copied bytes per second."""
    here = new.edges[index]
    was = old.edges[index] if len(old.edges) == len(new.edges) else ()
    if len(was) != len(here):
        was = ((0, 0),) * len(here)
    figures = []
    for (old_whole, old_copied), (whole, copied) in zip(was, here, strict=True):
        moved = _per_second(old_whole, whole, seconds) + _per_second(old_copied, copied, seconds)
        figures.append({"bytes": rounded(moved), "copied": _per_second(old_copied, copied, seconds)})
    return figures


def quantile_ms(edges_ns: Sequence[int], counts: Array, share: float) -> float | None:
    """The quantile `share` in milliseconds. Observations above the last edge count as equal to it; None without
    observations.
    """
    upto = np.cumsum(counts)
    wanted = share * int(upto[-1])
    if not wanted:
        return None
    i = int(np.searchsorted(upto, wanted))
    low, high = edges_ns[i - 1] if i else 0, edges_ns[min(i, len(edges_ns) - 1)]
    count = int(counts[i])
    return rounded((low + (high - low) * (wanted - int(upto[i]) + count) / count) / _NS_PER_MS)


def rounded(value: float) -> float:
    """Rounded to _DIGITS significant digits."""
    return float(f"{value:.{_DIGITS}g}")


def _latencies(name: str, old: Array, new: Array, edges_ns: Sequence[int]) -> dict[str, float | None]:
    since = new - old
    if (since < 0).any():  # its deployment was replaced
        since = new
    return {f"{name}p50": quantile_ms(edges_ns, since, 0.5), f"{name}p99": quantile_ms(edges_ns, since, 0.99)}


def _grown(old: int, new: int) -> int:
    return new - old if new >= old else new


def _per_second(old: int, new: int, seconds: float) -> float:
    return rounded(_grown(old, new) / seconds) if seconds > 0 else 0.0


def _mean(old_sum: int, new_sum: int, old_count: int, new_count: int) -> float | None:
    count = _grown(old_count, new_count)
    return rounded(_grown(old_sum, new_sum) / count) if count else None


INTERVAL_S: Final = 1.0
WINDOW_S: Final = 5.0  # figures cover this period
_FRESH_NS: Final = round(0.9 * INTERVAL_S * SECOND_NS)
_WINDOW_NS: Final = round((WINDOW_S + 0.5 * INTERVAL_S) * SECOND_NS)
_NO_DURATIONS: Final = np.zeros(len(FINE_DURATION_EDGES_NS) + 1, np.int64)
_NOTHING: Final = CounterSample(0, 0, 0, 0, _NO_DURATIONS, _NO_DURATIONS, _NO_DURATIONS, (), (), ())


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters of all deployments at one time."""

    at_ns: int
    readings: Mapping[ModelKey, CounterSample]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the list of deployment versions, and the number of the reading since which it is unchanged."""

    shown: dict[str, Any]
    since: int


class _Counted(NamedTuple):
    """The counters of a deployment, and its last error. `present`: the load of its queue; None: the engine knows it."""

    sample: CounterSample
    error: str
    error_ms: int
    present: Mapping[str, Any] | None = None


class Sampler:
    """Used on the engine's thread only. `number` counts readings; a viewer requests the changes since one of them."""

    def __init__(self, engine: Engine) -> None:
        self.number = 0
        self._engine = engine
        self._readings: deque[_Reading] = deque()  # not empty after the first `look`; the period begins at the oldest
        self._rows: dict[tuple[str, str], _Row] = {}
        self._listed = 0  # the number of the reading since which the list has the same names
        self._counted: Mapping[ModelKey, _Counted] = {}  # the last reading
        self._in_flight: int | None = None  # requests, of all servers; None: those of this one
        self._one_by_one = trio.Lock()
        self._graphs: dict[ModelKey, dict[str, Any]] = {}  # of this reading, shared by all viewers of a graph
        self._pictures: WeakKeyDictionary[Deployment, str] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[Deployment, Sequence[tuple[str, str]]] = WeakKeyDictionary()

    async def look(self) -> None:
        """Read the counters, of all servers behind the port, unless the last reading is recent."""
        async with nullcontext() if self._engine.group is None else self._one_by_one:
            if self._readings and self._engine.clock() - self._readings[-1].at_ns < _FRESH_NS:
                return
            counted = self._count() if self._engine.group is None else await self._count_all(self._engine.group)
            self._note(counted)

    def _count(self) -> dict[ModelKey, _Counted]:
        before = self._readings[-1].readings if self._readings else {}
        self._in_flight = None
        return {
            (key := ModelKey(one.name, one.version)): _Counted(
                read(one, before.get(key)), one.last_error, one.last_error_ms
            )
            for one, _ in self._engine.deployments.counters()
        }

    async def _count_all(self, group: Group) -> dict[ModelKey, _Counted]:
        report = await group.report(FIGURES)
        self._in_flight = report[PRESENT]["in_flight"]
        counted = {}
        for name, shown in report["deployments"].items():
            model, _, version = name.rpartition("/")
            error_ms, error = shown["last_error"]
            counted[ModelKey(model, int(version))] = _Counted(_sample_of(shown), error, error_ms, shown[PRESENT])
        return counted

    def _note(self, counted: Mapping[ModelKey, _Counted]) -> None:
        now_ns = self._engine.clock()
        self._counted = counted
        self._readings.append(_Reading(now_ns, {key: one.sample for key, one in counted.items()}))
        while now_ns - self._readings[0].at_ns > _WINDOW_NS:
            self._readings.popleft()
        self.number += 1
        self._graphs.clear()
        self._list(counted)

    def frame(self, watched: Deployment | None, seen: int) -> dict[str, Any]:
        """The changes since reading number `seen` (0: all), and the figures of `watched`. `names`: all names, None if
        unchanged.
        """
        engine = self._engine
        return {
            "at_ms": wall_clock_ms(),
            "server": {
                "is_ready": engine.deployments.is_ready,
                "in_flight": engine.scheduler.in_flight if self._in_flight is None else self._in_flight,
            },
            "names": [*self._rows] if self._listed > seen else None,
            "deployments": [row.shown for row in self._rows.values() if row.since > seen],
            "graph": None if watched is None else self._graph(watched),
        }

    def picture(self, deployment: Deployment) -> str:
        """A digest that changes with the deployment's picture."""
        if deployment not in self._pictures:
            document = orjson.dumps(graph_document(deployment.graph, self.configs(deployment)))
            self._pictures[deployment] = sha256(document).hexdigest()[:16]
        return self._pictures[deployment]

    def configs(self, deployment: Deployment) -> dict[str, ModelConfig]:
        """The configurations of the deployment and its steps, by name, for its picture."""
        entries = self._engine.deployments.entries
        keys = [node.model for node in deployment.graph.nodes]
        parts = [entries[key.name].ready.get(key.version) for key in keys if key.name in entries]
        configs = [deployment.config, *(part.config for part in parts if part is not None)]
        return {config.name: config for config in configs}

    # ------------------------------------------------------------------ the list

    def _list(self, counters: Mapping[ModelKey, _Counted]) -> None:
        rows: dict[tuple[str, str], _Row] = {}
        for row in self._engine.deployments.index():
            counted = counters.get(ModelKey(row["name"], int(row.get("version", 0))))
            key = (row["name"], "" if counted is None else row["version"])  # versions that do not serve are one row
            shown = {"name": key[0], "version": key[1], "state": row["state"], "reason": row.get("reason", "")}
            if counted is not None:
                shown |= self._figures(ModelKey(row["name"], int(row["version"])), counted)
            former = self._rows.get(key)
            rows[key] = former if former is not None and former.shown == shown else _Row(shown, self.number)
        if rows.keys() != self._rows.keys():
            self._listed = self.number
        self._rows = rows

    def _figures(self, key: ModelKey, one: _Counted) -> dict[str, Any]:
        deployment = self._engine.deployments.entries[key.name].ready[key.version]
        return {
            "is_ensemble": deployment.graph.is_ensemble,
            "models": self._models_of(deployment),
            "total": one.sample.requests,
            "error": one.error,
            "error_ms": one.error_ms,
            **deployment_figures(*self._between(key), FINE_DURATION_EDGES_NS),
        }

    def _models_of(self, deployment: Deployment) -> Sequence[tuple[str, str]]:
        """The name and version of each model of a graph; none for a model."""
        if deployment not in self._models:
            keys = [node.model for node in deployment.graph.nodes] if deployment.graph.is_ensemble else []
            self._models[deployment] = [*dict.fromkeys((key.name, str(key.version)) for key in keys)]
        return self._models[deployment]

    def _between(self, key: ModelKey) -> tuple[CounterSample, CounterSample, float]:
        """The first and the last reading of the period, and the seconds between."""
        first, last = self._readings[0], self._readings[-1]
        old, new = first.readings.get(key, _NOTHING), last.readings.get(key, _NOTHING)
        return old, new, (last.at_ns - first.at_ns) / SECOND_NS

    # ------------------------------------------------------------------ one graph

    def _graph(self, deployment: Deployment) -> dict[str, Any]:
        key = ModelKey(deployment.name, deployment.version)
        if key not in self._graphs:
            self._graphs[key] = self._drawn(deployment, *self._between(key))
        return self._graphs[key]

    def _drawn(self, deployment: Deployment, old: CounterSample, new: CounterSample, seconds: float) -> dict[str, Any]:
        graph = deployment.graph
        edges: dict[int, dict[str, Any]] = {}
        nodes = []
        if len(new.nodes) == len(graph.nodes):  # else the deployment was replaced since the reading
            for node, queue in zip(graph.nodes, deployment.queues, strict=True):
                into = [number for number, edge in enumerate(graph.edges) if edge.consumer == node.index]
                edges |= zip(into, edge_figures(old, new, node.index, seconds), strict=True)
                model = model_figures(*self._between(node.model), FINE_DURATION_EDGES_NS)
                figures = node_figures(old, new, node.index, seconds)
                counted = self._counted.get(node.model)
                present = None if counted is None else counted.present
                nodes.append({**figures, **(_now(queue) if present is None else present), "model": model})
        return {
            "name": deployment.name,
            "version": str(deployment.version),
            "picture": self.picture(deployment),
            "nodes": nodes,
            "spaces": [space_figures(old, new, i) for i in range(len(new.spaces))],
            "edges": [edges.get(number) for number in range(len(graph.edges))],
        }


def _now(queue: ModelQueue) -> dict[str, Any]:
    """The load of a model's queue and instances, which all graphs with the model share; an instance that takes several
    batches at once counts as so many. `in_flight`: requests, waiting ones included; requests that run inline are never
    visible here.
    """
    waiting = len(queue.batcher)
    workers = dict.fromkeys(queue.instances)  # each once, though it may take several batches
    return {
        "waiting": waiting,
        "in_flight": waiting + sum(len(batch.tickets) for worker in workers for batch in batches_of(worker)),
        "busy": queue.running,
        "instances": len(queue.instances),
        "away": len(queue.away),
    }
