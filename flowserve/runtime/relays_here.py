"""Batches that go from step to step on the loop, as one piece.

Decided here: when that is worth it. It is where every model on the way would run its batch on the loop anyway, and
nobody else is to be looked at first: a batch that comes by with others may be joined by them. Nothing runs beside it,
so its instances are free again before anybody else hears of it. What each step makes is handed on as one array,
wherever it is one: no tensor, ticket or queue is made for a request between the steps, which would cost as much as a
cheap model.

Which batches go on relays is decided in scheduling/relays.py; how one runs is relay_runs.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowserve.backends.base import Work
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import LocalHost, break_off, gather
from flowserve.runtime.relay_runs import Arrivals, pass_through
from flowserve.scheduling.relays import Relay, RelayingDispatcher


class RelaysHere:
    """Those of a server. Touched on the loop."""

    private_only = True
    members_min = 2  # one alone is through its steps as soon, by code that is warm

    def __init__(
        self, dispatcher: RelayingDispatcher, arrivals: Arrivals, poke: Callable[[], None], clock: ClockNs
    ) -> None:
        self._dispatcher = dispatcher
        self._arrivals = arrivals
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
        relay.batch.started_ns = self._clock()
        self._arrivals.tell(relay, pass_through(relay.way, hosts, relay.batch.rows, work))
