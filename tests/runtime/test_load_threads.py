"""Models that are loaded at the same time, and some among them that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio

from flowserve.runtime.loading.loader import LoadThreads


async def test_concurrent_loads_are_limited_and_hanging_ones_stop_counting() -> None:
    threads = LoadThreads(at_once=2, patience_s=0.2)
    goes_on = threading.Event()
    begun: list[str] = []

    def load(name: str, *, hangs: bool = False) -> Callable[[], str]:
        def work() -> str:
            begun.append(name)
            if hangs:
                goes_on.wait(30)
            return name

        return work

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(threads.run, load(f"hangs {number}", hangs=True))
            await trio.sleep(0.05)
            late = trio.current_time()
            assert await threads.run(load("another")) == "another"
            assert 0.05 < trio.current_time() - late < 5, "it waited for its turn, and not for them"
            assert len(begun) == 3
            for number in range(4):
                assert await threads.run(load(f"{number}")) == f"{number}"
            goes_on.set()


async def test_a_load_error_is_raised_unchanged_and_a_cancelled_load_leaves_the_queue() -> None:
    threads = LoadThreads(at_once=1, patience_s=60)

    def fail() -> None:
        raise ValueError("no weights")

    goes_on = threading.Event()
    with trio.fail_after(20):
        with pytest.raises(ValueError, match="no weights"):
            await threads.run(fail)
        with trio.move_on_after(0.05):
            await threads.run(lambda: goes_on.wait(30))
        assert await threads.run(lambda: "the next") == "the next"
    goes_on.set()
