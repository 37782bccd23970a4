"""A worker whose instance runs in a process of its own.

Decides how such an instance is opened, given batches and closed: a batch is packed and sent on the event loop and its
reply is read there, without a thread or task for each process. A process that sends an invalid message is killed.
When a process has ended, its batch fails; supervisor.py decides when the next process starts. process_run.py decides
the outcome of a batch, ipc/ the transport of messages. Does not know queues or callers. Made by factory.py, driven by
the engine.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import trio

from flowserve.backends.base import Remote, Results
from flowserve.backends.worker.protocol import BROKEN, CANCELLED, DONE, FAILED, READY, RETURNED, Job, decode_error
from flowserve.backends.worker.run_message import News
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, Internal, ModelFailed, Unavailable
from flowserve.runtime.ipc.channel import Channel
from flowserve.runtime.ipc.decoder import Garbled, OutputReader
from flowserve.runtime.ipc.encoder import InputPacker
from flowserve.runtime.ipc.routes import route_number
from flowserve.runtime.model_calls.process_calls import ProcessCalls
from flowserve.runtime.processes.children import Child, SpawnChild
from flowserve.runtime.workers.base import WorkerContext
from flowserve.runtime.workers.outcome import Outcome, Returned
from flowserve.runtime.workers.process_pool import ProcessPool
from flowserve.runtime.workers.process_run import ProcessRun
from flowserve.runtime.workers.process_sink import ProcessSink
from flowserve.runtime.workers.sink import end_warm_up
from flowserve.runtime.workers.state import StateAdapter
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket

log = logging.getLogger("flowserve.runtime")

ENTRY: Final = "flowserve.backends.worker.main:serve"
# A model that is unloaded has this long to finish and to finalise; at the end of the server the exit timeout counts.
CLOSE_S_MAX: Final = 600.0


class ProcessWorker:
    """One instance in a worker process. `child` is that process and `channel` the way to it while the instance is open
    there; while there is no process, `ended` is how the last one ended.

    `streams`: of a decoupled model. `on_end` is called on the event loop when a process ended, after its batch failed.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        remote: Remote,
        packer: InputPacker,
        spawn: SpawnChild,
        pool: ProcessPool,
        *,
        state: StateAdapter | None = None,
        streams: ResponseStreams | None = None,
    ) -> None:
        self.name = name
        self.state = state or StateAdapter()
        self.has_state = streams is not None or type(self.state) is not StateAdapter
        self.is_on_gpu = False  # its process has a context of its own
        self.route_group: object = "process" if streams is None and type(self.state) is StateAdapter else None
        self.child: Child | None = None
        self.channel: Channel | None = None
        self.ended = ""
        self.on_end: Callable[[], None] | None = None
        batches = config.max_batch_size > 0
        self.reader = OutputReader(config.name, config.outputs, batches=batches)
        self.packer = packer
        self._model = config.name
        self._job = Job(config.name, name, config.inputs, config.outputs, batches, remote, config.decoupled)
        self._spawn = spawn
        self._pool = pool
        self._streams = streams
        self._sink: ProcessSink | None = None  # of the process, where the model is decoupled
        self._context: WorkerContext | None = None
        self._run: ProcessRun | None = None  # the batch that the process has, or that is on its way there
        self._calls: ProcessCalls | None = None  # once its model has called another
        self._is_closed = False
        self._opening: Child | None = None  # while it is not open yet; its model may make calls already
        self._given_up = ""

    @property
    def running(self) -> Batch | None:
        """The batch that the process has, as this worker's stage has it."""
        run = self._run
        return None if run is None else run.batch.stage(run.stage_of(self))

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, context: WorkerContext) -> None:
        """Start the process and open the instance there. Blocks; called on a loader's thread. Raises the model's
        exception, or an error if its process ended. May be called again after that, and after `on_end`.
        """
        self._context = context
        job = self._pool.numbered(self._job)
        child = self._spawn(self.name, ENTRY, pickle.dumps(job), log_name=self._model)
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
        with suppress(OSError):  # where it is gone already
            channel.end()
        if not child.wait(CLOSE_S_MAX):
            child.kill(why=f"its process was killed, because it had not ended {CLOSE_S_MAX:g} s after it was told to")
            log.error("model '%s', instance '%s': %s", self._model, self.name, child.why)
        self._post(self._disconnect)

    def _drop(self, child: Child, channel: Channel) -> None:
        channel.close()
        child.kill()
        self._post(self._end_calls)

    def _post(self, what: Callable[..., None], *arguments: Any) -> None:
        """Do it on the event loop, where there still is one."""
        assert self._context is not None
        with suppress(trio.RunFinishedError):
            self._context.token.run_sync_soon(self._carry_out, what, arguments)

    # ------------------------------------------------------------------ batches, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Send a batch. Returns None where its outcome comes later."""
        workers: Sequence[ProcessWorker] = (self,) if batch.route is None else batch.instances
        channels: Sequence[Channel | None]
        channels = (self.channel,) if batch.route is None else [worker.channel for worker in workers]
        if None in channels:
            return Unavailable(f"model '{self._model}', instance '{self.name}': its process is not running")
        number = next(self._pool.run_numbers)
        run = self._pool.runs[number] = ProcessRun(number, batch, workers, channels)  # type: ignore[arg-type]
        for worker in workers:
            worker._run = run
        try:
            self._send(run, channels)  # type: ignore[arg-type]
        except FlowserveError as error:
            self._end(run)
            return self._failed(batch, error.with_traceback(None))  # a traceback would keep the batch alive
        except OSError as error:
            self._end(run)
            what = f"model '{self._model}', instance '{self.name}': a batch cannot be sent: {error.strerror}"
            return self._failed(batch, Internal(what))
        except Exception:
            self._end(run)
            raise
        return None

    def _send(self, run: ProcessRun, channels: Sequence[Channel]) -> None:
        batch = run.batch
        work = self.state.work(batch.tickets)
        if batch.contexts:
            work.contexts = batch.contexts[0]
        batch.started_ns = self._pool.clock()
        run.packed = self.packer.pack(work.inputs)
        run.rows = work.rows
        if self._sink is not None:
            self.state.restart(batch.tickets)
            self._sink.begin(run.number, batch)
        news: Sequence[News]
        news = (channels[0].news(),) if batch.route is None else [channel.news() for channel in channels]
        try:
            message = self.packer.message(run.number, work, run.packed, news[0])
            if batch.route is not None:
                route = batch.route
                message.route = route_number(route, channels, batch.instances)
                message.later_news = news[1:]
                message.contexts = batch.contexts
            channels[0].run(message, run.packed, self.packer)
        except Exception:
            for channel, one in zip(channels, news, strict=True):
                channel.put_back(one)
            raise
        run.news = news

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`."""
        if self._streams is not None:
            self._streams.catch_up()
            end_warm_up(self._streams, batch, outcome)
        return self.state.finish(batch, outcome)

    def recall(self, batch: Batch) -> None:
        """The batch is to return from its route as early as it can."""
        if self._run is not None and self._run.batch is batch:
            self._run.cancel()

    def _end(self, run: ProcessRun) -> None:
        """The batch is back: its workers have it no more."""
        del self._pool.runs[run.number]
        workers: Sequence[ProcessWorker] = (self,) if run.batch.route is None else run.batch.instances
        for worker in workers:
            if worker._run is run:
                worker._run = None

    def _failed(self, batch: Batch, error: FlowserveError) -> Outcome:
        """The outcome of a batch that failed as a whole. The responses of a decoupled model end with it."""
        if self._streams is None:
            return error
        if self._sink is not None:
            self._sink.fail(error, batch.tickets)
        return Returned(has_failed=True)

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
                        run = self._other_run(kind, words[1])
                    if run is not None:
                        self._complete(run, run.outcome(self, kind, words, text, self._pool.clock()))
                        return  # after a reply a process sends nothing by itself
                elif kind == CANCELLED:
                    self._cancelled(words)
                elif self._sink is not None:
                    self._sink.take(kind, words, text, self._run.batch if self._run is not None else None)
                else:
                    raise Garbled(f"a message of kind {kind}")
        except EOFError:
            self._pool.readiness.forget(child.socket.fileno())
            child.hung_up()
        except Garbled as error:
            self.wrong(str(error))
        except Exception as error:  # whatever a message leads to, it concerns this process only
            self.wrong(f"{type(error).__name__}: {error}")

    def _other_run(self, kind: int, number: int) -> ProcessRun | None:
        """The batch of an earlier route that a reply is about; None where it was lost meanwhile. Raises Garbled."""
        run = self._pool.runs.get(number)
        if run is None or self not in run.workers:
            if kind == RETURNED:
                return None
            raise Garbled(f"a reply to batch {number}, which it does not have")
        return run

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
        assert self._context is not None
        self._context.completions.waiting.append((run.batch, outcome))

    def _cancelled(self, words: Sequence[int]) -> None:
        run = self._pool.runs.get(words[1])
        if run is None or self not in run.workers:
            return  # it is back meanwhile
        stage = run.cancelled(self, words)
        if self._run is run:
            self._run = None
        assert self._context is not None
        self._context.release(run.batch, (stage,))
        self._complete_if_lost(run)

    def _complete_if_lost(self, run: ProcessRun) -> None:
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
            for run in runs:  # also one on a route that this process has passed
                run.died(self, child.ended)
                self._complete_if_lost(run)
        finally:
            assert self._context is not None
            self._context.wake()
            if self.on_end is not None:
                self.on_end()

    def _disconnect(self) -> None:
        channel, child = self.channel, self.child
        self.channel = self.child = self._sink = None
        if channel is not None and child is not None:
            self._pool.readiness.forget(child.socket.fileno())
            channel.close()
        self._end_calls()

    def wrong(self, what: str) -> None:
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
        except Exception as error:  # raised further it would end the server
            log.exception("instance %s: what was to be done about its process failed", self.name)
            self._broke(error)

    # ------------------------------------------------------------------ calls of its model

    def _begin_early_calls(self, child: Child, fd: int) -> None:
        try:
            self._begin_calls(fd)
        except Garbled as error:
            child.kill(why=_garbled(str(error)))

    def _begin_calls(self, fd: int) -> None:
        assert self._context is not None
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

    def cut(self, number: int) -> None:
        """Its model makes a call while it executes this batch of a route: the batch returns to the server after this
        stage, and the instances of all others are needed for calls.
        """
        run = self._run
        if run is not None and run.number == number and run.batch.route is not None:
            run.cancel()


_REPLIES: Final = frozenset((DONE, FAILED, RETURNED))


def _garbled(what: str) -> str:
    return f"what its process said cannot be ({what}); it was killed"


def _await_open(child: Child, channel: Channel) -> None:
    """Block until the instance is open. Raises why it is not."""
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
            raise ModelFailed(f"instance '{child.name}': what its process said cannot be: {error}") from None
        if message is not None:
            kind, _, text = message
            if kind == READY:
                return
            if kind == BROKEN:
                raise decode_error(json.loads(text))
            raise ModelFailed(f"instance '{child.name}': what its process said cannot be: a message of kind {kind}")
        if child.pidfd in ready:
            raise ModelFailed(child.how_it_ended())
