"""Many random clients at once, from a seed: each reads exactly the expected bytes.

The following are random: the framing, segmentation and pipelining of requests, the kind of response (direct, later,
from the ASGI app, in pieces, large), the delay of the client's reads, and the end of its connection. 250 clients in the
suite; `--clients N` makes it N, from the same seed on.
"""

from __future__ import annotations

import random
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.types import Receive, Scope, Send

from flowserve.http.server.connection import CONTINUE, RECEIVE_BYTES, Phase, Respond
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server, open_listeners, open_unix_listener
from flowserve.version import __version__

AT_ONCE = 40
WAYS = ("now", "later", "later", "called", "slowly", "pieces", "much")
ENDS = ("reads", "reads", "reads", "half", "reset", "leaves")
CLOSE = b"connection: close\r\n"
CONNECTION = re.compile(rb"connection: [a-z-]+\r\n")
PAUSES: dict[str, float] = {"pipelined": 0, "cut": 0.3, "bytes": 0.03}
MUCH = 3_000_000  # more than the kernel takes


def answered(way: str, body: bytes) -> bytes:
    """The app's response to a request."""
    return (way.encode() + b":" + body) * (MUCH // (len(body) + 5) if way == "much" else 1)


class App:
    """Responds to each request as its path says: to some as an inference handler, in bursts and in any order, to some
    as an ASGI app.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._promised: dict[Respond, tuple[str, bytes]] = {}
        self._came = trio.Event()

    @property
    def promised(self) -> int:
        return len(self._promised)

    def begin_events(self) -> None:
        pass

    def end_events(self) -> None:
        pass

    def body_memory(self, scope: Scope, nbytes: int) -> None:
        return None

    def start(self, scope: Scope, body: Any, respond: Respond, spawn: Any) -> Callable[[], Any] | None:
        way = scope["path"][1:]
        if way not in ("now", "later", "much"):
            return None
        if way == "later" and scope["method"] == "POST":
            self._promised[respond] = way, bytes(body)
            self._came.set()
        else:
            respond(200, (), [answered(way, bytes(body))])
        return partial(self._promised.pop, respond, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = scope["path"][1:]
        body = bytes((await receive())["body"])
        if way == "slowly":
            await trio.sleep(self._random.random() * 0.004)
        await send({"type": "http.response.start", "status": 200, "headers": ()})
        if way == "pieces":
            for piece in pieces_of(body):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            body = b""
            await send({"type": "http.response.body"})
        else:
            await send({"type": "http.response.body", "body": answered(way, body)})

    async def keep(self) -> None:
        """Send the pending responses of the inference handler, some of them together."""
        while True:
            await self._came.wait()
            if self._random.random() < 0.5:
                await trio.sleep(self._random.random() * 0.003)
            ready = [one for one in self._promised if self._random.random() < 0.7]
            self._random.shuffle(ready)
            for respond in ready:
                if respond in self._promised:  # its client may have left while another response was written
                    way, body = self._promised.pop(respond)
                    respond(200, (), [answered(way, body)])
            if not self._promised:
                self._came = trio.Event()
            await trio.lowlevel.checkpoint()


def pieces_of(body: bytes) -> list[bytes]:
    return [body[:3], body[3:40], body[40:]]


@dataclass(frozen=True)
class Asked:
    """One request, and the expected response."""

    head: bytes
    body: bytes
    answer: bytes
    waits: bool  # for 100 Continue before the body


def asked(draw: random.Random, is_last: bool) -> Asked:
    way, form = draw.choice(WAYS), draw.choice(("length", "length", "length", "chunked", "expect", "1.0", "bare"))
    size = draw.choice((0, 1, 300, 5000, RECEIVE_BYTES, 70_000)) if way != "much" else draw.choice((1, 300, 70_000))
    lines = [b"Host: h"]
    closes = is_last and draw.random() < 0.3
    if closes:
        lines.append(b"Connection: close")
    if form == "1.0" and not closes:
        lines.append(b"Connection: keep-alive")
    if form == "expect":
        lines.append(b"Expect: 100-continue")
    method = draw.choice((b"GET", b"HEAD")) if form == "bare" else b"POST"
    if form == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
    elif form != "bare":
        lines.append(b"Content-Length: %d")
    text = b"%b /%b HTTP/%b\r\n%b\r\n\r\n" % (
        method,
        way.encode(),
        b"1.0" if form == "1.0" else b"1.1",
        b"\r\n".join(lines),
    )
    if size == RECEIVE_BYTES and form == "length":
        size -= len(text) + 3  # the whole request fills one read
    body = b"" if form == "bare" else draw.randbytes(size)
    head = text.replace(b"%d", b"%d" % len(body))
    return Asked(
        head,
        chunked(draw, body) if form == "chunked" else body,
        owed(way, form, method, body, closes),
        bool(form == "expect" and body),
    )


def chunked(draw: random.Random, body: bytes) -> bytes:
    out = b""
    while body:
        size = draw.randint(1, len(body))
        out += b"%x\r\n%b\r\n" % (size, body[:size])
        body = body[size:]
    return out + b"0\r\n\r\n"


def owed(way: str, form: str, method: bytes, body: bytes, closes: bool) -> bytes:
    framing = said = b""
    if way != "pieces":
        said = answered(way, body)
        framing = b"content-length: %d\r\n" % len(said)
    elif form == "1.0":
        closes, said = True, body  # the end of the body is that of the connection
    else:
        framing = b"transfer-encoding: chunked\r\n"
        said = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces_of(body) if one) + b"0\r\n\r\n"
    if closes:
        framing += b"connection: close\r\n"
    elif form == "1.0":
        framing += b"connection: keep-alive\r\n"
    server = b"server: flowserve/%b\r\n" % __version__.encode()
    return b"HTTP/1.1 200 OK\r\n" + server + framing + b"\r\n" + (b"" if method == b"HEAD" else said)


def closing(answer: bytes) -> bool:
    return b"connection: close\r\n" in answer[: answer.index(b"\r\n\r\n") + 4]


class Client:
    """One connection from its start to its end. `read`: the received bytes."""

    def __init__(self, draw: random.Random, connect: Callable[[], Awaitable[trio.SocketStream]]) -> None:
        self._draw = draw
        self._connect = connect
        self.end = draw.choice(ENDS)
        count = draw.randint(1, 8)
        self.requests = [asked(draw, i == count - 1) for i in range(count)]
        closes = [closing(one.answer) for one in self.requests]
        if True in closes:
            del self.requests[closes.index(True) + 1 :]
        self.way = draw.choice(("one by one", "pipelined", "cut", "bytes"))
        if self.way != "one by one":
            self.requests = [one for one in self.requests if not one.waits] or [asked_plainly()]
        self.read = b""
        self.is_reset = False
        self.is_refused = False  # while it sent

    @property
    def owed(self) -> bytes:
        return b"".join(one.answer for one in self.requests)

    async def run(self) -> None:
        stream = await self._connect()
        try:
            if self.end in ("reset", "leaves"):
                with trio.move_on_after(self._draw.random() * 0.05):
                    await self._talk(stream)
                if self.end == "reset":
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                await self._talk(stream)
        except* trio.BrokenResourceError:
            self.is_reset = True
        finally:
            stream.socket.close()

    async def _talk(self, stream: trio.SocketStream) -> None:
        if self.way == "one by one":
            for one in self.requests:
                await self._ask(stream, one)
                if CLOSE in self.read:
                    break
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, stream)
                await self._read(stream, None if self.end == "listens" else len(self.owed))
        if CLOSE in self.read:
            await self._read(stream, None)
        elif self.end == "half":
            await stream.send_eof()
            await self._read(stream, None)

    async def _ask(self, stream: trio.SocketStream, one: Asked) -> None:
        want = len(self.read) + len(one.answer)
        if one.waits:
            await stream.send_all(one.head)
            leave = b""
            while len(leave) < len(CONTINUE) and (byte := await stream.receive_some(1)):
                leave += byte
            assert leave in (CONTINUE, b"")
            await stream.send_all(one.body)
        else:
            await stream.send_all(one.head + one.body)
        await self._read(stream, want)

    async def _send(self, stream: trio.SocketStream) -> None:
        for data in self._pieces():
            try:
                await stream.send_all(data)
            except trio.BrokenResourceError:
                self.is_refused = True  # it may read on
                return
            if self._draw.random() < PAUSES[self.way]:
                await trio.sleep(self._draw.choice((0, 0, 0.001, 0.004)))

    def _pieces(self) -> Iterator[bytes]:
        data = b"".join(one.head + one.body for one in self.requests)
        while data:
            size = len(data)
            if self.way == "bytes" and size < 300:
                size = 1
            elif self.way != "pipelined":
                size = self._draw.choice((1, 17, 900, RECEIVE_BYTES, 100_000))
            yield data[:size]
            data = data[size:]

    async def _read(self, stream: trio.SocketStream, until: int | None) -> None:
        size = self._draw.choice((100_000, 1_000_000))
        while until is None or len(self.read) < until:
            if self._draw.random() < 0.05:
                await trio.sleep(self._draw.random() * 0.01)
            data = await stream.receive_some(size if until is None else min(size, until - len(self.read)))
            if not data:
                return
            self.read += data


def asked_plainly() -> Asked:
    head = b"GET /now HTTP/1.1\r\nHost: h\r\n\r\n"
    return Asked(head, b"", owed("now", "bare", b"GET", b"", False), False)


class RandomClients:
    """A server on both kinds of sockets, and clients for it."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._path = str(folder / "socket")
        self.app = App(1)
        self.server = Server(self.app, Limits(idle_timeout_s=20), direct=self.app)

    async def start(self) -> None:
        listeners = [*open_listeners("127.0.0.1", 0), open_unix_listener(self._path)]
        self._port = listeners[0].getsockname()[1]
        await self._nursery.start(self.server.serve, listeners)
        self._nursery.start_soon(self.app.keep)

    def client(self, draw: random.Random) -> Client:
        is_unix = draw.random() < 0.3

        async def connect() -> Any:
            if is_unix:
                return await trio.open_unix_socket(self._path)
            return await trio.open_tcp_stream("127.0.0.1", self._port)

        return Client(draw, connect)

    async def is_empty(self) -> None:
        """Return when no client is connected and no memory is held."""
        server = self.server
        with trio.fail_after(5):
            while server.connections:  # noqa: ASYNC110 - nothing tells of it
                await trio.sleep(0.002)
        assert (sum(one.phase is Phase.RUNNING for one in server.connections.values()), self.app.promised) == (0, 0)
        assert (server.budget.body_bytes, server.budget.connections) == (0, 0)


@pytest.fixture
async def random_clients(nursery: trio.Nursery, tmp_path: Path) -> RandomClients:
    random_clients = RandomClients(nursery, tmp_path)
    await random_clients.start()
    return random_clients


async def test_property_every_client_reads_the_responses_of_its_requests(
    random_clients: RandomClients, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def live(seed: int) -> None:
        async with limiter:
            client = random_clients.client(random.Random(seed))
            with trio.move_on_after(20) as patience:
                await client.run()
            label = f"seed {seed}: {client.way}, {client.end}"
            assert not patience.cancelled_caught, (
                f"{label}: {len(client.read)} of {len(client.owed)} bytes, then nothing"
            )
            if client.end in ("reset", "leaves"):
                assert client.owed.startswith(client.read), label
            else:
                assert client.read == client.owed, label
                assert not client.is_reset, label

    async with trio.open_nursery() as nursery:
        for seed in range(request.config.getoption("--clients")):
            nursery.start_soon(live, seed)
    await random_clients.is_empty()
    assert caplog.text == ""


@pytest.mark.parametrize("seed", range(3))
async def test_a_server_that_ends_under_load_closes_each_connection_after_a_complete_response(
    random_clients: RandomClients, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    clients = [random_clients.client(random.Random(1000 * seed + n)) for n in range(AT_ONCE)]
    clients = [client for client in clients if client.way != "one by one"]
    for client in clients:
        client.end = "listens"
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.run)
            await trio.sleep(0.01 + draw.random() * 0.1)
            random_clients.server.drain()
    for number, client in enumerate(clients):
        read = CONNECTION.sub(b"", client.read)
        answers = [CONNECTION.sub(b"", one.answer) for one in client.requests]
        wholes = [b"".join(answers[:n]) for n in range(len(answers) + 1)]
        assert read in wholes, f"client {number} of {seed}: {client.way}, {client.is_refused}, {client.is_reset}"
    await random_clients.is_empty()
    assert caplog.text == ""
