"""Requests that an inference handler responds to, and interruptions of them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
from starlette.types import Receive, Scope, Send
from trio.testing import MockClock

from flowserve.http.server.connection import RECEIVE_BYTES, Phase
from flowserve.http.server.request_parser import Limits
from flowserve.memory.pool import POOLED_BYTES_MIN

Start = Callable[..., Awaitable[Any]]


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /begun HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (extra, len(body), body)


def large(begins: bytes = b"", size: int = 100_000) -> bytes:
    """A body larger than one read."""
    return begins + bytes(range(256)) * (size // 256)


class App:
    """An inference handler for requests to /begun: it responds at once, or in `keep` if the body says "later". The app
    responds to all other requests.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.called = 0
        self.withdrawn = 0
        self.promised: list[Callable[..., None]] = []
        self.memory: Callable[[int], Any] = lambda nbytes: None

    def begin_events(self) -> None:
        pass

    def end_events(self) -> None:
        pass

    def body_memory(self, scope: Scope, nbytes: int) -> Any:
        return self.memory(nbytes)

    def start(self, scope: Scope, body: Any, respond: Callable[..., None], spawn: Any) -> Callable[[], None] | None:
        if scope["path"] != "/begun" or body == b"not this" or bytes(body[:4]) == b"\0not":
            return None
        body = bytes(body)
        if body in (b"broken", large(b"\0bad")):
            raise ValueError("a mistake")
        self.begun += 1
        if body == b"later":
            self.promised.append(respond)
        else:
            respond(200, (), [body])
        return self.withdraw

    def withdraw(self) -> None:
        self.withdrawn += 1

    def keep(self) -> None:
        self.promised.pop(0)(200, (), [b"later"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.called += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"called"})


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.002)


async def test_direct_requests_never_reach_the_app_for_any_segmentation_and_others_do(start: Start) -> None:
    app = App()
    client = await (await start(app, None, app)).connect()
    assert [(await client.ask(post(b"%d" % n))).body for n in range(5)] == [b"%d" % n for n in range(5)]
    for cut in (1, 20, len(post(b"ab")) - 1):  # in the middle of the first line, of the head, of the body
        await client.say(post(b"ab")[:cut])
        await trio.sleep(0.01)
        assert (await client.ask(post(b"ab")[cut:])).body == b"ab"
    assert (await client.ask(b"\r\n" + post(b"after an empty line"))).body == b"after an empty line"
    chunked = b"POST /begun HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    assert (await client.ask(chunked)).body == b"ab"
    assert app.called == 0
    assert (await client.ask(post(b"not this"))).body == b"called"
    assert (await client.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")).body == b"called"
    assert (app.begun, app.called) == (10, 2)


@pytest.mark.parametrize("room", [None, "the app's"])
async def test_a_large_request_is_the_same_for_any_amount_received_with_its_head(
    start: Start, room: str | None
) -> None:
    app = App()
    if room is not None:
        app.memory = lambda nbytes: np.empty(nbytes, np.uint8)
    client = await (await start(app, None, app)).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    whole = large(size=600_000)
    for _ in range(8):  # the kernel learns how much this client sends
        assert (await client.ask(post(whole))).body == whole
    head = len(post(whole)) - len(whole)
    for cut in (head, head + 1, RECEIVE_BYTES - 1, RECEIVE_BYTES, RECEIVE_BYTES + 1, 300_000, len(post(whole)) - 1):
        await client.say(post(whole)[:cut])
        await trio.sleep(0.01)
        assert (await client.ask(post(whole)[cut:])).body == whole
    for size in (RECEIVE_BYTES, POOLED_BYTES_MIN - 256, POOLED_BYTES_MIN):
        assert (await client.ask(post(large(size=size)))).body == large(size=size)
    assert (await client.ask(post(large(b"\0not")))).body == b"called"
    await client.say(post(whole) + post(b"behind") + post(whole) + post(large(b"\0not")) + post(b"last"))
    bodies = [(await client.answer()).body for _ in range(5)]
    assert bodies == [whole, b"behind", whole, b"called", b"last"]
    await client.say(post(large(b"\0not"), b"Expect: 100-continue\r\n"))
    assert (await client.answer()).body == b"called"


async def test_a_large_request_that_is_refused_truncated_or_without_memory_affects_no_other(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    running = await start(app, Limits(max_body_bytes=700_000), app)
    other = await running.connect()
    assert (await other.ask(post(b"first"))).body == b"first"

    async def asked(request: bytes) -> Any:
        client = await running.connect()
        assert (await client.ask(post(b"first"))).body == b"first"
        await trio.testing.wait_all_tasks_blocked()
        await client.say(request)
        return client

    for request, status in ((post(large(size=800_000)), 413), (post(large(b"\0bad")), 500), (post(large())[:-1], 0)):
        client = await asked(request)
        assert not status or (await client.answer()).status == status
        await client.stream.aclose()

    for failure in (MemoryError, ValueError):  # numpy raises ValueError beyond the address space

        def no_room(nbytes: int, failure: type[Exception] = failure) -> Any:
            raise failure(nbytes)

        app.memory = no_room
        with suppress(trio.BrokenResourceError):  # its response is not read to the end
            received = await (await asked(post(large()))).rest()
            assert received.startswith(b"HTTP/1.1 503 ") if failure is MemoryError else not received
        assert ("no memory for this request" if failure is MemoryError else "ValueError") in caplog.text
    app.memory = lambda nbytes: None
    assert (await other.ask(post(large()))).body == large()
    await until(lambda: len(running.server.connections) == 1)


async def test_the_time_limit_of_a_large_body_grows_with_the_bytes_received(
    start: Start, patient_clock: MockClock
) -> None:
    client = await (await start(App(), Limits(body_timeout_s=2, body_bytes_per_s=10_000), App())).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await trio.testing.wait_all_tasks_blocked()
    await client.say(post(large())[:60_000])
    await trio.sleep(6)
    assert (await client.ask(post(large())[60_000:])).body == large()
    await client.say(post(large())[:60_000])
    await trio.sleep(10)
    assert (await client.answer()).status == 408


class Noting(App):
    """Records the requests that start together. A body that begins with "brings" makes another client send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []
        self.brings: list[tuple[Any, bytes]] = []

    def begin_events(self) -> None:
        self.seen.append(b"[")

    def end_events(self) -> None:
        self.seen.append(b"]")

    def start(self, scope: Scope, body: Any, respond: Callable[..., None], spawn: Any) -> Callable[[], None] | None:
        self.seen.append(bytes(body[:6]) if len(body) < 100 else b"large")
        if bytes(body[:6]) == b"brings":
            write(*self.brings.pop(0))
        return super().start(scope, body, respond, spawn)


def write(client: Any, data: bytes) -> None:
    """Write without waiting: the server runs only after the kernel has all of it."""
    assert os.write(client.stream.socket.fileno(), data) == len(data)


async def test_requests_of_one_poll_are_started_together(start: Start) -> None:
    app = Noting()
    running = await start(app, None, app)
    one, two = [await running.connect() for _ in range(2)]
    for client in (one, two):
        assert (await client.ask(post(b"first"))).body == b"first"
    await trio.testing.wait_all_tasks_blocked()
    app.seen.clear()
    write(one, post(b"one"))
    write(two, post(b"two"))
    assert [(await client.answer()).body for client in (one, two)] == [b"one", b"two"]
    assert b" ".join(app.seen) in (b"[ one two ]", b"[ two one ]")


async def test_a_large_request_continued_while_another_starts_is_complete(start: Start) -> None:
    app = Noting()
    running = await start(app, None, app)
    first, second = [await running.connect() for _ in range(2)]
    for client in (first, second):
        for _ in range(8):
            assert (await client.ask(post(large()))).body == large()
    for cut in (RECEIVE_BYTES, RECEIVE_BYTES + 1, 99_000):
        await trio.testing.wait_all_tasks_blocked()
        app.brings = [(first, post(large())[cut:])]
        write(first, post(large())[:cut])
        write(second, post(b"brings the rest"))
        assert (await second.answer()).body == b"brings the rest"
        assert (await first.answer()).body == large()


async def test_direct_and_other_pipelined_requests_are_answered_in_order(start: Start) -> None:
    app = App()
    client = await (await start(app, None, app)).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    await client.say(post(b"second") + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" + post(b"third")[:-2])
    await trio.sleep(0.02)
    assert app.begun == 2  # no request is begun before the response to the previous one
    app.keep()
    assert [(await client.answer()).body for _ in range(3)] == [b"later", b"second", b"called"]
    await client.say(b"rd")
    assert (await client.answer()).body == b"third"


async def test_a_client_that_half_closes_after_a_small_request_is_answered_and_its_connection_ends(
    start: Start,
) -> None:
    app = App()
    running = await start(app, None, app)
    client = await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"second"))
    client.stream.socket.shutdown(socket.SHUT_WR)
    assert (await client.rest()).endswith(b"second")
    await until(lambda: len(running.server.connections) == 0)


async def test_a_connection_closed_before_its_response_cancels_the_request(start: Start) -> None:
    app = App()
    running = await start(app, None, app)
    client = await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    await client.stream.aclose()
    await until(lambda: app.withdrawn == 1 and len(running.server.connections) == 0)
    assert running.count(Phase.RUNNING) == 0
    app.keep()  # too late: no effect


async def test_an_app_that_raises_at_its_start_gives_500_and_ends_only_that_connection(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    running = await start(app, None, app)
    client, other = await running.connect(), await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    assert (await other.ask(post(b"first"))).body == b"first"
    assert (await client.ask(post(b"broken"))).status == 500
    assert await client.rest() == b""
    assert (await other.ask(post(b"second"))).body == b"second"
    assert "a mistake" in caplog.text
    assert running.count(Phase.RUNNING) == 0


async def test_draining_closes_a_waiting_connection_after_its_response(start: Start) -> None:
    app = App()
    running = await start(app, None, app)
    client, idle = await running.connect(), await running.connect()
    for one in (client, idle):
        assert (await one.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    running.server.drain()
    assert await idle.rest() == b""
    app.keep()
    answer = await client.answer()
    assert (answer.body, answer.headers["connection"]) == (b"later", "close")
    assert await client.rest() == b""


async def test_a_request_of_exactly_one_read_hides_no_pipelined_one(start: Start) -> None:
    client = await (await start(App(), None, App())).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await trio.testing.wait_all_tasks_blocked()
    body = bytes(RECEIVE_BYTES - len(post(b"")) - 4)
    assert len(post(body)) == RECEIVE_BYTES
    await client.say(post(body) + post(b"behind"))
    with trio.fail_after(5):
        assert [(await client.answer()).body for _ in range(2)] == [body, b"behind"]


async def test_a_client_that_pipelines_requests_does_not_starve_others(start: Start) -> None:
    running = await start(App(), None, App())
    greedy, other = await running.connect(), await running.connect()
    asked = 3000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(greedy.say, post(b"a") * asked)
        await greedy.answer()
        assert (await other.ask(post(b"b"))).body == b"b"
        assert greedy._received.count(b"200 OK") < asked - 2  # it was not kept waiting until all of those were answered
        for _ in range(asked - 1):
            await greedy.answer()


async def test_a_response_that_is_read_late_is_not_ended_by_the_idle_timeout(start: Start) -> None:
    client = await (await start(App(), Limits(idle_timeout_s=0.1), App())).connect()
    large = bytes(12_000_000)
    await client.say(post(large))
    await trio.sleep(0.4)
    assert (await client.answer()).body == large


async def test_a_response_whose_connection_closes_in_the_same_iteration_affects_no_other(start: Start) -> None:
    app = App()
    running = await start(app, None, app)
    other = await running.connect()
    for _ in range(10):
        client = await running.connect()
        await client.say(post(b"later"))
        await until(lambda: len(app.promised) == 1)
        respond = app.promised.pop()
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.stream.socket.close()
        respond(200, (), [bytes(12_000_000), b"more"])
        await until(lambda: len(running.server.connections) == 1)
    assert (await other.ask(post(b"second"))).body == b"second"


async def test_the_last_response_of_a_server_that_ends_arrives_despite_further_requests(start: Start) -> None:
    app = App()
    running = await start(app, None, app)
    client = await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    await client.say(post(b"behind") * 1000)
    await trio.sleep(0.01)
    running.server.drain()
    app.keep()
    await trio.sleep(0.01)
    assert (await client.answer()).body == b"later"
    assert await client.rest() == b""


async def test_a_connection_reset_after_a_request_is_not_a_failure(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(App(), None, App())
    for _ in range(50):
        client = await running.connect()
        await client.say(post(b"later"))
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.stream.socket.close()
    await until(lambda: len(running.server.connections) == 0)
    assert (running.count(Phase.RUNNING), caplog.text) == (0, "")
