"""Batches that go from process to process without coming by here in between.

Decided here: when that is worth it, and how each process gets free again, whatever becomes of it. Worth it is it where
all of them are quick: then what a hop costs is mostly our own part of it, and nobody waits long for an instance that
has done its share and is not free yet. The last process answers for all of them.

A relay that takes long, or has lost a process, is *fenced off*: each process is asked where it is, and lets it by no
more if it has not yet. Whoever says so is free, so that one process that hangs keeps no other. Where a process died
with what the others had answered, they are asked a second time, since then nothing can be on its way any more, and take
their answers back.

Which batches go on relays is decided in scheduling/relays.py, what the processes know of each other in relay_paths.py,
how things are said in process_link.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import trio

from flowserve.backends.base import Results
from flowserve.backends.child.protocol import PASSED_WORDS
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.runtime.accounts import record_batch, record_relay, record_run_through
from flowserve.runtime.alone import Occupancy
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.instance import gather
from flowserve.runtime.parameters import take_parameters
from flowserve.runtime.process_link import Link, Outcome, Told, keeps_inputs
from flowserve.runtime.process_outputs import Garbled
from flowserve.runtime.relay_paths import OnItsWay, Path, Runner
from flowserve.scheduling.relays import Relay, RelayingDispatcher

# Of a larger batch each request pays little for a hop, and more is done beside each other if the steps are.
MEMBERS_MAX: Final = 8
# So long a relay is left alone; nothing that is quick takes it.
OVERDUE_NS: Final = SECOND_NS // 10
_LOOK_S: Final = 0.05
_PATHS_MAX: Final = 1024  # of one way
# Of the batches that go on relays; those that do not are numbered by each link, from 1.
_FIRST_NUMBER: Final = 1 << 48
# What most batches say of their members. Nobody writes into results.
_NONE: Final[Mapping[int, Any]] = {}


class Relays:
    """Those of a server. Touched on the loop."""

    def __init__(self, occupancy: Occupancy, clock: ClockNs) -> None:
        self._occupancy = occupancy
        self._clock = clock
        self._numbers = count(_FIRST_NUMBER)
        self._active: dict[int, OnItsWay] = {}
        self._begun = trio.Event()  # set where there is something to look after
        self._dispatcher: RelayingDispatcher
        self._poke: Callable[[], None]

    def serve(self, dispatcher: RelayingDispatcher, poke: Callable[[], None]) -> None:
        """Whose batches these are, and what makes it look again. Before the first."""
        self._dispatcher = dispatcher
        self._poke = poke

    def start(self, relay: Relay) -> bool:
        """Send it to its first process. False: it is not worth it, or cannot be now."""
        members = len(relay.batch.tickets)
        if members > MEMBERS_MAX or (members == 1 and self._occupancy.is_quiet):
            return False
        paths, key = relay.way.paths, tuple(relay.instances)
        path: Path | None = paths.get(key)
        if path is None or not path.is_whole:
            if len(paths) >= _PATHS_MAX:
                paths.clear()
            path = paths[key] = Path(relay)
            if not path.is_whole:  # a process has ended that will not be started again
                return False
        if not path.is_quick:
            return False
        now_ns = self._clock()
        sent = OnItsWay(next(self._numbers), path, relay, now_ns)
        try:
            self._send(sent)
        except (OSError, FlowserveError):
            for i in range(len(sent.news)):
                self._untell(sent, i)
            return False  # by itself it is told what is wrong
        batch = relay.batch
        batch.started_ns = now_ns
        for runner in path.runners:
            runner.running = batch
            runner.relay = sent
        self._active[sent.number] = sent
        if not self._begun.is_set():
            self._begun.set()
        self._occupancy.begins(batch)
        return True

    def told(self, runner: Runner, number: int, told: Told) -> None:
        """A process said something of a relay. Raises Garbled."""
        sent = self._active.get(number)
        if sent is None:
            return  # it is over since that was asked
        if not isinstance(told, bool):
            self._came_back(sent, *told)
        elif runner in sent.path.runners:
            self._fenced(sent, sent.path.runners.index(runner), has_seen=told)

    def died(self, runner: Runner, why: FlowserveError) -> None:
        """A process has ended. Harmless where it took part in nothing."""
        for sent in [one for one in self._active.values() if runner in one.path.runners]:
            self._died(sent, sent.path.runners.index(runner), why)
            self._poke()

    async def run(self) -> None:
        """Look after those that take long, for ever. Ends only by cancellation."""
        while True:
            await self._begun.wait()
            await trio.sleep(_LOOK_S)
            self._look_for_overdue()
            if not self._active:  # a server that is idle wakes up for nothing
                self._begun = trio.Event()

    def _look_for_overdue(self) -> None:
        overdue_ns = self._clock() - OVERDUE_NS
        for sent in [one for one in self._active.values() if not one.rounds and one.started_ns < overdue_ns]:
            self._fence_off(sent)

    def _send(self, sent: OnItsWay) -> None:
        path = sent.path
        links = path.prepare()
        stops = []
        for i in range(1, len(links)):
            news = links[i].news()
            sent.news.append(news)
            stops.append(path.stop(i, news))
        work = gather(sent.relay.batch.tickets, path.first_inputs)
        sent.expected = links[0].send_relay(work, sent.number, (path.names[0], stops, (), ()))

    def _came_back(self, sent: OnItsWay, passed: Sequence[int], answer: bytes) -> None:
        """`passed` are words of those that it passed; the one after them answered, if there is an answer."""
        links = sent.path.links
        before = len(passed) // PASSED_WORDS
        reached = before + bool(answer)
        if len(passed) % PASSED_WORDS or not 0 < reached <= len(links):
            raise Garbled(f"a relay of {len(links)} that has passed {len(passed)} words")
        rows = sent.expected.rows
        outcome: Outcome | None = None
        made: list[Results] = []
        is_private = sent.relay.way.is_private and not (any(passed[::PASSED_WORDS]) or keeps_inputs(answer))
        if is_private and reached == len(links) and not sent.is_lost:
            outcome = links[-1].outcome(links[-1].expected(sent.number, rows, None), answer)
            if isinstance(outcome, Results) and not (outcome.errors or outcome.parameters):
                self._ran_through(sent, passed, outcome)
                return
            made = self._made(sent, passed)
        else:
            made = self._made(sent, passed)
            if answer and links[before].is_open:
                expected = links[before].expected(sent.number, rows, made) if before else sent.expected
                outcome = links[before].outcome(expected, answer)
        for i in range(reached, len(links)):
            self._untell(sent, i)
        self._end(sent)
        if sent.is_lost:
            return
        if len(made) < before or (answer and outcome is None):  # one that had done its share died meanwhile
            name = sent.path.runners[len(made)].name
            self._fail(sent, len(made), InstanceDied(f"instance '{name}': its process ended while others went on"))
        elif isinstance(outcome, Results):
            self._returned(sent, [*made, outcome], None)
        else:
            self._returned(sent, made, outcome)

    def _made(self, sent: OnItsWay, passed: Sequence[int]) -> list[Results]:
        """What those made that it has passed, up to the first that has ended since. Raises Garbled."""
        made: list[Results] = []
        is_whole = True
        for i in range(len(passed) // PASSED_WORDS):
            link = sent.path.links[i]
            is_whole = is_whole and link.is_open
            if link.is_open:  # the blocks of all others come home, or belong to a model that keeps them
                expected = link.expected(sent.number, sent.expected.rows, [*made]) if i else sent.expected
                results = link.passed(expected, passed[i * PASSED_WORDS : (i + 1) * PASSED_WORDS])
                if is_whole:
                    made.append(results)
        return made

    def _ran_through(self, sent: OnItsWay, passed: Sequence[int], last: Results) -> None:
        """As nearly all do: nobody reads what was made before the last stop, and it goes home."""
        now_ns = self._clock()
        relay, path = sent.relay, sent.path
        rows = sent.expected.rows
        stops: list[tuple[int, int, Sequence[int]]] = []
        home: list[tuple[Link, int, int]] = []
        before_ns = sent.started_ns
        for i, runner in enumerate(path.runners):
            link = path.links[i]
            if i * PASSED_WORDS < len(passed):
                _, gathered_ns, computed_ns, segment, offset = passed[i * PASSED_WORDS : (i + 1) * PASSED_WORDS]
                placed = link.placed_at(segment, offset, rows)
                home.append((link, segment, offset))
            else:
                gathered_ns, computed_ns, placed = last.gathered_ns, last.computed_ns, last.placed
            if not before_ns <= gathered_ns <= computed_ns <= now_ns:
                gathered_ns = min(max(gathered_ns, before_ns), now_ns)
                computed_ns = min(max(computed_ns, gathered_ns), now_ns)
            stops.append((gathered_ns, computed_ns, placed))
            runner.pace.took(computed_ns - before_ns)
            before_ns = computed_ns
        for link, *place in home:  # now that everything is seen to be as it should
            link.comes_home(*place)
        self._end(sent)
        gathered_ns, computed_ns, placed = stops[0]
        first = Results([], _NONE, gathered_ns, computed_ns, sent.expected.packed.copied, placed, _NONE)
        record_run_through(relay, first, stops[1:], now_ns)
        self._dispatcher.relayed(relay, last.outputs, now_ns)

    def _returned(self, sent: OnItsWay, made: list[Results], error: FlowserveError | None) -> None:
        now_ns = self._clock()
        relay = sent.relay
        before_ns = sent.started_ns
        for i, results in enumerate(made):
            batch = relay.stop(i)
            batch.started_ns = before_ns
            if i:
                for ticket in batch.tickets:
                    ticket.queued_ns = before_ns
            if not before_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                results.gathered_ns = min(max(results.gathered_ns, before_ns), now_ns)
                results.computed_ns = min(max(results.computed_ns, results.gathered_ns), now_ns)
            sent.path.runners[i].pace.took(results.computed_ns - before_ns)
            before_ns = results.computed_ns
        record_relay(relay, made, now_ns)
        for i, results in enumerate(made):
            if results.parameters:
                results.errors = take_parameters(relay.stop(i), results.parameters, results.errors)
        outcomes = [(results.outputs, results.errors) for results in made]
        if not self._dispatcher.relay_returned(relay, outcomes, error, now_ns) and error is not None:
            failed = relay.stop(len(made))
            record_batch(failed.queue.observer, failed, error, now_ns)

    def _fail(self, sent: OnItsWay, i: int, why: FlowserveError) -> None:
        batch = sent.relay.stop(i)
        self._dispatcher.relay_failed(batch, why)
        record_batch(batch.queue.observer, batch, why, self._clock())

    def _release(self, sent: OnItsWay, stops: Sequence[int]) -> None:
        """Their instances have nothing more to do with it."""
        for i in stops:
            runner = sent.path.runners[i]
            runner.running = runner.relay = None
        sent.left = [i for i in sent.left if i not in stops]
        self._dispatcher.set_free(sent.relay, stops)

    def _end(self, sent: OnItsWay) -> None:
        del self._active[sent.number]
        self._occupancy.ends()
        self._release(sent, sent.left)

    # ------------------------------------------------------------------ where it takes long, or a process died

    def _died(self, sent: OnItsWay, i: int, why: FlowserveError) -> None:
        sent.asked.discard(i)
        if i in sent.left:
            self._release(sent, [i])
            if not sent.is_lost:
                sent.is_lost = True
                self._fail(sent, i, why)
        elif i in sent.refusing and sent.missing is None:
            sent.missing = i, why
        if sent.rounds:
            self._go_on(sent)
        else:
            self._fence_off(sent)

    def _untell(self, sent: OnItsWay, i: int) -> None:
        link = sent.path.links[i]
        news, sent.news[i] = sent.news[i], ((), ())
        link.untold(*news)

    def _fence_off(self, sent: OnItsWay) -> None:
        sent.rounds += 1
        sent.asked = {i for i, link in enumerate(sent.path.links) if _asks(link, sent.number)}
        self._go_on(sent)

    def _fenced(self, sent: OnItsWay, i: int, *, has_seen: bool) -> None:
        sent.asked.discard(i)
        if i in sent.left:
            self._release(sent, [i])
        if not has_seen:
            sent.refusing.add(i)
            self._untell(sent, i)
        self._go_on(sent)

    def _go_on(self, sent: OnItsWay) -> None:
        """Once everybody has said where it is. Where a process died they are asked again: then nothing is on its way.
        Otherwise it will come back, early.
        """
        if sent.asked or not (sent.is_lost or sent.missing):
            return
        if sent.rounds == 1:
            self._fence_off(sent)
            return
        self._end(sent)
        if sent.missing and not sent.is_lost:
            self._fail(sent, *sent.missing)
        for link in sent.path.links:
            with suppress(OSError):
                link.recall(sent.number)


def _asks(link: Link, number: int) -> bool:
    try:
        link.fence_off(number)
    except OSError:
        return False  # it has ended, and with it whatever it had
    return True
