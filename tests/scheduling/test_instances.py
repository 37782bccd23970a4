"""Several instances of one model: which one takes the next batch."""

from __future__ import annotations

from collections import Counter

from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.testing.strategies import plain_graph
from tests.support.recorder import Recorder, simple_model

MODEL = simple_model(0)


def test_with_three_instances_the_fourth_request_waits_for_the_first(server: Recorder) -> None:
    server.serve(MODEL, Queue(BatchPolicy.single()), instances=3)
    for request in (1, 2, 3, 4):
        server.submit(plain_graph(MODEL), request)
    assert server.turn() == [("a", [1]), ("a", [2]), ("a", [3])]
    second = server.running[1]
    server.done(second)
    assert server.turn() == [("a", [4])]
    assert server.running[-1].instance == second.instance


def test_the_instance_that_was_idle_longest_takes_the_next_batch(server: Recorder) -> None:
    server.serve(MODEL, Queue(BatchPolicy.single()), instances=3)
    took: Counter[int] = Counter()
    for request in range(30):
        server.submit(plain_graph(MODEL), request)
        server.turn()
        (batch,) = server.running
        took[batch.instance] += 1
        server.done(batch)
    assert took == {0: 10, 1: 10, 2: 10}
