"""The server over real sockets: requests and responses, and faulty clients."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from starlette.types import Receive, Scope, Send
from trio.testing import MockClock

from flowserve.http.server import server as server_module
from flowserve.http.server.connection import Phase
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import open_listeners, open_unix_listener

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
Start = Callable[..., Awaitable[Any]]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with the request's body, or with the path if there is none."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(body) or scope["path"].encode()})


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /echo HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (extra, len(body), body)


class Direct:
    """Responds to every request directly, with the buffers that `make` makes of its body, after `delay_s` seconds."""

    def __init__(self, make: Callable[[bytes], list[Any]], delay_s: float = 0) -> None:
        self._make = make
        self._delay_s = delay_s

    def begin_events(self) -> None:
        pass

    def end_events(self) -> None:
        pass

    def body_memory(self, scope: Scope, nbytes: int) -> None:
        return None

    def start(self, scope: Scope, body: Any, respond: Any, spawn: Any) -> Callable[[], None]:
        async def later(_: object) -> None:
            await trio.sleep(self._delay_s)
            respond(200, ((b"x-a", b"b"),), self._make(bytes(body)))

        if self._delay_s:
            spawn(later)
        else:
            respond(200, ((b"x-a", b"b"),), self._make(bytes(body)))
        return lambda: None


class Counted:
    """Echo that counts its calls and can be made to wait."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.go_on = trio.Event()
        self.go_on.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        try:
            await self.go_on.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        await echo(scope, receive, send)


# ---------------------------------------------------------------------------------------------- requests and responses


async def test_an_unused_socket_file_is_replaced_and_no_other_file_is(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with open_unix_listener(str(path)) as listener:
        assert listener.getsockname() == str(path)
        with pytest.raises(OSError, match="in use"):  # the port is in use
            open_unix_listener(str(path))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        open_unix_listener(str(file))
    assert file.read_text() == "precious"


async def test_requests_follow_each_other_on_one_connection(start: Start) -> None:
    client = await (await start(echo)).connect()
    for text in (b"one", b"two"):
        answer = await client.ask(post(text))
        assert (answer.status, answer.body) == (200, text)
        assert "connection" not in answer.headers


@pytest.mark.fault("H15")
async def test_five_pipelined_requests_get_five_responses_in_order(start: Start) -> None:
    client = await (await start(echo)).connect()
    await client.say(b"".join(post(b"body %d" % number) for number in range(5)))
    assert [(await client.answer()).body for _ in range(5)] == [b"body %d" % number for number in range(5)]


@pytest.mark.fault("H14")
async def test_a_request_sent_byte_by_byte_is_served(start: Start) -> None:
    client = await (await start(echo)).connect()
    for byte in post(b"slow"):
        await client.say(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
    assert (await client.answer()).body == b"slow"


async def test_a_chunked_body_arrives_whole_and_the_next_request_is_found(start: Start) -> None:
    client = await (await start(echo)).connect()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    await client.say(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + post(b"next"))
    assert (await client.answer()).body == b"abcde"
    assert (await client.answer()).body == b"next"


@pytest.mark.parametrize("size", [1, 16_384, 65_535, 65_536, 3_000_000])
async def test_bodies_of_every_size_are_returned_unchanged(start: Start, size: int) -> None:
    client = await (await start(echo)).connect()
    body = bytes(range(256)) * (size // 256 + 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.say, post(body[:size]) + post(b"next"))
        assert (await client.answer()).body == body[:size]
        assert (await client.answer()).body == b"next"


async def test_a_large_body_has_its_own_buffer_with_its_first_tensor_aligned(start: Start) -> None:
    seen: list[tuple[type, bool, int]] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        address = np.frombuffer(body, np.uint8, offset=123).ctypes.data
        seen.append((type(body), body.readonly, address % 64))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    client = await (await start(look)).connect()
    await client.ask(post(bytes(600_000), b"Inference-Header-Content-Length: 123\r\n"))
    assert seen == [(memoryview, False, 0)]


async def test_the_buffer_of_a_large_body_returns_to_the_pool_after_its_response(start: Start) -> None:
    running = await start(echo)
    client = await running.connect()
    for _ in range(3):
        await client.ask(post(bytes(600_000)))
    pool = running.server.pool
    assert pool.lent_bytes == 0
    assert 600_000 <= pool.kept_bytes < 2 * 600_000, "one buffer, three times"


@pytest.mark.fault("H16")
async def test_a_client_that_expects_100_continue_gets_it(start: Start) -> None:
    client = await (await start(echo)).connect()
    head, body = post(b"abc", b"Expect: 100-continue\r\n").split(b"abc")[0], b"abc"
    await client.say(head)
    assert (await client.answer()).status == 100
    await client.say(body)
    assert (await client.answer()).body == b"abc"


async def test_a_response_to_head_has_the_length_and_no_body(start: Start) -> None:
    client = await (await start(echo)).connect()
    await client.say(b"HEAD /four HTTP/1.1\r\nHost: h\r\n\r\n")
    answer = await client.answer(has_body=False)
    assert answer.headers["content-length"] == "5"
    assert (await client.ask(GET)).body == b"/"


async def test_an_http_1_0_connection_is_closed_without_keep_alive(start: Start) -> None:
    running = await start(echo)
    client = await running.connect()
    answer = await client.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert answer.headers["connection"] == "keep-alive"
    await client.say(b"GET / HTTP/1.0\r\n\r\n")
    assert (await client.rest()).endswith(b"connection: close\r\n\r\n/")


async def test_a_response_in_pieces_is_chunked_for_1_1_and_ends_the_connection_for_1_0(start: Start) -> None:
    async def pieces(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"de"})

    running = await start(pieces)
    client = await running.connect()
    assert (await client.ask(GET)).body == b"abcde"
    assert (await client.ask(GET)).body == b"abcde"
    old = await running.connect()
    await old.say(b"GET / HTTP/1.0\r\n\r\n")
    assert (await old.rest()).endswith(b"\r\n\r\nabcde")


async def test_a_list_of_buffers_is_sent_as_one_body(start: Start) -> None:
    parts = [b"head", memoryview(bytes(300_000)), bytearray(b"tail")]
    client = await (await start(echo, None, Direct(lambda body: parts if body == b"question" else []))).connect()
    for _ in range(2):
        assert (await client.ask(post(b"question"))).body == b"head" + bytes(300_000) + b"tail"


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.fault("H1", "H2")
@pytest.mark.parametrize(
    "noise",
    [
        bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + bytes(range(200)),
        b"\x00\xff\xfe garbage",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nbad name: x\r\n\r\n",
    ],
)
async def test_input_that_is_not_http_gets_400_and_a_closed_connection(
    start: Start, noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    app = Counted()
    client = await (await start(app)).connect()
    answer = await client.ask(noise)
    assert answer.status == 400
    assert "malformed HTTP request" in json.loads(answer.body)["error"]
    assert answer.headers["connection"] == "close"
    assert await client.rest() == b""
    assert app.calls == 0
    assert caplog.records == []


@pytest.mark.fault("H3")
async def test_a_smuggled_request_is_never_executed(start: Start) -> None:
    app = Counted()
    client = await (await start(app)).connect()
    answer = await client.ask(
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET
    )
    assert answer.status == 400
    assert await client.rest() == b""
    assert app.calls == 0


@pytest.mark.fault("H4", "H5")
@pytest.mark.parametrize(
    "cut",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nConte",
    ],
)
async def test_a_truncated_request_is_never_executed(
    start: Start, cut: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    app = Counted()
    running = await start(app)
    client = await running.connect()
    await client.say(cut)
    await client.stream.send_eof()
    assert await client.rest() == b""
    assert app.calls == 0
    assert caplog.records == []


@pytest.mark.fault("H6")
@pytest.mark.parametrize("headers", [b"X-Big: " + b"x" * 300_000 + b"\r\n", b"x: y\r\n" * 5000])
async def test_a_head_over_the_limit_is_431(start: Start, headers: bytes) -> None:
    client = await (await start(echo)).connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.say, b"GET / HTTP/1.1\r\nHost: h\r\n" + headers + b"\r\n")
        assert (await client.answer()).status == 431


@pytest.mark.fault("H7")
async def test_a_url_of_100_kb_is_414(start: Start) -> None:
    client = await (await start(echo)).connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.say, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await client.answer()).status == 414


@pytest.mark.fault("H11")
async def test_a_body_over_the_limit_is_413_before_it_is_read(start: Start) -> None:
    app = Counted()
    client = await (await start(app, Limits(max_body_bytes=1000))).connect()
    await client.say(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n")
    answer = await client.answer()
    assert answer.status == 413
    assert "exceeds the maximum allowed size of 1000 bytes" in json.loads(answer.body)["error"]
    assert app.calls == 0


@pytest.mark.fault("H11")
async def test_a_client_that_keeps_sending_can_read_its_refusal(start: Start) -> None:
    client = await (await start(echo, Limits(max_body_bytes=1000))).connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.say, post(bytes(4_000_000)))
        assert (await client.answer()).status == 413


@pytest.mark.fault("H9")
async def test_too_many_chunks_are_refused_on_the_wire_too(start: Start) -> None:
    client = await (await start(echo)).connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            client.say,
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 70_000 + b"0\r\n\r\n",
        )
        answer = await client.answer()
    assert answer.status == 400
    assert "exceeds maximum of 65536 non-empty chunks" in json.loads(answer.body)["error"]


# ---------------------------------------------------------------------------------------------- timeouts


@pytest.mark.fault("O1")
async def test_incomplete_requests_delay_no_others_and_end_with_408(start: Start, patient_clock: MockClock) -> None:
    running = await start(echo)
    halves = [await running.connect() for _ in range(100)]
    for number, half in enumerate(halves):
        await half.say(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc" if number % 2 else b"GET / HTTP/1.1\r\nA: "
        )
    client = await running.connect()
    began = trio.current_time()
    assert [(await client.ask(GET)).status for _ in range(10)] == [200] * 10
    assert trio.current_time() - began < 0.5
    for number, half in enumerate(halves):
        answer = await half.answer()
        assert answer.status == 408
        assert ("body" if number % 2 else "head") in json.loads(answer.body)["error"]
    assert trio.current_time() - began < Limits().body_timeout_s + 2


async def test_a_body_below_the_minimum_rate_is_refused_and_a_faster_one_is_not(
    start: Start, patient_clock: MockClock
) -> None:
    running = await start(echo, Limits(body_timeout_s=10, body_bytes_per_s=100))
    slow, steady = await running.connect(), await running.connect()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4000\r\n\r\n"
    await slow.say(head)
    await steady.say(head)

    async def trickle() -> None:
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await trio.sleep(1)
                await slow.say(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        for _ in range(40):
            await trio.sleep(1)
            await steady.say(bytes(100))
    assert (await slow.answer()).status == 408
    assert len((await steady.answer()).body) == 4000


async def test_an_idle_connection_is_closed(start: Start, patient_clock: MockClock) -> None:
    running = await start(echo, Limits(idle_timeout_s=25))
    client, silent = await running.connect(), await running.connect()
    await client.ask(GET)
    assert await silent.rest() == b""
    assert await client.rest() == b""
    assert trio.current_time() == pytest.approx(25, abs=2)


@pytest.mark.fault("O3")
async def test_connections_that_are_never_read_are_closed_and_others_are_served(
    start: Start, patient_clock: MockClock
) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(16_000_000 if scope["path"] == "/big" else 1)})

    running = await start(answer)
    deaf = [await running.connect() for _ in range(4)]
    for one in deaf:
        await one.say(b"GET /big HTTP/1.1\r\nHost: h\r\n\r\n")
    client = await running.connect()
    assert (await client.ask(GET)).body == b"\0"
    began = trio.current_time()
    await running.until(lambda: len(running.server.connections) == 1, every_s=1)
    assert trio.current_time() - began < Limits().write_timeout_s + 2
    for one in deaf:
        with pytest.raises(trio.BrokenResourceError):
            await one.rest()
    assert (await client.ask(GET)).body == b"\0"


# ---------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_closed_by_its_client_cancels_its_request(start: Start, how: str) -> None:
    app = Counted()
    app.go_on = trio.Event()
    running = await start(app)
    client = await running.connect()
    await client.say(GET)
    await running.until(lambda: app.calls)
    if how == "reset":
        client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await client.stream.aclose()
    await running.until(lambda: app.cancelled)
    await running.until(lambda: not running.server.connections)


async def test_a_client_that_half_closes_after_a_fast_request_gets_its_response(start: Start) -> None:
    client = await (await start(echo)).connect()
    await client.say(GET)
    await client.stream.send_eof()
    assert (await client.answer()).body == b"/"
    assert await client.rest() == b""


# ---------------------------------------------------------------------------------------------- apps that fail


async def test_an_app_that_raises_gives_500_and_one_line_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("secret")

    running = await start(broken)
    client = await running.connect()
    answer = await client.ask(b"GET /a%0Ab HTTP/1.1\r\nHost: h\r\n\r\n")
    assert answer.status == 500
    assert json.loads(answer.body) == {"error": "internal server error"}
    assert caplog.messages == [r"GET '/a\nb' failed"]
    assert (await (await running.connect()).ask(GET)).status == 500


@pytest.mark.fault("W3")
async def test_a_body_without_memory_is_refused_with_503_and_one_line_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(nbytes: int) -> Any:
        raise MemoryError("no room for it")

    running = await start(echo)
    monkeypatch.setattr(running.server.pool, "take", exhausted)
    unlucky, other = await running.connect(), await running.connect()
    answer = await unlucky.ask(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.body) == {"error": "the server has no memory for this request: no room for it"}
    assert [record.exc_info for record in caplog.records] == [None]
    assert "POST '/a': the server has no memory for this request" in caplog.text
    assert running.server.budget.body_bytes == 0
    assert (await other.ask(GET)).status == 200


@pytest.mark.parametrize(
    "header", [(b"x", b"a\r\nX-Injected: yes"), (b"x", b"a\nb"), (b"x", b"a\rb"), (b"x\ra", b"b"), (b"x\na", b"b")]
)
async def test_a_response_header_with_a_line_break_is_refused(
    start: Start, header: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def splitting(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [header]})
        await send({"type": "http.response.body"})

    client = await (await start(splitting)).connect()
    await client.say(LAST)
    received = await client.rest()
    assert received.startswith(b"HTTP/1.1 500 ")
    assert b"X-Injected" not in received
    assert "a line break in the response header" in caplog.text


@pytest.mark.parametrize(("announced", "body"), [(b"10", b"abc"), (b"2", b"abc")])
async def test_a_response_of_another_length_than_announced_ends_the_connection(
    start: Start, announced: bytes, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", announced)]})
        await send({"type": "http.response.body", "body": body})

    client = await (await start(wrong)).connect()
    await client.say(GET + LAST)
    received = await client.rest()
    assert received.count(b"HTTP/1.1 200 OK") == 1, "a client could not tell where a second response begins"
    assert received.endswith(b"\r\n\r\nabc")
    assert "differs from its Content-Length" in caplog.text


# ---------------------------------------------------------------------------------------------- ending


@pytest.mark.fault("X1", "X2", "X3")
async def test_a_drain_completes_requests_and_closes_idle_connections(start: Start) -> None:
    app = Counted()
    running = await start(app)
    idle = await running.connect()
    await idle.ask(GET)
    app.go_on = trio.Event()
    busy = [await running.connect() for _ in range(5)]
    for client in busy:
        await client.say(GET)
    await running.until(lambda: running.count(Phase.RUNNING) == 5)

    running.server.drain(within_s=30)
    assert await idle.rest() == b""
    with pytest.raises(OSError, match="connect"):
        await running.connect()
    app.go_on.set()
    for client in busy:
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""
    assert len(running.server.connections) == 0


async def test_a_drain_completes_direct_requests_and_closes_their_connections(start: Start) -> None:
    running = await start(echo, None, Direct(lambda body: [body], delay_s=0.2))
    busy = [await running.connect() for _ in range(5)]
    for client in busy:
        await client.say(post(b"in flight") + post(b"pipelined"))
    await running.until(lambda: running.count(Phase.RUNNING) == 5)
    running.server.drain(within_s=30)
    for client in busy:
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"in flight", "close")
        assert await client.rest() == b""
    assert len(running.server.connections) == 0


@pytest.mark.parametrize("direct", [None, Direct(lambda _: [bytes(8_000_000)])])
async def test_a_drain_within_a_response_that_is_read_late_ends_the_connection_after_it(
    start: Start, direct: Any
) -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(8_000_000)})

    running = await start(large, None, direct)
    client = await running.connect()
    await client.say(GET)
    await running.until(lambda: running.server.connections)
    (connection,) = running.server.connections.values()
    await running.until(lambda: connection.phase is Phase.WRITING)
    running.server.drain(within_s=30)
    with trio.fail_after(5):
        answer = await client.answer()
        assert (len(answer.body), "connection" in answer.headers) == (8_000_000, False)  # its head was sent before
        assert await client.rest() == b""


async def test_a_request_already_in_the_kernel_when_the_drain_begins_is_answered(start: Start) -> None:
    running = await start(echo)
    client = await running.connect()
    await client.ask(GET)
    raw = client.stream.socket
    assert await raw.send(GET) == len(GET)
    running.server.drain(within_s=30)
    assert (await client.answer()).status == 200


@pytest.mark.fault("X2", "W10")
async def test_a_drain_answers_running_requests_at_its_timeout(start: Start, patient_clock: MockClock) -> None:
    app = Counted()
    app.go_on = trio.Event()
    running = await start(app)
    client = await running.connect()
    await client.say(GET)
    await running.until(lambda: app.calls)
    running.server.drain(within_s=3)
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (503, "close")
    assert "the server is stopping" in answer.body.decode()
    assert await client.rest() == b""
    assert trio.current_time() == pytest.approx(3, abs=1.1)
    await running.until(lambda: app.cancelled == 1)


async def test_serve_returns_once_drained() -> None:
    listeners = open_listeners("127.0.0.1", 0)
    server = server_module.Server(echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        server.drain(within_s=1)
    assert [listener.fileno() for listener in listeners] == [-1]


async def test_several_listeners_share_one_port_number() -> None:
    listeners = open_listeners("localhost", 0)
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.fault("K4")
async def test_a_port_in_use_is_an_error() -> None:
    (first,) = open_listeners("127.0.0.1", 0)
    with first, pytest.raises(OSError, match="in use"):
        open_listeners("127.0.0.1", first.getsockname()[1])


async def test_a_response_that_closes_the_connection_is_complete_although_the_client_keeps_sending(
    start: Start,
) -> None:
    size = 20_000_000

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    client = await (await start(large)).connect()
    last = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    await client.say(last + GET * 2_000)  # more than one read, so that some of it is still unread at the end
    assert (await client.rest()).count(0) == size


@pytest.mark.parametrize("how", ["close", "drain"])
async def test_a_last_response_is_delivered_although_the_client_keeps_sending(start: Start, how: str) -> None:
    size = 300_000  # what the server's kernel takes at once, and the client's does not

    running = await start(echo, None, Direct(lambda _: [bytes(size)]))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", running.port))
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        await stream.send_all(GET if how == "drain" else b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        received = len(await stream.receive_some())
        if how == "drain":
            await running.until(lambda: running.count(Phase.IDLE))
            running.server.drain()
        await running.until(lambda: running.count(Phase.IDLE) + running.count(Phase.RUNNING) == 0)
        await stream.send_all(GET)
        with trio.move_on_after(20):
            while data := await stream.receive_some():
                received += len(data)
    assert received > size


async def test_the_close_does_not_wait_after_the_client_has_read_everything(
    start: Start, patient_clock: MockClock
) -> None:
    running = await start(echo)
    client = await running.connect()
    await client.ask(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    await running.until(lambda: not running.server.connections)
    assert trio.current_time() < 1


# ---------------------------------------------------------------------------------------------- direct responses


async def test_each_of_many_clients_gets_its_own_responses(start: Start) -> None:
    running = await start(echo, None, Direct(lambda body: [body], delay_s=0.02))
    clients = [await running.connect() for _ in range(20)]
    got: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        for turn in range(3):
            body = b"%d/%d" % (number, turn)
            got[number] = (await clients[number].ask(post(body))).body
            assert got[number] == body

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
    assert len(got) == 20


async def test_a_client_that_half_closes_gets_the_responses_to_pipelined_requests_in_order(start: Start) -> None:
    running = await start(echo, None, Direct(lambda body: [body]))
    client = await running.connect()
    await client.say(post(b"first") + post(b"second"))
    client.stream.socket.shutdown(socket.SHUT_WR)
    rest = await client.rest()
    assert rest.index(b"first") < rest.index(b"second")


async def test_a_client_that_half_closes_within_a_request_gets_the_previous_response(start: Start) -> None:
    running = await start(echo, None, Direct(lambda body: [body]))
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(post(b"first") + post(b"second")[:-3])
        sock.shutdown(socket.SHUT_WR)  # before the server has read anything, so that it finds the end in the same turn
        sock.setblocking(False)
        received = b"".join([data async for data in trio.SocketStream(trio.socket.from_stdlib_socket(sock))])
    assert received.endswith(b"first")


async def test_a_response_that_a_client_reads_late_is_not_interrupted_by_a_refusal_of_its_next_request(
    start: Start, patient_clock: MockClock
) -> None:
    running = await start(echo, Limits(header_timeout_s=2, write_timeout_s=20), Direct(lambda _: [bytes(16_000_000)]))
    client = await running.connect()
    await client.say(post(b"first") + b"GET / HTTP/1.1\r\nHost: h\r\nA: ")
    await trio.sleep(10)  # longer than a head may take: but it is not read before the response is written
    assert len((await client.answer()).body) == 16_000_000
    assert (await client.answer()).status == 408


async def test_a_direct_response_that_is_never_read_ends_its_connection(start: Start, patient_clock: MockClock) -> None:
    running = await start(echo, Limits(write_timeout_s=5), Direct(lambda _: [bytes(16_000_000)]))
    client = await running.connect()
    await client.say(post(b"first"))
    began = trio.current_time()
    await running.until(lambda: len(running.server.connections) == 0, every_s=1)
    assert 5 <= trio.current_time() - began < 8
    with pytest.raises(trio.BrokenResourceError):
        await client.rest()


async def test_a_client_that_reads_late_gets_every_response_in_order(start: Start) -> None:
    running = await start(echo, None, Direct(lambda body: [body.ljust(8_000, b".")]))
    client = await running.connect()
    total = 1500

    async def talk() -> None:
        for number in range(total):
            await client.say(post(b"%06d" % number))
            await trio.lowlevel.checkpoint()

    waited = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        await trio.sleep(0.3)  # by now the kernel takes no more responses
        (connection,) = running.server.connections.values()
        waited = connection.phase is Phase.WRITING
        for number in range(total):
            assert (await client.answer()).body[:6] == b"%06d" % number
    assert waited


async def test_without_epoll_each_connection_has_its_own_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "epoll")
    running = await start(echo, None, Direct(lambda body: [body]))
    client, other = await running.connect(), await running.connect()
    for size in (1, 16_384, 100_000, 1):
        assert (await client.ask(post(bytes(size)))).body == bytes(size)
        assert (await other.ask(post(b"other"))).body == b"other"
    await client.say(post(b"one") + post(b"two"))
    assert [(await client.answer()).body for _ in range(2)] == [b"one", b"two"]
    await client.stream.aclose()
    await running.until(lambda: len(running.server.connections) == 1)


async def test_an_app_that_fails_after_a_disconnect_ends_only_its_connection(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            try:
                if scope["path"] != "/again":
                    await trio.sleep_forever()  # until the client leaves
            finally:
                with trio.CancelScope(shield=True):
                    if scope["path"] == "/fails":
                        raise ValueError("a fault of the app")
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()

    running = await start(app)
    for path in ("/fails", "/sends"):
        client = await running.connect()
        await client.say(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await client.stream.receive_some(100)
        await client.stream.aclose()
        await trio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records] == ["connection given up"]
    client = await running.connect()
    await client.say(b"GET /again HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await client.stream.receive_some(12)) == b"HTTP/1.1 200"
