"""Models that call other models, on the loop: how a call becomes a request, and what ends it early.

Decided here: a call is a request like any other, but made on behalf of those that its caller runs. So it is taken while
the server drains; at the gate of a deployment, where it might wait for its own caller, it does not wait, but has what
is remembered there and the deadline; and it is withdrawn when nobody waits for its caller any more, or its caller is no
more. Which calls could never be answered is decided in scheduling/calls.py. Here are also the calls of models on
threads, and how these ask for what else there is (asks.py); those of processes come in by process_calls.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array as number_array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio

from flowserve.backends.base import (
    IS_READY,
    LOAD,
    NO_FILES,
    OPEN_FAMILY,
    UNLOAD,
    Answer,
    Call,
    Cells,
    answer_or_raise,
)
from flowserve.errors import Cancelled, FlowserveError, Internal, Unsupported
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.calls import Called
from flowserve.scheduling.router import Flow
from flowserve.scheduling.streams import StreamFlow
from flowserve.values import Array, Response

if TYPE_CHECKING:
    from flowserve.runtime.asks import Asks
    from flowserve.runtime.engine import Engine

log = logging.getLogger("flowserve.runtime")

# Triton's text, as a model that calls reads it.
_MANY_ANSWERS: Final = (
    "is using the decoupled. The current BLS request call doesn't support models using the decoupled transaction "
    "policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models."
)


class Pending:
    """A call that is not over: who makes it, and who is told of its answers."""

    __slots__ = ("answered", "batch", "call", "flow")

    def __init__(self, batch: Batch | None, call: Call, answered: Callable[[Answer], None]) -> None:
        self.batch = batch
        self.call = call
        self.answered = answered
        self.flow: Called | None = None


class Calls:
    """The calls under way in an engine. Everything but `post` is for the loop."""

    asks: Asks  # what else models ask for

    def __init__(self, engine: Engine) -> None:
        self.clock = engine.clock
        self._engine = engine
        self._pending: dict[Flow, Pending] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def post(self, what: Callable[[], None]) -> None:
        """Do this on the loop, after what was posted before. On any thread."""
        self._engine.streaming.post(what)

    def begin(self, pending: Pending) -> None:
        """Make a call. Its `batch` is what its instance runs, None where it runs nothing."""
        engine = self._engine
        for batch in [*engine.dispatcher.calls]:
            if batch.instance.running is not batch:  # it did not wait for all that it called
                engine.dispatcher.calls.batch_over(batch)
        if pending.batch is not None and pending.batch.instance.running is not pending.batch:
            pending.batch = None
        call = pending.call
        deployment = None
        try:
            deployment = engine.find(call.model, call.version)
            flow = pending.flow = engine.call(pending.batch, deployment, call.request, is_stream=call.is_stream)
        except FlowserveError as error:
            is_one_of_many = deployment is not None and deployment.graph.is_decoupled and not call.is_stream
            if is_one_of_many and isinstance(error, Unsupported):
                error = Unsupported(f"Model {call.model} {_MANY_ANSWERS}")
            pending.answered(error)
            return
        except Exception as error:
            self._broke(pending, error)
            return
        self._pending[flow] = pending
        self._tell(flow)

    def leave(self, pending: Pending) -> None:
        """Its caller has lost interest, or is no more. Harmless at the end."""
        if pending.flow is not None and self._pending.pop(pending.flow, None) is not None:
            self._over(pending)
            if not pending.flow.done:
                self._engine.withdraw(pending.flow)

    def sweep(self) -> None:
        """Somebody's request is over before its time: calls on behalf of such alone are over too."""
        for pending in [*self._pending.values()]:
            batch = pending.batch
            if batch is None or batch.instance.running is not batch:
                continue  # it did not wait for it, so that it is nobody's
            if all(ticket.flow.whole.done for ticket in batch.tickets):
                self.leave(pending)
                pending.answered(
                    Cancelled(f"the call of model '{pending.call.model}' was withdrawn: nobody waits for it")
                )

    def _tell(self, flow: Flow) -> None:
        """Called by the engine in the middle of its own work: nothing may get out."""
        pending = self._pending.get(flow)
        if pending is not None:
            try:
                self._tell_of(flow, pending)
            except Exception as error:
                self._broke(pending, error)

    def _broke(self, pending: Pending, error: Exception) -> None:
        """A mistake of ours about a call, or there is no memory for what was answered."""
        log.error("a call of model '%s' failed", pending.call.model, exc_info=error)
        self.leave(pending)
        what = f"{type(error).__name__}: {error}"
        pending.answered(Internal(f"the call of model '{pending.call.model}' failed: {what}"))

    def _tell_of(self, flow: Flow, pending: Pending) -> None:
        if isinstance(flow, StreamFlow):
            self._tell_answers(flow, pending)
            if flow not in self._pending:
                return  # its caller was found to be gone while it was told, or given up when there was room for more
        if not flow.done:
            # Answers are taken outside of the pump's turn, which takes no notice of what it makes room for itself.
            flow.waiter = self._tell_soon if isinstance(flow, StreamFlow) else self._tell
            return
        del self._pending[flow]
        self._over(pending)
        try:
            last = None if isinstance(flow, StreamFlow) and flow.error is None else self._engine.response(flow)
        except FlowserveError as error:
            pending.answered(error)
            return
        if last is not None:
            pending.answered(last)
        if pending.call.is_stream:
            pending.answered(None)

    def _tell_soon(self, flow: Flow) -> None:
        self.post(partial(self._tell, flow))

    def _tell_answers(self, flow: StreamFlow, pending: Pending) -> None:
        """They are taken as they come, so that no model ever waits for the one that has called it to take them."""
        while (answer := flow.take()) is not None:
            pending.answered(self._engine.response_from(answer))
        self._engine.taken()

    def _over(self, pending: Pending) -> None:
        if pending.batch is not None and pending.flow is not None:
            self._engine.dispatcher.calls.over(pending.batch, pending.flow)


class ThreadCaller:
    """What a model on a thread of the server's calls through. `running` says which batch its instance executes."""

    def __init__(self, model: str, calls: Calls, running: Callable[[], Batch | None]) -> None:
        """On the loop or not, but before the instance is opened."""
        self.clock = calls.clock
        self._model = model
        self._calls = calls
        self._running = running
        self._thread: threading.Thread | None = None
        self._families: list[int] = []  # of metrics, all that it has opened

    def serve_here(self) -> None:
        """This is the instance's thread, the only one that may call."""
        self._thread = threading.current_thread()

    def begin(self, call: Call, answered: Callable[[Answer], None]) -> Callable[[], None]:
        if threading.current_thread() is not self._thread:
            raise Unsupported(
                f"model '{self._model}' cannot call model '{call.model}' while it runs on the event loop: nobody would "
                'answer; use execution "thread" or "process"'
            )
        call.request.inputs = {name: _copy(array) for name, array in call.request.inputs.items()}
        pending = Pending(self._running(), call, lambda answer: answered(_own(answer)))
        self._calls.post(partial(self._calls.begin, pending))
        return lambda: self._calls.post(partial(self._calls.leave, pending))

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        asks = self._calls.asks
        if what not in (LOAD, UNLOAD, IS_READY):
            answer = asks.answer(what, arguments)
            if what == OPEN_FAMILY:
                self._families.append(answer)
            return answer
        if trio.lowlevel.in_trio_run():
            if what == IS_READY:
                return asks.is_ready(*arguments)
            raise Unsupported(
                f"model '{self._model}' cannot wait until model '{arguments[0]}' is loaded or unloaded while it runs "
                "on the event loop, which does that; use --python-execution process or thread"
            )
        answers: SimpleQueue[Any] = SimpleQueue()
        loads = self._model if self._running() is None else ""
        self._calls.post(partial(asks.begin, what, arguments, files, loads, answers.put))
        return answer_or_raise(answers.get())

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        cells = number_array("d", bytes(8 * count))
        self._calls.asks.show((family, labels, buckets), cells)
        return cells

    def drop(self, family: int) -> None:
        self._calls.asks.metrics.drop(family)

    def is_withdrawn(self, member: int) -> bool:
        return is_withdrawn(self._running(), member)

    def close(self) -> None:
        for family in self._families:
            self.drop(family)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Who takes it from a queue waits there."""

    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
        return nullcontext()


def is_withdrawn(batch: Batch | None, member: int) -> bool:
    """Whether a member of a batch that runs is over: its caller has left, or has had its answer. On any thread."""
    return batch is not None and 0 <= member < len(batch.tickets) and batch.tickets[member].flow.whole.done


def _own(answer: Answer) -> Answer:
    """Somebody else may read the same memory: whoever has called gets his own."""
    if isinstance(answer, Response):
        answer.outputs = {name: _copy(array) for name, array in answer.outputs.items()}
    return answer


def _copy(array: Array) -> Array:
    if array.dtype.hasobject or array.nbytes < POOLED_BYTES_MIN:
        return np.array(array, order="C")
    copy = HOST.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
