"""A list of calls made by several threads: each once, in order, several at a time, and none left when it is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from flowserve.backends.lanes import Lanes

LIMIT_S = 5.0


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(3)
    yield lanes
    lanes.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_every_call_is_made_once_and_answered_in_its_place(lanes: Lanes, count: int) -> None:
    for _ in range(20):
        made: list[int] = []

        def call(number: int, made: list[int] = made) -> int:
            made.append(number)
            return number * number

        assert lanes.map(call, count) == [number * number for number in range(count)]
        assert sorted(made) == [*range(count)]


def test_as_many_calls_run_at_once_as_there_are_lanes(lanes: Lanes) -> None:
    meeting = threading.Barrier(3, timeout=LIMIT_S)
    assert lanes.map(lambda _: meeting.wait() >= 0, 6) == [True] * 6


def test_a_thread_that_comes_late_is_not_waited_for() -> None:
    lanes = Lanes(2)
    is_late, may_end = threading.Event(), threading.Event()

    class Late(threading.Thread):
        def run(self) -> None:
            is_late.set()
            may_end.wait(LIMIT_S)
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Thread", Late)
        assert lanes.map(lambda number: number, 4) == [0, 1, 2, 3]
    assert is_late.is_set()
    assert not may_end.is_set()
    may_end.set()
    assert lanes.map(lambda number: -number, 4) == [0, -1, -2, -3]
    lanes.close()


def test_what_a_call_raises_comes_out_when_no_other_is_under_way(lanes: Lanes) -> None:
    meeting = threading.Barrier(3, timeout=LIMIT_S)
    under_way: list[int] = []

    def call(number: int) -> None:
        under_way.append(number)
        meeting.wait()
        under_way.remove(number)
        if number == 1:
            raise LookupError("the second")

    with pytest.raises(LookupError, match="the second"):
        lanes.map(call, 3)
    assert under_way == []
    assert lanes.map(lambda number: number, 3) == [0, 1, 2]


def test_threads_end_when_it_is_closed() -> None:
    before = threading.active_count()
    lanes = Lanes(4)
    lanes.map(lambda number: number, 2)
    assert threading.active_count() == before + 1  # no more than there was a use for
    lanes.close()
    assert threading.active_count() == before
