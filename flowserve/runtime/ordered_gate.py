"""A gate whose remembered answers take part in the order of answers (`preserve_ordering`).

Decided here: an answer that is there at once leaves when those who came before are answered, or wait no more. The
order of what runs is scheduling/ordering.py's; so nobody waits for somebody else's answer here, who would run out of
order where that fails. A call that another model makes stands in no line: what stands before it may be its caller.

Always true between two calls: whoever stands first in line has no answer yet.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from flowserve.errors import FlowserveError
from flowserve.runtime.cache import Kept
from flowserve.runtime.gate import Gate
from flowserve.scheduling.router import Flow


class OrderedGate(Gate):
    """The gate of a model with `preserve_ordering` and a response cache."""

    _may_follow = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._line: deque[Flow] = deque()  # who came in at the door, and may not be answered yet
        self._known: dict[Flow, Kept] = {}  # the answers of those of them that need not run
        self._is_going_on = False

    def enter(self, flow: Flow) -> None:
        self._line.append(flow)
        try:
            super().enter(flow)
        except FlowserveError:
            self._line.remove(flow)
            raise
        finally:
            self._go_on()

    def leave(self, flow: Flow, *, is_answered: bool = True) -> bool:
        is_counted = super().leave(flow, is_answered=is_answered)
        self._known.pop(flow, None)
        self._go_on()
        return is_counted

    def _hit(self, flow: Flow, answer: Kept, began_ns: int) -> None:
        stands_in_line = bool(self._line) and self._line[-1] is flow
        if not stands_in_line or len(self._line) == 1:
            super()._hit(flow, answer, began_ns)
            return
        self._following.add(flow)
        self._known[flow] = answer
        self._dispatcher.hold(flow)
        self._limit_time(flow)

    def _go_on(self) -> None:
        """Answer whoever's turn it is. Each of them comes by here when it leaves, and finds somebody at it."""
        if self._is_going_on:
            return
        self._is_going_on = True
        try:
            while self._line and (self._line[0].done or self._line[0] in self._known):
                flow = self._line.popleft()
                if not flow.done:
                    self._share(flow, self._known.pop(flow))
        finally:
            self._is_going_on = False
