"""A request's trace as the value of the response header `Server-Timing`.

Decides the format of the header, which docs/tracing.md documents. Each step has the entries `NODE.queue`, `NODE.input`,
`NODE.infer` and `NODE.output`, in this order; steps are in the order in which they left their queues. `total` precedes
them all, then `request.queue` if the request waited before its first step. `dur` is the duration and `start` the begin,
in milliseconds, `start` relative to the request's arrival; `desc` has the reasons of a wait, each with its time, or the
batch of a computation. Characters not allowed in names are percent-encoded ("outer%2Fdetect"). The names of BLS calls
are prefixed with the caller's name and a slash.

Browsers read `dur` and `desc`, and ignore `start`. Callers: `http`.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from flowserve.observe.trace import Trace, TracedStep, Wait, by_reason

BYTES_MAX: Final = 8192  # clients limit the size of headers
_ERROR_CHARS: Final = 200
_TOKEN: Final = "!#$&'*+^`|"  # allowed in names besides letters, digits and _.-~
_PRINTABLE: Final = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")


def server_timing(trace: Trace) -> str:
    """The header's value, at most BYTES_MAX long; the last entry has the number of entries that did not fit."""
    origin_ns = trace.arrived_ns
    total = _entry("total", origin_ns, trace.ended_ns, origin_ns, _outcome(trace))
    entries = [total, *_entries(trace, "", origin_ns)]
    size = 0
    for i, entry in enumerate(entries):
        size += len(entry) + 2
        if size > BYTES_MAX - 64:  # leaves room for the last entry
            return ", ".join([*entries[:i], f'more;desc="{len(entries) - i} entries left out"'])
    return ", ".join(entries)


def _outcome(trace: Trace) -> str:
    if trace.error:
        return f"failed: {trace.error[:_ERROR_CHARS]}"
    return "a remembered answer" if trace.is_cached else ""


def _entries(trace: Trace, prefix: str, origin_ns: int) -> Iterator[str]:
    if trace.waits:
        yield _wait(f"{prefix}request", trace.waits, origin_ns)
    known: set[int] = set()
    for step in trace.steps:
        name = prefix + step.node.name
        yield from _step(step, name, origin_ns)
        if step.execution.number not in known:
            known.add(step.execution.number)
            for call in step.execution.calls:
                yield from _entries(call, f"{name}/", origin_ns)
    for node in trace.skipped:
        why = trace.graph.spaces[node.space - 1].title
        what = "no item in" if why.startswith("each") else "no row passed"
        description = f"{what} {why.removeprefix('when ').removeprefix('each ')}"
        yield f'{quote(prefix + node.name, safe=_TOKEN)}.skipped;desc="{_quoted(description)}"'
    if trace.omitted:
        yield f'{quote(prefix, safe=_TOKEN)}more;desc="{trace.omitted} steps left out"'


def _step(step: TracedStep, name: str, origin_ns: int) -> Iterator[str]:
    if step.waits:
        yield _wait(name, step.waits, origin_ns)
    ran = step.execution
    if not ran.ended_ns:
        yield _entry(f"{name}.infer", ran.taken_ns, step.ended_ns, origin_ns, f"{_batch(step)}, not over yet")
        return
    yield _entry(f"{name}.input", ran.started_ns, ran.gathered_ns, origin_ns)
    yield _entry(f"{name}.infer", ran.gathered_ns, ran.computed_ns, origin_ns, _batch(step))
    yield _entry(f"{name}.output", ran.computed_ns, max(step.ended_ns, ran.computed_ns), origin_ns, _answers(step))


def _answers(step: TracedStep) -> str:
    parts = [f"{step.answers} answer{'s' * (step.answers != 1)}"] if step.answers else []
    return "; ".join([*parts, *_reasons(step.pauses)])


def _batch(step: TracedStep) -> str:
    ran = step.execution
    rows = f"{ran.rows} row{'s' * (ran.rows != 1)}"
    others = ran.requests - 1
    shared = f" with {others} other request{'s' * (others != 1)}" if others else ""
    failed = f", failed: {step.error[:_ERROR_CHARS]}" if step.error else ""
    return f"batch {ran.number} of {rows}{shared} on {ran.instance}{failed}"


def _wait(name: str, waits: list[Wait], origin_ns: int) -> str:
    return _entry(f"{name}.queue", waits[0].from_ns, waits[-1].to_ns, origin_ns, "; ".join(_reasons(waits)))


def _reasons(waits: list[Wait]) -> list[str]:
    return [f"{ns / 1e6:.3f} ms {reason}" for reason, ns in by_reason(waits).items()]


def _entry(name: str, from_ns: int, to_ns: int, origin_ns: int, description: str = "") -> str:
    entry = f"{quote(name, safe=_TOKEN)};dur={(to_ns - from_ns) / 1e6:.3f}"
    if description:
        entry += f';desc="{_quoted(description)}"'
    return f"{entry};start={(from_ns - origin_ns) / 1e6:.3f}"


def _quoted(text: str) -> str:
    """Text for a quoted string without escapes, which not all readers support."""
    return "".join(one if one in _PRINTABLE else "?" for one in text.replace("\\", "/").replace('"', "'"))
