"""Real servers on real sockets, in the test's own loop, and a client that sends exactly the given bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from flowserve.http.api.access import AccessRules
from flowserve.http.api.app import make_app
from flowserve.http.api.infer import AppOptions, InferRoute
from flowserve.http.server.connection import Phase
from flowserve.http.server.server import Server, open_listeners
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from tests.support.engine import add_function


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection. Bytes go out as they are; answers are read one at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._received = b""

    async def say(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def answer(self, *, has_body: bool = True) -> Answer:
        """The next answer. Fails the test when the server closes first."""
        head = await self._until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        status = int(first.split(" ")[1])
        body = b""
        if has_body and headers.get("transfer-encoding") == "chunked":
            while size := int(await self._until(b"\r\n"), 16):
                body += (await self._exactly(size + 2))[:-2]
            await self._until(b"\r\n")
        elif has_body:
            body = await self._exactly(int(headers.get("content-length", "0")))
        return Answer(status, headers, body)

    async def ask(self, data: bytes) -> Answer:
        await self.say(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while data := await self.stream.receive_some():
            self._received += data
        data, self._received = self._received, b""
        return data

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            await self._more()
        head, self._received = self._received.split(mark, 1)
        return head + mark

    async def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            await self._more()
        data, self._received = self._received[:size], self._received[size:]
        return data

    async def _more(self) -> None:
        data = await self.stream.receive_some()
        assert data, f"the server closed after {self._received!r}"
        self._received += data


@dataclass
class Running:
    """A server that listens on `port`. Its clients' sockets are closed with the test."""

    server: Server
    port: int
    sockets: ExitStack

    async def connect(self) -> Client:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.sockets.callback(stream.socket.close)
        return Client(stream)

    def count(self, phase: Phase) -> int:
        """The number of the server's connections in this phase."""
        return [connection.phase for connection in self.server.connections.values()].count(phase)

    async def until(self, condition: Callable[[], object], every_s: float = 0.001) -> None:
        """Return when `condition` holds; the server sets no event for tests."""
        with trio.fail_after(60):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(every_s)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(nursery: trio.Nursery) -> AsyncIterator[Start]:
    """`await start(app, Limits(...), direct)` serves any ASGI app, and an inference handler in front of it, until the
    test is over; `await start(engine, AppOptions(...))` the whole API over an engine, which has the host name h unless
    the options have access rules.
    """

    async def start(app: Any, options: Any = None, direct: Any = None) -> Running:
        listeners = open_listeners("127.0.0.1", 0)
        if isinstance(app, Engine):
            options = options or AppOptions()
            if options.access == AccessRules():
                options = replace(options, access=AccessRules(hosts=("h",)))
            server = Server(make_app(app, options), direct=InferRoute(app, options))
        else:
            server = Server(app, options, direct=direct)
        await nursery.start(server.serve, listeners)
        return Running(server, listeners[0].getsockname()[1], sockets)

    with ExitStack() as sockets:
        yield start


@pytest.fixture
def patient_clock() -> MockClock:
    """A mock clock that jumps when nothing happens; not at once, because bytes may be in transit in the kernel."""
    return MockClock(autojump_threshold=0.02)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """A real engine with one batching FP32 model 'double', four numbers in and out."""
    async with open_engine(EngineOptions()) as engine:
        add_function(engine, "double", [lambda array: array * np.float32(2)])
        engine.deployments.is_loaded = True
        yield engine


@pytest.fixture
async def api(engine: Engine, start: Start) -> Running:
    """The whole HTTP API over that engine."""
    return await start(engine)
