"""The form of a graph that the request path reads: integers and tuples, computed once at load.

Decides the numbers of a graph's tensors: each gets a *slot* (graph inputs first, in order, then node outputs). Every
node lists its slots, every slot its consumers, so the state of a request is two lists of that length and no dictionary.
Also recognizes the common cases of a node (one input, one reader, one following node), and the runs of nodes that a
batch may pass as one route. Does not know what a slot holds. Callers: `scheduling`, `runtime`, the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowserve.graph.regions import NO_SLOT, SPREAD, Operation, RegionPlan, ref_of, region_plan
from flowserve.graph.types import (
    DERIVED,
    GRAPH,
    Conversion,
    Derivation,
    Edge,
    Graph,
    ModelKey,
    Node,
    Ref,
    Space,
)

_INWARD: Final = (Derivation.TAKE, Derivation.ITEMS)
_OF_ROWS: Final = (*_INWARD, Derivation.MERGE, Derivation.RESHAPE)  # they say which rows a tensor has


@dataclass(frozen=True, slots=True, eq=False)
class PlanNode:
    """`inputs[i]` is the slot of the model's i-th input, `outputs[j]` of its j-th output; NO_SLOT where unmapped.
    `distinct_inputs` are the input slots, each once: a step reads a tensor once, however many inputs it feeds.
    `writes` are the mapped outputs as (j, slot, consumers of the slot, but for `RegionPlan.tests`).

    `variable` lists the input indices whose shapes must agree within a batch (some dimension is -1, not ragged).
    `optional`: some input may be absent; then all members of a batch must carry the same set.
    `checks` are the inputs whose shape can be checked only at run time, because the producer leaves open what the
    consumer fixes: (input index, dims the model wants). `wanted` are the names of the outputs this node must produce,
    () for a plain model, where the request chooses them. `converts` are the inputs whose shape is converted: (slot of
    the tensor, slot that this input reads, conversion); only this input reads the second slot.

    Properties that would otherwise be derived for every request: `sole[i]`: only this node reads the slot of input
    i, and only at that input. `plain` is the slot of the node's only input if nothing but its number of rows is
    left to check (its shape may vary), else NO_SLOT. `goes_on`: the node's only output has one reader, a plain node
    that waits for nothing else, and this node is the only reader of its only slot: (j, slot, the next node's
    index), else None. `ends`: the node's only output is read by the graph alone: (j, slot), else None. `frees` are
    the slots that only this node reads.

    `is_needed`: a step of this node runs for each request, unless it is in a space without rows. That of a plain model
    runs whether or not the model has outputs.
    """

    index: int
    name: str
    model: ModelKey
    inputs: tuple[int, ...]
    distinct_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[tuple[int, int, tuple[int, ...]], ...]
    max_batch_size: int
    variable: tuple[int, ...]
    optional: bool
    checks: tuple[tuple[int, tuple[int, ...]], ...]
    wanted: tuple[str, ...]
    converts: tuple[tuple[int, int, Conversion], ...]
    sole: tuple[bool, ...]
    plain: int
    goes_on: tuple[int, int, int] | None
    ends: tuple[int, int] | None
    frees: tuple[int, ...]
    is_needed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`first`: the nodes that need no other node. `missing[n]`: how many distinct slots of other nodes node n waits
    for. `consumers[s]`: the nodes that read slot s; `needed_by[s]`: the name of the first that cannot run without it,
    "" if all can. `readers[s]`: the number of readers of slot s, including the graph's own outputs. `blank`: the
    initial values of a request's slots after its inputs. The slots from `converted` on hold converted inputs; `lacking`
    are the graph's optional inputs that some step cannot run without: (slot, the step's input, its node). `regions`:
    for which rows, items and responses each step runs; None if each runs once, for all rows. `runs[n]`: the nodes, n
    first, that one batch may pass one after the other without returning to the scheduler in between, as far as the
    graph allows it (`_run`); () if there is only n. `routes`: what scheduling derives from `runs`; written by
    scheduling only. `consumers` include the operations of `regions`.
    """

    graph: Graph
    nodes: tuple[PlanNode, ...]
    blank: tuple[None, ...]
    first: tuple[int, ...]
    missing: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    needed_by: tuple[str, ...]
    readers: tuple[int, ...]
    output_slots: tuple[int, ...]
    converted: int
    lacking: tuple[tuple[int, str, int], ...]
    regions: RegionPlan | None
    runs: tuple[tuple[int, ...], ...]
    routes: dict[int, Any] = field(default_factory=dict)


def make_plan(graph: Graph, outputs: Collection[str] | None = None) -> Plan:
    """Number the tensors of a well-formed graph. The plan's arrays are indexed by node index and by slot.

    `outputs` are the requested graph outputs, None for all: steps that only serve other outputs are never ready, as on
    Triton. Slot numbers are the same in every plan of a graph.
    """
    edges = _needed(graph, outputs)
    wires = _Wires(graph, edges)
    made_by_nodes = range(len(graph.inputs), wires.count)
    missing = tuple(sum(slot in made_by_nodes for slot in dict.fromkeys(reads)) for reads in wires.reads)
    needed = {node.index for node in graph.nodes if wires.is_read(node) or not graph.is_ensemble}
    operations = wires.operations(graph) if graph.spaces else []
    needed |= {node.index for node in graph.nodes if wires.is_read(node)}  # by an operation
    regions = region_plan(graph, edges, wires, operations, needed)
    nodes = tuple(_plan_node(graph, node, wires, missing, is_apart=regions is not None) for node in graph.nodes)
    consumers = tuple(map(tuple, wires.consumers))
    return Plan(
        graph=graph,
        nodes=nodes,
        blank=(None,) * (len(wires.readers) - len(graph.inputs)),
        first=tuple(node.index for node in nodes if node.is_needed and not missing[node.index]),
        missing=missing,
        consumers=consumers,
        needed_by=tuple(wires.needed_by),
        readers=tuple(wires.readers),
        output_slots=tuple(wires.output_slots),
        converted=wires.count,
        lacking=tuple(_lacking(graph, edges)),
        regions=regions,
        runs=tuple(
            () if regions is not None else _run(graph, nodes, n, consumers, wires.output_slots)
            for n in range(len(nodes))
        ),
    )


def _run(
    graph: Graph,
    nodes: Sequence[PlanNode],
    n: int,
    consumers: Sequence[tuple[int, ...]],
    output_slots: Sequence[int],
) -> tuple[int, ...]:
    """The nodes that a batch of node n may pass as one route: each reads only tensors written on the route, each has
    another model, and no tensor except the last node's is read elsewhere. () if there is no second node.
    """
    run = [nodes[n]]
    made = set(nodes[n].outputs)
    models = {nodes[n].model}
    for node in nodes[n + 1 :]:
        if node.model not in models and made.issuperset(node.inputs) and _may_follow(graph, node):
            run.append(node)
            made.update(node.outputs)
            models.add(node.model)
    while len(run) > 1 and not is_private(run, consumers, output_slots):
        run.pop()
    return tuple(node.index for node in run) if len(run) > 1 and run[0].max_batch_size and run[0].writes else ()


def _may_follow(graph: Graph, node: PlanNode) -> bool:
    """Whether a node can read its inputs as earlier nodes wrote them: each as one tensor of the whole batch."""
    if not (node.writes and node.inputs and node.max_batch_size) or node.converts or node.optional:
        return False
    if len(set(node.inputs)) < len(node.inputs) or min(node.inputs) < 0:
        return False
    return not any(spec.ragged for spec in graph.nodes[node.index].inputs)


def is_private(run: Sequence[PlanNode], consumers: Sequence[tuple[int, ...]], output_slots: Sequence[int]) -> bool:
    """Whether the tensors written before the last node of a run are read by nodes of the run only."""
    inside = {node.index for node in run}
    return all(
        inside.issuperset(consumers[slot]) and slot not in output_slots
        for node in run[:-1]
        for _, slot, _ in node.writes
    )


class _Wires:
    """The edges in numbers. There are `count` slots of tensors; the inputs whose shape is converted read further slots
    behind them. Slots are the same in every plan of a graph.
    """

    def __init__(self, graph: Graph, edges: Sequence[Edge]) -> None:
        self.slot_of = {(GRAPH, i): i for i in range(len(graph.inputs))}  # of each (producer, output)
        for edge in graph.edges:
            self.slot_of.setdefault((edge.producer, edge.output), len(self.slot_of))
        read = [ref for space in graph.spaces for ref in space.opens]
        read += [ref for derived in graph.derived for ref in derived.reads]
        for ref in read:
            if ref[0] != DERIVED:
                self.slot_of.setdefault(ref, len(self.slot_of))
        for k in range(len(graph.derived)):
            self.slot_of[DERIVED, k] = len(self.slot_of)
        for space in graph.spaces:
            self.slot_of[SPREAD, space.index] = len(self.slot_of)
        self.count = count = len(self.slot_of)
        own: dict[tuple[int, int], int] = {}  # the slot of each converted (node, input)
        for edge in graph.edges:
            if edge.conversion is not None and edge.consumer != GRAPH:
                own[edge.consumer, edge.input] = count + len(own)
        self.fed: dict[tuple[int, int], int] = {}  # the slot of each (node, input)
        # By node:
        self.reads: list[list[int]] = [[] for _ in graph.nodes]
        self.checks: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in graph.nodes]
        self.converts: list[list[tuple[int, int, Conversion]]] = [[] for _ in graph.nodes]
        # By slot:
        self.consumers: list[list[int]] = [[] for _ in range(count)]
        self.readers = [0] * count + [1] * len(own)
        self.needed_by = [""] * count
        self.read: set[int] = set()  # all slots that have a reader
        self.tested: dict[int, Ref] = {}  # the output that an operation of `RegionPlan.tests` tests
        self.output_slots = [NO_SLOT] * len(graph.outputs)
        self._refs: dict[Ref, None] = {}  # of the tensors that are read, and of the spaces of nodes
        for edge in edges:
            ref = ref_of(edge)
            slot = self.slot_of[ref]
            self._refs[ref] = None
            self.read.add(slot)
            if edge.consumer == GRAPH:
                self.readers[slot] += self.output_slots[edge.input] != slot  # a derived tensor may have several edges
                self.output_slots[edge.input] = slot
            elif (edge.consumer, edge.input) not in self.fed:
                self._add_input(graph, edge, slot, own.get((edge.consumer, edge.input), slot))
        # Among the nodes of these edges are those whose outputs only decide which rows a space has.
        for n in dict.fromkeys(n for edge in edges for n in (edge.producer, edge.consumer) if n != GRAPH):
            if space_index := graph.nodes[n].space:
                self._refs[SPREAD, space_index] = None
                slot = self.slot_of[SPREAD, space_index]
                self.reads[n].append(slot)
                self.consumers[slot].append(n)
                self.readers[slot] += 1

    def is_read(self, node: Node) -> bool:
        """Whether an output of a node has a reader."""
        return any(self.slot_of.get((node.index, j)) in self.read for j in range(len(node.outputs)))

    def operations(self, graph: Graph) -> list[Operation]:
        """The operations that the nodes and outputs need, and those that these need in turn."""
        operations: list[Operation] = []
        waiting = [*self._refs]
        seen = set(waiting)
        while waiting:
            kind, number = waiting.pop()
            index = len(graph.nodes) + len(operations)
            if kind == SPREAD:
                operation, needed = self._opening(graph, graph.spaces[number - 1], index)
            elif kind == DERIVED:
                operation, needed = self._derivation(graph, number, index)
            else:
                continue
            operations.append(operation)
            for slot in operation.reads:
                self.read.add(slot)
                self.consumers[slot].append(index)
                self.readers[slot] += 1
            waiting += [ref for ref in needed if ref not in seen]
            seen.update(needed)
        return operations

    def _opening(self, graph: Graph, space: Space, index: int) -> tuple[Operation, list[Ref]]:
        """The operation that begins a space, and what must be made before it."""
        needed = [*space.opens]
        if space.parent:  # its spread states whether there is any row
            needed.append((SPREAD, space.parent))
        tensors = self._slots_of(space.opens)
        examined = tensors
        if space.each is not None and _are_batched(graph):
            examined = tensors[len(space.each.tensors) :]  # the count
        reads = tuple(dict.fromkeys(self._slots_of(needed)))
        maker = space.opens[0][0]
        is_whole = maker >= 0 and not graph.nodes[maker].space and not graph.nodes[maker].decoupled
        if space.test is not None and not space.parent and is_whole:
            self.tested[index] = space.opens[0]
            self.read.add(tensors[0])
            self.consumers[tensors[0]].append(index)
            reads = ()
        operation = Operation(
            index,
            reads,
            self.slot_of[SPREAD, space.index],
            tensors,
            opens=space,
            around=space.parent,
            examined=examined,
        )
        return operation, needed

    def _derivation(self, graph: Graph, number: int, index: int) -> tuple[Operation, list[Ref]]:
        """The operation that makes a derived tensor, and what must be made before it."""
        derived = graph.derived[number]
        is_inward = derived.how in _INWARD
        if is_inward:
            below = [derived.space]
        else:
            below = [one for one in derived.spaces if one != derived.space or not derived.reads]
        if derived.space and derived.space not in below:  # its spread states whether there is any row
            below.append(derived.space)
        needed = [*derived.reads, *((SPREAD, one) for one in below)]
        tensors = self._slots_of(derived.reads)
        spreads = tuple(
            self.slot_of[SPREAD, one] if is_inward or one != derived.space else NO_SLOT for one in derived.spaces
        )
        operation = Operation(
            index,
            tuple(dict.fromkeys(self._slots_of(needed))),
            self.slot_of[DERIVED, number],
            tensors,
            spreads,
            derived=derived,
            around=derived.space,
            has_rows=graph.has_rows(derived.space),
            examined=() if derived.how in _OF_ROWS and _are_batched(graph) else tensors,
            branches=tuple(zip(tensors, spreads, strict=True)) if derived.how is Derivation.MERGE else (),
        )
        return operation, needed

    def _slots_of(self, refs: Sequence[Ref]) -> tuple[int, ...]:
        return tuple(self.slot_of[ref] for ref in refs)

    def _add_input(self, graph: Graph, edge: Edge, slot: int, read_slot: int) -> None:
        """Add an edge that a node reads: the tensor in `slot`, which this input finds in `read_slot`."""
        reader = graph.nodes[edge.consumer]
        spec = reader.inputs[edge.input]
        self.fed[edge.consumer, edge.input] = read_slot
        self.reads[edge.consumer].append(slot)
        if edge.conversion is not None:
            self.converts[edge.consumer].append((slot, read_slot, edge.conversion))
        if _may_disagree(graph, edge):
            self.checks[edge.consumer].append((edge.input, spec.dims))
        if not spec.optional and not self.needed_by[slot]:
            self.needed_by[slot] = reader.name
        if edge.consumer not in self.consumers[slot]:
            self.consumers[slot].append(edge.consumer)
            self.readers[slot] += 1


def _are_batched(graph: Graph) -> bool:
    """Whether the graph and all of its models have a batch dimension."""
    return graph.max_batch_size > 0 and all(node.max_batch_size for node in graph.nodes)


def _plan_node(graph: Graph, node: Node, wires: _Wires, missing: Sequence[int], *, is_apart: bool) -> PlanNode:
    inputs = tuple(wires.fed.get((node.index, i), NO_SLOT) for i in range(len(node.inputs)))
    made = [wires.slot_of.get((node.index, j), NO_SLOT) for j in range(len(node.outputs))]
    written = tuple(slot if slot in wires.read else NO_SLOT for slot in made)
    writes = tuple(
        (j, slot, tuple(n for n in wires.consumers[slot] if n not in wires.tested))
        for j, slot in enumerate(written)
        if slot != NO_SLOT
    )
    converted = [slot for slot in inputs if slot >= wires.count]
    sole = tuple(
        not is_apart and 0 <= slot < wires.count and wires.readers[slot] == inputs.count(slot) == 1 for slot in inputs
    )
    then = None if is_apart else _then(writes, wires.readers, missing)
    goes_on = then is not None and sole == (True,) and _is_plain(graph.nodes[then[2]], wires)
    return PlanNode(
        index=node.index,
        name=node.name,
        model=node.model,
        inputs=inputs,
        distinct_inputs=tuple(dict.fromkeys([*wires.reads[node.index], *converted])),
        outputs=written,
        writes=writes,
        max_batch_size=node.max_batch_size,
        variable=tuple(i for i, spec in enumerate(node.inputs) if spec.is_variable and not spec.ragged),
        optional=_may_lack(node),
        checks=tuple(wires.checks[node.index]),
        wanted=tuple(node.outputs[j].name for j, *_ in writes) if graph.is_ensemble else (),
        converts=tuple(wires.converts[node.index]),
        sole=sole,
        plain=inputs[0] if _is_plain(node, wires) else NO_SLOT,
        goes_on=then if goes_on else None,
        ends=writes[0][:2] if len(writes) == 1 and not writes[0][2] else None,
        frees=tuple(slot for slot, is_sole in zip(inputs, sole, strict=True) if is_sole),
        is_needed=bool(writes) or not graph.is_ensemble,
    )


def _may_lack(node: Node) -> bool:
    return any(spec.optional for spec in node.inputs)


def _is_plain(node: Node, wires: _Wires) -> bool:
    is_checked = wires.checks[node.index] or wires.converts[node.index]
    is_single = len(node.inputs) == 1 and node.max_batch_size > 0
    return is_single and not (is_checked or _may_lack(node))


def _then(
    writes: Sequence[tuple[int, int, tuple[int, ...]]], readers: Sequence[int], missing: Sequence[int]
) -> tuple[int, int, int] | None:
    if len(writes) != 1:
        return None
    ((j, slot, consumers),) = writes
    if len(consumers) != 1 or readers[slot] != 1 or missing[consumers[0]] != 1:
        return None
    return j, slot, consumers[0]


def _may_disagree(graph: Graph, edge: Edge) -> bool:
    """Whether the producer leaves a dimension open that the reading node fixes, or a batch may have more rows than the
    one that a model without a batch dimension takes.
    """
    reader = graph.nodes[edge.consumer]
    spec = reader.inputs[edge.input]
    writer = graph if edge.producer == GRAPH else graph.nodes[edge.producer]
    dims, rows = graph.written(edge).dims, writer.max_batch_size
    wanted, promised = _full(spec.dims, reader.max_batch_size), _full(dims, rows)
    if edge.derived >= 0 or reader.space:
        wanted, promised = spec.dims, dims
    if edge.conversion is not None:
        if edge.conversion.batch < 0:
            return True
        promised = edge.conversion.reshapes[-1][1] if edge.conversion.reshapes else dims
        wanted = spec.dims
    return any(want != -1 and promise == -1 for want, promise in zip(wanted, promised, strict=True))


def _lacking(graph: Graph, edges: Sequence[Edge]) -> Iterator[tuple[int, str, int]]:
    for edge in edges:
        if edge.producer == GRAPH and edge.consumer != GRAPH and graph.inputs[edge.output].optional:
            node = graph.nodes[edge.consumer]
            spec = node.inputs[edge.input]
            if not spec.optional and not _runs_only_with(graph, node.space, edge.output):
                yield edge.output, spec.name, edge.consumer


def _runs_only_with(graph: Graph, space: int, given: int) -> bool:
    """Whether a space has no row if the request omits this input: the space tests it, or divides it into items."""
    while space:
        opened = graph.spaces[space - 1]
        decisive = opened.opens if opened.each is None else opened.opens[: len(opened.each.tensors)]
        is_otherwise = opened.test is not None and opened.test.otherwise
        if not is_otherwise and any(graph.made_by(ref) == (GRAPH, given) for ref in decisive):
            return True
        space = opened.parent
    return False


def _needed(graph: Graph, outputs: Collection[str] | None) -> Sequence[Edge]:
    """The edges that lead to the wanted outputs. Even if all are wanted, a nested ensemble may have steps that serve
    only those of its outputs that have no reader in this graph. A plain model always runs, also without outputs.
    """
    wanted = {i for i, spec in enumerate(graph.outputs) if outputs is None or spec.name in outputs}
    feeding: dict[int, set[int]] = {node.index: openers(graph, node.space) for node in graph.nodes}
    nodes: set[int] = set() if graph.is_ensemble else set(feeding)
    for edge in graph.edges:
        if edge.consumer != GRAPH:
            feeding[edge.consumer].add(edge.producer)
        elif edge.input in wanted:
            nodes.add(edge.producer)
    for node in reversed(graph.nodes):  # in topological order: a node's readers come after it
        if node.index in nodes:
            nodes |= feeding[node.index]
    return [
        edge for edge in graph.edges if (edge.input in wanted if edge.consumer == GRAPH else edge.consumer in nodes)
    ]


def openers(graph: Graph, space: int) -> set[int]:
    """The nodes whose outputs decide which rows a space has, and GRAPH if an input does."""
    found: set[int] = set()
    waiting: list[Ref] = []
    while space:
        waiting += graph.spaces[space - 1].opens
        space = graph.spaces[space - 1].parent
    while waiting:
        producer, output = waiting.pop()
        if producer == DERIVED:
            waiting += graph.derived[output].reads
        else:
            found.add(producer)
    return found


def _full(dims: tuple[int, ...], max_batch_size: int) -> tuple[int, ...]:
    """The whole shape, with a leading -1 for the batch dimension if there is one."""
    return (-1, *dims) if max_batch_size else dims
