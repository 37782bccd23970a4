"""A request stays on the device of its tensors, unless waiting there costs more than the copy."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from flowserve.errors import InstanceDied
from flowserve.scheduling.affinity import NO_DEVICE, AffinityBatcher, CopyCost
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from tests.support.recorder import Recorder, simple_model
from tests.support.sim import Sim
from tests.support.strategies import (
    Handle,
    World,
    draw_graph,
    draw_model,
    draw_request,
    handle_residence,
    plain_graph,
)

MODEL = simple_model(0, max_batch_size=4)
GRAPH = plain_graph(MODEL)
COPY_COST = CopyCost(each_ns=100, bytes_per_ns=1)  # one row of two: 102 ns


def serve(server: Recorder, *devices: int, delay_ns: int = 0) -> ModelQueue:
    """Model "a" with an instance on each of these devices."""
    policy = BatchPolicy.simple(4, delay_ns)
    queue = AffinityBatcher(lambda: Queue(policy), 4, devices.__getitem__, handle_residence, COPY_COST)
    return server.serve(MODEL, queue, len(devices))


def ask(server: Recorder, name: str, device: int = NO_DEVICE, rows: int = 1, at: int = 0) -> None:
    frame = server.submit(GRAPH, name, [Handle(0, 2, 0, rows, device=device)])
    frame.record.arrived_ns = at


def placed(server: Recorder) -> dict[str, int]:
    """The running requests, each with its instance."""
    return {ticket.frame.request: batch.instance for batch in server.running for ticket in batch.tickets}


def test_a_request_goes_to_the_device_of_its_tensors_rather_than_to_the_longest_idle_instance() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "on 1", 1)
    server.turn()
    ask(server, "on 0", 0)
    server.turn()
    assert placed(server) == {"on 1": 1, "on 0": 0}


def test_a_request_from_host_memory_goes_to_any_free_instance_in_a_batch_of_its_own() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "on 0", 0)
    ask(server, "one")
    ask(server, "two")
    server.turn()
    assert placed(server) == {"on 0": 0, "one": 1, "two": 1}


def test_a_request_waits_for_its_busy_device_no_longer_than_the_copy_would_take() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "first", 0)
    server.turn(at=0)
    ask(server, "second", 0)
    assert server.turn(at=10) == []
    assert server.scheduler.next_deadline() == 10 + 102
    assert server.turn(at=111) == []
    assert server.turn(at=112) == [("a", ["second"])]
    assert placed(server) == {"first": 0, "second": 1}


def test_a_request_stays_on_its_device_that_becomes_free_in_time() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "first", 0)
    server.turn(at=0)
    ask(server, "second", 0)
    server.turn(at=0)
    server.done(server.running[0], at=101)
    server.turn(at=101)
    assert placed(server) == {"second": 0}


def test_a_batch_moves_when_it_has_waited_for_the_copy_of_all_of_it() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "first", 0)
    server.turn(at=0)
    for name in "abcd":
        ask(server, name, 0)
    server.turn(at=0)
    assert server.scheduler.next_deadline() == 4 * 102
    ask(server, "e", 0)  # too late for the first batch
    server.turn(at=1)
    assert server.scheduler.next_deadline() == 4 * 102
    assert server.turn(at=408) == [("a", ["a", "b", "c", "d"])]


def test_requests_with_and_without_a_device_run_in_order_of_arrival() -> None:
    server = Recorder()
    serve(server, 0)
    ask(server, "running", 0)
    server.turn(at=0)
    for at, (name, device) in enumerate([("host", NO_DEVICE), ("home", 0), ("later", NO_DEVICE)]):
        ask(server, name, device)
        server.turn(at=at)
    for expected in ("host", "home"):
        server.done(server.running[0], at=5)
        ((_, started),) = server.turn(at=5)
        assert started[0] == expected


def test_requests_of_a_device_without_instances_move_to_another_device() -> None:
    server = Recorder()
    queue = serve(server, 0, 1)
    ask(server, "dies", 0)
    server.turn(at=0)
    ask(server, "waits", 0)
    server.turn(at=0)
    (batch,) = server.running
    server.running.remove(batch)
    server.scheduler.complete(batch, [], InstanceDied("gone"), 0)
    queue.take_away(0)
    assert server.turn(at=1) == [("a", ["waits"])]
    ask(server, "new", 0)
    queue.give_back(0)
    server.turn(at=2)
    assert placed(server) == {"waits": 1, "new": 0}


def test_halves_of_a_batch_that_raised_run_apart_and_soon() -> None:
    server = Recorder()
    queue = serve(server, 0, 1)
    queue.is_pure = True
    ask(server, "one", 0)
    ask(server, "two", 0)
    server.turn(at=0)
    assert server.raised(server.running[0])
    server.turn(at=1)
    assert placed(server) == {"one": 0, "two": 1}, "the copy was not worth waiting for"


def test_a_request_cancelled_before_its_retry_is_withdrawn() -> None:
    server = Recorder()
    queue = serve(server, 0)
    queue.is_pure = True
    for name in ("one", "two"):
        ask(server, name, 0)
    server.turn()
    frames = [ticket.frame for ticket in server.running[0].tickets]
    assert server.raised(server.running[0])
    server.turn()
    before = len(queue.batcher)
    server.scheduler.cancel(frames[1])
    assert (before, len(queue.batcher)) == (1, 0)
    server.done(server.running[0])
    assert server.turn() == []
    assert server.scheduler.in_flight == 0


def test_a_cancelled_request_leaves_its_device_queue_and_shutdown_fails_all_others() -> None:
    server = Recorder()
    serve(server, 0, 1)
    ask(server, "running", 0)
    server.turn(at=0)
    frame = server.submit(GRAPH, "leaves", [Handle(0, 2, 0, 1, device=0)])
    ask(server, "stays", 0)
    server.turn(at=0)
    server.scheduler.cancel(frame)
    server.turn(at=1)
    server.scheduler.fail_all("ending")
    server.turn(at=2)
    assert server.answered() == [("stays", "ending")]


def test_the_queue_delay_is_applied_per_device() -> None:
    server = Recorder()
    serve(server, 0, 1, delay_ns=50)
    ask(server, "one", 0)
    assert server.turn(at=0) == []
    assert server.scheduler.next_deadline() == 50
    ask(server, "elsewhere", 1)
    server.turn(at=10)
    ask(server, "two", 0)
    server.turn(at=20)
    assert server.turn(at=50) == [("a", ["one", "two"])]


def busy_world(random: Random) -> World:
    """A graph over two models, each with instances on both of two devices, with many requests at about the same
    time.
    """
    models = []
    for number in range(2):
        drawn = draw_model(random, number, batching=True)
        devices = random.choice([(0, 1), (0, 1, 1), (0, 0, 1, 1)])
        longest_ns = random.choice([5, 40, 200])
        models.append(
            replace(
                drawn,
                levels=None,
                keeps_order=False,
                instances=len(devices),
                devices=devices,
                shortest_ns=1,
                longest_ns=longest_ns,
            )
        )
    graph = draw_graph(random, "graph", models)
    requests = [
        replace(draw_request(random, number, 0, graph), arrives_ns=random.randint(0, 60), follows=None)
        for number in range(random.randint(10, 30))
    ]
    return World(tuple(models), (graph,), tuple(requests))


def test_property_requests_change_device_neither_too_early_nor_too_late_and_all_are_answered() -> None:
    """The simulator checks them at every step: see `Sim.check` and `Sim._check_device`."""
    stayed = moved = 0
    for seed in range(50):
        sim = Sim(seed, busy_world(Random(seed)))
        sim.run()
        stayed += sim.stayed
        moved += sim.moved
    assert stayed > 300
    assert moved > 20
