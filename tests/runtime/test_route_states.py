"""What the server knows of a batch that passes several processes: the table of states, and a model of the processes."""

from __future__ import annotations

import random
from collections import deque
from itertools import product

import pytest

from flowserve.backends.worker.messages import Garbled, Stage
from flowserve.runtime.remote.run import TRANSITIONS, RouteStates, StageEvent, StageState

RESULTS = Stage(0, 1, 2, 0, 0, ())
DIED = {StageState.DEAD, StageState.RAN_DEAD}


@pytest.mark.parametrize(("state", "event"), [*product(StageState, StageEvent)])
def test_each_event_in_each_state_has_one_consequence(state: StageState, event: StageEvent) -> None:
    states = RouteStates(2)
    states.ask()
    states.states[0] = state
    after = TRANSITIONS.get((state, event))

    def happen() -> None:
        if event is StageEvent.DIED:
            states.died(0, "it ended")
        else:
            states.answered(0, RESULTS if event is StageEvent.HAS_RUN else None)

    if after is None:
        assert event is StageEvent.DIED or (state, event) == (StageState.NEVER, StageEvent.HAS_RUN)
        with pytest.raises(Garbled, match=f"{state.name}, {event.name}"):
            happen()
        return
    happen()
    assert states.states[0] is after
    assert (after in DIED) == (state in DIED or event is StageEvent.DIED), "what has ended stays so"
    if event is StageEvent.HAS_RUN:
        assert states.reported[0] is RESULTS


def test_an_answer_that_was_not_asked_for_is_invalid() -> None:
    states = RouteStates(1)
    with pytest.raises(Garbled, match="was not sent"):
        states.answered(0, None)
    assert states.ask() == [0]
    states.answered(0, None)
    with pytest.raises(Garbled, match="was not sent"):
        states.answered(0, None)


def test_a_batch_without_a_route_is_lost_with_its_process() -> None:
    states = RouteStates(1)
    assert states.lost_at() is None
    states.died(0, "it ended")
    assert states.lost_at() == 0


class World:
    """Processes that hand one batch on to each other, and the server. Each socket delivers in order; everything else
    happens in any order.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.states = RouteStates(count)
        self.inboxes: list[deque[str]] = [deque() for _ in range(count)]
        self.sent: list[deque[str]] = [deque() for _ in range(count)]  # to the server
        self.alive = [True] * count
        self.noticed = [False] * count  # the ends that the server knows
        self.ran = [False] * count
        self.cancelled = [False] * count
        self.replies = 0
        self.lost: int | None = None
        self.inboxes[0].append("RUN")

    def actions(self) -> list[tuple[str, int]]:
        found = []
        for i, alive in enumerate(self.alive):
            if alive and self.inboxes[i]:
                found += [("process", i)] * 4
            if self.sent[i]:
                found += [("read", i)] * 4
            if alive and self.deaths:
                found.append(("die", i))
            if not alive and not self.noticed[i] and not self.sent[i]:
                found.append(("notice", i))
        if self.recalls:
            found.append(("recall", 0))
        return found

    def run(self, deaths: int, recalls: int) -> None:
        self.deaths, self.recalls = deaths, recalls
        while actions := self.actions():
            what, i = self.rng.choice(actions)
            getattr(self, f"_{what}")(i)
            lost = self.states.lost_at()
            if lost is not None and not self.replies and self.lost is None:
                self.lost = lost
            assert self.replies + (self.lost is not None) <= 1

    def _process(self, i: int) -> None:
        message = self.inboxes[i].popleft()
        if message == "CANCEL":
            self.sent[i].append("HAS_RUN" if self.ran[i] else "HAS_NOT_RUN")
            self.cancelled[i] = self.cancelled[i] or not self.ran[i]
        elif self.cancelled[i]:
            self.sent[i].append("NOT_RUN")
        else:
            last = i + 1 == len(self.alive)
            self.ran[i] = not last or self.rng.random() < 0.5  # else it has text, and is not one for other stages
            if self.ran[i] and not last and self.alive[i + 1] and self.rng.random() < 0.9:
                self.inboxes[i + 1].append("RUN")
            else:
                self.sent[i].append("REPLY")

    def _read(self, i: int) -> None:
        message = self.sent[i].popleft()
        if message in ("REPLY", "NOT_RUN"):
            if self.lost is None:
                self.replies += 1
            else:
                assert message == "NOT_RUN", "a batch that ran is not lost"
        elif not self.replies and self.lost is None:
            self.states.answered(i, RESULTS if message == "HAS_RUN" else None)

    def _die(self, i: int) -> None:
        self.deaths -= 1
        self.alive[i] = False
        self.inboxes[i].clear()

    def _notice(self, i: int) -> None:
        self.noticed[i] = True
        if not self.replies and self.lost is None:
            self.states.died(i, "it ended")
            self._recall(i, is_forced=True)

    def _recall(self, i: int, *, is_forced: bool = False) -> None:
        self.recalls -= not is_forced
        if not self.replies and self.lost is None:
            for asked in self.states.ask():
                if self.alive[asked]:
                    self.inboxes[asked].append("CANCEL")


@pytest.mark.parametrize(("deaths", "recalls"), [(0, 0), (0, 2), (1, 0), (1, 1), (2, 2), (4, 2)])
def test_a_batch_comes_back_or_is_lost_but_never_both(deaths: int, recalls: int) -> None:
    ends: set[str] = set()
    for seed in range(400):
        world = World(seed, count=1 + seed % 4)
        world.run(deaths, recalls)
        assert world.replies + (world.lost is not None) == 1, f"seed {seed}: {world.states.states}"
        if world.lost is not None:
            assert not world.alive[world.lost]
        ends.add("reply" if world.replies else "lost")
    assert ends == ({"reply", "lost"} if deaths else {"reply"})
