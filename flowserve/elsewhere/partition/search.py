"""Finds a cheap assignment of models to the server and to other machines.

Decides how: a minimum cut between the server and the machines beside it, which is exact as long as every machine has
room. If the server has too little room, the price of its cores is raised until the cut moves enough models away. From
this assignment, and from random ones, the true cost is then reduced by moving one or two models at a time. The same
task and seed give the same assignment. Caller: `cli`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from random import Random
from typing import Final

import networkx

from flowserve.elsewhere.partition.costs import (
    AT_SERVER,
    SERVER,
    Assignment,
    PartitionTask,
    PlaceableModel,
    assignment_cost,
    loads,
    price_elsewhere,
    price_here,
)

RESTARTS: Final = 20
_PRICE_MAX: Final = 2.0**20  # of a busy second of the server, in seconds of latency
_PRICE_STEPS: Final = 30
_NOTHING: Final = 1e-12  # a smaller gain is rounding
_UNITS: Final = 1e12  # units of capacity per second: integers, so that a cut is exact
_SOURCE: Final = "server"
_SINK: Final = "machines"


def partition(task: PartitionTask, seed: int = 0, restarts: int = RESTARTS) -> Assignment:
    """The cheapest assignment found. Never more expensive than all models in the server, where they are allowed."""
    random = Random(seed)
    starts = [tuple(min(one.allowed) for one in task.models), relieving_cut(task)]
    starts += [tuple(random.choice(sorted(one.allowed)) for one in task.models) for _ in range(restarts)]
    ends = [_improved(task, start) for start in dict.fromkeys(starts)]
    return min(ends, key=partial(assignment_cost, task))  # of equally cheap ones the first, which moved least


def relieving_cut(task: PartitionTask) -> Assignment:
    """The minimum cut at the lowest price of the server's cores at which they are not overloaded; at the highest price
    if they always are.
    """
    found = minimum_cut(task)
    if not _is_overloaded(task, found):
        return found
    low, high = 0.0, _PRICE_MAX
    found = minimum_cut(task, high)
    for _ in range(_PRICE_STEPS):
        price = (low + high) / 2
        tried = minimum_cut(task, price)
        if _is_overloaded(task, tried):
            low = price
        else:
            high, found = price, tried
    return found


def minimum_cut(task: PartitionTask, core_price: float = 0.0) -> Assignment:
    """The assignment of least `unloaded_cost`, exactly if there is one kind of machine beside the server. Of several
    kinds, each model has the first that it is allowed on, and they count as one.
    """
    # The edges that lead from the server's side to the other are cut, and cost their capacity; without one: infinite.
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    names = {AT_SERVER: _SOURCE} | {i: f"model {i}" for i in range(len(task.models))}
    for i, model in enumerate(task.models):
        here, elsewhere = price_here(model, core_price), price_elsewhere(model, core_price)
        graph.add_edge(_SOURCE, names[i], **_capacity(elsewhere, is_possible=_elsewhere(model) != SERVER))
        graph.add_edge(names[i], _SINK, **_capacity(here, is_possible=SERVER in model.allowed))
    for number, crossing in enumerate(task.crossings):
        # Connected so that it is on the server's side if one of the others is.
        name = f"crossing {number}"
        graph.add_edges_from((names[other], name) for other in crossing.others)
        graph.add_edge(name, names[crossing.model], **_capacity(crossing.seconds))
    _, (stay, _) = networkx.minimum_cut(graph, _SOURCE, _SINK)
    return tuple(SERVER if names[i] in stay else _elsewhere(model) for i, model in enumerate(task.models))


def _capacity(seconds: float, *, is_possible: bool = True) -> dict[str, int]:
    return {"capacity": round(seconds * _UNITS)} if is_possible else {}


def _elsewhere(model: PlaceableModel) -> int:
    return min(model.allowed - {SERVER}, default=SERVER)


def _is_overloaded(task: PartitionTask, assignment: Assignment) -> bool:
    return any(one.overload for one in loads(task, assignment) if one.kind == SERVER and not one.of_gpus)


def _improved(task: PartitionTask, start: Assignment) -> Assignment:
    """The assignment after moves of one or two models, when no such move makes it cheaper."""
    best, least = start, assignment_cost(task, start)
    is_better = True
    while is_better:
        is_better = False
        for tried in _moves(task, best):
            found = assignment_cost(task, tried)
            if found < least - _NOTHING:
                best, least, is_better = tried, found, True
                break
    return best


def _moves(task: PartitionTask, assignment: Assignment) -> Iterator[Assignment]:
    """All assignments in which one model is elsewhere, and then those in which two are: exchanged, or moved together
    because they are neighbours.
    """
    others = [sorted(one.allowed - {kind}) for one, kind in zip(task.models, assignment, strict=True)]
    for count in (1, 2):
        for moved in combinations(range(len(assignment)), count):
            for kinds in product(*(others[i] for i in moved)):
                changed = dict(zip(moved, kinds, strict=True))
                yield tuple(changed.get(i, kind) for i, kind in enumerate(assignment))
