"""Which tickets form a batch, and when it starts: timelines, and Triton's own numbers (L0_batcher), in rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import BatchPolicy, LevelPolicy, Levels, Queue

SECOND_NS = 1_000_000_000
MakeTicket = Callable[..., Ticket]


def sizes(batch: list[Ticket] | None) -> list[int] | None:
    return None if batch is None else [ticket.rows for ticket in batch]


def everything(batcher: Queue, at: int = 0) -> list[int]:
    """The rows of each batch that leaves at this time."""
    batches = []
    while batch := batcher.take(None, at):
        batches.append(sum(ticket.rows for ticket in batch))
        batcher.check()
    return batches


# ------------------------------------------------------------------------------------------------------- timelines


def test_the_oldest_ticket_determines_the_start_of_a_short_batch(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=100))
    first, second = ticket(at=0), ticket(at=60)

    batcher.put(first)
    assert batcher.take(None, 0) is None
    batcher.put(second)
    assert batcher.take(None, 60) is None
    assert batcher.deadline() == 100
    assert batcher.take(None, 99) is None  # early calls have no effect
    assert batcher.take(None, 100) == [first, second]
    assert batcher.deadline() is None
    assert batcher.take(None, 100) is None


def test_the_delay_of_the_remaining_requests_counts_from_their_own_arrival(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(4, max_queue_delay_ns=100))
    batcher.put(ticket(rows=3, at=0))
    batcher.put(ticket(rows=3, at=80))
    assert sizes(batcher.take(None, 80)) == [3]  # the second does not fit: no reason to wait for it
    assert batcher.take(None, 80) is None
    assert batcher.deadline() == 180


def test_a_full_batch_starts_before_the_delay_is_over(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(4, max_queue_delay_ns=SECOND_NS))
    for _ in range(5):
        batcher.put(ticket())
    assert everything(batcher) == [4]
    assert len(batcher) == 1


def test_the_queue_is_never_skipped_for_a_smaller_request_behind_a_large_one(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(4))
    for rows in (3, 4, 1):
        batcher.put(ticket(rows=rows))
    assert everything(batcher) == [3, 4, 1]


def test_another_key_closes_a_batch_without_waiting(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=SECOND_NS))
    batcher.put(ticket(key="wide"))
    batcher.put(ticket(key="wide"))
    batcher.put(ticket(key="tall"))
    batcher.put(ticket(key="wide"))
    assert everything(batcher) == [2, 1]
    assert len(batcher) == 1  # another request may still join the last one


def test_a_batch_grows_until_it_is_taken(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(8))
    batcher.put(ticket())
    batcher.put(ticket())
    batcher.put(ticket())
    assert everything(batcher) == [3]


def test_a_request_without_rows_counts_towards_the_batch_size(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(2))
    for _ in range(3):
        batcher.put(ticket(rows=0))
    assert sizes(batcher.take(None, 0)) == [0, 0]
    assert sizes(batcher.take(None, 0)) == [0]


def test_a_batch_is_filled_after_a_withdrawal(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=100))
    cancelled = ticket(rows=4, at=0)
    stayer = ticket(rows=1, at=50)
    batcher.put(cancelled)
    batcher.put(ticket(rows=4, at=0, frame=cancelled.frame))  # a second step of the same request
    batcher.put(stayer)
    assert batcher.withdraw(cancelled.frame) == 2
    assert batcher.withdraw(cancelled.frame) == 0
    assert batcher.deadline() == 150
    assert batcher.take(None, 150) == [stayer]


@pytest.mark.parametrize("levels", [Levels(), Levels(policy=LevelPolicy(max_size=9))], ids=["plain", "with a limit"])
def test_parts_of_a_failed_batch_run_before_other_tickets_and_are_withdrawn_like_them(
    ticket: MakeTicket, levels: Levels
) -> None:
    batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=100), levels)
    failed = [ticket(at=0) for _ in range(4)]
    waits = ticket(at=10)
    batcher.put(waits)
    batcher.again(0, (failed[:2], failed[2:]))
    assert (len(batcher), batcher.deadline()) == (5, 110)
    assert batcher.take(None, 10) == failed[:2]
    failed[2].frame.record.done = True
    assert batcher.withdraw(failed[2].frame) == 1
    batcher.check()
    assert batcher.take(None, 10) == [failed[3]]
    assert (batcher.take(None, 10), batcher.deadline()) == (None, 110)
    batcher.again(0, (failed[:1],))
    assert batcher.clear() == [failed[0], waits]
    assert len(batcher) == 0


def test_the_default_scheduler_runs_every_request_in_its_own_batch_without_delay(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.single())
    first, second = ticket(rows=2, at=0), ticket(rows=2, at=0)
    batcher.put(first)
    batcher.put(second)
    assert batcher.deadline() is None
    assert batcher.take(None, 0) == [first]
    assert batcher.take(None, 0) == [second]
    assert batcher.take(None, 0) is None


# --------------------------------------------------------------------------------- Triton's numbers (L0_batcher, 3.3)

# Rows of the requests that arrive together, the batches that leave at once, and the waiting rest. Maximum 8.
GOLDEN: dict[str, tuple[tuple[int, ...], int, list[int], list[int], list[int]]] = {
    # preferred, delay, requests, batches at once, batches when the delay is over
    "static batch 2": ((2, 6), 10, [2], [2], []),
    "static batch 6": ((2, 6), 10, [6], [6], []),
    "1 waits": ((2, 6), 10, [1], [], [1]),
    "3 waits": ((2, 6), 10, [3], [], [3]),
    "7 is above the largest preferred": ((2, 6), 10, [7], [7], []),
    "3 + 1 waits": ((2, 6), 10, [3, 1], [], [4]),
    "3 + 7 does not fit": ((2, 6), 10, [3, 7], [3, 7], []),
    "3 + 4 would jump over the largest preferred": ((2, 6), 10, [3, 4], [3], [4]),
    "4 + 3 likewise": ((2, 6), 10, [4, 3], [4], [3]),
    "6 x 1": ((2, 6), 10, [1] * 6, [6], []),
    "best preferred": ((2, 6), 10, [1, 1, 1], [2], [1]),
    "[4,6] without delay: 4": ((4, 6), 0, [1] * 4, [4], []),
    "[4,6] without delay: 5": ((4, 6), 0, [1] * 5, [4, 1], []),
    "[4,6] without delay: 7": ((4, 6), 0, [1] * 7, [6, 1], []),
    "[4,6] without delay: 3": ((4, 6), 0, [1] * 3, [3], []),
    "[4,6] without delay: 4, 1, 2": ((4, 6), 0, [4, 1, 2], [4, 3], []),
    "12 x 1, preferred 4": ((4,), 10, [1] * 12, [4, 4, 4], []),
    "delay only: 12 x 1": ((8,), 10, [1] * 12, [8], [4]),
}


def policed(policy: BatchPolicy) -> Queue:
    return Queue(policy, Levels(policy=LevelPolicy(max_size=100)))


@pytest.mark.parametrize("made", [Queue, policed], ids=["plain", "with a policy"])
@pytest.mark.parametrize(("preferred", "delay_s", "rows", "at_once", "later"), GOLDEN.values(), ids=GOLDEN.keys())
def test_batches_have_the_sizes_of_tritons(
    preferred: tuple[int, ...],
    delay_s: int,
    rows: list[int],
    at_once: list[int],
    later: list[int],
    made: Callable[[BatchPolicy], Queue],
    ticket: MakeTicket,
) -> None:
    batcher = made(BatchPolicy(8, preferred, delay_s * SECOND_NS))
    for size in rows:
        batcher.put(ticket(rows=size))
    assert everything(batcher) == at_once
    assert everything(batcher, at=delay_s * SECOND_NS - 1) == []
    assert everything(batcher, at=delay_s * SECOND_NS) == later
    assert len(batcher) == 0


@pytest.mark.parametrize(
    ("requests", "at_once", "later"),
    [
        ([(1, "x"), (2, "y")], [1, 2], []),
        ([(1, "x"), (1, "x"), (1, "y")], [2], [1]),
        ([(1, "x"), (3, "x"), (1, "y")], [4], [1]),
        ([(1, "x"), (1, "y")], [1], [1]),
    ],
    ids=["1 then 2 of another shape", "third of another shape", "1, 3, then another", "two shapes"],
)
def test_requests_of_different_shapes_are_batched_as_by_triton(
    requests: list[tuple[int, str]], at_once: list[int], later: list[int], ticket: MakeTicket
) -> None:
    batcher = Queue(BatchPolicy(8, (2, 6), 10 * SECOND_NS))
    for rows, key in requests:
        batcher.put(ticket(rows=rows, key=key))
    assert everything(batcher) == at_once
    assert everything(batcher, at=10 * SECOND_NS) == later


def test_after_the_delay_a_batch_may_exceed_the_largest_preferred_size(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy(8, (4, 6), SECOND_NS))
    for rows in (3, 4, 1):
        batcher.put(ticket(rows=rows))
    assert everything(batcher, at=SECOND_NS) == [8]


def test_after_the_delay_all_waiting_requests_are_taken_beyond_a_preferred_size(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy(8, (2, 6), SECOND_NS))
    for _ in range(5):
        batcher.put(ticket())
    assert everything(batcher, at=SECOND_NS) == [5]


def test_withdrawing_an_unknown_request_changes_nothing(ticket: MakeTicket) -> None:
    batcher = Queue(BatchPolicy.simple(4))
    kept = ticket()
    batcher.put(kept)
    unknown: Frame = ticket().frame
    assert batcher.withdraw(unknown) == 0
    assert batcher.take(None, 0) == [kept]
