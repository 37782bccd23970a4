"""Nesting levels of a graph with decoupled nodes: how often each step runs for one request.

Decides the level of each node. A request is the single iteration of level 0. Each response of the decoupled node of
level d starts an iteration of level d + 1, and every node of that level runs once in it. A node's level is the deepest
level of the tensors it reads; tensors from outer levels (of the request, or of a node with one response) are the same
in all iterations. So the levels of a graph are nested like loops. Two decoupled nodes side by side have no common
iteration count, and a step that reads from both is refused by rule G20.

Does not run anything: `scheduling` counts iterations by these numbers. Callers: `plan`, `compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowserve.graph.types import GRAPH, Edge, Graph


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """`depth[n]`: the level of node n. `splits[d]`: the decoupled node of level d, whose responses are the iterations
    of level d + 1; so `len(splits)` is the level whose iterations are the graph's responses. `missing[n]`: the number
    of tensors of its own level, written by nodes, that node n waits for. `late[n]`: nodes of outer levels that it also
    waits for. `firsts[d]`: the nodes of level d + 1 that wait for nothing of their level except the response itself.
    `answer_late`: the nodes of outer levels that the graph's responses wait for.

    By slot: `consumers[s]` are its readers on its own level, `below[s]` whether a deeper level reads it, `readers[s]`
    the number of readers on its own level, plus one that never finishes if a deeper level reads it. `frees[n]`: the
    slots of its own level that node n reads. `limits[n]`: concurrent executions of its step, 0 for no limit.
    """

    depth: tuple[int, ...]
    splits: tuple[int, ...]
    missing: tuple[int, ...]
    late: tuple[tuple[int, ...], ...]
    answer_late: tuple[int, ...]
    firsts: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    below: tuple[bool, ...]
    readers: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    is_shared: bool


def origins(graph: Graph, edges: Sequence[Edge]) -> list[tuple[int, ...]]:
    """For each node, the decoupled nodes for each of whose responses it runs once, outermost first. If its inputs have
    no common iteration count: all of these nodes, in an order that is no prefix of another.
    """
    found: list[tuple[int, ...]] = [()] * len(graph.nodes)
    feeding: dict[int, list[int]] = {}
    for edge in edges:
        feeding.setdefault(edge.consumer, []).append(edge.producer)
    for node in graph.nodes:  # in topological order
        found[node.index] = joined([written_by(graph, found, one) for one in feeding.get(node.index, ())])
    return found


def joined(chains: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest chain if each chain is a prefix of it; else the union of all, which is no prefix of another chain."""
    if are_nested(chains):
        return max(chains, key=len, default=())
    return tuple(dict.fromkeys(one for chain in chains for one in chain))


def are_nested(chains: Sequence[tuple[int, ...]]) -> bool:
    """Whether each chain is a prefix of the longest: then tensors with these origins can be read together."""
    longest = max(chains, key=len, default=())
    return all(longest[: len(chain)] == chain for chain in chains)


def written_by(graph: Graph, found: Sequence[tuple[int, ...]], producer: int) -> tuple[int, ...]:
    """The origins of the tensors that a node (or the request) writes."""
    if producer == GRAPH:
        return ()
    return (*found[producer], producer) if graph.nodes[producer].decoupled else found[producer]


def nesting(graph: Graph, edges: Sequence[Edge], slot_of: dict[tuple[int, int], int]) -> Nesting | None:
    """The levels of a well-formed graph; None if every step runs once and no limit is shared."""
    makers_of_answers = [edge.producer for edge in edges if edge.consumer == GRAPH]
    if not graph.is_ensemble:  # a plain model runs and responds also without inputs and outputs
        makers_of_answers = [node.index for node in graph.nodes]
    active = {*makers_of_answers, *(edge.consumer for edge in edges), *(edge.producer for edge in edges)} - {GRAPH}
    is_shared = graph.shares_limits and any(node.max_inflight for node in graph.nodes)
    if not is_shared and not any(graph.nodes[index].decoupled for index in active):
        return None
    found = origins(graph, edges)
    splits = joined([written_by(graph, found, producer) for producer in makers_of_answers])
    depth = [len(chain) for chain in found]
    slots = len(slot_of)
    level = [0] * slots
    makers = [GRAPH] * slots
    for (producer, _), slot in slot_of.items():
        makers[slot] = producer
        if producer != GRAPH:
            level[slot] = depth[producer] + graph.nodes[producer].decoupled
    reads: list[list[int]] = [[] for _ in graph.nodes]
    consumers: list[list[int]] = [[] for _ in range(slots)]
    below = [False] * slots
    for edge in edges:
        slot = slot_of[edge.producer, edge.output]
        if edge.consumer == GRAPH:
            below[slot] = True  # responses are read when their iteration is over
            continue
        if slot in reads[edge.consumer]:
            continue
        reads[edge.consumer].append(slot)
        if level[slot] == depth[edge.consumer]:
            consumers[slot].append(edge.consumer)
        else:
            below[slot] = True
    own = [[slot for slot in read if level[slot] == depth[n]] for n, read in enumerate(reads)]
    late = [
        {makers[slot] for slot in read if level[slot] < depth[n] and makers[slot] not in (GRAPH, *splits)}
        for n, read in enumerate(reads)
    ]
    answered = {edge.producer for edge in edges if edge.consumer == GRAPH and edge.producer not in (GRAPH, *splits)}
    firsts = [
        tuple(
            n
            for n in range(len(graph.nodes))
            if n in active and depth[n] == d + 1 and all(makers[slot] == split for slot in own[n])
        )
        for d, split in enumerate(splits)
    ]
    return Nesting(
        depth=tuple(depth),
        splits=splits,
        missing=tuple(sum(makers[slot] != GRAPH for slot in read) for read in own),
        late=tuple(tuple(sorted(one)) for one in late),
        answer_late=tuple(sorted(n for n in answered if depth[n] < len(splits))),
        firsts=tuple(firsts),
        consumers=tuple(map(tuple, consumers)),
        below=tuple(below),
        readers=tuple(len(consumers[slot]) + below[slot] for slot in range(slots)),
        frees=tuple(map(tuple, own)),
        # A limit per request has no effect on level 0, where a node runs once per request.
        limits=tuple(node.max_inflight if depth[node.index] or is_shared else 0 for node in graph.nodes),
        is_shared=is_shared,
    )
