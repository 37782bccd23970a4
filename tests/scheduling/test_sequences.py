"""Sequences, slot by slot: the figures of Triton's documentation, and every start and end of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from flowserve.errors import Cancelled, DeadlineExceeded, InstanceDied, Invalid, ModelFailed, Unavailable
from flowserve.scheduling.frames.frame import Frame, filler_frame
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.rate_limit.limiter import EVERYWHERE, Limiter, Needs
from flowserve.scheduling.sequence.batcher import ENDINGS_MAX, Sequences
from flowserve.scheduling.sequence.sequence import SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, Oldest
from tests.support.recorder import Recorder, rows_of, simple_model
from tests.support.sequences import slots_taken
from tests.support.strategies import plain_graph

IDLE_NS = 1_000
MODEL = simple_model(0)
GRAPH = plain_graph(MODEL)


class Ask(NamedTuple):
    """A request of sequence `of`."""

    of: int | str
    n: int = 0
    start: bool = False
    end: bool = False


def identify(frame: Frame) -> tuple[int | str, bool, bool]:
    asked: Ask = frame.request
    return asked.of, asked.start, asked.end


def direct(slots: int = 2, share: float = 0.0, delay_ns: int = 0, **policy: Any) -> Direct:
    return Direct(SequencePolicy("a", slots, IDLE_NS, **policy), identify, filler_frame(None), share, delay_ns)


def oldest(candidates: int = 4, size: int = 2, delay_ns: int = 0) -> Oldest:
    return Oldest(SequencePolicy("a", candidates, IDLE_NS), identify, BatchPolicy.simple(size, delay_ns))


def names(started: list[tuple[str, list[object]]]) -> list[list[str]]:
    """Each batch as the names of its requests, "-" for an empty slot."""
    return [
        ["-" if asked is None else f"{asked.of}{asked.n}" for asked in batch if asked is None or isinstance(asked, Ask)]
        for _, batch in started
    ]


def ask(server: Recorder, of: int | str, n: int = 0, *, start: bool = False, end: bool = False, **more: Any) -> Frame:
    return server.submit(GRAPH, Ask(of, n, start, end), **more)


def errors(server: Recorder) -> list[str]:
    return [str(frame.record.error) for frame in server.answers if frame.record.error is not None]


# ----------------------------------------------------------------------------------------------------- the pictures


def test_two_sequences_in_two_slots_with_their_rows_over_time(server: Recorder) -> None:
    """READY is false in an empty slot, and START is true in the row of a first request."""
    server.serve(MODEL, direct(slots=2))

    def rows() -> list[tuple[bool, bool]]:
        """(START, READY) of each row of the batch that runs."""
        (batch,) = server.running
        found = [
            (ticket.sequence is not None and ticket.frame.request.start, ticket.sequence is not None)
            for ticket in batch.tickets
        ]
        server.done(batch)
        server.turn()
        return found

    ask(server, "A", 1, start=True)
    server.turn()
    assert rows() == [(True, True)]
    ask(server, "A", 2)
    ask(server, "B", 1, start=True)
    server.turn()
    assert rows() == [(False, True), (True, True)]
    ask(server, "B", 2)
    server.turn()
    assert rows() == [(False, False), (False, True)]
    ask(server, "A", 3, end=True)
    ask(server, "B", 3)
    server.turn()
    assert rows() == [(False, True), (False, True)]
    assert not server.running
    assert errors(server) == []


def test_four_sequences_and_their_batches_oldest_first(server: Recorder) -> None:
    """Candidates take turns, and the last two of D are never in one batch."""
    server.serve(MODEL, oldest(candidates=4, size=2))
    for n in (1, 2):
        for which in "ABCD":
            ask(server, which, n, start=n == 1)
    ask(server, "D", 3)
    ask(server, "D", 4, end=True)
    server.turn()
    while server.running:
        server.done(server.running[0])
        server.turn()
    assert names(server.started) == [["A1", "B1"], ["C1", "D1"], ["A2", "B2"], ["C2", "D2"], ["D3"], ["D4"]]


def test_five_sequences_over_two_instances_of_two_slots_and_a_backlog(server: Recorder) -> None:
    """Slot 0 of both instances is taken before slot 1 of any; the fifth waits until another sequence ends."""
    batcher = direct(slots=2)
    server.serve(MODEL, batcher, instances=2)
    for which in range(5):
        ask(server, which + 1, 1, start=True)
    ask(server, 5, 2, end=True)
    server.turn()
    assert names(server.started) == [["11", "31"], ["21", "41"]]
    assert [[slot.sequence and slot.sequence.id for slot in batcher.slots[n]] for n in (0, 1)] == [[1, 3], [2, 4]]
    for batch in [*server.running]:
        server.done(batch)
    server.turn()
    assert len(server.started) == 2
    ask(server, 4, 2, end=True)
    server.turn()
    assert names(server.started[2:]) == [["-", "42"]]
    assert [slot.sequence and slot.sequence.id for slot in batcher.slots[1]] == [2, 5]
    server.done(server.running[0])
    server.turn()
    assert names(server.started[3:]) == [["-", "51"]]
    server.done(server.running[0])
    server.turn()
    assert names(server.started[4:]) == [["-", "52"]]


# ---------------------------------------------------------------------------------------------- beginning and ending


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Ask(1), "must specify the START flag on the first request of the sequence"),
        (Ask(0, start=True), "must specify a non-zero or non-empty correlation ID"),
        (Ask("", start=True), "must specify a non-zero or non-empty correlation ID"),
        (
            Ask(-1, start=True),
            "correlation ID -1 of an inference request to model 'a' is neither a text nor a whole number",
        ),
        (Ask(2**64, start=True), "is neither a text nor a whole number from 1 to 18446744073709551615"),
        (Ask(1.5, start=True), "correlation ID 1.5 of an inference request to model 'a' is neither a text nor"),  # type: ignore[arg-type]
        (Ask("half of a pair: \ud800", start=True), "is neither a text nor"),
        (Ask("x" * 129, start=True), "string correlation ID cannot be longer than 128 characters"),
        (Ask("x", start=True), "control 'ID' data-type is 'BYTES', but model 'a' expects 'UINT64'"),
    ],
)
def test_a_request_without_a_sequence_is_refused(server: Recorder, asked: Ask, said: str) -> None:
    server.serve(MODEL, direct(id_control="ID", id_type="UINT64"))
    server.submit(GRAPH, asked)
    server.turn()
    (frame,) = server.answers
    assert isinstance(frame.record.error, Invalid)
    assert said in str(frame.record.error)


def test_requests_of_several_rows_are_refused_before_and_within_a_sequence(server: Recorder) -> None:
    server.serve(MODEL, direct())
    server.submit(GRAPH, Ask(1, start=True), [rows_of(2)])
    ask(server, 1, 1, start=True)
    server.submit(GRAPH, Ask(1), [rows_of(2)])
    server.turn()
    assert len(errors(server)) == 2
    assert all("must specify batch-size 1" in text for text in errors(server))


def test_an_id_may_start_again_when_its_end_is_queued(server: Recorder) -> None:
    batcher = direct(slots=1)
    server.serve(MODEL, batcher)
    ask(server, 1, 1, start=True)
    ask(server, 1, 2, end=True)
    ask(server, 1, 3)
    ask(server, 1, 4, start=True)
    server.turn()
    assert ["must specify the START flag" in text for text in errors(server)] == [True]
    assert batcher.live == 1  # the second one, in the backlog behind the first
    for _ in range(3):
        server.done(server.running[0])
        server.turn()
    assert names(server.started) == [["11"], ["12"], ["14"]]


def test_a_start_within_a_sequence_keeps_its_position(server: Recorder) -> None:
    server.serve(MODEL, oldest())
    for n in range(3):
        ask(server, 1, n, start=n != 1)
    server.turn()
    for _ in range(3):
        server.done(server.running[0])
        server.turn()
    assert names(server.started) == [["10"], ["11"], ["12"]]


def test_the_idle_time_counts_from_the_last_response_and_frees_the_slot_for_the_backlog(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=1))
    ask(server, 1, 1, start=True)
    ask(server, 2, 1, start=True)
    server.turn(0)
    server.turn(5 * IDLE_NS)  # it runs for longer than the idle timeout
    server.done(server.running[0], at=5 * IDLE_NS)
    server.turn(5 * IDLE_NS)
    assert len(server.started) == 1
    at = server.scheduler.next_deadline()
    assert at is not None
    assert at <= 6 * IDLE_NS
    server.turn(at)
    server.turn(6 * IDLE_NS)
    assert names(server.started[1:]) == [["21"]]
    ask(server, 1, 2)
    server.turn(6 * IDLE_NS)
    (text,) = errors(server)
    assert text.endswith("it was idle for 1e-06 s (max_sequence_idle_microseconds) and has ended")


@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "ends"])
def test_a_slot_freed_at_the_moment_of_a_timeout_is_taken_once(server: Recorder, ends: bool) -> None:
    server.serve(MODEL, direct(slots=1))
    ask(server, 1, 1, start=True)
    server.turn(0)
    server.done(server.running[0], at=0)
    server.turn(0)  # idle from now on
    ask(server, 2, 1, start=True, end=ends, timeout_ns=IDLE_NS)
    server.turn(1)
    server.turn(2 * IDLE_NS)  # both time out, the first one first
    assert names(server.started[1:]) == [["21"]]
    server.done(server.running[0], at=2 * IDLE_NS)
    server.turn(2 * IDLE_NS)
    assert server.live == (not ends)
    server.turn(4 * IDLE_NS)
    assert server.live == 0
    assert errors(server) == []


def test_the_smallest_timeout_in_the_backlog_is_that_of_the_whole_sequence(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=1))
    ask(server, 1, 1, start=True, timeout_ns=1)  # a sequence in a slot does not time out
    ask(server, 2, 1, start=True, timeout_ns=500)
    ask(server, 2, 2, timeout_ns=100)
    server.turn(0)
    assert server.scheduler.next_deadline() == 100
    server.turn(100)
    assert [type(frame.record.error) for frame in server.answers] == [Unavailable, Unavailable]
    assert all(text.startswith("timeout of the corresponding sequence has been expired") for text in errors(server))
    ask(server, 2, 3)
    server.turn(100)
    assert errors(server)[-1].endswith("it waited too long for a slot")


@pytest.mark.parametrize("batcher", [direct(slots=1), oldest(candidates=1)], ids=["direct", "oldest"])
def test_a_request_cancelled_while_it_waits_ends_its_sequence_and_frees_the_slot_once(
    server: Recorder, batcher: Sequences
) -> None:
    server.serve(MODEL, batcher)
    ask(server, 1, 1, start=True)
    cancelled = ask(server, 1, 2)
    ask(server, 1, 3, end=True)
    ask(server, 2, 1, start=True)
    server.turn(0)
    server.scheduler.cancel(cancelled)
    server.turn(0)
    (cancelled,) = server.answers
    assert (cancelled.request.n, type(cancelled.record.error)) == (3, Cancelled)
    server.turn(3 * IDLE_NS)  # the expired sequence has no slot to free a second time
    server.done(server.running[0], at=3 * IDLE_NS)
    server.turn(3 * IDLE_NS)
    assert names(server.started) == [["11"], ["21"]]
    assert slots_taken(batcher) == 1


def test_an_instance_that_dies_ends_its_sequences_and_no_others(server: Recorder) -> None:
    batcher = direct(slots=1)
    queue = server.serve(MODEL, batcher, instances=2)
    for which in (1, 2, 3):
        ask(server, which, 1, start=True)
    ask(server, 1, 2)
    server.turn()
    died, lives = server.running
    server.running.remove(died)
    server.scheduler.complete(died, [], InstanceDied("it died"), 0)
    queue.take_away(died.instance)
    server.turn()
    assert [(frame.request.n, type(frame.record.error)) for frame in server.answers] == [
        (1, InstanceDied),
        (2, InstanceDied),
    ]
    ask(server, 1, 3)
    server.turn()
    assert errors(server)[-1].endswith("that had it has ended; begin again with START")
    server.done(lives)
    assert server.turn() == []  # the third waits in the backlog for the remaining slot or the other instance
    queue.give_back(died.instance)
    assert names(server.turn()) == [["31"]]
    assert slots_taken(batcher) == 2


def test_the_record_of_ended_sequences_is_limited(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=1))
    for n in range(ENDINGS_MAX + 5):
        cancelled = ask(server, 1 + n, start=True)
        server.turn(n)
        if server.running:
            server.done(server.running[0], at=n)
        else:
            server.scheduler.cancel(cancelled)
        server.turn(n)
    batcher = server.queues[MODEL.key].bound
    assert batcher is not None
    assert isinstance(batcher, Sequences)
    assert len(batcher._endings) <= ENDINGS_MAX


# ----------------------------------------------------------------------------------------------------------- batches


def test_direct_waits_for_the_minimum_slot_utilization_or_the_delay(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=4, share=0.5, delay_ns=200))
    ask(server, 1, 1, start=True)
    assert server.turn(0) == []
    assert server.scheduler.next_deadline() == 200
    ask(server, 2, 1, start=True)
    assert names(server.turn(50)) == [["11", "21"]]
    server.done(server.running[0], at=60)
    ask(server, 2, 2)
    assert server.turn(100) == []
    assert names(server.turn(300)) == [["-", "22"]]


def test_oldest_waits_for_a_larger_batch_until_the_delay_is_over(server: Recorder) -> None:
    server.serve(MODEL, oldest(delay_ns=200))
    ask(server, 1, 1, start=True)
    assert server.turn(0) == []
    assert names(server.turn(200)) == [["11"]]
    server.done(server.running[0], at=210)
    ask(server, 1, 2)
    ask(server, 2, 1, start=True)
    assert names(server.turn(220)) == [["12", "21"]]


def test_requests_of_another_shape_get_a_batch_of_their_own_after_a_bounded_wait(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=2))
    server.submit(GRAPH, Ask("A", 1, start=True), [rows_of(width=2)])
    server.submit(GRAPH, Ask("B", 1, start=True), [rows_of(width=3)])
    for at in range(3):
        server.submit(GRAPH, Ask("A", 2 + at), [rows_of(width=2)])
        server.turn(at)
        server.done(server.running[0], at=at)
    assert names(server.started) == [["A1"], ["A2"], ["-", "B1"]]  # B1 waited longer than A3


def test_sequences_with_states_of_different_shapes_do_not_share_a_batch(server: Recorder) -> None:
    server.serve(MODEL, direct(slots=2, has_shapes=True))
    for which in "AB":
        ask(server, which, 1, start=True)
    server.turn()
    (batch,) = server.running
    for ticket, shape in zip(batch.tickets, (1, 2), strict=True):
        ticket.sequence.shapes = shape
    for which in "AB":
        ask(server, which, 2)
    server.done(batch)
    server.turn()
    server.done(server.running[0])
    server.turn()
    server.done(server.running[0])
    for which in "AB":
        ask(server, which, 3, start=True)
    server.turn()
    assert names(server.started) == [["A1", "B1"], ["A2"], ["-", "B2"], ["A3", "B3"]]


def test_a_failed_batch_is_retried_on_its_own_instance_before_later_requests(server: Recorder) -> None:
    server.serve(MODEL, oldest(candidates=2, size=2), instances=2, is_pure=True)
    for which in "ABCD":
        ask(server, which, 1, start=True)
        ask(server, which, 2)
    server.turn()
    first = server.running[0]
    assert server.raised(first)
    server.turn()
    retried = server.running[-1]
    assert retried.instance == first.instance
    assert not server.raised(retried)
    server.turn()
    while server.running:
        server.done(server.running[0])
        server.turn()
    assert names([(key, batch) for key, batch in server.started]) == [
        ["A1", "C1"], ["B1", "D1"], ["A1"], ["C1"], ["B2", "D2"], ["A2", "C2"],
    ]  # fmt: skip
    assert [(frame.request.of, type(frame.record.error)) for frame in server.answers if frame.record.error] == [
        ("A", ModelFailed)
    ]


def test_a_request_cancelled_before_its_retry_ends_its_sequence(server: Recorder) -> None:
    queue = server.serve(MODEL, oldest(candidates=2, size=2), is_pure=True)
    asked = [ask(server, which, n, start=n == 1) for which in "AB" for n in (1, 2)]
    server.turn()
    assert server.raised(server.running[0])
    server.turn()
    before = len(queue.batcher)
    server.scheduler.cancel(asked[2])
    assert (before, len(queue.batcher)) == (3, 1)
    while server.running:
        server.done(server.running[0])
        server.turn()
    assert names(server.started) == [["A1", "B1"], ["A1"], ["A2"]]
    assert errors(server) == ["sequence B: a request of it was cancelled, and with it the sequence"]
    assert server.scheduler.in_flight == 0


def test_requests_cancelled_together_all_leave_the_queue(server: Recorder) -> None:
    """The first waiting request ends the sequence, and the others are queued for that error."""
    queue = server.serve(MODEL, oldest())
    asked = [ask(server, 1, n, start=n == 1) for n in range(1, 5)]
    server.turn()
    waiting = [len(queue.batcher)]
    for frame in asked:
        server.scheduler.cancel(frame)
        waiting.append(len(queue.batcher))
    assert waiting == [3, 3, 0, 0, 0]
    server.done(server.running[0])
    server.turn()
    assert (server.answers, server.scheduler.in_flight) == ([], 0)


@pytest.mark.parametrize("make", [direct, oldest])
@pytest.mark.parametrize("of", [1, 2], ids=["slot", "backlog"])
def test_a_deadline_takes_a_request_out_of_its_sequence(
    server: Recorder, make: Callable[..., Sequences], of: int
) -> None:
    server.serve(MODEL, make(1))
    ask(server, 1, 1, start=True)
    server.turn(0)
    late = ask(server, of, 2, start=of == 2)
    server.scheduler.due.add(late, 100)
    server.turn(0)
    server.turn(100)
    assert isinstance(late.record.error, DeadlineExceeded)
    server.done(server.running[0], at=100)
    assert server.turn(100) == []
    assert server.answers[0] is late
    assert server.live == (of == 2)  # its own sequence has ended with it


def test_a_rate_limiter_looks_only_for_instances_that_have_work(server: Recorder) -> None:
    limited = Recorder(limiter=Limiter())
    needs = [Needs({("R", EVERYWHERE): 1})] * 2
    limited.serve(MODEL, direct(slots=1), instances=2, needs=needs)
    for which in (1, 2):
        ask(limited, which, 1, start=True)
    assert names(limited.turn()) == [["11"]]
    ask(limited, 1, 2)
    limited.done(limited.running[0])
    assert len(limited.turn()) == 1
    limited.done(limited.running[0])
    assert len(limited.turn()) == 1
    assert sorted(name for batch in names(limited.started) for name in batch) == ["11", "12", "21"]
    limited.done(limited.running[0])
    assert limited.turn() == []
    assert limited.scheduler.in_flight == 0
