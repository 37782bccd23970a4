"""The order of a measurement: which server is loaded when, and with what.

In each round every concurrency is run on every side in turn, the order reversed from round to round, so that changes in
the machine's speed affect all sides. Between two runs the other servers are idle. The open loop and the direct calls
follow in the same round.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from bench import batches, echo, servers
from bench.repositories import Onnxruntime, served_models, write_repository
from bench.requests import write_requests
from bench.runs import WARMUP_S, Limit, Plan, Run, Say, Variant
from bench.servers import BenchFailed, Server
from bench.works import Work

LIMIT_BATCHES: Final = (1, 8, 32)
SLOWEST: Final = "slowest alone"


# Connections of an open loop: more than requests are in flight, unless the server is overloaded.
OPEN_CONNECTIONS: Final = 128
# Requests of a folder whose requests differ in head, shape or deployment.
DIFFERENT: Final = 64


@dataclass(frozen=True, slots=True)
class Side:
    """A running server and a folder of requests for it, `name` in the tables. The statistics of `models` show its
    batches, those of `graph` (their ensemble) its edges; both are empty where the server keeps no statistics."""

    name: str
    variant: Variant
    server: Server
    requests: Path
    graph: str = ""
    models: tuple[str, ...] = ()


def measure_work(work: Work, plan: Plan, say: Say) -> tuple[list[Run], list[Limit]]:
    """Measure one work on flowserve and the servers it is compared with. Raises BenchFailed."""
    runs: list[Run] = []
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name, contextlib.ExitStack() as stack:
        sides = list(_sides(work, plan, Path(name), stack))

        def run(side: Side, concurrency: int, number: int, rate: float = 0.0) -> Run:
            at = f"{rate:.0f} requests/s" if rate else f"concurrency {concurrency}"
            say(f"{work.name}: round {number + 1} of {plan.rounds}, {side.name} ({side.variant}), {at}")
            try:
                return _one(work, side, concurrency, number, plan.seconds, rate)
            except BenchFailed as error:
                raise BenchFailed(f"{work.name}: {error}") from error

        for number in range(plan.rounds):
            limits += _direct(work, number, plan.seconds / len(LIMIT_BATCHES))
            order = sides if number % 2 == 0 else sides[::-1]
            capacity: dict[tuple[str, Variant], float] = {}
            for concurrency in plan.concurrency:
                for side in order:
                    runs.append(run(side, concurrency, number))
                    key = (side.name, side.variant)
                    capacity[key] = max(capacity.get(key, 0.0), runs[-1].requests_per_second)
            for arrivals in plan.arrivals:
                for side in order:
                    if side.variant.client == "own" and side.name not in (SLOWEST, echo.WORK):
                        rate = offered_rate(arrivals, capacity[side.name, side.variant])
                        open_side = replace(side, variant=replace(side.variant, arrivals=arrivals))
                        runs.append(run(open_side, OPEN_CONNECTIONS, number, rate))
    return runs, limits


def offered_rate(arrivals: str, capacity: float) -> float:
    """Requests per second of "60%" of the capacity, or of "1500/s"."""
    return float(arrivals[:-1]) / 100 * capacity if arrivals.endswith("%") else float(arrivals.removesuffix("/s"))


def measure_echo(plan: Plan, say: Say) -> list[Run]:
    """Load an echo on flowserve's HTTP server and, where it is installed, on uvicorn in turns. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        echo.write_requests(folder / "requests", max(plan.concurrency), echo.SMALL_BYTES)
        sides = [
            Side(server, Variant(), _echoing(server, command, folder, stack), folder / "requests")
            for server, command in echo.commands().items()
        ]
        runs = []
        for number in range(plan.rounds):
            for concurrency in plan.concurrency:
                for side in sides if number % 2 == 0 else reversed(sides):
                    say(f"echo: round {number + 1} of {plan.rounds}, {side.name}, concurrency {concurrency}")
                    measured = servers.run_load(side.requests, side.server, concurrency, WARMUP_S, plan.seconds)
                    runs.append(Run.of(echo.WORK, side.variant, side.name, concurrency, number, measured, {}))
        return runs


def _sides(work: Work, plan: Plan, folder: Path, stack: contextlib.ExitStack) -> Iterator[Side]:
    """Start every server that `work` is measured on; they stop with `stack`."""
    most = max(plan.concurrency)
    requests: dict[tuple[str, str], Path] = {}
    for shapes, heads in itertools.product(plan.shapes, plan.heads):
        if shapes != "lengths" or (work.varies and "varying" in plan.dims):
            requests[shapes, heads] = folder / f"requests-{shapes}-{heads}"
            # Where requests repeat, each connection has one of its own.
            count = most if _repeats(work, Variant(shapes=shapes, heads=heads)) else DIFFERENT
            write_requests(work, requests[shapes, heads], count, shapes, heads)
    if work.slowest:
        write_requests(work.alone(), folder / "alone", most)
    models = served_models(work)

    def serve(
        name: str,
        command: Sequence[str],
        port: int = 0,
        where: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Server:
        log = folder / f"{name}-{len(list(folder.iterdir()))}.log"
        variables = {**work.environment, **environment}
        return stack.enter_context(servers.serving(name, command, log, port=port, environment=variables, folder=where))

    def loads(name: str, server: Server, execution: str, dims: str) -> Iterator[Side]:
        for ((shapes, heads), where), client in itertools.product(requests.items(), plan.clients):
            if shapes != "lengths" or dims == "varying":
                variant = Variant(execution, dims, shapes, heads, client)
                yield Side(name, variant, server, where, work.name, models)

    for dims in plan.dims:
        ours = folder / f"flowserve-{dims}"
        write_repository(work, ours, Onnxruntime.BACKEND, varying=dims == "varying")
        for execution in plan.executions:
            server = serve(servers.FLOWSERVE, servers.flowserve_command(ours, execution))
            yield from loads(servers.FLOWSERVE, server, execution, dims)
            if work.slowest:
                variant = Variant(execution, dims)
                yield Side(SLOWEST, variant, server, folder / "alone", work.slowest, (work.slowest,))
            if plan.against:
                program, where = servers.other_flowserve(plan.against)
                command = servers.flowserve_command(ours, execution, program)
                yield from loads(servers.BEFORE, serve(servers.BEFORE, command, where=where), execution, dims)
        if os.environ.get("TRITONSERVER"):
            theirs = folder / f"triton-{dims}"
            write_repository(work, theirs, Onnxruntime.MODEL_PY, varying=dims == "varying")
            port = servers.free_port()
            command = servers.triton_command(theirs, port)
            server = serve(servers.TRITON, command, port, environment=servers.triton_environment())
            yield from loads(servers.TRITON, server, "", dims)
    if work.echo:
        echo.write_requests(folder / "echoed", most, work.rows(1).nbytes)
        command = echo.commands()[servers.FLOWSERVE]
        yield Side(echo.WORK, Variant(), _echoing(echo.WORK, command, folder, stack), folder / "echoed")


def _repeats(work: Work, variant: Variant) -> bool:
    """Whether all requests are equal but for their numbers, so that each connection can repeat one."""
    return variant.shapes == "one" and variant.heads == "equal" and work.partner is None


def _echoing(name: str, command: Sequence[str], folder: Path, stack: contextlib.ExitStack) -> Server:
    log = folder / f"{name}.log"
    return stack.enter_context(servers.serving(name, command, log, ready_path="/ready", environment={}))


def _one(work: Work, side: Side, concurrency: int, number: int, seconds: float, rate: float) -> Run:
    names = {*side.models, side.graph} if side.models else ()
    before = batches.read(side.server, names)
    cycle = not _repeats(work, side.variant)
    client = side.variant.client
    measured = servers.run_load(
        side.requests, side.server, concurrency, WARMUP_S, seconds, client=client, rate=rate, cycle=cycle
    )
    after = batches.read(side.server, names)
    means = batches.mean_batches(before, after, side.models)
    edges = batches.edge_bytes(before, after, side.graph) if side.graph else {}
    return Run.of(work.name, side.variant, side.name, concurrency, number, measured, means, edges)


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
