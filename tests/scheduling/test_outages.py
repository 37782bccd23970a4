"""Instances die, leave their queue and return: no batch runs on a dead instance, and no request is lost or stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import InstanceDied, Unavailable
from flowserve.scheduling.batch import Batch, TicketRefused
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import chain_graph, plain_graph

A, B = simple_model(0), simple_model(1)


def died(server: Recorder, batch: Batch) -> None:
    """The instance that runs a batch dies."""
    server.running.remove(batch)
    assert not server.scheduler.complete(batch, [], InstanceDied("died"), 0)
    batch.queue.take_away(batch.instance)


def test_the_running_batch_fails_and_waiting_ones_wait_for_the_instance() -> None:
    server = Recorder()
    queue = server.serve(A)
    for request in (1, 2):
        server.submit(plain_graph(A), request)
        server.turn()
    died(server, server.running[0])
    assert server.turn() == []
    assert server.answered() == [(1, "died")]
    assert not queue.is_served
    queue.give_back(0)
    assert server.turn() == [("a", [2])]


def test_a_batch_whose_instance_died_is_not_retried() -> None:
    server = Recorder()
    server.serve(A, is_pure=True)
    for request in (1, 2):
        server.submit(plain_graph(A), request)
    server.turn()
    died(server, server.running[0])
    assert server.turn() == []
    assert server.answered() == [(1, "died"), (2, "died")]


def test_batches_go_to_the_remaining_instances() -> None:
    server = Recorder()
    queue = server.serve(A, instances=2)
    queue.take_away(0)
    assert queue.is_served
    server.submit(plain_graph(A), 1)
    server.turn()
    assert [batch.instance for batch in server.running] == [1]


def test_a_closed_queue_refuses_waiting_and_new_requests() -> None:
    server = Recorder()
    queue = server.serve(A)
    server.serve(B)
    server.submit(plain_graph(A), 1)
    server.turn()
    server.submit(plain_graph(A), 2)
    server.turn()
    died(server, server.running[0])
    server.scheduler.close(queue, "down")
    server.submit(plain_graph(A), 3)
    server.submit(chain_graph("chain", [B, A]), 4)  # its first step runs, its second has no instance
    server.turn()
    server.done(server.running[0])
    server.turn()
    assert server.answered() == [(1, "died"), (2, "down"), (3, "down"), (4, "down")]
    refused = [(one.ticket.frame.request, str(one.error)) for one in server.notices if isinstance(one, TicketRefused)]
    assert refused == [(2, "down"), (3, "down"), (4, "down")]
    assert all(isinstance(frame.record.error, Unavailable) for frame in server.answers[1:])
    assert server.waiting()[A.key] == 0
    server.scheduler.close(queue, "still down")
    server.submit(plain_graph(A), 5)
    server.turn()
    assert server.answered()[-1] == (5, "still down")
    queue.give_back(0)
    server.submit(plain_graph(A), 6)
    assert server.turn() == [("a", [6])]


def test_halves_of_a_failed_batch_are_refused_with_the_others() -> None:
    server = Recorder()
    queue = server.serve(A, is_pure=True)
    for request in (1, 2):
        server.submit(plain_graph(A), request)
    server.turn()
    assert server.raised(server.running[0])
    server.turn()
    died(server, server.running[0])
    server.scheduler.close(queue, "down")
    server.turn()
    assert server.answered() == [(1, "died"), (2, "down")]


EVENTS = st.lists(st.tuples(st.sampled_from(["arrive", "done", "die", "back", "close", "turn"]), st.integers(0, 7)))


@pytest.mark.parametrize("limited", [False, True])
@given(EVENTS)
def test_property_every_request_is_answered_once_under_any_order_of_deaths_and_restarts(
    limited: bool, events: list[tuple[str, int]]
) -> None:
    server = Recorder(limiter=Limiter() if limited else None)
    queues = [server.serve(model, instances=2, needs=[Needs({("R", 0): 1})] * 2) for model in (A, B)]
    graphs = [plain_graph(A), plain_graph(B), chain_graph("chain", [A, B])]
    asked = 0
    for what, which in events:
        queue = queues[which % 2]
        idle = [*queue.free]
        if what == "arrive":
            asked += 1
            server.submit(graphs[which % 3], asked)
        elif what == "turn":
            server.turn()
        elif what == "done" and server.running:
            server.done(server.running[which % len(server.running)])
        elif what == "die" and which < 4 and server.running:
            died(server, server.running[which % len(server.running)])
        elif what == "die" and idle:
            queue.take_away(idle[which % len(idle)])
        elif what == "back" and queue.away:
            queue.give_back(queue.away[0])
        elif what == "close" and not queue.is_served:
            server.scheduler.close(queue, "down")
    end(server, queues)
    assert sorted(frame.request for frame in server.answers) == list(range(1, asked + 1))
    assert server.scheduler.in_flight == 0


def end(server: Recorder, queues: list[ModelQueue]) -> None:
    """Every instance returns, and every batch completes."""
    for queue in queues:
        while queue.away:
            queue.give_back(queue.away[0])
    server.turn()
    while server.running:
        server.done(server.running[0])
        server.turn()
