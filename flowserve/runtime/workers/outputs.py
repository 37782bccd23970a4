"""Outputs that differ from their model's configuration.

Decides which steps accept an output of another data type or shape (those whose own input has it), in which order the
outputs of a plain model are returned (the model's), and what is logged and counted: one warning for each output of a
model, and the number of missing outputs. A backend has noted the differences (`OutputNotes` in backends/base.py), and
refuses the outputs that no reader could use.

Does not know how a model ran. Called on the event loop: by the engine, by streaming.py for decoupled models, and by the
response cache of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from flowserve.backends.base import OutputNotes
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import Statistics
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket
from flowserve.values import BY_NUMPY, fits, shape_text, unexpected_shape

log = logging.getLogger("flowserve.runtime")


def take_notes(
    batch: Batch,
    notes: OutputNotes,
    outputs: Sequence[Sequence[Tensor | None]],
    errors: Mapping[int, FlowserveError],
) -> Mapping[int, FlowserveError]:
    """Record the notes about a batch, and set the order of its members' outputs. `outputs[j][m]` as in `Results`.
    Returns `errors` and the errors of members with an output that a following step does not take.
    """
    record_notes(notes, batch.queue.key.name, batch.queue.statistics)
    found = {**errors}
    for m, ticket in enumerate(batch.tickets):
        if m in found:
            continue
        error = unusable_output(ticket, [column[m] for column in outputs], notes.unlike)
        if error is not None:
            found[m] = error
        elif m in notes.orders:
            ticket.frame.wanted = in_order(ticket, ticket.frame.wanted, notes.orders[m])
    return found


def record_notes(notes: OutputNotes, model: str, statistics: Statistics) -> None:
    """Count missing outputs; log a difference of an output once for each version of a model."""
    for name, text in notes.unlike.items():
        if statistics.is_first(f"unlike {name}"):
            log.warning("model '%s', output '%s': %s", model, name, text)
    for name, count in notes.left_out.items():
        statistics.missing_outputs += count
        if statistics.is_first(f"left out {name}"):
            text = "model '%s' left out output '%s', which its configuration has and a request asked for; the response "
            remedy = "return it from the model, or remove it from the configuration (--strict-outputs refuses that)"
            log.warning(text + "lacks it; " + remedy, model, name)


def unlike_outputs(ticket: Ticket, row: Sequence[Tensor | None]) -> list[str]:
    """The outputs of a step that differ from the configuration, for a response without notes: one from the cache, which
    may have come from a request without a following step. `row` as of `unusable_output`.
    """
    found = []
    made_by = ticket.frame.plan.graph.nodes[ticket.node.index]
    for j, *_ in ticket.node.writes:
        spec, tensor = made_by.outputs[j], row[j]
        dims = (ticket.rows, *spec.dims) if made_by.max_batch_size else spec.dims
        if tensor is not None and not (tensor.block.dtype == spec.dtype.numpy and fits(tensor.shape, dims)):
            found.append(spec.name)
    return found


def unusable_output(ticket: Ticket, row: Sequence[Tensor | None], unlike: Collection[str]) -> FlowserveError | None:
    """The error of a step if an output that differs from the configuration, one of `unlike`, cannot be used: by a step
    that follows it, or as an output of the graph. `row`: its model's outputs. It is a failure of the model, not of the
    request.
    """
    frame, node = ticket.frame, ticket.node
    graph = frame.plan.graph
    for j, _, consumers in node.writes if unlike else ():
        tensor = row[j]
        made_by = graph.nodes[node.index]
        if tensor is None or made_by.outputs[j].name not in unlike:
            continue
        edges = [edge for edge in graph.edges if (edge.producer, edge.output) == (node.index, j)]
        is_divided = made_by.space or any((node.index, j) in space.opens for space in graph.spaces)
        where, why = node, ""
        if (is_divided or any(edge.derived >= 0 for edge in edges)) and made_by.max_batch_size:
            why = _why_not_divided(tensor, ticket.rows)
        for edge in edges:
            if why:
                break
            if edge.consumer == GRAPH:
                why = _why_not_sent(graph, edge, tensor, ticket.rows)
            elif edge.derived < 0 and edge.consumer in consumers:
                why = _why_not_read(graph, edge, tensor, ticket.rows)
                where = frame.plan.nodes[edge.consumer]
        if why:
            return ticket.located(ModelFailed(f"{why} ({_returned(made_by, j, tensor)})"), where)
    return None


def in_order(ticket: Ticket, wanted: tuple[str, ...], order: tuple[str, ...]) -> tuple[str, ...]:
    """The requested outputs in the order in which a model returned its outputs. Unchanged in an ensemble."""
    if ticket.frame.plan.graph.is_ensemble:
        return wanted
    return (*(name for name in order if name in wanted), *(name for name in wanted if name not in order))


def _as_read(edge: Edge, tensor: Tensor, rows: int) -> Tensor | None:
    """The tensor as the edge's consumer reads it; None if it cannot have that shape. `rows`: those of the request,
    which lose their dimension only if there is one row.
    """
    if edge.conversion is None:
        return tensor
    try:
        read = tensor.converted(edge.conversion)
    except (ValueError, IndexError, RuntimeError):  # raised by numpy, and by a shape of another rank
        return None
    is_stripped = edge.conversion.batch < 0 and len(read.shape) < len(tensor.shape)
    return None if is_stripped and rows != 1 else read


def _why_not_read(graph: Graph, edge: Edge, tensor: Tensor, rows: int) -> str:
    """Why a step cannot read the tensor, in Triton's words; "" if it can. A step that batches takes its rows from the
    first dimension, which need not be those of the request.
    """
    node = graph.nodes[edge.consumer]
    spec = node.inputs[edge.input]
    dtype = tensor.block.dtype
    if dtype != spec.dtype.numpy:
        wanted = f"but model '{node.model.name}' expects '{spec.dtype}'"
        return f"inference input '{spec.name}' data-type is '{BY_NUMPY.get(dtype, dtype)}', {wanted}"
    found = _as_read(edge, tensor, rows)
    shape = tensor.shape if found is None else found.shape
    lead = 1 if node.max_batch_size else 0
    if found is None or len(shape) < lead or not fits(shape[lead:], spec.dims):
        return unexpected_shape(spec.name, node.model.name, spec.dims, shape, batches=lead > 0)
    if lead and shape[0] > node.max_batch_size:
        return f"inference request batch-size must be <= {node.max_batch_size} for '{node.model.name}'"
    return ""


def _why_not_divided(tensor: Tensor, rows: int) -> str:
    """Why `when` and `each` cannot divide the tensor into rows, nor join its rows with others; "" if they can."""
    if tensor.shape[:1] == (rows,):
        return ""
    return f"a tensor of {rows} rows is needed for when, each and what joins them"


def _why_not_sent(graph: Graph, edge: Edge, tensor: Tensor, rows: int) -> str:
    """Why the tensor cannot have the shape of the graph's output; "" if it can. Without a conversion it has any."""
    if edge.derived >= 0 or edge.conversion is None:
        return ""
    found = _as_read(edge, tensor, rows)
    keeps_rows = edge.conversion.batch < 0 and found is not None and found.shape == tensor.shape
    if found is None or (keeps_rows and not fits(found.shape, edge.conversion.wanted)):
        return f"output '{graph.outputs[edge.input].name}' cannot be made of shape {shape_text(tensor.shape)}"
    return ""


def _returned(node: Node, output: int, tensor: Tensor) -> str:
    """What the producer returned instead of what its configuration promises."""
    spec = node.outputs[output]
    dtype = tensor.block.dtype
    promised = (-1, *spec.dims) if node.max_batch_size else spec.dims
    made = f"{BY_NUMPY.get(dtype, dtype)} of shape {shape_text(tensor.shape)}"
    what = f"model '{node.model.name}' returned output '{spec.name}' as {made}"
    return f"{what}, its configuration promises {spec.dtype} of shape {shape_text(promised)}"
