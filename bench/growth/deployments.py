"""Growth with the number of deployments: start, memory, a request to one of them, one load and unload, /metrics.

Each deployment is a small Python model that runs inline; `python -m bench --start` measures models in processes.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.growth.loads import CPU_US, MEBIBYTE, MEMORY_MIB, Client, Load, figures_of, get, probing
from bench.growth.readings import Reading, Slope
from bench.processes import memory_bytes
from bench.repositories import Onnxruntime, write_repository
from bench.requests import post, write_requests
from bench.servers import FLOWSERVE, BenchFailed, Server, flowserve_command, serving
from bench.works import WORKS

START_S: Final = "start s"
FIRST_METRICS_MS: Final = "first /metrics ms"
METRICS_MS: Final = "/metrics ms"
METRICS_MB: Final = "/metrics MB"
METRICS_LIVE_MS: Final = "longest live during /metrics ms"
LOAD_MS: Final = "load one ms"
UNLOAD_MS: Final = "unload one ms"
LOAD_LIVE_MS: Final = "longest live during load and unload ms"
SLOPES: Final = (
    Slope(START_S, "start ms per extra", 1e3),
    Slope(MEMORY_MIB, "memory KiB per extra", 1024.0),
    Slope(CPU_US, "CPU us/request per extra"),
    Slope(METRICS_MS, "/metrics ms per extra"),
)
_CONCURRENCY: Final = 8
_REPEATED: Final = 3  # loads and unloads of one round
_EXPLICIT: Final = ("--model-control-mode", "explicit", "--load-model", "*")


def measure_deployments(sizes: Sequence[int], load: Load) -> list[Reading]:
    """One round. Raises BenchFailed."""
    return [Reading(f"c = {_CONCURRENCY}", size, _measure(size, load)) for size in sizes]


def _measure(size: int, load: Load) -> dict[str, float]:
    works = [replace(WORKS["identity"], name=f"deployment_{i}") for i in range(size)]
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        folder = Path(name)
        for work in works:
            write_repository(work, folder / "models", Onnxruntime.BACKEND, varying=True)
        write_requests(works[0], folder / "requests", _CONCURRENCY)
        command = [*flowserve_command(folder / "models", "inline"), *_EXPLICIT]
        began = time.monotonic()
        with serving(FLOWSERVE, command, folder / "log", environment={}) as server:
            figures = {START_S: time.monotonic() - began, MEMORY_MIB: memory_bytes(server.pid) / MEBIBYTE}
            return {
                **figures,
                **figures_of(load.run(folder / "requests", server, _CONCURRENCY)),
                **_metrics(server, size),
                **_load_one(server, works[-1].name),
            }


def _metrics(server: Server, size: int) -> dict[str, float]:
    """The first page, and the next, for which names and labels are ready."""
    with contextlib.closing(Client(server)) as client, probing(server) as probe:
        began = time.perf_counter()
        client.ask(get("/metrics"))
        first, began = time.perf_counter() - began, time.perf_counter()
        page = client.ask(get("/metrics"))
        second = time.perf_counter() - began
    counted = sum(line.startswith(b"nv_inference_request_success{") for line in page.splitlines())
    if counted != size:
        raise BenchFailed(f"/metrics has {counted} deployments where {size} are served")
    return {
        FIRST_METRICS_MS: first * 1e3,
        METRICS_MS: second * 1e3,
        METRICS_MB: len(page) / 1e6,
        METRICS_LIVE_MS: probe.longest_s * 1e3,
    }


def _load_one(server: Server, name: str) -> dict[str, float]:
    """Unload one deployment and load it again; the median of some times."""
    seconds: dict[str, list[float]] = {"unload": [], "load": []}
    with contextlib.closing(Client(server)) as client, probing(server) as probe:
        for _ in range(_REPEATED):
            for verb, took in seconds.items():
                began = time.perf_counter()
                client.ask(post(f"/v2/repository/models/{name}/{verb}", (), b"{}"))
                took.append(time.perf_counter() - began)
    return {
        LOAD_MS: statistics.median(seconds["load"]) * 1e3,
        UNLOAD_MS: statistics.median(seconds["unload"]) * 1e3,
        LOAD_LIVE_MS: probe.longest_s * 1e3,
    }
