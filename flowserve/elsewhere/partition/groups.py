"""Neighbours on one kind of machine that could run there as one step.

Decides which steps form a group: they are connected by tensors, and no path leaves the group and comes back, not even
through other groups, so that a group can run as a whole. Does not know models or costs: steps and edges are numbers.
Caller: `cli`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import networkx

from flowserve.elsewhere.partition.costs import SERVER

Link = tuple[int, int]  # from a step to one that reads a tensor of it


def convex_groups(places: Sequence[int], edges: Collection[Link], joinable: Collection[Link]) -> list[tuple[int, ...]]:
    """The groups of several steps, none of which could be larger. `places`: the kind of machine of each step; `edges`:
    of a graph without cycles; `joinable`: those whose ends may be in one group. Steps in the server are in none.
    """
    groups: networkx.DiGraph[int] = networkx.DiGraph()
    groups.add_nodes_from(range(len(places)))
    groups.add_edges_from(edges)
    group_of = list(range(len(places)))  # each named by its first member
    candidates = sorted(one for one in joinable if places[one[0]] == places[one[1]] != SERVER)
    while (pair := next((one for one in candidates if _may_join(groups, group_of, one)), None)) is not None:
        first, second = (group_of[step] for step in pair)
        networkx.contracted_nodes(groups, first, second, self_loops=False, copy=False)
        group_of = [first if group == second else group for group in group_of]
    members = {group: tuple(i for i, of in enumerate(group_of) if of == group) for group in sorted(set(group_of))}
    return [one for one in members.values() if len(one) > 1]


def _may_join(groups: networkx.DiGraph[int], group_of: Sequence[int], pair: Link) -> bool:
    """Whether the groups at both ends are two, and no path between them passes a third one."""
    first, second = group_of[pair[0]], group_of[pair[1]]
    if first == second:
        return False
    between = networkx.restricted_view(groups, [], [(first, second)])
    return not networkx.has_path(between, first, second)
