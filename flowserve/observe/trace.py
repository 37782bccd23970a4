"""What became of one request, step by step: the record that every kind of trace is written from.

Decided here: what a trace holds. A request has steps; a step became ready, was queued, waited, and ran in an execution
that it may share with steps of other requests. Moments are nanoseconds of the server's clock, 0 for what has not come.
Who is traced, when these are filled in, and where traces go is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.observe.waits import ORDER, Wait, add
from flowserve.values import Array

# Triton's words for where a tensor was seen: entering the queue of a model, leaving a model.
QUEUE_INPUT: Final = "TENSOR_QUEUE_INPUT"
BACKEND_OUTPUT: Final = "TENSOR_BACKEND_OUTPUT"


@dataclass(slots=True, eq=False)
class Execution:
    """One batch that ran: `requests` steps with `rows` rows in all on one instance. `members` are the numbers of those
    of its requests that are traced. `taken_ns`: it left the queue; `started_ns`, `gathered_ns`, `computed_ns`: the
    instance began, had its inputs in place, had computed. `calls`: what the model asked of other models meanwhile.
    """

    number: int
    model: ModelKey
    instance: str
    requests: int
    rows: int
    taken_ns: int
    members: list[int] = field(default_factory=list)
    started_ns: int = 0
    gathered_ns: int = 0
    computed_ns: int = 0
    ended_ns: int = 0
    error: str = ""
    calls: list[Trace] = field(default_factory=list)

    def ran(self, started_ns: int, gathered_ns: int, computed_ns: int, ended_ns: int) -> None:
        """Put down the moments, each no earlier than the one before: some come from other processes, or not at all."""
        self.started_ns = max(started_ns, self.taken_ns)
        self.gathered_ns = max(gathered_ns, self.started_ns)
        self.computed_ns = max(computed_ns, self.gathered_ns)
        self.ended_ns = max(ended_ns, self.computed_ns)


@dataclass(frozen=True, slots=True, eq=False)
class TensorSeen:
    """A tensor as it passed, where tensors are traced. `activity` is Triton's word for where that was. `array` is a
    copy, None where it is too large, or lies where nobody looks at it.
    """

    activity: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Array | None


@dataclass(slots=True, eq=False)
class Step:
    """One attempt at a node: a step whose batch failed and is tried again in halves has another. `ready_ns`:
    everything it reads was there. `waits` reach from there to when its instance began, as far as that is known.
    `answers`: how often it answered, where its model may do so many times; `pauses`: when it stood in its send because
    there was no room for another one, or had its answer held back. `span_id` is that of its computation, where its
    model was told; else 0.
    """

    node: Node
    rows: int
    ready_ns: int
    queued_ns: int
    execution: Execution
    waits: list[Wait]
    ended_ns: int = 0
    error: str = ""
    answers: int = 0
    pauses: list[Wait] = field(default_factory=list)
    tensors: list[TensorSeen] = field(default_factory=list)
    span_id: int = 0

    def held_back(self, until_ns: int) -> None:
        """Its answer was there, and waited for those before it."""
        add(self.pauses, ORDER, self.ended_ns, until_ns)


@dataclass(slots=True, eq=False)
class Trace:
    """One request. `waits` are those before its first step; `marks` are moments of the front end that took it, by
    Triton's names; `parent` is the context it came with (a `traceparent`), "" for none. `is_cached`: its answer was
    remembered. `omitted`: so many steps more ran than are told. `trace_id` is that of its spans, where models may add
    theirs; else 0.
    """

    number: int
    graph: Graph
    request_id: str
    rows: int
    arrived_ns: int
    parent: str = ""
    trace_id: int = 0
    ended_ns: int = 0
    error: str = ""
    is_cached: bool = False
    omitted: int = 0
    waits: list[Wait] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    tensors: list[TensorSeen] = field(default_factory=list)

    def executions(self) -> Sequence[Execution]:
        """Each once, in the order in which they left their queues."""
        return [*dict.fromkeys(step.execution for step in self.steps)]

    def calls(self) -> Iterator[Trace]:
        """What its models asked of others."""
        for execution in self.executions():
            yield from execution.calls
