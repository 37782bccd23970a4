"""A closed loop of requests: so many askers, each of which asks again as soon as it is answered.

Decided here: what is measured: requests answered within the time, their latencies, what failed. What is asked is the
caller's; requests with many answers are stream_load.py's, those of sequences sequence_load.py's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Final

import numpy as np
import trio

from flowserve.cli.client import Address, Headers, said
from flowserve.cli.wire import Wire
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.runtime.clock import SECOND_NS, running_clock

WARM_UP: Final = 0.2  # of the measured time, before it
PATIENCE_S: Final = 10.0  # what is not answered so long after the end is given up
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


async def measure(askers: Sequence[Ask], seconds: float, ends: Sequence[Ask] = ()) -> Measured:
    """Let all of them ask for so long, after a warm-up. `ends`: what each does afterwards, at once, since others may
    wait for it. Raises FlowserveError where nothing was answered.
    """
    clock = running_clock()
    latencies: list[int] = []
    failures: list[FlowserveError] = []
    start_ns = clock() + round(seconds * WARM_UP * SECOND_NS)
    end_ns = start_ns + round(seconds * SECOND_NS)

    async def keep_asking(ask: Ask, end: Ask | None) -> None:
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
        if end is not None:
            with suppress(FlowserveError):  # it would have been the end all the same
                await end()

    with trio.move_on_after(seconds * (1 + WARM_UP) + PATIENCE_S) as patience:
        async with trio.open_nursery() as nursery:
            for ask, end in zip_longest(askers, ends):
                nursery.start_soon(keep_asking, ask, end)
    if patience.cancelled_caught:
        failures.append(Unavailable(f"requests were not answered within {PATIENCE_S:g} s of the end"))
    if not latencies:
        raise failures[0] if failures else Unavailable(f"no request was answered within {seconds:g} s")
    p50, p90, p99 = percentiles(latencies)
    why = str(failures[0]) if failures else ""
    return Measured(len(askers), len(latencies) / seconds, p50, p90, p99, len(failures), why)


def percentiles(durations_ns: Sequence[int]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th, in ms. There is at least one duration."""
    p50, p90, p99 = (float(one) for one in np.percentile(np.array(durations_ns), (50, 90, 99)) / 1e6)
    return p50, p90, p99


async def measure_server(
    address: Address, path: str, body: bytes, headers: Headers, concurrency: int, seconds: float
) -> Measured:
    """One level against a server, every asker on a connection of its own. Raises FlowserveError."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(address, path, body, headers)) for _ in range(concurrency)]
        return await measure([partial(ask, wire) for wire in wires], seconds)


async def ask(wire: Wire) -> None:
    """Raises Invalid where the server refuses, Unavailable where it goes."""
    status = await wire.begin()
    answer = await wire.rest()
    if status != 200:
        raise Invalid(f"the server answered {status}: {said(answer)}")
