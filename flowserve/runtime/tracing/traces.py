"""Which requests are traced by the settings, by a timeline or for the live page, and where their traces go.

Decides that front ends call `sample` for each request while `is_on` and not otherwise; listeners are notified when
`is_on` changes; how many requests a timeline's window holds, and how long its unfinished requests are waited for after
its end. A request that is selected several times is traced once. observe/trace_settings.py decides what the settings
mean, tracing.py what a trace records, observe/timeline.py draws a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from flowserve.errors import Unavailable
from flowserve.graph.types import ModelKey
from flowserve.observe.otel import Spans
from flowserve.observe.trace import Trace, is_sampled, trace_id_for
from flowserve.observe.trace_file import TraceFile
from flowserve.observe.trace_settings import (
    API_MAX_BYTES,
    OPENTELEMETRY,
    TRITON,
    TraceChoice,
    TraceSampler,
    TraceSettings,
)
from flowserve.runtime.clock import ClockNs, wall_clock_ns
from flowserve.runtime.tracing.recent import RecentRequest, RecentRequests
from flowserve.runtime.tracing.tracing import TraceSink, Tracing, Watch
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.scheduler import Scheduler

WINDOWS_MAX: Final = 4  # each may hold many traces
TRACES_MAX: Final = 10_000  # requests; a full window ends
SETTLE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The operator's options. `opentelemetry`: the settings of that mode, each with all its values. `api_max_bytes` is
    that of `TraceSettings`.
    """

    choice: TraceChoice = field(default_factory=TraceChoice)
    opentelemetry: Mapping[str, Sequence[str]] = field(default_factory=dict)
    api_max_bytes: int = API_MAX_BYTES

    def check(self) -> None:
        """Raises `Invalid` if traces cannot be written, `Unsupported` if packages are missing."""
        if self.choice.trace_mode == OPENTELEMETRY:
            Spans(self.opentelemetry).close()
        elif self.choice.is_on:
            TraceFile(Path(self.choice.trace_file)).check()


class Traces:
    """The traces of one engine; used on its event loop only."""

    def __init__(
        self,
        options: TraceOptions,
        scheduler: Scheduler,
        streams: ResponseStreams,
        observers: list[Any],
        clock: ClockNs,
    ) -> None:
        """`observers`: the engine's."""
        self.tracing = Tracing(scheduler, streams, observers, clock)
        self.recent_requests = RecentRequests(self.tracing.is_traced, clock)
        path = options.choice.trace_file
        is_file = options.choice.trace_mode == TRITON
        self._file = TraceFile(Path(path)) if path and is_file else None
        self._spans = None if is_file else Spans(options.opentelemetry)
        self._settings = TraceSettings(
            options.choice, retired=self._retired, check=self._check, api_max_bytes=options.api_max_bytes
        )
        self._windows: list[Window] = []
        self._listeners: list[Callable[[bool], None]] = []
        self.is_on = False
        self._update_is_on()

    # ------------------------------------------------------------------ for front ends

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Notify `listener` whether requests are traced, now and at each change."""
        self._listeners.append(listener)
        listener(self.is_on)

    def sample(self, model: str, context: str = "") -> Watch | None:
        """The watch of a model's next request, None if it is not traced. `context`: its `traceparent`, "" for
        none.
        """
        setting = self._settings.of(model)
        sinks: list[TraceSink] = []
        is_callers = is_sampled(context) if context and self._spans is not None else None
        is_chosen = is_callers is not False and setting.sample(has_context=bool(is_callers))
        if is_chosen:
            sinks.append(partial(self._put, setting))
        if not setting.is_tracing:  # its count or its budget is used up
            self._update_is_on()
        windows = [window for window in self._windows if window.is_open]
        sinks += [window.traces.append for window in windows]
        if self.recent_requests.is_open:
            if self.recent_requests.wants_trace():
                sinks.append(self.recent_requests.add)
            elif not self.recent_requests.is_open:
                self._update_is_on()
        if not sinks:
            return None
        has_tensors = is_chosen and setting.choice.has_tensors
        parent = context if is_callers else ""
        trace_id = trace_id_for(parent) if is_chosen and self._spans is not None else 0
        watch = self.tracing.watch(*sinks, parent=parent, has_tensors=has_tensors, trace_id=trace_id)
        for window in windows:
            window.begun(watch)
        return watch

    # ------------------------------------------------------------------ settings and timelines

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Trace every request that begins in the block. Raises Unavailable if WINDOWS_MAX windows are open."""
        if len(self._windows) >= WINDOWS_MAX:
            raise Unavailable(f"{WINDOWS_MAX} timelines are being recorded already; try again later")
        window = Window()
        self._windows.append(window)
        self._update_is_on()
        try:
            yield window
        finally:
            self._windows.remove(window)
            self._update_is_on()

    def recent(self, key: ModelKey, after: int) -> list[RecentRequest]:
        """The last requests to a deployment with a number above `after`, and record more for some seconds."""
        found = self.recent_requests.since(key, after)
        self._update_is_on()
        return found

    def as_json(self, model: str = "") -> dict[str, Any]:
        """The settings in force, as clients read them."""
        return self._settings.of(model).as_json()

    def change(self, changes: Mapping[str, Any], model: str = "") -> None:
        """Raises as `TraceSettings.change` does."""
        self._settings.change(changes, model)
        self._update_is_on()

    def close(self) -> None:
        """Write all buffered traces. Blocks; called after the last traced request."""
        if self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()

    # ------------------------------------------------------------------ where traces go

    def _put(self, setting: TraceSampler, trace: Trace) -> None:
        if self._file is not None:
            self._file.put(setting, trace)
        if self._spans is not None:
            self._spans.put(trace, wall_clock_ns() - self.tracing.clock())

    def _retired(self, setting: TraceSampler) -> None:
        if self._file is not None:
            self._file.retire(setting)

    def _check(self, choice: TraceChoice) -> None:
        if choice.is_on and self._file is not None:
            self._file.check()

    def _update_is_on(self) -> None:
        is_on = self._settings.is_tracing or bool(self._windows) or self.recent_requests.is_open
        if is_on != self.is_on:
            self.is_on = is_on
            for listener in self._listeners:
                listener(is_on)


class Window:
    """The traced requests that began in one window."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._watches: list[Watch] = []
        self._full = trio.Event()

    @property
    def is_open(self) -> bool:
        return len(self._watches) < TRACES_MAX

    def begun(self, watch: Watch) -> None:
        """Add a request."""
        self._watches.append(watch)
        if not self.is_open:
            self._full.set()

    async def wait(self, seconds: float, stopping: trio.Event) -> None:
        """Wait until `seconds` have passed, the window is full, or the server is `stopping`."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:

                async def until(event: trio.Event) -> None:
                    await event.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, self._full)
                nursery.start_soon(until, stopping)

    async def settle(self) -> int:
        """Wait until all requests have finished, at most SETTLE_TIMEOUT_S. Returns the number of unfinished ones."""
        with trio.move_on_after(SETTLE_TIMEOUT_S):
            # Polled: this runs once per window, and requests need not notify it.
            while not all(watch.is_closed for watch in self._watches):  # noqa: ASYNC110
                await trio.sleep(0.02)
        return sum(not watch.is_closed for watch in self._watches)
