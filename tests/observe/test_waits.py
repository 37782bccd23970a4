"""Wait reasons: adjacent intervals that cover the whole wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowserve.observe.trace import BUSY, FULL, TURN, BusyPeriods, Wait, add, by_reason, divided

MOMENTS = st.integers(0, 60)


def test_a_wait_is_divided_by_periods_without_a_free_instance() -> None:
    assert divided(10, 100, [(0, 30), (40, 90)], TURN) == [
        Wait(BUSY, 10, 30),
        Wait(TURN, 30, 40),
        Wait(BUSY, 40, 90),
        Wait(TURN, 90, 100),
    ]


def test_without_a_wait_there_are_no_reasons() -> None:
    assert divided(10, 10, [(0, 100)], FULL) == []


@given(MOMENTS, MOMENTS, st.lists(MOMENTS, max_size=12).map(sorted))
def test_property_reasons_cover_the_time_exactly_once(start: int, length: int, marks: list[int]) -> None:
    spells, times = BusyPeriods(), [*zip(marks[::2], marks[1::2], strict=False)]
    for begun, ended in times:
        spells.begin(begun)
        spells.end(ended)
    end = start + length
    waits = divided(start, end, spells.after(start), TURN)
    edges = [start, *(wait.to_ns for wait in waits)]
    assert [wait.from_ns for wait in waits] == edges[:-1]
    assert edges[-1] == end
    assert all(wait.ns > 0 for wait in waits)
    covered = {moment for begun, ended in times for moment in range(begun, ended)}
    assert by_reason(waits).get(BUSY, 0) == len(covered & set(range(start, end)))


def test_a_wait_longer_than_the_kept_periods_counts_as_busy() -> None:
    spells = BusyPeriods()
    for moment in range(0, 20_000, 2):
        spells.begin(moment)
        spells.end(moment + 1)
    waits = divided(100, 20_000, spells.after(100), TURN)
    assert waits[0].reason == BUSY
    assert waits[0].from_ns == 100
    assert sum(wait.ns for wait in waits) == 19_900


def test_reasons_are_summed_longest_first() -> None:
    waits: list[Wait] = []
    add(waits, TURN, 0, 5)
    add(waits, BUSY, 5, 30)
    add(waits, TURN, 30, 35)
    add(waits, FULL, 35, 35)
    assert [*by_reason(waits).items()] == [(BUSY, 25), (TURN, 10)]
