"""The engine in process: the cost of a request beside a direct call of the same model.

The model is a small perceptron; the engine chooses its execution. onnxruntime's session, the engine under trio and the
blocking engine take turns with one request of one row at a time. The best round of each counts, since disturbances only
ever add time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import trio

from bench.repositories import Onnxruntime, write_repository
from bench.works import WORKS, Array, Work
from flowserve import Engine
from flowserve.runtime.embedding.embedded import AsyncEngine

NAME: Final = "perceptron"
WARM_UP: Final = 2000  # calls; the engine chooses the execution of the node in the first ones
TARGET: Final = 3.0  # direct calls in the time of a request under trio, at most


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of one request, three ways."""

    direct_us: float
    trio_us: float
    blocking_us: float

    def __str__(self) -> str:
        ratio = self.trio_us / self.direct_us
        verdict = "reached" if ratio <= TARGET else "missed"
        return (
            f"one row of 256 floats through a small perceptron, best round:\n"
            f"  onnxruntime's session.run      {self.direct_us:7.1f} us\n"
            f"  await engine.infer, under trio {self.trio_us:7.1f} us, {ratio:.2f} times"
            f" (at most {TARGET:.0f}: {verdict})\n"
            f"  engine.infer, blocking         {self.blocking_us:7.1f} us,"
            f" {self.blocking_us / self.direct_us:.2f} times"
        )


def measure_in_process(rounds: int, seconds: float, say: Callable[[str], None]) -> Costs:
    """All three ways in turns, each for `seconds` in each of `rounds` rounds."""
    net = next(step for step in WORKS["mlp"].steps if step.model == "mlp_net")
    work = Work(NAME, "", (replace(net, inputs={"X": "X"}, output="Y"),))
    row = work.rows(1)
    direct = work.direct()
    with tempfile.TemporaryDirectory(prefix="bench-in-process-") as folder:
        write_repository(work, Path(folder), Onnxruntime.BACKEND)
        with Engine(folder) as blocking:
            costs: list[tuple[float, float, float]] = []

            def ask(rows: Array) -> Array:
                return blocking.infer(NAME, {"X": rows})["Y"]

            async def all_rounds() -> None:
                async with Engine(folder) as engine:
                    np.testing.assert_allclose((await engine.infer(NAME, {"X": row}))["Y"], direct(row), rtol=1e-4)
                    await _call_trio(engine, row, WARM_UP)
                    for number in range(rounds):
                        say(f"round {number + 1} of {rounds}")
                        under_trio = await _trio_us(engine, row, seconds)
                        costs.append((_us(direct, row, seconds), under_trio, await _in_thread(ask, row, seconds)))

            trio.run(all_rounds)
    return Costs(*(min(column) for column in zip(*costs, strict=True)))


async def _in_thread(call: Callable[[Array], Array], row: Array, seconds: float) -> float:
    return await trio.to_thread.run_sync(_us, call, row, seconds)


def _us(call: Callable[[Array], Array], row: Array, seconds: float) -> float:
    """Microseconds of one call, over so many seconds of calls."""
    call(row)
    began, end, calls = time.perf_counter(), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for _ in range(50):
            call(row)
        calls += 50
    return (time.perf_counter() - began) / calls * 1e6


async def _trio_us(engine: AsyncEngine, row: Array, seconds: float) -> float:
    began, end, calls = time.perf_counter(), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        await _call_trio(engine, row, 50)
        calls += 50
    return (time.perf_counter() - began) / calls * 1e6


async def _call_trio(engine: AsyncEngine, row: Array, calls: int) -> None:
    for _ in range(calls):
        await engine.infer(NAME, {"X": row})
