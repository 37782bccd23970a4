"""One batch in worker processes, from its start to its reply.

Decides the outcome of the batch: the results of each stage of its route, the instances that it has released, and
whether it was lost with a process that ended. The process at which a batch returns sends the only reply. To return a
batch early, or if a process has ended, the server sends CANCEL to every process of the route; each replies whether it
ran the batch. A process that did not may no longer run it, and each that has replied is free. The batch was lost if the
process after the last one that ran it has ended; else its reply is still on the way.

Does not know sockets or queues. Made and called by process.py, on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from flowserve.backends.base import Results
from flowserve.backends.worker.protocol import CANCEL, DONE, FAILED, decode_error, pack
from flowserve.backends.worker.run_message import News, Stage, read_passed
from flowserve.errors import FlowserveError, InstanceDied, Internal
from flowserve.memory.column import Column
from flowserve.memory.segment import Lease
from flowserve.runtime.ipc.channel import Channel, Unseen
from flowserve.runtime.ipc.decoder import Garbled, OutputReader
from flowserve.runtime.ipc.encoder import Packed
from flowserve.runtime.workers.outcome import Outcome, Passed
from flowserve.scheduling.batch import Batch

# The common case of a batch without facts about its members. Results are not modified.
_NONE: Final[Mapping[int, Any]] = {}


class StageWorker(Protocol):
    """The worker of a stage. `reader` reads the outputs of its model."""

    reader: OutputReader

    def read(self) -> None:
        """Read the messages that its process has sent."""


class ProcessRun:
    """A batch and the workers of its stages; one without a route. `news[i]` was sent with it to stage i."""

    __slots__ = ("_acknowledged", "_dead", "_owed", "batch", "channels", "news", "number", "packed", "rows", "workers")
    packed: Packed
    rows: Sequence[int]

    def __init__(self, number: int, batch: Batch, workers: Sequence[StageWorker], channels: Sequence[Channel]) -> None:
        self.number = number
        self.batch = batch
        self.workers = workers
        self.channels = channels
        self.news: Sequence[News] = ()
        self._owed: dict[int, int] = {}  # by stage: CANCELs that are not answered yet
        self._acknowledged: dict[int, Stage] = {}
        self._dead: dict[int, str] = {}  # stages whose process has ended, and how

    def stage_of(self, worker: StageWorker) -> int:
        """Which stage a worker is."""
        return self.workers.index(worker)

    # ------------------------------------------------------------------ its reply

    def outcome(self, worker: StageWorker, kind: int, words: Sequence[int], text: bytes, now_ns: int) -> Outcome:
        """Read the reply of a worker's process. Raises Garbled."""
        passed: Sequence[Stage] = ()
        if len(self.workers) == 1:
            if words[2]:
                raise Garbled("a batch without a route that passed stages")
            at = 3
        else:
            passed, at = read_passed(words, 2)
        k = len(passed)
        if k >= len(self.workers) or self.workers[k] is not worker:
            raise Garbled(f"a reply to batch {self.number}, which is not there")
        results, error, kept = None, None, 0
        try:
            if kind == DONE:
                kept = words[at]
                results = self._results(k, words, at + 1, text)
            elif kind == FAILED:
                kept = words[at]
                error = decode_error(json.loads(text))
            elif not passed:
                raise Garbled("a batch that was sent to it was not run")
        except Unseen as unseen:  # it has replied, and its outputs cannot be read
            error = Internal(str(unseen))
        is_complete = results is not None and k == len(self.workers) - 1 and not text and not self.batch.wants_outputs
        leases: Sequence[Lease | FlowserveError | None] = ()
        if passed and not (is_complete and not kept and self._give_back(passed, k)):
            leases = self._leases(passed, k)
        if kept:
            self._hold(k, leases)
        for i in range(k + 1, len(self.news)):
            self.channels[i].put_back(self.news[i])
        if self.batch.route is None:
            if results is None:
                assert error is not None
                return error
            if not self.batch.started_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                _in_order(results, self.batch.started_ns, now_ns)
            return results
        outcome = self._made(passed, leases, now_ns, has_outputs=not is_complete)
        if outcome.error is not None:
            return outcome
        if results is not None:
            before_ns = outcome.made[-1].computed_ns if passed else self.batch.started_ns
            if not before_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                _in_order(results, before_ns, now_ns)
            outcome.made.append(results)
        outcome.error = error
        return outcome

    def _results(self, k: int, words: Sequence[int], at: int, text: bytes) -> Results:
        gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + 5]
        block = self.channels[k].block(segment, offset, nbytes)
        outputs, placed = self.workers[k].reader.read(words, at + 5, block, self.rows)
        copied, taken = ((), ()) if k else (self.packed.copied, self.packed.taken)
        results = Results(outputs, _NONE, gathered_ns, computed_ns, copied, placed, _NONE, (), taken)
        if text:
            self._add_members(results, {int(m): one for m, one in json.loads(text).items()})
        return results

    def _add_members(self, results: Results, told: Mapping[int, Any]) -> None:
        if not told.keys() <= set(range(len(self.rows))):
            raise Garbled("a reply about a member that does not exist")
        results.parameters = {m: one for m, one in told.items() if isinstance(one, dict)}
        results.rescheduled = [m for m, one in told.items() if one is None]
        results.errors = {m: decode_error(one) for m, one in told.items() if not (one is None or isinstance(one, dict))}

    def _give_back(self, passed: Sequence[Stage], last: int) -> bool:
        """Free the blocks of the passed stages, which the server does not read. False, and nothing is done, where a
        model goes on reading one, or a later process is not known to have its segment.
        """
        for i, stage in enumerate(passed):
            if stage.kept:
                return False
            for j in range(i + 1, last + 1):
                if stage.segment and stage.segment not in self.channels[j].attached:
                    return False
        for i, stage in enumerate(passed):
            if stage.segment:
                self.channels[i].homes.append((stage.segment, stage.offset))
        return True

    def _leases(self, passed: Sequence[Stage], last: int) -> list[Lease | FlowserveError | None]:
        """The block that each passed stage made, or why it cannot be read; it is free again with its lease. Stages up
        to `last` have its memory attached.
        """
        leases: list[Lease | FlowserveError | None] = []
        for i, stage in enumerate(passed):
            nbytes = max([start + size for start, size, _ in stage.outputs], default=0)
            lease: Lease | FlowserveError | None
            if nbytes and not self.channels[i].knows(stage.segment):  # announced on a socket that was not read yet
                self.workers[i].read()
            try:
                lease = self.channels[i].block(stage.segment, stage.offset, nbytes)
            except Unseen as unseen:
                lease = Internal(str(unseen))
            except KeyError:
                if i not in self._dead:
                    raise
                lease = InstanceDied(self._dead[i])  # before it had announced that memory
            leases.append(lease)
            if isinstance(lease, Lease):
                for j in range(i + 1, last + 1):
                    self.channels[j].has_attached(lease.segment)
            if stage.kept:
                self._hold(i, leases[:i])
        return leases

    def _hold(self, i: int, leases: Sequence[Any]) -> None:
        """The model of stage i goes on reading its inputs."""
        self.channels[i].hold(self.number, leases if i else self.packed.held)

    def _made(
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
            outputs: Sequence[Column] = ()
            if has_outputs:
                lease = leases[i]
                if isinstance(lease, FlowserveError):
                    return Passed(made, lease)
                outputs = self.workers[i].reader.read_stage(stage, lease, self.rows)
            placed = []
            for _, nbytes, _ in stage.outputs:
                placed.append(nbytes)  # a comprehension is one more call
            copied, taken = ((), ()) if i else (self.packed.copied, self.packed.taken)
            results = Results(outputs, _NONE, stage.gathered_ns, stage.computed_ns, copied, placed, _NONE, (), taken)
            if not before_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                _in_order(results, before_ns, now_ns)
            before_ns = results.computed_ns
            made.append(results)
        return Passed(made)

    # ------------------------------------------------------------------ leaving its route

    def cancel(self) -> None:
        """Ask every process of the route whether the batch was run there; if not, it no longer may be."""
        for i, channel in enumerate(self.channels):
            if i not in self._dead:
                self._owed[i] = self._owed.get(i, 0) + 1
                channel.tell(pack(CANCEL, (self.number,)))

    def cancelled(self, worker: StageWorker, words: Sequence[int]) -> int:
        """A process answered CANCEL: its instance is free. Returns the stage. Raises Garbled."""
        i = self.stage_of(worker)
        passed, _ = read_passed(words, 2)
        if not self._owed.get(i):
            raise Garbled("an answer to a CANCEL that was not sent")
        self._owed[i] -= 1
        if passed:
            self._acknowledged[i] = passed[0]
        return i

    def died(self, worker: StageWorker, how: str) -> None:
        """The process of a worker has ended."""
        self._dead[self.stage_of(worker)] = how
        if self.batch.route is not None:
            self.cancel()

    def lost(self, now_ns: int) -> Outcome | None:
        """The outcome, where it is known that the batch was in a process when that ended; else None."""
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
        for j in range(i + 1, len(self.news)):
            self.channels[j].put_back(self.news[j])
        outcome = self._made(passed, leases, now_ns, has_outputs=True)
        if outcome.error is None:  # the first stage without reported results
            outcome.error = InstanceDied(self._dead.get(len(passed), self._dead[i]))
        return outcome


def _in_order(results: Results, begun_ns: int, now_ns: int) -> None:
    """Another process's clock is the same clock, but the model's code may have written these times."""
    results.gathered_ns = min(max(results.gathered_ns, begun_ns), now_ns)
    results.computed_ns = min(max(results.computed_ns, results.gathered_ns), now_ns)
