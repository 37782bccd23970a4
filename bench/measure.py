"""The order of a measurement: which server is loaded when, and with what.

Decided here: rounds. In each round every concurrency is run on every side in turn, the order reversed from round to
round, so that a slow minute of the machine meets all of them. A side is a server and what it is asked: ours, Triton,
another flowserve, our server's slowest step alone, an echo. Between two runs the other servers stand idle. The direct
calls take their turn with no server loaded.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import batches, echo, servers
from bench.repositories import Onnxruntime, served_models, write_repository
from bench.requests import write_requests
from bench.runs import WARMUP_S, Limit, Plan, Run, Say
from bench.servers import BenchFailed, Server
from bench.works import Work

LIMIT_BATCHES: Final = (1, 8, 32)
SLOWEST: Final = "slowest alone"


@dataclass(frozen=True, slots=True)
class Side:
    """What is loaded in turn: `name` in the tables, a running server, a folder of requests, and the `models` whose
    statistics tell how it was batched, the `graph` they belong to first; none where the server keeps no statistics."""

    name: str
    server: Server
    requests: Path
    graph: str = ""
    models: tuple[str, ...] = ()


def measure_work(work: Work, plan: Plan, say: Say) -> tuple[list[Run], list[Limit]]:
    """Measure one work on flowserve and whatever it is compared with. Raises BenchFailed."""
    runs: list[Run] = []
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name, contextlib.ExitStack() as stack:
        sides = list(_sides(work, plan, Path(name), stack))
        for number in range(plan.rounds):
            limits += _direct(work, number, plan.seconds / len(LIMIT_BATCHES))
            for concurrency in plan.concurrency:
                for side in sides if number % 2 == 0 else reversed(sides):
                    say(f"{work.name}: round {number + 1} of {plan.rounds}, {side.name}, concurrency {concurrency}")
                    try:
                        runs.append(_one(work.name, side, concurrency, number, plan.seconds))
                    except BenchFailed as error:
                        raise BenchFailed(f"{work.name}: {error}") from error
    return runs, limits


def measure_echo(plan: Plan, say: Say) -> list[Run]:
    """Load a small echo on our server and, where uvicorn is installed, on that in turns. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        echo.write_requests(folder / "requests", max(plan.concurrency), echo.SMALL_BYTES)
        sides = [
            Side(server, _echoing(server, command, folder, stack), folder / "requests")
            for server, command in echo.commands().items()
        ]
        runs = []
        for number in range(plan.rounds):
            for concurrency in plan.concurrency:
                for side in sides if number % 2 == 0 else reversed(sides):
                    say(f"echo: round {number + 1} of {plan.rounds}, {side.name}, concurrency {concurrency}")
                    runs.append(_one(echo.WORK, side, concurrency, number, plan.seconds))
        return runs


def _sides(work: Work, plan: Plan, folder: Path, stack: contextlib.ExitStack) -> Iterator[Side]:
    """Start every server that `work` is measured on; they stop with `stack`."""
    most = max(plan.concurrency)
    requests = folder / "requests"
    write_requests(work, requests, most)
    models = served_models(work)

    def serve(name: str, command: Sequence[str], *, port: int = 0, where: Path | None = None) -> Server:
        log = folder / f"{name}.log"
        return stack.enter_context(
            servers.serving(name, command, log, port=port, environment=work.environment, folder=where)
        )

    ours = folder / "flowserve"
    write_repository(work, ours, Onnxruntime.BACKEND)
    server = serve(servers.FLOWSERVE, servers.flowserve_command(ours, plan.python_execution))
    yield Side(servers.FLOWSERVE, server, requests, work.name, models)
    if work.slowest:
        write_requests(work.alone(), folder / "alone", most)
        yield Side(SLOWEST, server, folder / "alone", work.slowest, (work.slowest,))
    if plan.against:
        program, where = servers.other_flowserve(plan.against)
        server = serve(servers.BEFORE, servers.flowserve_command(ours, plan.python_execution, program), where=where)
        yield Side(servers.BEFORE, server, requests, work.name, models)
    if os.environ.get("TRITONSERVER"):
        theirs = folder / "triton"
        write_repository(work, theirs, Onnxruntime.MODEL_PY)
        port = servers.free_port()
        server = serve(servers.TRITON, servers.triton_command(theirs, port), port=port)
        yield Side(servers.TRITON, server, requests, work.name, models)
    if work.echo:
        echo.write_requests(folder / "echoed", most, work.rows(1).nbytes)
        command = echo.commands()[servers.FLOWSERVE]
        yield Side(echo.WORK, _echoing(echo.WORK, command, folder, stack), folder / "echoed")


def _echoing(name: str, command: Sequence[str], folder: Path, stack: contextlib.ExitStack) -> Server:
    log = folder / f"{name}.log"
    return stack.enter_context(servers.serving(name, command, log, ready_path="/ready", environment={}))


def _one(work: str, side: Side, concurrency: int, number: int, seconds: float) -> Run:
    asked = {*side.models, side.graph} if side.models else ()
    before = batches.read(side.server, asked)
    measured = servers.run_load(side.requests, side.server, concurrency, WARMUP_S, seconds)
    after = batches.read(side.server, asked)
    means = batches.mean_batches(before, after, side.models)
    edges = batches.edge_bytes(before, after, side.graph) if side.graph else {}
    return Run.of(work, side.name, concurrency, number, measured, means, edges)


def _direct(work: Work, number: int, seconds: float) -> list[Limit]:
    """The work as direct calls in a loop, `seconds` for each batch size."""
    call = work.direct()
    limits = []
    for batch in LIMIT_BATCHES:
        rows = work.rows(batch)
        call(rows)
        done, began, cpu_began = 0, time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - began) < seconds:
            call(rows)
            done += batch
        cpu_us = (time.process_time() - cpu_began) / done * 1e6
        limits.append(Limit(work.name, batch, number, done / elapsed, cpu_us))
    return limits
