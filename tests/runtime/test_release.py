"""When a server releases idle memory: while there is some; an idle server without such memory is not woken."""

from __future__ import annotations

import math
import time

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from flowserve.memory.pool import HOST
from flowserve.runtime.clock import running_clock
from flowserve.runtime.release import SWEEP_S, MemoryRelease


def next_wake_up_s() -> float:
    return trio.lowlevel.current_statistics().seconds_to_next_deadline


async def until_never_woken() -> None:
    """Wait until no task waits for a time. Checked several times, because the test clock does not know of running
    threads.
    """
    deadline, times = time.monotonic() + 20, 0
    while times < 5:
        assert time.monotonic() < deadline
        await trio.to_thread.run_sync(time.sleep, 0.01)
        await wait_all_tasks_blocked()
        times = times + 1 if next_wake_up_s() == math.inf else 0


@pytest.mark.fault("W8")
async def test_memory_is_released_after_a_burst_and_an_idle_server_is_not_woken(autojump_clock: MockClock) -> None:
    HOST.take_idle(0)
    release = MemoryRelease(running_clock(), lambda: (), lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(release.run)
        await wait_all_tasks_blocked()
        assert next_wake_up_s() == math.inf
        burst = [HOST.take(1_000_000) for _ in range(20)]
        for array in burst:
            array[...] = 1
        del burst, array
        began = trio.current_time()
        assert release.awaits_activity
        release.note_activity()
        assert not release.awaits_activity  # a step does no work for the rest of the period
        await wait_all_tasks_blocked()
        assert release.awaits_activity
        assert next_wake_up_s() <= SWEEP_S + 0.01
        while HOST.kept_bytes:  # noqa: ASYNC110
            await trio.sleep(0.1)
        assert trio.current_time() - began >= 10  # more if the test clock jumps while memory is returned
        # Releasing stops by itself, and begins again with the next activity.
        await until_never_woken()
        release.note_activity()
        await wait_all_tasks_blocked()
        assert next_wake_up_s() <= SWEEP_S + 0.01
        nursery.cancel_scope.cancel()


async def test_a_failure_to_release_memory_is_logged_and_does_not_end_the_server(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail() -> tuple[()]:
        calls.append(trio.current_time())
        raise RuntimeError("a slip")

    release = MemoryRelease(running_clock(), fail, lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(release.run)
        for count in (1, 2):
            release.note_activity()
            await trio.sleep(2 * SWEEP_S)
            assert len(calls) == count
        nursery.cancel_scope.cancel()
    assert "a slip" in caplog.text
