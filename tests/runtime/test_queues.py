"""The queue for a model's configuration, checked by its behaviour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowserve.config.load import finish, read_draft
from flowserve.config.types import ModelConfig
from flowserve.errors import Unavailable
from flowserve.graph.plan import make_plan
from flowserve.runtime.workers.policies import batcher_for, keeps_order
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.queue import OVERTAKEN_MAX
from tests.support.recorder import simple_model
from tests.support.strategies import plain_graph

PLAN = make_plan(plain_graph(simple_model(0)))
TENSORS = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path


def config(folder: Path, batching: str, max_batch_size: int = 8) -> ModelConfig:
    (folder / "m" / "config.pbtxt").write_text(f"{TENSORS} max_batch_size: {max_batch_size}\n{batching}")
    return finish(read_draft(folder / "m", folder, {}), None)


def ticket(at: int = 0, rows: int = 1, priority: int = 0, timeout_ns: int = 0) -> Ticket:
    made = Ticket(request_frame(PLAN, (), [None], at, 0, None, None, priority, timeout_ns), PLAN.nodes[0], rows, None)
    made.queued_ns = at
    return made


@pytest.mark.parametrize(
    ("batching", "limit", "is_plain"),
    [
        ("", 8, True),
        ("dynamic_batching { }", 0, True),
        ("dynamic_batching { }", 8, True),
        ("dynamic_batching { preserve_ordering: true }", 8, True),
        ("dynamic_batching { default_queue_policy { allow_timeout_override: true } }", 8, True),
        ("dynamic_batching { default_queue_policy { timeout_action: DELAY } }", 8, True),
        ("dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 1 } } }", 8, True),
        ("dynamic_batching { default_queue_policy { max_queue_size: 1 } }", 8, False),
        ("dynamic_batching { default_queue_policy { max_queue_size: 1 } }", 0, False),
        ("dynamic_batching { default_queue_policy { default_timeout_microseconds: 1 } }", 8, False),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 1 }", 8, False),
    ],
)
def test_only_a_model_with_levels_limits_or_timeouts_has_a_queue_that_checks_them(
    folder: Path, batching: str, limit: int, is_plain: bool
) -> None:
    assert batcher_for(config(folder, batching, limit)).may_expire is not is_plain


@pytest.mark.parametrize(("batching", "limit"), [("", 8), ("dynamic_batching { }", 0), ("dynamic_batching { }", 8)])
def test_requests_are_batched_only_with_dynamic_batching_and_a_batch_dimension(
    folder: Path, batching: str, limit: int
) -> None:
    batcher = batcher_for(config(folder, batching, limit))
    for _ in range(3):
        batcher.put(ticket())
    assert len(batcher.take(None, 0) or ()) == (3 if batching and limit else 1)


def test_preserve_ordering_keeps_the_order_of_responses(folder: Path) -> None:
    assert keeps_order(config(folder, "dynamic_batching { preserve_ordering: true }"))
    assert keeps_order(config(folder, "dynamic_batching { preserve_ordering: true }", 0))
    assert not keeps_order(config(folder, "dynamic_batching { }"))
    assert not keeps_order(config(folder, ""))


def test_delays_and_timeouts_in_microseconds_become_nanoseconds(folder: Path) -> None:
    text = """dynamic_batching {
        preferred_batch_size: [ 6, 2 ]
        max_queue_delay_microseconds: 70
        default_queue_policy { default_timeout_microseconds: 50 allow_timeout_override: true max_queue_size: 2 }
    }"""
    batcher = batcher_for(config(folder, text))
    batcher.put(ticket())
    assert batcher.deadline() == 70_000
    assert batcher.expiry() == 50_000
    batcher.put(ticket(timeout_ns=30_000, rows=3))
    assert batcher.expiry() == 30_000
    with pytest.raises(Unavailable):
        batcher.put(ticket())
    batcher = batcher_for(config(folder, text))
    for one in (ticket(rows=2), ticket(rows=6)):
        batcher.put(one)
    assert [len(batcher.take(None, 0) or ()), len(batcher.take(None, 0) or ())] == [1, 1]  # 2 is preferred, and 6


def test_each_level_gets_its_own_policy_and_the_others_the_default(folder: Path) -> None:
    text = """dynamic_batching {
        priority_levels: 3
        default_priority_level: 3
        max_queue_delay_microseconds: 1000
        default_queue_policy { max_queue_size: 1 }
        priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } }
    }"""
    batcher = batcher_for(config(folder, text))
    urgent = [ticket(priority=1), ticket(priority=1)]
    for one in (*urgent, ticket(priority=2), ticket()):
        batcher.put(one)
    for priority in (2, 3, 0):
        with pytest.raises(Unavailable):
            batcher.put(ticket(priority=priority))
    assert batcher.expire(1000) == []  # behind new ones of their level
    later = ticket(at=2000, priority=1)
    batcher.put(later)
    assert (batcher.take(None, 1_000_000) or [])[:3] == [later, *urgent]


def test_a_model_without_a_batch_dimension_runs_single_requests_by_priority(folder: Path) -> None:
    text = "dynamic_batching { priority_levels: 2 default_priority_level: 2 max_queue_delay_microseconds: 1000000 }"
    batcher = batcher_for(config(folder, text, 0))
    low, high = ticket(), ticket(priority=1)
    batcher.put(low)
    batcher.put(high)
    assert batcher.take(None, 0) == [high]
    assert batcher.take(None, 0) == [low]


def test_the_examples_of_the_page_on_batching_work(root: Path, folder: Path) -> None:
    examples = re.findall(r"```pbtxt\n(.*?)```", (root / "docs/batching.md").read_text(), re.DOTALL)
    plain, preferring, limited, answered, levels, ordered = [
        config(folder, re.sub(r"max_batch_size: \d+\n", "", example)) for example in examples
    ]
    assert [batcher_for(one).may_expire for one in (plain, preferring, ordered, limited, levels)] == [False] * 3 + [
        True
    ] * 2
    assert answered.parameters["answer_at_timeout"] == "true"
    assert [keeps_order(one) for one in (plain, ordered)] == [False, True]
    queue = batcher_for(limited)
    for _ in range(64):
        queue.put(ticket())
    with pytest.raises(Unavailable, match="Exceeds maximum queue size: the queue of model 'a' has room for 64; try"):
        queue.put(ticket())
    assert queue.expiry() == 200_000_000


def test_the_page_on_batching_states_how_often_a_level_is_overtaken(root: Path) -> None:
    page = (root / "docs/batching.md").read_text()
    assert f"at most\n{OVERTAKEN_MAX} batches in a row" in page
    assert f"one batch in {OVERTAKEN_MAX + 1}" in page
