"""Instances that take several batches at once: which is next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.scheduling.free_instances import FreeInstances


def test_the_next_instance_runs_fewest_and_has_waited_longest() -> None:
    free = FreeInstances(["a", "a", "b", "b"])
    assert [free.popleft() for _ in range(4)] == ["a", "b", "a", "b"]
    free.append("b")
    free.append("a")
    free.append("b")
    assert [*free] == ["b", "b", "a"]
    assert free[0] == "b"
    assert [free.popleft() for _ in range(3)] == ["b", "a", "b"]
    with pytest.raises(IndexError):
        free.popleft()
    with pytest.raises(ValueError):
        free.remove("a")


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_properties_no_entry_is_lost_and_none_is_taken_beside_an_idler_instance(
    moves: list[int], instances: int, depth: int
) -> None:
    every = [i for i in range(instances) for _ in range(depth)]
    free = FreeInstances(every)
    running: list[int] = []
    for move in moves:
        if move < 3 and free:
            most = max(Counter(free).values())
            taken = free[0]
            assert Counter(free)[taken] == most
            assert free.popleft() == taken
            running.append(taken)
        elif move == 3 and running:
            free.append(running.pop(0))
        elif move == 4 and 0 in free:
            free.remove(0)
            running.append(0)
        assert sorted([*free, *running]) == every
        assert len(free) == len(every) - len(running)
        assert all((i in free) == (i in [*free]) for i in range(instances))
