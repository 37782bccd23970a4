"""A closed loop of requests: so many askers, each of which asks again as soon as it is answered.

Decided here: what is measured (requests answered within the time, their latencies, what failed) and that a socket's
own asker is a few plain calls per request, so that it measures the server and not itself. What is asked is the
caller's.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from flowserve.cli.client import Address, said
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.runtime.clock import SECOND_NS, running_clock

WARM_UP: Final = 0.2  # of the measured time, before it
HEAD_BYTES_MAX: Final = 64 * 1024
Ask = Callable[[], Awaitable[None]]  # one request, answered; raises FlowserveError


@dataclass(frozen=True, slots=True)
class Measured:
    """One level. Latencies are of requests that were answered well."""

    concurrency: int
    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    failed: int
    why: str = ""


async def measure(askers: Sequence[Ask], seconds: float) -> Measured:
    """Let all of them ask for so long, after a warm-up. Raises FlowserveError where nothing was answered."""
    clock = running_clock()
    latencies: list[int] = []
    failures: list[FlowserveError] = []
    start_ns = clock() + round(seconds * WARM_UP * SECOND_NS)
    end_ns = start_ns + round(seconds * SECOND_NS)

    async def keep_asking(ask: Ask) -> None:
        begun_ns = clock()
        while begun_ns < end_ns:
            try:
                await ask()
            except FlowserveError as error:
                failures.append(error)
                await trio.sleep(0.01)  # a server that refuses is not made busier by it
                begun_ns = clock()
                continue
            now_ns = clock()
            if start_ns <= now_ns <= end_ns:
                latencies.append(now_ns - begun_ns)
            begun_ns = now_ns

    async with trio.open_nursery() as nursery:
        for ask in askers:
            nursery.start_soon(keep_asking, ask)
    if not latencies:
        raise failures[0] if failures else Unavailable(f"no request was answered within {seconds:g} s")
    p50, p90, p99 = (float(one) for one in np.percentile(np.array(latencies), (50, 90, 99)) / 1e6)
    why = str(failures[0]) if failures else ""
    return Measured(len(askers), len(latencies) / seconds, p50, p90, p99, len(failures), why)


async def measure_server(
    address: Address, path: str, body: bytes, headers: dict[str, str], concurrency: int, seconds: float
) -> Measured:
    """One level against a server, every asker on a connection of its own. Raises FlowserveError."""
    lines = {"Host": address.netloc, "Content-Length": str(len(body)), **headers}
    head = "".join([f"POST {path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in lines.items()), "\r\n"])
    request = head.encode() + body
    async with AsyncExitStack() as stack:
        askers = []
        for _ in range(concurrency):
            stream = await stack.enter_async_context(await _connect(address))
            askers.append(_Asker(stream, request).ask)
        return await measure(askers, seconds)


async def _connect(address: Address) -> trio.abc.Stream:
    try:
        if address.is_tls:
            secure = await trio.open_ssl_over_tcp_stream(
                address.host, address.port, ssl_context=ssl.create_default_context()
            )
            await secure.do_handshake()
            return secure
        return await trio.open_tcp_stream(address.host, address.port)
    except (OSError, trio.BrokenResourceError) as error:
        raise Unavailable(f"no answer from {address}: {error}; is a server running?") from None


class _Asker:
    """One connection that sends the same request again and again."""

    def __init__(self, stream: trio.abc.Stream, request: bytes) -> None:
        self._stream = stream
        self._request = request

    async def ask(self) -> None:
        """Raises Invalid where the server refuses, Unavailable where it goes."""
        try:
            await self._stream.send_all(self._request)
            held = bytearray()
            while (end := held.find(b"\r\n\r\n")) < 0:
                if len(held) > HEAD_BYTES_MAX:
                    raise Unavailable("the server's answer does not begin as HTTP does")
                held += await self._some()
            status, length = _head(bytes(held[:end]))
            while len(held) < end + 4 + length:
                held += await self._some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Unavailable("the server closed the connection") from None
        if status != 200:
            raise Invalid(f"the server answered {status}: {said(bytes(held[end + 4 :]))}")

    async def _some(self) -> bytes | bytearray:
        received = await self._stream.receive_some()
        if not received:
            raise trio.BrokenResourceError
        return received


def _head(head: bytes) -> tuple[int, int]:
    """Status and length of the body. Raises Unavailable."""
    first, *lines = head.split(b"\r\n")
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(first.split(b" ", 2)[1]), int(value)
    raise Unavailable("the server's answer does not say how long it is")
