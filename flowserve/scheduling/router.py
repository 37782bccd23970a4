"""How one request moves through its graph: readiness by counting, tensors released by counting readers.

Decided here: which steps of a flow are ready, when a tensor has no reader left, when the flow is answered. What lies
in a slot is an opaque handle with facts (rows, shape); this file never opens it. It does not know queues, batches,
instances or clocks.

Always true of a flow that is not done (see `Flow.check`):
  (1) a slot holds a handle exactly while it was written and still has readers;
  (2) `missing[n]` is the number of distinct slots of other nodes that node n still waits for; one at 0 that is needed
      was handed out exactly once;
  (3) `open` counts the steps handed out and not yet finished; a flow with `open` 0 is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Protocol

from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.lineage import located


class Facts(Protocol):
    """What scheduling may know of a tensor: its rows (`start` to `stop`, both 0 and -1 without a batch dimension) and
    its shape. Where a graph converts shapes on their way, its handles have `converted(conversion)` besides, which gives
    the handle of another shape.
    """

    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]: ...


# Nanoseconds of several steps, all together: in queues, gathering inputs, computing, taking outputs over.
Took = tuple[int, int, int, int]
TOOK_NOTHING: Final[Took] = (0, 0, 0, 0)


def longer(took: Took, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> Took:
    """That, and one step more."""
    return took[0] + queue_ns, took[1] + input_ns, took[2] + infer_ns, took[3] + output_ns


class Ticket:
    """A step as a queue sees it: rows, a key that all members of a batch must share, and when it was queued. No
    tensor data. `lane` is the mark of a queue that has several lines, `turn` its place among all that came to one that
    may change their order (queues.py), `line` the sequence it belongs to (sequences.py); none is set in other queues.
    """

    __slots__ = ("flow", "key", "lane", "line", "node", "queued_ns", "rows", "turn")

    lane: int
    line: Any
    turn: int

    def __init__(self, flow: Flow, node: PlanNode, rows: int, key: Hashable, queued_ns: int = 0) -> None:
        self.flow = flow
        self.node = node
        self.rows = rows
        self.key = key
        self.queued_ns = queued_ns

    def __repr__(self) -> str:
        return f"Ticket({self.node.name}, rows={self.rows})"


class Flow:
    """One traversal of a graph for one request.

    `route[n]` is the queue of node n's model, which pins the flow to what its graph was loaded with.
    `priority` (1 is the highest, 0 none) and `timeout_ns` (0 none) are the request's own; every step of it has them
    whole. `request`, `owner`, `wanted`, `waiter` and `parameters` belong to the runtime; nothing here reads them.
    `took` is how long its steps took, for the statistics of the graph; who stays together shares one.
    """

    __slots__ = (
        "arrived_ns",
        "done",
        "error",
        "missing",
        "open",
        "owner",
        "parameters",
        "plan",
        "priority",
        "readers",
        "request",
        "route",
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
        route: Sequence[Any],
        inputs: Sequence[Facts | None],
        arrived_ns: int,
        stamp: int = 0,
        request: Any = None,
        owner: Any = None,
        priority: int = 0,
        timeout_ns: int = 0,
    ) -> None:
        self.plan = plan
        self.route = route
        self.owner = owner
        self.tensors: list[Any] = [*inputs, *plan.blank]
        self.missing = [*plan.missing]
        self.readers = [*plan.readers]
        self.open = 0
        self.done = False
        self.error: FlowserveError | None = None
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
        """The request's flow; of one of its iterations (streams.py) that is another."""
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """The steps that need nothing but the request's own inputs. Raises `Invalid` where a step cannot take them.
        `changed` is for flows with iterations (streams.py).
        """
        plan = self.plan
        if plan.lacking:
            self._check_given(plan)
        self.open = len(plan.first)
        return [self._ticket(plan.nodes[index]) for index in plan.first]

    def finish_step(self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int) -> list[Ticket]:
        """Store a finished step's outputs and return the steps that became ready. `outputs[j][m]` is the j-th of its
        model's.

        Afterwards `open` is 0 where that was the last one. An output that was left out (None) is left out of the
        answer, and of the optional inputs it feeds. Raises a FlowserveError where the flow cannot go on.
        """
        tensors = self.tensors
        readers = self.readers
        then = node.then
        if then is not None:
            j, slot, consumer = then
            handle = outputs[j][m]
            if handle is not None:
                tensors[slot] = handle
                self.missing[consumer] = 0
                ticket = self._ticket(self.plan.nodes[consumer])
                for slot in node.distinct_inputs:
                    readers[slot] -= 1
                    if not readers[slot]:
                        tensors[slot] = None
                return [ticket]
        missing = self.missing
        tickets: list[Ticket] = []
        for j, slot, consumers in node.writes:
            handle = outputs[j][m]
            if handle is None and self.plan.needed_by[slot]:
                raise self._deadlock(node, slot)
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

    def pass_over(self, first: PlanNode, nodes: Sequence[PlanNode], inner: Iterable[tuple[int, int]]) -> None:
        """All of `nodes`, which begin with `first`, are done but for `finish_step` of the last. What they made for each
        other is nobody else's: those slots were never filled, and are read no more, or, where told 1, by the last.
        """
        tensors, readers, missing = self.tensors, self.readers, self.missing
        for slot in first.distinct_inputs:
            readers[slot] -= 1
            if not readers[slot]:
                tensors[slot] = None
        for node in nodes:
            missing[node.index] = 0
        for slot, left in inner:
            readers[slot] = left

    def is_last_reader(self, slot: int) -> bool:
        """Nobody but the asking step will read this slot: not a sibling, not the graph's own output."""
        return slot < self.plan.converted and self.readers[slot] == 1

    def steps_under_way(self) -> list[PlanNode]:
        """The nodes whose steps wait or run. For flows with iterations (streams.py)."""
        raise NotImplementedError

    def _check_given(self, plan: Plan) -> None:
        """An optional input of the graph may feed one that a model must have, as on Triton: then that model complains,
        and here before anything runs.
        """
        for slot, name, n in plan.lacking:
            if self.tensors[slot] is None:
                node = plan.nodes[n]
                raise located(
                    Invalid(
                        f"expected {len(node.inputs)} inputs but not all were given for model '{node.model.name}'. "
                        f"Missing required input(s) ['{name}'], to which '{plan.graph.inputs[slot].name}' is mapped; "
                        "that is optional in the ensemble, and not in the model"
                    ),
                    self,
                    node,
                )

    def _ticket(self, node: PlanNode) -> Ticket:
        tensors = self.tensors
        if node.plain >= 0:
            handle = tensors[node.plain]
            if handle is not None:
                rows = handle.stop - handle.start
                if 0 <= rows <= node.max_batch_size:
                    return Ticket(self, node, rows, None)
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
                if here < 0:  # made by a model without a batch dimension whose full shape meets this one's
                    here = handle.shape[0]
                if rows == -1:
                    rows = here
                elif here != rows:
                    text = f"input batch size does not match other inputs for '{node.model.name}'"
                    raise located(Invalid(text), self, node)
            if rows == -1:
                rows = 1
            elif rows > node.max_batch_size:
                text = f"inference request batch-size must be <= {node.max_batch_size} for '{node.model.name}'"
                raise located(Invalid(text), self, node)
        if node.checks:
            self._check_shapes(node)
        if not node.variable and not node.optional:
            return Ticket(self, node, rows, None)
        return Ticket(self, node, rows, self._key(node))

    def _convert(self, node: PlanNode) -> None:
        for slot, own, conversion in node.converts:
            handle = self.tensors[slot]
            self.tensors[own] = None if handle is None else handle.converted(conversion)

    def _key(self, node: PlanNode) -> Hashable:
        """What must be equal within a batch: the variable inputs' shapes, and which inputs are there at all."""
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
            if len(shape) != len(dims) or any(w not in (-1, g) for w, g in zip(dims, shape, strict=True)):
                name = self.plan.graph.nodes[node.index].inputs[i].name
                wanted = [-1, *dims] if first else list(dims)
                text = f"unexpected shape for input '{name}' for model '{node.model.name}'. "
                text += f"Expected {_list(wanted)}, got {_list(handle.shape)}"
                raise located(Invalid(text), self, node)

    def _deadlock(self, node: PlanNode, slot: int) -> ModelFailed:
        output = self.plan.graph.nodes[node.index].outputs[node.outputs.index(slot)].name
        text = (
            f"unexpected deadlock, at least one output is not set while no more "
            f"ensemble steps can be made: step '{node.name}' answered without its output '{output}', which "
            f"step '{self.plan.needed_by[slot]}' cannot do without"
        )
        return located(ModelFailed(text), self, node)

    def check(self) -> None:
        """Assert the numbered promises. For tests and simulation."""
        assert self.done or self.open > 0, f"(3) {self!r} is neither done nor going anywhere"
        for slot, handle in enumerate(self.tensors):
            if handle is not None and not self.done:
                assert self.readers[slot] > 0 or slot < len(self.plan.graph.inputs), (
                    f"(1) slot {slot} is held for nobody"
                )
        assert all(count >= 0 for count in self.missing), "(2) a node became ready twice"

    def __repr__(self) -> str:
        return f"Flow({self.plan.graph.name}, open={self.open}, done={self.done})"


def go_on(tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], now_ns: int) -> list[Ticket]:
    """`finish_step` for those of a batch who go straight on as the first does, together: their next steps, as queued
    now. It ends before the first about whom anything is unusual; nothing is done for that one and those behind it.
    """
    first = tickets[0]
    node, route = first.node, first.flow.route
    ready: list[Ticket] = []
    if node.goes_on is None:
        return ready
    j, slot, consumer = node.goes_on
    following = first.flow.plan.nodes[consumer]
    rows_max = following.max_batch_size
    read = node.inputs[0]
    for ticket, handle in zip(tickets, outputs[j], strict=True):
        flow = ticket.flow
        if ticket.node is not node or flow.done or handle is None or type(flow) is not Flow or flow.route is not route:
            break
        rows = handle.stop - handle.start
        if not 0 <= rows <= rows_max:
            break
        tensors = flow.tensors
        tensors[slot] = handle
        tensors[read] = None
        flow.readers[read] = 0
        flow.missing[consumer] = 0
        ready.append(Ticket(flow, following, rows, None, now_ns))
    return ready


def end(tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], last: PlanNode) -> list[Flow]:
    """`finish_step` for those of a batch of whom nothing more is to be done once it is through `last`, which made
    `outputs`: their flows, which are not done yet. The tickets are of that step, or of the first of several that all
    were gone through. It ends before the first about whom anything is unusual, as in `go_on`.
    """
    flows: list[Flow] = []
    if last.ends is None:
        return flows
    node = tickets[0].node
    frees = node.frees
    j, slot = last.ends
    for ticket, handle in zip(tickets, outputs[j], strict=True):
        flow = ticket.flow
        if ticket.node is not node or flow.done or flow.open != 1 or type(flow) is not Flow:
            break
        tensors = flow.tensors
        tensors[slot] = handle
        for read in frees:
            tensors[read] = None
        flow.open = 0
        flows.append(flow)
    return flows


def _list(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"
