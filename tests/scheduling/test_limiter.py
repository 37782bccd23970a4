"""The rate limiter: resource amounts, the order of models under contention, and waiting batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from flowserve.config.types import LimitedResource, RateLimiter
from flowserve.graph.types import Graph
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.rate_limit.limiter import BEHIND_MAX, EVERYWHERE, Available, Limiter, Needs
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import SimModel, plain_graph

A, B, C = simple_model(0), simple_model(1), simple_model(2)


def needs(priority: int = 1, device: int = 0, **amounts: int) -> Needs:
    """`needs(R1=4)`: four of the device's R1. Resources with lower-case names are global."""
    wanted = [LimitedResource(name, count, is_global=name.islower()) for name, count in amounts.items()]
    return Needs.of(RateLimiter(tuple(wanted), priority), device)


def limited(*given: Available) -> Recorder:
    return Recorder(limiter=Limiter(given))


def serve(server: Recorder, model: SimModel, *of_instances: Needs, is_pure: bool = False) -> ModelQueue:
    return server.serve(model, instances=len(of_instances), needs=of_instances, is_pure=is_pure)


def ask(server: Recorder, model: SimModel, *requests: object) -> None:
    for request in requests:
        server.submit(plain_graph(model), request)


def is_claimed(server: Recorder) -> bool:
    """Whether a queue that has waited long has claimed resources."""
    assert server.scheduler.rate_limit is not None
    return bool(server.scheduler.rate_limit.waited_for())


def finish(server: Recorder, *names: str) -> list[tuple[str, list[object]]]:
    """Complete the oldest batch of each of these models, then run a turn."""
    for name in names:
        server.done(next(batch for batch in server.running if batch.queue.key.name == name))
    return server.turn()


# ------------------------------------------------------------------------------------------------------ how many


def test_the_default_amount_is_the_largest_demand_of_an_instance() -> None:
    limiter = Limiter()
    limiter.add([needs(R1=4, R2=4)])
    limiter.add([needs(R2=5, R3=10, R4=5)])
    limiter.add([needs(R1=1, R3=7, R4=2)])
    assert limiter.total == {("R1", 0): 4, ("R2", 0): 5, ("R3", 0): 10, ("R4", 0): 5}


def test_a_resource_exists_per_device_unless_it_is_global() -> None:
    given = (Available("R1", 10), Available("R2", 5, 0), Available("R2", 8, 1), Available("R3", 2))
    limiter = Limiter(given)
    limiter.add([needs(R1=1, R2=1), needs(device=1, R1=1, R2=1)])
    limiter.add([Needs({("R3", EVERYWHERE): 1})])
    assert limiter.total == {
        ("R3", EVERYWHERE): 2,
        ("R1", 0): 10,
        ("R2", 0): 5,
        ("R1", 1): 10,
        ("R2", 1): 8,
    }


def test_of_two_amounts_of_a_resource_the_larger_counts() -> None:
    limiter = Limiter(
        [Available("R", 3), Available("R", 7, 1), Available("R", 2, 0), Available("g", 1), Available("g", 4, 9)]
    )
    limiter.add([needs(R=1, g=1), needs(device=1, R=1)])
    assert limiter.total == {("R", 0): 3, ("R", 1): 7, ("g", EVERYWHERE): 4}


def test_a_removed_instance_no_longer_counts_towards_the_amount() -> None:
    limiter = Limiter()
    limiter.add([needs(R=2)])
    accounts = limiter.add([needs(R=5)])
    limiter.remove(accounts)
    assert limiter.total == {("R", 0): 2}


def test_demands_of_a_resource_listed_twice_add_up_and_zero_is_no_demand() -> None:
    limits = RateLimiter((LimitedResource("R", 1), LimitedResource("R", 2), LimitedResource("S", 0)))
    assert Needs.of(limits, 3).amounts == {("R", 3): 3}


@pytest.mark.fault("R9")
@pytest.mark.parametrize(
    ("given", "wanted", "limit", "least"),
    [
        ([Available("R", 3)], needs(R=4), 3, 4),
        ([Available("R", 9, 1)], needs(R=4), 0, 4),
        ([Available("other", 9)], needs(R=1), 0, 1),
        ([Available("r", 1, 0), Available("r", 2, 1)], needs(r=3), 2, 3),
    ],
    ids=["too few", "on another device", "not given at all", "too few for all instances"],
)
def test_an_instance_that_could_never_run_is_refused(
    given: Sequence[Available], wanted: Needs, limit: int, least: int
) -> None:
    refused = Limiter(given).refusal(wanted)
    assert refused is not None
    ((name, _),) = wanted.amounts
    assert str(refused) == (
        f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model'
        f" instances, the minimum required count is {least} (start with --rate-limit-resource={name}:{least}, or ask"
        " for less)"
    )


def test_an_instance_that_could_run_is_not_refused() -> None:
    assert Limiter().refusal(needs(R=1_000_000)) is None
    assert Limiter([Available("R", 4)]).refusal(needs(R=4)) is None
    assert Limiter([Available("R", 4)]).refusal(needs()) is None


@pytest.mark.fault("R9")
def test_a_resource_is_per_device_or_global_and_not_both() -> None:
    text = 'Resource "R" is present as both global and device-specific resource in the model configuration.'
    both = Needs({("R", 0): 1, ("R", EVERYWHERE): 1})
    everywhere = Needs({("R", EVERYWHERE): 1})
    loaded = Limiter()
    loaded.add([needs(R=1)])
    for refused in (Limiter().refusal(both), Limiter().refusal(everywhere, [needs(R=1)]), loaded.refusal(everywhere)):
        assert refused is not None
        assert refused.message == text


# ---------------------------------------------------------------------------------------- order


def executions(priorities: Sequence[int], resources: int) -> Counter[str]:
    """How often each of two models ran in the first sixty batches, both always busy, one R for a batch."""
    server = limited(Available("R", resources))
    for model, priority in zip((A, B), priorities, strict=True):
        serve(server, model, needs(priority, R=1), needs(priority, R=1))
        ask(server, model, *range(16 * 60))
    server.turn()
    while len(server.started) < 60:
        server.done(server.running[0])
        server.turn()
    return Counter(name for name, _ in server.started)


def test_at_priority_two_a_model_runs_half_as_often_where_resources_are_short() -> None:
    assert executions([1, 2], resources=1) == {"a": 40, "b": 20}
    assert executions([3, 1], resources=1)["a"] in (15, 16)


def test_priorities_change_nothing_while_resources_suffice() -> None:
    assert executions([1, 9], resources=4) == {"a": 30, "b": 30}


def test_an_idle_model_does_not_accumulate_credit() -> None:
    server = limited()
    for model in (A, B):
        serve(server, model, needs(R=1))
    ask(server, A, *range(16 * 30))
    server.turn()
    for _ in range(20):
        finish(server, "a")
    ask(server, B, *range(16 * 30))
    for _ in range(8):
        server.done(server.running[0])
        server.turn()
    assert Counter(name for name, _ in server.started[-8:]) == {"a": 4, "b": 4}


def test_a_model_that_ran_less_without_contention_gets_only_limited_credit() -> None:
    server = limited(Available("R", 2))
    for model in (A, B, C):
        serve(server, model, needs(R=1))
    ask(server, B, *range(16 * 100))
    ask(server, A, *range(16 * 300))
    server.turn()  # B's only instance begins a long execution
    for _ in range(200):
        finish(server, "a")
    ask(server, C, "holds one R from now on")
    server.turn()
    finish(server, "a")
    before = len(server.started)
    for _ in range(60):
        server.done(next(batch for batch in server.running if batch.queue.key.name != "c"))
        server.turn()
    ran = [name for name, _ in server.started[before:]]
    assert ran.index("a") <= BEHIND_MAX + 2
    assert Counter(ran[-20:]) == {"a": 10, "b": 10}


def test_a_model_added_later_gets_no_credit() -> None:
    server = limited()
    serve(server, A, needs(R=1))
    ask(server, A, *range(16 * 30))
    server.turn()
    for _ in range(10):
        finish(server, "a")
    serve(server, B, needs(R=1))
    ask(server, B, *range(16 * 30))
    server.turn()
    for _ in range(8):
        server.done(server.running[0])
        server.turn()
    assert Counter(name for name, _ in server.started[-8:]) == {"a": 4, "b": 4}


# ------------------------------------------------------------------------------------------------- what waits for what


def test_a_batch_grows_until_its_resources_are_free() -> None:
    server = limited()
    serve(server, A, needs(R=1))
    serve(server, B, needs(R=1))
    ask(server, A, "first")
    assert server.turn() == [("a", ["first"])]
    for request in range(3):
        ask(server, B, request)
        assert server.turn() == []
    assert finish(server, "a") == [("b", [0, 1, 2])]


def test_all_of_a_models_resources_are_taken_together() -> None:
    server = limited(Available("R", 1), Available("S", 1))
    serve(server, A, needs(R=1, S=1))
    serve(server, B, needs(R=1))
    serve(server, C, needs(S=1))
    ask(server, B, "b")
    server.turn()
    ask(server, A, "a")
    ask(server, C, "c")
    assert server.turn() == [("c", ["c"])]  # A waits for R and holds no S meanwhile
    assert finish(server, "c") == []
    assert finish(server, "b") == [("a", ["a"])]


@pytest.mark.fault("R10")
def test_a_model_without_demands_runs_while_others_wait_for_resources() -> None:
    """A call to a model without demands completes while other batches wait for the resources of its caller."""
    server = limited()
    serve(server, A, needs(priority=1, R=1), needs(priority=1, R=1))
    serve(server, B, needs(priority=100))
    ask(server, B, "weighs a hundred")
    server.turn()
    finish(server, "b")
    ask(server, A, *range(32))
    server.turn()  # one instance runs and holds R, the other waits for it
    ask(server, B, "called by the one that runs")
    assert server.turn() == [("b", ["called by the one that runs"])]


def test_instances_on_another_device_do_not_wait() -> None:
    server = limited()
    serve(server, A, needs(R=1), needs(device=1, R=1))
    serve(server, B, needs(R=1))
    ask(server, B, "holds R of device 0")
    server.turn()
    ask(server, A, *range(32))
    ((_, first),) = server.turn()
    assert first == [*range(16)]
    (running,) = (batch for batch in server.running if batch.queue.key == A.key)
    assert running.instance == 1


def test_a_batch_with_a_large_demand_is_overtaken_a_bounded_number_of_times() -> None:
    server = limited()
    serve(server, A, needs(R=4))
    for model in (B, C):
        serve(server, model, needs(R=1), needs(R=1))
        ask(server, model, *range(16 * 60))
    server.turn()
    ask(server, A, "big")
    while ("a", ["big"]) not in server.started:
        server.done(server.running[0])  # one completes, three still run: four copies are never free
        server.turn()
    assert OVERTAKEN_MAX <= len(server.started) - 4 - 1 <= OVERTAKEN_MAX + 4
    assert len(server.running) == 1
    started = finish(server, "a")
    assert len(started) == 4


def test_reserved_resources_do_not_block_batches_that_do_not_need_them() -> None:
    server = limited(Available("R", 4), Available("S", 1))
    serve(server, A, needs(R=4))
    serve(server, B, *[needs(R=1)] * 5)
    serve(server, C, needs(S=1))
    ask(server, B, *range(16 * 60))
    server.turn()
    ask(server, A, "big")
    while not is_claimed(server):
        server.done(server.running[0])
        server.turn()
    assert finish(server, "b") == []
    ask(server, C, "another resource")
    assert server.turn() == [("c", ["another resource"])]
    assert finish(server, "b", "b", "b") == [("a", ["big"])]


def test_a_queue_within_its_delay_reserves_no_resources() -> None:
    server = limited()
    patient = Queue(BatchPolicy(16, (16,), 1_000))
    server.serve(A, patient, needs=[needs(R=4)])
    serve(server, B, *[needs(R=1)] * 4)
    ask(server, B, *range(16 * 60))
    server.turn()
    ask(server, A, "patient")
    for _ in range(2 * OVERTAKEN_MAX):
        server.done(server.running[0])
        server.turn(at=500)
    assert len(server.running) == 4
    assert not is_claimed(server)


# ---------------------------------------------------------------------------------------- resources are returned


def held(server: Recorder) -> dict[tuple[str, int], int]:
    assert server.limiter is not None
    return server.limiter.held()


def test_a_failed_batch_returns_its_resources() -> None:
    server = limited()
    serve(server, A, needs(R=3))
    ask(server, A, 1)
    server.turn()
    assert held(server) == {("R", 0): 3}
    server.raised(server.running[0])
    server.turn()
    assert held(server) == {}


def test_the_halves_of_a_failed_batch_wait_for_resources_like_any_batch() -> None:
    server = limited()
    serve(server, A, needs(R=1), is_pure=True)
    serve(server, B, needs(R=1))
    ask(server, A, 1, 2, 3, 4)
    server.turn()
    ask(server, B, "b")
    assert server.raised(server.running[0])
    assert server.turn() == [("b", ["b"])]  # B has run less often
    assert finish(server, "b") == [("a", [1, 2])]
    assert finish(server, "a") == [("a", [3, 4])]
    assert finish(server, "a") == []
    assert server.answered() == ["b", 1, 2, 3, 4]
    assert held(server) == {}


def test_the_halves_of_a_failed_batch_run_although_another_instance_is_idle() -> None:
    server = limited()
    serve(server, A, needs(R=1), needs(R=0), is_pure=True)
    ask(server, A, 1, 2)
    server.turn()
    assert server.raised(server.running[0])
    assert server.turn() == [("a", [1]), ("a", [2])]


def test_a_request_cancelled_while_it_waits_for_resources_holds_none() -> None:
    server = limited()
    serve(server, A, needs(R=1))
    serve(server, B, needs(R=1))
    ask(server, B, "b")
    server.turn()
    frame = server.submit(plain_graph(A), "leaves")
    server.turn()
    server.scheduler.cancel(frame)
    assert server.turn() == []
    assert finish(server, "b") == []
    assert held(server) == {}


def test_a_cancelled_request_holds_its_resources_until_its_batch_is_over() -> None:
    server = limited()
    serve(server, A, needs(R=1))
    frame = server.submit(plain_graph(A), "leaves")
    server.turn()
    server.scheduler.cancel(frame)
    server.turn()
    assert held(server) == {("R", 0): 1}
    finish(server, "a")
    assert held(server) == {}


def test_a_removed_model_leaves_no_demand_even_in_the_step_of_its_last_batch() -> None:
    server = limited()
    queue = serve(server, A, needs(R=2))
    serve(server, B, needs(R=1))
    ask(server, A, 1)
    server.turn()
    server.done(server.running[0])
    server.scheduler.models.remove(queue)
    ask(server, B, 2)
    assert server.turn() == [("b", [2])]
    assert server.limiter is not None
    assert server.limiter.total == {("R", 0): 1}


def test_a_chain_holds_resources_step_by_step() -> None:
    server = limited()
    serve(server, A, needs(R=1))
    ensemble: Graph = plain_graph(A)
    server.submit(ensemble, "one")
    server.submit(ensemble, "two")
    server.turn()
    assert held(server) == {("R", 0): 1}
    finish(server, "a")
    assert held(server) == {}


def test_an_expired_delay_sets_no_deadline_while_resources_are_taken() -> None:
    server = limited()
    server.serve(A, Queue(BatchPolicy(16, (16,), 1_000)), needs=[needs(R=1)])
    serve(server, B, needs(R=1))
    ask(server, B, "b")
    server.turn()
    ask(server, A, "delayed")
    server.turn(at=10)
    assert server.scheduler.next_deadline() is None  # only the end of B's batch has an effect
    server.done(server.running[0], at=2_000)
    assert server.turn(at=2_000) == [("a", ["delayed"])]
