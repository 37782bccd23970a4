"""The trace of one request, from which every trace format is written; its wait reasons; the trace context of the W3C.

Decides the contents of a trace. A request has steps; a step became ready, was queued, waited, and ran in an execution
that it may share with steps of other requests. Wait reasons are adjacent intervals without gaps; the time in a queue is
divided among them: periods without a free instance have that reason, the rest has the queue's own reason. Times are
nanoseconds of the server's clock, passed by the caller; 0 if not reached. Also decides the texts of the reasons, and
which `traceparent` headers are valid; an invalid one counts as absent, as the recommendation requires. Does not select
or fill traces (`runtime/tracing`) or write them (`trace_file`, `otel`, `timeline`, `server_timing`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Final

from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.values import Array

# Triton's names of the points at which tensors are recorded: entering a model's queue, leaving a model.
QUEUE_INPUT: Final = "TENSOR_QUEUE_INPUT"
BACKEND_OUTPUT: Final = "TENSOR_BACKEND_OUTPUT"
# Wait reasons.
BUSY: Final = "no instance was free"
FULL: Final = "its batch was forming until it was full"
SIZED: Final = "its batch was forming until it had a preferred size"
CLOSED: Final = "its batch was forming until the next request did not fit"
DELAYED: Final = "its batch was forming until max_queue_delay_microseconds was over"
LIMITER: Final = "the rate limiter kept its resources for others"
SEQUENCE: Final = "its sequence's turn had not come"
INFLIGHT: Final = "max_inflight_requests was reached"
ADMISSION: Final = "the deployment was full"
SAME_REQUEST: Final = "the same request was being answered"
AGAIN: Final = "its batch had failed and it was tried again in a smaller one"
TURN: Final = "its turn of the event loop had not come"
ORDER: Final = "the answers before it were not there"
SEND: Final = "there was no room for another answer"
HANDOVER: Final = "its batch was on the way to the instance"

_PERIODS_MAX: Final = 4096  # a wait that is longer than the kept periods counts as waiting for an instance


@dataclass(frozen=True, slots=True)
class Wait:
    """One reason, and the interval in which it held."""

    reason: str
    from_ns: int
    to_ns: int

    @property
    def ns(self) -> int:
        return self.to_ns - self.from_ns


class BusyPeriods:
    """The periods in which no instance of a queue was free."""

    __slots__ = ("_periods", "_since_ns")

    def __init__(self) -> None:
        self._periods: deque[tuple[int, int]] = deque(maxlen=_PERIODS_MAX)
        self._since_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """The last free instance became busy. No effect if none was free."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def end(self, now_ns: int) -> None:
        """An instance became free. No effect if one was free."""
        if self._since_ns is not None:
            self._periods.append((self._since_ns, now_ns))
            self._since_ns = None

    def after(self, moment_ns: int) -> list[tuple[int, int]]:
        """The periods that ended after that time."""
        if len(self._periods) == _PERIODS_MAX and self._periods[0][0] > moment_ns:
            return [(moment_ns, self._periods[0][1]), *self._periods]
        found: list[tuple[int, int]] = []
        for spell in reversed(self._periods):
            if spell[1] <= moment_ns:
                break
            found.append(spell)
        return found[::-1]


def divided(from_ns: int, to_ns: int, busy: Sequence[tuple[int, int]], otherwise: str) -> list[Wait]:
    """The interval divided into BUSY, in these periods in order, and `otherwise` between them."""
    waits: list[Wait] = []
    at = from_ns
    for begun, ended in busy:
        begun, ended = max(begun, at), min(ended, to_ns)
        if ended > begun:
            add(waits, otherwise, at, begun)
            add(waits, BUSY, begun, ended)
            at = ended
    add(waits, otherwise, at, to_ns)
    return waits


def add(waits: list[Wait], reason: str, from_ns: int, to_ns: int) -> None:
    """Append a wait unless it is empty."""
    if to_ns > from_ns:
        waits.append(Wait(reason, from_ns, to_ns))


def by_reason(waits: Sequence[Wait]) -> dict[str, int]:
    """Nanoseconds by reason, longest first."""
    sums: dict[str, int] = {}
    for wait in waits:
        sums[wait.reason] = sums.get(wait.reason, 0) + wait.ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(slots=True, eq=False)
class Execution:
    """One executed batch: `requests` steps with `rows` rows in total on one instance. `members` are the numbers of its
    traced requests. `taken_ns`: it left the queue; `started_ns`, `gathered_ns`, `computed_ns`: the instance started,
    had its inputs assembled, had computed. `calls`: the model's BLS calls.
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
        """Set the times, each no earlier than the one before: some come from other processes, or are missing."""
        self.started_ns = max(started_ns, self.taken_ns)
        self.gathered_ns = max(gathered_ns, self.started_ns)
        self.computed_ns = max(computed_ns, self.gathered_ns)
        self.ended_ns = max(ended_ns, self.computed_ns)

    def stamps(self) -> list[tuple[str, int]]:
        """The times by Triton's names; none if it has not ended."""
        if not self.ended_ns:
            return []
        begin = [("COMPUTE_START", self.started_ns), ("COMPUTE_INPUT_END", self.gathered_ns)]
        return [*begin, ("COMPUTE_OUTPUT_START", self.computed_ns), ("COMPUTE_END", self.ended_ns)]


@dataclass(frozen=True, slots=True, eq=False)
class TensorSeen:
    """A recorded tensor, at level TENSORS. `activity` is Triton's name of the point. `array` is a copy, None if it is
    too large or not in host memory.
    """

    activity: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Array | None


@dataclass(slots=True, eq=False)
class TracedStep:
    """One attempt to run a node: a step whose batch failed and is retried in halves has another. `ready_ns`: all its
    inputs were present. `waits` cover the time from then until its instance started, as far as known. `answers`: the
    number of responses of a decoupled model; `pauses`: when it was blocked in send() for lack of room, or its response
    was held back. `span_id` is the id of its computation's span if it was passed to the model, else 0.
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
        """Record that its response waited for earlier ones."""
        add(self.pauses, ORDER, self.ended_ns, until_ns)


@dataclass(slots=True, eq=False)
class Trace:
    """One request. `waits` are those before its first step; `marks` are times of its front end, by Triton's names;
    `parent` is its `traceparent`, "" for none. `is_cached`: its response came from the cache. `omitted`: the number of
    steps that ran but are not recorded. `skipped`: the nodes whose space had no row. `trace_id` is the id of its spans,
    if models may add theirs; else 0. `span_id` is that of its first span, 0 for any.
    """

    number: int
    graph: Graph
    request_id: str
    rows: int
    arrived_ns: int
    parent: str = ""
    trace_id: int = 0
    span_id: int = 0
    ended_ns: int = 0
    error: str = ""
    is_cached: bool = False
    omitted: int = 0
    skipped: list[Node] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    tensors: list[TensorSeen] = field(default_factory=list)

    def executions(self) -> Sequence[Execution]:
        """Each execution once, in the order in which they left their queues."""
        return [*dict.fromkeys(step.execution for step in self.steps)]

    def calls(self) -> Iterator[Trace]:
        """The BLS calls of its models."""
        for execution in self.executions():
            yield from execution.calls


def by_ensemble(steps: Sequence[TracedStep], depth: int = 0) -> Iterator[tuple[str, list[TracedStep]]]:
    """The steps of one ensemble, each as ("", [step]), and its nested ensembles, each as its name and its steps, in
    order of the first step. `depth`: how deep the ensemble itself is nested.
    """
    groups: dict[object, tuple[str, list[TracedStep]]] = {}
    for step in steps:
        path = step.node.name.split("/")
        name = "/".join(path[: depth + 1]) if len(path) > depth + 1 else ""
        groups.setdefault(name or step, (name, []))[1].append(step)
    yield from groups.values()


_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


def is_sampled(traceparent: str) -> bool | None:
    """Whether the caller records its trace; None for an invalid context."""
    found = _parts(traceparent)
    return None if found is None else bool(int(found[2], 16) & 1)


def ids_of(traceparent: str) -> tuple[str, str] | None:
    """The ids of the trace and of the span, in hexadecimal; None for an invalid context."""
    found = _parts(traceparent)
    return None if found is None else found[:2]


def _parts(traceparent: str) -> tuple[str, str, str] | None:
    """Trace, span and flags; None for an invalid context."""
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return trace, span, flags


def trace_id_for(parent: str) -> int:
    """The id of a trace that begins below `parent`, a context or ""."""
    return int(parent[3:35], 16) if parent else getrandbits(128) or 1


def new_span_id() -> int:
    return getrandbits(64) or 1


def traceparent_of(trace_id: int, span_id: int) -> str:
    """The context of a recorded span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"
