"""Back-off: growing delays between restarts, reset after a long life."""

from __future__ import annotations

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


@given(st.lists(st.integers(0, 20 * SECOND_NS), max_size=200))
def test_an_instance_is_never_restarted_more_often_than_allowed(lived: list[int]) -> None:
    delays = Delays(first_ns=7, longest_ns=1000, calm_ns=10 * SECOND_NS)
    back_off = BackOff(delays)
    before = 0
    for lived_ns in lived:
        delay = back_off.ended(lived_ns)
        assert delays.first_ns <= delay <= delays.longest_ns
        assert delay == delays.first_ns if lived_ns >= delays.calm_ns else delay >= min(2 * before, 1000)
        before = delay
