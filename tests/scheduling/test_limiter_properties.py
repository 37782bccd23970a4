"""The scheduler with a rate limiter under any order of events: no over-granting, no leaked resource, no starvation."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.scheduling.rate_limit import order as limited
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs, Resource
from tests.support.recorder import Recorder, simple_model
from tests.support.strategies import plain_graph

OVERTAKEN_MAX = 3
FEWER = settings(max_examples=settings().max_examples // 2)
RESOURCES: list[Resource] = [("R", 0), ("S", 0), ("R", 1)]
MODELS = [simple_model(number, max_batch_size=1) for number in range(5)]

some_needs = st.builds(
    Needs, st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 4), max_size=2), st.sampled_from([1, 1, 2, 7])
)


class LimiterMachine(RuleBasedStateMachine):
    """Up to five models of one row a batch; each instance has needs of its own."""

    @initialize(needs=st.lists(st.lists(some_needs, min_size=1, max_size=3), min_size=2, max_size=5))
    def build(self, needs: list[list[Needs]]) -> None:
        server = self.server = Recorder(limiter=Limiter(), overtaken_max=OVERTAKEN_MAX)
        self.needs = needs
        self.there_is: Counter[Resource] = Counter()
        for model, of_instances in zip(MODELS, needs, strict=False):
            server.serve(model, instances=len(of_instances), needs=of_instances, is_pure=len(of_instances) == 2)
            for one in of_instances:
                self.there_is |= Counter(one.amounts)
        self.asked = 0

    @rule(number=st.integers(0, 4), count=st.integers(1, 4))
    def requests_arrive(self, number: int, count: int) -> None:
        for _ in range(count):
            self.server.submit(plain_graph(MODELS[number % len(self.needs)]), self.asked)
            self.asked += 1
        self.server.turn()

    @precondition(lambda self: self.server.running)
    @rule(data=st.data(), fails=st.booleans())
    def a_batch_ends(self, data: st.DataObject, fails: bool) -> None:
        batch = data.draw(st.sampled_from(self.server.running))
        if fails:
            self.server.raised(batch)
        else:
            self.server.done(batch)
        self.server.turn()

    @precondition(lambda self: self.server.running)
    @rule(data=st.data())
    def a_caller_leaves(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.server.running))
        self.server.scheduler.cancel(batch.tickets[0].frame)
        self.server.turn()

    @invariant()
    def no_resource_is_over_granted_and_no_runnable_batch_waits(self) -> None:
        if not hasattr(self, "server"):
            return
        self.server.scheduler.check()
        held: Counter[Resource] = Counter()
        for batch in self.server.running:
            held.update(self._needs(batch.queue.key.name, batch.instance).amounts)
        limiter, rate_limit = self.server.limiter, self.server.scheduler.rate_limit
        assert limiter is not None
        assert rate_limit is not None
        assert limiter.held() == held
        assert held <= self.there_is
        if rate_limit.waited_for():
            return
        for key, queue in self.server.queues.items():
            for instance in queue.free if len(queue.batcher) else ():
                amounts = Counter(self._needs(key.name, instance).amounts)
                assert not held + amounts <= self.there_is, f"{key} waits beside free resources"

    def _needs(self, name: str, instance: int) -> Needs:
        return self.needs["abcde".index(name)][instance]

    def teardown(self) -> None:
        """Every running batch completes, newest first, and every request has run."""
        while hasattr(self, "server") and self.server.running:
            self.server.done(self.server.running[-1])
            self.server.turn()
        if hasattr(self, "server"):
            assert self.server.limiter is not None
            assert not self.server.limiter.held()
            assert not self.server.scheduler.in_flight


TestLimiter = LimiterMachine.TestCase
TestLimiter.settings = FEWER  # each is many steps


@st.composite
def demands(draw: st.DrawFn) -> tuple[Needs, list[Needs]]:
    """One model's needs, and those of models that are always busy and need some of the same resources."""
    big = Needs({("R", 0): draw(st.integers(2, 6)), ("S", 0): draw(st.integers(1, 3))})
    small = st.builds(Needs, st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 2), min_size=1, max_size=2))
    return big, draw(st.lists(small, min_size=1, max_size=4))


@settings(FEWER)
@given(demand=demands(), random=st.randoms(use_true_random=False))
def test_property_no_model_starves_under_the_load_of_others(demand: tuple[Needs, list[Needs]], random: Random) -> None:
    """It runs after a number of executions that depends on the models, not on the length of their queues."""
    big, small = demand
    server = Recorder(limiter=Limiter())
    server.serve(MODELS[0], needs=[big])
    for model, needs in zip(MODELS[1:], small, strict=False):
        server.serve(model, instances=3, needs=[needs] * 3)
        for request in range(60):
            server.submit(plain_graph(model), request)
    server.turn()
    server.submit(plain_graph(MODELS[0]), "big")
    server.turn()
    before = len(server.started)
    while ("a", ["big"]) not in server.started:
        server.done(random.choice(server.running))
        server.turn()
        assert len(server.started) - before <= limited.OVERTAKEN_MAX + 6 * len(small) + 12, "it starves"


@settings(FEWER)
@given(needs=st.lists(some_needs, min_size=2, max_size=4), seed=st.integers(0, 1000))
def test_one_seed_gives_one_history(needs: list[Needs], seed: int) -> None:
    def history() -> object:
        random = Random(seed)
        server = Recorder(limiter=Limiter())
        for model, one in zip(MODELS, needs, strict=False):
            server.serve(model, instances=2, needs=[one, needs[0]])
            for request in range(10):
                server.submit(plain_graph(model), request)
        server.turn()
        while server.running:
            server.done(random.choice(server.running))
            server.turn()
        return server.started

    assert history() == history()
