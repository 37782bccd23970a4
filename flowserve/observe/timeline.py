"""Requests and batches over a period, as Chrome trace events for Perfetto.

Decides the drawing. Each request is a slice that contains its steps, their waits and batches, on lanes that requests
share one after the other; each model has a lane per instance, with its batches. Arrows lead from a step's wait to its
batch, and from there to the next step, so that merging and separating requests are visible. Times are microseconds from
the start of the period. Caller: `http`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from flowserve.observe.trace import Execution, Trace, TracedStep, Wait

_Json = dict[str, Any]
_REQUESTS: Final = 1  # the process id of all requests; models follow


def timeline(traces: Sequence[Trace], origin_ns: int, unfinished: int = 0) -> bytes:
    """The JSON document. `unfinished`: the number of requests omitted because they had not finished."""
    drawing = _Drawing(origin_ns)
    for trace in sorted(traces, key=lambda one: one.arrived_ns):
        drawing.request(trace)
    events = [*drawing.names(), *drawing.events]
    counts = {"requests": len(traces), "unfinished": unfinished}
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": counts})


class _Drawing:
    def __init__(self, origin_ns: int) -> None:
        self.events: list[_Json] = []
        self._origin_ns = origin_ns
        self._free_ns: list[int] = []  # when each lane of requests becomes free
        self._models: dict[str, int] = {}
        self._instances: dict[tuple[int, str], int] = {}
        self._drawn: set[int] = set()  # numbers of drawn executions
        self._arrows = 0

    def request(self, trace: Trace, caller: Execution | None = None) -> None:
        """Draw one request, and the BLS calls of its models."""
        rows = _rows(trace.steps)
        lanes = self._lanes(trace, max(rows, default=0) + 1)
        facts = {"id": trace.request_id, "number": trace.number, "rows": trace.rows, "error": trace.error}
        facts |= {"remembered": True} if trace.is_cached else {}
        self._slice(_REQUESTS, lanes[0], trace.graph.name, trace.arrived_ns, trace.ended_ns, facts)
        self._waits(lanes[0], trace.waits)
        if caller is not None:
            self._arrow([(*self._place(caller), trace.arrived_ns), (_REQUESTS, lanes[0], trace.arrived_ns)])
        for step, row in zip(trace.steps, rows, strict=True):
            self._step(step, lanes[row])
        for execution in trace.executions():
            for call in execution.calls:
                self.request(call, execution)

    def names(self) -> Iterator[_Json]:
        """The names of processes and lanes."""
        yield _name("process_name", _REQUESTS, 0, "requests")
        for lane in range(len(self._free_ns)):
            yield _name("thread_name", _REQUESTS, lane + 1, f"lane {lane + 1}")
        for model, process in self._models.items():
            yield _name("process_name", process, 0, f"model {model}")
        for (process, instance), lane in self._instances.items():
            yield _name("thread_name", process, lane, instance)

    def _step(self, step: TracedStep, lane: int) -> None:
        ran = step.execution
        ended = max(step.ended_ns, ran.ended_ns)
        facts = {"model": str(step.node.model), "rows": step.rows, "error": step.error}
        self._slice(_REQUESTS, lane, step.node.name, step.ready_ns, ended, facts)
        self._waits(lane, step.waits)
        if not ran.ended_ns:
            return
        self._execution(ran)
        self._slice(_REQUESTS, lane, f"batch {ran.number}", ran.started_ns, ran.ended_ns, _of(ran))
        wait = step.waits[0].from_ns if step.waits else step.ready_ns
        self._waits(lane, step.pauses)
        self._arrow([(_REQUESTS, lane, wait), (*self._place(ran), ran.started_ns), (_REQUESTS, lane, ran.ended_ns)])

    def _execution(self, ran: Execution) -> None:
        if ran.number in self._drawn:
            return
        self._drawn.add(ran.number)
        place = self._place(ran)
        self._slice(*place, f"batch {ran.number}", ran.started_ns, ran.ended_ns, {**_of(ran), "traced": ran.members})
        parts = (ran.started_ns, ran.gathered_ns, ran.computed_ns, ran.ended_ns)
        for name, begun, ended in zip(("input", "infer", "output"), parts[:3], parts[1:], strict=True):
            self._slice(*place, name, begun, ended, {})

    def _place(self, ran: Execution) -> tuple[int, int]:
        """The process and lane of its instance."""
        process = self._models.setdefault(str(ran.model), _REQUESTS + 1 + len(self._models))
        return process, self._instances.setdefault((process, ran.instance), len(self._instances) + 1)

    def _lanes(self, trace: Trace, count: int) -> list[int]:
        """Lanes for a request; the first is for the request itself."""
        lanes = [lane for lane, free in enumerate(self._free_ns) if free <= trace.arrived_ns][:count]
        while len(lanes) < count:
            lanes.append(len(self._free_ns))
            self._free_ns.append(0)
        for lane in lanes:
            self._free_ns[lane] = max(trace.ended_ns, *(step.ended_ns for step in trace.steps), trace.arrived_ns)
        return [lane + 1 for lane in lanes]

    def _waits(self, lane: int, waits: Sequence[Wait]) -> None:
        for wait in waits:
            self._slice(_REQUESTS, lane, wait.reason, wait.from_ns, wait.to_ns, {})

    def _slice(self, process: int, lane: int, name: str, begun_ns: int, ended_ns: int, facts: _Json) -> None:
        event = {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": self._us(begun_ns)}
        event["dur"] = max(ended_ns - begun_ns, 0) / 1000
        self.events.append({**event, "args": {key: fact for key, fact in facts.items() if fact not in ("", None)}})

    def _arrow(self, places: Sequence[tuple[int, int, int]]) -> None:
        """An arrow through slices, each identified by process, lane and time."""
        self._arrows += 1
        last = len(places) - 1
        for i, (process, lane, ns) in enumerate(places):
            event = {"ph": "stf"[0 if not i else 2 if i == last else 1], "id": self._arrows, "name": "batch"}
            event |= {"cat": "batch", "pid": process, "tid": lane, "ts": self._us(ns)}
            self.events.append({**event, "bp": "e"} if i == last else event)

    def _us(self, ns: int) -> float:
        return (ns - self._origin_ns) / 1000


def _rows(steps: Sequence[TracedStep]) -> list[int]:
    """For each step the first row that is free in its interval."""
    free: list[int] = []
    rows = []
    for step in steps:
        row = next((row for row, ns in enumerate(free) if ns <= step.ready_ns), len(free))
        ended = max(step.ended_ns, step.execution.ended_ns)
        if row == len(free):
            free.append(ended)
        else:
            free[row] = ended
        rows.append(row)
    return rows


def _of(ran: Execution) -> _Json:
    return {"rows": ran.rows, "requests": ran.requests, "instance": ran.instance, "error": ran.error}


def _name(kind: str, process: int, lane: int, name: str) -> _Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}
