"""Models in processes leave half of a crowd to the next batch, where that is worth it and nobody said otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import trio

from flowserve.config.types import DynamicBatching
from flowserve.runtime import crowds
from flowserve.runtime.batchers import batcher_for
from flowserve.runtime.children import SUPPORTED
from flowserve.scheduling.batcher import DynamicBatcher
from flowserve.testing.backends import config_of
from flowserve.testing.engine import add_chain
from flowserve.testing.processes import OUT, ServedInProcesses, row

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

CROWD = 16


@pytest.fixture
def any_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "QUICK_NS", 1 << 60)  # however busy the machine is that runs this


async def executions(served: ServedInProcesses, name: str, asked: str) -> int:
    """How many batches one crowd that asks for `asked` was to the model `name`."""

    def count() -> int:
        executions: int = served.engine.statistics(name)[0]["execution_count"]
        return executions

    before = count()
    with trio.fail_after(20):
        answers = await served.ask_all(asked, [row(number) for number in range(CROWD)])
    more = 0 if asked == name else 1
    assert np.array_equal([*map(np.asarray, answers)], [row(2 * number + more) for number in range(CROWD)])
    return count() - before


async def serve(served: ServedInProcesses, body: str = "") -> None:
    await served.add("twice", body + OUT.format("given * 2"))
    await served.add("plus", OUT.format("given + 1"))
    add_chain(served.engine, "chain", ["twice", "plus"])


async def test_a_crowd_goes_through_an_ensemble_in_halves(served: ServedInProcesses, any_is_quick: None) -> None:
    await serve(served)
    assert await executions(served, "twice", "chain") == 2


async def test_a_crowd_goes_through_a_model_as_one_batch(served: ServedInProcesses, any_is_quick: None) -> None:
    await serve(served)
    assert await executions(served, "twice", "twice") == 1


async def test_a_model_that_takes_long_is_not_asked_twice(served: ServedInProcesses) -> None:
    await serve(served, "        import time\n        time.sleep(0.001)\n")
    for _ in range(3):
        assert await executions(served, "twice", "chain") == 1


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
    crowds.share(batcher, [], lambda: CROWD)
    assert (isinstance(batcher, DynamicBatcher) and batcher.crowd is not None) == is_shared
