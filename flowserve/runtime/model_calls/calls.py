"""BLS calls on the event loop: how a model's call of another model becomes a request, and what ends it early.

Decides that a call is a request like any other. It is accepted while the server drains. It does not wait for admission,
because it might wait for its own caller, but the deployment's deadline and response cache apply. It is withdrawn when
all requests of its caller's batch are over, or its caller has ended. `scheduling/call_graph.py` decides which calls
could never finish. Calls of models on threads arrive through `ThreadCaller`, calls of processes through
remote_calls.py; other requests of models are in server_requests.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from array import array as number_array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Protocol

import trio

from flowserve.backends.base import (
    IS_READY,
    LOAD,
    NO_FILES,
    OPEN_FAMILY,
    UNLOAD,
    Answer,
    BlsCall,
    Cells,
    answer_or_raise,
)
from flowserve.errors import Cancelled, FlowserveError, Internal, Unsupported
from flowserve.memory.pool import HOST
from flowserve.observe.log_fields import of_request
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.model_calls.server_requests import ServerRequests
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import Request, Response

log = logging.getLogger("flowserve.runtime")

_AT_ONCE: Final = 32  # calls that are withdrawn at once
# Triton's texts, which models may parse: also the apostrophe that ends the last.
_REFUSED: Final = "Error when running inference"
_NOT_READY: Final = "Failed for execute the inference request. Model"
_MANY_ANSWERS: Final = (
    "is using the decoupled. The current BLS request call doesn't support models using the decoupled transaction "
    "policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models.'"
)


class CallableEngine(Protocol):
    """The part of the engine that this module uses."""

    clock: ClockNs
    scheduler: Scheduler

    @property
    def deployments(self) -> Any: ...
    def call(self, batch: Batch | None, deployment: Any, request: Request, *, is_stream: bool) -> Frame: ...
    def is_served(self, name: str, version: str) -> bool: ...
    def withdraw(self, frame: Frame) -> None: ...
    def response(self, frame: Frame) -> Response: ...
    def response_from(self, frame: Frame, *, is_final: bool = True) -> Response: ...
    def taken(self) -> None: ...
    def post(self, what: Callable[[], None]) -> None:
        """Run a function on the event loop, after earlier posts. On any thread."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call in progress: the batch that makes it, and the function that receives its responses."""

    batch: Batch | None
    call: BlsCall
    answered: Callable[[Answer], None]
    frame: Frame | None = None


class Calls:
    """The calls in progress of an engine, on the event loop except `post`."""

    def __init__(self, engine: CallableEngine) -> None:
        self.clock = engine.clock
        self.server_requests = ServerRequests(engine.is_served)
        self.post = engine.post
        self._engine = engine
        self._pending: dict[Frame, PendingCall] = {}
        self._by_batch: dict[Batch, dict[PendingCall, None]] = {}  # the same calls by batch

    def __bool__(self) -> bool:
        return bool(self._pending)

    def begin(self, pending: PendingCall) -> None:
        """Start a call. Its `batch` is the one that its instance runs, None if it runs none."""
        engine = self._engine
        for batch in [*engine.scheduler.calls]:
            if batch.instance.running is not batch:  # the model returned before all its calls did
                engine.scheduler.calls.batch_over(batch)
        if pending.batch is not None and pending.batch.instance.running is not pending.batch:
            pending.batch = None
        call = pending.call
        deployment = None
        try:
            deployment = engine.deployments.find(call.model, call.version)
            frame = pending.frame = engine.call(pending.batch, deployment, call.request, is_stream=call.is_stream)
        except FlowserveError as error:
            is_one_of_many = deployment is not None and deployment.graph.is_decoupled and not call.is_stream
            text = str(error)
            if is_one_of_many and isinstance(error, Unsupported):
                text = f"Model {call.model} {_MANY_ANSWERS}"
            elif deployment is None:
                text = f"{_NOT_READY} '{call.model}' is not ready. {text}"
            pending.answered(_refused(call, error, text))
            return
        except Exception as error:
            self._broke(pending, error)
            return
        self._pending[frame] = pending
        if pending.batch is not None:
            self._by_batch.setdefault(pending.batch, {})[pending] = None
        self._notify(frame)

    def leave(self, pending: PendingCall) -> None:
        """Withdraw a call: its caller does not wait for it, or has ended. No effect on a finished call."""
        if pending.frame is not None and self._pending.pop(pending.frame, None) is not None:
            self._over(pending)
            if not pending.frame.record.done:
                self._engine.withdraw(pending.frame)

    def cancel(self, pending: PendingCall, why: str = "was cancelled") -> None:
        """As `leave`, for a caller that still reads: its last response is an error."""
        if pending.frame is not None and pending.frame in self._pending:
            self.leave(pending)
            pending.answered(Cancelled(f"the call of model '{pending.call.model}' {why}"))

    def sweep(self) -> None:
        """Withdraw the calls of batches whose requests are all over."""
        for batch in [*self._by_batch]:
            if batch.instance.running is not batch:
                continue  # the model returned before the call did
            if all(ticket.frame.record.done for ticket in batch.tickets):
                # Removed first: each call that is withdrawn sweeps again, and must not find the others.
                self._withdraw_all(deque(self._by_batch.pop(batch, ())))

    def _withdraw_all(self, calls: deque[PendingCall]) -> None:
        for _ in range(min(len(calls), _AT_ONCE)):
            self.cancel(calls.popleft(), "was withdrawn: the requests of its caller are over")
        if calls:  # the rest of the server runs before the next calls
            self.post(partial(self._withdraw_all, calls))

    def _notify(self, frame: Frame) -> None:
        """Frame within the engine's step: must not raise."""
        pending = self._pending.get(frame)
        if pending is not None:
            try:
                self._notify_call(frame, pending)
            except Exception as error:
                self._broke(pending, error)

    def _broke(self, pending: PendingCall, error: Exception) -> None:
        """A call failed by an internal error, or for lack of memory for its response."""
        extra = of_request(pending.frame.request if pending.frame else None, model=pending.call.model)
        log.error("a call of model '%s' failed", pending.call.model, exc_info=error, extra=extra)
        self.leave(pending)
        what = f"{type(error).__name__}: {error}"
        pending.answered(Internal(f"the call of model '{pending.call.model}' failed: {what}"))

    def _notify_call(self, frame: Frame, pending: PendingCall) -> None:
        if isinstance(frame, RegionFrame) and frame.is_stream:
            # Responses are taken immediately, so that a model never waits for the model that called it.
            while (answer := frame.take()) is not None:
                pending.answered(self._engine.response_from(answer, is_final=frame.stream.has_ended))
            self._engine.taken()
            if frame not in self._pending:
                return  # its caller has ended
        if not frame.record.done:
            # Responses are taken outside of the step: this frees slots, which the next step fills.
            frame.record.waiter = (
                (lambda frame: self.post(partial(self._notify, frame))) if frame.is_stream else self._notify
            )
            return
        del self._pending[frame]
        self._over(pending)
        try:
            if not (isinstance(frame, RegionFrame) and frame.is_stream) or frame.record.error is not None:
                pending.answered(self._engine.response(frame))
            elif frame.stream.ends_empty:  # as on Triton
                pending.answered(Response(frame.record.owner.name, frame.record.owner.version, {}, frame.request.id))
        except FlowserveError as error:
            is_refusal = (
                frame.record.error is not None
                and frame.record.error.is_refusal
                and not frame.record.owner.graph.is_ensemble
            )
            pending.answered(_refused(pending.call, error, str(error)) if is_refusal else error)

    def _over(self, pending: PendingCall) -> None:
        batch = pending.batch
        if batch is not None and pending.frame is not None:
            self._engine.scheduler.calls.over(batch, pending.frame)
            calls = self._by_batch.get(batch)
            if calls is not None:
                calls.pop(pending, None)
                if not calls:
                    del self._by_batch[batch]


class ThreadCaller:
    """The `BlsClient` of a model on a thread of the server. `running` returns the batch that its instance executes."""

    def __init__(self, model: str, calls: Calls, running: Callable[[], Batch | None]) -> None:
        """On any thread, before the instance is opened."""
        self.clock = calls.clock
        self._model = model
        self._calls = calls
        self._running = running
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._families: list[int] = []  # the metric families that it has opened

    def serve_here(self) -> None:
        """The current thread is the instance's, the only one that may call."""
        self._thread = threading.current_thread()

    def begin(self, call: BlsCall, answered: Callable[[Answer], None]) -> Callable[[bool], None]:
        self._check_process(f"call model '{call.model}'")
        if threading.current_thread() is not self._thread:
            raise Unsupported(
                f"model '{self._model}' cannot call model '{call.model}' while it runs on the event loop, which would "
                'have to answer the call; use execution "thread" or "process"'
            )
        call.request.inputs = {name: HOST.copy_of(array) for name, array in call.request.inputs.items()}
        pending = PendingCall(self._running(), call, lambda answer: answered(_own(answer)))
        self._calls.post(partial(self._calls.begin, pending))
        return partial(self._leave, pending)

    def _leave(self, pending: PendingCall, is_answered: bool) -> None:
        if os.getpid() == self._pid:  # a process forked by the model has a copy of the iterator
            self._calls.post(partial(self._calls.cancel if is_answered else self._calls.leave, pending))

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        server_requests = self._calls.server_requests
        self._check_process("ask the server")
        if what not in (LOAD, UNLOAD, IS_READY):
            answer = server_requests.answer(what, arguments)
            if what == OPEN_FAMILY:
                self._families.append(answer)
            return answer
        if trio.lowlevel.in_trio_run():
            if what == IS_READY:
                return server_requests.is_ready(*arguments)
            raise Unsupported(
                f"model '{self._model}' cannot wait until model '{arguments[0]}' is loaded or unloaded while it runs "
                "on the event loop, which does that; use --python-execution process or thread"
            )
        answers: SimpleQueue[Any] = SimpleQueue()
        loads = self._model if self._running() is None else ""
        self._calls.post(partial(server_requests.begin, what, arguments, files, loads, answers.put))
        return answer_or_raise(answers.get())

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        cells = number_array("d", bytes(8 * count))
        self._calls.server_requests.show((family, labels, buckets), cells)
        return cells

    def drop(self, family: int) -> None:
        self._calls.server_requests.metrics.drop(family)

    def is_withdrawn(self, member: int) -> bool:
        return is_withdrawn(self._running(), member)

    def close(self) -> None:
        for family in self._families:
            self.drop(family)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Not used: the caller waits at its own queue."""

    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
        return nullcontext()

    def _check_process(self, what: str) -> None:
        """Raises Unsupported in a process that the model has forked: it has no event loop."""
        if os.getpid() != self._pid:
            raise Unsupported(
                f"model '{self._model}' cannot {what} in a process that it has forked from the server's: that is "
                'possible with execution "process"; or make the call in execute, and give the forked process its result'
            )


def _refused(call: BlsCall, error: FlowserveError, text: str) -> FlowserveError:
    """The error of a call that no model has run, with a text that begins as Triton's."""
    error.args = (f"Model {call.model} - {_REFUSED}: {text}",)
    return error


def is_withdrawn(batch: Batch | None, member: int) -> bool:
    """Whether a member of a running batch is over: its client left, or it has its response. On any thread."""
    return batch is not None and 0 <= member < len(batch.tickets) and batch.tickets[member].frame.record.done


def _own(answer: Answer) -> Answer:
    """Copy a response's arrays, since other requests may read the same memory."""
    if isinstance(answer, Response):
        answer.outputs = {name: HOST.copy_of(array) for name, array in answer.outputs.items()}
    return answer
