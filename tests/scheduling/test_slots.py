"""Instances that take several batches at once: which is next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.scheduling.slots import Slots


def test_the_next_instance_runs_fewest_and_has_waited_longest() -> None:
    slots = Slots(["a", "a", "b", "b"])
    assert [slots.popleft() for _ in range(4)] == ["a", "b", "a", "b"]
    slots.append("b")
    slots.append("a")
    slots.append("b")
    assert [*slots] == ["b", "b", "a"]
    assert slots[0] == "b"
    assert [slots.popleft() for _ in range(3)] == ["b", "a", "b"]
    with pytest.raises(IndexError):
        slots.popleft()
    with pytest.raises(ValueError):
        slots.remove("a")


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_properties_no_slot_is_lost_and_none_is_taken_beside_an_idler_instance(
    moves: list[int], instances: int, depth: int
) -> None:
    every = [i for i in range(instances) for _ in range(depth)]
    slots = Slots(every)
    running: list[int] = []
    for move in moves:
        if move < 3 and slots:
            most = max(Counter(slots).values())
            taken = slots[0]
            assert Counter(slots)[taken] == most
            assert slots.popleft() == taken
            running.append(taken)
        elif move == 3 and running:
            slots.append(running.pop(0))
        elif move == 4 and 0 in slots:
            slots.remove(0)
            running.append(0)
        assert sorted([*slots, *running]) == every
        assert len(slots) == len(every) - len(running)
        assert all((i in slots) == (i in [*slots]) for i in range(instances))
