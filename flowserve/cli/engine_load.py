"""A closed loop over an engine in this process: each client sends its next request when the last is answered.

Decides nothing else than `load` does for a server; its callers, the sweep of `bench` and `place`, send the requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import zip_longest

import trio

from flowserve.cli.client import MakeId
from flowserve.cli.load import ANSWER_TIMEOUT_S, PAUSE_NS, WARM_UP, Measured, SentSequences, new_ids
from flowserve.errors import FlowserveError, Unavailable
from flowserve.runtime.clock import SECOND_NS, running_clock

SendRequest = Callable[[], Awaitable[None]]  # sends one request and returns when answered; raises FlowserveError
Send = Callable[[int | str, bool, bool], Awaitable[None]]  # a sequence's id, START, END


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
                await trio.sleep(PAUSE_NS / SECOND_NS)
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
    return Measured.of(len(clients), latencies, seconds, failures)


async def measure_sequences(senders: Sequence[Send], make_id: MakeId, length: int, seconds: float) -> Measured:
    """As many concurrent sequences as there are senders, of `length` requests each. Raises FlowserveError."""
    ids = new_ids(make_id)
    clients = [SequenceClient(send, SentSequences(length, ids)) for send in senders]
    return await measure([one.send_next for one in clients], seconds, [one.end for one in clients])


class SequenceClient:
    """One client that sends sequences, one after the other."""

    def __init__(self, send: Send, sequences: SentSequences) -> None:
        self._send = send
        self._sequences = sequences

    async def send_next(self) -> None:
        """Send the next request of the sequence, or the first of a new one. Raises FlowserveError."""
        try:
            await self._send(*self._sequences.next())
        except FlowserveError:
            self._sequences.failed()
            raise
        self._sequences.answered()

    async def end(self) -> None:
        """End the open sequence early. Raises FlowserveError."""
        flags = self._sequences.last()
        if flags is not None:
            self._sequences.answered()
            await self._send(*flags)
