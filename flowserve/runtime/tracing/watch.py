"""One traced request from the front end's side.

Decides what a front end does for a trace: it requests a `Watch`, makes the request's flow through it, marks the points
that the request reaches in the front end, and closes it in any case. tracing.py records the steps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowserve.observe.trace import Trace
from flowserve.scheduling.flow import Flow

FlowFactory = Callable[..., Flow]
TraceSink = Callable[[Trace], None]


class TracesFlows(Protocol):
    """The part of `Tracing` that this module uses."""

    clock: Callable[[], int]

    def begin(self, flow: Flow, parent: str = "", *, has_tensors: bool = False, trace_id: int = 0) -> Trace: ...
    def end(self, flow: Flow) -> None: ...


class Watch:
    """Created by `Tracing.watch`. `sinks` are called with the trace when it is closed."""

    __slots__ = ("_flow", "_has_tensors", "_marks", "_parent", "_sinks", "_trace_id", "_tracing", "trace")

    def __init__(
        self, tracing: TracesFlows, sinks: Sequence[TraceSink], parent: str, *, has_tensors: bool, trace_id: int
    ) -> None:
        self._tracing = tracing
        self._sinks = sinks
        self._parent = parent
        self._has_tensors = has_tensors
        self._trace_id = trace_id
        self._marks: list[tuple[str, int]] = []
        self._flow: Flow | None = None
        self.trace: Trace | None = None  # None until it is submitted

    def make(self, make: FlowFactory) -> FlowFactory:
        """A function that makes the traced flow in place of `make`."""

        def traced(*facts: Any) -> Flow:
            flow = self._flow = make(*facts)
            self.trace = self._tracing.begin(flow, self._parent, has_tensors=self._has_tensors, trace_id=self._trace_id)
            return flow

        return traced

    @property
    def is_closed(self) -> bool:
        """Whether its trace is complete."""
        return not self._sinks

    def mark(self, name: str) -> None:
        """Record that the request has reached this point of the front end."""
        self._marks.append((name, self._tracing.clock()))

    def settle(self) -> None:
        """Complete the recording: the request is over or was never submitted. No effect if called again."""
        if self._flow is not None:
            self._tracing.end(self._flow)
            self._flow = None

    def close(self) -> None:
        """Pass the trace to the sinks: the front end has finished too. No effect if called again."""
        self.settle()
        sinks, self._sinks = self._sinks, ()
        if self.trace is None:
            return
        self.trace.marks += self._marks
        self._marks = []
        for one in sinks:
            one(self.trace)
