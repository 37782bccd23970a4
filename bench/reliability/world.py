"""A server of the models in models.py, and clients that check every response.

Decides what counts as a right, refused, wrong or lost response, how clients wait until a server responds correctly
again, and how the memory of a server is read. The clients are trio tasks with sockets of their own and a small HTTP/1.1
reader, so that thousands of requests per second and thousands of connections fit into one process. Used by figures.py,
chaos.py and soak.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import trio

from bench.processes import memory_bytes
from bench.reliability.models import write_models
from bench.servers import FLOWSERVE, BenchFailed, Server, flowserve_command, start, stop

RESPONSE_S_MAX: Final = 30.0  # a request without a response by then is lost
_RECEIVE_BYTES: Final = 65_536
_MEBIBYTE: Final = 1 << 20
# The statuses allowed while a model is killed, reloaded, saturated or too slow.
REFUSALS: Final = frozenset({499, 500, 503, 504})


class Lost(Exception):
    """A request got no whole response: the connection was closed, or nothing came for RESPONSE_S_MAX."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    head: bytes
    body: bytes

    def outputs(self) -> dict[str, list[Any]]:
        """The data of each output of an inference whose response is JSON."""
        return {output["name"]: output["data"] for output in json.loads(self.body)["outputs"]}


def wire(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """The bytes of an HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def infer(model: str, values: Sequence[int], **parameters: int) -> bytes:
    """An inference with X = `values`, one row, as JSON."""
    return infer_shaped(model, values, [1, len(values)], **parameters)


def infer_shaped(model: str, values: Sequence[int], shape: Sequence[int], **parameters: int) -> bytes:
    """The same with a shape that may be wrong."""
    x = {"name": "X", "datatype": "INT64", "shape": [*shape], "data": [*values]}
    body: dict[str, Any] = {"inputs": [x], **({"parameters": parameters} if parameters else {})}
    return wire("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())


def infer_binary(model: str, values: Sequence[int]) -> bytes:
    """The same with binary tensors in both directions."""
    data = np.array(values, "<i8").tobytes()
    x = {"name": "X", "datatype": "INT64", "shape": [1, len(values)], "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [x], "parameters": {"binary_data_output": True}}).encode()
    header = f"Inference-Header-Content-Length: {len(text)}"
    return wire("POST", f"/v2/models/{model}/infer", text + data, header)


class Connection:
    """One connection of a client. It connects with the first request, and again after it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream: trio.SocketStream | None = None
        self._received = bytearray()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket without waiting. The next request opens another."""
        if self._stream is not None:
            self._stream.socket.close()
            self._stream = None
        self._received.clear()

    async def send(self, request: bytes) -> None:
        """Send a request, or a part of one. Raises Lost."""
        try:
            if self._stream is None:
                self._stream = await trio.open_tcp_stream("127.0.0.1", self._port)
            await self._stream.send_all(request)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close()
            raise Lost(f"the request could not be sent: {error}") from error

    async def ask(self, request: bytes) -> Response:
        """Send a request and return its response. Raises Lost."""
        with trio.move_on_after(RESPONSE_S_MAX):
            await self.send(request)
            return await self.receive()
        self.close()
        raise Lost(f"no response for {RESPONSE_S_MAX:.0f} s")

    async def receive(self) -> Response:
        """The next response. Raises Lost."""
        head = await self._until(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        fields = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if fields.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(await self._until(b"\r\n"), 16):
                body += await self._exactly(size)
                await self._exactly(2)
            await self._exactly(2)
        else:
            body = await self._exactly(int(fields.get(b"content-length", b"0")))
        if fields.get(b"connection") == b"close":
            self.close()
        return Response(int(head.split(b" ", 2)[1]), head, body)

    async def _until(self, end: bytes) -> bytes:
        while (at := self._received.find(end)) < 0:
            await self._more()
        part = bytes(self._received[:at])
        del self._received[: at + len(end)]
        return part

    async def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            await self._more()
        part = bytes(self._received[:count])
        del self._received[:count]
        return part

    async def _more(self) -> None:
        try:
            data = b"" if self._stream is None else await self._stream.receive_some(_RECEIVE_BYTES)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close()
            raise Lost(f"the connection broke: {error}") from error
        if not data:
            self.close()
            raise Lost("the connection was closed before the response was complete")
        self._received += data


@dataclass(slots=True)
class Tally:
    """The outcomes of requests. `latencies_s` of the right ones, `refused_s` of the refused ones."""

    sent: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    def count(self, response: Response, is_right: Callable[[Response], bool], took_s: float, asked: object) -> None:
        """A response. Refusals with an error in JSON are not wrong."""
        self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
        try:
            if response.status == 200 and is_right(response):
                self.right += 1
                self.latencies_s.append(took_s)
                return
            if response.status in REFUSALS and json.loads(response.body)["error"]:
                self.refused_s.append(took_s)
                return
        except (ValueError, KeyError, TypeError):
            pass
        self.wrong.append(f"{asked}: {response.status} {response.body[:200]!r}")

    @property
    def is_complete(self) -> bool:
        """Whether every request got exactly one response, and none was wrong."""
        return not self.wrong and not self.lost and self.right + len(self.refused_s) == self.sent

    def __str__(self) -> str:
        text = f"{self.sent:,} sent, {self.right:,} right"
        if self.refused_s:
            text += f", {len(self.refused_s):,} refused"
        return f"{text}, {len(self.wrong)} wrong, {len(self.lost)} lost"


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """In milliseconds; 0 where there is no value."""
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else 0.0


async def ask_one(connection: Connection, model: str, number: int, tally: Tally, since_s: float = 0.0) -> None:
    """One request to `double`, `chain` or a model of the same function, checked and counted. `since_s`: when it was due
    by trio's clock, where the latency counts from there.
    """
    expected = 2 * number + (model == "chain") if model not in ("cached", "plus") else number + 1
    tally.sent += 1
    began_s = since_s or trio.current_time()
    try:
        response = await connection.ask(infer(model, [number, -1]))
    except Lost as error:
        tally.lost.append(f"{model} {number}: {error}")
        return
    tally.count(response, lambda got: got.outputs()["Y"][0] == expected, trio.current_time() - began_s, (model, number))


async def closed_loop(port: int, model: str, connections: int, seconds: float, tally: Tally | None = None) -> Tally:
    """Each connection sends its next request when the previous one is answered, for that long."""
    tally = tally or Tally()
    end_s = trio.current_time() + seconds

    async def run(first: int) -> None:
        number = first
        async with Connection(port) as connection:
            while trio.current_time() < end_s:
                await ask_one(connection, model, number, tally)
                number += connections

    async with trio.open_nursery() as nursery:
        for first in range(connections):
            nursery.start_soon(run, first)
    return tally


async def open_loop(port: int, model: str, rate: float, seconds: float, seed: int = 1) -> Tally:
    """Requests at the times of a Poisson process of `rate` per second. The latency counts from the time at which a
    request was due. Each waits for a response of its own, on a connection that no other request uses meanwhile.
    """
    tally, idle, source = Tally(), list[Connection](), random.Random(seed)

    async def run(number: int, due_s: float) -> None:
        connection = idle.pop() if idle else Connection(port)
        await ask_one(connection, model, number, tally, due_s)
        idle.append(connection)

    began_s = due_s = trio.current_time()
    number = 0
    async with trio.open_nursery() as nursery:
        while (due_s := due_s + source.expovariate(rate)) < began_s + seconds:
            await trio.sleep_until(due_s)
            nursery.start_soon(run, number, due_s)
            number += 1
    for connection in idle:
        connection.close()
    return tally


class World:
    """A running server of the models, and questions about it. `folder` has the repository and the log."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options
        self.server: Server
        self.process: subprocess.Popen[bytes]

    def start(self) -> float:
        """Start the server; returns the seconds until it is ready. Raises BenchFailed."""
        began_s = time.monotonic()
        command = [*flowserve_command(self._folder / "models", "process"), "--allow-grpc", "false", *self._options]
        log = self._folder / f"log-{len(list(self._folder.glob('log-*')))}"
        self.server, self.process = start(FLOWSERVE, command, log, environment={})
        return time.monotonic() - began_s

    @property
    def port(self) -> int:
        return self.server.port

    def connection(self) -> Connection:
        return Connection(self.port)

    def memory_bytes(self) -> int:
        """The proportional set size of the server and all its processes."""
        return memory_bytes(self.server.pid)

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.server.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.server.pid}/task").iterdir()))

    def check_alive(self) -> None:
        """Raise BenchFailed if the server has ended."""
        if self.process.poll() is not None:
            log = self.server.log.read_text(errors="replace").splitlines()[-30:]
            raise BenchFailed("\n".join([f"the server ended with status {self.process.returncode}:", *log]))

    async def pending(self) -> int:
        """The requests that wait in the queues of all models."""
        async with self.connection() as connection:
            text = (await connection.ask(wire("GET", "/metrics"))).body.decode()
        lines = [line for line in text.splitlines() if line.startswith("nv_inference_pending_request_count{")]
        return sum(int(float(line.split()[-1])) for line in lines)

    async def count_succeeded(self, model: str) -> int:
        """The requests that the server's statistics count as successful."""
        async with self.connection() as connection:
            response = await connection.ask(wire("GET", f"/v2/models/{model}/stats"))
        (statistics,) = json.loads(response.body)["model_stats"]
        return int(statistics["inference_stats"]["success"]["count"])

    async def control(self, model: str, action: str) -> None:
        """Load or unload a model. Raises BenchFailed."""
        async with self.connection() as connection:
            response = await connection.ask(wire("POST", f"/v2/repository/models/{model}/{action}"))
        if response.status != 200:
            raise BenchFailed(f"{action} {model}: {response.status} {response.body!r}")

    async def pid_of(self, model: str) -> int:
        """The worker process of a model that runs normally."""
        async with self.connection() as connection:
            response = await connection.ask(infer(model, [1]))
        return int(response.outputs()["PID"][0])

    async def recovered_after(self, model: str, limit_s: float) -> float:
        """Seconds until the model answers correctly again, `limit_s` if it did not by then."""
        began_s = trio.current_time()
        while trio.current_time() < began_s + limit_s:
            tally = Tally()
            async with self.connection() as connection:
                await ask_one(connection, model, 7, tally)
            if tally.right:
                return trio.current_time() - began_s
            await trio.sleep(0.05)
        return limit_s


@contextlib.contextmanager
def world(*models: str, options: Sequence[str] = (), is_started: bool = True) -> Iterator[World]:
    """A server of these models in a temporary folder, until the block ends. `options` are further ones of its
    command.
    """
    with tempfile.TemporaryDirectory(prefix="bench-reliability-") as temporary:
        folder = Path(temporary)
        write_models(folder / "models", models)
        made = World(folder, options)
        if is_started:
            made.start()
        try:
            yield made
        finally:
            if hasattr(made, "process"):
                stop(made.process)


@contextlib.asynccontextmanager
async def watched(port: int, *models: str, connections: int = 1) -> AsyncIterator[Tally]:
    """Clients that ask these models one request after the other while the block runs."""
    tally = Tally()
    is_over = False

    async def watch(model: str, first: int) -> None:
        number = first
        async with Connection(port) as connection:
            while not is_over:
                await ask_one(connection, model, number, tally)
                number += connections
                await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        for model in models:
            for first in range(connections):
                nursery.start_soon(watch, model, first)
        yield tally
        is_over = True


def mebibytes(count: float) -> str:
    return f"{count / _MEBIBYTE:+.1f} MiB"
