"""What of a crowd is left to the next batch: half, and nobody for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.scheduling.crowd import LEAST, Crowd
from flowserve.testing.recorder import Recorder, simple_model
from flowserve.testing.sim_world import SimModel
from flowserve.testing.strategies import chain_graph, plain_graph


class Server:
    """Whose crowd it is."""

    def __init__(self, in_flight: int = 0, *, is_quick: bool = True, least: int = LEAST) -> None:
        self.in_flight = in_flight
        self.is_quick = is_quick
        self.crowd = Crowd(lambda: self.in_flight, lambda: self.is_quick, least)


def test_two_halves_are_under_way() -> None:
    server = Server(32)
    assert server.crowd.share(32) == 16
    assert server.crowd.share(16) == 16
    server.in_flight = 33
    assert server.crowd.share(33) == 17


def test_who_was_just_answered_is_about_to_ask_again() -> None:
    server = Server(32)
    server.crowd.share(32)
    server.in_flight = 16  # the first half is answered, the second comes to its next step
    assert server.crowd.share(16) == 16


def test_a_crowd_that_left_is_forgotten() -> None:
    server = Server(200)
    assert server.crowd.share(200) == 100
    server.in_flight = 20
    shares = [server.crowd.share(20) for _ in range(400)]
    assert shares[0] == 20
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 10


def test_batches_of_a_slow_model_take_everybody() -> None:
    server = Server(32, is_quick=False)
    assert server.crowd.share(32) == 32
    server.is_quick = True
    assert server.crowd.share(32) == 16


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=100), st.integers(1, 20))
def test_laws_no_more_than_there_are_and_never_fewer_than_half(asked: list[tuple[int, int, bool]], least: int) -> None:
    server = Server(least=least)
    most = 0
    for waiting, elsewhere, is_quick in asked:
        server.in_flight, server.is_quick = waiting + elsewhere, is_quick
        most = max(most, server.in_flight) if is_quick else most
        share = server.crowd.share(waiting)
        assert min(waiting, max(least, -(-server.in_flight // 2))) <= share <= waiting
        assert not is_quick or share <= max(least, -(-most // 2))


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


def test_a_model_by_itself_takes_everybody(server: Recorder) -> None:
    graph = plain_graph(*crowded(server, 0))
    for request in range(8):
        server.submit(graph, request)
    assert server.turn() == [("a", [*range(8)])]
