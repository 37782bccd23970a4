"""The reliability figures, one function each: a goal, what was measured, and whether the goal is met.

`length` multiplies counts and durations; with 1 all figures take about five minutes on two cores. Each figure has a
server of its own, so that none depends on another. The identifiers are those of the fault catalogue and of its list of
figures, which docs/reliability.md repeats. Latencies of a loaded machine vary: limits that compare two latencies of one
run also have an absolute part. Called by `python -m bench --figures`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from bench.reliability.chaos import inject_faults
from bench.reliability.models import ALL, LIMITS
from bench.reliability.world import (
    Connection,
    Lost,
    Response,
    Tally,
    World,
    ask_one,
    closed_loop,
    infer,
    infer_binary,
    mebibytes,
    open_loop,
    percentile_ms,
    watched,
    wire,
    world,
)
from bench.servers import BenchFailed

EXPLICIT: Final = ("--model-control-mode", "explicit", "--load-model", "*")
_MEBIBYTE: Final = 1 << 20
# Another model's p99 below this is good whatever it was before: the absolute limit of the isolation figure.
NEIGHBOUR_MS_MAX: Final = 100.0
LIVE_MS_MAX: Final = 200.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `rows`: identifiers in the fault catalogue. `goal` and `measured` are sentences."""

    rows: str
    goal: str
    measured: str
    is_met: bool


Say = Callable[[str], None]
Measure = Callable[[float], Awaitable[Sequence[Figure]]]


async def _idle_ms(port: int, seconds: float = 2.0) -> float:
    """The p99 of one client of `double` on an idle server."""
    await closed_loop(port, "double", 1, 0.5)
    return percentile_ms((await closed_loop(port, "double", 1, seconds)).latencies_s, 99)


async def _live_ms(port: int, values: list[float]) -> None:
    """Append the latencies of /v2/health/live, in seconds, until cancelled."""
    async with Connection(port) as connection:
        while True:
            began_s = trio.current_time()
            await connection.ask(wire("GET", "/v2/health/live"))
            values.append(trio.current_time() - began_s)
            await trio.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ load


async def load_held(length: float) -> list[Figure]:
    with world("chain") as made:
        peak = await closed_loop(made.port, "chain", 32, 2.0)
        rate = 0.7 * peak.right / 2.0
        before = await made.count_succeeded("chain")
        seconds = 10 * length
        tally = await open_loop(made.port, "chain", rate, seconds)
        counted = await made.count_succeeded("chain") - before
    text = f"{seconds:g} s at {rate:,.0f} requests/s: {tally}; the server counts {counted:,}"
    is_met = tally.is_complete and tally.right == tally.sent == counted
    return [Figure("G1", "70 % of the peak: 0 wrong, 0 lost, 0 counted twice", text, is_met)]


async def overload(length: float) -> list[Figure]:
    seconds = 5 * length
    with world("limited") as made:
        around_s = min(3.0, seconds)
        peak = (await closed_loop(made.port, "limited", 16, around_s)).right / around_s
        normal = await open_loop(made.port, "limited", 0.5 * peak, around_s)
        over = await open_loop(made.port, "limited", 3 * peak, seconds)
        await trio.sleep(1.0)
        after = await open_loop(made.port, "limited", 0.5 * peak, around_s)
    goodput = over.right / seconds / peak
    fast = sum(took_s <= 0.05 for took_s in over.refused_s) / max(1, len(over.refused_s))
    normal_ms, after_ms = percentile_ms(normal.latencies_s, 99), percentile_ms(after.latencies_s, 99)
    kept = f"{goodput:.0%} of the peak of {peak:,.0f}/s; {over}"
    held = "3 times the capacity: at least 80 % of the peak is answered, all others get 503"
    delays = (
        f"{fast:.1%} of {len(over.refused_s):,} refusals within 50 ms, p99 {normal_ms:.0f} ms before, "
        f"{after_ms:.0f} ms a second after"
    )
    quick = "3 times the capacity: 99 % of refusals within 50 ms, normal p99 within 5 s afterwards"
    return [
        Figure("G2 O4", held, kept, goodput >= 0.8 and over.is_complete and set(over.statuses) <= {200, 503}),
        Figure("G2", quick, delays, fast >= 0.99 and after_ms <= max(2 * normal_ms, NEIGHBOUR_MS_MAX)),
    ]


async def retry_storm(length: float) -> list[Figure]:
    """A model stops for some seconds while clients give up after one and ask again at once."""
    stalled_s = min(10.0, 3 * length)
    with world("victim") as made:
        pid = await made.pid_of("victim")
        is_over = False

        async def insist(number: int) -> None:
            while not is_over:
                async with made.connection() as connection:
                    with contextlib.suppress(Lost), trio.move_on_after(1.0):
                        await connection.ask(infer("victim", [number]))

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(insist, number)
            await trio.sleep(0.5)
            os.kill(pid, signal.SIGSTOP)
            await trio.sleep(stalled_s)
            os.kill(pid, signal.SIGCONT)
            recovered_s = await made.recovered_after("victim", 10.0)
            is_over = True
        await trio.sleep(0.5)
        pending = await made.pending()
    text = f"answers {recovered_s:.2f} s after {stalled_s:g} s with 64 clients; {pending} requests left in queues"
    return [
        Figure("O8", "a stall of 10 s and a storm of retries: well within 5 s", text, recovered_s < 5 and not pending)
    ]


async def idle_connections(length: float) -> list[Figure]:
    count = 1000
    with world("double") as made:
        await closed_loop(made.port, "double", 8, 1.0)
        before = made.memory_bytes()
        connections = [made.connection() for _ in range(count)]
        for connection in connections:
            await connection.ask(wire("GET", "/v2/health/live"))
        each = (made.memory_bytes() - before) / count
        tally = await closed_loop(made.port, "double", 4, 1.0)
        for connection in connections:
            connection.close()
    text = f"{each / 1024:.1f} KiB each; {tally} beside them"
    return [
        Figure("O6", f"{count:,} idle connections: less than 50 KB each", text, each < 50_000 and tally.is_complete)
    ]


async def slow_clients(length: float) -> list[Figure]:
    slow, never = 1000, 20
    with world("double") as made:
        idle_ms = await _idle_ms(made.port)
        before = made.memory_bytes()
        connections = [made.connection() for _ in range(slow)]
        for connection in connections:
            await connection.send(b"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        each = (made.memory_bytes() - before) / slow
        for _ in range(never):  # each asks for 4 MB, and reads nothing
            connections.append(made.connection())
            await connections[-1].send(infer_binary("double", [1] * 500_000))
        await trio.sleep(1.0)
        tally = await closed_loop(made.port, "double", 1, 3.0)
        for connection in connections:
            connection.close()
    beside_ms = percentile_ms(tally.latencies_s, 99)
    text = f"p99 {beside_ms:.1f} ms beside them, {idle_ms:.1f} ms idle; {each / 1024:.1f} KiB a slow header; {tally}"
    is_met = tally.is_complete and each <= 65_536 and beside_ms <= max(2 * idle_ms, 20.0)
    goal = f"{slow:,} slow and {never} never-reading clients: p99 of others at most doubled, 64 KB for each slow header"
    return [Figure("G10", goal, text, is_met)]


# ------------------------------------------------------------------------------------------------------- isolation


async def _isolation(length: float, rows: str, model: str, what: str) -> list[Figure]:
    """The effect of 16 clients of `model` on clients of another model and on /v2/health/live."""
    with world("double", model, options=("--exit-timeout-secs", "1")) as made:
        idle_ms = await _idle_ms(made.port)
        live: list[float] = []
        tally = Tally()
        with trio.move_on_after(5.0 * length):
            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(_insist, made.port, model, number)
                nursery.start_soon(_live_ms, made.port, live)
                await trio.sleep(0.2)
                nursery.start_soon(closed_loop, made.port, "double", 1, 60.0 * length, tally)
    beside_ms, live_ms = percentile_ms(tally.latencies_s, 99), percentile_ms(live, 99)
    text = f"p99 {beside_ms:.1f} ms beside it, {idle_ms:.1f} ms idle; /v2/health/live p99 {live_ms:.1f} ms"
    # The last request was cancelled with its client.
    is_met = not tally.wrong and not tally.lost and beside_ms <= min(max(3 * idle_ms, 20.0), NEIGHBOUR_MS_MAX)
    goal = f"{what}: p99 of a neighbour at most tripled and 100 ms, /v2/health/live below 200 ms"
    return [Figure(rows, goal, text, is_met and bool(live) and live_ms < LIVE_MS_MAX)]


async def saturated(length: float) -> list[Figure]:
    return await _isolation(length, "G9 O5", "limited", "a saturated model")


async def hanging(length: float) -> list[Figure]:
    return await _isolation(length, "G9", "hang", "a hanging model")


async def spinning(length: float) -> list[Figure]:
    return await _isolation(length, "G9", "spin", "a model that computes in Python without pause")


async def _insist(port: int, model: str, number: int) -> None:
    """Send requests repeatedly, whatever the responses."""
    async with Connection(port) as connection:
        while True:
            with contextlib.suppress(Lost):
                await connection.ask(infer(model, [number]))


async def crashes(length: float) -> list[Figure]:
    count = max(2, round(4 * length))
    slowest_s = failed_s = 0.0
    with world("double", "victim") as made:
        idle_ms = await _idle_ms(made.port)
        async with watched(made.port, "double") as others:
            for _ in range(count):
                pid = await made.pid_of("victim")
                await trio.sleep(0.5)  # it runs normally
                async with made.connection() as connection, trio.open_nursery() as nursery:
                    os.kill(pid, signal.SIGSTOP)  # so that the request is in flight
                    nursery.start_soon(_status_of, connection, infer("victim", [1]), got := list[int]())
                    await trio.sleep(0.05)
                    os.kill(pid, signal.SIGKILL)
                    began_s = trio.current_time()
                failed_s = max(failed_s, trio.current_time() - began_s)
                if got != [500]:
                    others.wrong.append(f"the request of the killed process: {got}")
                slowest_s = max(slowest_s, await made.recovered_after("victim", 15.0))
    beside_ms = percentile_ms(others.latencies_s, 99)
    text = (
        f"{count} kills: in-flight requests failed within {failed_s:.2f} s, well again within {slowest_s:.2f} s; "
        f"others: {others}, p99 {beside_ms:.1f} ms ({idle_ms:.1f} idle)"
    )
    is_met = failed_s <= 1 and slowest_s <= 10 and others.is_complete and others.right == others.sent
    goal = "a killed process: its requests get 500 within 1 s, it answers within 10 s, others at most 3 times the p99"
    return [Figure("G8", goal, text, is_met and beside_ms <= max(3 * idle_ms, NEIGHBOUR_MS_MAX))]


async def _status_of(connection: Connection, request: bytes, got: list[int]) -> None:
    try:
        got.append((await connection.ask(request)).status)
    except Lost:
        got.append(0)


async def chaos(length: float) -> list[Figure]:
    return [await run_chaos(20.0 * length, seed=7)]


async def run_chaos(seconds: float, seed: int) -> Figure:
    """Random faults for that long. Raises BenchFailed if the server ends."""
    with world(*ALL, options=EXPLICIT) as made:
        report = await inject_faults(made, seconds, seed)
    goal = "random faults in one process: no response wrong or lost, no restart"
    return Figure("G3", goal, f"seed {seed}: {report}", report.is_met)


async def bad_inputs(length: float) -> list[Figure]:
    # The corpus belongs to the tests; its requests for unknown models are further bad inputs here.
    from tests.support.http_fuzz import Insistent, mutated

    count = round(3000 * length)
    bad: list[str] = []
    statuses: dict[int, int] = {}
    with world("chain") as made:
        source, client = random.Random(7), Insistent(made.port)

        def run() -> None:
            for _ in range(count):
                asked = mutated(source)
                try:
                    status, _ = client.ask(asked)
                except OSError as error:
                    client.close()
                    bad.append(f"{asked.wire()[:80]!r}: {error}")
                    continue
                statuses[status // 100] = statuses.get(status // 100, 0) + 1
                if status >= 500 and status not in (501, 503):
                    bad.append(f"{asked.wire()[:80]!r}: {status}")

        await trio.to_thread.run_sync(run)
        client.close()
        tally = await closed_loop(made.port, "chain", 2, 0.5)
    kinds = ", ".join(f"{number:,} {kind}xx" for kind, number in sorted(statuses.items()))
    text = f"{count:,} mutated requests: {kinds}, {len(bad)} unanswered or 5xx" + "".join(f"; {one}" for one in bad[:3])
    return [
        Figure("G4", "mutated requests: none unanswered, no 5xx but 501 and 503", text, not bad and tally.is_complete)
    ]


# --------------------------------------------------------------------------------------------------- memory and names


async def memory(length: float) -> list[Figure]:
    """Growth over requests of each kind after a warm-up, and of a model that leaks, which must be detected."""
    count = round(2500 * length)
    figures = []
    kinds: dict[str, Callable[[Connection, int], Awaitable[None]]] = {
        "JSON": lambda connection, n: _ask(connection, infer("chain", [n])),
        "binary": lambda connection, n: _ask(connection, infer_binary("chain", [n] * 64)),
        "error": lambda connection, n: _ask(connection, infer("raise", [n])),
        "stream": _read_stream,
        "cancel": _leave,
    }
    with world("chain", "raise", "count", "limited", "leak") as made:
        for name, ask in kinds.items():
            growth = await _growth(made, ask, 600, count if name not in ("cancel", "stream") else count // 2)
            text = f"{mebibytes(growth)} over {count if name not in ('cancel', 'stream') else count // 2:,} requests"
            goal = f"memory, {name} requests: less than 16 MiB after 600 for warm-up"
            figures.append(Figure("G5", goal, text, growth < 16 * _MEBIBYTE))
        growth = await _growth(made, lambda connection, n: _ask(connection, infer("leak", [n])), 100, 400)
    text = f"{mebibytes(growth)} over 400 requests"
    goal = "memory, control: a model that keeps 128 KiB of each request is noticed"
    figures.append(Figure("G5", goal, text, growth > 32 * _MEBIBYTE))
    return figures


async def _growth(
    made: World, ask: Callable[[Connection, int], Awaitable[None]], warm_up: int, count: int, clients: int = 8
) -> float:
    """Bytes that the server and its processes hold more than after the warm-up."""

    async def run(first: int, until: int) -> None:
        async with made.connection() as connection:
            for number in range(first, until, clients):
                await ask(connection, number)

    held = []
    for first, until in ((0, warm_up), (warm_up, warm_up + count)):
        async with trio.open_nursery() as nursery:
            for i in range(clients):
                nursery.start_soon(run, first + i, until)
        await trio.sleep(0.5)
        held.append(made.memory_bytes())
    return held[1] - held[0]


async def _ask(connection: Connection, request: bytes) -> None:
    await connection.ask(request)


async def _read_stream(connection: Connection, number: int) -> None:
    body = json.dumps({"X": [4]}).encode()
    response = await connection.ask(wire("POST", "/v2/models/count/generate_stream", body))
    if response.status != 200 or response.body.count(b"data:") != 4:
        raise BenchFailed(f"a stream of 4 responses: {response}")


async def _leave(connection: Connection, number: int) -> None:
    await connection.send(infer("limited", [number]))
    await trio.sleep(0.001 * (number % 5))
    connection.close()


async def load_cycles(length: float) -> list[Figure]:
    count = round(20 * length)
    with world("reloaded", options=EXPLICIT) as made:

        async def cycle() -> None:
            await made.control("reloaded", "unload")
            await made.control("reloaded", "load")

        for _ in range(5):
            await cycle()
        await trio.sleep(1.0)
        before, files, threads = made.memory_bytes(), made.open_files(), made.threads()
        for _ in range(count):
            await cycle()
        await trio.sleep(1.0)
        growth, files, threads = made.memory_bytes() - before, made.open_files() - files, made.threads() - threads
    text = f"{mebibytes(growth)}, {files:+} descriptors, {threads:+} threads over {count} cycles"
    goal = "unload and load: less than 20 MiB, descriptors and threads as before"
    return [Figure("G6", goal, text, growth < 20 * _MEBIBYTE and files <= 2 and threads <= 2)]


async def restarts(length: float) -> list[Figure]:
    count = max(1, round(3 * length))
    slowest_s = 0.0
    with world("chain", is_started=False) as made:
        first_s = made.start()
        before = _names()
        for _ in range(count):
            await closed_loop(made.port, "chain", 4, 0.2)
            os.kill(made.server.pid, signal.SIGKILL)
            made.process.wait()
            slowest_s = max(slowest_s, await trio.to_thread.run_sync(made.start))
        await trio.sleep(0.5)
        left = len(_names() - before)
    text = f"{count} times: ready within {slowest_s:.1f} s (first start {first_s:.1f} s), {left} more names left behind"
    is_met = slowest_s <= first_s + 2 and left <= 2
    return [
        Figure("G15", "kill -9 and start: ready as at first plus 2 s, no files left in /dev/shm and /tmp", text, is_met)
    ]


def _names() -> set[str]:
    """The files that a server may leave behind. Those of the running one are replaced with each start."""
    return {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*flowserve*")}


async def full_cache(length: float) -> list[Figure]:
    """A response cache that is smaller than its entries, and one that is full."""
    with world("cached", options=("--cache-config", "local,size=4096")) as made:
        tally = Tally()
        async with made.connection() as connection:
            for number in range(round(200 * length)):
                await ask_one(connection, "cached", number, tally)
            large = await connection.ask(infer("cached", [5] * 2000))
        tally.sent += 1
        tally.count(large, lambda got: got.outputs()["Y"] == [6] * 2000, 0.0, "a large response")
    return [
        Figure("R12", "cache full, or an entry larger than it: served, no error", f"{tally}", tally.right == tally.sent)
    ]


async def full_disk(length: float) -> list[Figure]:
    """The log is a file on a device that is always full."""
    with world("chain", options=("--log-verbose", "1", "--log-file", "/dev/full")) as made:
        tally = await closed_loop(made.port, "chain", 4, 1.0 * length)
        printed = made.server.log.read_text(errors="replace")
    text = f"{tally}; {printed.count('Traceback')} tracebacks"
    is_met = tally.is_complete and tally.right == tally.sent and not printed.count("Traceback")
    return [Figure("R7", "no room for the log: requests are served", text, is_met)]


# ------------------------------------------------------------------------------------------ requests and their end


async def drain(length: float) -> list[Figure]:
    """SIGTERM while 100 requests are in the server, at a random moment."""
    count = max(1, round(3 * length))
    source = random.Random(3)
    slowest_s = 0.0
    lost: list[str] = []
    for _ in range(count):
        with world("chain") as made:
            connections = [made.connection() for _ in range(100)]
            for connection in connections:  # opened before, so that each request is accepted
                await connection.ask(wire("GET", "/v2/health/live"))
            statuses: list[int] = []
            async with trio.open_nursery() as nursery:
                for number, connection in enumerate(connections):
                    nursery.start_soon(_status_of, connection, infer("chain", [number]), statuses)
                await trio.sleep(source.uniform(0.02, 0.1))
                os.kill(made.server.pid, signal.SIGTERM)
                began_s = trio.current_time()
            status = await trio.to_thread.run_sync(made.process.wait)
            slowest_s = max(slowest_s, trio.current_time() - began_s)
            lost += [str(one) for one in statuses if one != 200] + ([f"exit status {status}"] if status else [])
    text = f"{count} times 100 requests: {len(lost)} not answered by 200, ended within {slowest_s:.2f} s"
    goal = "SIGTERM with 100 requests: all answered, status 0, ended within 2 s"
    return [Figure("G7", goal, text, not lost and slowest_s <= 2.0)]


async def cancellations(length: float) -> list[Figure]:
    count = round(2000 * length)
    source = random.Random(5)
    with world("chain") as made:
        tally = Tally()

        async def run(client: int) -> None:
            async with made.connection() as connection:
                for number in range(client, count, 32):
                    if source.random() < 0.3:
                        await connection.send(infer("chain", [number]))
                        await trio.sleep(source.uniform(0, 0.005))
                        connection.close()
                    else:
                        await ask_one(connection, "chain", number, tally)

        async with trio.open_nursery() as nursery:
            for client in range(32):
                nursery.start_soon(run, client)
        await trio.sleep(0.3)
        pending = await made.pending()
        probe = await closed_loop(made.port, "chain", 32, 1.0)
    text = f"{count:,} requests, 30 % cancelled; of the others: {tally}; {pending} left in queues; then {probe}"
    is_met = tally.right == tally.sent and not pending and probe.right == probe.sent
    return [Figure("G11 O7", "cancelled requests: nothing hangs, nothing is left", text, is_met)]


async def sequences(length: float) -> list[Figure]:
    count = round(150 * length)
    figures = []
    with world("sum_direct", "sum_oldest") as made:
        for model in ("sum_direct", "sum_oldest"):
            tally = Tally()
            async with trio.open_nursery() as nursery:
                for first in range(16):
                    nursery.start_soon(_run_sequences, made.port, model, range(first + 1, count + 1, 16), tally)
            text = "; ".join([f"{count:,} sequences, of their requests {tally}", *tally.wrong[:2], *tally.lost[:2]])
            kind = model.removeprefix("sum_")
            goal = f"sequences, {kind}: every partial sum right; 5 % each restarted, never ended, left by the caller"
            figures.append(Figure("G12", goal, text, tally.right == tally.sent))
    return figures


async def _run_sequences(port: int, model: str, numbers: Iterable[int], tally: Tally) -> None:
    """One sequence after the other. Some start again midway, some never end, and some callers leave."""
    for sequence in numbers:
        source = random.Random(sequence)
        fate, steps, total = source.random(), source.randint(1, 8), 0
        async with Connection(port) as connection:
            for step in range(steps):
                begins = step == 0 or (fate < 0.05 and step == steps // 2)
                ends = step == steps - 1 and not 0.05 <= fate < 0.1
                value = source.randint(-100, 100)
                total = value if begins else total + value
                request = infer(model, [value], sequence_id=sequence, sequence_start=begins, sequence_end=ends)
                if ends and 0.1 <= fate < 0.15:
                    await connection.send(request)
                    break
                tally.sent += 1
                response = await connection.ask(request)
                tally.count(response, partial(_has_sum, total), 0.0, (sequence, step))


def _has_sum(total: int, response: Response) -> bool:
    return response.outputs()["Y"] == [total]


async def backpressure(length: float) -> list[Figure]:
    """A producer that is much faster than its consumer; the models count in files the responses between them."""
    count = round(1000 * length)
    figures = []
    with world(*(f"limit_{limit}" for limit in LIMITS)) as made:
        folder = made.server.log.parent
        for limit in LIMITS:
            before = made.memory_bytes()
            body = json.dumps({"X": [count, limit]}).encode()
            async with made.connection() as connection:
                response = await connection.ask(wire("POST", f"/v2/models/limit_{limit}/generate_stream", body))
            responses = response.body.count(b"data:")
            growth = made.memory_bytes() - before
            most = int(np.fromfile(folder / f"sent-{limit}", np.int64)[2])
            text = f"{responses:,} responses, at most {most} in flight, {mebibytes(growth)}"
            # The producer counts a response after its send() returned, one after it was taken.
            is_met = responses == count and 0 < most <= limit + 1 and growth < 16 * _MEBIBYTE
            goal = f"max_inflight_requests {limit}: never exceeded, memory flat"
            figures.append(Figure("G13", goal, text, is_met))
    return figures


async def reloads(length: float) -> list[Figure]:
    count = round(10 * length)
    with world("reloaded", options=EXPLICIT) as made:
        async with watched(made.port, "reloaded", connections=4) as tally:
            for number in range(count):
                files = made.server.log.parent / "models" / "reloaded" / "1" / "model.py"
                files.write_text(files.read_text() + f"# {number}\n")
                await made.control("reloaded", "load")
    text = f"{count} reloads: {tally}"
    return [
        Figure("G14", "reloads under load: 0 failed requests", text, tally.is_complete and tally.right == tally.sent)
    ]


FIGURES: Final[dict[str, Measure]] = {
    "load": load_held,
    "overload": overload,
    "chaos": chaos,
    "inputs": bad_inputs,
    "memory": memory,
    "cycles": load_cycles,
    "drain": drain,
    "crashes": crashes,
    "saturated": saturated,
    "hanging": hanging,
    "spinning": spinning,
    "slow": slow_clients,
    "idle": idle_connections,
    "cancel": cancellations,
    "sequences": sequences,
    "backpressure": backpressure,
    "reloads": reloads,
    "restarts": restarts,
    "retries": retry_storm,
    "cache": full_cache,
    "disk": full_disk,
}


def measure_figures(names: Iterable[str], length: float, say: Say) -> list[Figure]:
    """Measure these figures, one after the other. A figure whose measurement fails is a missed one."""
    figures: list[Figure] = []
    for name in names:
        began_s = time.monotonic()
        try:
            figures += trio.run(FIGURES[name], length)
        except* (BenchFailed, Lost, OSError) as errors:
            figures.append(Figure(name, "the figure can be measured", f"{errors.exceptions[0]}", False))
        say(f"{name}: {time.monotonic() - began_s:.0f} s")
    return figures
