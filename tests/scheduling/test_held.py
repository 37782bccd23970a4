"""Requests that wait before their first step, and requests with a deadline for all of their steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import DeadlineExceeded, Unavailable
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.frames.frame import Frame
from tests.support.recorder import PORT, Recorder, simple_model
from tests.support.strategies import plain_graph

MS = 1_000_000
CHAIN = [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (1, 0, GRAPH, 0)]
FORK = [(GRAPH, 0, 0, 0), (GRAPH, 0, 1, 0), (0, 0, GRAPH, 0), (1, 0, GRAPH, 1)]


def graph(edges: list[tuple[int, int, int, int]], outputs: int = 1, max_batch_size: int = 16) -> Graph:
    """An ensemble of the models "a" and "b"; an edge is (producer, output, consumer, input)."""
    models = [simple_model(number, max_batch_size) for number in (0, 1)]
    nodes = tuple(Node(i, f"{m.key.name}#{i}", m.key, PORT, PORT, max_batch_size) for i, m in enumerate(models))
    made = tuple(Edge(f"t{p}{o}{c}{i}", p, o, c, i) for p, o, c, i in edges)
    specs = tuple(replace(PORT[0], name=f"Y{j}") for j in range(outputs))
    return Graph("graph", 1, PORT, specs, max_batch_size, nodes, made, is_ensemble=True)


def held(server: Recorder) -> Frame:
    return server.submit(plain_graph(simple_model(0)), "late", is_held=True)


def test_a_held_request_does_not_run_until_it_is_released(server: Recorder) -> None:
    server.serve(simple_model(0))
    frame = held(server)
    assert server.turn() == []
    assert server.scheduler.in_flight == 1
    server.scheduler.release(frame)
    assert server.turn() == [("a", ["late"])]


def test_a_held_request_can_be_cancelled_answered_or_failed_at_shutdown(server: Recorder) -> None:
    server.serve(simple_model(0))
    cancelled, answered, left = held(server), held(server), held(server)
    server.scheduler.cancel(cancelled)
    server.scheduler.answer(answered)
    assert server.answers == [answered]
    server.scheduler.fail_all("going away")
    assert isinstance(left.record.error, Unavailable)
    assert server.scheduler.in_flight == 0
    assert server.turn() == []


def test_a_deadline_withdraws_every_step_of_its_request(server: Recorder) -> None:
    """One branch runs, the other waits behind another request: both end at the deadline, and the queue moves on."""
    queues = [server.serve(simple_model(number, max_batch_size=1)) for number in (0, 1)]
    other = server.submit(plain_graph(simple_model(1)), "other")
    server.turn()
    frame = server.submit(graph(FORK, 2, 1), "late")
    server.scheduler.due.add(frame, 5 * MS)
    server.turn()
    assert (len(queues[0].batcher), len(queues[1].batcher)) == (0, 1)
    assert server.scheduler.next_deadline() == 5 * MS
    server.turn(at=5 * MS - 1)
    assert not frame.record.done
    server.turn(at=5 * MS)
    assert isinstance(frame.record.error, DeadlineExceeded)
    assert str(frame.record.error) == (
        "Request timeout expired: its deadline passed after 5 ms, it was in step 'a#0', 'b#1'"
    )
    assert len(queues[1].batcher) == 0
    assert server.scheduler.next_deadline() is None
    for batch in [*server.running]:
        server.done(batch)
    server.turn(at=6 * MS)
    assert server.answers == [frame, other]


def test_a_deadline_error_names_the_step_that_is_not_complete(server: Recorder) -> None:
    for number in (0, 1):
        server.serve(simple_model(number))
    frame = server.submit(graph(CHAIN), "late")
    server.scheduler.due.add(frame, 5 * MS)
    server.turn()
    server.done(server.running[0])
    server.turn()
    server.turn(at=9 * MS)
    assert "it was in step 'b#1'" in str(frame.record.error)
    assert frame.record.error is not None
    assert "step 'b#1'" in frame.record.error.lineage


def test_a_request_completed_in_time_has_no_deadline_any_more(server: Recorder) -> None:
    server.serve(simple_model(0))
    frame = server.submit(plain_graph(simple_model(0)), "quick")
    server.scheduler.due.add(frame, 5 * MS)
    server.turn()
    server.done(server.running[0])
    server.turn()
    assert server.scheduler.next_deadline() is None
    server.turn(at=9 * MS)
    assert frame.record.error is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.booleans()), max_size=40))
def test_property_no_request_outlives_its_deadline_and_each_is_answered_once(
    steps: list[tuple[int, int, bool]],
) -> None:
    server = Recorder()
    for number in (0, 1):
        server.serve(simple_model(number, max_batch_size=2))
    fork = graph(FORK, 2, 2)
    now = 0
    frames: list[Frame] = []
    due: dict[Frame, int] = {}
    waiting: list[Frame] = []
    for number, (kind, ns, is_held) in enumerate(steps):
        now += ns
        if kind < 3:
            frame = server.submit(fork, number, is_held=is_held)
            frames.append(frame)
            if is_held:
                waiting.append(frame)
            if kind:
                due[frame] = now + 10
                server.scheduler.due.add(frame, now + 10)
        elif kind == 3 and server.running:
            server.done(server.running[0], at=now)
        elif kind == 4 and waiting:
            first = waiting.pop(0)
            if not first.record.done:
                server.scheduler.release(first)
        elif kind == 5 and due:
            server.scheduler.cancel(next(iter(due)))
        server.turn(now)
        assert all(frame.record.done for frame, at in due.items() if at <= now)
    for frame in waiting:
        if not frame.record.done:
            server.scheduler.release(frame)
    server.turn(now)
    while server.running:
        server.done(server.running[0], at=now)
        server.turn(now)
    assert all(frame.record.done for frame in frames)
    assert len(set(server.answers)) == len(server.answers)
    assert server.scheduler.in_flight == 0
    assert not any(server.waiting().values())
