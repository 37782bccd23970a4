"""Traces as OpenTelemetry spans. The only module that imports OpenTelemetry.

Decides the spans of a trace, their names and attributes, and that they are created and sent on separate threads, after
the request has finished. Names and events are Triton's, so that existing readers work: the request as its front end saw
it (`InferRequest`), containing a span for each model that ran for it, containing one for the computation (`compute`),
in which models put their own spans; and one for each wait (`queue`), whose events are the reasons. Does not select
traces (`trace_settings`). Caller: `runtime/tracing`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowserve.errors import Unsupported
from flowserve.observe.trace import Trace, TracedStep, Wait, by_ensemble
from flowserve.observe.trace_file import Writer

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
    """Ids of traces and spans: those already passed to models, else new ones. For one thread."""

    def __init__(self, new: RandomIdGenerator) -> None:
        self._new = new
        self.trace_id = 0  # id of the next trace, 0 for a new one
        self.span_id = 0  # id of the next span, 0 for a new one

    def generate_trace_id(self) -> int:
        found, self.trace_id = self.trace_id, 0
        return found or self._new.generate_trace_id()

    def generate_span_id(self) -> int:
        found, self.span_id = self.span_id, 0
        return found or self._new.generate_span_id()

    def is_trace_id_random(self) -> bool:
        """The ids passed to models are as random as the generator's."""
        return True


class Spans:
    """The destination of traces in mode opentelemetry. `settings` are that mode's; `exporter` replaces the network."""

    def __init__(self, settings: Mapping[str, Sequence[str]], exporter: SpanExporter | None = None) -> None:
        """Raises Unsupported if the packages are missing."""
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
        # No shutdown at exit: an unreachable collector must not delay the process.
        ids: Any = self._ids  # not derived from their base class, which would have to be imported with this module
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
        """Export the trace of a finished request. `offset_ns`: time of day minus the server's clock."""
        self._writer.offer(lambda: self._add(trace, offset_ns))

    def close(self) -> None:
        """Send all remaining spans. Blocks."""
        self._writer.close()
        self._provider.shutdown()

    # ------------------------------------------------------------------ on the writer's thread

    def _add(self, trace: Trace, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        begun = min([ns for _, ns in trace.marks] + [trace.arrived_ns])
        ended = max([ns for _, ns in trace.marks] + [trace.ended_ns])
        context = self._context.extract({"traceparent": trace.parent}) if trace.parent else None
        self._ids.trace_id, self._ids.span_id = trace.trace_id, trace.span_id
        root = self._span("InferRequest", context, begun, {}, kind=self._api.SpanKind.SERVER)
        self._ids.trace_id = 0  # unused if the caller's context has a trace id
        for name, ns in trace.marks:
            root.add_event(name, timestamp=ns + offset_ns)
        self._request(trace, root)
        self._end(root, ended, trace.error)

    def _request(self, trace: Trace, parent: Span) -> None:
        """The span of a called deployment, with everything that ran for it."""
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

    def _steps(self, trace: Trace, steps: Sequence[TracedStep], depth: int, parent: Span) -> None:
        """The steps of one ensemble; those of a nested ensemble are in a span of their own."""
        for name, (step, *others) in by_ensemble(steps, depth):
            if name:
                inside, model = [step, *others], step.node.path[depth]
                facts: dict[str, Any] = {"triton.model_name": model, "flowserve.step": name}
                span = self._span(model, self._within(parent), min(one.ready_ns for one in inside), facts)
                self._steps(trace, inside, depth + 1, span)
                self._end(span, max(one.ended_ns for one in inside))
            else:
                facts = {"triton.model_name": step.node.model.name, "flowserve.step": step.node.name}
                facts["triton.model_version"] = step.node.model.version
                span = self._span(step.node.model.name, self._within(parent), step.ready_ns, facts)
                self._computed(trace, step, span)
                self._end(span, step.ended_ns, step.error)

    def _computed(self, trace: Trace, step: TracedStep, parent: Span) -> None:
        """The wait of a step, and its execution."""
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
        for name, ns in ran.stamps():
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
