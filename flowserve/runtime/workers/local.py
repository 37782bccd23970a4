"""A worker in the server's own process: on a thread of its own, or on the event loop.

Decides how a batch is run there: inline if configured or if measurements allow it, else on the worker's thread, which
takes batches from a queue and reports through `Completions`. A batch with a route passes its stages one after the other
in this process, up to the first stage that would not run inline.

`Placement` decides by measurement: a batch whose size class is measured to cost less than a hop to a thread (and does
not delay the loop for long) runs inline; a size class that becomes slow returns to the thread. A hop to a thread costs
50 to 80 us if nothing else is in flight, and switches the interpreter between threads twice.

Does not know queues or callers, nor how a model computes (backends/). Made by factory.py, driven by the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowserve.backends.base import CallsModels, Instance, KnowsReadiness, NeedsOthers, Results, SharesOutputs, Work
from flowserve.errors import FlowserveError, ModelFailed, Unavailable, model_raised, told
from flowserve.memory import raw
from flowserve.memory.column import Column, whole_output
from flowserve.memory.devices import check_for_loss, lost
from flowserve.memory.raw import EncodedBytes
from flowserve.memory.tensor import Tensor
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.model_calls.calls import ThreadCaller
from flowserve.runtime.workers.base import (
    Outcome,
    Passed,
    Returned,
    StateAdapter,
    WorkerContext,
    cannot_start,
    counts_nothing,
    works,
)
from flowserve.runtime.workers.streaming import ResponseStreams, thread_senders
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.route import Route
from flowserve.values import DType, TensorSpec

log = logging.getLogger("flowserve.runtime")
# Runs up to this time are cheaper on the loop: the hop and the switch of threads cost as much.
INLINE_BELOW_NS: Final = 150_000
# Runs above this time delay other connections too much. Between the two limits the place is kept, so that it does not
# alternate.
THREAD_ABOVE_NS: Final = 400_000
# The first runs of a size allocate and warm caches; they are not representative.
_FIRST_RUNS: Final = 3
# A size that returned to the thread is considered again only after this number of runs there.
_RUNS_BEFORE_RETRY: Final = 200


class LocalWorker:
    """One instance in the server's own process.

    `output_count`: how many outputs each run must have; None for a decoupled model, whose responses go to `streams`.
    `placement`: chooses between the event loop and the thread by measurement; None: no choice. `always_inline`: on the
    event loop. `may_write`: the model may write into inputs that nothing else reads.
    """

    _context: WorkerContext  # set by `open`

    def __init__(
        self,
        name: str,
        model: str,
        instance: Instance,
        output_count: int | None,
        clock: ClockNs,
        *,
        state: StateAdapter | None = None,
        streams: ResponseStreams | None = None,
        placement: Placement | None = None,
        always_inline: bool = False,
        may_write: bool = False,
    ) -> None:
        self.name = name
        self.state = state or StateAdapter()
        self.has_state = streams is not None or type(self.state) is not StateAdapter
        self.always_inline = always_inline
        self.running: Batch | None = None  # the batch on its thread
        self.is_on_gpu = False  # whether it computes on a GPU, even if its tensors are on the host
        may_be_inline = always_inline or placement is not None
        self.route_group: object = "local" if may_be_inline and not self.has_state else None
        self.computes_apart = False  # a route stays on the event loop
        self._model = model
        self._instance = instance
        self._output_count = output_count
        self._clock = clock
        self._streams = streams
        self._placement = placement
        self._may_write = may_write
        self._shared_strings: Mapping[int, str] = {}  # names of the BYTES outputs that other processes read
        self._caller: ThreadCaller | None = None  # set if its model may call others
        self.outage = instance.outage if isinstance(instance, NeedsOthers) else works
        self.counted_there = instance.statistics if isinstance(instance, NeedsOthers) else counts_nothing
        self.arena = None
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[tuple[Batch, Callable[[], Outcome]] | None] = queue.SimpleQueue()

    # ------------------------------------------------------------------ opening and closing

    def open(self, context: WorkerContext) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises the model's exception."""
        if isinstance(self._instance, CallsModels) and context.calls is not None:
            self._caller = ThreadCaller(self._model, context.calls, lambda: self.running)
            self._instance.call_through(self._caller)
        if self.always_inline:
            self._instance.open()
            return
        self._context = context
        opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # Daemon: a model that never returns must not keep the process alive past its exit timeout.
        self._thread = threading.Thread(target=self._serve, args=(opened,), name=f"flowserve {self.name}", daemon=True)
        self._thread.start()
        error = opened.get()
        if error is not None:
            self._thread = None
            raise error

    def share(self, output: int, spec: TensorSpec) -> None:
        """As `Worker.share`."""
        if spec.dtype is DType.BYTES:
            self._shared_strings = {**self._shared_strings, output: spec.name}  # its thread reads the old mapping
        if isinstance(self._instance, SharesOutputs):
            self._instance.share(output)

    def readiness(self) -> Callable[[], str] | None:
        """As `AsksModel.readiness`."""
        return self._instance.readiness() if isinstance(self._instance, KnowsReadiness) else None

    def close(self) -> None:
        """Stop the thread after its running batch, and close the instance there. Blocks; called on another thread."""
        if self._thread is None:
            if self.always_inline:
                self._instance.close()
            return
        self._work.put(None)
        self._thread.join()

    # ------------------------------------------------------------------ running, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or pass it to the thread and return None."""
        work = self._work_of(batch.tickets)
        if batch.contexts:
            work.contexts = batch.contexts[0]
        if self._streams is not None:
            self.state.restart(batch.tickets)
            work.senders = thread_senders(batch, self._streams, self.executed_here)
        if self.is_inline(batch.rows):
            return self._execute(batch, work, inline=True)
        if batch.route is not None:
            # A batch returns from its thread after the first stage. The model may call a model of a later stage.
            self._context.release(batch, range(1, len(batch.route)))
        self.run_on_thread(batch, lambda: self._execute(batch, work, inline=False))
        return None

    def run_on_thread(self, batch: Batch, execute: Callable[[], Outcome]) -> None:
        """Call `execute`, which does not raise, on its thread, and report the outcome."""
        self.running = batch
        self._work.put((batch, execute))

    def is_inline(self, rows: int) -> bool:
        """Whether a batch of `rows` rows would run on the event loop now."""
        return self.always_inline or (self._placement is not None and self._placement.is_inline(rows))

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`."""
        if self._streams is not None:
            self._streams.finish(batch, outcome)
        return self.state.finish(batch, outcome)

    def executed_here(self) -> Batch | None:
        """The batch that the calling thread executes; None on any thread but the worker's own."""
        return self.running if threading.current_thread() is self._thread else None

    def recall(self, batch: Batch) -> None:
        """No effect: a batch on a route runs on the event loop, and completes before any other event."""

    def _work_of(self, tickets: Sequence[Ticket]) -> Work:
        return self.state.work(tickets, may_write=self._may_write)

    # ------------------------------------------------------------------ on its thread, or on the event loop

    def _execute(self, batch: Batch, work: Work, *, inline: bool) -> Outcome:
        batch.started_ns = self._clock()
        outcome = self.compute(work, batch.rows, batch.started_ns, inline=inline)
        if self._streams is not None:
            return self._returned(batch, work, outcome)
        if batch.route is None:
            return outcome
        if not isinstance(outcome, Results):
            return Passed([], outcome)
        if not inline:
            return Passed([outcome])
        return pass_stages(batch, work, outcome, self._next_stage)

    def _returned(self, batch: Batch, work: Work, outcome: Results | FlowserveError) -> Returned:
        """The outcome of a decoupled model's run, which ends when `execute` returns, even if more responses will be
        sent.
        """
        if isinstance(outcome, Results):
            return Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
        for sender in work.senders or ():
            sender.fail(outcome)  # after its earlier responses; no effect on a finished sender
        return Returned(error=outcome)

    def _next_stage(self, batch: Batch, i: int, work: Work) -> Results | FlowserveError | None:
        worker = batch.instances[i]
        assert isinstance(worker, LocalWorker)
        if not worker.is_inline(batch.rows):
            return None
        return worker.compute(work, batch.rows, self._clock(), inline=True)

    def compute(self, work: Work, rows: int, begun_ns: int, *, inline: bool) -> Results | FlowserveError:
        """Run a batch of `rows` rows on the calling thread."""
        if self.is_on_gpu and (why := lost()):
            return Unavailable(why)
        try:
            results = self._instance.run(work, self._clock)
        except FlowserveError as error:
            check_for_loss()
            return _without_frames(error)
        except BaseException as error:  # any kind: requests would wait for ever for a dead thread
            check_for_loss()
            what = told(error, str(error), len(work.rows))
            return model_raised(f"model '{self._model}', instance '{self.name}' failed: {what}", error)
        taken = results.taken = []
        for column in work.inputs:
            taken.append(column.nbytes)  # noqa: PERF401  # a comprehension is one more call
        if results.errors:
            check_for_loss()
            for failed in results.errors.values():
                _without_frames(failed)
        if self._output_count is not None:
            is_whole, count = len(results.outputs) == self._output_count, len(work.rows)
            for output in results.outputs:
                if len(output.rows if type(output) is Column else output) != count:
                    is_whole = False
            if not is_whole:
                return ModelFailed(f"model '{self._model}', instance '{self.name}': its backend lost a member")
        for j, name in self._shared_strings.items():
            if results.outputs:
                results.outputs = [*results.outputs]
                results.outputs[j] = _encoded(results.outputs[j], name, self._model)
        if self._placement is not None:
            self._placement.measured(rows, self._clock() - begun_ns, inline=inline)
        return results

    def _serve(self, opened: queue.SimpleQueue[BaseException | None]) -> None:
        if self._caller is not None:
            self._caller.serve_here()
        try:
            self._instance.open()
        except BaseException as error:
            opened.put(error)
            return
        opened.put(None)
        while (item := self._work.get()) is not None:
            batch, execute = item
            try:
                outcome = execute()
            except Exception as error:  # an internal error: requests would wait for ever for a dead thread
                outcome = cannot_start(self, batch, error)
            del item, execute  # releases the inputs before the engine gets the outcome
            self.running = None
            self._context.completions.add(batch, outcome)
            del batch, outcome
        try:
            self._instance.close()
        except Exception:
            log.exception("closing instance %s failed", self.name)


def pass_stages(
    batch: Batch,
    work: Work,
    first: Results,
    run_stage: Callable[[Batch, int, Work], Results | FlowserveError | None],
) -> Passed:
    """Pass the stages of a batch's route after the first, whose results for `work` are `first`, until the batch must
    return: a member failed, or its outputs cannot be passed on unchanged. `run_stage` returns None for a stage that
    does not run.
    """
    route = batch.route
    assert route is not None
    passed = Passed([first])
    made = passed.made
    for i in range(1, len(route.nodes)):
        last = made[-1]
        if (
            last.errors
            or last.parameters
            or last.raised
            or (last.notes is not None and (last.notes.unlike or last.notes.left_out))
        ):
            break  # the scheduler and the callers have precedence
        following = _following(route, i, work, made)
        if following is None:
            break
        if batch.contexts:
            following.contexts = batch.contexts[i]
        results = run_stage(batch, i, following)
        if results is None:
            break
        if not isinstance(results, Results):
            passed.error = results
            del results  # the frames of an exception in it reference this frame and the batch
            break
        made.append(results)
    return passed


def _following(route: Route, i: int, before: Work, made: Sequence[Results]) -> Work | None:
    """The inputs of stage i. None if a member lacks an input, or the tensors do not fit into one batch."""
    rows, count = before.rows, len(before.rows)
    columns = []
    for stage, j in route.reads[i - 1]:
        column = whole_output(made[stage].outputs[j], rows)
        if column is None:
            return None
        columns.append(column)
    for k, dims in route.checks[i - 1]:
        first = columns[k][0]
        if first is None or any(want not in (-1, got) for want, got in zip(dims, first.shape[1:], strict=True)):
            return None
    writable = []
    for is_last in route.last_reads[i - 1]:
        writable.append([is_last] * count)  # noqa: PERF401  # a comprehension is one more call
    return Work(columns, rows, before.requests, [route.nodes[i].wanted] * count, writable)


def _encoded(column: Sequence[Tensor | None], name: str, model: str) -> Sequence[Tensor | None]:
    """An output with its large blocks encoded, on this thread, so that the event loop does not have to encode them for
    the process.
    """
    tensors = [*column]
    blocks: dict[int, Any] = {}
    for m, tensor in enumerate(tensors):
        if tensor is None or tensor.block.size <= raw.INLINE_ELEMENTS_MAX:
            continue
        block = tensor.block
        if id(block) not in blocks:
            data = raw.encode_in_steps(block, lambda: None)
            blocks[id(block)] = EncodedBytes.of(data, name, model, block.shape, is_output=True)
        tensors[m] = Tensor(blocks[id(block)], tensor.start, tensor.stop)
    return tensors if blocks else column


def _without_frames(error: FlowserveError) -> FlowserveError:
    """The error without frames. The frames of the worker and of the engine reference the outcome of the batch: the
    error would be in a reference cycle, and keep the tensors of the batch alive until the garbage collector runs.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class Placement:
    """Chooses event loop or thread for one model, per size class of batches (powers of two of the row count)."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def is_inline(self, rows: int) -> bool:
        """Whether a batch of `rows` rows should run on the loop now."""
        found = self._classes.get(rows.bit_length())
        return found is not None and found.inline

    def measured(self, rows: int, duration_ns: int, *, inline: bool) -> None:
        """Record the duration of a batch. Sizes that were never measured run on the thread."""
        size = self._classes.get(rows.bit_length())
        if size is None:
            size = self._classes[rows.bit_length()] = _SizeClass()
        size.runs += 1
        if inline:
            # Clipped, so that one run during which the kernel preempted this process does not change the place.
            size.mean_ns += (min(duration_ns, 2 * THREAD_ABOVE_NS) - size.mean_ns) / 8
            if size.mean_ns > THREAD_ABOVE_NS:
                size.inline = False
                size.runs = -_RUNS_BEFORE_RETRY
                size.best_ns = 1 << 62
        elif size.runs > 0 and duration_ns < size.best_ns:
            size.best_ns = duration_ns
            if size.runs > _FIRST_RUNS and duration_ns < INLINE_BELOW_NS:
                size.inline = True
                size.mean_ns = float(duration_ns)
                size.runs = 0
        elif size.runs > _FIRST_RUNS and size.best_ns < INLINE_BELOW_NS:
            size.inline = True
            size.mean_ns = float(size.best_ns)
            size.runs = 0


@dataclass(slots=True, eq=False)
class _SizeClass:
    inline: bool = False
    runs: int = 0  # since the last change of place
    best_ns: int = 1 << 62  # on the thread: the shortest run, because contention only adds time
    mean_ns: float = 0.0  # inline: moving average
