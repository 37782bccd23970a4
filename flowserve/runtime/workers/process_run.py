"""One batch in worker processes: its route, the replies about it, and its outcome.

Decides the outcome of a batch (`ProcessRun`): the results of each stage of its route, the instances that it has
released, and whether it was lost with a process that ended. The process at which a batch returns sends the only reply.
To return a batch early, or if a process has ended, the server sends CANCEL to every process of the route; each replies
whether it ran the batch. A process that did not may no longer run it. The instance of each that has replied or ended is
released. The batch was lost if the process after the last one that ran it has ended; else its reply will arrive.

Decides when a route over processes is announced to them: once, with the first batch that takes it (`route_number`).

Does not know how a process is started, or what follows its end, nor queues or callers. Called by process.py, on the
event loop.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, Protocol, cast

from flowserve.backends.base import NO_ERRORS, NO_PARAMETERS, Results
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import (
    PASSED_AT,
    STAGE_WORDS,
    Garbled,
    RouteHop,
    Stage,
    decode_done_text,
    decode_error,
    decode_members,
    encode_route,
    pack,
    read_passed,
)
from flowserve.errors import FlowserveError, InstanceDied, Internal
from flowserve.memory.segment import Lease
from flowserve.runtime.ipc.channel import Channel, Unseen
from flowserve.runtime.ipc.tensors import InputPacker, Members, OutputReader, Packed
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import Route

_route_numbers = count(1)
_number_of = attrgetter("number")


class StageWorker(Protocol):
    """The worker of one stage of a batch: a `ProcessWorker`. `current`: the batch in its process, or sent to it."""

    name: str
    reader: OutputReader
    packer: InputPacker
    channel: Channel | None
    current: ProcessRun | None
    has_answered: bool

    def read(self) -> None:
        """Read the messages of its process, until a reply or its end."""

    def kill_for(self, what: str) -> None:
        """Kill its process, which sent an invalid message."""


@dataclass(slots=True, eq=False)
class ProcessRun:
    """A batch that was sent, and the workers of its stages; one without a route. `updates[i]` was sent with it to stage
    i.
    """

    number: int
    batch: Batch
    workers: Sequence[StageWorker]
    channels: Sequence[Channel]
    packed: Packed
    rows: Sequence[int]
    updates: Sequence[Sequence[int]]
    _owed: dict[int, int] = field(default_factory=dict)  # by stage: unanswered CANCELs
    _acknowledged: dict[int, Stage] = field(default_factory=dict)
    _dead: dict[int, str] = field(default_factory=dict)  # stages whose process has ended, and how

    # ------------------------------------------------------------------ its reply

    def outcome(self, worker: StageWorker, kind: int, words: Sequence[int], text: bytes, now_ns: int) -> Outcome:
        """Read the reply of a worker's process. Raises Garbled."""
        passed: Sequence[Stage] = ()
        at = PASSED_AT
        if len(self.workers) > 1:
            passed, at = read_passed(words, at, words[2])
        elif words[2]:
            raise Garbled("a batch without a route that passed stages")
        k = len(passed)  # the stage that replies
        if k >= len(self.workers) or self.workers[k] is not worker:
            raise Garbled(f"a reply to batch {self.number}, which is not there")
        results, error, kept = None, None, 0
        try:
            if kind == protocol.DONE:  # inline: a function would be one more call for each batch
                kept, gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + STAGE_WORDS]
                block = self.channels[k].block(segment, offset, nbytes)
                reader, rows = worker.reader, self.rows
                told, notes = decode_done_text(text, reader.names, len(rows)) if text else (None, None)
                unlike: Collection[str] = () if notes is None else notes.unlike
                outputs, placed = reader.read(words, at + STAGE_WORDS, block, rows, unlike)
                copied, taken = ((), ()) if k else (self.packed.copied, self.packed.taken)
                results = Results(
                    outputs, NO_ERRORS, gathered_ns, computed_ns, copied, placed, NO_PARAMETERS, (), taken, notes
                )
                if told:
                    decode_members(told, results, len(rows))
            elif kind == protocol.FAILED:
                kept = words[at]
                error = decode_error(json.loads(text))
            elif not passed:
                raise Garbled("a batch that was sent to it was not run")
        except Unseen as unseen:  # the process has replied, but its outputs cannot be read
            error = Internal(str(unseen))
        if self.batch.route is not None:
            return self._route_outcome(passed, results, error, now_ns, kept=bool(kept), is_plain=not text)
        if kept:
            self._hold(0, ())
        if results is None:
            assert error is not None
            return error
        if not self.batch.started_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
            _limit_times(results, self.batch.started_ns, now_ns)
        return results

    def _route_outcome(
        self,
        passed: Sequence[Stage],
        results: Results | None,
        error: FlowserveError | None,
        now_ns: int,
        *,
        kept: bool,
        is_plain: bool,
    ) -> Passed:
        """The outcome of a batch that has passed some stages of its route and returns from the next one, with its
        `results` or `error`; with neither if that stage did not run it. `kept`: its model keeps inputs; `is_plain`: its
        reply has no text.
        """
        k = len(passed)
        is_complete = results is not None and k == len(self.workers) - 1 and is_plain and not self.batch.wants_outputs
        leases: Sequence[Lease | FlowserveError | None] = ()
        if passed and not (is_complete and not kept and self._give_back(passed, k)):
            leases = self._leases(passed, k)
        if kept:
            self._hold(k, leases)
        if k + 1 < len(self.workers):
            self._restore_updates(k + 1)
        outcome = self._passed(passed, leases, now_ns, has_outputs=not is_complete)
        if outcome.error is not None:
            return outcome
        if results is not None:
            before_ns = outcome.made[-1].computed_ns if passed else self.batch.started_ns
            if not before_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                _limit_times(results, before_ns, now_ns)
            outcome.made.append(results)
        outcome.error = error
        return outcome

    def _passed(
        self,
        passed: Sequence[Stage],
        leases: Sequence[Lease | FlowserveError | None],
        now_ns: int,
        *,
        has_outputs: bool,
    ) -> Passed:
        """The results of the passed stages, with the outputs that are read. Ends with an error at the first stage
        whose outputs cannot be read.
        """
        made: list[Results] = []
        before_ns = self.batch.started_ns
        for i, stage in enumerate(passed):
            outputs: Sequence[Members] = ()
            if has_outputs:
                lease = leases[i]
                if isinstance(lease, FlowserveError):
                    return Passed(made, lease)
                try:
                    outputs = self.workers[i].reader.read_stage(stage, lease, self.rows)
                except Exception as error:
                    return Passed(made, self._invalid(i, error))
            gathered_ns, computed_ns = stage.gathered_ns, stage.computed_ns
            placed = []
            for _, nbytes, _ in stage.outputs:
                placed.append(nbytes)  # a comprehension is one more call
            copied, taken = ((), ()) if i else (self.packed.copied, self.packed.taken)
            results = Results(outputs, NO_ERRORS, gathered_ns, computed_ns, copied, placed, NO_PARAMETERS, (), taken)
            if not before_ns <= gathered_ns <= computed_ns <= now_ns:
                _limit_times(results, before_ns, now_ns)
            before_ns = results.computed_ns
            made.append(results)
            self.workers[i].has_answered = True
        return Passed(made)

    def _invalid(self, i: int, error: Exception) -> InstanceDied:
        """The error of stage i, whose process reported invalid outputs: the process is killed, unless it ended before
        it could announce their memory.
        """
        worker = self.workers[i]
        if i in self._dead:
            return InstanceDied(self._dead[i])
        what = str(error) if isinstance(error, Garbled) else f"{type(error).__name__}: {error}"
        if worker.channel is self.channels[i]:
            worker.kill_for(what)
        return InstanceDied(f"model '{worker.reader.model}', instance '{worker.name}': {killed_for(what)}")

    # ------------------------------------------------------------------ its memory

    def _give_back(self, passed: Sequence[Stage], last: int) -> bool:
        """Free the blocks of the passed stages, which the server does not read. Does nothing and returns False if a
        model keeps reading one, or if a later process may not have attached its segment.
        """
        for i, stage in enumerate(passed):
            if stage.kept:
                return False
            for j in range(i + 1, last + 1):
                if stage.segment and stage.segment not in self.channels[j].attached:
                    return False
        for i, stage in enumerate(passed):
            if stage.segment:
                self.channels[i].free_blocks.append((stage.segment, stage.offset))
        return True

    def _leases(self, passed: Sequence[Stage], last: int) -> list[Lease | FlowserveError | None]:
        """The output block of each passed stage, or why it cannot be read; it is free again when its lease ends. Stages
        up to `last` have its memory attached.
        """
        leases: list[Lease | FlowserveError | None] = []
        for i, stage in enumerate(passed):
            nbytes = max([start + size for start, size, _ in stage.outputs], default=0)
            lease: Lease | FlowserveError | None
            if nbytes and not self.channels[i].knows(stage.segment):  # announced on a socket that is not read yet
                self.workers[i].read()
            try:
                lease = self.channels[i].block(stage.segment, stage.offset, nbytes)
            except Unseen as unseen:
                lease = Internal(str(unseen))
            except Exception as error:
                lease = self._invalid(i, error)
            leases.append(lease)
            if isinstance(lease, Lease):
                for j in range(i + 1, last + 1):
                    self.channels[j].has_attached(lease.segment)
            if stage.kept:
                self._hold(i, leases[:i])
        return leases

    def _hold(self, i: int, leases: Sequence[Any]) -> None:
        """Keep the inputs of stage i, which its model still reads."""
        self.channels[i].hold(self.number, leases if i else self.packed.held)

    def _restore_updates(self, first: int) -> None:
        """Restore the updates of the stages from `first` on, which the batch did not reach."""
        restore_updates(self.channels[first:], self.updates[first:])

    # ------------------------------------------------------------------ leaving its route

    def cancel(self) -> None:
        """Ask every process of the route whether the batch was run there; if not, it no longer may be."""
        for i, channel in enumerate(self.channels):
            if i not in self._dead:
                self._owed[i] = self._owed.get(i, 0) + 1
                channel.tell(pack(protocol.CANCEL, (self.number,)))

    def cancelled(self, worker: StageWorker, words: Sequence[int]) -> None:
        """Process an answer to CANCEL: the instance is free. Raises Garbled."""
        i = self.workers.index(worker)
        passed, _ = read_passed(words, PASSED_AT, words[2])
        if not self._owed.get(i):
            raise Garbled("an answer to a CANCEL that was not sent")
        self._owed[i] -= 1
        if passed:
            self._acknowledged[i] = passed[0]

    def died(self, worker: StageWorker, how: str) -> None:
        """Record that the process of a worker has ended."""
        self._dead[self.workers.index(worker)] = how
        if self.batch.route is not None:
            self.cancel()

    def lost(self, now_ns: int) -> Outcome | None:
        """The outcome, if it is known that the batch was in a process that ended; else None."""
        if not self._dead:
            return None
        if self.batch.route is None:
            return InstanceDied(self._dead[0])
        if any(count for i, count in self._owed.items() if i not in self._dead):
            return None
        i = max([-1, *self._acknowledged]) + 1
        if i not in self._dead:
            return None
        passed: list[Stage] = []
        while len(passed) < i and len(passed) in self._acknowledged:
            passed.append(self._acknowledged[len(passed)])
        leases = self._leases(passed, i)
        self._restore_updates(i + 1)
        outcome = self._passed(passed, leases, now_ns, has_outputs=True)
        if outcome.error is None:  # the first stage without reported results
            outcome.error = InstanceDied(self._dead.get(len(passed), self._dead[i]))
        return outcome


def restore_updates(channels: Sequence[Channel], updates: Sequence[Sequence[int]]) -> None:
    """Undo `Channel.take_update`: these updates were not sent."""
    for channel, update in zip(channels, updates, strict=False):
        channel.restore_update(update)


def route_number(route: Route, channels: Sequence[Channel], workers: Sequence[StageWorker]) -> int:
    """The number of a route over these workers' processes. A new route is announced to them first, and routes over a
    process that has ended are forgotten.
    """
    known = cast("dict[tuple[int, ...], tuple[int, Sequence[Channel]]] | None", route.worker_data)
    if known is None:
        known = route.worker_data = {}
    key = tuple(map(_number_of, channels))
    found = known.get(key)
    if found is None:
        ended = [one for one, (_, over) in known.items() if any(channel.is_closed for channel in over)]
        gone = [known.pop(one)[0] for one in ended]
        found = next(_route_numbers), channels
        for i, read in enumerate(route.reads):
            here, following = channels[i], channels[i + 1]
            here.introduce(following)
            wanted = workers[i + 1].packer.indices(route.nodes[i + 1].wanted)
            here.tell(encode_route(found[0], RouteHop(following.number, wanted, read), gone))
        known[key] = found  # not earlier: the call raises if a socket cannot be sent
    return found[0]


def killed_for(what: str) -> str:
    """How a process ended that sent an invalid message."""
    return f"its process sent an invalid message ({what}); it was killed"


def _limit_times(results: Results, begun_ns: int, now_ns: int) -> None:
    """Limit the times of a process to their possible order. All processes have the same clock, but a model's code may
    have written these times.
    """
    results.gathered_ns = min(max(results.gathered_ns, begun_ns), now_ns)
    results.computed_ns = min(max(results.computed_ns, results.gathered_ns), now_ns)
