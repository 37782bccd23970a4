"""Relays through instances of the server's own process: what those on the loop (relays_here.py) and those on a GPU
(relays_on_gpu.py) have in common.

Decided here: how far one goes, how each stop is given what the ones before it made, as the one array that it lies in,
and what is told of it when it is back. Who runs it, and on which thread, is not known here.
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
from flowserve.runtime.instance import LocalHost, as_told, note_failure
from flowserve.runtime.parameters import take_parameters
from flowserve.scheduling.relays import Relay, RelayingDispatcher, Way

_GONE: Final = np.empty(0)


class Passage:
    """How far one came: what its stops `made`, and the `error` of the one after them, if that raised."""

    __slots__ = ("error", "made")

    def __init__(self) -> None:
        self.made: list[Results] = []
        self.error: FlowserveError | None = None


def pass_through(
    way: Way, hosts: Sequence[LocalHost], rows: int, work: Work, prepare: Callable[[int, Work], Work] | None = None
) -> Passage:
    """Run a batch of so many rows through the way's stops, until there is something to say of its members. `work` is
    the first stop's; `prepare` gets that of each other one, by its number.
    """
    passage = Passage()
    made, last = passage.made, len(hosts) - 1
    for i, host in enumerate(hosts):
        if i:
            following = _following(way, i, work, made, may_write=host.may_write)
            if following is None:
                break
            work = following if prepare is None else prepare(i, following)
        work.keeps_whole = i < last
        outcome = host.run_here(work, rows)
        if not isinstance(outcome, Results):
            passage.error = outcome
            del outcome  # its frames hold this one, and with it the batch
            break
        made.append(outcome)
        if outcome.errors or outcome.parameters:
            break  # there is something to say of its members before anybody goes on
        if 0 < i < last:
            _let_go(way, i, made, work.rows)
    return passage


class Arrivals:
    """Tells of relays that are back. Touched on the loop."""

    def __init__(self, dispatcher: RelayingDispatcher, take_in: Callable[..., None], clock: ClockNs) -> None:
        """`take_in` calls what tells the dispatcher of a batch, with the moment and what is to be told."""
        self._dispatcher = dispatcher
        self._take_in = take_in
        self._clock = clock

    def tell(self, relay: Relay, passage: Passage) -> None:
        """Its instances are free now, and its requests are answered or go on to their next steps."""
        now_ns = self._clock()
        made, last = passage.made, len(relay.instances) - 1
        self._dispatcher.set_free(relay, range(last + 1))
        if len(made) > last and not made[-1].errors and not made[-1].parameters:
            stops = [(one.gathered_ns, one.computed_ns, one.placed) for one in made]
            record_run_through(relay, [one.copied for one in made], stops, now_ns)
            self._take_in(now_ns, self._dispatcher.relayed, relay, made[-1].outputs)
        else:
            error, passage.error = passage.error, None  # whose frames hold the passage
            self._came_back(relay, made, error, now_ns)

    def _came_back(self, relay: Relay, made: Sequence[Results], error: FlowserveError | None, now_ns: int) -> None:
        """It ended early, or there is something to say of its members."""
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
