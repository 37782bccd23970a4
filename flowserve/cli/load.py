"""Closed-loop load generator: a number of clients, each of which sends its next request when the last is answered.

Decides the measured figures, for three kinds of requests:

* One response each: requests answered within the time, their latencies, the failures.
* Streams (decoupled models): the time to the first response, the time between responses (for a language model: time to
  first token, time between tokens) and the rate of responses. A response counts if it arrives within the time, whether
  or not its request ends within it: streams may be longer than a measurement, and the ones that are open at the end are
  abandoned. Responses received in one read arrived at the same time: that is what a client observes.
* Sequences: a sequence has START on its first request, END on its last, and a unique id. If a request of it fails, the
  sequence is abandoned, because its further requests would be refused. A sequence that is open at the end of the
  measurement is ended, so that it holds no slot that other clients, or the next measurement, wait for.

Does not know the contents of requests, which its caller `bench` provides. httptools parses responses.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, zip_longest
from typing import Any, Final, Self

import httptools
import numpy as np
import trio

from flowserve.cli.client import EVENT, NO_HEADERS, Address, Headers, MakeId, error_text, no_answer
from flowserve.cli.tensors import InferBody, Parameters
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.runtime.clock import SECOND_NS, running_clock

WARM_UP: Final = 0.2  # warm-up as a share of the measured time
ANSWER_TIMEOUT_S: Final = 10.0  # requests not answered by then, after the end, count as failed
SendRequest = Callable[[], Awaitable[None]]  # sends one request and returns when answered; raises FlowserveError
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
_CLOSED: Final = "the server closed the connection"


class LoadConnection:
    """One HTTP/1.1 client connection: sends a request repeatedly and reads responses incrementally, in a few calls, so
    that the server is measured and not its client. An async context manager: connected inside. All methods raise
    Unavailable if the server closes the connection or does not speak HTTP.
    """

    def __init__(self, address: Address, path: str, body: bytes, headers: Headers) -> None:
        self._address = address
        self._path = path
        self.prepare(body, headers)
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0  # of the current response; 0 before its head is complete
        self._pieces: list[bytes] = []  # of its body, received and not read yet
        self._is_over = False  # it was received completely

    def prepare(self, body: bytes, headers: Headers) -> None:
        """Set the body and headers of the next requests."""
        lines = {"Host": self._address.netloc, "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._request = f"POST {self._path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def __aenter__(self) -> Self:
        self._stream = await _connect(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self._stream)

    async def begin(self) -> int:
        """Send the request. Returns the status of the response, whose body is then read by `more` or `rest`."""
        self._status, self._is_over = 0, False
        try:
            await self._stream.send_all(self._request)
        except _GONE:
            raise Unavailable(_CLOSED) from None
        while not self._status:
            await self._receive()
        return self._status

    async def more(self) -> bytes:
        """The next piece of the body on arrival; b"" at its end."""
        while not (self._pieces or self._is_over):
            await self._receive()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def rest(self) -> bytes:
        """The rest of the body."""
        while not self._is_over:
            await self._receive()
        return await self.more()

    async def _receive(self) -> None:
        try:
            received = await self._stream.receive_some()
        except _GONE:
            received = b""
        if not received:
            raise Unavailable(_CLOSED)
        try:
            self._parser.feed_data(received)
        except httptools.HttpParserError:
            raise Unavailable("the server's answer is not HTTP") from None

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_over = True


async def _connect(address: Address) -> trio.abc.Stream:
    try:
        if address.is_tls:
            secure = await trio.open_ssl_over_tcp_stream(
                address.host, address.port, ssl_context=ssl.create_default_context()
            )
            await secure.do_handshake()
            return secure
        return await trio.open_tcp_stream(address.host, address.port)
    except trio.BrokenResourceError as error:  # its cause is the TLS error
        raise no_answer(address, error.__cause__ if isinstance(error.__cause__, OSError) else error) from None
    except OSError as error:
        raise no_answer(address, error) from None


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


async def measure(clients: Sequence[SendRequest], seconds: float, ends: Sequence[SendRequest] = ()) -> Measured:
    """Run all clients for `seconds`, after a warm-up. `ends`: called once per client at the end, without delay, because
    other clients may wait for it. Raises FlowserveError if no request succeeded.
    """
    clock = running_clock()
    latencies: list[int] = []
    failures: list[FlowserveError] = []
    start_ns = clock() + round(seconds * WARM_UP * SECOND_NS)
    end_ns = start_ns + round(seconds * SECOND_NS)

    async def run_client(send: SendRequest, end: SendRequest | None) -> None:
        begun_ns = clock()
        while begun_ns < end_ns:
            try:
                await send()
            except FlowserveError as error:
                failures.append(error)
                await trio.sleep(0.01)  # do not add load to a server that refuses requests
                begun_ns = clock()
                continue
            now_ns = clock()
            if start_ns <= now_ns <= end_ns:
                latencies.append(now_ns - begun_ns)
            begun_ns = now_ns
        if end is not None:
            with suppress(FlowserveError):  # the client is finished either way
                await end()

    with trio.move_on_after(seconds * (1 + WARM_UP) + ANSWER_TIMEOUT_S) as time_limit:
        async with trio.open_nursery() as nursery:
            for send, end in zip_longest(clients, ends):
                nursery.start_soon(run_client, send, end)
    if time_limit.cancelled_caught:
        failures.append(Unavailable(f"requests were not answered within {ANSWER_TIMEOUT_S:g} s of the end"))
    if not latencies:
        raise failures[0] if failures else Unavailable(f"no request was answered within {seconds:g} s")
    why = str(failures[0]) if failures else ""
    return Measured(len(clients), len(latencies) / seconds, *_percentiles(latencies), len(failures), why)


def _percentiles(durations_ns: Sequence[int]) -> tuple[Any, Any, Any]:
    """The 50th, 90th and 99th percentile, in ms; None each without durations."""
    if not durations_ns:
        return None, None, None
    p50, p90, p99 = (np.percentile(np.array(durations_ns), (50, 90, 99)) / 1e6).tolist()
    return p50, p90, p99


@asynccontextmanager
async def _connections(
    address: Address, path: str, count: int, body: bytes = b"", headers: Headers = NO_HEADERS
) -> AsyncIterator[list[LoadConnection]]:
    async with AsyncExitStack() as stack:
        connections = [LoadConnection(address, path, body, headers) for _ in range(count)]
        yield [await stack.enter_async_context(connection) for connection in connections]


async def measure_server(
    address: Address, path: str, body: bytes, headers: Headers, concurrency: int, seconds: float
) -> Measured:
    """One level against a server, each client on its own connection. Raises FlowserveError."""
    async with _connections(address, path, concurrency, body, headers) as opened:
        return await measure([partial(send_request, connection) for connection in opened], seconds)


async def send_request(connection: LoadConnection) -> None:
    """Raises Invalid for an error status, Unavailable if the server closes the connection."""
    status = await connection.begin()
    answer = await connection.rest()
    if status != 200:
        raise Invalid(f"the server answered {status}: {error_text(answer)}")


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


async def measure_streams(
    address: Address, path: str, body: bytes, concurrency: int, seconds: float
) -> StreamsMeasured:
    """One level, each client on its own connection, after a warm-up. Raises FlowserveError without any response."""
    clock = running_clock()
    whole: list[int] = []  # durations in ns, as the next two
    first: list[int] = []
    between: list[int] = []
    failures: list[FlowserveError] = []

    async def send(connection: LoadConnection) -> None:
        """Raises Invalid for an error status or a failed model, Unavailable if the server closes the connection."""
        begun_ns = last_ns = clock()
        if (status := await connection.begin()) != 200:
            raise Invalid(f"the server answered {status}: {error_text(await connection.rest())}")
        seen, failure, held = first, b"", b""
        while piece := await connection.more():
            now_ns = clock()
            *events, held = (held + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(EVENT):
                    continue
                if event.startswith(_ERROR):
                    failure = event[len(EVENT) :]
                elif now_ns >= start_ns:
                    seen.append(now_ns - last_ns)
                seen, last_ns = between, now_ns
        if failure:
            raise Invalid(f"the server answered: {error_text(failure)}")
        if (now_ns := clock()) >= start_ns:
            whole.append(now_ns - begun_ns)

    async def run_client(connection: LoadConnection) -> None:
        while True:
            try:
                await send(connection)
            except FlowserveError as error:
                failures.append(error)
                await trio.sleep(0.01)  # do not add load to a server that refuses requests

    async with _connections(address, path, concurrency, body) as opened:
        start_ns = clock() + round(seconds * WARM_UP * SECOND_NS)
        with trio.move_on_after(seconds * (1 + WARM_UP)):
            async with trio.open_nursery() as nursery:
                for connection in opened:
                    nursery.start_soon(run_client, connection)
    count = len(first) + len(between)
    if not count and not whole:
        raise failures[0] if failures else Unavailable(f"no response came within {seconds:g} s")
    return StreamsMeasured(
        concurrency,
        len(whole) / seconds,
        count / seconds,
        *_percentiles(whole),
        *_percentiles(first),
        *_percentiles(between),
        failed=len(failures),
        why=str(failures[0]) if failures else "",
    )


LENGTH: Final = 20  # requests per sequence, as perf_analyzer's default
ID_MAX: Final = 2**30  # the largest first id; models may receive ids as 32-bit numbers
Send = Callable[[int | str, bool, bool], Awaitable[None]]  # a sequence's id, START, END


async def measure_sequences(senders: Sequence[Send], make_id: MakeId, length: int, seconds: float) -> Measured:
    """As many concurrent sequences as there are senders, of `length` requests each. Raises FlowserveError."""
    # A random start, because other load generators may run at the same time.
    ids = map(make_id, count(random.randrange(1, ID_MAX)))
    clients = [SequenceClient(send, length, lambda: next(ids)) for send in senders]
    return await measure([one.send_next for one in clients], seconds, [one.end for one in clients])


async def measure_server_sequences(
    address: Address,
    path: str,
    body: InferBody,
    parameters: Parameters,
    make_id: MakeId,
    length: int,
    concurrency: int,
    seconds: float,
) -> Measured:
    """One level against a server, each client on its own connection. Raises FlowserveError."""
    async with _connections(address, path, concurrency) as opened:
        senders = [partial(_send, connection, body, parameters) for connection in opened]
        return await measure_sequences(senders, make_id, length, seconds)


async def _send(
    connection: LoadConnection,
    body: InferBody,
    parameters: Parameters,
    sequence_id: int | str,
    start: bool,
    end: bool,
) -> None:
    flags = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
    connection.prepare(*body.of({**parameters, **flags}))
    await send_request(connection)


class SequenceClient:
    """One client that sends sequences, one after the other."""

    def __init__(self, send: Send, length: int, next_id: Callable[[], int | str]) -> None:
        self._send = send
        self._length = length
        self._next_id = next_id
        self._id: int | str = 0
        self._left = 0  # unanswered requests of the open sequence; 0: no sequence is open

    async def send_next(self) -> None:
        """Send the next request of the sequence, or the first of a new one. Raises FlowserveError."""
        is_first = not self._left
        if is_first:
            self._id, self._left = self._next_id(), self._length
        try:
            await self._send(self._id, is_first, self._left == 1)
        except FlowserveError:
            self._left = 0
            raise
        self._left -= 1

    async def end(self) -> None:
        """End the open sequence early. Raises FlowserveError."""
        if self._left:
            self._left = 0
            await self._send(self._id, False, True)
