"""Growth with the number of connections: all of them active, and idle ones beside 32 that are active.

The model is the identity on 64 floats, inline. An idle connection stays open after its first response.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.growth.loads import CPU_US, MEBIBYTE, MEMORY_MIB, P99_MS, Client, Load, figures_of
from bench.growth.readings import Reading, Slope
from bench.load import read_samples
from bench.processes import memory_bytes
from bench.repositories import Onnxruntime, write_repository
from bench.requests import write_requests
from bench.servers import FLOWSERVE, BenchFailed, flowserve_command, serving
from bench.works import WORKS

PER_CONNECTION: Final = "memory KiB per connection"
ACTIVE: Final = 32
SLOPES: Final = (
    Slope(CPU_US, "CPU ns/request per extra", 1e3),
    Slope(P99_MS, "p99 us per extra", 1e3),
    Slope(MEMORY_MIB, "memory KiB per extra", 1024.0),
)
_DIFFERENT: Final = 64  # requests; connections share them
_OTHER_FILES: Final = 256  # of a server or a client, besides its connections


def measure_connections(sizes: Sequence[int], load: Load) -> list[Reading]:
    """One round. Raises BenchFailed, also where the system allows fewer open files than connections."""
    _allow_files(max(sizes) + ACTIVE + _OTHER_FILES)
    return [reading for size in sizes for reading in _measure(size, load)]


def _measure(size: int, load: Load) -> list[Reading]:
    work = WORKS["identity"]
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        folder = Path(name)
        write_repository(work, folder / "models", Onnxruntime.BACKEND, varying=True)
        write_requests(work, folder / "requests", _DIFFERENT)
        command = [*flowserve_command(folder / "models", "inline"), "--http-max-connections", str(size + 2 * ACTIVE)]
        with serving(FLOWSERVE, command, folder / "log", environment={}) as server:
            sample = read_samples(folder / "requests")[0]
            with contextlib.closing(Client(server)) as first:
                first.ask(bytes(sample.request))  # which also loads code
            before = memory_bytes(server.pid)
            with contextlib.ExitStack() as stack:
                for _ in range(size):
                    client = stack.enter_context(contextlib.closing(Client(server)))
                    if not client.ask(bytes(sample.request)).endswith(sample.numbers):
                        raise BenchFailed(f"wrong numbers with {size} connections")
                memory = memory_bytes(server.pid)
                beside = figures_of(load.run(folder / "requests", server, ACTIVE))
            active = figures_of(load.run(folder / "requests", server, size))
    beside |= {MEMORY_MIB: memory / MEBIBYTE, PER_CONNECTION: (memory - before) / size / 1024}
    return [Reading("all active", size, active), Reading(f"idle, beside {ACTIVE} active", size, beside)]


def _allow_files(needed: int) -> None:
    """Let this process and those it starts open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchFailed(f"{needed} open files are needed and the limit is {hard} (ulimit -n)")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
