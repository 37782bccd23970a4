"""Back-off: growing delays between restarts, short after a healthy period, reset after a long life."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.runtime.workers.supervisor import BackOff, Delays

SECOND_NS = 1_000_000_000


def test_delays_double_from_a_tenth_of_a_second_to_half_a_minute() -> None:
    back_off = BackOff(Delays())
    seconds = [back_off.ended(0) / SECOND_NS for _ in range(11)]
    assert seconds == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]


def test_a_long_lived_instance_restarts_with_the_first_delay() -> None:
    back_off = BackOff(Delays())
    for _ in range(20):
        back_off.ended(1)
    assert back_off.ended(10 * SECOND_NS) == SECOND_NS // 10
    assert back_off.ends == 1


@pytest.mark.fault("W9")
@pytest.mark.parametrize(("lived_ns", "has_answered"), [(2 * SECOND_NS, False), (1, True)])
def test_eight_kills_after_healthy_periods_are_each_followed_by_a_start_within_a_second(
    lived_ns: int, has_answered: bool
) -> None:
    """A timeline: ready, healthy, killed, restarted; eight times."""
    back_off = BackOff(Delays())
    now_ns, recoveries_ns = 0, []
    for _ in range(8):
        now_ns += lived_ns
        killed_ns = now_ns
        now_ns += back_off.ended(lived_ns, has_answered=has_answered)
        recoveries_ns.append(now_ns - killed_ns)
    assert [one / SECOND_NS for one in recoveries_ns] == [0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8]
    assert back_off.ends == 8  # as the message says


@pytest.mark.fault("W9")
def test_crashes_at_once_after_a_healthy_period_begin_near_the_short_delay_again() -> None:
    back_off = BackOff(Delays())
    for _ in range(20):
        back_off.ended(0)
    seconds = [back_off.ended(2 * SECOND_NS) / SECOND_NS, *(back_off.ended(0) / SECOND_NS for _ in range(6))]
    assert seconds == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30]


@given(st.lists(st.tuples(st.integers(0, 20 * SECOND_NS), st.booleans()), max_size=200))
def test_property_delays_stay_short_after_health_and_double_after_immediate_ends(ends: list[tuple[int, bool]]) -> None:
    delays = Delays(first_ns=7, longest_ns=1000, healthy_ns=SECOND_NS, after_health_ns=60, calm_ns=10 * SECOND_NS)
    back_off = BackOff(delays)
    before = 0
    for lived_ns, has_answered in ends:
        delay = back_off.ended(lived_ns, has_answered=has_answered)
        assert delays.first_ns <= delay <= delays.longest_ns
        if lived_ns >= delays.calm_ns:
            assert delay == delays.first_ns
        elif has_answered or lived_ns >= delays.healthy_ns:
            assert min(before, delays.first_ns) <= delay <= delays.after_health_ns
        else:  # never earlier than allowed
            assert delay == (min(2 * before, delays.longest_ns) if before else delays.first_ns)
        before = delay
