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

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

import trio

from flowserve.backends.base import Results, Work
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.runtime.accounts import record_batch, record_relay, record_run_through
from flowserve.runtime.alone import Occupancy
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.instance import break_off, gather
from flowserve.runtime.one_processor import OneProcessor
from flowserve.runtime.parameters import take_parameters
from flowserve.runtime.process_link import Link, Told
from flowserve.runtime.process_outputs import Garbled
from flowserve.runtime.relay_answers import RanThrough, made, ran_through, reached
from flowserve.runtime.relay_paths import OnItsWay, Path, Runner
from flowserve.scheduling.relays import Relay, RelayingDispatcher, Way

log = logging.getLogger("flowserve.runtime")

# Of a larger batch each request pays little for a hop, and more is done beside each other if the steps are.
MEMBERS_MAX: Final = 8
# One that is waited for in place is waited for so long.
_WAIT_MS: Final = 2
# So long a relay is left alone; nothing that is quick takes it.
OVERDUE_NS: Final = SECOND_NS // 10
_LOOK_S: Final = 0.05
_PATHS_MAX: Final = 1024  # of one way
# Of the batches that go on relays; those that do not are numbered by each link, from 1.
_FIRST_NUMBER: Final = 1 << 48


class Relays:
    """Those of a server. Touched on the loop."""

    private_only = False
    members_min = 1

    def __init__(self, occupancy: Occupancy, one_processor: OneProcessor, clock: ClockNs) -> None:
        self._occupancy = occupancy
        self._one_processor = one_processor
        self._clock = clock
        self._numbers = count(_FIRST_NUMBER)
        self._active: dict[int, OnItsWay] = {}
        self._begun = trio.Event()  # set where there is something to look after
        self._awaited: OnItsWay | None = None  # in place, before scheduling knows of it
        self._dispatcher: RelayingDispatcher
        self._poke: Callable[[], None]

    def serve(self, dispatcher: RelayingDispatcher, poke: Callable[[], None]) -> None:
        """Whose batches these are, and what makes it look again. Before the first."""
        self._dispatcher = dispatcher
        self._poke = poke

    def carries(self, instance: object) -> bool:
        """As any carrier (carriers.py) says."""
        return isinstance(instance, Runner)

    def start(self, relay: Relay) -> bool:
        """Send it to its first process. False: it is not worth it, or cannot be now."""
        members = len(relay.batch.tickets)
        if members > MEMBERS_MAX or (members == 1 and self._occupancy.is_quiet):
            return False
        path = self.path(relay.way, relay.instances)
        if path is None or not path.is_quick:
            return False
        sent = self.send(path, gather(relay.batch.tickets, path.first_inputs))
        if sent is None:
            return False  # by itself it is told what is wrong
        self.begin(sent, relay)
        return True

    def path(self, way: Way, instances: Sequence[Runner]) -> Path | None:
        """That of a way through these instances; None where a process has ended that will not be started again."""
        paths, key = way.paths, tuple(instances)
        path: Path | None = paths.get(key)
        if path is None or not path.is_whole:
            if len(paths) >= _PATHS_MAX:
                paths.clear()
            path = paths[key] = Path(next(self._numbers), way, instances, self._one_processor)
            if not path.is_whole:
                return None
        return path

    def send(self, path: Path, work: Work) -> OnItsWay | None:
        """Send a batch on its way; None where that cannot be now, with nothing done. It comes back only after `begin`,
        or to who waits for it.
        """
        sent = OnItsWay(next(self._numbers), path, self._clock())
        try:
            links = path.prepare()
            for link in links[1:]:
                sent.news.append(link.news())
            sent.expected = links[0].send_relay(work, sent.number, (path.number, (), (), sent.news[1:]))
        except Exception as error:  # whatever it is, the batch goes by itself, and is told there what is wrong
            if not isinstance(error, OSError | FlowserveError):
                log.exception("a batch cannot be sent from process to process")
            for i in range(len(sent.news)):
                self._untell(sent, i)
            return None
        return sent

    def wait_for(self, sent: OnItsWay) -> RanThrough | None:
        """Its stops, and what the last one made, where it comes back at once and has run through with nothing to say of
        it. None: it is to begin, and what came back is told then.
        """
        is_back = sent.path.comes_back(_WAIT_MS)
        now_ns = self._clock()
        sent.path.waited_for(sent.started_ns, now_ns)
        if not is_back:
            return None
        link, runner = sent.path.links[-1], sent.path.runners[-1]
        self._awaited = sent
        try:
            while link.read() is True:
                pass
            if sent.heard is None:
                return None
            return ran_through(sent, *sent.heard, now_ns)
        except EOFError:
            return None  # whoever watches the process is told
        except Garbled as error:
            sent.heard = None
            runner.wrong(str(error))
            return None
        finally:
            self._awaited = None

    def begin(self, sent: OnItsWay, relay: Relay) -> None:
        """Scheduling knows of one that was sent."""
        sent.relay = relay
        relay.batch.started_ns = sent.started_ns
        for runner in sent.path.runners:
            runner.running = relay.batch
            runner.relay = sent
        self._active[sent.number] = sent
        if not self._begun.is_set():
            self._begun.set()
        self._occupancy.begins(relay.batch)
        if sent.heard is not None:
            try:
                self._came_back(sent, *sent.heard)
            except Garbled as error:
                sent.path.runners[-1].wrong(str(error))
            except Exception as error:
                self._broke(sent, error)
            self._poke()  # others may have been asked for meanwhile

    def told(self, runner: Runner, number: int, told: Told) -> None:
        """A process said something of a relay. Raises Garbled."""
        if self._awaited is not None and number == self._awaited.number and not isinstance(told, bool):
            self._awaited.heard = told
            return
        sent = self._active.get(number)
        if sent is None:
            return  # it is over since that was asked
        if not isinstance(told, bool):
            try:
                self._came_back(sent, *told)
            except Garbled:
                raise
            except Exception as error:
                self._broke(sent, error)
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

    def _came_back(self, sent: OnItsWay, passed: Sequence[int], answer: bytes) -> None:
        """`passed` are words of those that it passed; the one after them answered, if there is an answer."""
        links = sent.path.links
        relay, rows = sent.relay, sent.expected.rows
        if relay.way.is_private and not sent.is_lost:
            now_ns = self._clock()
            through = ran_through(sent, passed, answer, now_ns)
            if through is not None:
                stops, last = through
                self._end(sent)
                record_run_through(relay, [sent.expected.packed.copied], stops, now_ns)
                self._dispatcher.relayed(relay, last.outputs, now_ns)
                return
        count = reached(sent, passed, answer)
        results = made(sent, passed)
        outcome = sent.outcome
        if outcome is None and answer and links[count - 1].is_open:
            link = links[count - 1]
            expected = link.expected(sent.number, rows, results) if count > 1 else sent.expected
            outcome = link.outcome(expected, answer)
        for i in range(count, len(links)):
            self._untell(sent, i)
        self._end(sent)
        if sent.is_lost:
            return
        if len(results) < count - bool(answer) or (answer and outcome is None):
            # One that had done its share died meanwhile.
            name = sent.path.runners[len(results)].name
            self._fail(sent, len(results), InstanceDied(f"instance '{name}': its process ended while others went on"))
        elif isinstance(outcome, Results):
            self._returned(sent, [*results, outcome], None)
        else:
            self._returned(sent, results, outcome)

    def _returned(self, sent: OnItsWay, results: list[Results], error: FlowserveError | None) -> None:
        now_ns = self._clock()
        relay = sent.relay
        before_ns = sent.started_ns
        for i, one in enumerate(results):
            if not before_ns <= one.gathered_ns <= one.computed_ns <= now_ns:
                one.gathered_ns = min(max(one.gathered_ns, before_ns), now_ns)
                one.computed_ns = min(max(one.computed_ns, one.gathered_ns), now_ns)
            sent.path.runners[i].pace.took(one.computed_ns - before_ns)
            before_ns = one.computed_ns
        record_relay(relay, results, now_ns)
        for i, one in enumerate(results):
            if one.parameters:
                one.errors = take_parameters(relay.stop(i), one.parameters, one.errors)
        outcomes = [(one.outputs, one.errors) for one in results]
        if not self._dispatcher.relay_returned(relay, outcomes, error, now_ns) and error is not None:
            failed = relay.stop(len(results), before_ns)
            record_batch(failed.queue.observer, failed, error, now_ns)

    def _broke(self, sent: OnItsWay, error: Exception) -> None:
        """A mistake of ours about one that is back: whoever of it is not answered yet fails."""
        if sent.number in self._active:
            self._end(sent)
        break_off(self._dispatcher, sent.relay.batch, error)
        self._poke()

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
