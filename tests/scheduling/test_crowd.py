"""What of a crowd is left to the next batch: half, and nobody for long."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.scheduling.crowd import Crowd
from flowserve.testing.recorder import Recorder, simple_model
from flowserve.testing.sim_world import SimModel
from flowserve.testing.strategies import chain_graph, plain_graph


class Server:
    """Whose crowd it is."""

    def __init__(self, in_flight: int = 0, *, is_quick: bool = True, least: int = 8) -> None:
        self.in_flight = in_flight
        self.is_quick = is_quick
        self._crowd = Crowd(lambda: self.in_flight, lambda: self.is_quick, least)

    def share(self, count: int) -> int:
        return self._crowd.share(count)


def test_two_halves_are_under_way() -> None:
    server = Server(32)
    assert server.share(32) == 16
    assert server.share(16) == 16
    server.in_flight = 33
    assert server.share(33) == 17


def test_who_was_just_answered_is_about_to_ask_again() -> None:
    server = Server(32)
    server.share(32)
    server.in_flight = 18  # the first half but two is answered, the second comes to its next step
    assert server.share(18) == 16


def test_a_crowd_that_left_is_forgotten() -> None:
    server = Server(200)
    assert server.share(200) == 100
    server.in_flight = 20
    shares = [server.share(20) for _ in range(400)]
    assert shares[0] == 20
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 10


def test_batches_of_a_slow_model_take_everybody() -> None:
    server = Server(32, is_quick=False)
    assert server.share(32) == 32
    server.is_quick = True
    assert server.share(32) == 16


def test_a_small_batch_is_not_made_smaller() -> None:
    server = Server(12)
    assert server.share(8) == 8
    assert server.share(12) == 8


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=100), st.integers(1, 20))
def test_laws_no_more_than_there_are_and_never_fewer_than_half(asked: list[tuple[int, int, bool]], least: int) -> None:
    server = Server(least=least)
    most = 0
    for count, elsewhere, is_quick in asked:
        server.in_flight, server.is_quick = count + elsewhere, is_quick
        most = max(most, server.in_flight)
        share = server.share(count)
        half, half_of_most = -(-server.in_flight // 2), -(-most // 2)
        assert min(count, max(least, half)) <= share <= count
        assert not is_quick or share <= max(least, half_of_most)


# ------------------------------------------------------------------------------------------------------ in a queue


def crowded(server: Recorder, *numbers: int, least: int = 2) -> list[SimModel]:
    """Models whose batches take a share of all that the server has."""
    models = [simple_model(number) for number in numbers]
    for model in models:
        batcher = DynamicBatcher(BatchPolicy.simple(model.max_batch_size))
        batcher.crowd = Crowd(lambda: server.dispatcher.in_flight, lambda: True, least)
        server.serve(model, batcher)
    return models


def test_halves_of_a_crowd_follow_each_other_through_an_ensemble(server: Recorder) -> None:
    pair = chain_graph("pair", crowded(server, 0, 1))
    for request in range(8):
        server.submit(pair, request)
    assert server.turn() == [("a", [0, 1, 2, 3])]
    server.done(server.running[0])
    assert server.turn() == [("a", [4, 5, 6, 7]), ("b", [0, 1, 2, 3])]
    server.done(server.running[1])  # b's: they are answered, and ask again
    for request in range(10, 14):
        server.submit(pair, request)
    assert server.turn() == []
    server.done(server.running[0])
    assert server.turn() == [("a", [10, 11, 12, 13]), ("b", [4, 5, 6, 7])]


def test_several_instances_take_the_halves_at_once(server: Recorder) -> None:
    model = simple_model(0)
    batcher = DynamicBatcher(BatchPolicy.simple(16))
    batcher.crowd = Crowd(lambda: server.dispatcher.in_flight, lambda: True, 2)
    server.serve(model, batcher, instances=2)
    pair = chain_graph("pair", [model, *crowded(server, 1)])
    for request in range(6):
        server.submit(pair, request)
    assert server.turn() == [("a", [0, 1, 2]), ("a", [3, 4, 5])]


def test_steps_beside_each_other_on_one_model_stay_together(server: Recorder) -> None:
    (model,) = crowded(server, 0)
    node = Node(0, "a", model.key, model.inputs, model.outputs, model.max_batch_size)
    edges = [Edge("X", GRAPH, 0, i, 0) for i in range(2)] + [Edge(f"Y{i}", i, 0, GRAPH, i) for i in range(2)]
    ports = tuple(replace(model.outputs[0], name=f"Y{i}") for i in range(2))
    twice = Graph("twice", 1, model.inputs, ports, model.max_batch_size, (node, replace(node, index=1)), tuple(edges))
    for request in range(4):
        server.submit(twice, request)
    assert server.turn() == [("a", [0, 0, 1, 1, 2, 2, 3, 3])]


def test_a_model_by_itself_takes_everybody(server: Recorder) -> None:
    graph = plain_graph(*crowded(server, 0))
    for request in range(8):
        server.submit(graph, request)
    assert server.turn() == [("a", [*range(8)])]
