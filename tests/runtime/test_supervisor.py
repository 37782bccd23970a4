"""Restarts of instances after the end of their process, the outage reported meanwhile, and the execution timeout.

Trio's `autojump_clock` jumps when no task can run; it does not know that a worker thread is busy. While a thread may be
busy, these tests wait for its result, never for a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from flowserve.errors import ModelFailed
from flowserve.runtime.clock import ClockNs, running_clock
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Completions, WorkerContext
from flowserve.runtime.workers.supervisor import DELAYS, Supervisor, WarmUp
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, ClosedQueue, Queue
from flowserve.scheduling.scheduler import Scheduler
from tests.support.recorder import simple_model


@dataclass(eq=False)
class Actor:
    """A fake instance in a process: fails to open and ends as the test requests."""

    name: str
    clock: ClockNs
    failures: int = 0
    opened_s: list[float] = field(default_factory=list)
    before_opening: Any = lambda: None
    killed: list[tuple[float, str]] = field(default_factory=list)
    running: Batch | None = None
    has_answered: bool = False
    ended: str = ""
    on_end: Any = None
    depth: int = 1

    def open(self, context: WorkerContext) -> None:
        self.opened_s.append(self.clock() / 1e9)
        self.before_opening()
        if self.failures:
            self.failures -= 1
            raise ModelFailed("no weights today")
        self.ended = ""

    def end(self, how: str = "it died") -> None:
        self.ended, self.running = how, None
        if self.on_end is not None:
            self.on_end()

    def kill(self, why: str) -> None:
        self.killed.append((self.clock() / 1e9, why))
        self.end(why)


@dataclass
class Stage:
    supervisor: Supervisor
    stepped: trio.Event
    scheduler: Scheduler
    queue: ModelQueue
    actors: list[Actor]

    @property
    def outage(self) -> str:
        return self.supervisor.outage([self.queue])

    @property
    def is_closed(self) -> bool:
        return isinstance(self.queue.batcher, ClosedQueue)


@asynccontextmanager
async def stage(instances: int = 1, timeout_s: float = 0, warm_up: WarmUp | None = None) -> AsyncIterator[Stage]:
    clock = running_clock()
    scheduler = Scheduler()
    actors = [Actor(f"a_{number}", clock) for number in range(instances)]
    queue = ModelQueue(simple_model(0).key, Queue(BatchPolicy.single()), actors)
    scheduler.add(queue)
    scene: Stage

    def step() -> None:
        scheduler.schedule(clock())
        scene.stepped.set()

    token = trio.lowlevel.current_trio_token()
    context = WorkerContext(token, clock, Completions(token, step), step, lambda batch, stages: None)
    supervisor = Supervisor(scheduler, context, DELAYS)
    scene = Stage(supervisor, trio.Event(), scheduler, queue, actors)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        supervisor.watch(queue, cast("list[RemoteWorker]", actors), round(timeout_s * 1e9), warm_up)
        yield scene
        scheduler.check()
        nursery.cancel_scope.cancel()


async def until_back(scene: Stage) -> None:
    while scene.queue.away:
        scene.stepped = trio.Event()
        await scene.stepped.wait()


@pytest.mark.fault("R4")
async def test_an_instance_that_cannot_be_opened_is_retried_with_growing_delays_and_reported(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage() as scene:
        (actor,) = scene.actors
        actor.failures = 10
        seen: list[tuple[str, bool]] = []
        actor.before_opening = lambda: seen.append((scene.outage, scene.is_closed))
        actor.end("it was killed")
        await until_back(scene)
        since = [0.0, *actor.opened_s]
        delays = [round(later - before, 3) for before, later in pairwise(since)]
        assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
        assert scene.outage == ""
        assert not scene.is_closed
    # Requests wait for a start that is at most a second away.
    assert [is_closed for _, is_closed in seen] == [False] * 4 + [True] * 7
    assert seen[0][0] == "it was killed; it is started again after 0.1 s"
    assert seen[1][0] == "no weights today, 2 times in a row; it is started again after 0.2 s"
    assert seen[10][0] == "no weights today, 11 times in a row; it is started again after 30 s"
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged == [outage for outage, _ in seen]


async def test_a_model_is_up_while_any_of_its_instances_is(autojump_clock: MockClock) -> None:
    async with stage(2) as scene:
        first, second = scene.actors
        first.end("first")
        assert scene.outage == ""
        second.end("second")
        assert scene.outage == "second; it is started again after 0.1 s"
        await until_back(scene)
        assert scene.outage == ""
        assert first.opened_s == second.opened_s == [0.1]


async def test_a_queue_stays_open_for_the_instance_that_is_left(autojump_clock: MockClock) -> None:
    async with stage(2) as scene:
        first, _ = scene.actors
        first.failures = 8
        seen: list[bool] = []
        first.before_opening = lambda: seen.append(scene.is_closed)
        first.end()
        await until_back(scene)
        assert seen == [False] * 9


async def test_an_instance_that_lived_long_is_restarted_soon(autojump_clock: MockClock) -> None:
    async with stage() as scene:
        (actor,) = scene.actors
        for _ in range(4):
            actor.end()
            await until_back(scene)
        began = trio.current_time()
        actor.end()
        await until_back(scene)
        assert round(trio.current_time() - began, 3) == 1.6
        await trio.sleep(10)
        actor.end()
        assert scene.outage == "it died; it is started again after 0.1 s"
        await until_back(scene)


@pytest.mark.fault("W9")
@pytest.mark.parametrize("answers", [True, False])
async def test_an_instance_that_was_healthy_before_each_of_eight_kills_is_back_within_a_second(
    autojump_clock: MockClock, answers: bool
) -> None:
    async with stage() as scene:
        (actor,) = scene.actors
        took_s = []
        for _ in range(8):
            if answers:
                actor.has_answered = True  # soon after its start
            else:
                await trio.sleep(1)
            began = trio.current_time()
            actor.end()
            assert not scene.is_closed
            await until_back(scene)
            took_s.append(round(trio.current_time() - began, 3))
        assert took_s == [0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8]
        # The responses of the last process do not count for the next one.
        for delay_s in (1.6, 3.2):
            began = trio.current_time()
            actor.end()
            await until_back(scene)
            assert round(trio.current_time() - began, 3) == delay_s


async def test_a_released_instance_is_not_restarted(autojump_clock: MockClock) -> None:
    async with stage(2) as scene:
        first, second = scene.actors
        first.end()
        scene.supervisor.release(scene.queue)
        second.end()
        await trio.sleep(100)
        assert first.opened_s == second.opened_s == []
        assert scene.outage == ""


async def test_an_instance_that_ended_before_it_was_watched_is_restarted(autojump_clock: MockClock) -> None:
    async with stage() as scene:
        scene.supervisor.release(scene.queue)
        (actor,) = scene.actors
        actor.ended = "it was early"
        scene.supervisor.watch(scene.queue, cast("list[RemoteWorker]", scene.actors))
        assert scene.outage.startswith("it was early")
        await until_back(scene)


@pytest.mark.fault("R5")
async def test_a_batch_is_ended_when_its_time_is_over_and_not_before(autojump_clock: MockClock) -> None:
    async with stage(timeout_s=2) as scene:
        (actor,) = scene.actors
        now_ns = running_clock()
        for begins_s, lasts_s in ((0.5, 1.9), (3.0, 1.0), (4.1, 1.99)):
            await trio.sleep_until(begins_s)
            actor.running = Batch(scene.queue, actor, [], now_ns())
            await trio.sleep(lasts_s)
            actor.running = None
        assert actor.killed == []
        await trio.sleep_until(7.3)
        actor.running = Batch(scene.queue, actor, [], now_ns())
        await trio.sleep_until(9.2)
        assert actor.killed == []
        await trio.sleep_until(9.35)
        text = "its process was killed, because an execution took longer than 2 s (parameter execution_timeout)"
        ((at_s, why),) = actor.killed
        assert (round(at_s, 3), why) == (9.3, text)
        await until_back(scene)


@pytest.mark.parametrize("error", [ModelFailed, RuntimeError], ids=["the model's", "ours"])
async def test_an_instance_that_is_started_again_is_warmed_up_before_it_serves(
    autojump_clock: MockClock, error: type[Exception]
) -> None:
    """An instance whose warm-up fails is not available and is restarted."""
    warmed: list[str] = []

    async def warm_up(actor: Actor) -> None:
        assert actor in scene.queue.away
        warmed.append(actor.name)
        if len(warmed) == 1:
            raise error("failed to run warmup sample 's': cold")

    async with stage(warm_up=warm_up) as scene:
        (actor,) = scene.actors
        actor.end()
        assert not warmed, "the first start's was the loader's"
        await until_back(scene)
        assert warmed == ["a_0", "a_0"]
        assert len(actor.opened_s) == 2
        assert [why for _, why in actor.killed] == ["its process was killed: failed to run warmup sample 's': cold"]
