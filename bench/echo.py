"""A Starlette echo on flowserve's HTTP server and on uvicorn: the cost of the HTTP server, without inference.

`python -m bench.echo` runs the app on flowserve's server.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Final

import numpy as np
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from bench.requests import post
from bench.servers import FLOWSERVE

UVICORN: Final = "uvicorn"
WORK: Final = "echo"
SMALL_BYTES: Final = 256


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


async def _ready(request: Request) -> Response:
    return PlainTextResponse("ready")


app = Starlette(routes=[Route("/echo", _echo, methods=["POST"]), Route("/ready", _ready)])


def commands() -> dict[str, list[str]]:
    """The commands of the app on flowserve's server and, where it is installed, on uvicorn."""
    found = {FLOWSERVE: [sys.executable, "-m", "bench.echo"]}
    if importlib.util.find_spec("uvicorn"):
        found[UVICORN] = [sys.executable, "-m", "uvicorn", "bench.echo:app", "--port", "0", "--no-access-log"]
    return found


def write_requests(folder: Path, count: int, nbytes: int) -> None:
    """Write `<i>.request` and `<i>.answer` for `count` connections, each with a body of its own."""
    folder.mkdir()
    generator = np.random.default_rng(3)
    for i in range(count):
        body = generator.standard_normal(nbytes // 4).astype("<f4").tobytes()
        (folder / f"{i}.request").write_bytes(post("/echo", (), body))
        (folder / f"{i}.answer").write_bytes(body)


async def _serve() -> None:
    # Here, because uvicorn's process imports this module for the app and must not pay for our server.
    from flowserve.http.server.server import Server, open_listeners

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
