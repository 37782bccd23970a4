"""The scheduler under any order of events: arrivals, completions, failures, cancellations, deaths and the clock.

The simulated server has the expected response of each request and checks every invariant after each step. Hypothesis,
not a clock, chooses the next events, and their number before the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.sim import Sim
from tests.support.strategies import World, routed_worlds, worlds


class AnyOrder(Sim):
    """A simulated server in which any possible event may be the next."""

    def __init__(self, seed: int, world: World) -> None:
        self.possible: list[Callable[[], None]] = []
        super().__init__(seed, world)

    def at(self, at_ns: int, act: Callable[[], None]) -> None:
        self.possible.append(act)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16), world=worlds() | routed_worlds())
    def build(self, seed: int, world: World) -> None:
        """`seed`: of the durations and outcomes of executions."""
        self.sim = AnyOrder(seed, world)
        self.is_looked_at = True

    @precondition(lambda self: self.sim.possible)
    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.sim.possible) - 1))
        self.sim.possible.pop(which)()
        self.is_looked_at = False

    @rule(ns=st.integers(0, 120))
    def time_passes(self, ns: int) -> None:
        self.sim.now_ns += ns
        self.sim.turn()
        self.is_looked_at = True

    @rule()
    def a_step_runs(self) -> None:
        self.sim.turn()
        self.is_looked_at = True

    @invariant()
    def promises_hold(self) -> None:
        if self.is_looked_at:
            self.sim.check()

    def teardown(self) -> None:
        """Complete all batches in order, and advance the time to each deadline, until no event is left."""
        while hasattr(self, "sim"):
            self.sim.turn()
            deadline = self.sim.scheduler.next_deadline()
            if self.sim.possible:
                self.sim.possible.pop(0)()
            elif deadline is not None:
                self.sim.now_ns = deadline
            else:
                self.sim.check_end()
                return


TestScheduler = SchedulerMachine.TestCase
# Fewer examples, because each has many steps, and the simulation checks the same properties.
TestScheduler.settings = settings(max_examples=settings().max_examples // 2)
