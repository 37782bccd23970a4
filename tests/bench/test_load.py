"""The load generator counts what was answered, and refuses to count a wrong answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bench.load import LARGE_BYTES, LoadFailed, measure
from bench.requests import infer_request, post

pytestmark = pytest.mark.server


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server on 127.0.0.1 that gives `answer` to each request without a body, one connection after the other."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while connection.recv(65536):
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


def prepare(folder: Path, numbers: np.ndarray) -> None:
    (folder / "0.request").write_bytes(post("/x", (), b""))
    (folder / "0.answer").write_bytes(numbers.astype("<f4").tobytes())


NUMBERS = np.arange(64, dtype=np.float32)
LARGE = np.arange(LARGE_BYTES, dtype=np.float32)


@pytest.mark.parametrize("numbers", [NUMBERS, LARGE], ids=["small", "large"])
def test_answers_are_counted_and_timed(numbers: np.ndarray, tmp_path: Path) -> None:
    prepare(tmp_path, numbers)
    with answering(ok(b'{"outputs":[]}' + numbers.tobytes())) as port:
        measured = measure(tmp_path, port, os.getpid(), concurrency=1, warmup_s=0.05, seconds=0.2)
    assert measured.requests > 10
    assert 0.2 <= measured.seconds < 2.0
    assert 0 < measured.p50_ms <= measured.p99_ms
    assert measured.p50_ms * measured.requests <= measured.seconds * 1000 * 2
    assert measured.load_cpu_s > 0


def test_an_answer_that_rounds_differently_is_right(tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    with answering(ok((NUMBERS * np.float32(1.0001)).tobytes())) as port:
        assert measure(tmp_path, port, os.getpid(), 1, 0.0, 0.05).requests > 0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (ok((NUMBERS + 1).tobytes()), "wrong numbers"),
        (ok(b"short"), "where 256 bytes were expected"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "503 Service Unavailable(.|\n)*busy"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "without Content-Length"),
        (ok(NUMBERS.tobytes()) + b"more", "4 bytes more than Content-Length"),
    ],
    ids=["numbers", "short", "status", "chunked", "surplus"],
)
def test_a_wrong_answer_ends_the_run_and_says_what_came(answer: bytes, complaint: str, tmp_path: Path) -> None:
    prepare(tmp_path, NUMBERS)
    with answering(answer) as port, pytest.raises(LoadFailed, match=complaint):
        measure(tmp_path, port, os.getpid(), 1, 0.0, 0.5)


def test_a_large_answer_that_is_wrong_in_its_middle_is_found(tmp_path: Path) -> None:
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
