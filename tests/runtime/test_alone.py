"""When the loop waits for a model's process in place: for requests that come one by one, and for nothing that would
keep others waiting.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowserve.runtime.alone import LOOK_EVERY, QUICK_NS, STREAK, WAIT_NS_MAX, Occupancy, Pace


def batch(stamp: int, members: int = 1) -> Any:
    return SimpleNamespace(tickets=[SimpleNamespace(flow=SimpleNamespace(stamp=stamp))] * members)


def lone(occupancy: Occupancy, count: int) -> list[bool]:
    found = []
    for stamp in range(1, count + 1):
        found.append(occupancy.begins(batch(stamp)))
        occupancy.ends()
    return found


def test_a_request_is_taken_to_be_alone_when_many_before_it_were() -> None:
    found = lone(Occupancy(list), STREAK + 1)
    assert found == [False] * STREAK + [True]


def test_every_now_and_then_one_is_not_waited_for_so_that_company_is_seen() -> None:
    found = lone(Occupancy(list), STREAK + 10 * LOOK_EVERY)[STREAK:]
    assert found.count(False) == 10
    assert [number % LOOK_EVERY for number, waits in enumerate(found, STREAK + 1) if not waits] == [0] * 10


@pytest.mark.parametrize("members", [1, 2])
def test_whoever_comes_beside_another_ends_it_for_a_while(members: int) -> None:
    occupancy = Occupancy(list)
    lone(occupancy, STREAK + 2)
    occupancy.begins(batch(1000))
    assert not occupancy.begins(batch(1001, members))
    occupancy.ends()
    occupancy.ends()
    assert lone(occupancy, STREAK) == [False] * STREAK


def test_two_requests_in_one_batch_are_company() -> None:
    occupancy = Occupancy(list)
    lone(occupancy, STREAK + 2)
    assert not occupancy.begins(batch(1000, 2))


def test_steps_of_one_request_beside_each_other_are_no_company() -> None:
    occupancy = Occupancy(list)
    lone(occupancy, STREAK + 2)
    assert occupancy.begins(batch(1000))
    assert occupancy.begins(batch(1000)), "its other branch"


def test_a_model_is_quick_once_it_was_measured_to_be_and_as_long_as_it_is() -> None:
    pace = Pace()
    assert not pace.is_quick
    while not pace.is_quick:
        pace.took(QUICK_NS // 3)
    for _ in range(30):
        pace.took(QUICK_NS // 3)
    pace.took(10**12)
    assert pace.is_quick, "the kernel may run somebody else once"
    for _ in range(4):
        pace.took(WAIT_NS_MAX)
    assert not pace.is_quick


@pytest.mark.parametrize("members", [1, 2])
def test_company_is_told_of_where_requests_came_one_by_one(members: int) -> None:
    told: list[str] = []
    occupancy = Occupancy(lambda: told.append("company"))
    lone(occupancy, STREAK - 1)
    occupancy.begins(batch(1000))
    occupancy.begins(batch(1001, members))
    assert told == [], "they did not for long enough"
    occupancy.ends()
    occupancy.ends()
    lone(occupancy, STREAK)
    occupancy.begins(batch(2000))
    for _ in range(2):
        occupancy.begins(batch(2001, members))
        assert told == ["company"]
