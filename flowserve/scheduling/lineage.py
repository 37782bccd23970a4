"""Where in a graph a request failed, in words.

Decided here: what is said of the step that failed a request of an ensemble: its name, the line of the graph file, the
instance that ran it, the shapes it was given. It is written when something fails, never before. What went wrong is the
error's own text, which stays the beginning of the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from flowserve.errors import FlowserveError
from flowserve.graph.plan import PlanNode

if TYPE_CHECKING:
    from flowserve.scheduling.router import Flow, Ticket

E = TypeVar("E", bound=FlowserveError)

_INPUTS_MAX: Final = 8


def traced(error: FlowserveError, ticket: Ticket, instance: Any = None) -> FlowserveError:
    """The flow's own copy of an error, which says where the step `ticket` stands; a batch's members share the original.

    Of a plain model nothing more is to be said. `instance` ran the step, where one did.
    """
    flow = ticket.flow
    if not flow.plan.graph.is_ensemble:
        return error
    return located(type(error)(str(error)), flow, ticket.node, getattr(instance, "name", ""))


def located(error: E, flow: Flow, node: PlanNode, instance: str = "") -> E:
    """An error that is the flow's own, with where in its graph `node` stands."""
    if flow.plan.graph.is_ensemble:
        error.lineage = _lineage(flow, node, instance)
    return error


def _lineage(flow: Flow, node: PlanNode, instance: str) -> str:
    written = flow.plan.graph.nodes[node.index]
    parts = [f"step '{node.name}'" + (f" at {written.place}" if written.place is not None else "")]
    if instance:
        parts.append(f"instance {instance}")
    shapes = [
        f"{spec.name} {_shape(flow, slot)}"
        for spec, slot in zip(written.inputs, node.inputs, strict=True)
        if 0 <= slot < len(flow.tensors) and flow.tensors[slot] is not None
    ]
    if shapes:
        more = [f"{len(shapes) - _INPUTS_MAX} more"] if len(shapes) > _INPUTS_MAX else []
        parts.append("inputs " + ", ".join(shapes[:_INPUTS_MAX] + more))
    return f" ({', '.join(parts)})"


def _shape(flow: Flow, slot: int) -> str:
    return "[" + ",".join(map(str, flow.tensors[slot].shape)) + "]"


def steps_under_way(flow: Flow) -> list[PlanNode]:
    """The nodes of a graph whose steps wait or run. A step is over when what it wrote lies there, or was read."""
    if flow.done or not flow.open or flow.whole is not flow:
        return []
    if flow.plan.nesting is not None:
        return flow.steps_under_way()
    return [
        node for node in flow.plan.nodes if node.writes and not flow.missing[node.index] and not _is_over(flow, node)
    ]


def _is_over(flow: Flow, node: PlanNode) -> bool:
    return any(
        flow.tensors[slot] is not None or any(not flow.missing[consumer] for consumer in consumers)
        for _, slot, consumers in node.writes
    )
