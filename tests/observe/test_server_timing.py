"""The header `Server-Timing`: contents and escaping."""

from __future__ import annotations

import re
from typing import Any

from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.observe.server_timing import BYTES_MAX, server_timing
from flowserve.observe.trace import BUSY, FULL, HANDOVER, TURN, Execution, Trace, TracedStep, Wait

MS = 1_000_000
ENTRY = re.compile(r"""([!#$%&'*+\-.^_`|~0-9A-Za-z]+)((?:;[a-z]+=(?:[0-9.-]+|"[^"\\]*"))*)""")


def parsed(header: str) -> list[tuple[str, dict[str, str]]]:
    """Parse by the grammar: names are tokens, values are numbers or quoted strings."""
    entries = []
    at = 0
    while at < len(header):
        match = ENTRY.match(header, at)
        assert match is not None, header[at : at + 80]
        facts = re.findall(r';([a-z]+)=(?:"([^"]*)"|([0-9.-]+))', match[2])
        entries.append((match[1], {key: quoted or number for key, quoted, number in facts}))
        at = match.end()
        assert header[at : at + 2] in (", ", "")
        at += 2
    return entries


def execution(number: int, at_ms: int, **facts: Any) -> Execution:
    made = Execution(number, ModelKey("detect", 1), "detect_0", 5, 8, at_ms * MS, [1, 2], **facts)
    made.ran((at_ms + 1) * MS, (at_ms + 2) * MS, (at_ms + 10) * MS, (at_ms + 11) * MS)
    return made


def trace_of(*names: str, error: str = "") -> Trace:
    key = ModelKey("detect", 1)
    nodes = tuple(Node(i, name, key, (), (), 8) for i, name in enumerate(names))
    trace = Trace(1, Graph("pipe", 1, (), (), 8, nodes, (), is_ensemble=True), "", 1, 1000 * MS, error=error)
    at = 1000
    for i, node in enumerate(nodes):
        queued = at * MS
        ran = execution(i + 1, at + 4)
        waits = [Wait(BUSY, queued, queued + 3 * MS), Wait(FULL, queued + 3 * MS, queued + 4 * MS)]
        waits.append(Wait(HANDOVER, ran.taken_ns, ran.started_ns))
        trace.steps.append(TracedStep(node, 1, queued, queued, ran, waits, ran.ended_ns, error if i else ""))
        at += 15
    trace.ended_ns = at * MS
    return trace


def test_each_step_has_its_wait_reasons_and_its_batch() -> None:
    trace = trace_of("detect", "outer/detect")
    trace.waits.append(Wait(TURN, 1000 * MS, 1000 * MS + 250_000))
    assert parsed(server_timing(trace)) == [
        ("total", {"dur": "30.000", "start": "0.000"}),
        ("request.queue", {"dur": "0.250", "desc": f"0.250 ms {TURN}", "start": "0.000"}),
        (
            "detect.queue",
            {"dur": "5.000", "desc": f"3.000 ms {BUSY}; 1.000 ms {FULL}; 1.000 ms {HANDOVER}", "start": "0.000"},
        ),
        ("detect.input", {"dur": "1.000", "start": "5.000"}),
        (
            "detect.infer",
            {"dur": "8.000", "desc": "batch 1 of 8 rows with 4 other requests on detect_0", "start": "6.000"},
        ),
        ("detect.output", {"dur": "1.000", "start": "14.000"}),
        (
            "outer%2Fdetect.queue",
            {"dur": "5.000", "desc": f"3.000 ms {BUSY}; 1.000 ms {FULL}; 1.000 ms {HANDOVER}", "start": "15.000"},
        ),
        ("outer%2Fdetect.input", {"dur": "1.000", "start": "20.000"}),
        (
            "outer%2Fdetect.infer",
            {"dur": "8.000", "desc": "batch 2 of 8 rows with 4 other requests on detect_0", "start": "21.000"},
        ),
        ("outer%2Fdetect.output", {"dur": "1.000", "start": "29.000"}),
    ]


def test_no_name_and_no_error_can_break_the_header() -> None:
    trace = trace_of('a "b", c;d=1\r\n', "größer", error='no "such"\r\nthing \\ ünder')
    header = server_timing(trace)
    assert header.isascii()
    assert header.isprintable()
    names = [name for name, _ in parsed(header)]
    assert names[1:5] == [f"a%20%22b%22%2C%20c%3Bd%3D1%0D%0A.{part}" for part in ("queue", "input", "infer", "output")]
    assert parsed(header)[0][1]["desc"].startswith("failed: no 'such'??thing / ?nder")


def test_entries_that_do_not_fit_are_counted() -> None:
    header = server_timing(trace_of(*(f"step{i}" for i in range(300))))
    entries = parsed(header)
    assert len(header) <= BYTES_MAX
    assert entries[-1] == ("more", {"desc": f"{1201 - (len(entries) - 1)} entries left out"})


def test_bls_calls_are_named_after_their_caller_and_listed_once() -> None:
    outer = trace_of("caller", "caller#2")
    outer.steps[1].execution = outer.steps[0].execution
    inner = trace_of("detect")
    inner.waits.append(Wait(TURN, 1001 * MS, 1002 * MS))
    outer.steps[0].execution.calls.append(inner)
    names = [name for name, _ in parsed(server_timing(outer))]
    assert names.count("caller%2Fdetect.infer") == 1
    assert "caller%2Frequest.queue" in names


def test_an_unfinished_batch_is_marked() -> None:
    trace = trace_of("detect")
    trace.steps[0].execution.ended_ns = 0
    entries = dict(parsed(server_timing(trace)))
    assert entries["detect.infer"]["desc"].endswith("not over yet")
