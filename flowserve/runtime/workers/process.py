"""A worker whose instance runs in a process of its own.

Decides how such an instance is opened, given batches and closed: a batch is packed and sent on the event loop and its
reply is read there, without a thread or task for each process. A process that sends an invalid message is killed.
When a process has ended, its batch fails; supervisor.py decides when the next process starts.

Decides how often a process is requested to release idle memory after its last batch.

Decides that each process has a number of its own. `ProcessPool` holds the objects that all process workers share: the
starter of processes, the poller of their sockets, and the batches in flight.

process_run.py decides the outcome of a batch, also of one that passes several processes, and ipc/ the transport of
messages. Does not know queues or callers. Workers are made by factory.py and driven by the engine, on the event loop,
which also makes the pool.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final

import trio

from flowserve.backends.base import Remote, Results
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import Garbled, Job, decode_error, encode_about, encode_run
from flowserve.backends.worker.readiness import ask
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, Internal, ModelFailed, Unavailable
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.channel import Channel, Readiness
from flowserve.runtime.ipc.tensors import InputPacker, OutputReader
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.model_calls.process_calls import ProcessCalls
from flowserve.runtime.processes.children import Child, Children, SpawnChild
from flowserve.runtime.processes.environments import Environment, Environments
from flowserve.runtime.workers.base import Outcome, Returned, StateAdapter, WorkerContext, counts_nothing, works
from flowserve.runtime.workers.process_run import ProcessRun, killed_for, restore_updates, route_number
from flowserve.runtime.workers.streaming import ProcessSink, ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket
from flowserve.values import TensorSpec

log = logging.getLogger("flowserve.runtime")
# The time that an unloaded model has to finish and to finalise; at the end of the server the exit timeout applies.
CLOSE_S_MAX: Final = 600.0
# How often a process is requested to release idle memory after its last batch. A request is sent every few seconds, and
# memory counts as idle at the fifth request.
_RELEASES: Final = 6
# Processes forked by a model that may call other models at once: each has a socket in the server.
_FORKS_MAX: Final = 256
_REPLIES: Final = frozenset((protocol.DONE, protocol.FAILED, protocol.NOT_RUN))


class ProcessWorker:
    """One instance in a worker process. `child` is that process and `channel` its channel while the instance is open
    there; without a process, `ended` is how the last one ended. `current`: the batch in the process, or sent to it.
    `has_answered`: a batch returned from it; the supervisor resets this when a process begins to serve.

    `streams`: for a decoupled model. `on_end` is called on the event loop when a process ended, after its batch failed.

    `open`, on a loader's thread, sets `child`, `channel`, `ended`, `_sink`, `_context` and `_opening` before it posts
    `_begin`; from then until `on_end` only the event loop writes them. `close` and `give_up`, on other threads, read
    them and set `_is_closed` and `_given_up`.
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
        self.counted_there = counts_nothing
        self.route_group: object = "process" if streams is None and type(self.state) is StateAdapter else None
        self.computes_apart = True
        self.child: Child | None = None
        self.channel: Channel | None = None
        self.ended = ""
        self.has_answered = False
        self.current: ProcessRun | None = None
        self.depth = 1
        self._releases_due = 0
        self.on_end: Callable[[], None] | None = None
        batches = config.max_batch_size > 0
        self.reader = OutputReader(config.name, config.outputs, batches=batches)
        self.packer = packer
        self.arena = packer.arena
        self._model = config.name
        self._job = Job(config.name, name, config.inputs, config.outputs, batches, remote, config.decoupled)
        self._pool = pool
        self._streams = streams
        self._sink: ProcessSink | None = None  # the process's sink, if the model is decoupled
        self._calls: list[ProcessCalls] = []  # of its process, and of those that the model has forked
        self._families: set[int] = set()  # the metric families of all these
        self._recalled = 0  # the number of the last batch that left its route because of a call; its run may be over
        self._is_closed = False
        self._opening: Child | None = None  # set while it is being opened; its model may already make calls
        self._given_up = ""

    @property
    def running(self) -> Batch | None:
        """The batch in the process; of a batch on a route, this worker's stage."""
        run = self.current
        return None if run is None else run.batch.stage(run.workers.index(self))

    @property
    def batches(self) -> Sequence[Batch]:
        """As `RunsElsewhere.batches`."""
        running = self.running
        return [] if running is None else [running]

    def share(self, output: int, spec: TensorSpec) -> None:
        """No effect: its process places all outputs in shared memory."""

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

    def readiness(self) -> Callable[[], str] | None:
        """As `AsksModel.readiness`."""
        questions = None if self.channel is None else self.channel.questions
        return None if questions is None else partial(ask, questions)

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
        updates: list[Sequence[int]] = []  # by stage
        try:
            work = self.state.work(batch.tickets)
            batch.started_ns = self._pool.clock()
            packed = self.packer.pack(work)
            if self._sink is not None:
                self.state.restart(batch.tickets)
                self._sink.begin(number, batch)
            for channel in channels:
                updates.append(channel.take_update())  # noqa: PERF401  # a comprehension is one more call
            route_there = 0 if route is None else route_number(route, channels, workers)
            about: Sequence[int] = ()
            text = b""
            if packed.facts is not None or batch.contexts:
                about, text = encode_about(packed.facts, batch.contexts)
            update_words: list[int] = []
            for update in updates:
                update_words += update
            message = encode_run(
                number,
                route_there,
                0,
                work.rows,
                wanted=packed.wanted,
                updates=update_words,
                columns=packed.columns,
                about=about,
                text=text,
            )
            channels[0].send_batch(message, packed, self.packer)
        except Exception as error:
            restore_updates(channels, updates)
            if isinstance(error, OSError):
                what = f"model '{self._model}', instance '{self.name}': a batch cannot be sent: {error.strerror}"
                return self._failed(batch, Internal(what))
            if not isinstance(error, FlowserveError):
                raise
            return self._failed(batch, error.with_traceback(None))  # a traceback would keep the batch alive
        run = self._pool.runs[number] = ProcessRun(number, batch, workers, channels, packed, work.rows, updates)
        for worker in workers:
            worker.current = run
            worker._releases_due = _RELEASES
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`."""
        if self._streams is not None:
            self._streams.finish(batch, outcome)
        return self.state.finish(batch, outcome)

    def recall(self, batch: Batch) -> None:
        """Return a batch from its route as early as possible."""
        if self.current is not None and self.current.batch is batch:
            self.current.cancel()

    def release_idle(self) -> bool:
        """Request its process to release memory that it has not used for a while. Called every few seconds. Returns
        whether it must be called again even without a batch in between.
        """
        channel = self.channel
        if channel is None:
            return False
        is_quiet = self._releases_due < _RELEASES and self.current is None
        if channel.free_blocks:
            self._releases_due = _RELEASES
        if self._releases_due:
            self._releases_due -= 1
            channel.release_idle(is_quiet=is_quiet)
        return self._releases_due > 0

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
                    number = words[1]
                    run = self.current
                    if run is None or run.number != number:
                        run = self._pool.runs.get(number)  # of an earlier route
                        if run is None or self not in run.workers:
                            if kind == protocol.NOT_RUN:
                                continue  # the batch was lost meanwhile
                            raise Garbled(f"a reply to batch {number}, which it does not have")
                    outcome = run.outcome(self, kind, words, text, self._pool.clock())
                    self.has_answered = True
                    self._complete(run, outcome)
                    return  # messages behind a reply, as GONE, remain for the next event: epoll is level-triggered
                if kind == protocol.CANCELLED:
                    run = self._pool.runs.get(words[1])
                    if run is not None and self in run.workers:  # None if it has returned meanwhile
                        run.cancelled(self, words)
                        self._leave(run)
                elif self._sink is not None:
                    self._sink.take(kind, words, text, self.current.batch if self.current is not None else None)
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
        """Append the outcome of a batch for the engine's step. That step follows the batch of events in which the
        socket was read (`Readiness.run`); `_ended` and `_read_last` wake the engine for it.
        """
        del self._pool.runs[run.number]
        for worker in run.workers:
            if worker.current is run:
                worker.current = None
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
            if self.current is run:
                self.current = None
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
        self._kill(killed_for(what))

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

    def _begin_early_calls(self, child: Child, fd: int, is_fork: bool) -> None:
        try:
            self._begin_calls(fd, is_fork)
        except Garbled as error:
            child.kill(why=killed_for(str(error)))

    def _begin_calls(self, fd: int, is_fork: bool) -> None:
        if self._context.calls is None or (self._calls and not is_fork and not self._calls[0].is_fork):
            os.close(fd)
            raise Garbled("a second socket for calls")
        if len(self._calls) > _FORKS_MAX:
            text = "model '%s', instance '%s': a forked process cannot call models: %d others do"
            log.error(text, self._model, self.name, _FORKS_MAX)
            os.close(fd)  # its calls fail
            return
        calls = ProcessCalls(
            fd,
            self._model,
            self.packer.arena,
            self._context.calls,
            self._pool.readiness,
            self,
            families=self._families,
            is_fork=is_fork,
        )
        self._calls.append(calls)

    def calls_ended(self, calls: ProcessCalls) -> None:
        """A process has closed its socket for calls."""
        self._calls.remove(calls)

    def _end_calls(self) -> None:
        for calls in [*self._calls]:
            calls.close()

    @property
    def loads(self) -> str:
        """The model's name while it is being opened, else ""."""
        return "" if self._opening is None else self._model

    def end_route(self, number: int | None) -> None:
        """Its model makes a call while it executes this batch of a route, None: the batch that it executes now. The
        batch returns to the server after this stage, and the instances of all others are needed for calls.
        """
        run = self.current
        if run is None or run.batch.route is None or run.number == self._recalled or number not in (run.number, None):
            return
        self._recalled = run.number
        run.cancel()


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
