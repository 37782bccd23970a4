"""Workers in the server's own process, through a real engine."""

from __future__ import annotations

import threading

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.workers.local import Placement
from flowserve.values import Array, Request
from tests.support.engine import add_chain, add_function


async def ask(engine: Engine, name: str, answers: list[float]) -> None:
    request = Request({"IN": np.ones((1, 4), np.float32)}, stamp=engine.next_stamp())
    response = await engine.infer(engine.deployments.find(name), request)
    answers.append(float(response.outputs["OUT"][0, 0]))


async def test_batch_on_thread_does_not_hold_instance_of_later_stage() -> None:
    gate = threading.Event()

    def wait(array: Array) -> Array:
        assert gate.wait(10)
        return array * 3

    async with open_engine(EngineOptions()) as engine, trio.open_nursery() as nursery:
        add_function(engine, "first", [wait], inline=False, placement=Placement())  # on its thread, unless it is fast
        add_function(engine, "second", [lambda array: array * 2])
        add_chain(engine, "chain", ["first", "second"])
        answers: list[float] = []
        nursery.start_soon(ask, engine, "chain", answers)
        await wait_all_tasks_blocked()
        try:
            with trio.fail_after(1):
                await ask(engine, "second", answers)
            assert answers == [2]
        finally:
            gate.set()
    assert answers == [2, 6]
