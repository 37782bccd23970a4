"""The execution of one request: counts of missing inputs make steps ready, counts of readers release tensors.

Decides which steps of a flow are ready, when a tensor has no reader left, when the flow is finished, and what the error
of a failed step says about its place in the graph. A tensor is an
opaque handle with rows and a shape; this module never reads its contents. Does not know queues, batches, instances or
clocks. Used by the scheduler; the runtime reads the outputs of a finished flow.

Always true of a flow that is not done (see `Flow.check`):
  (1) a slot holds a handle exactly while it was written and still has readers;
  (2) `missing[n]` is the number of distinct slots of other nodes that node n still waits for; a ticket was made exactly
      once for each needed node whose count reached 0;
  (3) `open` counts the steps whose ticket was made and that have not finished; a flow with `open` 0 is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol, TypeVar

from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.graph.plan import NO_SLOT, Plan, PlanNode
from flowserve.graph.types import GRAPH, Conversion
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


# Nanoseconds, summed over several steps: queued, assembling inputs, computing, reading outputs.
Took = tuple[int, int, int, int]
TOOK_NOTHING: Final[Took] = (0, 0, 0, 0)
_SHAPES_MAX: Final = 8  # the largest number of input shapes in the error of a failed step


def longer(took: Took, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> Took:
    """The sums with one more step."""
    return took[0] + queue_ns, took[1] + input_ns, took[2] + infer_ns, took[3] + output_ns


class Ticket:
    """The queue entry of a step: rows, a key that all members of a batch must share, and the time it was queued. No
    tensor data. Some attributes are set by some queues only: `lane` and `order` are the lane and the position of
    arrival in a queue that may reorder tickets (queue.py), `copy_ns` is the cost of copying its tensors to another
    device (affinity.py), `was_lost` that it runs again after the loss of a machine, `sequence` its `RequestSequence`,
    and `candidate_ns` the time at which it became the next of that (sequence/). `lookup` belongs to the runtime: how a
    step was looked up in a response cache, () if it was not.
    """

    __slots__ = (
        "candidate_ns",
        "copy_ns",
        "flow",
        "key",
        "lane",
        "lookup",
        "node",
        "order",
        "queued_ns",
        "rows",
        "sequence",
        "was_lost",
    )

    lane: int
    copy_ns: int
    candidate_ns: int
    sequence: Any
    order: int
    lookup: tuple[Any, ...]
    was_lost: bool

    def __init__(self, flow: Flow, node: PlanNode, rows: int, key: Hashable, queued_ns: int = 0) -> None:
        self.flow = flow
        self.node = node
        self.rows = rows
        self.key = key
        self.queued_ns = queued_ns

    def located(self, error: FlowserveError, instance: Any = None) -> FlowserveError:
        """A copy of a batch's error for this flow, with the step's location in the graph; for a plain model the error
        itself, which all members of the batch share, and so is an error that has a location. `instance` ran the step,
        if one did.
        """
        if error.lineage or not self.flow.plan.graph.is_ensemble:
            return error
        own = type(error)(str(error))
        own.raised = error.raised
        return self.flow.located(own, self.node, getattr(instance, "name", ""))

    def __repr__(self) -> str:
        return f"Ticket({self.node.name}, rows={self.rows})"


class Flow:
    """One traversal of a graph for one request.

    `queues[n]` is the queue of node n's model, which pins the flow to the model versions its graph was loaded with.
    `priority` (1 is the highest, 0 none) and `timeout_ns` (0 none) are the request's own and apply to each of its
    steps. `request`, `owner`, `wanted`, `waiter`, `parameters` and `outcome` belong to the runtime; scheduling does not
    read them.
    `took` is the duration of its steps, for the statistics of the graph, kept in the `whole` flow; members that stay in
    one batch share one object.
    """

    __slots__ = (
        "arrived_ns",
        "done",
        "error",
        "missing",
        "open",
        "outcome",
        "owner",
        "parameters",
        "plan",
        "priority",
        "queues",
        "readers",
        "request",
        "stamp",
        "tensors",
        "timeout_ns",
        "took",
        "waiter",
        "wanted",
    )

    def __init__(
        self,
        plan: Plan,
        queues: Sequence[Any],
        inputs: Sequence[Facts | None],
        arrived_ns: int,
        stamp: int = 0,
        request: Any = None,
        owner: Any = None,
        priority: int = 0,
        timeout_ns: int = 0,
    ) -> None:
        self.plan = plan
        self.queues = queues
        self.owner = owner
        self.tensors: list[Any] = [*inputs, *plan.blank]
        self.missing = [*plan.missing]
        self.readers = [*plan.readers]
        self.open = 0
        self.done = False
        self.error: FlowserveError | None = None
        self.outcome: Any = None
        self.arrived_ns = arrived_ns
        self.stamp = stamp
        self.priority = priority
        self.timeout_ns = timeout_ns
        self.request = request
        self.waiter: Any = None
        self.parameters: Any = None
        self.wanted: tuple[str, ...] = ()
        self.took = TOOK_NOTHING

    @property
    def whole(self) -> Flow:
        """The request's flow; for one of its iterations (streaming/) that is another object."""
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """The tickets of the steps that read only the request's own inputs. Raises `Invalid` if a step rejects their
        shapes or row counts. `changed` is for flows with iterations (streaming/).
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
        self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        """Store a finished step's outputs and return the steps that became ready. `outputs[j][m]` is the model's j-th
        output for this flow. `shared`: a cache in which subclasses keep what they compute once for all members of these
        outputs.

        Afterwards `open` is 0 if that was the last step. An omitted output (None) is omitted from the response and from
        the optional inputs that it feeds. Raises a FlowserveError if the flow cannot continue.

        `Scheduler._advance_alike` and `_finish_alike` do the same, inlined, for whole batches of the common flows (see
        `PlanNode.goes_on` and `ends`).
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
            missing[node.index] = 0
        for slot, left in inner:
            readers[slot] = left

    def is_last_reader(self, slot: int) -> bool:
        """Whether this slot has one remaining reader: no sibling step and no output of the graph reads it later."""
        return slot < self.plan.converted and self.readers[slot] == 1

    def steps_under_way(self) -> list[PlanNode]:
        """The nodes whose steps wait or run. A step is over when its output is stored or was read."""
        if self.done or not self.open:
            return []
        return [
            node
            for node in self.plan.nodes
            if node.is_needed and not self.missing[node.index] and not self._is_over(node)
        ]

    def _is_over(self, node: PlanNode) -> bool:
        return any(
            self.tensors[slot] is not None or any(not self.missing[consumer] for consumer in consumers)
            for _, slot, consumers in node.writes
        )

    def located(self, error: E, node: PlanNode, instance: str = "") -> E:
        """`error`, which is the flow's own, with the location of `node`. `instance` ran the step, "" for none."""
        if self.plan.graph.is_ensemble:
            error.lineage = _lineage(self.plan, node, self.tensor_at, instance)
        return error

    def tensor_at(self, slot: int) -> Any:
        """The handle in a slot, None if there is none."""
        return self.tensors[slot] if 0 <= slot < len(self.tensors) else None

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
        if node.converts:
            self._convert(node)
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
                    raise self.located(self._unequal_rows(node), node)
            if rows == -1:
                rows = 1
            elif rows > node.max_batch_size:
                text = f"inference request batch-size must be <= {node.max_batch_size} for '{node.model.name}'"
                raise self.located(Invalid(text), node)
        if node.checks:
            self._check_shapes(node)
        if not node.variable and not node.optional:
            return Ticket(self, node, rows, None)
        return Ticket(self, node, rows, self._key(node))

    def _unequal_rows(self, node: PlanNode) -> FlowserveError:
        """The inputs of a step have different numbers of rows. It is the model's failure if one of them is an output of
        a model that batches, which has to keep its rows; otherwise a model without a batch dimension chose them.
        """
        graph, tensors = self.plan.graph, self.tensors
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

    def _convert(self, node: PlanNode) -> None:
        for slot, own, conversion in node.converts:
            handle = self.tensors[slot]
            try:
                self.tensors[own] = None if handle is None else handle.converted(conversion)
            except ValueError:  # varying dims of both ends agree, and the actual shape does not
                raise self.located(self._unconverted(node, own, handle, conversion), node) from None

    def _unconverted(self, node: PlanNode, own: int, handle: Any, conversion: Conversion) -> Invalid:
        """The error of a tensor that the reshapes on its way to a step cannot be applied to."""
        name = self.plan.graph.nodes[node.index].inputs[node.inputs.index(own)].name
        steps = ", then ".join(f"{shape_text(dims)} to {shape_text(to)}" for dims, to in conversion.reshapes)
        text = f"unexpected shape for input '{name}' for model '{node.model.name}': {shape_text(handle.shape)}"
        return Invalid(f"{text} cannot be reshaped from {steps}")

    def _key(self, node: PlanNode) -> Hashable:
        """The batching key: the shapes of the variable inputs, and which optional inputs are present."""
        first = 1 if node.max_batch_size else 0
        tensors = self.tensors
        shapes = []
        for i in node.variable:
            handle = tensors[node.inputs[i]] if node.inputs[i] >= 0 else None
            shapes.append(None if handle is None else handle.shape[first:])
        if not node.optional:
            return tuple(shapes)
        present = tuple(slot >= 0 and tensors[slot] is not None for slot in node.inputs)
        return (tuple(shapes), present)

    def _check_shapes(self, node: PlanNode) -> None:
        first = 1 if node.max_batch_size else 0
        for i, dims in node.checks:
            handle = self.tensors[node.inputs[i]]
            if handle is None:
                continue
            shape = handle.shape[first:]
            if not fits(shape, dims):
                name = self.plan.graph.nodes[node.index].inputs[i].name
                text = unexpected_shape(name, node.model.name, dims, handle.shape, batches=first > 0)
                raise self.located(Invalid(text), node)

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
        assert self.done or self.open > 0, f"(3) {self!r} is neither done nor going anywhere"
        for slot, handle in enumerate(self.tensors):
            if handle is not None and not self.done:
                assert self.readers[slot] > 0 or slot < len(self.plan.graph.inputs), (
                    f"(1) slot {slot} is held without a reader"
                )
        assert all(count >= 0 for count in self.missing), "(2) a node became ready twice"

    def __repr__(self) -> str:
        return f"Flow({self.plan.graph.name}, open={self.open}, done={self.done})"


def _names(names: Sequence[str]) -> str:
    return ",".join([f"'{name}'" for name in names])


def _lineage(plan: Plan, node: PlanNode, tensor_at: Callable[[int], Any], instance: str = "") -> str:
    """The suffix of the message of an error of a step: its name, the line of the graph file, the `instance` that ran it
    ("" for none), and the shapes of its inputs.
    """
    written = plan.graph.nodes[node.index]
    parts = [f"step '{node.name}'" + (f" at {written.place}" if written.place is not None else "")]
    if instance:
        parts.append(f"instance {instance}")
    shapes = [
        f"{spec.name} {shape_text(tensor.shape)}"
        for spec, slot in zip(written.inputs, node.inputs, strict=True)
        if (tensor := tensor_at(slot)) is not None
    ]
    if shapes:
        more = [f"{len(shapes) - _SHAPES_MAX} more"] if len(shapes) > _SHAPES_MAX else []
        parts.append("inputs " + ", ".join(shapes[:_SHAPES_MAX] + more))
    return f" ({', '.join(parts)})"
