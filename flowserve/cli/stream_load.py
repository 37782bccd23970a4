"""A closed loop of requests that are answered any number of times: so many askers, each of which asks again as soon as
its stream has ended.

Decided here: what is measured: how long a first response takes, how long each of the others lets wait (of a language
model that streams: the time to its first token, and the time between tokens), and how many come. A response counts when
it arrives within the time, whether or not its request ends there: streams may be longer than a measurement, and what is
under way at the end is given up. Responses that come in one piece came at the same time: that is what a client sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import trio

from flowserve.cli.client import EVENT, Address, said
from flowserve.cli.load import WARM_UP, percentiles
from flowserve.cli.wire import Wire
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.runtime.clock import SECOND_NS, ClockNs, running_clock

_ERROR: Final = EVENT + b'{"error"'


@dataclass(frozen=True, slots=True)
class StreamsMeasured:
    """One level. Percentiles are of whole requests, of the time to a `first` response, and of the time `between` two of
    one request; null where there was none.
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


@dataclass(slots=True, eq=False)
class _Times:
    """What was seen from `start_ns` on, in ns."""

    start_ns: int
    whole: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    failures: list[FlowserveError] = field(default_factory=list)


async def measure_streams(
    address: Address, path: str, body: bytes, concurrency: int, seconds: float
) -> StreamsMeasured:
    """One level, every asker on a connection of its own, after a warm-up. Raises FlowserveError where nothing came."""
    clock = running_clock()
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(address, path, body, {})) for _ in range(concurrency)]
        times = _Times(clock() + round(seconds * WARM_UP * SECOND_NS))
        with trio.move_on_after(seconds * (1 + WARM_UP)):
            async with trio.open_nursery() as nursery:
                for wire in wires:
                    nursery.start_soon(_keep_asking, wire, times, clock)
    count = len(times.first) + len(times.between)
    if not count and not times.whole:
        raise times.failures[0] if times.failures else Unavailable(f"no response came within {seconds:g} s")
    return StreamsMeasured(
        concurrency,
        len(times.whole) / seconds,
        count / seconds,
        *_percentiles(times.whole),
        *_percentiles(times.first),
        *_percentiles(times.between),
        failed=len(times.failures),
        why=str(times.failures[0]) if times.failures else "",
    )


def _percentiles(durations_ns: Sequence[int]) -> tuple[float | None, float | None, float | None]:
    return percentiles(durations_ns) if durations_ns else (None, None, None)


async def _keep_asking(wire: Wire, times: _Times, clock: ClockNs) -> None:
    while True:
        try:
            await _ask(wire, times, clock)
        except FlowserveError as error:
            times.failures.append(error)
            await trio.sleep(0.01)  # a server that refuses is not made busier by it


async def _ask(wire: Wire, times: _Times, clock: ClockNs) -> None:
    """Raises Invalid where the server refuses or the model fails, Unavailable where the server goes."""
    begun_ns = last_ns = clock()
    if (status := await wire.begin()) != 200:
        raise Invalid(f"the server answered {status}: {said(await wire.rest())}")
    seen, failure, held = times.first, b"", b""
    while piece := await wire.more():
        now_ns = clock()
        *events, held = (held + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(EVENT):
                continue
            if event.startswith(_ERROR):
                failure = event[len(EVENT) :]
            elif now_ns >= times.start_ns:
                seen.append(now_ns - last_ns)
            seen, last_ns = times.between, now_ns
    if failure:
        raise Invalid(f"the server answered: {said(failure)}")
    if (now_ns := clock()) >= times.start_ns:
        times.whole.append(now_ns - begun_ns)
