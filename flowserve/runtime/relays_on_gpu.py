"""Batches that go from step to step on one GPU, on one thread.

Decided here: when that is worth it, and where it runs: on the first instance's thread, while those of the others have
nothing to do. Each step puts its work on the stream of its own instance and does not wait for it, so what lies between
two steps of a chain is a few calls, where handing the batch to the loop and from there to another thread takes as long
as a small model. Worth it is it while all of them together are quick. A way that takes long holds instances that have
done their share, and a hop is nothing beside it.

Which batches go on relays is decided in scheduling/relays.py; how one runs is relay_runs.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from flowserve.backends.base import Work
from flowserve.backends.device import DeviceWork
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.device_host import DeviceHost, on_device, readers
from flowserve.runtime.instance import Returns, break_off
from flowserve.runtime.pump import Bursts
from flowserve.runtime.relay_runs import Arrivals, Passage, pass_through
from flowserve.scheduling.relays import Relay, RelayingDispatcher, Way

QUICK_NS: Final = 5_000_000  # some twenty times what a hop takes
SKIPPED: Final = 64  # so many batches of a way that was not quick go step by step before it is tried again


class RelaysOnGpu:
    """Those of a server. Touched on the loop."""

    private_only = True
    members_min = 1

    def __init__(
        self,
        dispatcher: RelayingDispatcher,
        arrivals: Arrivals,
        token: trio.lowlevel.TrioToken,
        pump: Bursts,
        poke: Callable[[], None],
        clock: ClockNs,
    ) -> None:
        self._dispatcher = dispatcher
        self._arrivals = arrivals
        self._poke = poke
        self._clock = clock
        self._returns: Returns[tuple[Relay, Passage | Exception]] = Returns(token, self._take_in, pump)

    def carries(self, instance: object) -> bool:
        """As any carrier (carriers.py) says."""
        return type(instance) is DeviceHost and instance.is_of_any_thread

    def start(self, relay: Relay) -> bool:
        """Hand it to its first instance's thread. False: it is not worth it, or cannot be, and nothing was done."""
        hosts: Sequence[DeviceHost] = relay.instances
        first, batch = hosts[0], relay.batch
        if any(host.place != first.place for host in hosts):
            return False
        course = _course(relay.way)
        if course.skips:
            course.skips -= 1
            return False
        try:
            work = first.gather(batch.tickets)
            read_at = course.readers(relay)
        except MemoryError:
            return False  # by itself it is told what is wrong
        passing = threading.Lock()
        passing.acquire()
        for host in hosts[1:]:
            host.running = batch
            host.elsewhere = passing
        run = partial(_run, relay, hosts, work, read_at, passing, self._clock)
        first.run_on_thread(batch, run, lambda passage: self._returns.add((relay, passage)))
        return True

    def _take_in(self, returned: tuple[Relay, Passage | Exception]) -> None:
        relay, passage = returned
        batch = relay.batch
        for host in relay.instances[1:]:
            host.running = None
        try:
            if isinstance(passage, Exception):
                raise passage
            if passage.made and passage.made[-1].computed_ns - batch.started_ns > QUICK_NS:
                _course(relay.way).skips = SKIPPED
            self._arrivals.tell(relay, passage)
        except Exception as error:  # a mistake of ours
            del passage, returned  # its frames hold this one
            if not batch.is_back:
                self._dispatcher.set_free(relay, range(len(relay.instances)))
            break_off(self._dispatcher, batch, error)
        self._poke()


class _Course:
    """What is known of a way. `skips`: so many batches do not go on it."""

    __slots__ = ("_readers", "skips")

    def __init__(self) -> None:
        self._readers: list[list[int]] | None = None
        self.skips = 0

    def readers(self, relay: Relay) -> list[list[int]]:
        """Where each output of each stop is read."""
        if self._readers is None:
            flow = relay.batch.tickets[0].flow  # all of a way's have the same plan and the same route
            self._readers = [readers(flow, node) for node in relay.way.nodes]
        return self._readers


def _course(way: Way) -> _Course:
    course: _Course | None = way.paths.get(())
    if course is None:
        course = way.paths[()] = _Course()
    return course


def _run(
    relay: Relay,
    hosts: Sequence[DeviceHost],
    work: Work,
    read_at: Sequence[Sequence[int]],
    passing: threading.Lock,
    clock: ClockNs,
) -> Passage | Exception:
    """On the thread, which lets go of `passing` in the end."""
    relay.batch.started_ns = clock()
    count = len(work.rows)

    def prepare(i: int, following: Work) -> DeviceWork:
        return on_device(following, [[where] * count for where in read_at[i]])

    try:
        return pass_through(relay.way, hosts, relay.batch.rows, work, prepare)
    except Exception as error:  # a mistake of ours: behind a dead thread requests would wait for ever
        return error
    finally:
        passing.release()
