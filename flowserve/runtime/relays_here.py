"""Batches that go from step to step on the loop, as one piece.

Decided here: when that is worth it, how a stop is given what the ones before it made, and what is told of it. Worth it
is it where every model on the way would run its batch on the loop anyway, and nobody else is to be looked at first: a
batch that comes by with others may be joined by them. Nothing runs beside it, so its instances are free again before
anybody else hears of it. What each step makes is handed on as one array, wherever it is one: no tensor, ticket or queue
is made for a request between the steps, which would cost as much as a cheap model.

Which batches go on relays is decided in scheduling/relays.py; those that go through processes are in relays.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from flowserve.backends.base import Results, Work
from flowserve.errors import FlowserveError
from flowserve.memory.columns import Together
from flowserve.runtime.accounts import record_relay, record_run_through
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import LocalHost, as_told, break_off, gather, note_failure
from flowserve.runtime.parameters import take_parameters
from flowserve.scheduling.relays import Relay, RelayingDispatcher, Way

_GONE: Final = np.empty(0)


class RelaysHere:
    """Those of a server. Touched on the loop."""

    private_only = True
    members_min = 2  # one alone is through its steps as soon, by code that is warm

    def __init__(
        self, dispatcher: RelayingDispatcher, take_in: Callable[..., None], poke: Callable[[], None], clock: ClockNs
    ) -> None:
        """`take_in` calls what tells the dispatcher of a batch, with the moment and what is to be told."""
        self._dispatcher = dispatcher
        self._take_in = take_in
        self._poke = poke
        self._clock = clock

    def carries(self, instance: object) -> bool:
        """As any carrier (carriers.py) says."""
        return type(instance) is LocalHost and instance.may_run_inline

    def start(self, relay: Relay) -> bool:
        """Run it. False: it is not worth it, or cannot be, and nothing was done."""
        way, batch = relay.way, relay.batch
        hosts: Sequence[LocalHost] = relay.instances
        if self._dispatcher.is_due:
            return False
        for host in hosts:
            if not host.is_inline(batch.rows):
                return False
        try:
            work = gather(batch.tickets, range(len(way.nodes[0].inputs)), may_write=hosts[0].may_write)
        except MemoryError:
            return False  # by itself it is told what is wrong
        try:
            self._run(relay, hosts, work)
        except Exception as error:  # a mistake of ours
            if not batch.is_back:
                self._dispatcher.set_free(relay, range(len(hosts)))
            break_off(self._dispatcher, batch, error)
            self._poke()
        return True

    def _run(self, relay: Relay, hosts: Sequence[LocalHost], work: Work) -> None:
        way, batch = relay.way, relay.batch
        rows, last = batch.rows, len(hosts) - 1
        batch.started_ns = self._clock()
        made: list[Results] = []
        error: FlowserveError | None = None
        for i, host in enumerate(hosts):
            if i:
                following = _following(way, i, work, made, may_write=host.may_write)
                if following is None:
                    break
                work = following
            work.keeps_whole = i < last
            outcome = host.run_here(work, rows)
            if not isinstance(outcome, Results):
                error = outcome
                break
            made.append(outcome)
            if outcome.errors or outcome.parameters:
                break  # there is something to say of its members before anybody goes on
            if 0 < i < last:
                _let_go(way, i, made, work.rows)
        now_ns = self._clock()
        self._dispatcher.set_free(relay, range(len(hosts)))
        if len(made) > last and not made[-1].errors and not made[-1].parameters:
            stops = [(one.gathered_ns, one.computed_ns, one.placed) for one in made]
            record_run_through(relay, [one.copied for one in made], stops, now_ns)
            self._take_in(now_ns, self._dispatcher.relayed, relay, made[-1].outputs)
        else:
            self._came_back(relay, made, error, now_ns)
        del outcome, error  # its frames hold this one, and with it the batch

    def _came_back(self, relay: Relay, made: Sequence[Results], error: FlowserveError | None, now_ns: int) -> None:
        """It ends early, or there is something to say of its members."""
        record_relay(relay, made, now_ns)
        for i, one in enumerate(made):
            if one.parameters:
                one.errors = take_parameters(relay.stop(i), one.parameters, one.errors)
        outcomes = [(one.outputs, one.errors) for one in made]
        failed = None if error is None else relay.stop(len(made), made[-1].computed_ns if made else 0)
        told = None if error is None else as_told(error)
        is_tried_again = self._dispatcher.relay_returned(relay, outcomes, told, now_ns)
        if failed is not None and error is not None:
            note_failure(failed, error, now_ns, is_tried_again=is_tried_again)


def _following(way: Way, i: int, before: Work, made: Sequence[Results], *, may_write: bool) -> Work | None:
    """What the `i`-th stop is given. None where somebody lacks one of its inputs."""
    count = len(before.rows)
    columns = [made[stop].outputs[j] for stop, j in way.reads[i - 1]]
    for column in columns:
        if type(column) is list and None in column:
            return None
    writable = [[is_last] * count for is_last in way.last_reads[i - 1]] if may_write else None
    return Work(columns, before.rows, before.requests, [way.nodes[i].wanted] * count, writable)


def _let_go(way: Way, i: int, made: Sequence[Results], rows: list[int]) -> None:
    """The `i`-th stop has run, and there is nothing to say of it: what it was the last to read is held no longer.
    Scheduling may still ask for the rows.
    """
    for (stop, j), is_last in zip(way.reads[i - 1], way.last_reads[i - 1], strict=True):
        if is_last:
            made[stop].outputs[j] = Together(_GONE, rows)  # type: ignore[call-overload]  # it is read as a list
