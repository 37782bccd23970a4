"""Requests that an app begins without waiting, while the connection's task sleeps, and what interrupts them."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from starlette.types import Receive, Scope, Send
from trio.testing import MockClock

from flowserve.http.connection import Connection
from flowserve.http.limits import Limits
from flowserve.http.line import RECEIVE_BYTES
from flowserve.memory.pool import POOLED_BYTES_MIN

Start = Callable[..., Awaitable[Any]]


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /begun HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (extra, len(body), body)


def large(begins: bytes = b"", size: int = 100_000) -> bytes:
    """A body that fills more than what is read at once."""
    return begins + bytes(range(256)) * (size // 256)


class App:
    """Begins what is posted to /begun: answers it at once, or on `keep` where the body says "later". Everything else,
    and everything that is not offered to it in one piece, it answers as any ASGI app does.
    """

    room: Callable[[Scope, int], Any] | None = None

    def __init__(self) -> None:
        self.begun = 0
        self.called = 0
        self.withdrawn = 0
        self.promised: list[tuple[Connection, bytes]] = []

    def begin(self, scope: Scope, exchange: Connection) -> bool:
        if scope["path"] != "/begun" or exchange.body == b"not this" or bytes(exchange.body[:4]) == b"\0not":
            return False
        body = bytes(exchange.take_body())
        if body in (b"broken", large(b"\0bad")):
            raise ValueError("a mistake")
        self.begun += 1
        if body == b"later":
            self.promised.append((exchange, body))
            exchange.promise(self)
        else:
            exchange.reply(200, (), [body])
        return True

    def withdraw(self) -> None:
        self.withdrawn += 1

    def keep(self) -> None:
        exchange, body = self.promised.pop(0)
        exchange.keep_promise(200, (), [body])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.called += 1
        exchange = scope["flowserve.exchange"]
        if not self.begin(scope, exchange):
            exchange.reply(200, (), [b"called"])


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.002)


async def test_small_requests_are_begun_without_the_task_and_what_is_anything_else_by_it(start: Start) -> None:
    app = App()
    client = await (await start(app)).connect()
    assert (await client.ask(post(b"one"))).body == b"one"
    called = app.called  # the first may have come before the connection was parked
    assert [(await client.ask(post(b"%d" % n))).body for n in range(5)] == [b"%d" % n for n in range(5)]
    assert app.called == called
    assert (await client.ask(post(b"not this"))).body == b"called"
    assert (await client.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")).body == b"called"
    for cut in (1, 20, len(post(b"ab")) - 1):  # in the middle of the first line, of the head, of the body
        await client.say(post(b"ab")[:cut])
        await trio.sleep(0.01)
        assert (await client.ask(post(b"ab")[cut:])).body == b"ab"
    assert (await client.ask(b"\r\n" + post(b"after an empty line"))).body == b"after an empty line"
    assert app.called == called + 5
    assert (await client.ask(post(b"last"))).body == b"last"
    assert app.called == called + 5


@pytest.mark.parametrize("room", [None, "the app's"])
async def test_large_requests_are_the_same_however_much_of_them_is_there_when_they_are_seen(
    start: Start, room: str | None
) -> None:
    app = App()
    if room is not None:
        app.room = lambda scope, nbytes: np.empty(nbytes, np.uint8)
    client = await (await start(app)).connect()
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


async def test_a_large_request_that_is_refused_or_cut_short_or_has_no_room_is_nobody_elses(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    running = await start(app, Limits(max_body_bytes=700_000))
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

    for failure in (MemoryError, ValueError):  # what numpy says of a size that no memory has

        def no_room(scope: Scope, nbytes: int, failure: type[Exception] = failure) -> Any:
            raise failure(nbytes)

        running.server.room = no_room
        with suppress(trio.BrokenResourceError):  # what it says is not read to its end
            assert await (await asked(post(large()))).rest() == b""
        assert failure.__name__ in caplog.text
    running.server.room = None
    assert (await other.ask(post(large()))).body == large()
    await until(lambda: running.server.statistics().connections == 1 and running.server.running == 0)


async def test_a_large_body_has_a_second_more_for_so_much_of_it_as_was_there_when_it_was_seen(
    start: Start, patient_clock: MockClock
) -> None:
    client = await (await start(App(), Limits(body_timeout_s=2, body_bytes_per_s=10_000))).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await trio.testing.wait_all_tasks_blocked()
    await client.say(post(large())[:60_000])
    await trio.sleep(6)
    assert (await client.ask(post(large())[60_000:])).body == large()
    await client.say(post(large())[:60_000])
    await trio.sleep(10)
    assert (await client.answer()).status == 408


async def test_what_is_small_goes_before_the_large_that_came_with_it(start: Start) -> None:
    class Noting(App):
        def __init__(self) -> None:
            super().__init__()
            self.begun_sizes: list[int] = []

        def begin(self, scope: Scope, exchange: Connection) -> bool:
            self.begun_sizes.append(len(exchange.body))
            return super().begin(scope, exchange)

    app = Noting()
    running = await start(app)
    first, second, small = [await running.connect() for _ in range(3)]
    for client in (first, second, small):
        for _ in range(8):  # the kernel learns how much they send
            assert (await client.ask(post(large()))).body == large()
    await trio.testing.wait_all_tasks_blocked()
    app.begun_sizes.clear()
    # In this order, and the server sees all of it at once.
    sent = [os.write(client.stream.socket.fileno(), post(large())) for client in (first, second)]
    os.write(small.stream.socket.fileno(), post(b"small"))
    for client, count in zip((first, second), sent, strict=True):
        await client.say(post(large())[count:])
    assert [(await client.answer()).body for client in (small, first, second)] == [b"small", large(), large()]
    assert app.begun_sizes == [5, len(large()), len(large())]


class Crowd(App):
    """Notes what is begun together. A body that begins with "brings" makes another client send something meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []
        self.brings: list[tuple[Any, bytes]] = []

    def begin_burst(self, size: int) -> None:
        self.seen.append(b"[")

    def end_burst(self) -> None:
        self.seen.append(b"]")

    def begin(self, scope: Scope, exchange: Connection) -> bool:
        body = bytes(exchange.body)
        self.seen.append(body[:6] if len(body) < 100 else b"large")
        if body.startswith(b"brings"):
            write(*self.brings.pop(0))
        return super().begin(scope, exchange)


def write(client: Any, data: bytes) -> None:
    """At once: nothing of the server's runs before all of it is with the kernel."""
    assert os.write(client.stream.socket.fileno(), data) == len(data)


async def test_what_comes_while_a_crowd_is_taken_in_belongs_to_it_and_who_is_alone_waits_for_nobody(
    start: Start,
) -> None:
    app = Crowd()
    running = await start(app)
    one, two, three, four = clients = [await running.connect() for _ in range(4)]
    for client in clients:
        for _ in range(8):  # the kernel learns how much they send
            assert (await client.ask(post(large()))).body == large()

    async def seen(*answers: tuple[Any, bytes]) -> bytes:
        for client, body in answers:
            assert (await client.answer()).body == body
        await trio.testing.wait_all_tasks_blocked()
        shown = b" ".join(app.seen)
        app.seen.clear()
        return shown

    await seen()
    app.brings = [(three, post(b"third")), (four, post(b"fourth"))]
    write(one, post(b"brings third"))
    write(two, post(b"brings fourth"))
    assert (
        await seen((three, b"third"), (four, b"fourth"), (one, b"brings third"), (two, b"brings fourth"))
        == b"[ brings brings third fourth ]"
    )
    write(one, post(b"alone, and seen to be"))
    assert await seen((one, b"alone, and seen to be")) == b"[ alone, ]"
    app.brings = [(two, post(b"second"))]
    write(one, post(b"brings second"))
    assert await seen((one, b"brings second"), (two, b"second")) == b"[ brings ] [ second ]"


async def test_answers_that_are_told_of_together_leave_when_all_are_ready_and_others_at_the_end_of_the_turn(
    start: Start,
) -> None:
    class Telling(App):
        def tell_around(self, answers: Any) -> None:
            self.answers = answers

    app = Telling()
    running = await start(app)
    clients = [await running.connect() for _ in range(3)]

    async def ask() -> None:
        for client in clients:
            assert (await client.ask(post(b"first"))).body == b"first"
        for client in clients:  # one after the other: their promises are kept in this order
            before = app.begun
            await client.say(post(b"later"))
            await until(partial(has_begun_after, before))
        await trio.testing.wait_all_tasks_blocked()

    def has_begun_after(before: int) -> bool:
        return app.begun > before

    def has_come() -> list[bool]:
        sockets = [client.stream.socket.fileno() for client in clients]
        return [bool(select.select([fd], [], [], 0)[0]) for fd in sockets]

    await ask()
    app.answers.begin_burst(2)
    app.keep()
    app.answers.begin_burst(0)  # somebody who was told did what tells others
    app.answers.end_burst()
    assert has_come() == [True, False, False]
    app.keep()
    assert has_come() == [True, False, False]
    app.answers.end_burst()
    assert has_come() == [True, True, False]
    app.keep()
    assert [(await client.answer()).body for client in clients] == [b"later"] * 3
    await ask()
    app.keep()
    app.keep()
    assert has_come() == [False, False, False]
    await trio.testing.wait_all_tasks_blocked()
    assert has_come() == [True, True, False]
    app.keep()
    assert [(await client.answer()).body for client in clients] == [b"later"] * 3


async def test_a_large_request_whose_rest_comes_while_a_crowd_is_taken_in_is_whole(start: Start) -> None:
    app = Crowd()
    running = await start(app)
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


async def test_pipelined_requests_are_answered_in_order_however_they_are_begun(start: Start) -> None:
    app = App()
    client = await (await start(app)).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    await client.say(post(b"second") + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" + post(b"third")[:-2])
    await trio.sleep(0.02)
    assert app.begun == 2  # nothing is begun before what came first is answered
    app.keep()
    assert [(await client.answer()).body for _ in range(3)] == [b"later", b"second", b"called"]
    await client.say(b"rd")
    assert (await client.answer()).body == b"third"


async def test_a_client_that_half_closes_after_a_small_request_is_answered_and_its_connection_ends(
    start: Start,
) -> None:
    app = App()
    running = await start(app)
    client = await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"second"))
    client.stream.socket.shutdown(socket.SHUT_WR)
    assert (await client.rest()).endswith(b"second")
    await until(lambda: running.server.statistics().connections == 0)


async def test_a_client_that_leaves_a_promised_answer_withdraws_it(start: Start) -> None:
    app = App()
    running = await start(app)
    client = await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await client.say(post(b"later"))
    await until(lambda: len(app.promised) == 1)
    await client.stream.aclose()
    await until(lambda: app.withdrawn == 1 and running.server.statistics().connections == 0)
    assert running.server.running == 0
    app.keep()  # too late, and harmless


async def test_an_app_that_breaks_while_it_begins_answers_500_and_ends_that_connection_only(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    running = await start(app)
    client, other = await running.connect(), await running.connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    assert (await other.ask(post(b"first"))).body == b"first"
    assert (await client.ask(post(b"broken"))).status == 500
    assert await client.rest() == b""
    assert (await other.ask(post(b"second"))).body == b"second"
    assert "a mistake" in caplog.text
    assert running.server.running == 0


async def test_draining_ends_a_parked_connection_after_the_answer_that_it_was_promised(start: Start) -> None:
    app = App()
    running = await start(app)
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


async def test_a_request_that_fills_what_is_read_at_once_hides_none_that_comes_with_it(start: Start) -> None:
    client = await (await start(App())).connect()
    assert (await client.ask(post(b"first"))).body == b"first"
    await trio.testing.wait_all_tasks_blocked()
    body = bytes(RECEIVE_BYTES - len(post(b"")) - 4)
    assert len(post(body)) == RECEIVE_BYTES
    await client.say(post(body) + post(b"behind"))
    with trio.fail_after(5):
        assert [(await client.answer()).body for _ in range(2)] == [body, b"behind"]


async def test_a_client_that_always_asks_ahead_is_not_the_only_one_that_is_served(start: Start) -> None:
    running = await start(App())
    greedy, other = await running.connect(), await running.connect()
    asked = 3000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(greedy.say, post(b"a") * asked)
        await greedy.answer()
        assert (await other.ask(post(b"b"))).body == b"b"
        assert greedy._received.count(b"200 OK") < asked - 2  # it was not kept waiting until all of those were answered
        for _ in range(asked - 1):
            await greedy.answer()


async def test_an_answer_that_is_taken_late_is_not_cut_off_by_the_idle_timeout(start: Start) -> None:
    client = await (await start(App(), Limits(idle_timeout_s=0.1))).connect()
    large = bytes(12_000_000)
    await client.say(post(large))
    await trio.sleep(0.4)
    assert (await client.answer()).body == large


async def test_an_answer_whose_connection_closes_in_the_same_turn_harms_nobody(start: Start) -> None:
    app = App()
    running = await start(app)
    other = await running.connect()
    for _ in range(10):  # which of the two tasks runs first is chance
        client = await running.connect()
        await client.say(post(b"later"))
        await until(lambda: len(app.promised) == 1)
        exchange, _ = app.promised.pop()
        exchange.scope.cancel()
        exchange.keep_promise(200, (), [bytes(12_000_000), b"more"])
        await until(lambda: running.server.statistics().connections == 1)
    assert (await other.ask(post(b"second"))).body == b"second"


async def test_the_last_answer_of_a_server_that_ends_arrives_though_the_client_has_asked_for_more(start: Start) -> None:
    app = App()
    running = await start(app)
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


async def test_a_client_that_resets_right_after_it_asked_is_no_failure(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(App())
    for _ in range(50):
        client = await running.connect()
        await client.say(post(b"later"))
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.stream.socket.close()
    await until(lambda: running.server.statistics().connections == 0)
    assert (running.server.running, caplog.text) == (0, "")
