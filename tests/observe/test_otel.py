"""Traces as OpenTelemetry spans: nesting, attributes, parents."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.observe.otel import Spans
from flowserve.observe.trace import BUSY, HANDOVER, Execution, Trace, TracedStep, Wait, is_sampled

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OFFSET = 1_000_000


def trace_of(*nodes: Node, name: str = "pipe", is_ensemble: bool = True, parent: str = "", error: str = "") -> Trace:
    trace = Trace(1, Graph(name, 3, (), (), 8, nodes, (), is_ensemble=is_ensemble), "r", 1, 100, parent, error=error)
    for i, node in enumerate(nodes):
        begun = 100 + 100 * i
        ran = Execution(i + 1, node.model, f"{node.model.name}_0", 2, 4, begun + 20, [1])
        ran.ran(begun + 30, begun + 40, begun + 80, begun + 90)
        waits = [Wait(BUSY, begun, begun + 20), Wait(HANDOVER, begun + 20, begun + 30)]
        trace.steps.append(TracedStep(node, 1, begun, begun + 5, ran, waits, begun + 90, error))
    trace.ended_ns = 100 + 100 * len(nodes)
    trace.marks = [("HTTP_RECV_START", 50), ("HTTP_SEND_END", 1001)]
    return trace


def node(index: int, name: str, model: str, *path: str) -> Node:
    return Node(index, name, ModelKey(model, 1), (), (), 8, path)


def spans_of(trace: Trace) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    spans = Spans({"resource": ["service.name=mine", "zone=a=b"]}, exporter)
    spans.put(trace, OFFSET)
    spans.close()
    return exporter.get_finished_spans()


def nested(spans: tuple[ReadableSpan, ...], parent: int | None) -> list[Any]:
    """Span names with their children, by start time."""
    inside = [one for one in spans if (one.parent.span_id if one.parent else None) == parent]
    inside.sort(key=lambda one: (one.start_time or 0, one.name != "queue"))
    return [(one.name, nested(spans, one.context.span_id)) for one in inside]


RAN: list[tuple[str, list[object]]] = [("queue", []), ("compute", [])]


def test_spans_are_nested_like_the_graph() -> None:
    trace = trace_of(node(0, "first", "a"), node(1, "outer/in", "b", "nest"), node(2, "outer/deep/x", "c", "nest", "d"))
    spans = spans_of(trace)
    pipe = ("pipe", [("a", RAN), ("nest", [("b", RAN), ("d", [("c", RAN)])])])
    assert nested(spans, None) == [("InferRequest", [pipe])]
    assert {one.resource.attributes["service.name"] for one in spans} == {"mine"}
    assert {one.resource.attributes["zone"] for one in spans} == {"a=b"}
    by_name = {one.name: one for one in spans}
    whole = by_name["InferRequest"]
    assert (whole.start_time, whole.end_time) == (50 + OFFSET, 1001 + OFFSET)
    for one in spans:
        assert whole.start_time <= one.start_time <= one.end_time <= whole.end_time  # type: ignore[operator]
    assert dict(by_name["c"].attributes or {}) == {
        "triton.model_name": "c",
        "triton.model_version": 1,
        "flowserve.step": "outer/deep/x",
    }


def test_a_computation_span_names_its_batch_and_a_wait_span_its_reasons() -> None:
    spans = spans_of(trace_of(node(0, "m", "m"), name="m", is_ensemble=False, error="no luck"))
    assert nested(spans, None) == [("InferRequest", [("m", RAN)])]
    by_name = {one.name: one for one in spans}
    compute, queue = by_name["compute"], by_name["queue"]
    assert dict(compute.attributes or {}) == {
        "flowserve.batch": 1,
        "flowserve.batch.rows": 4,
        "flowserve.batch.requests": 2,
        "flowserve.instance": "m_0",
        "flowserve.rows": 1,
    }
    stamps = [(one.name, one.timestamp - OFFSET) for one in compute.events]
    names = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
    assert stamps == [*zip(names, (130, 140, 180, 190), strict=True)]
    assert [(one.name, dict(one.attributes or {})) for one in queue.events] == [
        (BUSY, {"ms": 20 / 1e6}),
        (HANDOVER, {"ms": 10 / 1e6}),
    ]
    assert {one.name for one in spans if not one.status.is_ok and one.status.description == "no luck"} == {
        "InferRequest",
        "m",
        "compute",
    }


def test_a_trace_continues_its_callers_trace() -> None:
    spans = spans_of(trace_of(node(0, "m", "m"), is_ensemble=False, parent=CALLER))
    assert {f"{one.context.trace_id:032x}" for one in spans} == {CALLER.split("-")[1]}
    (whole,) = [one for one in spans if one.name == "InferRequest"]
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == CALLER.split("-")[2]


def test_bls_calls_are_inside_the_computation_span() -> None:
    trace = trace_of(node(0, "caller", "caller"), name="caller", is_ensemble=False)
    trace.steps[0].execution.calls.append(trace_of(node(0, "m", "m"), name="m", is_ensemble=False))
    assert nested(spans_of(trace), None) == [("InferRequest", [("caller", [("queue", []), ("compute", [("m", RAN)])])])]


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (CALLER, True),
        (CALLER[:-1] + "0", False),
        (CALLER.replace("00-", "01-") + "-more", True),
        (CALLER + "-more", None),
        (CALLER.replace("00-", "ff-"), None),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", None),
        (CALLER.upper(), None),
        ("", None),
        ("1", None),
    ],
)
def test_a_trace_context_is_valid_or_ignored(text: str, sampled: bool | None) -> None:
    assert is_sampled(text) is sampled
