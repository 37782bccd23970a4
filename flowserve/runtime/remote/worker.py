"""A worker whose instance runs in another process: a worker process, or an actor on another machine.

Decides how such an instance is opened, given batches and closed, whatever connects it to the server (port.py): a batch
is packed and sent on the event loop, and what comes back is a message to `take`. Decides what each message means, which
batches fail when the process ends, and how often it is requested to release idle memory after its last batch;
supervisor.py decides when the next process starts. A process that sends an invalid message is ended.

run.py decides the outcome of a batch, also of one that passes several instances, sink.py what a response of a decoupled
model means. Does not know queues or callers. Workers are made by factory.py and driven by the engine, on the event
loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import trio

from flowserve.backends.base import Results
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import ColumnPlace, Garbled, encode_about, encode_run
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Internal, Unavailable
from flowserve.memory.arena import Arena
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.model_calls.remote_calls import CallPort, MemoryOf, RemoteCalls
from flowserve.runtime.remote.run import RemoteRun
from flowserve.runtime.remote.sink import RemoteSink
from flowserve.runtime.workers.base import Outcome, Returned, StateAdapter, WorkerContext, counts_nothing, works
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket
from flowserve.values import TensorSpec

log = logging.getLogger("flowserve.runtime")
# How often a process is requested to release idle memory after its last batch. A request is sent every few seconds, and
# memory counts as idle at the fifth request.
_RELEASES: Final = 6
# Processes forked by a model that may call other models at once: each has a socket in the server.
_FORKS_MAX: Final = 256
_REPLIES: Final = frozenset((messages.DONE, messages.FAILED, messages.NOT_RUN))

# An instance that takes two batches would run the second one only after the first, whose call may wait for it.
_CALLS_TOO_EARLY: Final = (
    "model '{}' calls other models, which no file in its folder shows (pb_utils.InferenceRequest(...)): its instance "
    "on another machine takes two batches at once, and must not wait; move the code that calls into the model's folder"
)


class RemoteWorker:
    """One instance in another process. While there is none, `ended` is how the last one ended. `runs`: the batches in
    the process, or sent to it, in order. `has_answered`: a batch returned from it; the supervisor resets this when a
    process begins to serve. `on_end` is called on the event loop when the process has ended. `where`: its model and
    instance, for messages.

    `streams`: for a decoupled model.
    """

    context: WorkerContext  # set by the last `open`

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        port: Any,
        clock: ClockNs,
        *,
        state: StateAdapter | None = None,
        streams: ResponseStreams | None = None,
    ) -> None:
        """`port`: a `RemotePort`. The ports between which batches pass are of one kind, and know more of each other."""
        self.name = name
        self.port = port
        self.state = state or StateAdapter()
        self.has_state = streams is not None or type(self.state) is not StateAdapter
        self.is_on_gpu = False  # its process has a context of its own
        self.outage = works
        self.counted_there = counts_nothing
        self.route_group: object = port.route_group
        self.computes_apart: bool = port.computes_apart
        self.depth: int = port.depth
        self.ended = ""
        self.has_answered = False
        self.on_end: Callable[[], None] | None = None
        self.runs: dict[int, RemoteRun] = {}
        self.reader = OutputReader(config.name, config.outputs, batches=config.max_batch_size > 0)
        self.where = f"model '{config.name}', instance '{name}'"
        self._model = config.name
        self._clock = clock
        self._streams = streams
        self._sink: RemoteSink | None = None  # the process's sink, if the model is decoupled
        self._calls: list[RemoteCalls] = []  # of its process, and of those that the model has forked
        self._families: set[int] = set()  # the metric families of all these
        self._recalled = 0  # the number of the last batch that left its route because of a call; its run may be over
        self._is_opening = False
        self._releases_due = 0

    @property
    def arena(self) -> Arena | None:
        """As `Worker.arena`."""
        found: Arena | None = self.port.arena
        return found

    def share(self, output: int, spec: TensorSpec) -> None:
        """As `Worker.share`; all outputs of its process are in one block."""
        self.port.share()

    @property
    def running(self) -> Batch | None:
        """The oldest batch in the process; of a batch on a route, this worker's stage."""
        for run in self.runs.values():
            return run.batch.stage(run.workers.index(self))
        return None

    @property
    def batches(self) -> list[Batch]:
        """All its batches in the process, as `running`."""
        return [run.batch.stage(run.workers.index(self)) for run in self.runs.values()]

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, context: WorkerContext) -> None:
        """Start the process and open the instance there. Blocks; called on a loader's thread. Raises the model's
        exception, or an error if its process ended. May be called again after that, and after `on_end`.
        """
        self.context = context
        self._is_opening = True
        try:
            self.port.open(self)
        except BaseException:
            self.post(self.end_calls)
            raise
        finally:
            self._is_opening = False
        if self._streams is not None:
            self._sink = RemoteSink(self.port, self.reader, self._streams)
        self.ended = ""
        self.port.serve()

    def kill(self, why: str) -> None:
        """End its process immediately, for this reason. No effect if there is none."""
        self.port.kill(why)

    def give_up(self, why: str) -> None:
        """As `RunsElsewhere.give_up`."""
        self.port.give_up(why)

    def close(self) -> None:
        """End the instance after its running batches. Blocks; called on a thread."""
        self.port.close()

    def readiness(self) -> Callable[[], str] | None:
        """As `AsksModel.readiness`."""
        found: Callable[[], str] | None = self.port.readiness()
        return found

    def post(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, if the loop still runs."""
        with suppress(trio.RunFinishedError):
            self.context.token.run_sync_soon(self._carry_out, what, arguments)

    def _carry_out(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            what(*arguments)
        except Exception as error:  # if it propagated, it would end the server
            log.exception("instance %s: what was to be done about its process failed", self.name)
            self.broke(error)

    # ------------------------------------------------------------------ batches, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Send a batch. Returns None if its outcome arrives later."""
        port = self.port
        workers: Sequence[RemoteWorker] = port.path_of(batch)
        if not workers:
            return Unavailable(f"{self.where}: its process is not running")
        number = next(port.run_numbers)
        try:
            work = self.state.work(batch.tickets)
            batch.started_ns = self._clock()
            packed = port.pack(work)
            if self._sink is not None:
                self.state.restart(batch.tickets)
                self._sink.begin(number, batch)
            run = RemoteRun(number, batch, work.rows, workers, None)
            port.send(run, work, packed)
        except OSError as error:
            return self._failed(batch, Internal(f"{self.where}: a batch cannot be sent: {error.strerror}"))
        except FlowserveError as error:
            return self._failed(batch, error.with_traceback(None))  # a traceback would keep the batch alive
        port.runs[number] = run
        for worker in workers:
            worker.runs[number] = run
            worker._releases_due = _RELEASES
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`."""
        if self._streams is not None:
            self._streams.finish(batch, outcome)
        return self.state.finish(batch, outcome)

    def recall(self, batch: Batch) -> None:
        """Return a batch from its route as early as possible."""
        for run in self.runs.values():
            if run.batch is batch:
                self.port.recall(run)

    def release_idle(self) -> bool:
        """Request its process to release memory that it has not used for a while. Called every few seconds. Returns
        whether it must be called again even without a batch in between.
        """
        is_quiet = self._releases_due < _RELEASES and not self.runs
        if self.port.has_free_blocks:
            self._releases_due = _RELEASES
        if self._releases_due:
            self._releases_due -= 1
            self.port.release_idle(is_quiet=is_quiet)
        return self._releases_due > 0

    def _failed(self, batch: Batch, error: FlowserveError) -> Outcome:
        """The outcome of a batch that failed as a whole. The responses of a decoupled model end with it."""
        if self._streams is None:
            return error
        if self._sink is not None:
            self._sink.fail(error, batch.tickets)
        return Returned(error=error)

    # ------------------------------------------------------------------ messages of its process, on the event loop

    def take(self, kind: int, words: Sequence[int], text: bytes, memory_of: MemoryOf) -> bool:
        """Process a message. Returns whether it was the reply to a batch. Raises Garbled."""
        if kind not in _REPLIES:
            if self._sink is None:
                raise Garbled(f"a message of kind {kind}")
            self._sink.take(kind, words, text, memory_of, self.running)
            return False
        number = words[1]
        run = self.runs.get(number)
        if run is None:
            run = self.port.runs.get(number)  # this instance was released before the batch's route was over
            if run is None or self not in run.workers:
                if kind == messages.NOT_RUN:
                    return False  # the batch was lost meanwhile
                raise Garbled(f"a reply to batch {number}, which it does not have")
        outcome = run.outcome(self, kind, words, text, self._clock())
        self.has_answered = True
        self.complete(run, outcome)
        return True

    def complete(self, run: RemoteRun, outcome: Outcome) -> None:
        """Append the outcome of a batch for the engine's step, which follows the batch of events in which the message
        was read; at the end of a process, the port wakes the engine for it.
        """
        self.port.runs.pop(run.number, None)
        for worker in run.workers:
            worker.runs.pop(run.number, None)
        if self._streams is not None:
            if isinstance(outcome, Results):
                outcome = Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
            elif isinstance(outcome, FlowserveError):
                outcome = self._failed(run.batch, outcome)
        self.context.completions.waiting.append((run.batch, outcome))

    def leave(self, run: RemoteRun) -> None:
        """This instance will no longer run the batch: release it before the other stages of the route are over, and
        complete the batch if it is lost.
        """
        if run.batch.route is not None:
            self.runs.pop(run.number, None)
            self.context.release(run.batch, (run.workers.index(self),))
        outcome = run.lost(self._clock())
        if outcome is not None:
            self.complete(run, outcome)

    # ------------------------------------------------------------------ the end of its process, on the event loop

    def down(self, how: str) -> RemoteSink | None:
        """The process has ended, or takes no more batches. Returns the sink of its responses, which are to be failed.
        The port completes its batches.
        """
        sink, self._sink = self._sink, None
        self.ended = how
        self.end_calls()
        return sink

    def report_end(self) -> None:
        """Tell the supervisor that the process has ended."""
        if self.on_end is not None:
            self.on_end()

    def broke(self, error: Exception) -> None:
        """Handle an internal error about its process, or a resource that the system did not provide. The state of the
        process is unknown, so it is killed: otherwise its batch might wait for ever.
        """
        self.port.end(f"its process was killed: the server could not go on with it ({type(error).__name__}: {error})")

    # ------------------------------------------------------------------ calls of its model

    def begin_calls(self, *, is_fork: bool) -> Callable[[CallPort], RemoteCalls] | None:
        """Its process, or one that the model has forked, is about to call models. Returns a function that makes its
        calls from their port; None if they are too many. Raises Garbled.
        """
        calls = self.context.calls
        if calls is None or (self._calls and not is_fork and not self._calls[0].is_fork):
            raise Garbled("a second socket for calls")
        if len(self._calls) > _FORKS_MAX:
            text = "%s: a forked process cannot call models: %d others do"
            log.error(text, self.where, _FORKS_MAX)
            return None

        def make(port: CallPort) -> RemoteCalls:
            refusal = _CALLS_TOO_EARLY.format(self._model) if self.depth > 1 else ""
            made = RemoteCalls(
                self._model, calls, port, self, families=self._families, is_fork=is_fork, refusal=refusal
            )
            self._calls.append(made)
            return made

        return make

    def calls_ended(self, calls: RemoteCalls) -> None:
        """A process has closed its socket for calls."""
        self._calls.remove(calls)

    def end_calls(self) -> None:
        """Its process has ended, and with it the calls of its model."""
        for calls in [*self._calls]:
            calls.close()

    def kill_for(self, what: str) -> None:
        """End its process, which sent an invalid message."""
        self.port.garbled(what)

    @property
    def loads(self) -> str:
        """The model's name while it is being opened, else ""."""
        return self._model if self._is_opening else ""

    def end_route(self, number: int | None) -> None:
        """Its model makes a call while it executes this batch of a route, None: the batch that it executes now. The
        batch returns to the server after this stage, and the instances of all others are needed for calls.
        """
        run = next(iter(self.runs.values()), None)
        if run is None or run.batch.route is None or run.number == self._recalled or number not in (run.number, None):
            return
        self._recalled = run.number
        self.port.recall(run)


def encode_batch(
    run: RemoteRun,
    route: int,
    wanted: Sequence[Sequence[int]],
    facts: Sequence[Any] | None,
    updates: Sequence[int],
    columns: Sequence[ColumnPlace],
) -> bytes:
    """The RUN message of a batch. `route`: its number there, 0 for none; `facts`: None if those of all members are
    plain; `updates`: the words for all stages.
    """
    about: Sequence[int] = ()
    text = b""
    if facts is not None or run.batch.contexts:
        about, text = encode_about(facts, run.batch.contexts)
    return encode_run(run.number, route, 0, run.rows, wanted, updates, columns, about=about, text=text)
