"""Traces as spans of OpenTelemetry; the only reader of its packages.

Decided here: which spans a trace becomes, what they are called and what they say, and that they are made and sent on
threads of their own, after all is over. Names and events are Triton's, so that what reads its spans reads these: the
request as its front end saw it (`InferRequest`), in it a span for each model that ran for it, in those one for the
computation (`compute`), in which models put spans of their own; besides, one for each wait (`queue`), whose events are
the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowserve.errors import Unsupported
from flowserve.observe.trace import Step, Trace
from flowserve.observe.waits import Wait
from flowserve.observe.writer import Writer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import Span

DEFAULT_URL: Final = "http://localhost:4318/v1/traces"
_SERVICE: Final = "service.name"
_BSP: Final = {
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_millis",
    "bsp_max_export_batch_size": "max_export_batch_size",
}

log = logging.getLogger("flowserve.observe")


class _Ids:
    """Numbers of traces and spans: those that models were told, else new ones. For one thread."""

    def __init__(self, new: RandomIdGenerator) -> None:
        self._new = new
        self.trace_id = 0  # of the next trace, where it is decided already
        self.span_id = 0  # of the next span

    def generate_trace_id(self) -> int:
        found, self.trace_id = self.trace_id, 0
        return found or self._new.generate_trace_id()

    def generate_span_id(self) -> int:
        found, self.span_id = self.span_id, 0
        return found or self._new.generate_span_id()

    def is_trace_id_random(self) -> bool:
        """Told ones are as random as those that its own generator makes."""
        return True


class Spans:
    """Where traces go in mode opentelemetry. `settings` are that mode's; `exporter` stands in for the network."""

    def __init__(self, settings: Mapping[str, Sequence[str]], exporter: SpanExporter | None = None) -> None:
        """Raises Unsupported where the packages are missing."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise Unsupported(
                f"mode opentelemetry needs packages that are not installed ({error.name}): pip install flowserve[otel]"
            ) from None
        given = dict(one.split("=", 1) for one in settings.get("resource", ()))
        resource = Resource.create({_SERVICE: "flowserve"}).merge(Resource(dict(given)))
        self._ids = _Ids(RandomIdGenerator())
        # Not at exit: a collector that is gone must not keep the process.
        ids: Any = self._ids  # of no base class of theirs, which would have to be imported with this module
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=ids)
        sent = exporter or OTLPSpanExporter(endpoint=settings.get("url", (DEFAULT_URL,))[-1])
        limits: dict[str, Any] = {_BSP[name]: int(values[-1]) for name, values in settings.items() if name in _BSP}
        self._provider.add_span_processor(BatchSpanProcessor(sent, **limits))
        self._tracer = self._provider.get_tracer("flowserve")
        self._context = TraceContextTextMapPropagator()
        self._api = trace
        self._writer = Writer("flowserve spans", lambda error: log.error("spans are lost: %s", error))
        self._offset_ns = 0

    def put(self, trace: Trace, offset_ns: int) -> None:
        """A request is over. `offset_ns`: what the server's clock lacks to the time of day."""
        self._writer.offer(lambda: self._add(trace, offset_ns))

    def close(self) -> None:
        """Send what is not sent yet. Blocks."""
        self._writer.close()
        self._provider.shutdown()

    # ------------------------------------------------------------------ on its thread

    def _add(self, trace: Trace, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        begun = min([ns for _, ns in trace.marks] + [trace.arrived_ns])
        ended = max([ns for _, ns in trace.marks] + [trace.ended_ns])
        context = self._context.extract({"traceparent": trace.parent}) if trace.parent else None
        self._ids.trace_id = trace.trace_id
        root = self._span("InferRequest", context, begun, {}, kind=self._api.SpanKind.SERVER)
        self._ids.trace_id = 0  # which its caller's context may have decided
        for name, ns in trace.marks:
            root.add_event(name, timestamp=ns + offset_ns)
        self._request(trace, root)
        self._end(root, ended, trace.error)

    def _request(self, trace: Trace, parent: Span) -> None:
        """The span of a deployment that was asked, with all that ran for it."""
        facts = {"triton.model_name": trace.graph.name, "triton.model_version": trace.graph.version}
        facts |= {"triton.trace_id": trace.number}
        if trace.request_id:
            facts["triton.request_id"] = trace.request_id
        if trace.is_cached:
            facts["flowserve.cached"] = True
        span = self._span(trace.graph.name, self._within(parent), trace.arrived_ns, facts)
        span.add_event("REQUEST_START", timestamp=trace.arrived_ns + self._offset_ns)
        self._waits(trace.waits, span)
        if trace.graph.is_ensemble:
            self._steps(trace, trace.steps, 0, span)
        else:
            for step in trace.steps:
                self._computed(trace, step, span)
        span.add_event("REQUEST_END", timestamp=trace.ended_ns + self._offset_ns)
        self._end(span, trace.ended_ns, trace.error)

    def _steps(self, trace: Trace, steps: Sequence[Step], depth: int, parent: Span) -> None:
        """The steps of one ensemble; those of an ensemble inside it in a span of its own."""
        done: set[str] = set()
        for step in steps:
            names = step.node.name.split("/")
            if len(names) == depth + 1:
                facts: dict[str, Any] = {"triton.model_name": step.node.model.name, "flowserve.step": step.node.name}
                facts["triton.model_version"] = step.node.model.version
                span = self._span(step.node.model.name, self._within(parent), step.ready_ns, facts)
                self._computed(trace, step, span)
                self._end(span, step.ended_ns, step.error)
                continue
            name = "/".join(names[: depth + 1])
            if name not in done:
                done.add(name)
                inside = [one for one in steps if one.node.name.startswith(f"{name}/")]
                facts = {"triton.model_name": step.node.path[depth], "flowserve.step": name}
                span = self._span(
                    step.node.path[depth], self._within(parent), min(one.ready_ns for one in inside), facts
                )
                self._steps(trace, inside, depth + 1, span)
                self._end(span, max(one.ended_ns for one in inside))

    def _computed(self, trace: Trace, step: Step, parent: Span) -> None:
        """How long a step waited, and what it ran in."""
        ran = step.execution
        parent.add_event("QUEUE_START", timestamp=step.queued_ns + self._offset_ns)
        self._waits(step.waits, parent)
        facts = {
            "flowserve.batch": ran.number,
            "flowserve.batch.rows": ran.rows,
            "flowserve.batch.requests": ran.requests,
            "flowserve.instance": ran.instance,
            "flowserve.rows": step.rows,
        }
        self._ids.span_id = step.span_id
        span = self._span("compute", self._within(parent), ran.started_ns or ran.taken_ns, facts)
        if ran.ended_ns:
            stamps = (("COMPUTE_START", ran.started_ns), ("COMPUTE_INPUT_END", ran.gathered_ns))
            for name, ns in (*stamps, ("COMPUTE_OUTPUT_START", ran.computed_ns), ("COMPUTE_END", ran.ended_ns)):
                span.add_event(name, timestamp=ns + self._offset_ns)
        for pause in step.pauses:
            span.add_event(pause.reason, {"ms": pause.ns / 1e6}, timestamp=pause.from_ns + self._offset_ns)
        if step is next(one for one in trace.steps if one.execution is ran):
            for call in ran.calls:
                self._request(call, span)
        self._end(span, ran.ended_ns or step.ended_ns, step.error)

    def _waits(self, waits: Sequence[Wait], parent: Span) -> None:
        if waits:
            span = self._span("queue", self._within(parent), waits[0].from_ns, {})
            for wait in waits:
                span.add_event(wait.reason, {"ms": wait.ns / 1e6}, timestamp=wait.from_ns + self._offset_ns)
            self._end(span, waits[-1].to_ns)

    def _span(self, name: str, context: Any, ns: int, facts: Mapping[str, Any], kind: Any = None) -> Span:
        kind = kind or self._api.SpanKind.INTERNAL
        return self._tracer.start_span(name, context, kind, facts, start_time=ns + self._offset_ns)

    def _within(self, parent: Span) -> Any:
        return self._api.set_span_in_context(parent)

    def _end(self, span: Span, ns: int, error: str = "") -> None:
        if error:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, error))
        span.end(ns + self._offset_ns)
