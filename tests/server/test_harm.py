"""Broken requests never affect others: hundreds of them, of every kind, next to clients that check their responses.

The response to each kind is tested in tests/http and tests/runtime. These tests check only that each is refused or its
connection closed, and that the server is unchanged afterwards.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served

SEED = 20
URL = "/v2/models/times_three/infer"
MEBIBYTE = 1 << 20
REFUSED = frozenset({*range(400, 500), 501, 505})  # 5xx of a broken request: a missing feature, or HTTP's version
# A client that sends this much after a refusal may find the connection closed before it reads the response.
MAY_BE_CUT_OFF_BYTES = 20_000
WAITS_FOR_MORE_S = 0.5

Broken = tuple[str, bytes]


# ---------------------------------------------------------------------------------------------------------- the script


def post(body: bytes, *headers: str, url: str = URL, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"POST {url} HTTP/1.1", "Host: localhost", f"Content-Length: {size}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tensor(**changed: Any) -> dict[str, Any]:
    """A valid input with these changes; `None` leaves a field out."""
    whole = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4], **changed}
    return {key: value for key, value in whole.items() if value is not None}


def document(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def binary(header: dict[str, Any], block: bytes, length: int | str | None = None) -> bytes:
    text = document(header)
    return post(text + block, f"Inference-Header-Content-Length: {len(text) if length is None else length}")


def malformed_http() -> Iterator[Broken]:
    yield "TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200))
    for number in range(8):
        yield f"random bytes {number}", random.Random(number).randbytes(300)
    yield "no method", b" /v2 HTTP/1.1\r\n\r\n"
    yield "HTTP/9.9", b"GET /v2 HTTP/9.9\r\nHost: localhost\r\n\r\n"
    yield "space in a header's name", b"GET /v2 HTTP/1.1\r\nHo st: h\r\n\r\n"
    yield "NUL in a header", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n"
    for length in ("-1", "abc", "1e3", "0x10", "99999999999999999999999"):
        yield (
            f"Content-Length {length}",
            f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode(),
        )
    yield (
        "two lengths",
        f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab".encode(),
    )
    chunked = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    yield "length and chunks", f"{chunked}Content-Length: 3\r\n\r\n0\r\n\r\n".encode()
    for size in ("xyz", "-5", "ffffffffffffffffffff"):
        yield f"chunk size {size}", f"{chunked}\r\n{size}\r\nabc\r\n".encode()
    yield "a long header", f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: {'a' * 300_000}\r\n\r\n".encode()
    yield "many headers", b"GET /v2 HTTP/1.1\r\n" + b"X: a\r\n" * 5000 + b"\r\n"
    yield "a long URL", f"GET /{'a' * 100_000} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    yield "a body beyond the limit", post(b"", length=1 << 40)
    models = ("", "..", "../../etc/passwd", "%00", "nobody", "times_three/versions/9", "times_three/versions/x")
    for url in ("/", "//", "/v3", "*", *[f"/v2/models/{model}/infer" for model in models]):
        yield f"URL {url}", post(document(tensor()), url=url)
    for verb in ("GET", "PUT", "DELETE", "PATCH", "HEAD"):
        yield f"{verb} {URL}", f"{verb} {URL} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def malformed_json() -> Iterator[Broken]:
    sound = document(tensor())
    for cut in range(len(sound)):
        yield f"JSON cut at {cut}", post(sound[:cut])
    deep = [b"{" * 5000, b"[" * 250_000, b'{"inputs":' + b"[" * 120]
    for text in (b"hello", b"[]", b"null", b'"x"', b"\xff\xfe", *deep):
        yield f"JSON {text[:12]!r}", post(text)
    fields: dict[str, list[Any]] = {
        "name": [None, 5, "", "NOPE", "IN\x00", ["IN"]],
        "shape": [
            None,
            [],
            [4],
            [1, 5],
            [0, 4],
            [-1, 4],
            [1.5, 4],
            ["1", 4],
            "1,4",
            *[[1, 2**n] for n in (31, 62, 64)],
        ],
        "datatype": [None, "FP99", "INT32", "BYTES", "FP16", 7, ""],
        "data": [None, [], [1, 2, 3], [1] * 5, ["a"] * 4, [[1, 2], [3]], {}, "1234", [None] * 4, [True] * 4, [[[[]]]]],
        "parameters": [[], "x", {"binary_data_size": 16}, {"binary_data_size": -1}, {"shared_memory_region": "r"}],
    }
    for field, values in fields.items():
        for value in values:
            yield f"input's {field} {value!r:.40}", post(document(tensor(**{field: value})))
    yield "no inputs", post(document())
    yield "the same input twice", post(document(tensor(), tensor()))
    yield "too many rows", post(document(tensor(shape=[17, 4], data=[0] * 68)))
    thousands = [{"name": f"o{number}"} for number in range(9000)]
    wrong_outputs: list[Any] = [[{"name": "NOPE"}], [{"name": "OUT"}] * 2, [{}], ["OUT"], {}, thousands]
    for outputs in wrong_outputs:
        yield f"outputs {outputs!r:.40}", post(document(tensor(), outputs=outputs))
    reserved = {"triton_x": 1}
    times: list[Any] = [{"priority": "high"}, {"sequence_start": "yes"}, {"timeout": -1}, reserved, {"a": {}}, []]
    for parameters in times:
        yield f"parameters {parameters!r}", post(document(tensor(), parameters=parameters))


def malformed_binary() -> Iterator[Broken]:
    header = tensor(data=None, parameters={"binary_data_size": 16})
    for length in (-1, 0, 1, 10**6, "abc", "9" * 40):
        yield f"header length {length}", binary(header, bytes(16), length)
    for size in (0, 15, 17, 1 << 40, -16, "16", 16.5):
        yield f"tensor of {size} bytes", binary({**header, "parameters": {"binary_data_size": size}}, bytes(16))
    for count in (0, 1, 7, 15, 17, 32):
        yield f"{count} bytes instead of 16", binary(header, bytes(count))
    strings = {"name": "IN", "shape": [1, 2], "datatype": "BYTES"}
    for block in (b"\xe8\x03\x00\x00abcd", b"\x01\x00", b"\x01\x00\x00\x00a", b"\xff\xff\xff\xff" * 2):
        sized = {**strings, "parameters": {"binary_data_size": len(block)}}
        text = document(sized)
        headers = f"Inference-Header-Content-Length: {len(text)}"
        yield f"strings {block!r}", post(text + block, headers, url="/v2/models/py_BYTES/infer")
    for encoding in ("gzip", "zebra"):
        yield f"encoding {encoding}", post(document(tensor()), f"Content-Encoding: {encoding}")


SCRIPT = [*malformed_http(), *malformed_json(), *malformed_binary()]

UNFINISHED = [
    b"",
    b"POST",
    b"POST /v2/models/times_three/infer HTTP/1.1\r\nHost: localhost\r\n",
    post(document(tensor()), length=1000),
    f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n".encode(),
    f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhello".encode(),
]


# ---------------------------------------------------------------------------------------- watching clients


@contextmanager
def watching(wire: Any) -> Iterator[Callable[[], int]]:
    """Two clients that send requests and check the responses. Yields a function for the number of correct responses
    that both have; raises in the end if one was wrong.
    """
    right, enough = [0, 0], threading.Event()
    wrong: list[Any] = []

    def watch(me: int, model: str, expected: Callable[[int], list[float]]) -> None:
        number = 0
        while not enough.is_set() and not wrong:
            number += 1
            answer = wire.infer(model, [[number] * 4], id=str(number))
            if answer.status != 200 or answer.data != expected(number) or answer.json["id"] != str(number):
                wrong.append((model, number, answer))
            right[me] += 1

    watchers = [
        threading.Thread(target=watch, args=(0, "times_three", lambda number: [3.0 * number] * 4)),
        threading.Thread(target=watch, args=(1, "nested", lambda number: [4.0 * number + 2] * 4)),
    ]
    for one in watchers:
        one.start()
    try:
        yield lambda: min(right)
    finally:
        enough.set()
        for one in watchers:
            one.join()
    assert not wrong


def resident_bytes(served: Served) -> int:
    return int(Path(f"/proc/{served.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.pid}/fd"))


@pytest.fixture(autouse=True)
def unharmed(wire: Any, served: Served) -> Iterator[None]:
    """After each test no request waits, every model is still loaded, and nothing unexpected was logged."""
    logged_before = len(served.log)
    yield
    wire.until(lambda: _all_waiting(wire) == 0, "the queues are empty")
    assert wire.get("/v2/health/live").status == 200
    assert wire.get("/v2/health/ready").status == 200
    assert "Traceback" not in served.log[logged_before:]


def _all_waiting(wire: Any) -> int:
    lines = wire.get("/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("nv_inference_pending_request_count{"))


def status_of(answer: bytes) -> int | None:
    """The status; None if the connection was closed without a response."""
    return int(answer.split(b" ", 2)[1]) if answer else None


def say(wire: Any, request: bytes) -> bytes:
    """Send the bytes, close the sending side if the server waits for more, and read to the end."""
    with wire.connect() as connection:
        try:
            connection.sendall(request)
            if not select.select([connection], [], [], WAITS_FOR_MORE_S)[0]:
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""  # refused before all of it was read


# ----------------------------------------------------------------------------------------------------------- the tests


def test_there_are_hundreds_of_broken_requests() -> None:
    assert len(SCRIPT) >= 200
    assert len({name for name, _ in SCRIPT}) == len(SCRIPT)


def test_broken_requests_are_refused_and_affect_no_other(wire: Any) -> None:
    with watching(wire) as right_answers:
        odd = {}
        for name, request in SCRIPT:
            answer = say(wire, request)
            may_be_cut_off = len(request) > MAY_BE_CUT_OFF_BYTES and not answer
            if status_of(answer) not in REFUSED and not may_be_cut_off:
                odd[name] = answer[:300]
        wire.until(lambda: right_answers() > 20, "the watchers are served")
    assert not odd


@pytest.mark.fault("H4", "H5")
def test_truncated_requests_are_refused_or_their_connection_is_closed(wire: Any) -> None:
    before = wire.statistics("times_three")["inference_count"]
    with ThreadPoolExecutor(len(UNFINISHED)) as clients:
        answers = [*clients.map(partial(say, wire), UNFINISHED)]
    for request, answer in zip(UNFINISHED, answers, strict=True):
        assert status_of(answer) in {400, None}, request
    assert wire.statistics("times_three")["inference_count"] == before


def test_mutilated_requests_never_cause_an_internal_error(wire: Any) -> None:
    generator = random.Random(SEED)
    text = document(tensor(data=None, parameters={"binary_data_size": 16}), id="7", outputs=[{"name": "OUT"}])
    with watching(wire):
        for number in range(300):
            body = bytearray(text + bytes(16))
            for _ in range(generator.randint(1, 4)):
                place = generator.randrange(len(body))
                kind = generator.randrange(3)
                if kind == 0:
                    body[place] = generator.randrange(256)
                elif kind == 1:
                    del body[place : place + generator.randint(1, 9)]
                else:
                    body[place:place] = generator.choice([b"0", b"-", b"[", b'"', b"\x00", b"99999999999", b"null"])
            answer = say(wire, post(bytes(body), f"Inference-Header-Content-Length: {len(text)}"))
            assert status_of(answer) in REFUSED | {200}, (number, bytes(body), answer[:300])


@pytest.mark.fault("H5", "O7")
def test_connections_closed_at_any_moment_affect_no_other(wire: Any) -> None:
    whole = post(document(tensor(shape=[16, 4], data=[1.5] * 64)))
    # Long enough that a queue of ten is seen on a slow machine.
    slow = post(document(tensor(data=[0.06] * 4)), url="/v2/models/sleeps/infer")
    before = wire.statistics("sleeps")["inference_count"]
    with watching(wire) as right_answers:
        for cut in range(1, len(whole), max(1, len(whole) // 40)):
            with wire.connect() as leaves:
                leaves.sendall(whole[:cut])
        for _ in range(4):
            waiting = [wire.connect() for _ in range(10)]
            for each in waiting:
                each.sendall(slow)
            wire.until(lambda: wire.waiting("sleeps") > 0, "they wait")
            for each in waiting[::2]:
                each.close()
            for each in waiting[1::2]:
                assert each.recv(65536).startswith(b"HTTP/1.1 200")
                each.close()
        wire.until(lambda: right_answers() > 20, "the watchers are served")
    assert wire.statistics("sleeps")["inference_count"] - before < 40, (
        "no request of a closed connection was taken out of the queue"
    )


@pytest.mark.fault("H5")
def test_incomplete_requests_delay_no_other(wire: Any) -> None:
    whole = post(document(tensor()))
    with watching(wire) as right_answers:
        open_ends = [wire.connect() for _ in range(60)]
        for number, each in enumerate(open_ends):
            each.sendall(whole[: 1 + number * 3])
        wire.until(lambda: right_answers() > 20, "the watchers are served")
        for each in open_ends:
            each.close()


def test_broken_requests_leak_no_memory_and_no_connections(wire: Any, served: Served) -> None:
    def abuse() -> None:
        for _, request in SCRIPT:
            say(wire, request)

    abuse()  # memory of the first run, such as caches and pools
    memory, files = resident_bytes(served), open_files(served)
    for _ in range(3):
        abuse()
    assert resident_bytes(served) - memory < 16 * MEBIBYTE
    wire.until(lambda: open_files(served) <= files, "every connection is closed")
