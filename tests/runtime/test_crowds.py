"""Models in processes leave half of a crowd to the next batch, where that is worth it and nobody said otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.config.types import DynamicBatching
from flowserve.runtime import crowds
from flowserve.runtime.batchers import batcher_for
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.crowds import RequestPace, processors
from flowserve.scheduling.batcher import DynamicBatcher
from flowserve.testing.backends import config_of
from flowserve.testing.engine import add_chain, add_function
from flowserve.testing.processes import OUT, ServedInProcesses, row

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

LIMIT = 64


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "processors", lambda: 2.0)  # whatever the machine has that runs this


@pytest.fixture
def any_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "QUICK_NS", 1 << 40)  # however busy the machine is that runs this


async def batches(served: ServedInProcesses, crowd: int, asked: str = "chain") -> dict[int, int]:
    """The sizes of the batches that one crowd was to the model "twice", and how many had each."""

    def counted() -> dict[int, int]:
        return {
            one["batch_size"]: one["compute_infer"]["count"]
            for one in served.engine.statistics("twice")[0]["batch_stats"]
        }

    before = counted()
    with trio.fail_after(20):
        answers = await served.ask_all(asked, [row(number) for number in range(crowd)])
    more = int(asked == "chain")
    assert np.array_equal([*map(np.asarray, answers)], [row(2 * number + more) for number in range(crowd)])
    new = {size: count - before.get(size, 0) for size, count in counted().items()}
    return {size: count for size, count in new.items() if count}


async def serve(served: ServedInProcesses, body: str = "") -> None:
    await served.add("twice", body + OUT.format("given * 2"), limit=LIMIT)
    await served.add("plus", OUT.format("given + 1"), limit=LIMIT)
    add_chain(served.engine, "chain", ["twice", "plus"])


async def test_a_crowd_goes_through_an_ensemble_in_halves(served: ServedInProcesses, any_is_quick: None) -> None:
    await serve(served)
    assert await batches(served, 24) == {24: 1}  # nobody knows yet how quick it is
    assert await batches(served, 24) == {12: 2}
    assert await batches(served, 40) == {20: 2}
    assert await batches(served, 8) == {8: 1}


async def test_a_crowd_goes_through_a_model_as_one_batch(served: ServedInProcesses, any_is_quick: None) -> None:
    await serve(served)
    for _ in range(3):
        assert await batches(served, 24, "twice") == {24: 1}


async def test_a_model_that_takes_long_is_not_asked_twice(served: ServedInProcesses) -> None:
    await serve(served, "        import time\n        time.sleep(0.001)\n")
    for _ in range(3):
        assert await batches(served, 24) == {24: 1}


async def test_on_one_processor_everybody_goes_together(
    served: ServedInProcesses, any_is_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowds, "processors", lambda: 1.0)
    await serve(served)
    for _ in range(3):
        assert await batches(served, 24) == {24: 1}


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 4), ("100000 100000", 1), ("150000 100000", 1.5), ("900000 100000", 4), ("", 4)]
)
def test_a_container_has_no_more_processors_than_its_quota(
    quota: str, count: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(crowds, "QUOTA", tmp_path / "cpu.max")
    assert processors() == 4
    crowds.QUOTA.write_text(quota)
    assert processors() == count


async def test_steps_on_the_loop_take_everybody(served: ServedInProcesses, any_is_quick: None) -> None:
    add_function(served.engine, "twice", [lambda x: x * 2], dims=(64,), max_batch_size=LIMIT)
    add_function(served.engine, "plus", [lambda x: x + 1], dims=(64,), max_batch_size=LIMIT)
    add_chain(served.engine, "chain", ["twice", "plus"])
    for _ in range(3):
        assert await batches(served, 24) == {24: 1}


def test_a_model_is_quick_that_takes_fifty_microseconds_for_each_request_lately() -> None:
    pace = RequestPace()
    assert not pace.is_quick
    pace.took(16 * 50_000, 16)
    assert pace.is_quick
    pace.took(10_000_000, 2)  # a small batch says nothing
    assert pace.is_quick
    pace.took(32 * 60_000, 32)
    assert not pace.is_quick
    for _ in range(20):
        pace.took(8 * 45_000, 8)
    assert pace.is_quick


@pytest.mark.parametrize(
    ("batching", "is_shared"),
    [
        (DynamicBatching(), True),
        (DynamicBatching(preferred_batch_sizes=(4,)), False),
        (DynamicBatching(max_queue_delay_us=100), False),
        (DynamicBatching(priority_levels=2, default_priority_level=1), False),
        (None, False),
    ],
)
def test_whoever_says_which_batches_are_wanted_gets_those(batching: DynamicBatching | None, is_shared: bool) -> None:
    config = replace(config_of(max_batch_size=16), dynamic_batching=batching)
    batcher = batcher_for(config)
    crowds.share(batcher, [], lambda: 24)
    assert (isinstance(batcher, DynamicBatcher) and batcher.crowd is not None) == is_shared
