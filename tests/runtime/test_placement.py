"""Where an instance runs its next batch: by measurement, with hysteresis."""

from __future__ import annotations

import pytest

from flowserve.runtime.workers.local import Placement

QUICK = 75_000  # less than the hop to a thread and back
BETWEEN = 250_000
SLOW = 1_500_000  # too long to block the loop
MANY = 1000  # batches; more than any limit here


def until_it_moves(placement: Placement, rows: int, duration_ns: int) -> int:
    """The number of batches of that duration after which the place changes; 0 if it never does."""
    before = placement.is_inline(rows)
    for n in range(1, MANY):
        placement.measured(rows, duration_ns, inline=before)
        if placement.is_inline(rows) is not before:
            return n
    return 0


@pytest.fixture
def on_the_loop() -> Placement:
    placement = Placement()
    assert until_it_moves(placement, 4, QUICK)
    return placement


def test_an_unmeasured_model_runs_on_the_thread_and_moves_after_several_quick_runs() -> None:
    placement = Placement()
    assert not placement.is_inline(1)
    assert 1 < until_it_moves(placement, 1, QUICK) < 10


@pytest.mark.parametrize("duration_ns", [BETWEEN, SLOW])
def test_a_model_that_is_not_quick_stays_on_the_thread(duration_ns: int) -> None:
    assert until_it_moves(Placement(), 1, duration_ns) == 0


def test_first_runs_that_are_slow_do_not_keep_a_model_from_the_loop() -> None:
    placement = Placement()
    for _ in range(3):
        placement.measured(1, 100 * SLOW, inline=False)
    assert until_it_moves(placement, 1, QUICK)


def test_a_model_that_becomes_slow_returns_to_the_thread_soon(on_the_loop: Placement) -> None:
    assert 1 < until_it_moves(on_the_loop, 4, SLOW) < 20


def test_a_model_between_the_two_thresholds_stays_on_the_loop(on_the_loop: Placement) -> None:
    assert until_it_moves(on_the_loop, 4, BETWEEN) == 0


def test_one_outlier_does_not_move_a_model_to_the_thread(on_the_loop: Placement) -> None:
    on_the_loop.measured(4, 10_000 * SLOW, inline=True)
    assert on_the_loop.is_inline(4)


def test_a_model_moved_back_is_reconsidered_much_later(on_the_loop: Placement) -> None:
    until_it_moves(on_the_loop, 4, SLOW)
    assert 100 < until_it_moves(on_the_loop, 4, QUICK) < MANY


def test_sizes_are_judged_apart_and_like_sizes_together(on_the_loop: Placement) -> None:
    assert [on_the_loop.is_inline(rows) for rows in (1, 3, 4, 7, 8, 64)] == [False, False, True, True, False, False]
    until_it_moves(on_the_loop, 8, QUICK)
    until_it_moves(on_the_loop, 4, SLOW)
    assert [on_the_loop.is_inline(rows) for rows in (4, 8)] == [False, True]
