"""What the hot path reads of a graph: integers and tuples, worked out once at load.

Decided here: every tensor of a graph gets a *slot* (graph inputs first, in order, then node outputs), every node
knows its slots, every slot its consumers. A flow is then two lists of that length and no dictionary. What is usual of a
node (one input, one reader, one node that follows) is told here, too. Nothing here knows what lies in a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowserve.graph.conversion import Conversion
from flowserve.graph.nesting import Nesting, nesting
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node

NO_SLOT: Final = -1  # an optional input nobody feeds, or an output nobody reads


@dataclass(frozen=True, slots=True, eq=False)
class PlanNode:
    """`inputs[i]` is the slot of the model's i-th input, `outputs[j]` of its j-th output; NO_SLOT where unmapped.
    `distinct_inputs` are the input slots, each once: a step reads a tensor once, however many inputs it feeds.
    `writes` are the mapped outputs as (j, slot, consumers of the slot).

    `variable` lists the input indices whose shapes must agree within a batch (some dimension is -1, not ragged).
    `optional` tells that some input may be absent: then all members of a batch must carry the same set.
    `checks` are the inputs whose shape is known only when the tensor is there: (input index, dims the model wants),
    because the producer left open what the consumer fixes. `wanted` are the names of the outputs this node is asked
    for, () where that is the request's to say (a plain model). `converts` are the inputs whose shape changes on the
    way: (slot of the tensor, slot of what this input reads, conversion); such an input's slot is its own.

    What the hot path would otherwise find out for every request: `sole[i]`: only this node reads the slot of input i,
    and only there. `plain` is the slot of a node's only input where nothing of it is left to check but its rows, else
    NO_SLOT. `then` is where all that a step makes goes to one node that waits for nothing else: (j, slot, that node's
    index), else None. `goes_on`: the same where this node reads one slot, which nobody else does, and that one is
    plain. `ends`: all that it makes is read by nobody but the graph: (j, slot), else None. `frees` are the slots that
    nobody else reads.
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
    then: tuple[int, int, int] | None
    goes_on: tuple[int, int, int] | None
    ends: tuple[int, int] | None
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`first`: the nodes that need no other node. `missing[n]`: how many distinct slots of other nodes node n waits
    for. `consumers[s]`: the nodes that read slot s; `needed_by[s]`: the name of the first that cannot run without it,
    "" where all can. `readers[s]`: how many readers slot s has, the graph's own outputs counted. `blank`: what a
    flow's slots after its inputs begin as. From slot `converted` on they are inputs that were converted; `lacking` are
    the graph's optional inputs that some step cannot run without: (slot, its input, its index). `nesting`: how often
    which step runs, None where each does once. `is_apart`: there are several steps, and each runs once, on a model that
    no other has; so a request waits for a model with one step at most. `ways` is scheduling's: what it has found out of
    this plan goes with it.
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
    nesting: Nesting | None
    is_apart: bool
    ways: dict[Any, Any] = field(default_factory=dict)


def make_plan(graph: Graph, outputs: Collection[str] | None = None) -> Plan:
    """Number the tensors of a well-formed graph. The plan's arrays are indexed by node index and by slot.

    `outputs` are the graph outputs somebody wants, None for all: steps that only serve others are never ready, as on
    Triton. Numbers are the same in every plan of a graph.
    """
    edges = _needed(graph, outputs)
    wires = _wires(graph, edges)
    made_by_nodes = range(len(graph.inputs), wires.count)
    missing = tuple(sum(slot in made_by_nodes for slot in dict.fromkeys(reads)) for reads in wires.reads)
    nested = nesting(graph, edges, wires.slot_of)
    nodes = tuple(_plan_node(graph, node, wires, missing, is_nested=nested is not None) for node in graph.nodes)
    return Plan(
        graph=graph,
        nodes=nodes,
        blank=(None,) * (len(wires.readers) - len(graph.inputs)),
        first=tuple(node.index for node in nodes if node.writes and not missing[node.index]),
        missing=missing,
        consumers=tuple(map(tuple, wires.consumers)),
        needed_by=tuple(wires.needed_by),
        readers=tuple(wires.readers),
        output_slots=tuple(wires.output_slots),
        converted=wires.count,
        lacking=tuple(_lacking(graph, edges)),
        nesting=nested,
        is_apart=nested is None and 1 < len(nodes) == len({node.model for node in nodes}),
    )


@dataclass(slots=True)
class _Wires:
    """What the edges come to. By node: the slots it `reads`, its `checks`, what it `converts`. By slot: the nodes that
    are its `consumers`, how many `readers` it has, the first node by which it is `needed_by`. There are `count` slots
    of tensors; those of inputs whose shape changes on the way come behind them. `fed`: the slot of each (node, input);
    `read`: all that have a reader.
    """

    slot_of: dict[tuple[int, int], int]
    count: int
    fed: dict[tuple[int, int], int]
    reads: list[list[int]]
    checks: list[list[tuple[int, tuple[int, ...]]]]
    converts: list[list[tuple[int, int, Conversion]]]
    consumers: list[list[int]]
    readers: list[int]
    needed_by: list[str]
    output_slots: list[int]
    read: set[int]


def _wires(graph: Graph, edges: Sequence[Edge]) -> _Wires:
    slot_of: dict[tuple[int, int], int] = {(GRAPH, i): i for i in range(len(graph.inputs))}
    for edge in graph.edges:
        slot_of.setdefault((edge.producer, edge.output), len(slot_of))
    count = len(slot_of)
    own: dict[tuple[int, int], int] = {}  # of inputs whose shape changes on the way, the same in every plan of a graph
    for edge in graph.edges:
        if edge.conversion is not None and edge.consumer != GRAPH:
            own[edge.consumer, edge.input] = count + len(own)
    wires = _Wires(
        slot_of=slot_of,
        count=count,
        fed={},
        reads=[[] for _ in graph.nodes],
        checks=[[] for _ in graph.nodes],
        converts=[[] for _ in graph.nodes],
        consumers=[[] for _ in range(count)],
        readers=[0] * count + [1] * len(own),
        needed_by=[""] * count,
        output_slots=[NO_SLOT] * len(graph.outputs),
        read=set(),
    )
    for edge in edges:
        slot = slot_of[edge.producer, edge.output]
        wires.read.add(slot)
        if edge.consumer == GRAPH:
            wires.output_slots[edge.input] = slot
            wires.readers[slot] += 1
        else:
            _wire_input(graph, edge, slot, own.get((edge.consumer, edge.input), slot), wires)
    return wires


def _wire_input(graph: Graph, edge: Edge, slot: int, read_slot: int, wires: _Wires) -> None:
    """Note an edge that a node reads: the tensor in `slot`, as it lies in `read_slot`."""
    reader = graph.nodes[edge.consumer]
    spec = reader.inputs[edge.input]
    wires.fed[edge.consumer, edge.input] = read_slot
    wires.reads[edge.consumer].append(slot)
    if edge.conversion is not None:
        wires.converts[edge.consumer].append((slot, read_slot, edge.conversion))
    if _may_disagree(graph, edge):
        wires.checks[edge.consumer].append((edge.input, spec.dims))
    if not spec.optional and not wires.needed_by[slot]:
        wires.needed_by[slot] = reader.name
    if edge.consumer not in wires.consumers[slot]:
        wires.consumers[slot].append(edge.consumer)
        wires.readers[slot] += 1


def _plan_node(graph: Graph, node: Node, wires: _Wires, missing: Sequence[int], *, is_nested: bool) -> PlanNode:
    inputs = tuple(wires.fed.get((node.index, i), NO_SLOT) for i in range(len(node.inputs)))
    made = [wires.slot_of.get((node.index, j), NO_SLOT) for j in range(len(node.outputs))]
    written = tuple(slot if slot in wires.read else NO_SLOT for slot in made)
    writes = tuple((j, slot, tuple(wires.consumers[slot])) for j, slot in enumerate(written) if slot != NO_SLOT)
    converted = [slot for slot in inputs if slot >= wires.count]
    sole = tuple(
        not is_nested and 0 <= slot < wires.count and wires.readers[slot] == inputs.count(slot) == 1 for slot in inputs
    )
    then = _then(writes, wires.readers, missing)
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
        variable=_variable(node),
        optional=_may_lack(node),
        checks=tuple(wires.checks[node.index]),
        wanted=_names(node, written) if graph.is_ensemble else (),
        converts=tuple(wires.converts[node.index]),
        sole=sole,
        plain=inputs[0] if _is_plain(node, wires) else NO_SLOT,
        then=then,
        goes_on=then if goes_on else None,
        ends=writes[0][:2] if len(writes) == 1 and not writes[0][2] else None,
        frees=tuple(slot for slot, is_sole in zip(inputs, sole, strict=True) if is_sole),
    )


def _variable(node: Node) -> tuple[int, ...]:
    return tuple(i for i, spec in enumerate(node.inputs) if spec.is_variable and not spec.ragged)


def _may_lack(node: Node) -> bool:
    return any(spec.optional for spec in node.inputs)


def _is_plain(node: Node, wires: _Wires) -> bool:
    is_checked = wires.checks[node.index] or wires.converts[node.index]
    is_single = len(node.inputs) == 1 and node.max_batch_size > 0
    return is_single and not (is_checked or _variable(node) or _may_lack(node))


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
    """Whether the producer leaves a dimension open that the reading node fixes, or a batch may be more than the one row
    that a model without a batch dimension takes.
    """
    reader = graph.nodes[edge.consumer]
    spec = reader.inputs[edge.input]
    if edge.producer != GRAPH:
        writer = graph.nodes[edge.producer]
        dims, rows = writer.outputs[edge.output].dims, writer.max_batch_size
    else:
        dims, rows = graph.inputs[edge.output].dims, graph.max_batch_size
    wanted, promised = _full(spec.dims, reader.max_batch_size), _full(dims, rows)
    if edge.conversion is not None:
        if edge.conversion.batch < 0:
            return True
        promised = edge.conversion.reshapes[-1][1] if edge.conversion.reshapes else dims
        wanted = spec.dims
    return any(want != -1 and promise == -1 for want, promise in zip(wanted, promised, strict=True))


def _lacking(graph: Graph, edges: Sequence[Edge]) -> Iterator[tuple[int, str, int]]:
    for edge in edges:
        if edge.producer == GRAPH and edge.consumer != GRAPH and graph.inputs[edge.output].optional:
            spec = graph.nodes[edge.consumer].inputs[edge.input]
            if not spec.optional:
                yield edge.output, spec.name, edge.consumer


def _needed(graph: Graph, outputs: Collection[str] | None) -> Sequence[Edge]:
    """The edges that lead to the wanted outputs. Even where those are all, an ensemble within this one may have steps
    that serve outputs of its own which nobody reads here.
    """
    wanted = {i for i, spec in enumerate(graph.outputs) if outputs is None or spec.name in outputs}
    feeding: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
    nodes: set[int] = set()
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


def _names(node: Node, slots: Sequence[int]) -> tuple[str, ...]:
    return tuple(spec.name for spec, slot in zip(node.outputs, slots, strict=True) if slot != NO_SLOT)


def _full(dims: tuple[int, ...], max_batch_size: int) -> tuple[int, ...]:
    """The whole shape, a leading -1 for the batch dimension where there is one: a model without one may read or write
    it.
    """
    return (-1, *dims) if max_batch_size else dims
