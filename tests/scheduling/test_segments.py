"""Segments in simulated time: actors with an instance of each model of a chain, which end as a whole. No request is
lost, doubled or answered twice, no slot is lost, and a route stays in its actor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, InstanceDied, MachineLost
from flowserve.scheduling.batch import Batch, Recall
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.route import RECALL_NS
from flowserve.simulation.deployment import BatchResults
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import Handle, chain_graph

MODELS = tuple(simple_model(number, max_batch_size=4) for number in range(3))
CHAIN = chain_graph("chain", [*MODELS])
DEPTH = 2


def segment(actors: int, pure: Sequence[bool] = (True, True, True)) -> Recorder:
    """A server whose models are in one segment."""
    server = Recorder()
    for model, is_pure in zip(MODELS, pure, strict=True):
        server.serve(model, instances=actors, is_pure=is_pure, depth=DEPTH, is_divided=True)
    return server


def results(batch: Batch, stages: int) -> list[BatchResults]:
    """The results of a batch's first stages."""
    made = []
    for _ in range(stages):
        block, start = object(), 0
        column: list[Handle | None] = []
        for ticket in batch.tickets:
            column.append(Handle(0, 2, start, start + ticket.rows, block))
            start += ticket.rows
        made.append(BatchResults([column]))
    return made


def come_back(server: Recorder, batch: Batch, stages: int, error: FlowserveError | None = None, at: int = 0) -> bool:
    if batch in server.running:
        server.running.remove(batch)
    return server.scheduler.complete(batch, results(batch, stages), error, at)


def test_a_batch_passes_the_whole_segment_in_one_actor() -> None:
    server = segment(2)
    for request in (1, 2):
        server.submit(CHAIN, request)
        server.turn()
    first, second = server.running
    assert first.route is not None
    assert second.route is not None
    assert (len(first.route), len(second.route)) == (3, 3)
    assert {*first.instances} | {*second.instances} == {0, 1}
    assert len({*first.instances}) == len({*second.instances}) == 1
    come_back(server, second, 3)
    come_back(server, first, 3)
    assert server.turn() == []
    assert server.answered() == [2, 1]


def test_a_batch_takes_no_route_in_an_actor_that_has_another_one() -> None:
    server = segment(1)
    for request in (1, 2):
        server.submit(CHAIN, request)
        server.turn()
    first, second = server.running
    assert first.route is not None
    assert second.route is None


@pytest.mark.parametrize("actors", [1, 2])
def test_a_batch_takes_no_route_in_an_actor_that_lacks_a_model(actors: int) -> None:
    server = segment(actors)
    for _ in range(DEPTH):
        server.queues[MODELS[2].key].take_away(0)
    for request in range(actors):
        server.submit(CHAIN, request)
        server.turn()
    lacking, *others = server.running
    assert (lacking.instance, lacking.route) == (0, None)
    assert [len(batch.route or ()) for batch in others] == [3] * (actors - 1)


@pytest.mark.parametrize("impure", [None, 0, 1, 2])
def test_a_batch_on_a_route_in_a_lost_machine_runs_once_more_if_all_its_models_are_pure(impure: int | None) -> None:
    server = segment(2, [number != impure for number in range(3)])
    server.submit(CHAIN, 1)
    server.turn()
    (batch,) = server.running
    is_again = come_back(server, batch, 0, MachineLost("machine 0 is lost"))
    started = server.turn()
    if impure is None:
        assert is_again
        assert started == [("a", [1])]
        assert come_back(server, server.running[0], 0, MachineLost("machine 1 is lost")) is False
        server.turn()
        assert server.answered() == [(1, "machine 1 is lost")]
    else:
        assert not is_again
        assert server.answered() == [(1, "machine 0 is lost")]


class Actors:
    """`actors` of a segment, each on a machine of its own, in simulated time; some end, alone or with their machine,
    and their instances come back one by one.
    """

    def __init__(self, seed: int, actors: int, requests: int, deaths: int, pure: Sequence[bool]) -> None:
        self.server = segment(actors, pure)
        self.pure = pure
        self.starts: Counter[tuple[object, str]] = Counter()
        self.died: set[object] = set()
        self.lost: Counter[tuple[object, str]] = Counter()
        self.routed = self.recalled = 0
        self.now = 0
        self._random = Random(seed)
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()
        self._running: dict[Batch, int] = {}  # the number of stages that each batch has passed
        self._away: set[tuple[int, str]] = set()
        for request in range(requests):
            self._at(self._random.randint(0, 1200), partial(self.server.submit, CHAIN, request))
        for _ in range(deaths):
            self._at(self._random.randint(1, 1400), partial(self._end, self._random.randrange(actors)))

    def run(self) -> list[object]:
        """The answers, in order."""
        while self._events:
            deadline = self.server.scheduler.next_deadline()
            if deadline is not None and deadline < self._events[0][0]:
                self._at(max(deadline, self.now), lambda: None)
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self.server.turn(self.now)  # checks that no slot is lost or doubled
            self._carry_out()
        return self.server.answered()

    def _carry_out(self) -> None:
        for notice in self.server.notices:
            assert isinstance(notice, Recall)
            self.recalled += 1
        self.server.notices.clear()
        for batch in self.server.running:
            instances = [batch.instance] if batch.route is None else batch.instances
            assert len({*instances}) == 1, "a route leaves its actor"
            stages = [batch.stage(i) for i in range(len(instances))]
            names = [stage.queue.key.name for stage in stages]
            assert not any((instances[0], name) in self._away for name in names), "a batch in an actor that has ended"
            self.routed += batch.route is not None
            self._running[batch] = 0
            self._begin(batch)
        self.server.running.clear()

    def _begin(self, batch: Batch) -> None:
        stage = batch.stage(self._running[batch])
        self.starts.update((ticket.frame.request, stage.queue.key.name) for ticket in batch.tickets)
        took = self._random.randint(1, 100) if self._random.random() < 0.7 else 2 * RECALL_NS
        self._at(self.now + took, partial(self._passed, batch))

    def _passed(self, batch: Batch) -> None:
        if batch not in self._running:
            return  # the actor ended meanwhile
        self._running[batch] += 1
        passed = self._running[batch]
        if batch.route is not None and passed < len(batch.route) and not batch.is_recalled:
            self._begin(batch)
            return
        del self._running[batch]
        come_back(self.server, batch, passed, at=self.now)

    def _end(self, actor: int) -> None:
        if any(instance == actor for instance, _ in self._away):
            return
        for model in MODELS:
            self._away.add((actor, model.key.name))
            for _ in range(DEPTH):
                self.server.queues[model.key].take_away(actor)
            back = partial(self._back, actor, model.key.name, self.server.queues[model.key])
            self._at(self.now + self._random.randint(1, 50), back)
        with_machine = self._random.random() < 0.6
        for batch in [one for one in self._running if one.instance == actor]:
            del self._running[batch]
            requests = [ticket.frame.request for ticket in batch.tickets]
            stages = [batch.queue] if batch.route is None else batch.route.queues
            if with_machine and all(queue.is_pure for queue in stages):
                self.lost.update((request, stages[0].key.name) for request in requests)
            else:
                self.died.update(requests)
            error = MachineLost("lost") if with_machine else InstanceDied("died")
            self.server.scheduler.complete(batch, [], error, self.now)

    def _back(self, actor: int, name: str, queue: ModelQueue) -> None:
        self._away.remove((actor, name))
        for _ in range(DEPTH):
            queue.give_back(actor)

    def _at(self, time: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))


def check_laws(world: Actors, requests: int) -> None:
    answers = world.run()
    failed = {one[0] for one in answers if isinstance(one, tuple)}
    answered = [one[0] if isinstance(one, tuple) else one for one in answers]
    assert sorted(map(int, map(str, answered))) == [*range(requests)], "each request has one answer"
    twice = {step[0] for step, times in world.lost.items() if times > 1}
    assert failed == world.died | twice, "those fail whose batch died, or was lost again"
    for (request, name), times in world.starts.items():
        if not world.pure["abc".index(name)]:
            assert times == 1, f"request {request} ran twice in an impure model"
    for queue in world.server.queues.values():
        assert sorted(queue.free) == sorted(queue.instances)


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(0, 10), st.tuples(*[st.booleans()] * 3))
def test_properties_every_request_has_one_answer_whatever_actors_end(
    seed: int, actors: int, deaths: int, pure: tuple[bool, ...]
) -> None:
    check_laws(Actors(seed, actors, 60, deaths, pure), 60)


def test_the_simulated_segments_cover_all_kinds_of_events() -> None:
    routed = recalled = died = lost = again = 0
    for seed in range(60):
        world = Actors(seed, 2, 60, 4, (True, True, True))
        check_laws(world, 60)
        routed, recalled = routed + world.routed, recalled + world.recalled
        died, lost = died + len(world.died), lost + len(world.lost)
        again += sum(times > 1 for times in world.lost.values())
    assert min(routed, recalled, died, lost) > 15
    assert again


@pytest.mark.slow
def test_a_thousand_actors_with_twenty_ends() -> None:
    world = Actors(7, 1000, 10_000, 20, (True, True, True))
    check_laws(world, 10_000)
    assert world.routed > 1000
