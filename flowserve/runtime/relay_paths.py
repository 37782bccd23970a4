"""The processes that a relay goes through, and what they must know of each other before.

Decided here: which instances are quick enough, what each process is told of the next one, on which processor the loop
waits for them in place, and what is known of a batch on its way. What becomes of it is decided in relays.py, how things
are said in process_link.py.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

from flowserve.errors import FlowserveError
from flowserve.memory.arena import Place
from flowserve.runtime.alone import Pace
from flowserve.runtime.children import Child
from flowserve.runtime.comparison import Comparison
from flowserve.runtime.one_processor import OneProcessor
from flowserve.runtime.process_link import Expected, Link, Outcome
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.relays import Relay, Way

# A model is quick, here, whose batches take no longer: some three times what the server's own part of a hop costs.
QUICK_NS: Final = 500_000
# What is tried for those that are waited for in place: everybody runs where the system likes, the processes share one
# processor, or the loop shares it with them.
_APART, _TOGETHER, _WITH_LOOP = _WAYS = range(3)
# After so many times what one took nobody says any more how long it took altogether.
_NEXT_WITHIN: Final = 4


@runtime_checkable
class Runner(Protocol):
    """An instance in a process, as far as relays know it. `passes_on`: where its answers lie the next process knows
    without looking. `receives`: its inputs may lie in another process's memory.
    """

    name: str
    passes_on: bool
    receives: bool
    running: Batch | None
    relay: OnItsWay | None
    pace: Pace
    child: Child | None
    link: Link | None

    @property
    def asks_meanwhile(self) -> bool: ...

    def wrong(self, what: str) -> None: ...


class Path:
    """The processes that a batch goes through, made known to each other. They know it by its number."""

    def __init__(self, number: int, way: Way, instances: Sequence[Runner], one_processor: OneProcessor) -> None:
        self.number = number
        self.runners = tuple(instances)
        self.links = [link for runner in self.runners if (link := runner.link) is not None]
        nodes = way.nodes
        self._inputs = way.reads
        self.first_inputs = range(len(nodes[0].inputs))
        self._wanted = [node.wanted for node in nodes[1:]]
        self._is_told = False  # whether any of them may know it
        self._known = -1  # memory that all have been told of, ...
        self._looked = -1  # ... and how much any process had when that was looked at
        self._answers = select.poll()  # on which one of them is waited for in place
        for link in self.links:
            self._answers.register(link, select.POLLIN)
        self._one_processor = one_processor
        self._started_ns = 0  # the last that was waited for in place
        self._held_in = -1  # which era
        self._comparison = Comparison(len(_WAYS))
        self._last = self.links[-1].fileno() if self.links else -1

    @property
    def is_whole(self) -> bool:
        """Whether these processes are the ones that it was made for."""
        return [runner.link for runner in self.runners] == self.links

    @property
    def is_quick(self) -> bool:
        """Who asks others before it answers may ask one that the relay keeps until then."""
        return all(runner.pace.mean_ns <= QUICK_NS and not runner.asks_meanwhile for runner in self.runners)

    @property
    def is_idle(self) -> bool:
        """Whether they are the ones that it was made for, and nothing runs there."""
        for runner, link in zip(self.runners, self.links, strict=True):
            if runner.link is not link or runner.running is not None:
                return False
        return True

    def comes_back(self, within_ms: int) -> bool:
        """Wait until one of them says something. Whether it is the last one."""
        way = self._comparison.way
        if way == _APART:
            return self._last in dict(self._answers.poll(within_ms))
        one_processor = self._one_processor
        if self._held_in != one_processor.era:
            one_processor.hold([child for runner in self.runners if (child := runner.child) is not None])
            self._held_in = one_processor.era
        answers = one_processor.wait(self._answers.poll, within_ms, here=way == _WITH_LOOP)
        if not answers:  # a model that takes long may have more than one thread at it
            one_processor.let_go()
        return self._last in dict(answers)

    def waited_for(self, started_ns: int, now_ns: int) -> None:
        """One that started then was waited for in place until now, in vain or not."""
        comparison = self._comparison
        went = comparison.way
        # From one to the next, since whoever asks pays too for where everybody runs; but it may also take its time.
        comparison.took(min(started_ns - self._started_ns, _NEXT_WITHIN * (now_ns - started_ns)))
        self._started_ns = started_ns
        if went != _APART and comparison.way == _APART:
            self._one_processor.let_go()

    def takes_at_most(self, each_ns: float, nanoseconds: float) -> bool:
        """Whether a batch is through each of them, and through all of them, so soon, by measurement. As `is_quick`."""
        for runner in self.runners:
            mean_ns = runner.pace.mean_ns
            if mean_ns > each_ns or runner.asks_meanwhile:
                return False
            nanoseconds -= mean_ns
        return nanoseconds >= 0

    def prepare(self) -> list[Link]:
        """Whatever a process needs to know of the others, it knows now. Raises OSError where one has just ended."""
        links = self.links
        if self._looked == Link.learned:
            return links
        looked, known = Link.learned, sum([link.segment_count for link in links])
        for link in links[1:]:  # the first one is asked by whoever sends it the batch
            link.look_again()
        if known == self._known:
            self._looked = looked
            return links
        self._is_told = True
        for link, following, inputs, wanted in zip(links, links[1:], self._inputs, self._wanted, strict=False):
            for i in {i for i, _ in inputs}:
                following.sees(links[i])
            link.tell_path(self.number, following.peer_of(link), inputs, wanted)
        self._known, self._looked = known, looked
        return links

    def __del__(self) -> None:
        for link in self.links[:-1] if self._is_told else ():  # the last one hands nothing on
            link.end_path(self.number)


class OnItsWay:
    """A relay that was sent. What is in lists is in the order of its stops. `relay` is set once scheduling knows of it.
    `heard` is what came back before that, `outcome` what the last one made, once that was read.
    """

    __slots__ = (
        "asked",
        "expected",
        "heard",
        "is_lost",
        "left",
        "missing",
        "news",
        "number",
        "outcome",
        "path",
        "refusing",
        "relay",
        "rounds",
        "started_ns",
    )

    relay: Relay

    def __init__(self, number: int, path: Path, started_ns: int) -> None:
        self.number = number
        self.path = path
        self.started_ns = started_ns
        self.heard: tuple[Sequence[int], bytes] | None = None
        self.outcome: Outcome | None = None
        self.expected: Expected  # of the first
        # What each process is told with the batch (`Link.news`), unless it never gets it.
        self.news: list[tuple[Sequence[Place], Sequence[int]]] = [((), ())]
        self.left = [*range(len(path.runners))]  # stops whose instances are not free yet
        self.is_lost = False  # a process died, and its requests have failed
        self.asked: set[int] = set()  # stops that have not said yet where it is
        self.rounds = 0  # how often they were asked
        self.refusing: set[int] = set()  # stops that had not seen it when they were
        # One of those that died since, and how: it may have been handed on there, and nobody has read it.
        self.missing: tuple[int, FlowserveError] | None = None

    def batch_of(self, runner: Runner) -> Batch:
        """The batch as an instance has it."""
        return self.relay.stop(self.path.runners.index(runner))
