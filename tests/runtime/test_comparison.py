"""Which of several ways is kept: the one that takes the least time, as long as it does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.runtime.comparison import KEPT_MAX, KEPT_MIN, TURN, TURNS, Comparison

WAYS = 3
LOOK = TURN * TURNS * WAYS


def go(comparison: Comparison, count: int, took: Callable[[int, int], int], start: int = 0) -> list[int]:
    """So many, and which way each went. `took` says how long, by way and number."""
    went = []
    for i in range(start, start + count):
        went.append(comparison.way)
        comparison.took(took(went[-1], i))
    return went


@given(st.permutations([100_000, 110_000, 130_000]))
def test_the_quickest_is_kept(durations: list[int]) -> None:
    comparison = Comparison(WAYS)
    went = go(comparison, LOOK, lambda way, _: durations[way])
    assert [went.count(way) for way in range(WAYS)] == [TURN * TURNS] * WAYS
    assert set(go(comparison, KEPT_MIN, lambda way, _: durations[way])) == {durations.index(100_000)}


def test_what_changes_is_seen_when_all_are_tried_again() -> None:
    comparison = Comparison(WAYS)
    for quickest in 1, 2, 0, 2:
        went = go(comparison, LOOK + KEPT_MIN, lambda way, _, quickest=quickest: 1000 if way == quickest else 2000)
        assert set(went[LOOK:]) == {quickest}
        assert comparison.way == 0, "another look begins"


def test_what_stays_the_same_is_looked_at_less_and_less() -> None:
    comparison = Comparison(WAYS)
    kept = KEPT_MIN
    for _ in range(8):
        went = go(comparison, LOOK + kept, lambda way, _: (3, 1, 2)[way] * 1000)
        assert went[LOOK - TURN : LOOK] == [0] * TURN, "a look ends"
        assert went[LOOK:] == [1] * kept
        kept = min(2 * kept, KEPT_MAX)


@pytest.mark.parametrize("hardly", range(1, WAYS))
def test_one_that_is_hardly_quicker_is_not_worth_a_change(hardly: int) -> None:
    comparison = Comparison(WAYS)
    went = go(comparison, 60_000, lambda way, _: 97_000 if way == hardly else 100_000)
    assert went.count(0) / len(went) > 0.98


@pytest.mark.parametrize("slower", [1, -1])
def test_a_machine_that_gets_slower_or_quicker_meanwhile_speaks_for_none(slower: int) -> None:
    comparison = Comparison(WAYS)
    went = go(comparison, LOOK + KEPT_MIN, lambda _, i: 1_000_000 + slower * 4_000 * i)
    assert set(went[LOOK:]) == {0}


@given(st.integers(0, 1 << 32), st.integers(0, WAYS - 1))
def test_long_ones_now_and_then_do_not_hide_which_is_quickest(seed: int, quickest: int) -> None:
    chance = Random(seed)
    comparison = Comparison(WAYS)
    outliers = chance.sample(range(LOOK), 3)
    went = go(
        comparison, LOOK + 8, lambda way, i: 10**9 if i in outliers else chance.randint(*_around(way == quickest))
    )
    assert went[-1] == quickest


def _around(is_quickest: bool) -> tuple[int, int]:
    return (70_000, 90_000) if is_quickest else (110_000, 140_000)


def test_others_are_tried_rarely() -> None:
    comparison = Comparison(WAYS)
    go(comparison, 4 * (LOOK + KEPT_MAX), lambda way, _: (2, 1, 2)[way] * 1000)
    went = go(comparison, 10 * (LOOK + KEPT_MAX), lambda way, _: (2, 1, 2)[way] * 1000)
    assert sum(way != 1 for way in went) / len(went) < 0.01


def test_who_comes_after_another_way_finds_what_that_left_behind_and_does_not_count() -> None:
    comparison = Comparison(WAYS)
    before = 0

    def took(way: int, _: int) -> int:
        nonlocal before
        changed, before = way != before, way
        return 10**7 if changed else 100_000 if way == 0 else 80_000

    assert go(comparison, LOOK + 1, took)[-1] == 1
