"""What the hot path reads of a graph: integers and tuples, worked out once at load.

Decided here: every tensor of a graph gets a *slot* (graph inputs first, in order, then node outputs), every node knows its slots, every slot
its consumers. A flow is then two lists of that length and no dictionary. Nothing here knows what lies in a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowserve.graph.types import GRAPH, Graph, ModelKey

NO_SLOT: Final = -1  # an optional input nobody feeds, or an output nobody reads


@dataclass(frozen=True, slots=True, eq=False)
class PlanNode:
    """`inputs[i]` is the slot of the model's i-th input, `outputs[j]` of its j-th output; NO_SLOT where unmapped.

    `variable` lists the input indices whose shapes must agree within a batch (some dimension is -1, not ragged).
    `wanted` are the names of the outputs this node is asked for.
    """

    index: int
    name: str
    model: ModelKey
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_batching: bool
    variable: tuple[int, ...]
    wanted: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`missing[n]`: how many distinct slots node n waits for. `consumers[s]`: the nodes that read slot s.
    `readers[s]`: how many readers slot s has, the graph's own output counted as one. `sources`: nodes ready when the request is.
    """

    graph: Graph
    nodes: tuple[PlanNode, ...]
    slot_count: int
    missing: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    readers: tuple[int, ...]
    output_slots: tuple[int, ...]


def make_plan(graph: Graph) -> Plan:
    """Number the tensors of a well-formed graph. The plan's arrays are indexed by node index and by slot."""
    slot_of: dict[tuple[int, int], int] = {(GRAPH, i): i for i in range(len(graph.inputs))}
    for edge in graph.edges:
        slot_of.setdefault((edge.producer, edge.output), len(slot_of))
    fed: dict[tuple[int, int], int] = {}
    consumers: list[list[int]] = [[] for _ in slot_of]
    readers = [0] * len(slot_of)
    output_slots = [NO_SLOT] * len(graph.outputs)
    for edge in graph.edges:
        slot = slot_of[edge.producer, edge.output]
        if edge.consumer == GRAPH:
            output_slots[edge.input] = slot
            readers[slot] += 1
            continue
        fed[edge.consumer, edge.input] = slot
        if edge.consumer not in consumers[slot]:
            consumers[slot].append(edge.consumer)
            readers[slot] += 1
    nodes = []
    for node in graph.nodes:
        outputs = tuple(slot_of.get((node.index, j), NO_SLOT) for j in range(len(node.outputs)))
        nodes.append(
            PlanNode(
                index=node.index,
                name=node.name,
                model=node.model,
                inputs=tuple(fed.get((node.index, i), NO_SLOT) for i in range(len(node.inputs))),
                outputs=outputs,
                is_batching=node.is_batching,
                variable=tuple(
                    i for i, spec in enumerate(node.inputs) if spec.is_variable and not spec.ragged
                ),
                wanted=tuple(
                    spec.name for spec, slot in zip(node.outputs, outputs, strict=True) if slot != NO_SLOT
                ),
            )
        )
    return Plan(
        graph=graph,
        nodes=tuple(nodes),
        slot_count=len(slot_of),
        missing=tuple(len({slot for slot in node.inputs if slot != NO_SLOT}) for node in nodes),
        consumers=tuple(tuple(nodes_) for nodes_ in consumers),
        readers=tuple(readers),
        output_slots=tuple(output_slots),
    )
