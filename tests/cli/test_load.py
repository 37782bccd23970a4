"""The load generators: of an engine, on a mock clock; of a server, against small ones that answer as a test says."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from flowserve.cli.client import Address
from flowserve.cli.engine_load import SequenceClient, measure, measure_sequences
from flowserve.cli.load import ANSWER_TIMEOUT_S, LoadConnection, Repeated, SentSequences, loop_of, measure_server
from flowserve.errors import FlowserveError, Invalid, Unavailable


async def test_a_server_that_never_answers_does_not_block_the_measurement(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with pytest.raises(Unavailable, match="were not answered within 10 s"):
        await measure([trio.sleep_forever], 1)
    assert trio.current_time() < 2 + ANSWER_TIMEOUT_S


async def test_responses_count_even_if_one_never_arrives(autojump_clock: trio.testing.MockClock) -> None:
    async def quick() -> None:
        await trio.sleep(0.01)

    measured = await measure([quick, trio.sleep_forever], 1)
    assert 95 <= measured.requests_per_s <= 101
    assert measured.p50_ms == pytest.approx(10, abs=0.1)
    assert (measured.failed, "were not answered" in measured.why) == (1, True)


async def test_a_sequence_starts_once_ends_once_and_is_abandoned_if_a_request_fails() -> None:
    sent: list[tuple[int | str, bool, bool]] = []

    async def send(sequence_id: int | str, start: bool, end: bool) -> None:
        sent.append((sequence_id, start, end))
        if len(sent) == 4:
            raise Invalid("no")

    ids: Iterator[int | str] = iter("abcd")
    sequences = SequenceClient(send, SentSequences(3, ids))
    for _ in range(3):
        await sequences.send_next()
    with pytest.raises(Invalid):
        await sequences.send_next()
    await sequences.send_next()
    await sequences.end()
    await sequences.end()
    first = [("a", True, False), ("a", False, False), ("a", False, True)]
    assert sent == [*first, ("b", True, False), ("c", True, False), ("c", False, True)]


async def test_sequences_that_wait_for_a_slot_at_the_end_get_it(autojump_clock: trio.testing.MockClock) -> None:
    slot = trio.Semaphore(1)

    async def send(sequence_id: int | str, start: bool, end: bool) -> None:
        if start:
            await slot.acquire()
        await trio.sleep(0.01)
        if end:
            slot.release()

    measured = await measure_sequences([send, send, send], int, 1000, 1)
    assert (measured.failed, slot.value) == (0, 1)
    assert trio.current_time() < 2


@contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[Address]:
    """A server that calls `serve` with each connection, one after the other."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection, suppress(ConnectionError):
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


class Keeping(Repeated):
    """A client that keeps the responses."""

    def __init__(self) -> None:
        super().__init__(b"?")
        self.seen: list[tuple[int, bytes]] = []

    def answered(self, connection: LoadConnection) -> None:
        self.seen.append((connection.status, bytes(connection.body)))


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab\r\nc", b"ab\r\nc"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"ab" * 100_000, b"ab" * 100_000),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x\r\nab\r\n\r\n1\r\nc\r\n0\r\n\r\n", b"ab\r\nc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx: y\r\n\r\n", b"ab"),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
    ],
    ids=["length", "empty", "large", "chunked", "trailer", "503"],
)
@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
def test_a_response_is_the_same_for_any_segmentation(answer: bytes, body: bytes, size: int) -> None:
    step = max(size, len(answer) // 1000)

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(100):
            for start in range(0, len(answer), step):
                connection.sendall(answer[start : start + step])

    client = Keeping()
    with listening(serve) as address, loop_of(address, [client], _raise) as loop:
        assert len(loop.open([0, 0, 0])) == 3
    assert client.seen == [(int(answer[9:12]), body)] * 3


def _raise(error: FlowserveError) -> None:
    raise error


def test_refused_requests_are_sent_again_after_a_pause_and_counted() -> None:
    answered = 0

    def serve(connection: socket.socket) -> None:
        nonlocal answered
        while connection.recv(1000):
            answered += 1
            ok = answered > 3
            connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 4\r\n\r\nbusy" % (200 if ok else 503))

    with listening(serve) as address:
        measured = measure_server(address, "/", b"?", {}, 1, 0.2)
    assert (measured.failed, measured.why) == (3, "the server answered 503: busy")
    assert measured.requests_per_s > 10


@pytest.mark.parametrize("answers", [0, 5])
def test_a_connection_that_is_closed_ends_what_is_measured_of_it(answers: int) -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(answers):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.recv(1000)

    client = Keeping()
    failures: list[FlowserveError] = []
    with listening(serve) as address, loop_of(address, [client], failures.append) as loop:
        assert len(loop.closed(10)) == answers
        loop.finish()
    assert [str(error) for error in failures] == ["the server closed the connection"]


@pytest.mark.parametrize("size", [2, 200_000])
def test_a_server_is_measured_over_tls(size: int, papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(papers / "server.pem", papers / "server.key")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
            while secure.recv(1000):
                secure.sendall(answer)

    monkeypatch.setenv("SSL_CERT_FILE", str(papers / "server.pem"))
    with listening(serve) as address:
        measured = measure_server(replace(address, host="localhost", is_tls=True), "/", b"?", {}, 1, 0.2)
        assert (measured.failed, measured.requests_per_s > 10) == (0, True)
    with pytest.raises(Unavailable, match="is a server running"):
        measure_server(address, "/", b"?", {}, 1, 0.2)
