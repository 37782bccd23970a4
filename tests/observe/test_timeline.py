"""The timeline: nested slices, batches, reused lanes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.observe.timeline import timeline
from flowserve.observe.trace import BUSY, HANDOVER, TURN, Execution, Trace, TracedStep, Wait

A, B = (Node(i, name, ModelKey(name, 1), (), (), 8) for i, name in enumerate("ab"))
GRAPH = Graph("pipe", 1, (), (), 8, (A, B), (), is_ensemble=True)


def ran(number: int, model: Node, at: int, members: list[int], instance: str = "a_0") -> Execution:
    execution = Execution(number, model.model, instance, len(members), len(members), at, members)
    execution.ran(at + 1, at + 2, at + 8, at + 9)
    return execution


def step(node: Node, ready: int, execution: Execution) -> TracedStep:
    waits = [Wait(BUSY, ready, execution.taken_ns), Wait(HANDOVER, execution.taken_ns, execution.started_ns)]
    return TracedStep(node, 1, ready, ready, execution, [one for one in waits if one.ns], execution.ended_ns)


def request(number: int, arrived: int, ended: int, *steps: TracedStep) -> Trace:
    trace = Trace(number, GRAPH, "", 1, arrived, ended_ns=ended, steps=[*steps])
    if steps and steps[0].ready_ns > arrived:
        trace.waits.append(Wait(TURN, arrived, steps[0].ready_ns))
    return trace


def drawn(traces: Sequence[Trace]) -> list[Any]:
    return list(json.loads(timeline(traces, 0))["traceEvents"])


def check_nesting(events: list[Any]) -> None:
    """On each lane, two slices are nested or disjoint."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begun = round(event["ts"] * 1000)
            lanes.setdefault((event["pid"], event["tid"]), []).append((begun, begun + round(event["dur"] * 1000)))
    for slices in lanes.values():
        for i, (begun, ended) in enumerate(slices):
            for other_begun, other_ended in slices[i + 1 :]:
                apart = ended <= other_begun or other_ended <= begun
                inside = (begun <= other_begun and other_ended <= ended) or (
                    other_begun <= begun and ended <= other_ended
                )
                assert apart or inside


def test_requests_merge_into_a_batch_and_separate_again() -> None:
    together = ran(1, A, 20, [1, 2])
    alone = ran(2, B, 40, [1], "b_0")
    first = request(1, 0, 60, step(A, 5, together), step(B, 29, alone))
    second = request(2, 10, 30, step(A, 15, together))
    events = drawn([second, first])
    check_nesting(events)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    slices = [one for one in events if one["ph"] == "X"]
    batches = [one for one in slices if one["name"].startswith("batch") and one["pid"] != 1]
    assert [(names[one["pid"], one["tid"]], one["name"], one["args"]["rows"]) for one in batches] == [
        ("a_0", "batch 1", 2),
        ("b_0", "batch 2", 1),
    ]
    arrows = [one for one in events if one["ph"] in "stf"]
    into = [one for one in arrows if one["ph"] == "t" and one["pid"] == batches[0]["pid"]]
    assert len({one["id"] for one in into}) == 2
    requests = [one for one in slices if one["name"] == "pipe"]
    assert {one["tid"] for one in requests} == {1, 2}
    for arrow in arrows:
        assert any(
            (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"])
            and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
            for one in slices
        )


def test_parallel_steps_have_separate_lanes_and_lanes_are_reused() -> None:
    traces = [
        request(n, 100 * n, 100 * n + 50, step(A, 100 * n, ran(2 * n, A, 100 * n + 5, [n])),
                step(B, 100 * n, ran(2 * n + 1, B, 100 * n + 5, [n], "b_0")))
        for n in range(1, 4)
    ]  # fmt: skip
    events = drawn(traces)
    check_nesting(events)
    assert len([one for one in events if one["name"] == "thread_name" and one["pid"] == 1]) == 2


def test_a_bls_call_is_a_request_connected_to_its_callers_batch() -> None:
    calling = ran(1, A, 20, [1])
    calling.calls.append(request(2, 24, 26))
    events = drawn([request(1, 0, 60, step(A, 5, calling))])
    check_nesting(events)
    assert [one["ph"] for one in events if one["ph"] in "stf"] == ["s", "t", "f", "s", "f"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 30)), max_size=8))
def test_property_slices_are_nested(facts: list[tuple[int, int, int]]) -> None:
    traces = []
    for n, (arrived, wait, other) in enumerate(facts):
        one = ran(2 * n, A, arrived + wait, [n], f"a_{n}")
        two = ran(2 * n + 1, B, arrived + other, [n], f"b_{n}")
        traces.append(
            request(n, arrived, max(one.ended_ns, two.ended_ns), step(A, arrived, one), step(B, arrived, two))
        )
    events = drawn(traces)
    check_nesting(events)
    assert len([one for one in events if one["ph"] == "X" and one["name"] == "pipe"]) == len(facts)
