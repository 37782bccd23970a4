"""The search for an assignment against trying all of them, and the room of machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.elsewhere.partition.costs import (
    AT_SERVER,
    SERVER,
    Assignment,
    Crossing,
    MachineKind,
    PartitionTask,
    PlaceableModel,
    assignment_cost,
    crossing_s,
    instances_needed,
    loads,
    unloaded_cost,
)
from flowserve.elsewhere.partition.search import minimum_cut, partition, relieving_cut

TIMES = st.integers(0, 50).map(lambda ms: ms / 1000)
ROOM = st.integers(0, 4)
HUGE = st.just(10**6)


@st.composite
def tasks(draw: st.DrawFn, kinds: int = 2, most: int = 7, room: st.SearchStrategy[int] = ROOM) -> PartitionTask:
    """Any times, crossings between any models and with the server, and machines of any size."""
    count = draw(st.integers(1, most))
    some_kinds = st.frozensets(st.integers(0, kinds - 1), min_size=1)
    one_model = st.builds(PlaceableModel, st.just("m"), TIMES, TIMES, TIMES, TIMES, some_kinds, st.booleans())
    models = draw(st.lists(one_model, min_size=count, max_size=count))
    ends = st.frozensets(st.integers(AT_SERVER, count - 1), min_size=1, max_size=3)
    crossings = draw(st.lists(st.builds(Crossing, st.integers(0, count - 1), ends, TIMES), max_size=2 * count))
    machines = tuple(MachineKind(f"k{k}", draw(room), draw(room), draw(room)) for k in range(kinds))
    return PartitionTask(tuple(models), machines, tuple(crossings), rate=draw(st.integers(1, 300)))


def every(task: PartitionTask) -> Iterator[Assignment]:
    return product(*(sorted(one.allowed) for one in task.models))


@given(tasks(), st.sampled_from([0.0, 0.5, 8.0]))
def test_a_cut_is_the_cheapest_of_all_assignments_to_two_kinds(task: PartitionTask, price: float) -> None:
    least = min(unloaded_cost(task, one, price) for one in every(task))
    found = minimum_cut(task, price)
    assert found in [*every(task)]
    assert unloaded_cost(task, found, price) == pytest.approx(least, abs=1e-6)


@given(tasks(room=HUGE))
def test_with_room_everywhere_the_search_finds_the_cheapest_of_all(task: PartitionTask) -> None:
    least = min(assignment_cost(task, one) for one in every(task))
    assert assignment_cost(task, partition(task, restarts=0)) == pytest.approx(least, abs=1e-6)


@given(tasks(), st.integers(0, 4))
def test_the_relieving_cut_leaves_the_server_enough_cores_if_all_may_leave(task: PartitionTask, cores: int) -> None:
    models = tuple(replace(one, carry_s=0.0, allowed=BOTH, on_gpu=False) for one in task.models)
    task = replace(task, models=models, kinds=(MachineKind("server", 1, cores), task.kinds[1]))
    found = relieving_cut(task)
    assert (
        task.rate * sum(one.server_s for one, kind in zip(models, found, strict=True) if not kind) <= 0.7 * cores + 1e-9
    )
    assert found == minimum_cut(task) or loads(task, minimum_cut(task))[0].overload > 0


@given(tasks(kinds=3, most=5))
def test_the_search_is_never_worse_than_the_server_alone_than_the_cut_or_than_two_moves_away(
    task: PartitionTask,
) -> None:
    found = partition(task, restarts=2)
    assert found in [*every(task)]
    alone = tuple(min(one.allowed) for one in task.models)
    near = [one for one in every(task) if sum(a != b for a, b in zip(one, found, strict=True)) <= 2]
    for other in (alone, relieving_cut(task), *near):
        assert assignment_cost(task, found) <= assignment_cost(task, other) + 1e-9
    assert partition(task, restarts=2) == found


@given(tasks(kinds=3, most=5))
def test_machines_have_room_unless_an_overload_is_stated(task: PartitionTask) -> None:
    found = partition(task, restarts=2)
    stated = {(one.kind, one.of_gpus): one for one in loads(task, found)}
    for kind, machines in enumerate(task.kinds):
        for of_gpus, room in ((False, machines.count * machines.cores), (True, machines.count * machines.gpus)):
            here = [i for i, one in enumerate(task.models) if found[i] == kind and one.on_gpu == of_gpus]
            if kind == SERVER:
                carried_s = sum(one.carry_s for one, at in zip(task.models, found, strict=True) if at) * (not of_gpus)
                fits = task.rate * (sum(task.models[i].server_s for i in here) + carried_s) <= 0.7 * room + 1e-9
            else:
                fits = sum(instances_needed(task, i) for i in here) <= room
            assert fits == (stated[kind, of_gpus].overload == 0)


def task_of(
    *models: PlaceableModel, rate: float, cores: int = 2, machines: int = 4, link_s: float = 0.0004
) -> PartitionTask:
    crossings = tuple(Crossing(i, frozenset({AT_SERVER}), link_s) for i in range(len(models)))
    kinds = (MachineKind("server", 1, cores), MachineKind("cpu", machines, 2))
    return PartitionTask(models, kinds, crossings, rate)


BOTH = frozenset({0, 1})


def model_of(name: str, seconds: float, *allowed: int) -> PlaceableModel:
    """As fast everywhere, and passed on without work of the server."""
    return PlaceableModel(name, seconds, seconds, seconds, 0.0, frozenset(allowed or BOTH))


def test_models_stay_while_the_server_has_room_and_the_heavy_one_leaves_when_it_has_not() -> None:
    models = model_of("light", 0.001), model_of("heavy", 0.02)
    assert partition(task_of(*models, rate=60)) == (0, 0)
    assert partition(task_of(*models, rate=100)) == (0, 1)
    assert relieving_cut(task_of(*models, rate=100)) == (0, 1)  # no more leaves than must


def test_two_models_are_exchanged_where_neither_has_room_beside_the_other() -> None:
    """Each belongs beside a model that stays, and one of the first moves puts both on the wrong side."""
    b, a, c, d = (
        model_of(name, 0.001, *allowed) for name, allowed in zip("bacd", ({1, 2}, {1, 2}, {1}, {2}), strict=True)
    )
    crossings = Crossing(0, frozenset({2}), 0.01), Crossing(1, frozenset({3}), 0.01)
    kinds = tuple(MachineKind(name, 1, 2) for name in ("server", "cpu", "gpu"))
    assert partition(PartitionTask((b, a, c, d), kinds, crossings, rate=1), restarts=0) == (1, 2, 1, 2)


def test_a_model_stays_if_the_server_would_be_as_busy_with_sending_its_tensors() -> None:
    models = model_of("light", 0.001), replace(model_of("quick", 0.02), carry_s=0.02)
    assert partition(task_of(*models, rate=100)) == (1, 0)
    assert loads(task_of(*models, rate=100), (0, 1))[0].used == pytest.approx(2.1)


def test_instances_are_used_to_seven_tenths() -> None:
    task = task_of(PlaceableModel("heavy", 0.02, 0.005, 0.007, 0.0, BOTH), rate=100)
    assert instances_needed(task, 0) == 1
    assert instances_needed(task, 0, in_server=True) == 3
    assert instances_needed(replace(task, rate=0.001), 0) == 1


def test_a_crossing_between_neighbours_on_one_kind_of_machine_takes_no_time() -> None:
    task = replace(
        task_of(*(model_of(name, 0.01) for name in "ab"), rate=1),
        crossings=(Crossing(0, frozenset({AT_SERVER}), 0.001), Crossing(0, frozenset({1}), 0.004)),
    )
    assert [crossing_s(task, one) for one in ((0, 0), (1, 0), (1, 1))] == [0, pytest.approx(0.005), 0.001]


def test_thirty_models_find_room_on_machines_that_have_just_enough() -> None:
    models = [model_of(f"m{i}", 0.004, 0, 1, 2) for i in range(30)]
    task = task_of(*models, rate=25)
    task = replace(task, kinds=(*task.kinds, MachineKind("gpu", 2, 4, 1)))
    found = partition(task)
    assert not any(one.overload for one in loads(task, found))
