"""A long mix of ordinary work: 60 % ensembles, 15 % sequences, 10 % streams, 10 % mistakes, 5 % control.

Decides what is compared in the end: every response with its request, and the memory of the last quarter of the time
with that of the second (medians, so that one moment does not decide). `python -m bench --soak 60` runs an hour.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter

import trio

from bench.reliability.figures import EXPLICIT, Figure, Say
from bench.reliability.world import (
    Connection,
    Lost,
    Response,
    Tally,
    World,
    ask_one,
    infer,
    infer_shaped,
    mebibytes,
    wire,
    world,
)

_CLIENTS = 8
_GROWTH_MAX = 1.05  # of the last quarter's memory over the second's


async def soak(minutes: float, say: Say, seed: int = 1) -> list[Figure]:
    """Run the mix for that long. Raises BenchFailed if the server ends."""
    seconds = 60 * minutes
    tally, kinds = Tally(), Counter[str]()
    held: list[int] = []
    with world("chain", "sum_oldest", "count", "reloaded", options=EXPLICIT) as made:
        end_s = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for client in range(_CLIENTS):
                nursery.start_soon(_work, made, client, random.Random(seed * 1000 + client), end_s, tally, kinds)
            while trio.current_time() < end_s:
                await trio.sleep(min(5.0, seconds / 40))
                made.check_alive()
                held.append(made.memory_bytes())
                if len(held) % 60 == 0:
                    say(f"{tally}; {held[-1] >> 20} MiB")
        await trio.sleep(0.5)
        pending = await made.pending()
        log = made.server.log.read_text(errors="replace")
    quarter = len(held) // 4
    second, last = statistics.median(held[quarter : 2 * quarter]), statistics.median(held[-quarter:])
    mix = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    errors = sum("internal error" in line.lower() for line in log.splitlines())
    text = f"{minutes:g} minutes: {mix}; {tally}; {pending} left in queues; {errors} internal errors in the log"
    is_met = tally.right == tally.sent and not tally.wrong and not tally.lost and not pending and not errors
    growth = f"{mebibytes(last - second)} from the second quarter ({second / (1 << 20):.0f} MiB) to the last"
    return [
        Figure("G16", "a mix of work for a long time: every response right", text, is_met),
        Figure("G16", "memory of the last quarter at most 5 % above the second", growth, last <= second * _GROWTH_MAX),
    ]


async def _work(
    made: World, client: int, source: random.Random, end_s: float, tally: Tally, kinds: Counter[str]
) -> None:
    number = client
    async with made.connection() as connection:
        while trio.current_time() < end_s:
            number += _CLIENTS
            draw = source.random()
            try:
                if draw < 0.6:
                    kinds["ensemble"] += 1
                    await ask_one(connection, "chain", number, tally)
                elif draw < 0.75:
                    kinds["sequence"] += 1
                    await _sequence(connection, number + 1, source, tally)
                elif draw < 0.85:
                    kinds["stream"] += 1
                    body = json.dumps({"X": [3]}).encode()
                    response = await connection.ask(wire("POST", "/v2/models/count/generate_stream", body))
                    _check(tally, response, response.status == 200 and response.body.count(b"data:") == 3)
                elif draw < 0.95:
                    kinds["mistake"] += 1
                    response = await connection.ask(infer_shaped("double", [1, 2], [1, 3]))
                    _check(tally, response, response.status == 400)
                else:
                    kinds["control"] += 1
                    path = "/v2/repository/models/reloaded/load" if not client else "/v2/repository/index"
                    response = await connection.ask(wire("POST", path))
                    _check(tally, response, response.status == 200)
            except Lost as error:
                tally.lost.append(str(error))


async def _sequence(connection: Connection, sequence: int, source: random.Random, tally: Tally) -> None:
    total, steps = 0, source.randint(1, 5)
    for step in range(steps):
        value = source.randint(-100, 100)
        total += value
        flags = {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == steps - 1}
        response = await connection.ask(infer("sum_oldest", [value], **flags))
        _check(tally, response, response.status == 200 and response.outputs()["Y"] == [total])


def _check(tally: Tally, response: Response, is_right: bool) -> None:
    tally.sent += 1
    if is_right:
        tally.right += 1
    else:
        tally.wrong.append(str(response))
