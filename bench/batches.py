"""Whether batches stayed together: the difference between two readings of a server's statistics.

Mean batches come from every server with Triton's statistics extension; the bytes of each edge only from flowserve, from
its own statistics of graphs.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError

from bench.servers import BenchFailed, Server

Reading = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class EdgeBytes:
    """Bytes per request. `handed_on` were read in place, `copied` were gathered first; `regathered` of these came out
    of one batch. `placed`: the tensor's bytes that were written contiguously, counted once for all edges it feeds."""

    handed_on: float
    copied: float
    regathered: float
    placed: float


def read(server: Server, models: Iterable[str]) -> Reading:
    """The row of statistics of each model, with the nodes of its graph. Raises BenchFailed."""
    return {model: {**_row(server, "v2", model, "model_stats"), "nodes": _nodes(server, model)} for model in models}


def _row(server: Server, root: str, model: str, key: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.port}/{root}/models/{model}/stats"
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return dict(json.load(answer)[key][0])
    except (OSError, LookupError, ValueError) as error:
        raise BenchFailed(f"{server.name}: GET {url}: {error}") from error


def _nodes(server: Server, model: str) -> list[dict[str, Any]]:
    """[] for other servers."""
    try:
        return list(_row(server, "flowserve", model, "graph_stats")["nodes"])
    except BenchFailed as failed:
        if isinstance(failed.__cause__, HTTPError):  # no such path
            return []
        raise


def mean_batches(before: Reading, after: Reading, models: Iterable[str]) -> dict[str, float]:
    """Rows per execution of each model."""
    means = {}
    for model in models:
        rows, calls = (
            int(after[model][field]) - int(before[model][field]) for field in ("inference_count", "execution_count")
        )
        means[model] = rows / calls if calls else 0.0
    return means


def edge_bytes(before: Reading, after: Reading, graph: str) -> dict[str, EdgeBytes]:
    """The bytes of each edge into a node of `graph`, keyed "producer > consumer"; empty for other servers."""
    then, now = _sums(before[graph]), _sums(after[graph])
    requests = _successes(after[graph]) - _successes(before[graph])
    if not requests:
        return {}
    return {
        edge: EdgeBytes(*((last - first) / requests for last, first in zip(now[edge], then[edge], strict=True)))
        for edge in now
    }


def _sums(row: Mapping[str, Any]) -> dict[str, tuple[int, int, int, int]]:
    nodes = row["nodes"]
    placed = {(node["name"], output["tensor"]): output["placed_bytes"] for node in nodes for output in node["outputs"]}
    return {
        f"{edge['producer'] or 'request'} > {node['name']}": (
            edge["handed_on_bytes"],
            edge["copied_bytes"],
            edge["regathered_bytes"],
            placed.get((edge["producer"], edge["tensor"]), 0),
        )
        for node in nodes
        for edge in node["inputs"]
    }


def _successes(row: Mapping[str, Any]) -> int:
    return int(row["inference_stats"]["success"]["count"])
