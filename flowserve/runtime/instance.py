"""Where a batch meets a model: one host per instance; here those on the loop or on a thread of its own.

Decided here: how tickets become an instance's `Work`, how a run's outcome returns to the loop. One worker thread per
instance, fed by a queue; it answers through `TrioToken.run_sync_soon`, coalesced, so that a hop costs no task, channel
or lock per request. Policy is elsewhere: which batch (scheduling/), which place (placement.py), how to compute
(backends/).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import trio

from flowserve.backends.base import CallsModels, Instance, Results, SharesOutputs, Work
from flowserve.errors import FlowserveError, Internal, ModelFailed, ModelRaised, Unavailable
from flowserve.memory.devices import look_for_loss, lost
from flowserve.memory.tensor import Tensor
from flowserve.runtime.accounts import record_batch, who_stayed
from flowserve.runtime.calls import Calls, ThreadCaller
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.placement import Placement
from flowserve.runtime.pump import Bursts
from flowserve.runtime.streaming import Returned
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.router import Ticket

log = logging.getLogger("flowserve.runtime")

Outcome = Results | Returned | FlowserveError

T = TypeVar("T")
_Run = tuple[Callable[[], Any], Callable[[Any], None]]


class Returns(Generic[T]):
    """What comes back from worker threads, handed to the loop in one piece per turn. `take` is called there with one
    after the other; it does not raise.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, take: Callable[[T], None], pump: Bursts) -> None:
        self.token = token
        self.pump = pump
        self._take = take
        self._returned: deque[T] = deque()

    def add(self, returned: T) -> None:
        """Called on a worker thread."""
        self._returned.append(returned)
        try:
            self.token.run_sync_soon(self._drain, idempotent=True)
        except trio.RunFinishedError:
            log.debug("a batch came back after the server was gone")

    def _drain(self) -> None:
        returned, take = self._returned, self._take
        self.pump.begin_burst(0)
        try:
            while returned:
                take(returned.popleft())
        finally:
            self.pump.end_burst()


class Completions(Returns[tuple[Batch, Outcome]]):
    """Batches that came back. `finished` is for whoever is on the loop already, and who tells `broke` where that
    raises: a mistake of ours is that batch's business alone.
    """

    def __init__(
        self,
        token: trio.lowlevel.TrioToken,
        finished: Callable[[Batch, Outcome], None],
        broke: Callable[[Batch, Exception], None],
        pump: Bursts,
    ) -> None:
        super().__init__(token, self._take_in, pump)
        self.finished = finished
        self.broke = broke
        self.calls: Calls | None = None  # where models' calls of other models go

    def _take_in(self, returned: tuple[Batch, Outcome]) -> None:
        batch, outcome = returned
        try:
            self.finished(batch, outcome)
        except Exception as error:
            self.broke(batch, error)


class Host(Protocol):
    """One instance in its place, as the engine sees it. The scheduling room holds it as an opaque handle."""

    name: str
    running: Batch | None  # what it is busy with elsewhere than on the loop, for whoever must say who does not finish
    is_on_gpu: bool  # whether it computes there in the server's own process

    def open(self, completions: Completions) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises what the model raised."""

    def start(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or None where that comes later through the completions."""

    def close(self) -> None:
        """End it after what it runs now. Blocks; called on a worker thread."""


class LocalHost:
    """One instance in the server's own process."""

    def __init__(
        self,
        name: str,
        model: str,
        instance: Instance,
        input_count: int,
        output_count: int,
        placement: Placement | None,
        clock: ClockNs,
        *,
        always_inline: bool,
        may_write: bool,
        passes_on: bool = False,
        receives: bool = False,
    ) -> None:
        """`passes_on`, `receives`: how its model may take part in relays, as far as its tensors go (carriers.py)."""
        self.name = name
        self._model = model
        self._instance = instance
        self._inputs = range(input_count)
        self._output_count = output_count
        self._placement = placement
        self._clock = clock
        self.may_write = may_write
        self.always_inline = always_inline
        self.passes_on = passes_on
        self.receives = receives
        self._caller: ThreadCaller | None = None  # where its model may call others
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._completions: Completions  # where what its thread has run goes
        self.running: Batch | None = None  # what its thread is busy with
        self.is_on_gpu = False  # whether it computes there, wherever its tensors lie

    def open(self, completions: Completions) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises what the model raised."""
        if isinstance(self._instance, CallsModels) and completions.calls is not None:
            self._caller = ThreadCaller(self._model, completions.calls, lambda: self.running)
            self._instance.call_through(self._caller)
        if self.always_inline:
            self._instance.open()
            return
        self._completions = completions
        opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # Daemon: a model that never returns must not keep the process alive past its exit timeout.
        self._thread = threading.Thread(target=self._serve, args=(opened,), name=f"flowserve {self.name}", daemon=True)
        self._thread.start()
        error = opened.get()
        if error is not None:
            self._thread = None
            raise error

    def share(self, output: int) -> None:
        """From now on processes read this output."""
        if isinstance(self._instance, SharesOutputs):
            self._instance.share(output)

    def start(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or hand it to the thread and return None."""
        work = self._gather(batch.tickets)
        if self.is_inline(batch.rows):
            return self._run(batch, work, inline=True)
        self._run_later(batch, work)
        return None

    def _run_later(self, batch: Batch, work: Work) -> None:
        run = partial(self._run, batch, work, inline=False)
        self.run_on_thread(batch, run, lambda outcome: self._completions.add((batch, outcome)))

    def run_on_thread(self, batch: Batch, run: Callable[[], T], back: Callable[[T], None]) -> None:
        """Have its thread call `run`, which does not raise, and then `back` with what that returned."""
        self.running = batch
        self._work.put((run, back))

    @property
    def may_run_inline(self) -> bool:
        """Whether any batch could ever run on the loop."""
        return self.always_inline or self._placement is not None

    def is_inline(self, rows: int) -> bool:
        """Whether a batch of so many rows would run on the loop now."""
        return self.always_inline or (self._placement is not None and self._placement.is_inline(rows))

    def run_here(self, work: Work, rows: int) -> Results | FlowserveError:
        """Run a batch of so many rows, in place: on the loop, or on another instance's thread while this is idle."""
        return self._compute(work, rows, self._clock(), inline=True)

    def run_alone(self, work: Work) -> Results | None:
        """Run one member on the loop. None where its place is not there, and where anything is not as usual: it was
        run for nothing.
        """
        rows = work.rows[0]
        if not self.is_inline(rows):
            return None
        placement = self._placement
        begun_ns = self._clock()
        try:
            results = self._instance.run(work, self._clock)
        except BaseException:  # whatever it is, as in `_run`: a model's exit is not the server's
            return None
        if placement is not None:
            placement.measured(rows, results.computed_ns - begun_ns, inline=True)
        return None if results.errors or results.parameters or len(results.outputs) != self._output_count else results

    def close(self) -> None:
        """End the thread after what it runs now, and close the instance there. Blocks; called on a worker thread."""
        if self._thread is None:
            if self.always_inline:
                self._instance.close()
            return
        self._work.put(None)
        self._thread.join()

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        return gather(tickets, self._inputs, may_write=self.may_write)

    def _run(self, batch: Batch, work: Work, *, inline: bool) -> Outcome:
        batch.started_ns = self._clock()
        return self._compute(work, batch.rows, batch.started_ns, inline=inline)

    def _compute(self, work: Work, rows: int, begun_ns: int, *, inline: bool) -> Results | FlowserveError:
        if self.is_on_gpu and (why := lost()):
            return Unavailable(why)
        try:
            results = self._instance.run(work, self._clock)
        except FlowserveError as error:
            look_for_loss()
            return error
        except BaseException as error:  # whatever it is: behind a dead thread requests would wait for ever
            look_for_loss()
            return _raised(f"model '{self._model}', instance '{self.name}' failed: {error}", error)
        if results.errors:
            look_for_loss()
        if [*map(len, results.outputs)] != [len(work.rows)] * self._output_count:
            return ModelFailed(f"model '{self._model}', instance '{self.name}': its backend lost a member")
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
            run, back = item
            outcome = run()
            del item, run  # what it was given is held no longer once the loop hears of it
            self.running = None
            back(outcome)
            del back, outcome
        try:
            self._instance.close()
        except Exception:
            log.exception("closing instance %s failed", self.name)


def log_raised(error: ModelRaised, model: str, instance: str) -> None:
    """Nothing of the batch that it came of is run again."""
    log.error("model '%s', instance '%s' failed", model, instance, exc_info=error.__cause__)


def as_told(error: FlowserveError) -> FlowserveError:
    """What whoever waits for a batch hears of its failure."""
    return error.as_told() if isinstance(error, ModelRaised) else error


def note_failure(batch: Batch, error: FlowserveError, now_ns: int, *, is_tried_again: bool) -> None:
    """Say of a batch that raised what statistics and the log are to know."""
    observer = batch.queue.observer
    if is_tried_again:
        who_stayed(observer, batch.tickets)
        return
    record_batch(observer, batch, as_told(error), now_ns)
    if isinstance(error, ModelRaised):
        log_raised(error, batch.queue.key.name, batch.instance.name)


def cannot_start(host: Host, batch: Batch, error: Exception) -> Internal:
    """What becomes of a batch for which there is no memory, or in which a mistake of ours was found: raised further it
    would end the server, and all that is in it. Called where it is handled.
    """
    log.exception("instance %s: a batch cannot be started", host.name)
    what = f"{type(error).__name__}: {error}"
    return Internal(f"model '{batch.queue.key.name}', instance '{host.name}': a batch cannot be started: {what}")


def break_off(dispatcher: Dispatcher, batch: Batch, error: Exception) -> None:
    """As `cannot_start`, of a batch that has run: whoever of it is not answered yet is told so."""
    model, name = batch.queue.key.name, batch.instance.name
    log.error("instance %s: what came of a batch cannot be taken in", name, exc_info=error)
    what = f"what came of a batch cannot be taken in: {type(error).__name__}: {error}"
    try:
        dispatcher.break_off(batch, Internal(f"model '{model}', instance '{name}': {what}"))
    except Exception:
        log.exception("not everybody could be told that a batch of model '%s' failed", model)


def _raised(text: str, cause: BaseException) -> ModelRaised:
    failed = ModelRaised(text)  # in a frame that is none of the cause's: they would hold each other
    failed.__cause__ = cause
    return failed


def start_within(host: Host, batch: Batch, contexts: Sequence[str]) -> Outcome | None:
    """Start a batch whose model is told the spans that its members run in. What is not traced pays nothing for it."""
    hidden: Any = host  # hosts of every kind gather like this, which is nobody else's business
    inner: Callable[[Sequence[Ticket]], Work] = hidden._gather

    def gathered(tickets: Sequence[Ticket]) -> Work:
        work = inner(tickets)
        work.contexts = contexts
        return work

    vars(host)["_gather"] = gathered
    try:
        return host.start(batch)
    finally:
        del vars(host)["_gather"]


def gather(tickets: Sequence[Ticket], inputs: Iterable[int], *, may_write: bool = False) -> Work:
    """What an instance is given of a batch. `may_write`: it is told what it may write to."""
    if len(tickets) == 1:  # a request that comes alone pays for all that is done for its batch
        ticket = tickets[0]
        flow, node = ticket.flow, ticket.node
        tensors = flow.tensors
        columns: list[list[Tensor | None]] = [[tensors[slot] if slot >= 0 else None] for slot in node.inputs]
        rows, requests, wanted = [ticket.rows], [flow.request], [node.wanted or flow.wanted]
        return Work(columns, rows, requests, wanted, [_writable(tickets, i) for i in inputs] if may_write else None)
    node = tickets[0].node
    count = len(tickets)
    rows = [ticket.rows for ticket in tickets]
    requests = [ticket.flow.request for ticket in tickets]
    if [ticket.node for ticket in tickets].count(node) == count:  # nearly every batch: what they share is asked once
        slots = node.inputs
        columns = [
            [ticket.flow.tensors[slot] for ticket in tickets] if (slot := slots[i]) >= 0 else [None] * count
            for i in inputs
        ]
        wanted = [node.wanted] * count if node.wanted else [ticket.flow.wanted for ticket in tickets]
        sole = node.sole
        writable = [[True] * count if sole[i] else _writable(tickets, i) for i in inputs] if may_write else None
        return Work(columns, rows, requests, wanted, writable)
    columns = [
        [ticket.flow.tensors[slot] if (slot := ticket.node.inputs[i]) >= 0 else None for ticket in tickets]
        for i in inputs
    ]
    wanted = [ticket.node.wanted or ticket.flow.wanted for ticket in tickets]
    return Work(columns, rows, requests, wanted, [_writable(tickets, i) for i in inputs] if may_write else None)


def _writable(tickets: Sequence[Ticket], i: int) -> list[bool]:
    """A model may write into a tensor that nobody else will read, and that feeds only one of its inputs."""
    return [ticket.node.sole[i] or _is_last_reader(ticket, i) for ticket in tickets]


def _is_last_reader(ticket: Ticket, i: int) -> bool:
    slot = ticket.node.inputs[i]
    return slot >= 0 and ticket.flow.is_last_reader(slot) and ticket.node.inputs.count(slot) == 1
