"""Machines are lost with all their instances, in simulated time: no request is lost, doubled or answered twice."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import InstanceDied, MachineLost
from flowserve.scheduling.batch import Batch
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import plain_graph

A = simple_model(0, max_batch_size=4)


def lose(server: Recorder, machine: int, instances: range, *, depth: int = 1) -> None:
    """All batches of these instances are lost with their machine."""
    for batch in [one for one in server.running if one.instance in instances]:
        server.running.remove(batch)
        server.scheduler.complete(batch, [], MachineLost(f"machine {machine} is lost"), 0)
    for instance in instances:
        for _ in range(depth):
            server.queues[A.key].take_away(instance)


def test_a_batch_of_a_pure_model_runs_once_more_before_all_that_wait() -> None:
    server = Recorder()
    server.serve(A, instances=2, is_pure=True)
    for request in range(1, 10):
        server.submit(plain_graph(A), request)
    assert server.turn() == [("a", [1, 2, 3, 4]), ("a", [5, 6, 7, 8])]
    lose(server, 0, range(1))
    assert server.turn() == []
    server.done(server.running[0])
    assert server.turn() == [("a", [1, 2, 3, 4])]
    lose(server, 1, range(1, 2))
    assert server.turn() == []
    lost = "machine 1 is lost"
    assert server.answered() == [5, 6, 7, 8, (1, lost), (2, lost), (3, lost), (4, lost)]
    server.queues[A.key].give_back(0)
    assert server.turn() == [("a", [9])]


def test_a_batch_of_any_other_model_fails_and_so_does_that_of_an_instance_that_died_alone() -> None:
    for is_pure, error in ((False, MachineLost("gone")), (True, InstanceDied("gone"))):
        server = Recorder()
        server.serve(A, instances=2, is_pure=is_pure)
        server.submit(plain_graph(A), 1)
        server.turn()
        server.scheduler.complete(server.running.pop(), [], error, 0)
        assert server.turn() == []
        assert server.answered() == [(1, "gone")]


def test_a_request_whose_caller_left_is_not_run_again() -> None:
    server = Recorder()
    server.serve(A, instances=2, is_pure=True)
    frame = server.submit(plain_graph(A), 1)
    server.submit(plain_graph(A), 2)
    server.turn()
    server.scheduler.cancel(frame)
    lose(server, 0, range(1))
    assert server.turn() == [("a", [2])]


class Machines:
    """`machines`, each with two instances of two slots, in simulated time. A batch takes up to 100; some machines are
    lost, and their instances come back later.
    """

    def __init__(self, seed: int, machines: int, requests: int, deaths: int, *, is_pure: bool = True) -> None:
        self.server = Recorder()
        self.queue = self.server.serve(A, instances=2 * machines, is_pure=is_pure, depth=2)
        self.starts: Counter[object] = Counter()
        self.lost: Counter[object] = Counter()
        self._random = Random(seed)
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()
        self._running: dict[int, list[Batch]] = defaultdict(list)
        self._away: set[int] = set()
        self.now = 0
        self.graph = plain_graph(A)
        for request in range(requests):
            self._at(self._random.randint(0, 300), partial(self.server.submit, self.graph, request))
        for _ in range(deaths):
            self._at(self._random.randint(1, 350), partial(self._lose, self._random.randrange(machines)))

    def run(self) -> list[object]:
        """The answers, in order."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self.server.turn(self.now)  # checks that no slot is lost or doubled
            for batch in self.server.running:
                assert batch.instance // 2 not in self._away, "a batch on a machine that is lost"
                on_it = self._running[batch.instance]
                on_it.append(batch)
                assert len(on_it) <= 2
                self.starts.update(ticket.frame.request for ticket in batch.tickets)
                self._at(self.now + self._random.randint(1, 100), partial(self._done, batch))
            self.server.running.clear()
        return self.server.answered()

    def _at(self, time: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _done(self, batch: Batch) -> None:
        if batch not in self._running[batch.instance]:
            return  # the machine was lost meanwhile
        self._running[batch.instance].remove(batch)
        self.server.running.append(batch)
        self.server.done(batch, at=self.now)

    def _lose(self, machine: int) -> None:
        if machine in self._away:
            return
        self._away.add(machine)
        instances = range(2 * machine, 2 * machine + 2)
        for instance in instances:
            batches, self._running[instance] = self._running[instance], []
            for batch in batches:
                self.lost.update(ticket.frame.request for ticket in batch.tickets)
                self.server.scheduler.complete(batch, [], MachineLost("lost"), self.now)
            for _ in range(2):
                self.queue.take_away(instance)
        self._at(self.now + self._random.randint(1, 50), partial(self._back, machine))

    def _back(self, machine: int) -> None:
        self._away.remove(machine)
        for instance in range(2 * machine, 2 * machine + 2):
            for _ in range(2):
                self.queue.give_back(instance)


def check_laws(world: Machines, requests: int) -> None:
    answers = world.run()
    failed = {one[0] for one in answers if isinstance(one, tuple)}
    answered = [one[0] if isinstance(one, tuple) else one for one in answers]
    assert sorted(map(int, map(str, answered))) == [*range(requests)], "each request has one answer"
    assert failed == {request for request, times in world.lost.items() if times == 2}
    assert all(times == 1 + min(world.lost[request], 1) for request, times in world.starts.items())
    assert sorted(world.queue.free) == sorted(world.queue.instances)


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(0, 12))
def test_properties_every_request_has_one_answer_whatever_machines_are_lost(
    seed: int, machines: int, deaths: int
) -> None:
    check_laws(Machines(seed, machines, 120, deaths), 120)


@given(st.integers(0, 1 << 30))
def test_properties_requests_of_an_impure_model_run_once(seed: int) -> None:
    world = Machines(seed, 3, 60, 4, is_pure=False)
    answers = world.run()
    assert len(answers) == 60
    assert set(world.starts.values()) == {1}


@pytest.mark.slow
def test_a_thousand_machines_with_twenty_deaths() -> None:
    world = Machines(7, 1000, 20_000, 20)
    check_laws(world, 20_000)
    assert world.lost, "some of them ran batches"
