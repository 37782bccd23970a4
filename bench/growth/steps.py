"""Growth with the steps of a graph: a chain of Python models, inline and in processes, at 1 and 32 connections.

One server has the models of the longest chain; each size is an ensemble of the first of them, so that all sizes of a
round are measured on the same server. A single step is a plain model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.growth.loads import CPU_US, Load, figures_of
from bench.growth.readings import Reading, Slope
from bench.repositories import Onnxruntime, write_repository
from bench.requests import write_requests
from bench.servers import FLOWSERVE, flowserve_command, serving
from bench.works import Python, Step, Work

ELAPSED_US: Final = "us/request"
SLOPES: Final = (
    Slope(CPU_US, "CPU us per extra step"),
    Slope(ELAPSED_US, "us per extra step"),
)
_EXECUTIONS: Final = ("inline", "process")
_CONCURRENCY: Final = (1, 32)
_DIMS: Final = (64,)


def measure_steps(sizes: Sequence[int], load: Load) -> list[Reading]:
    """One round. Raises BenchFailed."""
    readings = []
    works = {size: _chain(size) for size in sizes}
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for size, work in works.items():
            write_repository(work, folder / "models", Onnxruntime.BACKEND, varying=True)
            write_requests(work, folder / f"requests-{size}", max(_CONCURRENCY))
        started = [
            (
                execution,
                stack.enter_context(
                    serving(
                        FLOWSERVE,
                        flowserve_command(folder / "models", execution),
                        folder / f"{execution}.log",
                        environment={},
                    )
                ),
            )
            for execution in _EXECUTIONS
        ]
        for size in sizes:
            for concurrency in _CONCURRENCY:
                for execution, server in started:
                    measured = load.run(folder / f"requests-{size}", server, concurrency)
                    elapsed_us = measured.seconds / measured.requests * 1e6
                    figures = {**figures_of(measured), ELAPSED_US: elapsed_us}
                    readings.append(Reading(f"{execution}, c = {concurrency}", size, figures))
    return readings


def _chain(size: int) -> Work:
    """`size` steps that add one each, so that the response shows how many computed."""
    steps = [
        Step(f"step_{i + 1}", {"X": f"after_{i}" if i else "X"}, f"after_{i + 1}", _DIMS, _DIMS, Python("X + 1"))
        for i in range(size)
    ]
    steps[-1] = replace(steps[-1], output="Y")
    return Work(f"steps_{size}", "", tuple(steps))
