"""A trace as the objects of Triton's JSON trace file.

Decided here: which timestamps there are and what each means here, how a request's steps become traces of their own
with the ensemble's as their parent, and what is told besides, under the key `flowserve`, which readers written for
Triton skip. Numbers of traces grow from parents to children, which such readers rely on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from flowserve.observe.trace import Step, TensorSeen, Trace
from flowserve.observe.waits import Wait
from flowserve.values import Array

Json = dict[str, Any]
_NO_VERSION: Final = -1  # of a nested ensemble: the graph was compiled without one


def as_objects(trace: Trace, numbers: Iterator[int], parent: int = 0) -> Iterator[Json]:
    """What the file holds of one request and all that followed from it. `numbers` gives each trace its own."""
    number = next(numbers)
    if trace.graph.is_ensemble:
        yield _head(number, trace.graph.name, trace.graph.version, trace.request_id, parent, _told(trace))
        yield from _stamps(number, [("REQUEST_START", trace.arrived_ns), ("QUEUE_START", trace.arrived_ns)])
        yield from _tensors(number, trace.tensors)
        yield from _scopes(trace, trace.steps, (), number, numbers)
    else:
        told = _told(trace) | (_of_step(trace.steps[-1]) if trace.steps else {})
        yield _head(number, trace.graph.name, trace.graph.version, trace.request_id, parent, told)
        yield from _stamps(number, [("REQUEST_START", trace.arrived_ns)])
        yield from _tensors(number, trace.tensors)
        if trace.steps:
            yield from _computed(number, trace.steps[-1])
    ended = [("INFER_RESPONSE_COMPLETE", trace.ended_ns), ("REQUEST_END", trace.ended_ns)]
    yield from _stamps(number, [*ended, *trace.marks])
    if not trace.graph.is_ensemble:
        for call in trace.calls():
            yield from as_objects(call, numbers, number)


def _scopes(
    trace: Trace, steps: Sequence[Step], path: tuple[str, ...], parent: int, numbers: Iterator[int]
) -> Iterator[Json]:
    """The steps of one ensemble. Those of an ensemble inside it are traces of one that stands for it."""
    depth = len(path)
    done: set[str] = set()
    for step in steps:
        inner = step.node.name.split("/")[:-1]
        if len(inner) == depth:
            yield from _step(trace, step, parent, numbers)
            continue
        name = "/".join(inner[: depth + 1])
        if name in done:
            continue
        done.add(name)
        inside = [one for one in steps if "/".join(one.node.name.split("/")[:-1][: depth + 1]) == name]
        number = next(numbers)
        yield _head(number, step.node.path[depth], _NO_VERSION, trace.request_id, parent, {"step": name})
        begun = min(one.ready_ns for one in inside)
        yield from _stamps(number, [("REQUEST_START", begun), ("QUEUE_START", begun)])
        yield from _scopes(trace, inside, (*path, inner[depth]), number, numbers)
        yield from _stamps(number, [("REQUEST_END", max(one.ended_ns for one in inside))])


def _step(trace: Trace, step: Step, parent: int, numbers: Iterator[int]) -> Iterator[Json]:
    number = next(numbers)
    key = step.node.model
    yield _head(number, key.name, key.version, trace.request_id, parent, _of_step(step))
    yield from _stamps(number, [("REQUEST_START", step.ready_ns)])
    yield from _computed(number, step)
    yield from _stamps(number, [("REQUEST_END", step.ended_ns)])
    if step is next(one for one in trace.steps if one.execution is step.execution):
        for call in step.execution.calls:
            yield from as_objects(call, numbers, number)


def _computed(number: int, step: Step) -> Iterator[Json]:
    ran = step.execution
    stamps = [("QUEUE_START", step.queued_ns)]
    if ran.ended_ns:
        stamps += [("COMPUTE_START", ran.started_ns), ("COMPUTE_INPUT_END", ran.gathered_ns)]
        stamps += [("COMPUTE_OUTPUT_START", ran.computed_ns), ("COMPUTE_END", ran.ended_ns)]
    yield from _stamps(number, stamps)
    yield from _tensors(number, step.tensors)


def _head(number: int, model: str, version: int, request_id: str, parent: int, told: Json) -> Json:
    head: Json = {"id": number, "model_name": model, "model_version": version}
    if request_id:
        head["request_id"] = request_id
    if parent:
        head["parent_id"] = parent
    return {**head, "flowserve": told} if told else head


def _stamps(number: int, stamps: Sequence[tuple[str, int]]) -> Iterator[Json]:
    yield {"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps]}


def _told(trace: Trace) -> Json:
    told: Json = {"waits": _waits(trace.waits)} if trace.waits else {}
    if trace.error:
        told["error"] = trace.error
    if trace.omitted:
        told["omitted"] = trace.omitted
    return {**told, "cached": True} if trace.is_cached else told


def _of_step(step: Step) -> Json:
    ran = step.execution
    told: Json = {
        "step": step.node.name,
        "waits": _waits(step.waits),
        "batch": {"id": ran.number, "rows": ran.rows, "requests": ran.requests, "instance": ran.instance},
        "rows": step.rows,
    }
    if step.answers:
        told["answers"] = step.answers
    if step.pauses:
        told["pauses"] = _waits(step.pauses)
    return {**told, "error": step.error} if step.error else told


def _waits(waits: Sequence[Wait]) -> list[Json]:
    return [{"reason": wait.reason, "from_ns": wait.from_ns, "ns": wait.ns} for wait in waits]


def _tensors(number: int, tensors: Sequence[TensorSeen]) -> Iterator[Json]:
    for one in tensors:
        tensor = {
            "name": one.name,
            "data": "" if one.array is None else _data(one.array),
            "shape": ",".join(map(str, one.shape)),
            "dtype": one.dtype,
        }
        yield {"id": number, "activity": one.activity, "tensor": tensor}


def _data(array: Array) -> str:
    flat = array.ravel()
    if array.dtype.hasobject:
        shown = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in flat.tolist()]
        return ",".join(f'"{text}"' for text in shown)
    if array.dtype.kind == "b":
        return ",".join("1" if one else "0" for one in flat.tolist())
    return ",".join(map(str, flat))  # as numpy writes its numbers: the shortest text that is exact
