"""One request that is traced, as the front end that took it sees it.

Decided here: what a front end does for a trace. It asks for a `Watch`, makes the request's flow through it, marks how
far it is itself, and closes it whatever comes of the request. What is noticed meanwhile is decided in tracing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowserve.observe.trace import Trace
from flowserve.scheduling.router import Flow

if TYPE_CHECKING:
    from flowserve.runtime.tracing import Tracing

MakeFlow = Callable[..., Flow]
Told = Callable[[Trace], None]


class Watch:
    """Made by `Tracing.watch`. `told` hear of the trace when it is closed."""

    __slots__ = ("_flow", "_has_tensors", "_marks", "_parent", "_told", "_trace_id", "_tracing", "trace")

    def __init__(
        self, tracing: Tracing, told: Sequence[Told], parent: str, *, has_tensors: bool, trace_id: int
    ) -> None:
        self._tracing = tracing
        self._told = told
        self._parent = parent
        self._has_tensors = has_tensors
        self._trace_id = trace_id
        self._marks: list[tuple[str, int]] = []
        self._flow: Flow | None = None
        self.trace: Trace | None = None  # once it is submitted

    def make(self, make: MakeFlow) -> MakeFlow:
        """How its flow is made, in place of `make`."""

        def traced(*facts: Any) -> Flow:
            flow = self._flow = make(*facts)
            self.trace = self._tracing.begin(flow, self._parent, has_tensors=self._has_tensors, trace_id=self._trace_id)
            return flow

        return traced

    @property
    def is_closed(self) -> bool:
        """Whether nothing more happens to its trace."""
        return not self._told

    def mark(self, name: str) -> None:
        """The front end is so far."""
        self._marks.append((name, self._tracing.clock()))

    def settle(self) -> None:
        """The request is over, or never began: its trace is what it is. Harmless afterwards."""
        if self._flow is not None:
            self._tracing.end(self._flow)
            self._flow = None

    def close(self) -> None:
        """It is over for the front end too. Harmless afterwards."""
        self.settle()
        told, self._told = self._told, ()
        if self.trace is None:
            return
        self.trace.marks += self._marks
        self._marks = []
        for one in told:
            one(self.trace)
