"""Random faults in one server process, from a seed, while clients check every response.

Decides the faults and their order: processes of models that are killed and stopped, models that are unloaded and
loaded, clients that leave in the middle of a request or a stream, garbage and halves of requests on sockets, requests
that are refused, models that raise. Two models are never the target of a fault; each of their requests must get its
right response. Requests to the targets may be refused, and must be answered. The same seed gives the same faults in the
same order; their effects depend on the time they take. `python -m bench --chaos 300 --seed 7` runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from bench.reliability.world import Lost, Tally, World, ask_one, infer, infer_binary, infer_shaped, watched, wire
from bench.servers import BenchFailed

UNTOUCHED: Final = ("double", "chain")
TARGETS: Final = ("victim", "reloaded", "cached")
_PAUSE_S: Final = 0.02  # between two faults
_RECOVERY_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Report:
    """`untouched`: requests to models that are no target of faults, `targets`: to the others."""

    faults: Counter[str]
    untouched: Tally
    targets: Tally
    pending: int
    unwell: list[str]

    @property
    def is_met(self) -> bool:
        untouched = self.untouched
        is_right = untouched.right == untouched.sent and not untouched.wrong and not untouched.lost
        return is_right and self.targets.is_complete and not self.pending and not self.unwell

    def __str__(self) -> str:
        wrong = [*self.untouched.wrong, *self.untouched.lost, *self.targets.wrong, *self.targets.lost]
        text = f"{self.faults.total():,} faults; models without faults: {self.untouched}; with: {self.targets}"
        text += f"; {self.pending} requests left in queues"
        return "; ".join([text, *(f"{model} does not answer" for model in self.unwell), *wrong[:3]])


async def inject_faults(made: World, seconds: float, seed: int) -> Report:
    """Inject faults for that long. Raises BenchFailed if the server ends."""
    source = random.Random(seed)
    faults: Counter[str] = Counter()
    async with watched(made.port, *UNTOUCHED, connections=2) as untouched, watched(made.port, *TARGETS) as targets:
        end_s = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            while trio.current_time() < end_s:
                name, fault = source.choice(_FAULTS)
                faults[name] += 1
                if name in _IN_TURN:  # two of them at once would undo each other
                    await fault(made, random.Random(source.random()))
                else:
                    nursery.start_soon(fault, made, random.Random(source.random()))
                made.check_alive()
                await trio.sleep(_PAUSE_S)
        unwell = [
            model
            for model in (*UNTOUCHED, *TARGETS)
            if await made.recovered_after(model, _RECOVERY_S_MAX) >= _RECOVERY_S_MAX
        ]
    await trio.sleep(0.5)
    return Report(faults, untouched, targets, await made.pending(), unwell)


async def _kill(made: World, source: random.Random) -> None:
    with contextlib.suppress(Lost, KeyError, ProcessLookupError):
        os.kill(await made.pid_of("victim"), signal.SIGKILL)


async def _stop(made: World, source: random.Random) -> None:
    with contextlib.suppress(Lost, KeyError, ProcessLookupError):
        pid = await made.pid_of("victim")
        os.kill(pid, signal.SIGSTOP)
        try:
            await trio.sleep(source.uniform(0.0, 0.3))
        finally:
            os.kill(pid, signal.SIGCONT)


async def _reload(made: World, source: random.Random) -> None:
    await made.control("reloaded", "load")


async def _unload(made: World, source: random.Random) -> None:
    await made.control("reloaded", "unload")
    await trio.sleep(source.uniform(0.0, 0.05))
    await made.control("reloaded", "load")


async def _bad_load(made: World, source: random.Random) -> None:
    body = json.dumps({"parameters": {"config": source.choice(("{", "[]", '{"max_batch_size": -3}', "7"))}}).encode()
    await _refused(made, wire("POST", "/v2/repository/models/reloaded/load", body))


async def _leave(made: World, source: random.Random) -> None:
    model = source.choice((*TARGETS, "limited", "sum_oldest", "hang"))
    flags = {"sequence_id": source.randint(1, 50), "sequence_start": True} if model == "sum_oldest" else {}
    async with made.connection() as connection:
        with contextlib.suppress(Lost):
            await connection.send(infer(model, [1], **flags))
            await trio.sleep(source.uniform(0.0, 0.02))


async def _leave_stream(made: World, source: random.Random) -> None:
    model, x = source.choice((("count", [500]), ("limit_4", [500, 4])))
    async with made.connection() as connection:
        with contextlib.suppress(Lost):
            await connection.send(wire("POST", f"/v2/models/{model}/generate_stream", json.dumps({"X": x}).encode()))
            await trio.sleep(source.uniform(0.0, 0.05))


async def _garbage(made: World, source: random.Random) -> None:
    async with made.connection() as connection:
        with contextlib.suppress(Lost), trio.move_on_after(2.0):
            await connection.ask(source.randbytes(source.randint(1, 300)) + b"\r\n\r\n")


async def _half(made: World, source: random.Random) -> None:
    request = infer_binary(source.choice(TARGETS), [1, 2, 3, 4])
    async with made.connection() as connection:
        with contextlib.suppress(Lost):
            await connection.send(request[: source.randrange(1, len(request))])
            await trio.sleep(source.uniform(0.0, 0.2))


async def _mistake(made: World, source: random.Random) -> None:
    """A request with an error. The server must refuse it, and say so."""
    request = source.choice(
        (
            infer_shaped("double", [1, 2], [1, 3]),
            infer_shaped("double", [1] * 9, [9, 1]),
            infer("no_such_model", [1]),
            infer("sum_direct", [1]),
            infer("raise", [1]),
            wire("POST", "/v2/models/double/infer", b"{"),
            wire("GET", "/v2/models/double/versions/7"),
        )
    )
    await _refused(made, request)


async def _refused(made: World, request: bytes) -> None:
    async with made.connection() as connection:
        response = await connection.ask(request)
    if response.status < 400 or not json.loads(response.body)["error"]:
        raise BenchFailed(f"a mistake was not refused: {request[:300]!r}: {response}")


async def _burst(made: World, source: random.Random) -> None:
    tally = Tally()

    async def ask(number: int) -> None:
        async with made.connection() as connection:
            await ask_one(connection, "limited", number, tally)

    async with trio.open_nursery() as nursery:
        for number in range(source.randint(1, 40)):
            nursery.start_soon(ask, number)
    if not tally.is_complete:
        raise BenchFailed(f"a burst: {tally}; {[*tally.wrong, *tally.lost][:3]}")


Fault = Callable[[World, random.Random], Awaitable[None]]
_IN_TURN: Final = frozenset({"reload", "unload", "kill", "stop"})
_FAULTS: Final[tuple[tuple[str, Fault], ...]] = (
    ("kill", _kill),
    ("stop", _stop),
    ("reload", _reload),
    ("unload", _unload),
    ("bad load", _bad_load),
    ("leave", _leave),
    ("leave", _leave),
    ("leave stream", _leave_stream),
    ("garbage", _garbage),
    ("garbage", _garbage),
    ("half", _half),
    ("half", _half),
    ("mistake", _mistake),
    ("mistake", _mistake),
    ("burst", _burst),
)
