"""A frame: the execution of a graph for one request. Counts of missing inputs make steps ready, counts of readers
release tensors.

Decides which steps of a frame are ready, when a tensor has no reader left, when the frame is finished, and what the
error of a failed step says about its place in the graph. A tensor is an opaque handle with rows and a shape; this
module never reads its contents. Does not know queues, batches, instances or clocks. Used by the scheduler; the runtime
reads the outputs of a finished frame. Graphs with regions have frames of borders.py.

Always true of a frame whose request is not over (see `Frame.check`):
  (1) a slot holds a handle exactly while it was written and still has readers;
  (2) `missing[n]` is the number of distinct slots of other nodes that node n still waits for, OVER when its step is
      over; a ticket was made exactly once for each needed node whose count reached 0;
  (3) `open` counts the steps whose ticket was made and that have not finished; a frame with `open` 0 is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol, TypeVar

from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.graph.plan import Plan, PlanNode, make_plan
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import GRAPH, Conversion, Graph
from flowserve.scheduling.frames.request import RequestRecord
from flowserve.values import fits, shape_text, unexpected_shape

E = TypeVar("E", bound=FlowserveError)


class Facts(Protocol):
    """The facts of a tensor that scheduling uses: its rows (`start` to `stop`; 0 and -1 without a batch dimension) and
    its shape. Where a graph converts shapes, its handles also have `converted(conversion)`, which returns the handle of
    another shape.
    """

    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]: ...


OVER: Final = 1 << 30  # the value of `missing` for a step that is over; it is decremented if inputs are written later
_MISSING_MAX: Final = OVER >> 1
_SHAPES_MAX: Final = 8  # the largest number of input shapes in the error of a failed step


class Part(Protocol):
    """Some rows of a step, which are a ticket of their own. `tensors`: by slot, those that the step reads."""

    tensors: dict[int, Any]

    def in_words(self) -> str:
        """Which rows these are."""


class Ticket:
    """The queue entry of a step: rows, a key that all members of a batch must share, and the time it was queued. It may
    be for a `part` of the rows of its step only. `tensors`: by slot, those that the step reads, which are the tensors
    of its frame or of its part. Some attributes are set by some queues only: `lane` and `order` are the lane and the
    position of arrival in a queue that may reorder tickets (queue.py), `copy_ns` is the cost of copying its tensors to
    another device (affinity.py), `was_lost` that it runs again after the loss of a machine, `sequence` its
    `RequestSequence`, and `candidate_ns` the time at which it became the next of that (sequence/). `lookup` belongs to
    the runtime: how a step was looked up in a response cache, () if it was not.
    """

    __slots__ = (
        "candidate_ns",
        "copy_ns",
        "frame",
        "key",
        "lane",
        "lookup",
        "node",
        "order",
        "part",
        "queued_ns",
        "rows",
        "sequence",
        "tensors",
        "was_lost",
    )

    lane: int
    copy_ns: int
    candidate_ns: int
    sequence: Any
    order: int
    lookup: tuple[Any, ...]
    was_lost: bool

    def __init__(self, frame: Frame, node: PlanNode, rows: int, key: Hashable, queued_ns: int = 0) -> None:
        self.frame = frame
        self.node = node
        self.rows = rows
        self.key = key
        self.queued_ns = queued_ns
        self.tensors: Any = frame.tensors
        self.part: Any = None

    def copy_located(self, error: FlowserveError, instance: Any = None) -> FlowserveError:
        """A copy of a batch's error for this request, with the step's location in the graph; for a plain model the
        error itself, which all members of the batch share, and so is an error that has a location. `instance` ran the
        step, if one did.
        """
        if error.lineage or not self.frame.plan.graph.is_ensemble:
            return error
        own = type(error)(str(error))
        own.raised = error.raised
        return self.located(own, instance=getattr(instance, "name", ""))

    def located(self, error: E, node: PlanNode | None = None, instance: str = "") -> E:
        """`error`, which is the request's own, with the location of this step, or of `node`."""
        return self.frame.located(error, node or self.node, instance, self.part)

    def __repr__(self) -> str:
        return f"Ticket({self.node.name}, rows={self.rows})"


class Frame:
    """The execution of a graph for one request, or of one of its regions. A graph without regions has this one frame.

    `queues[n]` is the queue of node n's model, which pins the request to the model versions its graph was loaded with.
    `request`, `wanted` and `parameters` belong to the runtime; scheduling does not read them. They are not in the
    record, because each response of a decoupled model may have its own.
    """

    __slots__ = ("missing", "open", "parameters", "plan", "queues", "readers", "record", "request", "tensors", "wanted")

    def __init__(
        self, record: RequestRecord, plan: Plan, queues: Sequence[Any], inputs: Sequence[Facts | None], request: Any
    ) -> None:
        self.record = record
        self.plan = plan
        self.queues = queues
        self.request = request
        self.tensors: list[Any] = [*inputs, *plan.blank]
        self.missing = [*plan.missing]
        self.readers = [*plan.readers]
        self.open = 0
        self.wanted: tuple[str, ...] = ()
        self.parameters: Any = None

    @property
    def is_stream(self) -> bool:
        """Whether the responses of its request are read one by one."""
        return False

    @property
    def whole(self) -> Frame:
        """The frame of the request; for the frame of a region that is another object."""
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """The tickets of the steps that read only the request's own inputs. Raises `Invalid` if a step rejects their
        shapes or row counts. `changed` is for frames with regions.
        """
        plan = self.plan
        if plan.lacking:
            self._check_given(plan)
        self.open = len(plan.first)
        tickets = []
        for index in plan.first:
            tickets.append(self._ticket(plan.nodes[index]))  # noqa: PERF401  # a comprehension is one more call
        return tickets

    def finish_step(
        self, ticket: Ticket, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        """Store the outputs of a finished step of `node` and return the steps that became ready. `ticket` is that of
        the step, or of the first step of a route. `outputs[j][m]` is the model's j-th output for it. `shared`: a cache
        for what frames of regions compute once for all members of these outputs.

        Afterwards `open` is 0 if that was the last step. An omitted output (None) is omitted from the response and from
        the optional inputs that it feeds. Raises a FlowserveError if the request cannot continue.

        `Scheduler._advance_alike` and `_finish_alike` do the same, inlined, for whole batches of the common requests
        (see `PlanNode.goes_on` and `ends`).
        """
        tensors = self.tensors
        readers = self.readers
        missing = self.missing
        tickets: list[Ticket] = []
        for j, slot, consumers in node.writes:
            handle = outputs[j][m]
            if handle is None and self.plan.needed_by[slot]:
                raise self._missing_input(node, slot)
            tensors[slot] = handle
            for consumer in consumers:
                missing[consumer] -= 1
                if not missing[consumer]:
                    tickets.append(self._ticket(self.plan.nodes[consumer]))
        for slot in node.distinct_inputs:
            readers[slot] -= 1
            if not readers[slot]:
                tensors[slot] = None
        missing[node.index] = OVER
        self.open += len(tickets) - 1
        return tickets

    def skip_to(self, nodes: Sequence[PlanNode], inner: Sequence[tuple[int, int]]) -> None:
        """Mark `nodes` as passed by a batch on its route; `finish_step` of the last one follows. Their intermediate
        tensors were never stored; `inner` are their slots, each with its remaining readers: 1 if the last node reads
        it, else 0.
        """
        tensors, readers, missing = self.tensors, self.readers, self.missing
        for slot in nodes[0].distinct_inputs:
            readers[slot] -= 1
            if not readers[slot]:
                tensors[slot] = None
        for node in nodes:
            missing[node.index] = OVER
        for slot, left in inner:
            readers[slot] = left

    def is_last_reader(self, slot: int) -> bool:
        """Whether this slot has one remaining reader: no sibling step and no output of the graph reads it later."""
        return slot < self.plan.converted and self.readers[slot] == 1

    def steps_under_way(self) -> list[PlanNode]:
        """The nodes whose steps wait or run."""
        if self.record.done or not self.open:
            return []
        return [node for node in self.plan.nodes if node.is_needed and not self.missing[node.index]]

    def is_over(self, n: int) -> bool:
        """Whether the step of node n is over, or never runs in this frame."""
        return self.missing[n] > _MISSING_MAX

    def is_pending(self, node: PlanNode) -> bool:
        """Whether the step of a node is still needed."""
        return node.is_needed and not self.record.done and not self.is_over(node.index)

    def located(self, error: E, node: PlanNode, instance: str = "", part: Part | None = None) -> E:
        """`error`, which is the request's own, with the location of `node`. `instance` ran the step, "" for none."""
        if self.plan.graph.is_ensemble:
            error.lineage = _lineage(self.plan, node, self.tensors if part is None else part.tensors, instance)
            if part is not None:
                where = f"step '{node.name}', {part.in_words()}"
                error.lineage = error.lineage.replace(f"step '{node.name}'", where, 1)
        return error

    def _check_given(self, plan: Plan) -> None:
        """An optional input of the graph may feed a required input of a model, as on Triton. Triton's model rejects
        such a request when it runs; here the request is rejected before any step runs.
        """
        for slot, name, n in plan.lacking:
            if self.tensors[slot] is None:
                node = plan.nodes[n]
                raise self.located(
                    Invalid(
                        f"expected {len(node.inputs)} inputs but not all were given for model '{node.model.name}'. "
                        f"Missing required input(s) ['{name}'], to which '{plan.graph.inputs[slot].name}' is mapped; "
                        "that is optional in the ensemble, and not in the model"
                    ),
                    node,
                )

    def _ticket(self, node: PlanNode) -> Ticket:
        tensors = self.tensors
        if node.plain >= 0:
            handle = tensors[node.plain]
            if handle is not None:
                rows = handle.stop - handle.start
                if 0 <= rows <= node.max_batch_size:
                    return Ticket(self, node, rows, (handle.shape[1:],) if node.variable else None)
        rows, key = self._prepare(node)
        return Ticket(self, node, rows, key)

    def _prepare(self, node: PlanNode, part: Part | None = None) -> tuple[int, Hashable]:
        """The number of rows and the batching key of a step, or of a part of it, whose inputs are converted. Raises a
        FlowserveError if the model does not take them.
        """
        tensors = self.tensors if part is None else part.tensors
        if node.converts:
            self._convert(node, tensors, part)
        rows = 1
        if node.max_batch_size:
            rows = -1
            for slot in node.inputs:
                handle = tensors[slot] if slot >= 0 else None
                if handle is None:
                    continue
                here = handle.stop - handle.start
                if here < 0:  # an output of a model without a batch dimension, whose full shape matches this input
                    here = handle.shape[0]
                if rows == -1:
                    rows = here
                elif here != rows:
                    raise self.located(self._unequal_rows(node, tensors), node, part=part)
            if rows == -1:
                rows = 1
            elif rows > node.max_batch_size:
                text = f"inference request batch-size must be <= {node.max_batch_size} for '{node.model.name}'"
                raise self.located(Invalid(text), node, part=part)
        if node.checks:
            self._check_shapes(node, tensors, part)
        return rows, self._key(node, tensors) if node.variable or node.optional else None

    def _unequal_rows(self, node: PlanNode, tensors: Any) -> FlowserveError:
        """The inputs of a step have different numbers of rows. It is the model's failure if one of them is an output of
        a model that batches, which has to keep its rows; otherwise a model without a batch dimension chose them.
        """
        graph = self.plan.graph
        seen, is_failure = [], False
        for edge in graph.edges:
            slot = node.inputs[edge.input] if edge.consumer == node.index else NO_SLOT
            handle = tensors[slot] if slot >= 0 else None
            if handle is None:
                continue
            made_by = "the request"
            if edge.producer != GRAPH:
                producer = graph.nodes[edge.producer]
                made_by = f"model '{producer.model.name}'"
                is_failure = is_failure or producer.max_batch_size > 0
            seen.append(f"'{edge.tensor}' of {made_by} has shape {shape_text(handle.shape)}")
        text = f"input batch size does not match other inputs for '{node.model.name}': {', '.join(seen)}"
        return ModelFailed(text) if is_failure else Invalid(text)

    def _convert(self, node: PlanNode, tensors: Any, part: Part | None) -> None:
        for slot, own, conversion in node.converts:
            handle = tensors[slot]
            try:
                tensors[own] = None if handle is None else handle.converted(conversion)
            except ValueError:  # varying dims of both ends agree, and the actual shape does not
                raise self.located(self._unconverted(node, own, handle, conversion), node, part=part) from None

    def _unconverted(self, node: PlanNode, own: int, handle: Any, conversion: Conversion) -> Invalid:
        """The error of a tensor that the reshapes on its way to a step cannot be applied to."""
        name = self.plan.graph.nodes[node.index].inputs[node.inputs.index(own)].name
        steps = ", then ".join(f"{shape_text(dims)} to {shape_text(to)}" for dims, to in conversion.reshapes)
        text = f"unexpected shape for input '{name}' for model '{node.model.name}': {shape_text(handle.shape)}"
        return Invalid(f"{text} cannot be reshaped from {steps}")

    def _key(self, node: PlanNode, tensors: Any) -> Hashable:
        """The batching key: the shapes of the variable inputs, and which optional inputs are present."""
        first = 1 if node.max_batch_size else 0
        shapes = []
        for i in node.variable:
            handle = tensors[node.inputs[i]] if node.inputs[i] >= 0 else None
            shapes.append(None if handle is None else handle.shape[first:])
        if not node.optional:
            return tuple(shapes)
        present = tuple(slot >= 0 and tensors[slot] is not None for slot in node.inputs)
        return (tuple(shapes), present)

    def _check_shapes(self, node: PlanNode, tensors: Any, part: Part | None) -> None:
        first = 1 if node.max_batch_size else 0
        for i, dims in node.checks:
            handle = tensors[node.inputs[i]]
            if handle is None:
                continue
            shape = handle.shape[first:]
            if not fits(shape, dims):
                name = self.plan.graph.nodes[node.index].inputs[i].name
                text = unexpected_shape(name, node.model.name, dims, handle.shape, batches=first > 0)
                raise self.located(Invalid(text), node, part=part)

    def _missing_input(self, node: PlanNode, slot: int) -> Invalid:
        """The error of the first step that cannot run without an output that `node` did not make, in Triton's words."""
        plan = self.plan
        output = plan.graph.nodes[node.index].outputs[node.outputs.index(slot)].name
        reader = next(one for one in plan.nodes if one.name == plan.needed_by[slot])
        specs = plan.graph.nodes[reader.index].inputs
        lacking = [spec.name for spec, read in zip(specs, self._written_slots(reader), strict=True) if read == slot]
        given = [spec.name for spec in specs if spec.name not in lacking]
        text = (
            f"expected {len(specs)} inputs but got {len(given)} inputs for model '{reader.model.name}'. Got input(s) "
            f"[{_names(given)}], but missing required input(s) [{_names(lacking)}]. Please provide all required "
            f"input(s). Step '{node.name}' returned no output '{output}'"
        )
        return self.located(Invalid(text), reader)

    def _written_slots(self, node: PlanNode) -> list[int]:
        """For each input of a node the slot that its producer writes."""
        written = {own: slot for slot, own, _ in node.converts}
        return [written.get(slot, slot) for slot in node.inputs]

    def check(self) -> None:
        """Assert the numbered promises. For tests and simulation."""
        is_over = self.record.done
        assert is_over or self.open > 0, f"(3) {self!r} is neither over nor going anywhere"
        for slot, handle in enumerate(self.tensors):
            if handle is not None and not is_over:
                assert self.readers[slot] > 0 or slot < len(self.plan.graph.inputs), (
                    f"(1) slot {slot} is held without a reader"
                )
        assert all(count >= 0 for count in self.missing), "(2) a node became ready twice"

    def __repr__(self) -> str:
        return f"Frame({self.plan.graph.name}, open={self.open}, done={self.record.done})"


def _names(names: Sequence[str]) -> str:
    return ",".join([f"'{name}'" for name in names])


def request_frame(
    plan: Plan,
    queues: Sequence[Any],
    inputs: Sequence[Facts | None],
    arrived_ns: int,
    stamp: int = 0,
    request: Any = None,
    owner: Any = None,
    priority: int = 0,
    timeout_ns: int = 0,
) -> Frame:
    """The frame of a request whose graph has no regions, with its record."""
    return Frame(RequestRecord(arrived_ns, stamp, owner, priority, timeout_ns), plan, queues, inputs, request)


def filler_frame(request: Any, wanted: tuple[str, ...] = ()) -> Frame:
    """The frame of padding rows. It is over from the start, so that their results are ignored."""
    record = RequestRecord()
    record.done = True
    frame = Frame(record, _EMPTY, (), (), request)
    frame.wanted = wanted
    return frame


_EMPTY: Final = make_plan(Graph("", 1, (), (), 0, (), ()))


def _lineage(plan: Plan, node: PlanNode, tensors: Any, instance: str = "") -> str:
    """The suffix of the message of an error of a step: its name, the line of the graph file, the `instance` that ran it
    ("" for none), and the shapes of its inputs.
    """
    written = plan.graph.nodes[node.index]
    parts = [f"step '{node.name}'" + (f" at {written.place}" if written.place is not None else "")]
    if instance:
        parts.append(f"instance {instance}")
    shapes = [
        f"{spec.name} {shape_text(tensors[slot].shape)}"
        for spec, slot in zip(written.inputs, node.inputs, strict=True)
        if slot != NO_SLOT and tensors and tensors[slot] is not None
    ]
    if shapes:
        more = [f"{len(shapes) - _SHAPES_MAX} more"] if len(shapes) > _SHAPES_MAX else []
        parts.append("inputs " + ", ".join(shapes[:_SHAPES_MAX] + more))
    return f" ({', '.join(parts)})"
