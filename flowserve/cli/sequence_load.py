"""A closed loop of sequences: so many askers, each with one sequence after the other.

Decided here: that a sequence has START on its first request, END on its last and an id that nobody else has; that one
in which a request failed is given up, since what comes after it would be refused; and that one which is under way when
the time is over is ended, so that it keeps no slot from those who wait for one, or from the next measurement.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Final

from flowserve.cli.client import Address, MakeId
from flowserve.cli.load import Measured, ask, measure
from flowserve.cli.tensors import InferBody, Parameters
from flowserve.cli.wire import Wire
from flowserve.errors import FlowserveError

LENGTH: Final = 20  # as perf_analyzer's
ID_MAX: Final = 2**30  # where ids begin, at most; models may be told them as 32-bit numbers
Send = Callable[[int | str, bool, bool], Awaitable[None]]  # a sequence's id, START, END


async def measure_sequences(senders: Sequence[Send], make_id: MakeId, length: int, seconds: float) -> Measured:
    """So many sequences at a time as there are senders, of `length` requests each. Raises FlowserveError."""
    ids = map(make_id, count(random.randrange(1, ID_MAX)))  # not those of whoever measures beside us
    askers = [Sequences(send, length, lambda: next(ids)) for send in senders]
    return await measure([one.ask for one in askers], seconds, [one.end for one in askers])


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
    """One level against a server, every asker on a connection of its own. Raises FlowserveError."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(address, path, b"", {})) for _ in range(concurrency)]
        senders = [partial(_send, wire, body, parameters) for wire in wires]
        return await measure_sequences(senders, make_id, length, seconds)


async def _send(
    wire: Wire, body: InferBody, parameters: Parameters, sequence_id: int | str, start: bool, end: bool
) -> None:
    place = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
    wire.prepare(*body.of({**parameters, **place}))
    await ask(wire)


class Sequences:
    """One asker's, one after the other."""

    def __init__(self, send: Send, length: int, next_id: Callable[[], int | str]) -> None:
        self._send = send
        self._length = length
        self._next_id = next_id
        self._id: int | str = 0
        self._left = 0  # requests of the sequence that have not been answered; 0: none is open

    async def ask(self) -> None:
        """The next request of the sequence, or the first of another. Raises FlowserveError."""
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
        """End the sequence that is open, before its time. Raises FlowserveError."""
        if self._left:
            self._left = 0
            await self._send(self._id, False, True)
