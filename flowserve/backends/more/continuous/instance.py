"""Runs the requests of one engine: they enter while it has free seats, and responses are sent as they are computed.

Decides that `run` only submits a request and returns when the engine has a seat for another one: until then the
instance is busy, and the next request waits in the server's queue. A seat is free when the engine has finished the
sequence, even if the client has not read everything yet.

Decides that the engine's asyncio loop, on a thread of its own, also sends the responses, and never waits for a client:
while a client is slow, the engine's output is collected for the next response. A cancelled request is aborted at once,
not at its next token. A broken engine ends its process, so that the server starts a new one; its requests fail with its
reason.

It does not know what a request contains (interface.py). Callers: backend.py makes instances; a worker process, or a
thread of the server, runs them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final

from flowserve.backends.base import ClockNs, OutputNotes, Results, Sender, Sent, Work
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.more.continuous.interface import ContinuousCall, ContinuousEngine, ContinuousLibrary
from flowserve.config.types import InstanceGroup
from flowserve.errors import Cancelled, FlowserveError, Invalid, ModelFailed
from flowserve.memory.tensor import Tensor
from flowserve.values import TensorSpec, fits, shape_text

log = logging.getLogger("flowserve.continuous")

ENGINE_ENDED: Final = 1  # exit status of the process of a broken engine
_FAILED: Final = "Error generating stream"  # the beginning of Triton's text


class Seats:
    """The free seats of an engine: places for sequences in its batch. Used on any thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._changed = threading.Condition()

    def take(self, count: int, is_wanted: Callable[[], bool]) -> bool:
        """Wait for `count` seats and take them. False if they are no longer wanted; `wake` makes waiting callers check
        that.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count or not is_wanted())
            if not is_wanted():
                return False
            self._free -= count
            return True

    def give(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until a seat is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class ContinuousInstance:
    """One engine. `owns_process`: nothing else runs in this process."""

    def __init__(
        self, library: ContinuousLibrary, source: ModelSource, group: InstanceGroup, *, owns_process: bool = False
    ) -> None:
        self._library = library
        self._source = source
        self._group = group
        self._owns_process = owns_process
        self._names = [spec.name for spec in source.config.inputs]
        self._outputs = source.config.outputs
        self._running: set[Running] = set()  # requests with responses to come; used on the engine's thread
        self._ended = ""  # why the engine no longer computes
        self._engine: ContinuousEngine[Any]
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._seats: Seats
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the engine. Raises its error."""
        started: Future[None] = Future()
        name = f"engine of {self._source.config.name}"
        thread = threading.Thread(target=self._run_engine, args=(started,), name=name, daemon=True)
        thread.start()
        try:
            started.result()
        except FlowserveError:
            raise
        except ImportError as error:
            what = f"{self._library.title} is installed and cannot be imported: {error}"
            raise ModelFailed(f"model '{self._source.config.name}': {what}") from error
        except Exception as error:
            what = f"{self._library.title} cannot start: {type(error).__name__}: {error}"
            raise ModelFailed(f"model '{self._source.config.name}': {what}") from error
        self._thread = thread

    def run(self, work: Work, clock: ClockNs) -> Results:
        """Submit the requests of a batch. Returns when there is a seat for another request."""
        gathered_ns = clock()
        assert work.senders is not None
        for m, sender in enumerate(work.senders):
            columns = zip(self._names, work.inputs, strict=True)
            given = {name: tensor.array for name, column in columns if (tensor := column[m]) is not None}
            try:
                if self._ended:
                    raise ModelFailed(self._ended)
                call = self._engine.read(given, work.requests[m])
            except FlowserveError as error:
                sender.fail(error)
                continue
            call.seats = min(call.seats, self._seats.count)
            sender.watch(self._seats.wake)
            if self._seats.take(call.seats, partial(_is_wanted, sender)):
                running = Running(call, sender, self._outputs, clock)
                self._loop.call_soon_threadsafe(self._begin, running)
            else:
                sender.fail(Cancelled(f"model '{self._source.config.name}': the request was cancelled"))
        self._seats.wait()
        return Results([], gathered_ns=gathered_ns, computed_ns=clock())

    def close(self) -> None:
        """End the engine. Its remaining requests are aborted."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            thread.join()

    # ------------------------------------------------------------------ on the engine's thread

    def _run_engine(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._engine_main(started))
        except BaseException as error:
            if started.done():
                log.exception("model '%s': the thread of its engine has ended", self._source.config.name)
            else:
                started.set_exception(error)

    async def _engine_main(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._engine = await self._library.start(self._source, self._group, owns_process=self._owns_process)
        self._seats = Seats(self._engine.seats)
        started.set_result(None)
        await self._closing.wait()
        for running in [*self._running]:
            running.cancel()
        tasks = [running.task for running in self._running]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.close()

    def _begin(self, running: Running) -> None:
        self._running.add(running)
        running.task = asyncio.create_task(self._compute(running))
        running.sender.watch(partial(self._changed, running))

    def _changed(self, running: Running) -> None:
        """Called on any thread when the client has cancelled, or there is room for a response."""
        with suppress(RuntimeError):  # the loop has ended with the model
            self._loop.call_soon_threadsafe(self._look_at, running)

    def _look_at(self, running: Running) -> None:
        if running.sender.is_cancelled():
            running.cancel()
            if running.task.done():  # its last response waits for room
                self._running.discard(running)
            return
        try:
            running.send()
        except Exception as error:
            running.fail(self._error(error))
        if running.is_over and running.task.done():
            self._running.discard(running)

    async def _compute(self, running: Running) -> None:
        call = running.call
        try:
            async with aclosing(self._engine.generate(call)) as outputs:
                async for output in outputs:
                    running.is_whole = call.add(output)
                    running.has_more = True
                    if call.is_streaming:
                        running.send()
            running.is_whole = True
            running.send()
        except asyncio.CancelledError:
            running.fail(Cancelled(f"model '{self._source.config.name}': the request was cancelled"))
            await self._engine.abort(call)
        except Exception as error:
            if self._engine.has_ended():
                self._end(error)
            else:
                running.fail(self._error(error))
        finally:
            self._seats.give(call.seats)
            if running.is_over:
                self._running.discard(running)

    def _error(self, error: Exception) -> FlowserveError:
        if isinstance(error, FlowserveError):
            return error
        text = f"{_FAILED}: {error}" if str(error) else f"{_FAILED}: {type(error).__name__}"
        if isinstance(error, ValueError):  # the engine refuses the request
            return Invalid(text)
        log.error("model '%s': %s", self._source.config.name, text, exc_info=error)
        return ModelFailed(text)

    def _end(self, error: Exception) -> None:
        # The message may be about one request, and all requests that run or come later get the text.
        what = f"{self._library.title} has ended: {type(error).__name__}"
        self._ended = f"model '{self._source.config.name}': {what}; load the model again"
        log.error("model '%s': %s: %s", self._source.config.name, what, error)
        for running in [*self._running]:
            running.fail(ModelFailed(f"{_FAILED}: {what}"))
        if self._owns_process:
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(ENGINE_ENDED)


def _is_wanted(sender: Sender) -> bool:
    return not sender.is_cancelled()


class Running:
    """A request of the engine whose responses are not all sent. Used on the engine's thread.

    `has_more`: something was added to the call since its last response. `is_whole`: the engine has computed all of it.
    `is_over`: all responses are sent.
    """

    task: asyncio.Task[None]

    def __init__(self, call: ContinuousCall, sender: Sender, outputs: Sequence[TensorSpec], clock: ClockNs) -> None:
        self.call = call
        self.sender = sender
        self.has_more = False
        self.is_whole = False
        self._outputs = outputs
        self._clock = clock
        self._since_ns = clock()  # start of the work on the next response
        self._next: Sent | None = None  # a response that the sender has no room for
        self.is_over = False

    def send(self) -> None:
        """Send responses while there is room for them. Raises the errors of the call."""
        while not self.is_over:
            if self._next is None:
                if not self.has_more or not (self.call.is_streaming or self.is_whole):
                    break
                self._next = self._made()
            if not self.sender.offer(self._next):
                return
            self.is_over = self._next.is_last
            self._next = None
            self._since_ns = self._clock()
        if self.is_whole and not self.is_over:  # the last item was in an earlier response
            self.is_over = True
            self.sender.finish()

    def fail(self, error: FlowserveError) -> None:
        if not self.is_over:
            self.is_over = True
            self.sender.fail(error)

    def cancel(self) -> None:
        """Abort the request."""
        self.task.cancel()

    def _made(self) -> Sent:
        began_ns = self._clock()
        self.has_more = False
        made = self.call.response()
        outputs = [Tensor(made[spec.name]) if spec.name in made else None for spec in self._outputs]
        notes = OutputNotes()
        for spec in self._outputs:
            if spec.name in made and not fits(made[spec.name].shape, spec.dims):
                found, wanted = shape_text(made[spec.name].shape), shape_text(spec.dims)
                text = f"the configuration promises shape {wanted}, the model answered {found}"
                notes.unlike[spec.name] = f"{text}; it is passed on as it is"
        took_ns, output_ns = began_ns - self._since_ns, self._clock() - began_ns
        return Sent(outputs, {}, took_ns, output_ns, notes.or_none(), is_last=self.is_whole)
