"""A Starlette echo, on our HTTP server and on uvicorn: what the server below the app costs, with no inference at all.

Decided here: the app both carry, and how the two are run. `python -m bench.echo` is our side's process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from bench import servers
from bench.measure import WARMUP_S, Plan, Run, Say
from bench.requests import post
from bench.servers import FLOWSERVE

UVICORN: Final = "uvicorn"
WORK: Final = "echo"
BODY_BYTES: Final = 256


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


async def _ready(request: Request) -> Response:
    return PlainTextResponse("ready")


app = Starlette(routes=[Route("/echo", _echo, methods=["POST"]), Route("/ready", _ready)])


def measure_echo(plan: Plan, say: Say) -> list[Run]:
    """Load the echo on our server and, where uvicorn is installed, on that in turns. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _write_requests(folder / "requests", max(plan.concurrency))
        commands = {FLOWSERVE: [sys.executable, "-m", "bench.echo"]}
        if importlib.util.find_spec("uvicorn"):
            commands[UVICORN] = [sys.executable, "-m", "uvicorn", "bench.echo:app", "--port", "0", "--no-access-log"]
        running = [
            stack.enter_context(
                servers.serving(server, command, folder / f"{server}.log", ready_path="/ready", environment={})
            )
            for server, command in commands.items()
        ]
        runs = []
        for number in range(plan.rounds):
            for concurrency in plan.concurrency:
                for server in running if number % 2 == 0 else reversed(running):
                    say(f"echo: round {number + 1} of {plan.rounds}, {server.name}, concurrency {concurrency}")
                    measured = servers.run_load(folder / "requests", server, concurrency, WARMUP_S, plan.seconds)
                    runs.append(Run.of(WORK, server.name, concurrency, number, measured, {}))
        return runs


def _write_requests(folder: Path, count: int) -> None:
    folder.mkdir()
    generator = np.random.default_rng(3)
    for i in range(count):
        body = generator.standard_normal(BODY_BYTES // 4).astype("<f4").tobytes()
        (folder / f"{i}.request").write_bytes(post("/echo", (), body))
        (folder / f"{i}.answer").write_bytes(body)


async def _serve() -> None:
    # Here, because uvicorn's process imports this module for the app and must not pay for our server.
    from flowserve.http.server import Server, open_listeners

    listeners = open_listeners("127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{listeners[0].getsockname()[1]}", flush=True)
    server = Server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listeners)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await anext(aiter(signals))
        server.drain(1.0)


if __name__ == "__main__":
    trio.run(_serve)
