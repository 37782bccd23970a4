"""Order of responses, timeouts and priorities on a running loop: decisions wake the waiting tasks in their order."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import Unavailable
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.scheduling.queue import BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.values import Array, Request
from tests.support.engine import add_chain, add_function


def request(engine: Engine, value: float, priority: int = 0, timeout_us: int = 0) -> Request:
    array = np.full((1, 4), value, np.float32)
    return Request({"IN": array}, priority=priority, timeout_us=timeout_us, stamp=engine.next_stamp())


class Blocker:
    """A model that returns 0 only when it is released, and other values at once."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self, array: Array) -> Array:
        assert array[0, 0] != 0 or self._open.wait(10)
        return array

    def open(self) -> None:
        self._open.set()


@pytest.mark.fault("D11")
async def test_waiting_tasks_resume_in_the_order_of_their_requests() -> None:
    async with open_engine(EngineOptions()) as engine:
        blocker = Blocker()
        add_function(
            engine, "ordered", [blocker, blocker], batcher=Queue(BatchPolicy.single()), inline=False, keeps_order=True
        )
        add_chain(engine, "pipe", ["ordered"])
        received: list[float] = []

        async def ask(value: float) -> None:
            name = "pipe" if value % 2 else "ordered"
            response = await engine.infer(engine.deployments.find(name), request(engine, value))
            received.append(float(response.outputs["OUT"][0, 0]))

        async with trio.open_nursery() as nursery:
            for value in range(20):
                nursery.start_soon(ask, float(value))
                await wait_all_tasks_blocked()  # one after the other, for a known order
            assert received == []
            blocker.open()
        assert received == [float(value) for value in range(20)]


async def test_a_caller_cancelled_while_it_waits_for_its_wakeup_affects_no_other() -> None:
    async with open_engine(EngineOptions()) as engine:
        add_function(engine, "ordered", [lambda array: array], keeps_order=True)
        deployment = engine.deployments.find("ordered")
        received: list[float] = []

        async def ask(value: float, scope: trio.CancelScope) -> None:
            with scope:
                await engine.infer(deployment, request(engine, value))
                received.append(value)

        scopes = [trio.CancelScope() for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for value, scope in enumerate(scopes):
                nursery.start_soon(ask, float(value), scope)
            await wait_all_tasks_blocked(0.0)
        assert sorted(received) == [float(value) for value in range(8)]
        async with trio.open_nursery() as nursery:
            for value, scope in enumerate(scopes := [trio.CancelScope() for _ in range(8)]):
                nursery.start_soon(ask, float(value), scope)
            for _ in range(4):  # the first few have continued by then; the others wait for their wake-up
                await trio.lowlevel.checkpoint()
            for scope in scopes:
                scope.cancel()
        await wait_all_tasks_blocked()
        assert engine.scheduler.in_flight == 0
        engine.scheduler.check()


@pytest.mark.fault("D2")
async def test_a_timeout_ends_the_waiting_of_a_request_while_its_instance_is_busy() -> None:
    async with open_engine(EngineOptions()) as engine:
        blocker = Blocker()
        levels = Levels(policy=LevelPolicy(timeout_ns=60_000_000_000, may_override=True))
        add_function(engine, "hasty", [blocker], batcher=Queue(BatchPolicy.simple(1), levels), inline=False)
        deployment = engine.deployments.find("hasty")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.infer, deployment, request(engine, 0.0))
            await wait_all_tasks_blocked()
            began = time.monotonic()
            with pytest.raises(Unavailable, match="Request timeout expired: it waited"):
                await engine.infer(deployment, request(engine, 1.0, timeout_us=30_000))
            assert 0.03 <= time.monotonic() - began < 5
            blocker.open()
        assert deployment.statistics.failures["REJECTED"] == 1
        assert engine.deployments.statistics("hasty")[0]["inference_stats"]["success"]["count"] == 1


async def test_a_request_takes_its_priority_through_every_step() -> None:
    async with open_engine(EngineOptions()) as engine:
        blocker = Blocker()
        levels = Queue(BatchPolicy.simple(1), Levels(2, 2))
        add_function(engine, "first", [lambda array: array])
        add_function(engine, "urgent", [blocker], batcher=levels, inline=False)
        add_chain(engine, "pipe", ["first", "urgent"])
        received: list[float] = []

        async def ask(value: float, priority: int) -> None:
            response = await engine.infer(engine.deployments.find("pipe"), request(engine, value, priority))
            received.append(float(response.outputs["OUT"][0, 0]))

        async with trio.open_nursery() as nursery:
            for value, priority in ((0.0, 0), (1.0, 0), (2.0, 2), (3.0, 1)):
                nursery.start_soon(ask, value, priority)
                await wait_all_tasks_blocked()
            blocker.open()
        assert received == [0.0, 3.0, 1.0, 2.0]


@pytest.mark.fault("D12")
async def test_a_batch_that_is_preferred_after_a_cancellation_starts_at_once() -> None:
    async with open_engine(EngineOptions()) as engine:
        policy = BatchPolicy(16, (2, 6), 3600_000_000_000)
        (instance,) = add_function(engine, "prefers", [lambda array: array], batcher=Queue(policy))
        deployment = engine.deployments.find("prefers")
        leaver = trio.CancelScope()

        async def ask_and_leave() -> None:
            with leaver:
                await engine.infer(deployment, request(engine, 1.0))

        two_rows = Request({"IN": np.ones((2, 4), np.float32)}, stamp=1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_and_leave)
            await wait_all_tasks_blocked()
            nursery.start_soon(engine.infer, deployment, two_rows)
            await wait_all_tasks_blocked()
            leaver.cancel()
        assert instance.batches == [[2]]
        assert deployment.statistics.failures["CANCELED"] == 1


async def test_a_cancelled_step_is_counted_by_the_model_of_its_queue() -> None:
    async with open_engine(EngineOptions()) as engine:
        waits = Queue(BatchPolicy.simple(16, 3600_000_000_000))
        add_function(engine, "first", [lambda array: array])
        add_function(engine, "second", [lambda array: array], batcher=waits)
        add_chain(engine, "pipe", ["first", "second"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.infer, engine.deployments.find("pipe"), request(engine, 1.0))
            await wait_all_tasks_blocked()
            assert sum(queue.waiting for queue in engine.scheduler.models.queues) == 1
            nursery.cancel_scope.cancel()
        assert engine.deployments.find("second").statistics.failures["CANCELED"] == 1
        assert engine.deployments.find("first").statistics.failures["CANCELED"] == 0
        assert engine.deployments.find("pipe").statistics.failures["CANCELED"] == 1


async def test_a_step_refused_because_no_instance_is_left_is_counted_by_its_model() -> None:
    async with open_engine(EngineOptions()) as engine:
        waits = Queue(BatchPolicy.simple(16, 3600_000_000_000))
        add_function(engine, "first", [lambda array: array])
        add_function(engine, "second", [lambda array: array], batcher=waits)
        add_chain(engine, "pipe", ["first", "second"])

        async def ask(name: str) -> None:
            with pytest.raises(Unavailable, match="it is down"):
                await engine.infer(engine.deployments.find(name), request(engine, 1.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "second")
            nursery.start_soon(ask, "pipe")
            await wait_all_tasks_blocked()
            (queue,) = engine.deployments.find("second").queues
            engine.scheduler.close(queue, "it is down")
            engine.loop.wake()
        assert engine.deployments.find("second").statistics.failures == {
            "REJECTED": 2,
            "CANCELED": 0,
            "BACKEND": 0,
            "OTHER": 0,
        }
        assert engine.deployments.find("pipe").statistics.failures["OTHER"] == 1
