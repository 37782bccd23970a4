"""Triton's JSON trace file: its contents, and when and where they are written.

Decides the timestamps and their meaning, how a request's steps become traces with the ensemble's as parent, and the
additional data under the key `flowserve`, which readers written for Triton ignore. Numbers of traces increase from
parents to children, on which such readers rely.

Also decides: traces are encoded and written on a separate thread, so that neither the event loop nor a request waits
for a disk; the thread starts with the first job; a failed job is logged and the next one runs; optional jobs are
dropped if too many wait; a failure to write is logged once, and the traces are dropped, as are those beyond the budget
of their settings. The `Writer` does not know the jobs; `otel` uses it too. With `log_frequency` N, every N traces go
into a file with a number suffix (`trace.json.0`, `trace.json.1`), as do those of an exhausted `trace_count`; all others
go into the file itself, which is complete JSON after each trace. Existing contents are replaced. Caller:
`runtime/tracing`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import orjson

from flowserve.errors import Invalid
from flowserve.observe.trace import TensorSeen, Trace, TracedStep, Wait, by_ensemble
from flowserve.observe.trace_settings import USED_UP, TraceSampler
from flowserve.values import Array

KEPT_BYTES_MAX: Final = 64 << 20  # text kept for a numbered file; beyond that it goes into the file without a number

_TOGETHER: Final = 256  # maximum number of traces per write
WAITING_MAX: Final = 10_000
FILE_BYTES: Final = 4096  # what a file takes on a disk besides its contents

log = logging.getLogger("flowserve.observe")


class Writer:
    """`name` is the thread's; `failed` is called with an OSError of a job, to report it."""

    def __init__(self, name: str, failed: Callable[[OSError], None]) -> None:
        self._name = name
        self._failed = failed
        self._is_losing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_begun(self) -> bool:
        return self._thread is not None

    @property
    def is_idle(self) -> bool:
        """Whether no job waits; a running job uses it to decide whether to write now."""
        return self._work.empty()

    def do(self, what: Callable[[], None]) -> None:
        """Add a job. Returns at once."""
        if self._thread is None:
            # Daemon: a hanging disk or network must not keep the process alive beyond its exit timeout.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(what)

    def offer(self, what: Callable[[], None]) -> None:
        """Add a job unless too many wait. Returns at once."""
        waiting = self._work.qsize()
        if waiting >= WAITING_MAX:
            if not self._is_losing:
                self._is_losing = True
                log.warning("%s: %d wait to be written; some traces are lost", self._name, waiting)
            return
        if self._is_losing and waiting < WAITING_MAX // 2:
            self._is_losing = False
        self.do(what)

    def close(self) -> None:
        """Run the remaining jobs and end the thread. Blocks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()

    def _serve(self) -> None:
        while (what := self._work.get()) is not None:
            try:
                what()
            except OSError as error:
                self._failed(error)
            except Exception:
                log.exception("a trace was lost")


@dataclass(slots=True)
class _Kept:
    """Texts kept for a numbered file."""

    texts: list[bytes] = field(default_factory=list)
    nbytes: int = 0


class TraceFile:
    """The files of one path. All methods except `close` return at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = count(1)
        self._indices = count()
        self._kept: dict[TraceSampler, _Kept] = {}
        self._end: int | None = None  # the offset of the file's last bracket, once it exists
        self._due: list[bytes] = []  # texts for the file itself, written together
        self._complaint = ""
        self._writer = Writer("flowserve trace file", self._complain)

    def check(self) -> None:
        """Raises `Invalid` if the file cannot be written."""
        folder = self._path.parent
        if self._path.is_dir():
            raise Invalid(f"trace file '{self._path}' cannot be written: it is a folder")
        if not folder.is_dir():
            raise Invalid(f"trace file '{self._path}' cannot be written: there is no folder '{folder}'")
        if not os.access(self._path if self._path.exists() else folder, os.W_OK):
            raise Invalid(f"trace file '{self._path}' cannot be written: permission denied")

    def put(self, setting: TraceSampler, trace: Trace) -> None:
        """Write the trace of a finished request that this setting selected."""
        self._writer.offer(lambda: self._add(setting, trace))

    def retire(self, setting: TraceSampler) -> None:
        """The setting was replaced: write the traces kept for it."""
        if self._writer.is_begun:
            self._writer.do(lambda: self._flush(setting))

    def close(self) -> None:
        """Write all remaining traces. Blocks."""
        if self._writer.is_begun:
            self._writer.do(self._flush_all)
            self._writer.close()

    # ------------------------------------------------------------------ on the writer's thread

    def _complain(self, error: OSError) -> None:
        text = f"trace file '{self._path}' cannot be written: {error.strerror}"
        if text != self._complaint:
            self._complaint = text
            log.error("%s; traces are lost until it can be", text)

    def _add(self, setting: TraceSampler, trace: Trace) -> None:
        text = b",".join(orjson.dumps(one) for one in as_objects(trace, self._numbers))
        choice = setting.choice
        setting.written += 1
        if not self._charge(setting, len(text)):
            self._flush(setting)
            return
        if not choice.log_frequency and choice.trace_count < 0:
            self._due.append(text)
            if self._writer.is_idle or len(self._due) >= _TOGETHER:
                due, self._due = self._due, []
                self._append(due)
            return
        kept = self._kept.setdefault(setting, _Kept())
        kept.texts.append(text)
        kept.nbytes += len(text)
        is_complete = setting.left == 0 and setting.written >= setting.begun
        if is_complete or (choice.log_frequency and len(kept.texts) >= choice.log_frequency):
            del self._kept[setting]
            self._save(setting, kept.texts)
        elif kept.nbytes > KEPT_BYTES_MAX:
            del self._kept[setting]
            self._append(kept.texts)

    def _charge(self, setting: TraceSampler, nbytes: int) -> bool:
        """Take `nbytes` from the setting's budget. Returns whether they were in it."""
        budget = setting.budget
        if budget is None:
            return True
        if budget.left <= 0:
            return False
        budget.left -= nbytes
        if budget.left < 0:
            log.warning("trace file '%s': %s", self._path, USED_UP)
        return budget.left >= 0

    def _flush_all(self) -> None:
        due, self._due = self._due, []
        if due:
            self._append(due)
        for setting in [*self._kept]:
            self._flush(setting)

    def _flush(self, setting: TraceSampler) -> None:
        kept = self._kept.pop(setting, None)
        if kept is not None:
            if setting.choice.log_frequency:
                self._save(setting, kept.texts)
            else:
                self._append(kept.texts)

    def _save(self, setting: TraceSampler, texts: list[bytes]) -> None:
        self._charge(setting, FILE_BYTES)
        path = self._path.with_name(f"{self._path.name}.{next(self._indices)}")
        try:
            path.write_bytes(b"[%b]" % b",".join(texts))
        except OSError:
            path.unlink(missing_ok=True)  # a part of it, on a full disk
            raise

    def _append(self, texts: list[bytes]) -> None:
        is_new = self._end is None or not self._path.exists()
        with self._path.open("wb" if is_new else "rb+") as file:
            if not is_new:
                assert self._end is not None
                file.truncate(self._end)  # remove a partial write, for example of a full disk
                file.seek(self._end)
            file.write(b"[" if is_new else b",")
            file.write(b",".join(texts))
            end = file.tell()
            file.write(b"]")
        self._end = end


_Json = dict[str, Any]
_NO_VERSION: Final = -1  # for a nested ensemble, whose version is not in the graph


def as_objects(trace: Trace, numbers: Iterator[int], parent: int = 0) -> Iterator[_Json]:
    """The objects of one request and all its steps and calls. `numbers` provides the trace numbers."""
    number = next(numbers)
    is_ensemble = trace.graph.is_ensemble
    step = trace.steps[-1] if trace.steps and not is_ensemble else None
    extension = _extension(trace) | (_of_step(step) if step is not None else {})
    yield _trace_head(number, trace.graph.name, trace.graph.version, trace.request_id, parent, extension)
    begun = [("REQUEST_START", trace.arrived_ns), ("QUEUE_START", trace.arrived_ns)]
    yield from _stamps(number, begun if is_ensemble else begun[:1])
    yield from _tensors(number, trace.tensors)
    if is_ensemble:
        yield from _steps(trace, trace.steps, 0, number, numbers)
    elif step is not None:
        yield from _computed(number, step)
    ended = [("INFER_RESPONSE_COMPLETE", trace.ended_ns), ("REQUEST_END", trace.ended_ns)]
    yield from _stamps(number, [*ended, *trace.marks])
    if not is_ensemble:
        for call in trace.calls():
            yield from as_objects(call, numbers, number)


def _steps(
    trace: Trace, steps: Sequence[TracedStep], depth: int, parent: int, numbers: Iterator[int]
) -> Iterator[_Json]:
    """The steps of one ensemble. The steps of a nested ensemble are children of a trace for that ensemble."""
    for name, (step, *others) in by_ensemble(steps, depth):
        if not name:
            yield from _step(trace, step, parent, numbers)
            continue
        inside, number = [step, *others], next(numbers)
        yield _trace_head(number, step.node.path[depth], _NO_VERSION, trace.request_id, parent, {"step": name})
        begun = min(one.ready_ns for one in inside)
        yield from _stamps(number, [("REQUEST_START", begun), ("QUEUE_START", begun)])
        yield from _steps(trace, inside, depth + 1, number, numbers)
        yield from _stamps(number, [("REQUEST_END", max(one.ended_ns for one in inside))])


def _step(trace: Trace, step: TracedStep, parent: int, numbers: Iterator[int]) -> Iterator[_Json]:
    number = next(numbers)
    key = step.node.model
    yield _trace_head(number, key.name, key.version, trace.request_id, parent, _of_step(step))
    yield from _stamps(number, [("REQUEST_START", step.ready_ns)])
    yield from _computed(number, step)
    yield from _stamps(number, [("REQUEST_END", step.ended_ns)])
    if step is next(one for one in trace.steps if one.execution is step.execution):
        for call in step.execution.calls:
            yield from as_objects(call, numbers, number)


def _computed(number: int, step: TracedStep) -> Iterator[_Json]:
    yield from _stamps(number, [("QUEUE_START", step.queued_ns), *step.execution.stamps()])
    yield from _tensors(number, step.tensors)


def _trace_head(number: int, model: str, version: int, request_id: str, parent: int, extension: _Json) -> _Json:
    head: _Json = {"id": number, "model_name": model, "model_version": version}
    if request_id:
        head["request_id"] = request_id
    if parent:
        head["parent_id"] = parent
    return {**head, "flowserve": extension} if extension else head


def _stamps(number: int, stamps: Sequence[tuple[str, int]]) -> Iterator[_Json]:
    yield {"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps]}


def _extension(trace: Trace) -> _Json:
    extension: _Json = {"waits": _waits(trace.waits)} if trace.waits else {}
    if trace.error:
        extension["error"] = trace.error
    if trace.skipped:
        extension["skipped"] = [node.name for node in trace.skipped]
    if trace.omitted:
        extension["omitted"] = trace.omitted
    return {**extension, "cached": True} if trace.is_cached else extension


def _of_step(step: TracedStep) -> _Json:
    ran = step.execution
    extension: _Json = {
        "step": step.node.name,
        "waits": _waits(step.waits),
        "batch": {"id": ran.number, "rows": ran.rows, "requests": ran.requests, "instance": ran.instance},
        "rows": step.rows,
    }
    if step.answers:
        extension["answers"] = step.answers
    if step.pauses:
        extension["pauses"] = _waits(step.pauses)
    return {**extension, "error": step.error} if step.error else extension


def _waits(waits: Sequence[Wait]) -> list[_Json]:
    return [{"reason": wait.reason, "from_ns": wait.from_ns, "ns": wait.ns} for wait in waits]


def _tensors(number: int, tensors: Sequence[TensorSeen]) -> Iterator[_Json]:
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
    return ",".join(map(str, flat))  # numpy's format: the shortest exact text
