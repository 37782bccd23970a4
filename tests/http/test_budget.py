"""The budget of bodies and connections: what counts, what is refused before it is read, and that all is released."""

from __future__ import annotations

import gzip
import json
import re
import resource
import socket
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from flowserve.errors import Cancelled, Overloaded
from flowserve.http.api.access import AccessRules
from flowserve.http.api.app import make_app
from flowserve.http.api.infer import AppOptions, InferRoute
from flowserve.http.server.connection import Phase
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server, open_listeners
from flowserve.runtime.budget import Budget, Reservation
from flowserve.testing.serve import Served
from tests.http.conftest import Answer, Client, Running
from tests.support.forked import serving

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
SIZE = 100_000
BODY = bytes(SIZE)
LIMIT = 250_000
INFER = b"/v2/models/double/infer"
Start = Callable[..., Awaitable[Running]]


def head(size: int, extra: bytes = b"", path: bytes = b"/echo") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (path, extra, size)


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


class App:
    """Responds with the length of the body, once the test allows it."""

    def __init__(self) -> None:
        self.may_answer = trio.Event()
        self.may_answer.set()
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        body = (await receive())["body"]
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % len(body)})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def running(app: App, nursery: trio.Nursery) -> Any:
    with ExitStack() as sockets:
        listeners = open_listeners("127.0.0.1", 0)
        server = Server(app, Limits(max_body_bytes=200_000, header_timeout_s=60), budget=Budget(LIMIT, 4))
        await nursery.start(server.serve, listeners)
        yield Running(server, listeners[0].getsockname()[1], sockets)


def is_refused(answer: Answer, option: str) -> bool:
    assert answer.headers["connection"] == "close"
    return (answer.status, answer.headers["retry-after"]) == (503, "1") and option in answer.body.decode()


# ---------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.fault("W3")
async def test_a_body_beyond_the_budget_is_refused_before_it_is_read(running: Running, app: App) -> None:
    budget = running.server.budget
    halves = [await running.connect() for _ in range(2)]
    for half in halves:
        await half.say(head(SIZE) + BODY[:1000])
    await running.until(lambda: budget.body_bytes == 2 * SIZE)
    more = await running.connect()
    # The rest of the body is never sent, and 100 Continue never comes.
    assert is_refused(await more.ask(head(SIZE, b"Expect: 100-continue\r\n")), "--http-max-total-input-size")
    assert budget.refused_bodies == 1
    small = await running.connect()
    assert (await small.ask(head(1000) + bytes(1000))).body == b"1000"
    await halves[0].say(BODY[1000:])
    assert (await halves[0].answer()).body == b"100000"
    await running.until(lambda: budget.body_bytes == SIZE)
    assert (await halves[0].ask(head(SIZE) + BODY)).body == b"100000"
    await halves[1].stream.aclose()
    await running.until(lambda: budget.body_bytes == 0)
    assert app.calls == 3


@pytest.mark.fault("W3")
async def test_a_chunked_body_counts_as_it_grows_and_is_refused_in_the_middle(running: Running, app: App) -> None:
    budget = running.server.budget
    half = await running.connect()
    await half.say(head(200_000))
    await running.until(lambda: budget.body_bytes == 200_000)
    chunked = await running.connect()
    await chunked.say(CHUNKED)
    for expected in (210_000, 220_000, 230_000, 240_000):
        await chunked.say(b"2710\r\n" + bytes(10_000) + b"\r\n")
        await running.until(partial(lambda expected: budget.body_bytes >= expected, expected))
    await chunked.say(b"4e20\r\n" + bytes(20_000) + b"\r\n")
    assert is_refused(await chunked.answer(), "--http-max-total-input-size")
    await running.until(lambda: budget.body_bytes == 200_000)
    assert app.calls == 0


async def test_a_body_counts_until_its_response_is_written(running: Running, app: App) -> None:
    budget = running.server.budget
    app.may_answer = trio.Event()
    client, leaves = await running.connect(), await running.connect()
    await client.say(head(SIZE) + BODY)
    await leaves.say(CHUNKED + b"186a0\r\n" + BODY + b"\r\n0\r\n\r\n")
    await running.until(lambda: app.calls == 2)
    assert budget.body_bytes > SIZE + 60_000  # the last piece of a chunked body is not counted
    await leaves.stream.aclose()
    await running.until(lambda: budget.body_bytes == SIZE)
    app.may_answer.set()
    assert (await client.answer()).body == b"100000"
    await running.until(lambda: budget.body_bytes == 0)


@pytest.mark.parametrize("request_bytes", [head(5) + b"12345", CHUNKED + b"5\r\n12345\r\n0\r\n\r\n", GET])
async def test_a_small_request_reserves_nothing(
    start: Start, request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(budget: Budget) -> Any:
        raise AssertionError

    monkeypatch.setattr("flowserve.http.server.connection.Reservation", unexpected)
    client = await (await start(App())).connect()
    assert (await client.ask(request_bytes)).status == 200


@pytest.mark.fault("W3")
async def test_an_expanded_body_counts_as_it_grows(engine: Any, nursery: trio.Nursery) -> None:
    options = AppOptions(max_body_bytes=10_000_000, access=AccessRules(origins=("https://app.example",)))
    budget = Budget(4_000_000)
    server = Server(
        make_app(engine, options), Limits(max_body_bytes=10_000_000), direct=InferRoute(engine, options), budget=budget
    )
    listeners = open_listeners("127.0.0.1", 0)
    await nursery.start(server.serve, listeners)
    bomb = gzip.compress(b" " * 8_000_000)
    page = b"Content-Encoding: gzip\r\nOrigin: https://app.example\r\n"  # the app responds to it, with CORS headers
    program = b"Content-Encoding: gzip\r\n"
    for path, headers in ((INFER, program), (INFER, page), (b"/v2/logging", program)):
        async with await trio.open_tcp_stream("127.0.0.1", listeners[0].getsockname()[1]) as stream:
            answer = await Client(stream).ask(head(len(bomb), headers, path) + bomb)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "--http-max-total-input-size" in answer.body.decode()
            assert budget.body_bytes == 0
            whole = gzip.compress(b" " * 3_000_000)
            answer = await Client(stream).ask(head(len(whole), headers, path) + whole)
            assert answer.status in (400, 413)
            assert budget.body_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.booleans()), max_size=40))
def test_reservations_never_exceed_the_budget_and_are_released(steps: list[tuple[int, int, bool]]) -> None:
    budget = Budget(100)
    held = [0] * 5
    reservations = [Reservation(budget) for _ in held]
    for which, nbytes, ends in steps:
        if ends:
            reservations[which].end()
            with pytest.raises(Cancelled):
                reservations[which].grow(1)
            held[which], reservations[which] = 0, Reservation(budget)
        elif sum(held) + nbytes > 100:
            with pytest.raises(Overloaded):
                reservations[which].grow(nbytes)
        else:
            reservations[which].grow(nbytes)
            held[which] += nbytes
        assert budget.body_bytes == sum(held) <= 100
    for one in reservations:
        one.end()
        one.end()
    assert budget.body_bytes == 0


def test_a_thread_that_goes_on_after_its_request_reserves_nothing() -> None:
    budget = Budget(1 << 40)
    reservation = Reservation(budget)

    def expand() -> None:
        with pytest.raises(Cancelled):
            while True:
                reservation.grow(1)

    thread = threading.Thread(target=expand)
    thread.start()
    reservation.end()
    thread.join(10)
    assert budget.body_bytes == 0


# ---------------------------------------------------------------------------------------------------------- connections


@pytest.mark.fault("W3")
async def test_connections_beyond_the_limit_get_503_and_later_ones_are_served(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [await running.connect() for _ in range(4)]
    for client in clients:
        assert (await client.ask(GET)).status == 200
    for _ in range(5):
        refused = await running.connect()
        assert is_refused(await refused.ask(GET), "--http-max-connections")
        assert await refused.rest() == b""
    assert (await clients[0].ask(GET)).status == 200
    assert running.server.budget.connections == 4
    assert running.server.budget.refused_connections == 5
    assert len(caplog.records) == 1, "one line for an episode"
    await clients[0].stream.aclose()
    await running.until(lambda: running.server.budget.connections == 3)
    assert (await (await running.connect()).ask(GET)).status == 200


@pytest.mark.fault("W3")
async def test_hundreds_of_refused_connections_delay_no_other(running: Running) -> None:
    client = await running.connect()
    idle = [await running.connect() for _ in range(3)]
    await running.until(lambda: running.count(Phase.IDLE) == 4)
    waiting = [await running.connect() for _ in range(300)]  # and send nothing
    with trio.fail_after(5):
        assert (await client.ask(GET)).status == 200
        for one in waiting:
            assert (await one.rest()).startswith(b"HTTP/1.1 503 ")
    assert len(idle) == 3
    assert running.server.budget.refused_connections == 300


# ------------------------------------------------------------------------------------------------ a real server


MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "IN").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one[:1])]) for one in arrays]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
MEBIBYTE = 1 << 20
OPTIONS = ("--http-max-input-size", f"{8 * MEBIBYTE}", "--http-max-total-input-size", f"{16 * MEBIBYTE}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("budget")
    for name in ("first", "fresh"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG)
    with serving(repository, *OPTIONS, "--http-max-connections", "40") as running:
        yield running
        assert "Traceback" not in running.log


def of_status(served: Served, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{served.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def exchange(served: Served, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(data)
        return sock.recv(65536)


def raw_request(size: int, model: bytes = b"first") -> bytes:
    return head(size, b"Inference-Header-Content-Length: 0\r\n", b"/v2/models/%b/infer" % model) + bytes(size)


def refused_connections(served: Served) -> int:
    with urllib.request.urlopen(f"{served.base_url}/metrics", timeout=20) as response:
        (line,) = [one for one in response.read().decode().splitlines() if 'reason="connections"' in one]
    return int(line.split()[-1])


@pytest.mark.fault("W3")
def test_half_sent_bodies_hold_no_more_memory_than_the_budget(served: Served) -> None:
    assert exchange(served, raw_request(8 * MEBIBYTE)).startswith(b"HTTP/1.1 200 ")
    before = of_status(served, "VmRSS")
    with ExitStack() as sockets:
        refused = 0
        for _ in range(20):
            sock = sockets.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
            sock.sendall(head(8 * MEBIBYTE, path=b"/v2/models/first/infer"))
            sock.settimeout(0.1)
            try:
                refused += sock.recv(4096).startswith(b"HTTP/1.1 503 ")
            except TimeoutError:
                sock.settimeout(20)
                sock.sendall(bytes(8 * MEBIBYTE - 1))
        assert refused == 18
        assert of_status(served, "VmRSS") - before < 24 * MEBIBYTE
        figures = exchange(served, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").decode()
        assert f"\nflowserve_http_body_bytes {16 * MEBIBYTE}\n" in figures
        assert '\nflowserve_http_refused_total{reason="bodies"} 18\n' in figures
        assert "\nflowserve_http_connections " in figures


@pytest.mark.fault("W3")
def test_a_body_for_which_there_is_no_memory_gets_503(served: Served) -> None:
    logged = len(served.log)
    resource.prlimit(
        served.pid, resource.RLIMIT_AS, (of_status(served, "VmSize") + 2 * MEBIBYTE, resource.RLIM_INFINITY)
    )
    try:
        answer = exchange(served, head(7 * MEBIBYTE, path=b"/v2/logging"))
    finally:
        resource.prlimit(served.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith("the server has no memory for this request")
    lines = served.log[logged:].splitlines()
    assert len(lines) == 1
    assert "POST '/v2/logging': the server has no memory" in lines[0]
    assert exchange(served, raw_request(8 * MEBIBYTE)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.fault("R8", "W10")
def test_without_descriptors_requests_and_connections_get_503_with_that_reason(served: Served) -> None:
    before = refused_connections(served)
    with ExitStack() as sockets:
        inside = sockets.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
        inside.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert inside.recv(4096).startswith(b"HTTP/1.1 200 ")
        soft, hard = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
        taken = max(int(one.name) for one in Path(f"/proc/{served.pid}/fd").iterdir())
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (taken + 1, hard))
        try:
            answers: list[bytes] = []
            while len(answers) < 3:  # below the highest descriptor some may be free
                sock = sockets.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
                sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = sock.recv(4096)
                if not answer.startswith(b"HTTP/1.1 200 "):
                    answers.append(answer)
                    assert sock.recv(4096) == b"", "a refused connection is closed"
            inside.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert inside.recv(4096).startswith(b"HTTP/1.1 200 ")
            inside.sendall(raw_request(8 * MEBIBYTE, b"fresh"))  # needs new shared memory
            without_memory = inside.recv(4096)
        finally:
            resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (soft, hard))
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b'{"error":"no file descriptors left' in answer
    assert served.log.count("no file descriptors left") == 1
    assert without_memory.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in without_memory
    assert exchange(served, raw_request(64)).startswith(b"HTTP/1.1 200 "), "later connections are served"
    assert refused_connections(served) == before + len(answers)
    assert b"Too many open files" in without_memory
    assert served.log.count("Too many open files") == 1
    assert exchange(served, raw_request(8 * MEBIBYTE, b"fresh")).startswith(b"HTTP/1.1 200 ")
