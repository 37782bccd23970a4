"""A model that is replaced: two queues under one key for a while, then one. With and without a rate limiter."""

from __future__ import annotations

import pytest

from flowserve.scheduling.rate_limit.limiter import Limiter
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import chain_graph, plain_graph

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


def test_a_queue_can_be_removed_in_the_step_in_which_its_last_batch_completes(server: Recorder) -> None:
    old = server.serve(A)
    server.submit(GRAPH_A, "last")
    server.turn()
    server.done(server.running[0])
    server.scheduler.models.remove(old)
    server.serve(A)
    server.submit(GRAPH_A, "next")
    assert server.turn() == [("a", ["next"])]
    assert server.waiting() == {A.key: 0}


def test_a_queue_can_be_removed_in_the_step_in_which_its_last_request_is_cancelled(server: Recorder) -> None:
    server.serve(A)
    step = server.serve(B)
    frame = server.submit(chain_graph("chain", [A, B]), "leaves")
    server.turn()
    server.done(server.running[0])
    server.scheduler.cancel(frame)
    server.scheduler.models.remove(step)
    assert server.turn() == []


def test_a_removed_queue_sets_no_deadline(server: Recorder) -> None:
    old = server.serve(A)
    server.turn()
    server.scheduler.models.remove(old)
    assert server.scheduler.next_deadline() is None
    assert server.turn(at=10**12) == []
