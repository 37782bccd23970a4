"""The regions of a graph: for which rows, items and responses each of its steps runs for one request.

Decides two things about each node and each tensor. Its *space* says for which rows of the request it exists: `when` and
`each` open spaces (`graph/spaces` and `compile` decide them). Its *level* says how often: a request is the single frame
of level 0, and each response of the decoupled node of level d opens a frame of level d + 1, in which every node of that
level runs once. A node's level is the deepest level of what it reads; tensors of outer levels (of the request, or of a
node with one response) are the same in all frames below. So levels are nested like loops. Two decoupled nodes side by
side have no common number of responses, and a step that reads from both is refused by rule G20.

An *operation* runs no model: it opens a space, or makes a tensor at the border of one. It has a level as a node has.

Does not run anything: `scheduling/frames` counts by these numbers. Callers: `plan`, `compile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flowserve.graph.types import DERIVED, GRAPH, Conversion, Derived, Edge, Graph, Ref, Space

SPREAD: Final = -3  # as the first number of a `Ref`: the rows of a space
NO_SLOT: Final = -1  # an optional input without a producer, or an output without a reader


@dataclass(frozen=True, slots=True, eq=False)
class Absence:
    """The effects, in a frame of one level, of a space without a row, which are applied all at once. `members` are the
    nodes and operations of that level in it and in the spaces within it; they never run. `spaces` are those within it
    that would open at this level. Nodes and operations outside wait for fewer slots: `waiting`, as (node or operation,
    number of slots), the spread's own included. Other slots have fewer readers: `reading`, as (slot, number of
    readers).
    """

    members: tuple[int, ...]
    spaces: tuple[Space, ...]
    waiting: tuple[tuple[int, int], ...]
    reading: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A space at one level: the slot of its spread, whether that was made at an outer level, the nodes and operations
    of this level that read the spread, and the effects if it has no row.
    """

    space: Space
    slot: int
    is_from_above: bool
    readers: tuple[int, ...]
    absence: Absence


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation at the border of a space, which runs no model. When the slots `reads` are written, the space `opens`
    begins, or the tensor `derived` is made. The result is written to `slot`; of a space that is its *spread*, which
    rows it has.

    `index` continues the numbers of the nodes, among the consumers of a slot. `tensors` are the slots of the tensors
    that it uses, in the order of the record, and `spreads` those of the spaces of `derived`, NO_SLOT for the space of
    the tensor itself. `around`: the space of the result, or the space around the one that begins; 0 for the request's
    own rows. `has_rows`: whether the result has a batch dimension. `examined`: the slots of the tensors whose elements
    it reads; of other tensors it only selects rows, so that they may stay on a device. `branches`: of a merge, the
    slots of each tensor and of its spread.
    """

    index: int
    reads: tuple[int, ...]
    slot: int
    tensors: tuple[int, ...]
    spreads: tuple[int, ...] = ()
    opens: Space | None = None
    derived: Derived | None = None
    around: int = 0
    has_rows: bool = True
    examined: tuple[int, ...] = ()
    branches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RegionPlan:
    """What a graph with regions adds to its plan. Arrays by node continue with the operations.

    `depth[n]`: the level of node n. `splits[d]`: the decoupled node of level d, whose responses are the frames of level
    d + 1; so `len(splits)` is the level whose frames are the graph's responses. `missing[n]`: the number of slots that
    node n waits for: those of its own level, and spreads. `late[n]`: nodes of outer levels that it also waits for.
    `first`: the nodes and operations of level 0 that read only the request's inputs. `firsts[d]`: the nodes of level d
    + 1 that wait for nothing of their level except the response itself. `chosen[d]`: those of level d + 1 that have a
    limit and read what operations make; how many of them a response starts is not known before. `answer_late`: the
    nodes of outer levels that the graph's responses wait for. `frees[n]`: the slots of its own level that node n reads,
    those of converted inputs included. `limits[n]`: concurrent executions of its step, 0 for no limit, and whether it
    `has_limits`; `is_shared`: all requests share them. `is_single`: a request has one frame, which shares nothing with
    other requests.

    By slot: `consumers[s]` are its readers on its own level, `below[s]` whether a deeper level or a response reads it,
    `readers[s]` the number of readers on its own level, plus one that never finishes if `below[s]`. `space_of[s]`: the
    space of its rows, of a spread that of the space around.

    `operations` and, by node, `spreads`: the slot of the spread of the node's space, NO_SLOT for the request's own
    rows. `tests[n]`: the operations that test only the j-th output of node n, which runs for the request's own rows, as
    (j, operation): they run when the step ends, once for all members of a batch, and read no slot. `entries[d]`: the
    spaces by their number, as they begin in a frame of level d: None where this level does not read them. `nodes[s]`:
    the nodes of space s. `space_opened`: the space of each slot that holds a spread.
    """

    depth: tuple[int, ...]
    splits: tuple[int, ...]
    missing: tuple[int, ...]
    late: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    firsts: tuple[tuple[int, ...], ...]
    chosen: tuple[tuple[int, ...], ...]
    answer_late: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    below: tuple[bool, ...]
    readers: tuple[int, ...]
    space_of: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    has_limits: bool
    is_shared: bool
    is_single: bool
    operations: tuple[Operation, ...]
    spreads: tuple[int, ...]
    tests: tuple[tuple[tuple[int, Operation], ...], ...]
    entries: tuple[tuple[Entry | None, ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    space_opened: Mapping[int, int]


class Chains:
    """For each node and tensor, the decoupled nodes for each of whose responses it is made once, outermost first. If
    the inputs of a node have no common number of responses: all of these nodes, in an order that is no prefix of
    another. `needed`: the nodes whose steps run, None for all.
    """

    def __init__(self, graph: Graph, edges: Iterable[Edge], needed: Collection[int] | None = None) -> None:
        self._graph = graph
        self._needed = {*range(len(graph.nodes)), GRAPH} if needed is None else {*needed, GRAPH}
        self._of_node: list[tuple[int, ...]] = [()] * len(graph.nodes)
        self._known: dict[Ref, tuple[int, ...]] = {}
        feeding: dict[int, list[Ref]] = {}
        for edge in edges:
            feeding.setdefault(edge.consumer, []).append(ref_of(edge))
        for node in graph.nodes:  # in topological order
            read = feeding.get(node.index, [])
            if node.space:
                read.append((SPREAD, node.space))
            self._of_node[node.index] = joined([self.of(ref) for ref in read])

    def of_node(self, n: int) -> tuple[int, ...]:
        return self._of_node[n]

    def of(self, ref: Ref) -> tuple[int, ...]:
        """The chain of a tensor or of a spread."""
        kind, number = ref
        if kind == GRAPH:
            return ()
        if kind >= 0:
            return (*self._of_node[kind], kind) if self._graph.nodes[kind].decoupled else self._of_node[kind]
        found = self._known.get(ref)
        if found is None:
            found = self._known[ref] = joined([self.of(one) for one in self._made_of(kind, number)])
        return found

    def makers(self, ref: Ref) -> Iterator[Ref]:
        """The tensors of nodes and of the request that a tensor or a spread is made from."""
        kind, number = ref
        if kind >= 0 or kind == GRAPH:
            yield ref
            return
        for one in self._made_of(kind, number):
            yield from self.makers(one)

    def _made_of(self, kind: int, number: int) -> list[Ref]:
        if kind == SPREAD:
            space = self._graph.spaces[number - 1]
            around: list[Ref] = [(SPREAD, space.parent)] if space.parent else []
            return [*space.opens, *around]
        derived = self._graph.derived[number]
        spaces = dict.fromkeys((*derived.spaces, derived.space))
        # Whether rows are present is stated once for each response that has them.
        stated = [ref for ref in derived.of if all(maker in self._needed for maker, _ in self.makers(ref))]
        return [*derived.reads, *stated, *((SPREAD, one) for one in spaces if one)]


def ref_of(edge: Edge) -> Ref:
    """The tensor that an edge's consumer reads."""
    return (edge.producer, edge.output) if edge.derived < 0 else (DERIVED, edge.derived)


def joined(chains: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest chain if each chain is a prefix of it; else the union of all, which is no prefix of another chain."""
    if are_nested(chains):
        return max(chains, key=len, default=())
    return tuple(dict.fromkeys(one for chain in chains for one in chain))


def are_nested(chains: Sequence[tuple[int, ...]]) -> bool:
    """Whether each chain is a prefix of the longest: then tensors with these chains can be read together."""
    longest = max(chains, key=len, default=())
    return all(longest[: len(chain)] == chain for chain in chains)


class Wires(Protocol):
    """What the plan knows of a graph's tensors: the slot of each, the slots that each node reads, those of its inputs
    whose shape is converted, as (slot, own slot, conversion), the number of readers of each slot, converted ones last,
    and the outputs that operations test when a step ends.
    """

    slot_of: dict[Ref, int]
    reads: list[list[int]]
    converts: list[list[tuple[int, int, Conversion]]]
    readers: list[int]
    tested: dict[int, Ref]


def region_plan(
    graph: Graph, edges: Sequence[Edge], wires: Wires, operations: Sequence[Operation], needed: Collection[int]
) -> RegionPlan | None:
    """The regions of a well-formed graph; None if every step runs once, for all rows, and no limit is shared.
    `needed`: the nodes whose steps run.
    """
    is_shared = graph.shares_limits and any(node.max_inflight for node in graph.nodes)
    if not (is_shared or graph.spaces or any(graph.nodes[n].decoupled for n in needed)):
        return None
    return _Planner(graph, edges, wires, operations, needed).plan(is_shared=is_shared)


class _Planner:
    """Computes a `RegionPlan`."""

    def __init__(
        self,
        graph: Graph,
        edges: Sequence[Edge],
        wires: Wires,
        operations: Sequence[Operation],
        needed: Collection[int],
    ) -> None:
        self.graph = graph
        self.needed = needed
        self.wires = wires
        self.slot_of = slot_of = wires.slot_of
        self.operations = operations
        self.writers = [ref_of(edge) for edge in edges if edge.consumer == GRAPH]
        self.chains = chains = Chains(graph, edges, needed)
        self.spread_slots = {slot: number for (kind, number), slot in slot_of.items() if kind == SPREAD}
        self.level = [0] * len(slot_of)
        self.makers = [GRAPH] * len(slot_of)
        for ref, slot in slot_of.items():
            self.level[slot] = len(chains.of(ref))
            self.makers[slot] = ref[0]
        for one in operations:
            self.makers[one.slot] = one.index
        self.depth = [len(chains.of_node(node.index)) for node in graph.nodes]
        self.depth += [self.level[one.slot] for one in operations]
        self.reads = [[*dict.fromkeys(read)] for read in (*wires.reads, *(one.reads for one in operations))]
        self.own = [[s for s in read if self.level[s] == self.depth[n]] for n, read in enumerate(self.reads)]
        self.above = [[s for s in read if self.level[s] < self.depth[n]] for n, read in enumerate(self.reads)]
        self.consumers: list[list[int]] = [[] for _ in slot_of]
        self.below = [False] * len(slot_of)
        for n, read in enumerate(self.own):
            for slot in read:
                self.consumers[slot].append(n)
        for edge in edges:
            if edge.consumer == GRAPH:
                self.below[slot_of[ref_of(edge)]] = True  # responses are read when their frame is over
        for read in self.above:
            for slot in read:
                self.below[slot] = True

    def plan(self, *, is_shared: bool) -> RegionPlan:
        graph, level, makers, depth, needed = self.graph, self.level, self.makers, self.depth, self.needed
        # A plain model runs and responds also without inputs and outputs.
        answers = self.writers if graph.is_ensemble else [(node.index, 0) for node in graph.nodes]
        splits = joined([self.chains.of(ref) for ref in answers])
        given = (GRAPH, *splits)
        missing = [
            sum(makers[s] != GRAPH for s in own) + sum(s in self.spread_slots for s in above)
            for own, above in zip(self.own, self.above, strict=True)
        ]
        late = [{makers[s] for s in above if s not in self.spread_slots} - {*given} for above in self.above]
        answered = [self.slot_of[ref] for ref in self.writers]
        nodes = range(len(graph.nodes))
        first = [n for n in nodes if n in needed and not depth[n] and not missing[n]]
        first += [one.index for one in self.operations if one.index not in self.wires.tested and not missing[one.index]]
        firsts = [
            tuple(
                n
                for n in nodes
                if n in needed and depth[n] == d + 1 and all(makers[slot] == split for slot in self.own[n])
            )
            for d, split in enumerate(splits)
        ]
        chosen = [
            tuple(
                n
                for n in nodes
                if n in needed
                and depth[n] == d + 1
                and graph.nodes[n].max_inflight
                and any(makers[slot] >= len(nodes) for slot in self.own[n])
            )
            for d in range(len(splits))
        ]
        tests: list[list[tuple[int, Operation]]] = [[] for _ in nodes]
        for one in self.operations:
            if one.index in self.wires.tested:
                n, j = self.wires.tested[one.index]
                tests[n].append((j, one))
        entries = [self._entries(d) for d in range(len(splits) + 1)]
        below = [
            is_below or (s in self.spread_slots and any(at[self.spread_slots[s]] for at in entries[level[s] + 1 :]))
            for s, is_below in enumerate(self.below)
        ]
        space_of = [0] * len(level)
        for (kind, number), slot in self.slot_of.items():
            if kind == SPREAD:
                space_of[slot] = graph.spaces[number - 1].parent
            elif kind == DERIVED:
                space_of[slot] = graph.derived[number].space
            elif kind != GRAPH:
                space_of[slot] = graph.nodes[kind].space
        converted = [[own for _, own, _ in self.wires.converts[n]] for n in nodes]
        inside: list[list[int]] = [[] for _ in range(len(graph.spaces) + 1)]
        for n in nodes:
            if n in needed:
                inside[graph.nodes[n].space].append(n)
        # A limit per request has no effect where a node runs once per request.
        limits = tuple(node.max_inflight if depth[node.index] or node.space or is_shared else 0 for node in graph.nodes)
        return RegionPlan(
            depth=tuple(depth),
            splits=splits,
            missing=tuple(missing),
            late=tuple(tuple(sorted(one)) for one in late),
            first=tuple(first),
            firsts=tuple(firsts),
            chosen=tuple(chosen),
            answer_late=tuple(sorted({makers[s] for s in answered if level[s] < len(splits)} - {*given})),
            consumers=tuple(map(tuple, self.consumers)),
            below=tuple(below),
            readers=(
                *(len(self.consumers[s]) + below[s] for s in range(len(level))),
                *self.wires.readers[len(level) :],
            ),
            space_of=tuple(space_of),
            frees=tuple((*own, *(converted[n] if n in nodes else ())) for n, own in enumerate(self.own)),
            limits=limits,
            has_limits=any(limits),
            is_shared=is_shared,
            is_single=not splits and not is_shared,
            operations=tuple(self.operations),
            spreads=tuple(self.slot_of[SPREAD, node.space] if node.space else NO_SLOT for node in graph.nodes),
            tests=tuple(map(tuple, tests)),
            entries=tuple(entries),
            nodes=tuple(map(tuple, inside)),
            space_opened=self.spread_slots,
        )

    def _entries(self, d: int) -> tuple[Entry | None, ...]:
        """The spaces as they begin in a frame of level d."""
        opened = {one.opens.index for one in self.operations if one.opens is not None}
        found: list[Entry | None] = [None] * (len(self.graph.spaces) + 1)
        for space in self.graph.spaces:
            slot = self.slot_of[SPREAD, space.index]
            if space.index in opened and self.level[slot] <= d:
                absence = self._absence(space, d)
                if self.level[slot] == d or absence.members or absence.waiting:
                    found[space.index] = Entry(
                        space, slot, self.level[slot] < d, self._spread_readers(slot, d), absence
                    )
        return tuple(found)

    def _spread_readers(self, slot: int, d: int) -> tuple[int, ...]:
        """The nodes and operations of level d that read a spread."""
        if self.level[slot] == d:
            return tuple(self.consumers[slot])
        return tuple(n for n, above in enumerate(self.above) if slot in above and self.depth[n] == d)

    def _absence(self, opened: Space, d: int) -> Absence:
        inside = {opened.index}
        for space in self.graph.spaces:  # a space comes after the one around it
            if space.parent in inside:
                inside.add(space.index)
        within = [node.index for node in self.graph.nodes if node.index in self.needed and node.space in inside]
        around = [one for one in self.operations if one.around in inside]
        every = {*within, *(one.index for one in around)}
        members = {n for n in every if self.depth[n] == d}
        written = {s for s, maker in enumerate(self.makers) if maker in every and self.level[s] == d}
        lost = Counter(n for s in written for n in self.consumers[s] if n not in members)
        for index in inside:
            slot = self.slot_of[SPREAD, index]
            if self.level[slot] < d or index == opened.index:
                lost.update(n for n in self._spread_readers(slot, d) if n not in members)
        reading = Counter(s for n in members for s in self.own[n] if s not in written)
        return Absence(
            members=tuple(sorted(members)),
            spaces=tuple(one.opens for one in around if one.opens is not None and one.index in members),
            waiting=tuple(lost.items()),
            reading=tuple(reading.items()),
        )
