"""The clients count responses and reject wrong ones; the requests are what the options say."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import wrk
from bench.load import LARGE_BYTES, LoadFailed, measure, read_samples
from bench.requests import HEADS, LENGTHS, MOST_ROWS, infer_request, post, write_requests
from bench.works import WORKS
from flowserve.cli.load import poisson_ns
from flowserve.errors import FlowserveError

pytestmark = pytest.mark.server


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A server on 127.0.0.1 that sends `answers` in turn, one connection after the other; each request is one read."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(ConnectionError):
                for answer in itertools.cycle(answers):
                    if not connection.recv(65536):
                        break
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Closing alone does not wake a thread that waits in accept.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def prepare(folder: Path, *answers: np.ndarray) -> None:
    for i, numbers in enumerate(answers):
        (folder / f"{i}.request").write_bytes(post("/x", (), b""))
        (folder / f"{i}.answer").write_bytes(numbers.astype("<f4").tobytes())


NUMBERS = np.arange(64, dtype=np.float32)
LARGE = np.arange(LARGE_BYTES, dtype=np.float32)


@pytest.mark.parametrize("numbers", [NUMBERS, LARGE], ids=["small", "large"])
def test_responses_are_counted_and_timed(numbers: np.ndarray, tmp_path: Path) -> None:
    prepare(tmp_path, numbers)
    with answering(ok(b'{"outputs":[]}' + numbers.tobytes())) as port:
        measured = measure(tmp_path, port, os.getpid(), concurrency=1, warmup_s=0.05, seconds=0.2)
    assert measured.requests > 10
    assert 0.2 <= measured.seconds < 2.0
    assert 0 < measured.p50_ms <= measured.p99_ms
    assert measured.p50_ms * measured.requests <= measured.seconds * 1000 * 2
    assert measured.load_cpu_s > 0


def test_a_response_that_rounds_differently_is_correct(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    with answering(ok((NUMBERS * np.float32(1.0001)).tobytes())) as port:
        assert measure(tmp_path, port, os.getpid(), 1, 0.0, 0.05).requests > 0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (ok((NUMBERS + 1).tobytes()), "wrong numbers"),
        (ok(b"short"), "where 256 bytes were expected"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "answered 503: busy"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "of 0 bytes where 256 bytes were expected"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "without Content-Length"),
        (b"SSH-2.0\r\n\r\n", "is not HTTP"),
        (ok(NUMBERS.tobytes()) + b"more", "4 bytes more than Content-Length"),
    ],
    ids=["numbers", "short", "status", "chunked", "length", "protocol", "surplus"],
)
def test_a_wrong_response_ends_the_run_and_is_shown(answer: bytes, complaint: str, tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    with answering(answer) as port, pytest.raises(FlowserveError, match=complaint):
        measure(tmp_path, port, os.getpid(), 1, 0.0, 0.5)


def test_a_large_response_with_an_error_in_its_middle_is_detected(tmp_path: Path) -> None:
    prepare(tmp_path, LARGE)
    wrong = LARGE.copy()
    wrong[len(wrong) // 2] += 100_000
    with answering(ok(wrong.tobytes())) as port, pytest.raises(LoadFailed, match="wrong numbers"):
        measure(tmp_path, port, os.getpid(), 1, 0.0, 5.0)


def test_a_request_announces_its_tensor_in_the_binary_extension() -> None:
    head, _, body = infer_request("m", NUMBERS[None]).partition(b"\r\n\r\n")
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    header = int(lines["Inference-Header-Content-Length"])
    assert int(lines["Content-Length"]) == len(body) == header + NUMBERS.nbytes
    assert body[header:] == NUMBERS.tobytes()


def test_with_cycle_a_connection_sends_all_requests_in_rotation(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS, NUMBERS + 1)
    with answering(ok(NUMBERS.tobytes()), ok((NUMBERS + 1).tobytes())) as port:
        assert measure(tmp_path, port, os.getpid(), 1, 0.0, 0.1, cycle=True).requests > 1
    with answering(ok(NUMBERS.tobytes()), ok((NUMBERS + 1).tobytes())) as port, pytest.raises(LoadFailed):
        measure(tmp_path, port, os.getpid(), 1, 0.0, 0.1)


def test_an_open_loop_sends_at_its_rate(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    with answering(ok(NUMBERS.tobytes())) as port:
        measured = measure(tmp_path, port, os.getpid(), 1, 0.1, 1.0, rate=300.0)
    assert measured.requests == len(poisson_ns(300.0, 1.0, 2))
    assert measured.seconds < 2.0


def test_the_latency_of_an_open_loop_counts_from_the_time_a_request_was_due(tmp_path: Path) -> None:
    """A server that takes 20 ms for each request cannot keep up with 100 requests per second: they queue."""
    prepare(tmp_path, NUMBERS)

    def serve() -> None:
        with listener.accept()[0] as connection:
            while connection.recv(65536):
                time.sleep(0.02)
                connection.sendall(ok(NUMBERS.tobytes()))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        measured = measure(tmp_path, listener.getsockname()[1], os.getpid(), 1, 0.0, 0.5, rate=100.0)
        thread.join()
    assert measured.p99_ms > 200


def test_arrivals_are_poisson() -> None:
    times = poisson_ns(1000.0, 20.0, 1)
    gaps = np.diff(times) / 1e6
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() == pytest.approx(1.0, rel=0.05)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 20e9


def split(request: bytes) -> tuple[dict[str, str], dict[str, Any], np.ndarray]:
    """The HTTP headers in lower case, the JSON and the numbers of an infer request."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    size = int(headers["inference-header-content-length"])
    assert int(headers["content-length"]) == len(body)
    return headers, json.loads(body[:size]), np.frombuffer(body[size:], "<f4")


def test_every_request_head_has_the_same_meaning() -> None:
    requests = [infer_request("m", NUMBERS[None], head=head) for head in range(HEADS)]
    assert len({request.partition(b"\r\n\r\n")[0] for request in requests}) == HEADS
    for request in requests:
        headers, body, numbers = split(request)
        assert headers["content-type"] == "application/octet-stream"
        assert body["inputs"] == [
            {"name": "X", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": NUMBERS.nbytes}}
        ]
        # One of the two ways to ask for binary outputs.
        binary = body.get("parameters", {}).get("binary_data_output") or body["outputs"][0]["parameters"]["binary_data"]
        assert binary is True
        np.testing.assert_array_equal(numbers, NUMBERS)


@pytest.mark.parametrize(("shapes", "wanted"), [("one", {(1, 64)}), ("lengths", {(1, n) for n in LENGTHS})])
def test_requests_have_the_shapes_that_were_chosen(shapes: str, wanted: set[tuple[int, int]], tmp_path: Path) -> None:
    write_requests(WORKS["chain"], tmp_path / "x", 32, shapes)
    samples = read_samples(tmp_path / "x")
    assert len(samples) == 32
    assert {tuple(split(bytes(sample.request))[1]["inputs"][0]["shape"]) for sample in samples} == wanted


def test_requests_of_several_rows_expect_as_many_rows_back(tmp_path: Path) -> None:
    write_requests(WORKS["chain"], tmp_path / "x", 64, "rows")
    found = set()
    for sample in read_samples(tmp_path / "x"):
        _, body, numbers = split(bytes(sample.request))
        rows, width = body["inputs"][0]["shape"]
        assert len(numbers) == rows * width == len(sample.numbers) // 4
        found.add(rows)
    assert min(found) == 1
    assert max(found) == MOST_ROWS


def test_two_deployments_get_every_second_request(tmp_path: Path) -> None:
    write_requests(WORKS["shared"], tmp_path / "x", 4)
    targets = [bytes(sample.request).split(b" ", 2)[1].decode() for sample in read_samples(tmp_path / "x")]
    assert targets == ["/v2/models/shared/infer", "/v2/models/shared_other/infer"] * 2


needs_wrk = pytest.mark.skipif(not wrk.installed(), reason="needs wrk")


@needs_wrk
def test_wrk_sends_the_same_requests(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS, NUMBERS)
    with answering(ok(NUMBERS.tobytes())) as port:
        measured = wrk.measure(tmp_path, port, os.getpid(), 1, 0.5, 1.0)
    assert measured.requests > 10
    assert 0.9 < measured.seconds < 2.0
    assert 0 < measured.p50_ms <= measured.p99_ms < 1000


@needs_wrk
def test_a_bad_status_ends_a_run_of_wrk(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    bad = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    with answering(bad) as port, pytest.raises(LoadFailed, match="failed requests"):
        wrk.measure(tmp_path, port, os.getpid(), 1, 0.5, 1.0)
