"""The location of a failed step in its graph, as text for the error message.

Decides what an error message contains about the failed step of an ensemble: its name, the line of the graph file, the
instance that ran it, and the shapes of its inputs. The text is built only when a step fails, and follows the error's
own message. Does not know flows or tickets; called by flow.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flowserve.graph.plan import Plan, PlanNode

_INPUTS_MAX: Final = 8


def lineage(plan: Plan, node: PlanNode, tensors: Sequence[Any], instance: str = "") -> str:
    """The suffix of an error's message. `tensors` are the flow's, by slot; `instance` ran the step, "" for none."""
    written = plan.graph.nodes[node.index]
    parts = [f"step '{node.name}'" + (f" at {written.place}" if written.place is not None else "")]
    if instance:
        parts.append(f"instance {instance}")
    shapes = [
        f"{spec.name} {shape_text(tensors[slot].shape)}"
        for spec, slot in zip(written.inputs, node.inputs, strict=True)
        if 0 <= slot < len(tensors) and tensors[slot] is not None
    ]
    if shapes:
        more = [f"{len(shapes) - _INPUTS_MAX} more"] if len(shapes) > _INPUTS_MAX else []
        parts.append("inputs " + ", ".join(shapes[:_INPUTS_MAX] + more))
    return f" ({', '.join(parts)})"


def shape_text(shape: Sequence[int]) -> str:
    """A shape in Triton's notation: [1,64]."""
    return "[" + ",".join(map(str, shape)) + "]"
