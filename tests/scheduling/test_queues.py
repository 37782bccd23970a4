"""Order within a queue, refusals and timeouts: timelines, and Triton's numbers (3.5)."""

from __future__ import annotations

import pytest

from flowserve.errors import Unavailable
from flowserve.graph.plan import make_plan
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.queue import OVERTAKEN_MAX, BatchPolicy, Deadlines, LevelPolicy, Levels, Queue
from tests.support.recorder import rows_of, simple_model
from tests.support.strategies import plain_graph

MS = 1_000_000
SECOND = 1000 * MS
PLAN = make_plan(plain_graph(simple_model(0)))


def ticket(rows: int = 1, at: int = 0, priority: int = 0, timeout: int = 0, key: str = "") -> Ticket:
    frame = request_frame(PLAN, (), [rows_of(rows)], at, 0, None, None, priority, timeout)
    made = Ticket(frame, PLAN.nodes[0], rows, key)
    made.queued_ns = at
    return made


def queue_of(policy: LevelPolicy, preferred: tuple[int, ...] = (4, 8), delay: int = 0) -> Queue:
    """A queue with one level of this policy."""
    return Queue(BatchPolicy(8, preferred, delay), Levels(policy=policy))


def put(batcher: Queue, *tickets: Ticket) -> list[Ticket]:
    for one in tickets:
        batcher.put(one)
        batcher.check()
    return list(tickets)


def everything(batcher: Queue, at: int) -> list[list[Ticket]]:
    """The batches that leave at this time."""
    batches = []
    while batch := batcher.take(None, at):
        batches.append(batch)
        batcher.check()
    return batches


# ---------------------------------------------------------------------------------------------------- Triton's numbers


def test_a_queue_of_eight_refuses_two_of_ten_requests() -> None:
    batcher = queue_of(LevelPolicy(max_size=8), delay=10 * SECOND)
    put(batcher, *(ticket() for _ in range(8)))
    for _ in range(2):
        with pytest.raises(Unavailable, match="Exceeds maximum queue size: the queue of model 'a' has room for 8"):
            batcher.put(ticket())
    assert len(batcher) == 8


def test_a_delayed_request_waits_for_the_whole_queue_delay_while_later_ones_leave() -> None:
    batcher = queue_of(LevelPolicy(timeout_ns=100 * MS, is_delayed=True), delay=10 * SECOND)
    (first,) = put(batcher, ticket())
    assert batcher.take(None, 0) is None
    assert batcher.expiry() == 100 * MS
    assert not batcher.expire(100 * MS)
    assert batcher.take(None, 100 * MS) is None
    assert batcher.expiry() is None  # it has no second timeout
    later = put(batcher, ticket(rows=2, at=200 * MS), ticket(rows=2, at=200 * MS))
    assert everything(batcher, 200 * MS) == [later]
    assert batcher.deadline() == 10 * SECOND
    assert everything(batcher, 10 * SECOND - 1) == []
    assert everything(batcher, 10 * SECOND) == [[first]]


def test_a_smaller_timeout_of_a_request_applies_and_a_larger_one_does_not() -> None:
    batcher = queue_of(LevelPolicy(timeout_ns=SECOND, may_override=True), delay=10 * SECOND)
    hasty, patient, silent = put(batcher, ticket(timeout=100 * MS), ticket(timeout=10 * SECOND), ticket(timeout=0))
    assert batcher.expire(100 * MS - 1) == []
    assert batcher.expire(100 * MS) == [hasty]
    assert batcher.expire(SECOND - 1) == []
    assert batcher.expire(SECOND) == [patient, silent]
    assert len(batcher) == 0


def test_a_timeout_of_a_request_has_no_effect_without_a_default() -> None:
    batcher = queue_of(LevelPolicy(may_override=True), delay=10 * SECOND)
    put(batcher, ticket(timeout=100 * MS), ticket(timeout=0))
    assert batcher.expire(9 * SECOND) == []
    assert len(batcher) == 2


@pytest.mark.fault("D4")
def test_a_timeout_of_a_request_is_ignored_without_override() -> None:
    batcher = queue_of(LevelPolicy(timeout_ns=SECOND, may_override=False), delay=10 * SECOND)
    put(batcher, ticket(timeout=100 * MS))
    assert batcher.expire(SECOND - 1) == []
    assert len(batcher) == 1


def test_two_levels_share_a_batch_and_the_higher_comes_first() -> None:
    batcher = Queue(BatchPolicy(8, (4, 8), 10 * SECOND), Levels(2, 2))
    low = put(batcher, *(ticket() for _ in range(3)))
    assert batcher.take(None, 0) is None
    (high,) = put(batcher, ticket(priority=1))
    assert everything(batcher, 0) == [[high, *low]]


def test_each_level_has_its_own_policy() -> None:
    levels = Levels(2, 2, LevelPolicy(timeout_ns=100 * MS), {1: LevelPolicy(timeout_ns=SECOND, is_delayed=True)})
    batcher = Queue(BatchPolicy(8, (8,), 10 * SECOND), levels)
    high, low = put(batcher, ticket(priority=1), ticket())
    assert batcher.expire(100 * MS) == [low]
    assert batcher.expire(SECOND) == []
    assert everything(batcher, 10 * SECOND) == [[high]]


# -------------------------------------------------------------------------------------------------------------- levels


@pytest.mark.fault("D8")
@pytest.mark.parametrize(("priority", "level"), [(0, 2), (1, 1), (3, 3), (4, 2), (1 << 63, 2), (-1, 2)])
def test_a_priority_that_is_no_level_means_the_default_level(priority: int, level: int) -> None:
    batcher = Queue(BatchPolicy.simple(1), Levels(3, 2))
    in_order = [put(batcher, ticket(priority=p))[0] for p in (1, 2, 3)]
    (asked,) = put(batcher, ticket(priority=priority))
    in_order.insert(level, asked)  # behind the existing one of that level
    assert [batch[0] for batch in everything(batcher, 0)] == in_order


def test_without_levels_priorities_mean_nothing() -> None:
    batcher = queue_of(LevelPolicy(max_size=9), preferred=(8,))
    in_order = put(batcher, ticket(priority=2), ticket(priority=1), ticket())
    assert batcher.take(None, 0) == in_order


def test_billions_of_levels_use_no_memory() -> None:
    batcher = Queue(BatchPolicy.simple(2), Levels(1 << 62, 1 << 61))
    low, high = put(batcher, ticket(priority=1 << 62), ticket(priority=1))
    assert batcher.take(None, 0) == [high, low]


def test_a_request_of_higher_priority_with_another_key_leaves_first() -> None:
    batcher = Queue(BatchPolicy(8, (4, 8), 10 * SECOND), Levels(2, 2))
    low = put(batcher, ticket(key="x"), ticket(key="x"))
    (high,) = put(batcher, ticket(priority=1, key="y"))
    assert everything(batcher, 0) == [
        [high]
    ]  # another key closes its batch at once; the requests behind it wait for a larger one
    assert everything(batcher, 10 * SECOND) == [low]


def test_the_delay_counts_from_the_oldest_request_of_all_levels() -> None:
    batcher = Queue(BatchPolicy(8, (8,), 100), Levels(2, 2))
    (low,) = put(batcher, ticket(at=0))
    (high,) = put(batcher, ticket(at=60, priority=1))
    assert batcher.deadline() == 100
    assert everything(batcher, 99) == []
    assert everything(batcher, 100) == [[high, low]]


@pytest.mark.fault("D3")
def test_delayed_requests_come_after_their_own_level_and_before_the_next() -> None:
    delays = LevelPolicy(timeout_ns=10, is_delayed=True)
    batcher = Queue(BatchPolicy.simple(1), Levels(2, 2, LevelPolicy(), {1: delays}))
    delayed, again = put(batcher, ticket(priority=1, at=0), ticket(priority=1, at=1))
    (low,) = put(batcher, ticket(at=2))
    assert batcher.expire(11) == []
    (live,) = put(batcher, ticket(priority=1, at=20))
    assert everything(batcher, 25) == [[live], [delayed], [again], [low]]


def test_delayed_requests_that_arrived_together_keep_their_order_of_arrival() -> None:
    batcher = queue_of(LevelPolicy(timeout_ns=10, may_override=True, is_delayed=True), preferred=(1,))
    patient, hasty, last = put(batcher, ticket(timeout=9), ticket(timeout=3), ticket(timeout=6))
    assert batcher.expire(9) == []
    assert [one for batch in everything(batcher, 9) for one in batch] == [patient, hasty, last]


def test_delayed_requests_count_towards_the_queue_size() -> None:
    batcher = queue_of(LevelPolicy(max_size=2, timeout_ns=10, is_delayed=True), delay=SECOND)
    put(batcher, ticket())
    assert batcher.expire(10) == []
    put(batcher, ticket(at=10))
    with pytest.raises(Unavailable, match="has room for 2"):
        batcher.put(ticket(at=10))


def test_a_full_level_refuses_no_request_of_another() -> None:
    batcher = Queue(BatchPolicy.simple(8), Levels(2, 2, LevelPolicy(max_size=1)))
    put(batcher, ticket(priority=1), ticket(priority=2))
    with pytest.raises(Unavailable, match="priority level 2 of model 'a' has room for 1"):
        batcher.put(ticket())


def test_requests_are_counted_and_not_rows() -> None:
    batcher = queue_of(LevelPolicy(max_size=2))
    put(batcher, ticket(rows=8), ticket(rows=8))
    with pytest.raises(Unavailable):
        batcher.put(ticket())


def test_a_withdrawn_request_frees_its_place_and_its_deadline() -> None:
    batcher = queue_of(LevelPolicy(max_size=1, timeout_ns=100), delay=SECOND)
    (cancelled,) = put(batcher, ticket())
    assert batcher.withdraw(cancelled.frame) == 1
    assert batcher.expiry() is None
    assert batcher.deadline() is None
    put(batcher, ticket(at=50))
    assert batcher.expiry() == 150


# ---------------------------------------------------------------------------------------------------------- starvation


@pytest.mark.fault("D8")
def test_a_lower_level_is_overtaken_a_bounded_number_of_times() -> None:
    batcher = Queue(BatchPolicy.simple(2), Levels(2, 2))
    low = put(batcher, *(ticket() for _ in range(3)))
    led = []
    for _ in range(2 * OVERTAKEN_MAX + 3):
        put(batcher, ticket(priority=1), ticket(priority=1))
        batch = batcher.take(None, 0)
        assert batch is not None
        led.append(batch[0] in low)
    assert [n for n, is_low in enumerate(led) if is_low] == [OVERTAKEN_MAX, 2 * OVERTAKEN_MAX + 1]


@pytest.mark.fault("D8")
def test_every_level_leads_a_batch_after_a_bounded_wait() -> None:
    batcher = Queue(BatchPolicy.simple(1), Levels(4, 4))
    put(batcher, *(ticket(priority=level) for level in (2, 3, 4)))
    order = []
    for _ in range(OVERTAKEN_MAX + 3):
        put(batcher, ticket(priority=1))
        (one,) = batcher.take(None, 0) or []
        order.append(one.frame.record.priority)
    assert order == [1] * OVERTAKEN_MAX + [2, 3, 4]


# ----------------------------------------------------------------------------------------------------------- deadlines


def test_a_discarded_deadline_is_not_due_and_not_referenced() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for n in range(100):
        deadlines.add(f"thing {n}", 1000 - n)
    for n in range(1, 100):
        deadlines.discard(f"thing {n}")
        deadlines.discard(f"thing {n}")
    assert len(deadlines) == 1
    assert len(deadlines._heap) < 50
    assert deadlines.soonest() == 1000
    assert deadlines.due(999) == []
    assert deadlines.due(1000) == ["thing 0"]
    assert deadlines.soonest() is None


def test_equal_deadlines_are_due_in_the_order_they_were_added() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, at in (("b", 5), ("a", 5), ("later", 6), ("soon", 1)):
        deadlines.add(name, at)
    assert deadlines.due(5) == ["soon", "b", "a"]
    assert "later" in deadlines
