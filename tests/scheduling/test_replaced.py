"""A model that is replaced: two queues under one key for a while, then one. With and without a rate limiter."""

from __future__ import annotations

import pytest

from flowserve.scheduling.limiter import Limiter
from flowserve.testing.recorder import Recorder, simple_model
from flowserve.testing.strategies import chain_graph, plain_graph

A, B = simple_model(0), simple_model(1)
GRAPH_A = plain_graph(A)


@pytest.fixture(params=["free", "limited"])
def server(request: pytest.FixtureRequest) -> Recorder:
    return Recorder(limiter=Limiter() if request.param == "limited" else None)


def test_a_request_stays_with_the_queue_it_was_routed_to(server: Recorder) -> None:
    old = server.serve(A)
    server.submit(GRAPH_A, "before")
    new = server.serve(A)
    server.submit(GRAPH_A, "after")
    assert server.turn() == [("a", ["before"]), ("a", ["after"])]
    assert [batch.queue for batch in server.running] == [old, new]


def test_what_waits_is_counted_over_both_queues(server: Recorder) -> None:
    server.serve(A, instances=0)
    server.submit(GRAPH_A, "before")
    server.serve(A, instances=0)
    server.submit(GRAPH_A, "after")
    server.turn()
    assert server.dispatcher.waiting() == {A.key: 2}


def test_a_queue_may_go_in_the_turn_in_which_its_last_batch_came_back(server: Recorder) -> None:
    old = server.serve(A)
    server.submit(GRAPH_A, "last")
    server.turn()
    server.done(server.running[0])
    server.dispatcher.remove(old)
    server.serve(A)
    server.submit(GRAPH_A, "next")
    assert server.turn() == [("a", ["next"])]
    assert server.dispatcher.waiting() == {A.key: 0}


def test_a_queue_may_go_in_the_turn_in_which_its_last_ticket_came_and_left(server: Recorder) -> None:
    server.serve(A)
    step = server.serve(B)
    flow = server.submit(chain_graph("chain", [A, B]), "leaves")
    server.turn()
    server.done(server.running[0])
    server.dispatcher.cancel(flow)
    server.dispatcher.remove(step)
    assert server.turn() == []


def test_a_queue_that_is_gone_wakes_nobody(server: Recorder) -> None:
    old = server.serve(A)
    server.turn()
    server.dispatcher.remove(old)
    assert server.dispatcher.next_deadline() is None
    assert server.turn(at=10**12) == []
