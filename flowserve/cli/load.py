"""The load generator: a closed or an open loop over a fixed number of HTTP/1.1 connections.

Decides how requests are sent and responses are read at little cost (one selector, no tasks, requests that are encoded
once), since the generator shares the machine with the server; and the measured figures, for three kinds of requests:

* One response each: requests answered within the time, their latencies, the failures.
* Streams (decoupled models): the time to the first response, the time between responses (for a language model: time to
  first token, time between tokens) and the rate of responses. A response counts if it arrives within the time, whether
  or not its request ends within it: streams may be longer than a measurement, and the ones that are open at the end are
  abandoned. Responses received in one read arrived at the same time: that is what a client observes.
* Sequences: a sequence has START on its first request, END on its last, and a unique id. If a request of it fails, the
  sequence is abandoned, because its further requests would be refused. A sequence that is open at the end of the
  measurement is ended, so that it holds no slot that other clients, or the next measurement, wait for.

In a closed loop each connection sends its next request when the previous one is answered. In an open loop requests are
due at given times and wait for a free connection; the latency counts from the time at which a request was due.

Does not know the contents of requests, which its callers provide: the command `bench`, and bench/ of the source tree,
which also compares the responses.
"""

from __future__ import annotations

import random
import select
import selectors
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import numpy as np

from flowserve.cli.client import EVENT, NO_HEADERS, Address, Headers, MakeId, error_text, no_answer
from flowserve.cli.tensors import InferBody, Parameters
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.runtime.clock import SECOND_NS, thread_clock

WARM_UP: Final = 0.2  # warm-up as a share of the measured time
ANSWER_TIMEOUT_S: Final = 10.0  # requests not answered by then, after the end, count as failed
CONNECT_TIMEOUT_S: Final = 10.0
PAUSE_NS: Final = 10_000_000  # after a failure, so that a server that refuses requests gets no more load
HEAD_BYTES_MAX: Final = 65536
_CLOSED: Final = "the server closed the connection"
_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Request = bytes | memoryview


class Client(Protocol):
    """What one connection sends, and what it makes of the responses."""

    def next(self) -> Request:
        """The next request, a complete HTTP message."""

    def last(self) -> Request | None:
        """A request that has to be sent at the end. Called until it returns None."""

    def received(self, piece: bytes) -> bool:
        """A piece of a chunked body has arrived. False: it is kept in the connection's `body`."""

    def answered(self, connection: LoadConnection) -> None:
        """A response is complete. Raises FlowserveError if it is none that counts."""

    def failed(self) -> None:
        """The request has failed."""


class LoadConnection:
    """One persistent connection with at most one request in flight. Methods raise Unavailable if the server closes the
    connection or does not speak HTTP.
    """

    __slots__ = (
        *("_buffer", "_chunks", "_end", "_filled", "_heads", "_pending", "_request", "_sent", "_start", "_view"),
        *("client", "socket", "started_ns", "status"),
    )

    def __init__(self, address: Address, client: Client) -> None:
        self.socket = _connect(address)
        self.client = client
        self.started_ns = 0
        self.status = 0  # of the response, 0 before its head is complete
        # TLS may have read more from the socket than was taken, about which the selector does not know.
        self._pending = self.socket.pending if isinstance(self.socket, ssl.SSLSocket) else None
        self._request = memoryview(b"")
        self._sent = 0
        # Response heads that were parsed already, each with its status and the length of its body, -1 if it is chunked.
        self._heads: dict[bytes, tuple[int, int]] = {}
        self._reserve(HEAD_BYTES_MAX)
        self._filled = 0  # bytes of the response in the buffer; with chunks, of its head
        self._start = self._end = 0  # of the body in the buffer
        self._chunks: _Chunks | None = None

    @property
    def body(self) -> memoryview | bytes:
        """That of the complete response. A view is valid until the next request."""
        return self._view[self._start : self._end] if self._chunks is None else bytes(self._chunks.body)

    def send(self, request: Request, started_ns: int) -> bool:
        """Send a request; False when the socket cannot take all of it now."""
        self._request = memoryview(request)
        self._filled = self._sent = self.status = 0
        self._chunks = None
        self.started_ns = started_ns
        return self.go_on_sending()

    def go_on_sending(self) -> bool:
        request = self._request
        while self._sent < len(request):
            try:
                self._sent += self.socket.send(request[self._sent :] if self._sent else request)
            except _NOT_NOW:
                return False
            except OSError:
                raise Unavailable(_CLOSED) from None
        return True

    def receive(self) -> bool:
        """Read from the socket; True when the response is complete."""
        while True:
            room = self._view[self._filled :] if self._filled else self._view
            if not room:
                raise Unavailable("the server's answer is not HTTP: its head does not end")
            try:
                size = self.socket.recv_into(room)
            except _NOT_NOW:
                return False
            except OSError:
                size = 0
            if not size:
                raise Unavailable(_CLOSED)
            if self._chunks is not None:
                self._take(bytes(room[:size]))
            else:
                self._filled += size
            if (self.status or self._has_head()) and self._is_whole():
                return True
            if self._pending is None or not self._pending():
                return False

    def _is_whole(self) -> bool:
        if self._chunks is not None:
            return self._chunks.is_over
        if self._filled > self._end:
            raise Unavailable(f"{self._filled - self._end} bytes more than Content-Length announced")
        return self._filled == self._end

    def _has_head(self) -> bool:
        """Find the head of a response, and prepare for its body."""
        found = self._buffer.find(b"\r\n\r\n", 0, self._filled)
        if found < 0:
            return False
        head = bytes(self._view[:found])
        known = self._heads.get(head)
        if known is None:
            known = self._heads[head] = _parsed(head)
        self.status, length = known
        self._start = found + 4
        if length < 0:
            self._chunks = _Chunks()
            rest = bytes(self._view[self._start : self._filled])
            self._filled = self._start
            self._take(rest)
            return True
        self._end = self._start + length
        if self._end > len(self._buffer):
            filled = bytes(self._view[: self._filled])
            self._reserve(self._end + 1)  # one more, to see what is too long
            self._view[: len(filled)] = filled
        return True

    def _take(self, received: bytes) -> None:
        """Decode bytes of a chunked body."""
        chunks = self._chunks
        assert chunks is not None
        piece = chunks.feed(received)
        if piece and (self.status != 200 or not self.client.received(piece)):
            chunks.body += piece

    def _reserve(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)


def _connect(address: Address) -> socket.socket:
    try:
        made = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            made = ssl.create_default_context().wrap_socket(made, server_hostname=address.host)
    except OSError as error:
        raise no_answer(address, error) from None
    made.setblocking(False)
    return made


def _parsed(head: bytes) -> tuple[int, int]:
    """The status of a response and the length of its body, -1 if it is chunked."""
    first, *lines = head.split(b"\r\n")
    status = first.split(b" ", 2)[1:2]
    if not first.startswith(b"HTTP/1.") or not status or not status[0].isdigit():
        raise Unavailable("the server's answer is not HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return int(status[0]), -1
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        raise Unavailable(f"a response without Content-Length: {head.decode(errors='replace')}")
    return int(status[0]), int(length)


class _Chunks:
    """Decodes a chunked body, in any pieces."""

    def __init__(self) -> None:
        self.body = bytearray()  # for the caller
        self.is_over = False
        self._held = b""  # received, and not decoded yet
        self._left = 0  # bytes of the current chunk, with its line break
        self._is_last = False  # only trailers follow

    def feed(self, received: bytes) -> bytes:
        """The decoded bytes. Raises Unavailable."""
        held, found = self._held + received, []
        while held and not self.is_over:
            if self._left:
                piece, held = held[: self._left], held[self._left :]
                found.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                continue
            line, separator, rest = held.partition(b"\r\n")
            if not separator:
                break
            held = rest
            if self._is_last:
                self.is_over = not line
                continue
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise Unavailable("the server's answer is not HTTP: a chunk has no size") from None
            self._is_last = not size
            self._left = size and size + 2
        self._held = held
        return b"".join(found)


class Loop:
    """All connections of one run. `failed` is called with the error of each request that fails; what it raises ends the
    run.
    """

    def __init__(self, connections: Sequence[LoadConnection], failed: Callable[[FlowserveError], None]) -> None:
        self._clock = thread_clock
        self._failed = failed
        self._selector = selectors.DefaultSelector()
        self._idle: deque[LoadConnection] = deque(connections)
        self._busy = 0
        self._paused: deque[tuple[int, LoadConnection]] = deque()  # with the end of the pause
        for connection in connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def closed(self, seconds: float) -> list[int]:
        """Keep every connection busy for that long; return the latency of each response in nanoseconds."""
        clock, latencies = self._clock, []
        now = clock()
        end = now + round(seconds * SECOND_NS)
        while now < end and (self._idle or self._busy or self._paused):
            while self._idle:
                self._start(self._idle.popleft(), clock())
            until = min(self._paused[0][0], end) if self._paused else end
            for connection in self._completed(max(0, until - now)):
                now = clock()
                latencies.append(now - connection.started_ns)
                self._start(connection, clock())
            now = clock()
            if self._paused:
                self._resume(now)
        return latencies

    def open(self, due_ns: Sequence[int]) -> list[int]:
        """Send a request at each of these times after now; return all latencies, counted from those times. Requests
        that fail have none.
        """
        clock, latencies = self._clock, []
        began = clock()
        future = deque(began + due for due in due_ns)
        last = future[-1] if future else began
        waiting: deque[int] = deque()
        while future or waiting or self._busy:
            now = clock()
            while future and future[0] <= now:
                waiting.append(future.popleft())
            self._resume(now)
            while waiting and self._idle:
                self._start(self._idle.pop(), waiting.popleft())
            if future:
                # epoll's own timeout has a resolution of a millisecond, longer than the time between two requests.
                select.select([self._selector], [], [], max(0.0, (future[0] - clock()) / SECOND_NS))
            elif now > last + round(ANSWER_TIMEOUT_S * SECOND_NS):
                self._failed(_late())
                break
            for connection in self._completed(0 if future else PAUSE_NS):
                latencies.append(clock() - connection.started_ns)
                self._idle.append(connection)
        return latencies

    def finish(self) -> None:
        """Send the clients' last requests, and wait for all responses."""
        end = self._clock() + round(ANSWER_TIMEOUT_S * SECOND_NS)
        self._idle.extend(connection for _, connection in self._paused)
        self._paused.clear()
        while True:
            while self._idle:
                self._end(self._idle.popleft())
            if not self._busy:
                return None
            left = end - self._clock()
            if left <= 0:
                return self._failed(_late())
            self._idle.extend(self._completed(left))
            self._idle.extend(connection for _, connection in self._paused)
            self._paused.clear()

    def close(self) -> None:
        self._selector.close()

    def _end(self, connection: LoadConnection) -> None:
        request = connection.client.last()
        if request is not None:
            self._busy += 1
            self._send(connection, request, self._clock())

    def _start(self, connection: LoadConnection, started_ns: int) -> None:
        self._busy += 1
        self._send(connection, connection.client.next(), started_ns)

    def _send(self, connection: LoadConnection, request: Request, started_ns: int) -> None:
        try:
            if not connection.send(request, started_ns):
                self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        except FlowserveError as error:
            self._fail(connection, error)

    def _completed(self, limit_ns: int) -> list[LoadConnection]:
        """The connections whose responses completed; waits for events, for `limit_ns` at most."""
        completed = []
        for key, event in self._selector.select(limit_ns / SECOND_NS):
            connection: LoadConnection = key.data
            try:
                if event & selectors.EVENT_WRITE and connection.go_on_sending():
                    self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
                if event & selectors.EVENT_READ and connection.receive():
                    connection.client.answered(connection)
                    completed.append(connection)
                    self._busy -= 1
            except FlowserveError as error:
                self._fail(connection, error)
        return completed

    def _fail(self, connection: LoadConnection, error: FlowserveError) -> None:
        """A connection whose request fails waits for a moment; one that is closed is left out from now on."""
        self._busy -= 1
        connection.client.failed()
        if isinstance(error, Unavailable):
            self._selector.unregister(connection.socket)
        else:
            self._paused.append((self._clock() + PAUSE_NS, connection))
        self._failed(error)

    def _resume(self, now: int) -> None:
        while self._paused and self._paused[0][0] <= now:
            self._idle.append(self._paused.popleft()[1])


def _late() -> Unavailable:
    return Unavailable(f"requests were not answered within {ANSWER_TIMEOUT_S:g} s of the end")


def poisson_ns(rate: float, seconds: float, seed: int) -> list[int]:
    """The times of a Poisson process of `rate` events per second, in nanoseconds from 0 to `seconds`."""
    generator, now, times = random.Random(seed), 0.0, []
    while (now := now + generator.expovariate(rate)) < seconds:
        times.append(round(now * 1e9))
    return times


@contextmanager
def loop_of(address: Address, clients: Sequence[Client], failed: Callable[[FlowserveError], None]) -> Iterator[Loop]:
    """A loop with a connection for each client. Raises FlowserveError if one is refused."""
    with ExitStack() as stack:
        connections = []
        for client in clients:
            connections.append(LoadConnection(address, client))
            stack.enter_context(connections[-1].socket)
        yield stack.enter_context(closing(Loop(connections, failed)))


def post(address: Address, path: str, body: bytes, headers: Headers = NO_HEADERS) -> bytes:
    """A request as one HTTP message."""
    lines = {"Host": address.netloc, "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def check_status(connection: LoadConnection) -> None:
    """Raises Invalid for an error status."""
    if connection.status != 200:
        raise Invalid(f"the server answered {connection.status}: {error_text(bytes(connection.body))}")


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one level of concurrency. Latencies are those of successful requests."""

    concurrency: int
    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    failed: int
    why: str = ""

    @classmethod
    def of(
        cls, concurrency: int, latencies: Sequence[int], seconds: float, failures: Sequence[FlowserveError]
    ) -> Measured:
        """From the latencies in nanoseconds. Raises the first failure if no request succeeded."""
        if not latencies:
            raise failures[0] if failures else Unavailable(f"no request was answered within {seconds:g} s")
        why = str(failures[0]) if failures else ""
        return cls(concurrency, len(latencies) / seconds, *_percentiles(latencies), len(failures), why)


def _percentiles(durations_ns: Sequence[int]) -> tuple[Any, Any, Any]:
    """The 50th, 90th and 99th percentile, in ms; None each without durations."""
    if not durations_ns:
        return None, None, None
    p50, p90, p99 = (np.percentile(np.array(durations_ns), (50, 90, 99)) / 1e6).tolist()
    return p50, p90, p99


class Repeated:
    """A client that sends the same request again and again."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def next(self) -> Request:
        return self._request

    def last(self) -> Request | None:
        return None

    def received(self, piece: bytes) -> bool:
        return False

    def answered(self, connection: LoadConnection) -> None:
        check_status(connection)

    def failed(self) -> None:
        pass


def measure_server(
    address: Address, path: str, body: bytes, headers: Headers, concurrency: int, seconds: float
) -> Measured:
    """One level against a server, each client on its own connection, after a warm-up. Raises FlowserveError."""
    request = post(address, path, body, headers)
    return _measure(address, [Repeated(request) for _ in range(concurrency)], seconds)


def _measure(address: Address, clients: Sequence[Client], seconds: float) -> Measured:
    failures: list[FlowserveError] = []
    with loop_of(address, clients, failures.append) as loop:
        loop.closed(seconds * WARM_UP)
        latencies = loop.closed(seconds)
        loop.finish()
    return Measured.of(len(clients), latencies, seconds, failures)


_ERROR: Final = EVENT + b'{"error"'


@dataclass(frozen=True, slots=True)
class StreamsMeasured:
    """The result of one level of concurrency. Percentiles are of whole requests, of the time to the `first` response,
    and of the time `between` two responses of one request; null if there was none.
    """

    concurrency: int
    requests_per_s: float
    responses_per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    first_p50_ms: float | None
    first_p90_ms: float | None
    first_p99_ms: float | None
    between_p50_ms: float | None
    between_p90_ms: float | None
    between_p99_ms: float | None
    failed: int
    why: str = ""


class _Durations:
    """Of all clients of one level, in ns; those that end before `start_ns` are the warm-up."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.whole: list[int] = []
        self.first: list[int] = []
        self.between: list[int] = []


class _Streaming(Repeated):
    """A client that sends a request with a stream of responses again and again."""

    def __init__(self, request: Request, durations: _Durations) -> None:
        super().__init__(request)
        self._durations = durations
        self._begun_ns = self._last_ns = 0
        self._is_first = True
        self._held = b""
        self._failure = b""

    def next(self) -> Request:
        self._begun_ns = self._last_ns = thread_clock()
        self._is_first, self._held, self._failure = True, b"", b""
        return super().next()

    def received(self, piece: bytes) -> bool:
        now_ns = thread_clock()
        durations = self._durations
        *events, self._held = (self._held + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(EVENT):
                continue
            if event.startswith(_ERROR):
                self._failure = event[len(EVENT) :]
            elif now_ns >= durations.start_ns:
                (durations.first if self._is_first else durations.between).append(now_ns - self._last_ns)
            self._is_first, self._last_ns = False, now_ns
        return True

    def answered(self, connection: LoadConnection) -> None:
        super().answered(connection)
        if self._failure:
            raise Invalid(f"the server answered: {error_text(self._failure)}")
        if (now_ns := thread_clock()) >= self._durations.start_ns:
            self._durations.whole.append(now_ns - self._begun_ns)


def measure_streams(address: Address, path: str, body: bytes, concurrency: int, seconds: float) -> StreamsMeasured:
    """One level, each client on its own connection, after a warm-up. Raises FlowserveError without any response."""
    failures: list[FlowserveError] = []
    found = _Durations(thread_clock() + round(seconds * WARM_UP * SECOND_NS))
    request = post(address, path, body)
    with loop_of(address, [_Streaming(request, found) for _ in range(concurrency)], failures.append) as loop:
        loop.closed(seconds * (1 + WARM_UP))
    responses = len(found.first) + len(found.between)
    if not responses and not found.whole:
        raise failures[0] if failures else Unavailable(f"no response came within {seconds:g} s")
    return StreamsMeasured(
        concurrency,
        len(found.whole) / seconds,
        responses / seconds,
        *_percentiles(found.whole),
        *_percentiles(found.first),
        *_percentiles(found.between),
        failed=len(failures),
        why=str(failures[0]) if failures else "",
    )


LENGTH: Final = 20  # requests per sequence, as perf_analyzer's default
ID_MAX: Final = 2**30  # the largest first id; models may receive ids as 32-bit numbers
Flags = tuple[int | str, bool, bool]  # a sequence's id, START, END


def new_ids(make_id: MakeId) -> Iterator[int | str]:
    """Ids of sequences, from a random start, because other load generators may run at the same time."""
    return map(make_id, count(random.randrange(1, ID_MAX)))


class SentSequences:
    """The sequences that one client sends, one after the other."""

    def __init__(self, length: int, ids: Iterator[int | str]) -> None:
        self._length = length
        self._ids = ids
        self._id: int | str = 0
        self._left = 0  # unanswered requests of the open sequence; 0: no sequence is open

    def next(self) -> Flags:
        """Of the next request of the sequence, or the first of a new one."""
        is_first = not self._left
        if is_first:
            self._id, self._left = next(self._ids), self._length
        return self._id, is_first, self._left == 1

    def last(self) -> Flags | None:
        """Of a request that ends the open sequence early."""
        if not self._left:
            return None
        self._left = 1
        return self._id, False, True

    def answered(self) -> None:
        self._left -= 1

    def failed(self) -> None:
        self._left = 0


class _InSequences(Repeated):
    """A client that sends the requests of sequences."""

    def __init__(self, sequences: SentSequences, encoded: Callable[[Flags], bytes]) -> None:
        super().__init__(b"")
        self._sequences = sequences
        self._encoded = encoded
        self._is_over = False

    def next(self) -> Request:
        return self._encoded(self._sequences.next())

    def last(self) -> Request | None:
        flags = self._sequences.last()
        self._is_over = True
        return None if flags is None else self._encoded(flags)

    def answered(self, connection: LoadConnection) -> None:
        if not self._is_over:  # otherwise the client is finished either way
            super().answered(connection)
        self._sequences.answered()

    def failed(self) -> None:
        self._sequences.failed()


def measure_server_sequences(
    address: Address,
    path: str,
    body: InferBody,
    parameters: Parameters,
    make_id: MakeId,
    length: int,
    concurrency: int,
    seconds: float,
) -> Measured:
    """One level against a server: as many concurrent sequences as connections, of `length` requests each. Raises
    FlowserveError.
    """
    ids = new_ids(make_id)
    encoded = partial(_in_sequence, address, path, body, parameters)
    clients = [_InSequences(SentSequences(length, ids), encoded) for _ in range(concurrency)]
    return _measure(address, clients, seconds)


def _in_sequence(address: Address, path: str, body: InferBody, parameters: Parameters, flags: Flags) -> bytes:
    given = dict(zip(("sequence_id", "sequence_start", "sequence_end"), flags, strict=True))
    return post(address, path, *body.of({**parameters, **given}))
