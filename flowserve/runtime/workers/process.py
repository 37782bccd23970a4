"""A worker whose instance runs in a process of its own.

Decides how such an instance is opened, given batches and closed: a batch is packed and sent on the event loop and its
reply is read there, without a thread or task for each process. A process that sends an invalid message is killed.
When a process has ended, its batch fails; supervisor.py decides when the next process starts.

Decides the outcome of a batch (`ProcessRun`): the results of each stage of its route, the instances that it has
released, and whether it was lost with a process that ended. The process at which a batch returns sends the only reply.
To return a batch early, or if a process has ended, the server sends CANCEL to every process of the route; each replies
whether it ran the batch. A process that did not may no longer run it. The instance of each that has replied or ended is
released. The batch was lost if the process after the last one that ran it has ended; else its reply will arrive.

Decides when a route over processes is announced to them (once, with the first batch that takes it), and how often a
process is requested to release idle memory after its last batch.

Decides that each process has a number of its own. `ProcessPool` holds the objects that all process workers share: the
starter of processes, the poller of their sockets, and the batches in flight.

ipc/ decides the transport of messages. Does not know queues or callers. Workers are made by factory.py and driven by
the engine, on the event loop, which also makes the pool.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Final, cast

import trio

from flowserve.backends.base import Remote, Results
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import (
    Garbled,
    Job,
    RouteHop,
    Stage,
    decode_error,
    decode_members,
    decode_notes,
    encode_about,
    encode_route,
    encode_run,
    pack,
    read_passed,
)
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, Internal, ModelFailed, Unavailable
from flowserve.memory.segment import Lease
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.channel import Channel, Readiness, Unseen
from flowserve.runtime.ipc.tensors import InputPacker, Members, OutputReader, Packed
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.model_calls.process_calls import ProcessCalls
from flowserve.runtime.processes.children import Child, Children, SpawnChild
from flowserve.runtime.processes.environments import Environment, Environments
from flowserve.runtime.workers.base import Outcome, Passed, Returned, StateAdapter, WorkerContext, works
from flowserve.runtime.workers.streaming import ProcessSink, ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket
from flowserve.scheduling.route import Route

log = logging.getLogger("flowserve.runtime")
# The time that an unloaded model has to finish and to finalise; at the end of the server the exit timeout applies.
CLOSE_S_MAX: Final = 600.0
# How often a process is requested to release idle memory after its last batch. A request is sent every few seconds, and
# memory counts as idle at the fifth request.
_RELEASES: Final = 6
_REPLIES: Final = frozenset((protocol.DONE, protocol.FAILED, protocol.RETURNED))
# The common case of a batch without facts about its members. Results are not modified.
_NONE: Final[Mapping[int, Any]] = {}
_route_numbers = count(1)
_number_of = attrgetter("number")


class ProcessWorker:
    """One instance in a worker process. `child` is that process and `channel` its channel while the instance is open
    there; without a process, `ended` is how the last one ended. `has_answered`: a batch returned from it; the
    supervisor resets this when a process begins to serve.

    `streams`: for a decoupled model. `on_end` is called on the event loop when a process ended, after its batch failed.
    """

    _context: WorkerContext  # set by the last `open`

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        remote: Remote,
        packer: InputPacker,
        pool: ProcessPool,
        *,
        state: StateAdapter | None = None,
        streams: ResponseStreams | None = None,
    ) -> None:
        self.name = name
        self.state = state or StateAdapter()
        self.has_state = streams is not None or type(self.state) is not StateAdapter
        self.is_on_gpu = False  # its process has a context of its own
        self.outage = works
        self.route_group: object = "process" if streams is None and type(self.state) is StateAdapter else None
        self.computes_apart = True
        self.child: Child | None = None
        self.channel: Channel | None = None
        self.ended = ""
        self.has_answered = False
        self.depth = 1
        self._releases_due = 0
        self.on_end: Callable[[], None] | None = None
        batches = config.max_batch_size > 0
        self.reader = OutputReader(config.name, config.outputs, batches=batches)
        self.packer = packer
        self._model = config.name
        self._job = Job(config.name, name, config.inputs, config.outputs, batches, remote, config.decoupled)
        self._pool = pool
        self._streams = streams
        self._sink: ProcessSink | None = None  # the process's sink, if the model is decoupled
        self._run: ProcessRun | None = None  # the batch in the process, or sent to it
        self._calls: ProcessCalls | None = None  # set once its model has called another
        self._is_closed = False
        self._opening: Child | None = None  # set while it is being opened; its model may already make calls
        self._given_up = ""

    @property
    def running(self) -> Batch | None:
        """The batch in the process; of a batch on a route, this worker's stage."""
        run = self._run
        return None if run is None else run.batch.stage(run.workers.index(self))

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, context: WorkerContext) -> None:
        """Start the process and open the instance there. Blocks; called on a loader's thread. Raises the model's
        exception, or an error if its process ended. May be called again after that, and after `on_end`.
        """
        self._context = context
        job = replace(self._job, number=next(self._pool.process_numbers))
        child = self._pool.spawn(self.name, protocol.SERVE, pickle.dumps(job), log_name=self._model)
        channel = Channel(child.socket, job.number, self._model, self._pool.readiness)
        channel.on_calls = partial(self._post, self._begin_early_calls, child)
        self._opening = child
        if self._given_up:
            child.kill(why=self._given_up)
        try:
            _await_open(child, channel)
        except BaseException:
            self._drop(child, channel)
            raise
        finally:
            self._opening = None
        if self._streams is not None:
            self._sink = ProcessSink(channel, self.reader, self._streams)
        self.child, self.channel, self.ended = child, channel, ""
        if self._is_closed:  # checked last: `close` sets it before it looks for a process
            self.child = self.channel = None
            self._drop(child, channel)
            return
        context.token.run_sync_soon(self._carry_out, self._begin, (child,))

    def kill(self, why: str) -> None:
        """End its process immediately, for this reason. No effect if there is none."""
        if self.child is not None:
            self.child.kill(why=why)

    def give_up(self, why: str) -> None:
        """Abort a pending `open`: kill the process, and `open` raises on its thread. On any thread; no effect once it
        is open.
        """
        self._given_up = f"its process was killed: {why}"
        child = self._opening
        if child is not None:
            child.kill(why=self._given_up)

    def close(self) -> None:
        """End the process after its running batch. Blocks; called on a thread."""
        self._is_closed = True
        child, channel = self.child, self.channel
        if child is None or channel is None:
            return
        with suppress(OSError):  # if it has already ended
            channel.end()
        if not child.wait(CLOSE_S_MAX):
            child.kill(why=f"its process was killed, because it had not ended {CLOSE_S_MAX:g} s after it was told to")
            log.error("model '%s', instance '%s': %s", self._model, self.name, child.why)
        self._post(self._read_last)

    def _drop(self, child: Child, channel: Channel) -> None:
        channel.close()
        child.kill()
        self._post(self._end_calls)

    def _post(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, if the loop still runs."""
        with suppress(trio.RunFinishedError):
            self._context.token.run_sync_soon(self._carry_out, what, arguments)

    # ------------------------------------------------------------------ batches, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Send a batch. Returns None if its outcome arrives later."""
        route = batch.route
        workers: Sequence[ProcessWorker] = (self,) if route is None else batch.instances
        channels: list[Any] = []
        for worker in workers:
            channels.append(worker.channel)  # noqa: PERF401  # a comprehension is one more call
        if None in channels:
            return Unavailable(f"model '{self._model}', instance '{self.name}': its process is not running")
        number = next(self._pool.run_numbers)
        run = self._pool.runs[number] = ProcessRun(number, batch, workers, channels)
        for worker in workers:
            worker._run = run
            worker._releases_due = _RELEASES
        try:
            work = self.state.work(batch.tickets)
            batch.started_ns = self._pool.clock()
            run.rows = work.rows
            packed = run.packed = self.packer.pack(work)
            if self._sink is not None:
                self.state.restart(batch.tickets)
                self._sink.begin(number, batch)
            for channel in channels:
                run.updates.append(channel.take_update())
            route_number = 0 if route is None else _route_number(route, channels, workers)
            about: Sequence[int] = ()
            text = b""
            if packed.facts is not None or batch.contexts:
                about, text = encode_about(packed.facts, batch.contexts)
            updates: list[int] = []
            for update in run.updates:
                updates += update
            fields = route_number, 0, work.rows, packed.wanted, updates, packed.columns, (), about, text
            channels[0].run(encode_run(number, *fields), packed, self.packer)
        except Exception as error:
            run.restore_updates(0)
            self._end(run)
            if isinstance(error, OSError):
                what = f"model '{self._model}', instance '{self.name}': a batch cannot be sent: {error.strerror}"
                return self._failed(batch, Internal(what))
            if not isinstance(error, FlowserveError):
                raise
            return self._failed(batch, error.with_traceback(None))  # a traceback would keep the batch alive
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`."""
        if self._streams is not None:
            self._streams.finish(batch, outcome)
        return self.state.finish(batch, outcome)

    def recall(self, batch: Batch) -> None:
        """Return a batch from its route as early as possible."""
        if self._run is not None and self._run.batch is batch:
            self._run.cancel()

    def release_idle(self) -> bool:
        """Request its process to release memory that it has not used for a while. Called every few seconds. Returns
        whether it must be called again even without a batch in between.
        """
        channel = self.channel
        if channel is None:
            return False
        is_quiet = self._releases_due < _RELEASES and self._run is None
        if channel.free_blocks:
            self._releases_due = _RELEASES
        if self._releases_due:
            self._releases_due -= 1
            channel.release_idle(is_quiet=is_quiet)
        return self._releases_due > 0

    def _end(self, run: ProcessRun) -> None:
        """A batch has returned: its workers no longer have it."""
        del self._pool.runs[run.number]
        for worker in run.workers:
            if worker._run is run:
                worker._run = None

    def _failed(self, batch: Batch, error: FlowserveError) -> Outcome:
        """The outcome of a batch that failed as a whole. The responses of a decoupled model end with it."""
        if self._streams is None:
            return error
        if self._sink is not None:
            self._sink.fail(error, batch.tickets)
        return Returned(error=error)

    # ------------------------------------------------------------------ its process, on the event loop

    def _begin(self, child: Child) -> None:
        child.on_end = self._ended
        if child.ended:
            self._ended(child)
        elif self.child is child and self.channel is not None:
            self.channel.on_calls = self._begin_calls
            self._pool.readiness.watch(child.socket.fileno(), self.read, self._broke)

    def read(self) -> None:
        """Read the messages of its process, until a reply or its end."""
        channel, child = self.channel, self.child
        if channel is None or child is None:
            return
        try:
            while (message := channel.read()) is not None:
                kind, words, text = message
                if kind in _REPLIES:
                    run = self._run
                    if run is None or run.number != words[1]:
                        run = self._pool.runs.get(words[1])  # of an earlier route
                        if run is None or self not in run.workers:
                            if kind == protocol.RETURNED:
                                continue  # the batch was lost meanwhile
                            raise Garbled(f"a reply to batch {words[1]}, which it does not have")
                    outcome = run.outcome(self, kind, words, text, self._pool.clock())
                    self.has_answered = True
                    self._complete(run, outcome)
                    return  # after a reply a process sends nothing unasked
                if kind == protocol.CANCELLED:
                    run = self._pool.runs.get(words[1])
                    if run is not None and self in run.workers:  # None if it has returned meanwhile
                        run.cancelled(self, words)
                        self._leave(run)
                elif self._sink is not None:
                    self._sink.take(kind, words, text, self._run.batch if self._run is not None else None)
                else:
                    raise Garbled(f"a message of kind {kind}")
        except EOFError:
            self._pool.readiness.forget(child.socket.fileno())
            child.hung_up()
        except Garbled as error:
            self.kill_for(str(error))
        except Exception as error:  # an error about a message concerns this process only
            self.kill_for(f"{type(error).__name__}: {error}")

    def _complete(self, run: ProcessRun, outcome: Outcome) -> None:
        if run is self._run and run.batch.route is None:
            del self._pool.runs[run.number]
            self._run = None
        else:
            self._end(run)
        if self._streams is not None:
            if isinstance(outcome, Results):
                outcome = Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
            elif isinstance(outcome, FlowserveError):
                outcome = self._failed(run.batch, outcome)
        self._context.completions.waiting.append((run.batch, outcome))

    def _leave(self, run: ProcessRun) -> None:
        """This instance will no longer run the batch: release it before the other stages of the route are over, and
        complete the batch if it is lost.
        """
        if run.batch.route is not None:
            if self._run is run:
                self._run = None
            self._context.release(run.batch, (run.workers.index(self),))
        outcome = run.lost(self._pool.clock())
        if outcome is not None:
            self._complete(run, outcome)

    def _ended(self, child: Child) -> None:
        """Its process has ended. Its batches fail and are not retried: their effects are unknown."""
        sink, channel = self._sink, self.channel
        runs = [run for run in self._pool.runs.values() if channel in run.channels]
        self._disconnect()
        self.ended = child.ended
        try:
            if sink is not None:
                sink.fail(InstanceDied(child.ended))
            for run in runs:  # also a batch that has passed this process on its route
                run.died(self, child.ended)
                self._leave(run)
        finally:
            self._context.wake()
            if self.on_end is not None:
                self.on_end()

    def _read_last(self) -> None:
        """Its process has ended as requested. Its last reply may have arrived since the event loop last read."""
        self.read()
        self._disconnect()
        if self._context is not None:
            self._context.wake()

    def _disconnect(self) -> None:
        channel, child = self.channel, self.child
        self.channel = self.child = self._sink = None
        if channel is not None and child is not None:
            self._pool.readiness.forget(child.socket.fileno())
            channel.close()
        self._end_calls()

    def kill_for(self, what: str) -> None:
        """Kill its process, which sent an invalid message."""
        self._kill(_garbled(what))

    def _broke(self, error: Exception) -> None:
        """Handle an internal error about its process, or a resource that the system did not provide. The state of the
        process is unknown, so it is killed: otherwise its batch might wait for ever.
        """
        self._kill(f"its process was killed: the server could not go on with it ({type(error).__name__}: {error})")

    def _kill(self, why: str) -> None:
        if self.child is not None:
            self._pool.readiness.forget(self.child.socket.fileno())
            self.child.kill(why=why)
        elif self._opening is not None:
            self._opening.kill(why=why)

    def _carry_out(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            what(*arguments)
        except Exception as error:  # if it propagated, it would end the server
            log.exception("instance %s: what was to be done about its process failed", self.name)
            self._broke(error)

    # ------------------------------------------------------------------ calls of its model

    def _begin_early_calls(self, child: Child, fd: int) -> None:
        try:
            self._begin_calls(fd)
        except Garbled as error:
            child.kill(why=_garbled(str(error)))

    def _begin_calls(self, fd: int) -> None:
        if self._calls is not None or self._context.calls is None:
            os.close(fd)
            raise Garbled("a second socket for calls")
        self._calls = ProcessCalls(fd, self._model, self.packer.arena, self._context.calls, self._pool.readiness, self)

    def _end_calls(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    @property
    def loads(self) -> str:
        """The model's name while it is being opened, else ""."""
        return "" if self._opening is None else self._model

    def end_route(self, number: int) -> None:
        """Its model makes a call while it executes this batch of a route: the batch returns to the server after this
        stage, and the instances of all others are needed for calls.
        """
        run = self._run
        if run is not None and run.number == number and run.batch.route is not None:
            run.cancel()


@dataclass(slots=True, eq=False)
class ProcessRun:
    """A batch and the workers of its stages; one without a route. `updates[i]` was sent with it to stage i."""

    number: int
    batch: Batch
    workers: Sequence[ProcessWorker]
    channels: Sequence[Channel]
    packed: Packed = field(init=False)
    rows: Sequence[int] = field(init=False)
    updates: list[Sequence[int]] = field(default_factory=list)
    _owed: dict[int, int] = field(default_factory=dict)  # by stage: unanswered CANCELs
    _acknowledged: dict[int, Stage] = field(default_factory=dict)
    _dead: dict[int, str] = field(default_factory=dict)  # stages whose process has ended, and how

    def restore_updates(self, first: int) -> None:
        """Restore the updates of the stages from `first` on, which the batch did not reach."""
        for channel, update in zip(self.channels[first:], self.updates[first:], strict=False):
            channel.restore_update(update)

    # ------------------------------------------------------------------ its reply

    def outcome(self, worker: ProcessWorker, kind: int, words: Sequence[int], text: bytes, now_ns: int) -> Outcome:
        """Read the reply of a worker's process. Raises Garbled."""
        passed: Sequence[Stage] = ()
        if len(self.workers) == 1:
            if words[2]:
                raise Garbled("a batch without a route that passed stages")
            at = 3
        else:
            passed, at = read_passed(words, 3, words[2])
        k = len(passed)
        if k >= len(self.workers) or self.workers[k] is not worker:
            raise Garbled(f"a reply to batch {self.number}, which is not there")
        results, error, kept = None, None, 0
        try:
            if kind == protocol.DONE:
                kept, gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + 6]
                block = self.channels[k].block(segment, offset, nbytes)
                told: dict[str, Any] = json.loads(text) if text else {}
                notes = decode_notes(told.pop("", None), worker.reader.names, len(self.rows)) if text else None
                unlike: Collection[str] = () if notes is None else notes.unlike
                outputs, placed = worker.reader.read(words, at + 6, block, self.rows, unlike)
                copied, taken = ((), ()) if k else (self.packed.copied, self.packed.taken)
                results = Results(outputs, _NONE, gathered_ns, computed_ns, copied, placed, _NONE, (), taken, notes)
                if told:
                    decode_members(told, results, len(self.rows))
            elif kind == protocol.FAILED:
                kept = words[at]
                error = decode_error(json.loads(text))
            elif not passed:
                raise Garbled("a batch that was sent to it was not run")
        except Unseen as unseen:  # the process has replied, but its outputs cannot be read
            error = Internal(str(unseen))
        is_complete = results is not None and k == len(self.workers) - 1 and not text and not self.batch.wants_outputs
        leases: Sequence[Lease | FlowserveError | None] = ()
        if passed and not (is_complete and not kept and self._give_back(passed, k)):
            leases = self._leases(passed, k)
        if kept:
            self._hold(k, leases)
        if k + 1 < len(self.workers):
            self.restore_updates(k + 1)
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
            outputs: Sequence[Members] = ()
            if has_outputs:
                lease = leases[i]
                if isinstance(lease, FlowserveError):
                    return Passed(made, lease)
                try:
                    outputs = self.workers[i].reader.read_stage(stage, lease, self.rows)
                except Exception as error:
                    return Passed(made, self._invalid(i, error))
            placed = []
            for _, nbytes, _ in stage.outputs:
                placed.append(nbytes)  # a comprehension is one more call
            copied, taken = ((), ()) if i else (self.packed.copied, self.packed.taken)
            results = Results(outputs, _NONE, stage.gathered_ns, stage.computed_ns, copied, placed, _NONE, (), taken)
            if not before_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                _in_order(results, before_ns, now_ns)
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
        return InstanceDied(f"model '{worker._model}', instance '{worker.name}': {_garbled(what)}")

    # ------------------------------------------------------------------ leaving its route

    def cancel(self) -> None:
        """Ask every process of the route whether the batch was run there; if not, it no longer may be."""
        for i, channel in enumerate(self.channels):
            if i not in self._dead:
                self._owed[i] = self._owed.get(i, 0) + 1
                channel.tell(pack(protocol.CANCEL, (self.number,)))

    def cancelled(self, worker: ProcessWorker, words: Sequence[int]) -> None:
        """Process an answer to CANCEL: the instance is free. Raises Garbled."""
        i = self.workers.index(worker)
        passed, _ = read_passed(words, 3, words[2])
        if not self._owed.get(i):
            raise Garbled("an answer to a CANCEL that was not sent")
        self._owed[i] -= 1
        if passed:
            self._acknowledged[i] = passed[0]

    def died(self, worker: ProcessWorker, how: str) -> None:
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
        self.restore_updates(i + 1)
        outcome = self._made(passed, leases, now_ns, has_outputs=True)
        if outcome.error is None:  # the first stage without reported results
            outcome.error = InstanceDied(self._dead.get(len(passed), self._dead[i]))
        return outcome


class ProcessPool:
    """The worker processes of a server. Made on the event loop."""

    def __init__(self, clock: ClockNs, loop: StepLoop) -> None:
        self.clock = clock
        self.children = Children(clock)
        self.environments = Environments(self.children)
        self.spawn: SpawnChild = self.children.spawn
        self.readiness = Readiness(loop)
        self.runs: dict[int, ProcessRun] = {}  # the batches in the processes, by number
        self.run_numbers = count(1)
        self.process_numbers = count(1)  # taken on any thread

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve them. Ends by cancellation, after `close`."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.children.run)
            nursery.start_soon(self.readiness.run, name="sockets of worker processes")
            task_status.started()

    def within(self, environment: Environment) -> ProcessPool:
        """A pool with the same parts, for a model that runs in that environment."""
        within = copy(self)
        within.spawn = environment.spawn
        return within

    async def close(self) -> None:
        """End every process that still runs."""
        await self.children.close()
        self.environments.close()


def _route_number(route: Route, channels: Sequence[Channel], workers: Sequence[ProcessWorker]) -> int:
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


def _in_order(results: Results, begun_ns: int, now_ns: int) -> None:
    """Limit the times of a process to their possible order. All processes have the same clock, but a model's code may
    have written these times.
    """
    results.gathered_ns = min(max(results.gathered_ns, begun_ns), now_ns)
    results.computed_ns = min(max(results.computed_ns, results.gathered_ns), now_ns)


def _garbled(what: str) -> str:
    return f"its process sent an invalid message ({what}); it was killed"


def _await_open(child: Child, channel: Channel) -> None:
    """Block until the instance is open. Raises the error of opening."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll()]
        try:
            message = channel.read()
        except EOFError:
            raise ModelFailed(child.how_it_ended()) from None
        except Garbled as error:
            raise ModelFailed(f"instance '{child.name}': its process sent an invalid message: {error}") from None
        if message is not None:
            kind, _, text = message
            if kind == protocol.READY:
                return
            if kind == protocol.BROKEN:
                raise decode_error(json.loads(text))
            raise ModelFailed(f"instance '{child.name}': its process sent an invalid message: a message of kind {kind}")
        if child.pidfd in ready:
            raise ModelFailed(child.how_it_ended())
