"""One batch in other processes: its route, the replies about it, and its outcome.

Decides the outcome of a batch (`RemoteRun`): the results of each stage of its route, and whether it was lost with a
process that ended. The process at which a batch returns sends the only reply. Processes that hand a batch on to each
other can be asked about it: to return a batch early, or if a process has ended, each of them is asked whether it ran
the batch; a process that did not may no longer run it. `RouteStates` decides what follows from the answers.

Where the tensors of a reply are belongs to `RunMemory`, which the port makes (shm.py, elsewhere/tcp.py). Does not know
how a process is started, or what follows its end, nor queues or callers. Called by worker.py, on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, Protocol

from flowserve.backends.base import NO_ERRORS, NO_PARAMETERS, Results
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    PASSED_AT,
    STAGE_WORDS,
    Garbled,
    Stage,
    decode_done_text,
    decode_error,
    decode_members,
    read_passed,
)
from flowserve.errors import FlowserveError, InstanceDied, Internal
from flowserve.runtime.ipc.channel import Unseen
from flowserve.runtime.ipc.tensors import Members
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.scheduling.batch import Batch


class StageState(Enum):
    """What the server knows of a batch at one stage of its route."""

    SENT = auto()  # the batch may be there, may come there, or may have been handed on from there
    RAN = auto()  # it ran there, and its results are known
    NEVER = auto()  # it did not run there, and never will
    DEAD = auto()  # the process has ended, and it is not known whether the batch ran there
    RAN_DEAD = auto()  # the process has ended after it had reported the results


class StageEvent(Enum):
    """What the server learns about a stage."""

    HAS_RUN = auto()  # an answer to CANCEL with the results
    HAS_NOT_RUN = auto()  # an answer to CANCEL without results
    DIED = auto()  # the process has ended


_S, _E = StageState, StageEvent
# An event that is missing here for a state cannot be right: the process is killed.
TRANSITIONS: Final[Mapping[tuple[StageState, StageEvent], StageState]] = {
    (_S.SENT, _E.HAS_RUN): _S.RAN,
    (_S.SENT, _E.HAS_NOT_RUN): _S.NEVER,
    (_S.SENT, _E.DIED): _S.DEAD,
    (_S.RAN, _E.HAS_RUN): _S.RAN,
    # A process remembers its last batch only, and may have run another one since it was asked first. If this became
    # NEVER, the batch would count as lost, although it was handed on.
    (_S.RAN, _E.HAS_NOT_RUN): _S.RAN,
    (_S.RAN, _E.DIED): _S.RAN_DEAD,
    # (NEVER, HAS_RUN) is missing: what was promised not to run has run.
    (_S.NEVER, _E.HAS_NOT_RUN): _S.NEVER,
    # It did not run there, but it may be on its way to that process: its predecessor may have handed it on.
    (_S.NEVER, _E.DIED): _S.DEAD,
    # An answer that was sent before the end is read after it.
    (_S.DEAD, _E.HAS_RUN): _S.RAN_DEAD,
    (_S.DEAD, _E.HAS_NOT_RUN): _S.DEAD,
    (_S.RAN_DEAD, _E.HAS_RUN): _S.RAN_DEAD,
    (_S.RAN_DEAD, _E.HAS_NOT_RUN): _S.RAN_DEAD,
}
_RAN: Final = frozenset((_S.RAN, _S.RAN_DEAD))
_DEAD: Final = frozenset((_S.DEAD, _S.RAN_DEAD))


class RouteStates:
    """The states of the stages of one batch. Made when it is first asked about, or a process ends."""

    def __init__(self, count: int) -> None:
        self.states = [StageState.SENT] * count
        self.reported: dict[int, Stage] = {}  # by stage: its results, from an answer to CANCEL
        self.ends: dict[int, str] = {}  # by stage: how its process has ended
        self._owed = [0] * count  # unanswered CANCELs

    def ask(self) -> list[int]:
        """The stages to which CANCEL is to be sent: those whose process lives."""
        asked = [i for i, state in enumerate(self.states) if state not in _DEAD]
        for i in asked:
            self._owed[i] += 1
        return asked

    def answered(self, i: int, results: Stage | None) -> None:
        """A process has answered CANCEL, with the results if the batch ran there. Raises Garbled."""
        if not self._owed[i]:
            raise Garbled("an answer to a CANCEL that was not sent")
        self._owed[i] -= 1
        if results is None:
            self._change(i, StageEvent.HAS_NOT_RUN)
        else:
            self._change(i, StageEvent.HAS_RUN)
            self.reported[i] = results

    def died(self, i: int, how: str) -> None:
        """The process of a stage has ended. Its answers may still be missing, and are not awaited."""
        self.ends[i] = how
        self._change(i, StageEvent.DIED)

    def lost_at(self) -> int | None:
        """The stage with whose process the batch was lost; None if it is not lost, or if that is not known yet."""
        if _DEAD.isdisjoint(self.states):
            return None
        # If a living process has not answered, it may still hand the batch on, or have run it.
        if any(owed for owed, state in zip(self._owed, self.states, strict=True) if state not in _DEAD):
            return None
        # It ran at stage `last` and has left it, or is about to reply from there. All that answered NEVER do not run it
        # any more. So it can only be at the next stage: lost if that process has ended; else that process, or the one
        # before, replies (NOT_RUN, or a reply that was sent before the answer).
        last = max([i for i, state in enumerate(self.states) if state in _RAN], default=-1)
        following = last + 1
        if following < len(self.states) and self.states[following] is StageState.DEAD:
            return following
        return None

    def _change(self, i: int, event: StageEvent) -> None:
        after = TRANSITIONS.get((self.states[i], event))
        if after is None:
            raise Garbled(f"an answer to CANCEL that contradicts an earlier one ({self.states[i].name}, {event.name})")
        self.states[i] = after


class RunMemory(Protocol):
    """The memory of one batch: where its inputs are, and where a reply says that its outputs are."""

    taken: Sequence[int]  # bytes of each input
    copied: Sequence[int]  # ... of which so many were copied

    def block(self, i: int, segment: int, offset: int, nbytes: int) -> Any:
        """The block of the outputs of stage i, which replies. Raises Unseen, Garbled, or LookupError."""

    def give_back(self, passed: Sequence[Stage]) -> bool:
        """Free the blocks of the passed stages, which the server does not read. False if that is not possible."""

    def blocks(self, passed: Sequence[Stage], last: int) -> Sequence[Any]:
        """The block of each passed stage; a FlowserveError if it cannot be read, another exception if its place is
        invalid. Stages up to `last` may have read it.
        """

    def hold(self, i: int, blocks: Sequence[Any]) -> None:
        """The model of stage i keeps its inputs: those of the batch, or these outputs of earlier stages."""

    def unreached(self, first: int) -> None:
        """The batch does not reach the stages from `first` on."""

    def invalid(self, i: int, error: Exception) -> FlowserveError:
        """Stage i, which has passed the batch on, reported invalid outputs. Returns the error of the batch."""

    def settle(self, made: Sequence[Results], now_ns: int) -> None:
        """Limit the times of the results to their possible order."""


class RemoteRun:
    """A batch that was sent, and the workers of its stages; one without a route."""

    __slots__ = ("_states", "batch", "memory", "number", "rows", "workers")

    def __init__(
        self, number: int, batch: Batch, rows: Sequence[int], workers: Sequence[Any], memory: RunMemory | None
    ) -> None:
        self.number = number
        self.batch = batch
        self.rows = rows
        self.workers = workers  # `RemoteWorker`s
        self.memory: Any = memory
        self._states: RouteStates | None = None

    # ------------------------------------------------------------------ its reply

    def outcome(self, worker: Any, kind: int, words: Sequence[int], text: bytes, now_ns: int) -> Outcome:
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
        memory = self.memory
        results, error, kept = None, None, 0
        try:
            if kind == messages.DONE:  # inline: a function would be one more call for each batch
                kept, gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + STAGE_WORDS]
                block = memory.block(k, segment, offset, nbytes)
                reader, rows = worker.reader, self.rows
                told, notes = decode_done_text(text, reader.names, len(rows)) if text else (None, None)
                unlike: Collection[str] = () if notes is None else notes.unlike
                outputs, placed = reader.read(words, at + STAGE_WORDS, block, rows, unlike)
                copied, taken = ((), ()) if k else (memory.copied, memory.taken)
                results = Results(
                    outputs, NO_ERRORS, gathered_ns, computed_ns, copied, placed, NO_PARAMETERS, (), taken, notes
                )
                if told:
                    decode_members(told, results, len(rows))
            elif kind == messages.FAILED:
                kept = words[at]
                error = decode_error(json.loads(text))
            elif not passed:
                raise Garbled("a batch that was sent to it was not run")
        except Unseen as unseen:  # the process has replied, but its outputs cannot be read
            error = Internal(str(unseen))
        if self.batch.route is not None:
            return self._route_outcome(passed, results, error, now_ns, kept=bool(kept), is_plain=not text)
        if kept:
            memory.hold(0, ())
        if results is None:
            assert error is not None
            return error
        memory.settle((results,), now_ns)
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
        blocks: Sequence[Any] = ()
        if passed and not (is_complete and not kept and self.memory.give_back(passed)):
            blocks = self.memory.blocks(passed, k)
        if kept:
            self.memory.hold(k, blocks)
        if k + 1 < len(self.workers):
            self.memory.unreached(k + 1)
        outcome = self._passed(passed, blocks, has_outputs=not is_complete)
        if outcome.error is None:
            if results is not None:
                outcome.made.append(results)
            outcome.error = error
        self.memory.settle(outcome.made, now_ns)
        return outcome

    def _passed(self, passed: Sequence[Stage], blocks: Sequence[Any], *, has_outputs: bool) -> Passed:
        """The results of the passed stages, with the outputs that are read. Ends with an error at the first stage
        whose outputs cannot be read.
        """
        made: list[Results] = []
        memory = self.memory
        for i, stage in enumerate(passed):
            outputs: Sequence[Members] = ()
            if has_outputs:
                block = blocks[i]
                if isinstance(block, FlowserveError):
                    return Passed(made, block)
                if isinstance(block, Exception):
                    return Passed(made, self.how_ended(i) or memory.invalid(i, block))
                try:
                    outputs = self.workers[i].reader.read_stage(stage, block, self.rows)
                except Exception as error:
                    return Passed(made, self.how_ended(i) or memory.invalid(i, error))
            placed = []
            for _, nbytes, _ in stage.outputs:
                placed.append(nbytes)  # a comprehension is one more call
            copied, taken = ((), ()) if i else (memory.copied, memory.taken)
            times = stage.gathered_ns, stage.computed_ns
            made.append(Results(outputs, NO_ERRORS, *times, copied, placed, NO_PARAMETERS, (), taken))
            self.workers[i].has_answered = True
        return Passed(made)

    # ------------------------------------------------------------------ leaving its route, and ends of processes

    def ask(self) -> list[int]:
        """The stages whose processes are to be asked whether the batch was run there; if not, it no longer may be."""
        return self._known().ask()

    def answered(self, worker: Any, words: Sequence[int]) -> None:
        """Process an answer to CANCEL: the instance is free. Raises Garbled."""
        passed, _ = read_passed(words, PASSED_AT, words[2])
        self._known().answered(self.workers.index(worker), passed[0] if passed else None)

    def died(self, worker: Any, how: str) -> None:
        """Record that the process of a worker has ended."""
        self._known().died(self.workers.index(worker), how)

    def how_ended(self, i: int) -> InstanceDied | None:
        """How the process of a stage has ended; None if it lives."""
        how = None if self._states is None else self._states.ends.get(i)
        return None if how is None else InstanceDied(how)

    def lost(self, now_ns: int) -> Outcome | None:
        """The outcome, if it is known that the batch was in a process that ended; else None."""
        if self._states is None:
            return None
        i = self._states.lost_at()
        if i is None:
            return None
        if self.batch.route is None:
            return self.how_ended(0)
        passed: list[Stage] = []
        while (stage := self._states.reported.get(len(passed))) is not None:
            passed.append(stage)
        blocks = self.memory.blocks(passed, i)
        self.memory.unreached(i + 1)
        outcome = self._passed(passed, blocks, has_outputs=True)
        if outcome.error is None:  # the first stage without reported results
            outcome.error = self.how_ended(len(passed)) or self.how_ended(i)
        self.memory.settle(outcome.made, now_ns)
        return outcome

    def _known(self) -> RouteStates:
        if self._states is None:
            self._states = RouteStates(len(self.workers))
        return self._states
