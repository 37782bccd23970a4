"""Which requests are traced because somebody set it so, and where their traces go.

Decided here: a front end asks for each request while `is_on`, and not at all while it is not; who wants to be told
when that changes, is. A request may be traced for several reasons at once, and is traced once. What the settings mean
is decided in observe/trace_settings.py, what a trace notices in tracing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowserve.errors import Unavailable
from flowserve.observe.context import is_sampled, trace_id_for
from flowserve.observe.otel import Spans
from flowserve.observe.trace import Trace
from flowserve.observe.trace_file import TraceFile
from flowserve.observe.trace_settings import OPENTELEMETRY, TRITON, Setting, TraceChoice, TraceSettings
from flowserve.runtime.clock import wall_clock_ns
from flowserve.runtime.tracing import Tracing
from flowserve.runtime.watch import Told, Watch
from flowserve.runtime.window import Window

WINDOWS_MAX: Final = 4  # each may hold many traces


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the operator chose. `opentelemetry` are the settings of that mode, each as often as it was given."""

    choice: TraceChoice = field(default_factory=TraceChoice)
    opentelemetry: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `Invalid` where what is traced could not be written, `Unsupported` where packages are missing."""
        if self.choice.trace_mode == OPENTELEMETRY:
            Spans(self.opentelemetry).close()
        elif self.choice.is_on:
            TraceFile(Path(self.choice.trace_file)).check()


class Traces:
    """One for an engine, touched only on its loop."""

    def __init__(self, options: TraceOptions, tracing: Tracing) -> None:
        self._tracing = tracing
        path = options.choice.trace_file
        is_file = options.choice.trace_mode == TRITON
        self._file = TraceFile(Path(path)) if path and is_file else None
        self._spans = None if is_file else Spans(options.opentelemetry)
        self._settings = TraceSettings(options.choice, retired=self._retired, check=self._check)
        self._windows: list[Window] = []
        self._listeners: list[Callable[[bool], None]] = []
        self.is_on = False
        self._look()

    # ------------------------------------------------------------------ for front ends

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Tell it whether requests are traced, now and whenever that changes."""
        self._listeners.append(listener)
        listener(self.is_on)

    def sample(self, model: str, context: str = "") -> Watch | None:
        """How the next request of a model is traced, None for not at all. `context`: the `traceparent` that came with
        it, "" for none.
        """
        setting = self._settings.of(model)
        told: list[Told] = []
        is_callers = is_sampled(context) if context and self._spans is not None else None
        is_chosen = is_callers is not False and setting.sample(has_context=bool(is_callers))
        if is_chosen:
            told.append(partial(self._put, setting))
            if not setting.is_tracing:  # it was the last one
                self._look()
        windows = [window for window in self._windows if window.is_open]
        told += [window.traces.append for window in windows]
        if not told:
            return None
        has_tensors = is_chosen and setting.choice.has_tensors
        parent = context if is_callers else ""
        trace_id = trace_id_for(parent) if is_chosen and self._spans is not None else 0
        watch = self._tracing.watch(*told, parent=parent, has_tensors=has_tensors, trace_id=trace_id)
        for window in windows:
            window.begun(watch)
        return watch

    # ------------------------------------------------------------------ for whoever sets it so

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Every request that begins in the block is traced. Raises Unavailable where too many look on already."""
        if len(self._windows) >= WINDOWS_MAX:
            raise Unavailable(f"{WINDOWS_MAX} timelines are being recorded already; try again later")
        window = Window()
        self._windows.append(window)
        self._look()
        try:
            yield window
        finally:
            self._windows.remove(window)
            self._look()

    def as_json(self, model: str = "") -> dict[str, Any]:
        """The settings in force, as clients read them."""
        return self._settings.of(model).as_json()

    def change(self, asked: Mapping[str, Any], model: str = "") -> None:
        """Raises as `TraceSettings.change` does."""
        self._settings.change(asked, model)
        self._look()

    def close(self) -> None:
        """Write what is not written yet. Blocks; called when nothing is traced any more."""
        if self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()

    # ------------------------------------------------------------------ where traces go

    def _put(self, setting: Setting, trace: Trace) -> None:
        if self._file is not None:
            self._file.put(setting, trace)
        if self._spans is not None:
            self._spans.put(trace, wall_clock_ns() - self._tracing.clock())

    def _retired(self, setting: Setting) -> None:
        if self._file is not None:
            self._file.retire(setting)

    def _check(self, choice: TraceChoice) -> None:
        if choice.is_on and self._file is not None:
            self._file.check()

    def _look(self) -> None:
        is_on = self._settings.is_tracing or bool(self._windows)
        if is_on != self.is_on:
            self.is_on = is_on
            for listener in self._listeners:
                listener(is_on)
