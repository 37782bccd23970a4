"""The requests of a batch as a Python model sees them, and their response senders.

Requests: the attributes of a member of a batch are looked up when the model reads them, so that an unread request costs
nearly nothing. Senders: decides what the model may do with a sender (Triton's rules and texts): many responses in
decoupled mode, or one response in the model's own time; and the error for a sender or a request that the model freed
without answering. When there is room for a response is decided by the implementation of `Sender` (base.py). A sender
may be used on any thread, also after `execute` has returned.

It does not know when `execute` is called, and not how responses are checked (answers.py).

Callers: instance.py and device.py; models use requests and senders.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol

import numpy as np

from flowserve.backends.base import ClockNs, Sender, Sent, Work
from flowserve.backends.python.answers import AnswerReader
from flowserve.backends.python.pb_utils.context import TritonModelException, shown_as
from flowserve.backends.python.pb_utils.inference import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Tensor,
    TritonError,
    _Input,
)
from flowserve.errors import FlowserveError, ModelFailed, Raised
from flowserve.graph.types import inner_shape
from flowserve.memory.column import Column
from flowserve.memory.pool import POOLED_BYTES_MIN
from flowserve.values import TensorSpec

_CLOSED: Final = "Unable to send response. Response sender has been closed."
_ANY_ROWS: Final = -1


class RequestOwner(Protocol):
    """What a request asks of the instance that runs its batch."""

    model_name: str
    version: int
    inputs: Sequence[TensorSpec]
    is_iterative: bool

    def make_sender(self, work: Work, member: int) -> Any:
        """The response sender of a member of a batch."""

    def is_withdrawn(self, work: Work, member: int) -> bool:
        """Whether the client of a member has cancelled it."""


@shown_as("InferenceRequest")
class ReceivedRequest(InferenceRequest):
    """One member of a batch. Everything is looked up when the model reads it."""

    __slots__ = ("_flags", "_instance", "_kept_sender", "_member", "_work")

    _kept_sender: Any
    _flags: int

    def __init__(self, instance: RequestOwner, work: Work, member: int) -> None:
        self._instance = instance
        self._work = work
        self._member = member
        self._inputs = None

    def inputs(self) -> list[Tensor]:
        found = self._inputs
        if found is None:
            # A plain loop, since this runs for every request.
            work, member = self._work, self._member
            columns, writable = work.inputs, work.may_write
            found = self._inputs = []
            for i, spec in enumerate(self._instance.inputs):
                rows = columns[i][member]
                if rows is not None:
                    found.append(_Input(spec, rows, writable is not None and writable[i][member]))
        return found

    @property
    def _sender(self) -> Any:
        """The sender that the model got, None if it did not ask for one."""
        return getattr(self, "_kept_sender", None)

    def get_response_sender(self) -> Any:
        sender = self._sender
        if sender is None:
            sender = self._kept_sender = self._instance.make_sender(self._work, self._member)
        return sender

    @property
    def _is_rescheduled(self) -> bool:
        return getattr(self, "_flags", TRITONSERVER_REQUEST_RELEASE_ALL) == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: the request is not done and runs again in a later batch."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Invalid request release flags: {flags} is neither TRITONSERVER_REQUEST_RELEASE_ALL nor "
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            )
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not self._instance.is_iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while its model "
                f"'{self._instance.model_name}' does not have sequence_batching {{ iterative_sequence: true }}"
            )
        self._flags = flags

    def trace(self) -> InferenceTrace:
        """The span in which the request is computed, if requests are traced as spans."""
        contexts = self._work.contexts
        return InferenceTrace(contexts[self._member] if contexts else "")

    def set_flags(self, flags: int) -> None:
        """Raises TritonModelException, because the client sets the flags of this request."""
        raise TritonModelException("Unable to set flags: the request was given to this model")

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request. The batch continues unless the model ends it. In a model that
        is not decoupled, True is possible only while the batch runs.
        """
        senders = self._work.senders
        if senders is None:
            return self._instance.is_withdrawn(self._work, self._member)
        return senders[self._member].is_cancelled()

    def _facts(self) -> dict[str, Any]:
        request = self._work.requests[self._member]
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if request.sequence_start else 0
        end = TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if request.sequence_end else 0
        return {
            "request_id": request.id,
            "correlation_id": request.sequence_id,
            "requested_output_names": self._work.wanted[self._member],
            "model_name": self._instance.model_name,
            "model_version": self._instance.version,
            "flags": start | end,
            "timeout": request.timeout_us,
            "priority": request.priority,
            "parameters": dict(request.parameters),
        }


def assign_inputs(requests: Sequence[ReceivedRequest], work: Work, specs: Sequence[TensorSpec]) -> None:
    """Assign each request its input tensors now, which is cheaper than a lookup by each of them. Possible if each input
    of the batch is one array that the model may write to, or that is small enough to be copied.
    """
    rows, may_write = work.rows, work.may_write
    for i, spec in enumerate(specs):
        whole = work.inputs[i].block
        if isinstance(whole, np.ndarray):
            flags = whole.flags
            if not (flags.writeable and flags.aligned and may_write is not None and all(may_write[i])):
                whole = whole.copy() if whole.nbytes < POOLED_BYTES_MIN else None
        if not isinstance(whole, np.ndarray):  # several pieces, on a device, or too large for a copy
            if i:
                for request in requests:
                    request._inputs = None  # all inputs or none: they are in the configuration's order
            return
        if spec.reshape is not None:
            whole = whole.reshape(inner_shape(whole.shape, spec))
        name = spec.name
        arrays = [whole] if len(rows) == 1 else Column.whole(whole, rows).arrays
        for request, array in zip(requests, arrays, strict=True):
            tensors = request._inputs
            if tensors is None:
                request._inputs = [Tensor(name, array)]
            else:
                tensors.append(Tensor(name, array))


@shown_as("InferenceResponseSender")
class ResponseSender(InferenceResponseSender):
    """The response sender of a decoupled model."""

    def __init__(
        self, sender: Sender, answers: AnswerReader, work: Work, member: int, model: str, clock: ClockNs
    ) -> None:
        self._sender = sender
        self._answers = answers
        # A response may have any number of rows.
        self._work = Work([], [_ANY_ROWS], [], [work.wanted[member]])
        self._model = model
        self._is_closed = False
        self._has_failed = False
        self._one_by_one = threading.Lock()
        self._clock = clock
        self._since_ns = clock()  # start of the model's work on its next response

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or (with TRITONSERVER_RESPONSE_COMPLETE_FINAL) declare that there are no more. Blocks while
        the readers of the responses are behind. Everything after an error is dropped, the final flag included.
        """
        _check(response, flags)
        is_final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._one_by_one:
            if self._is_closed:
                raise TritonModelException(_CLOSED)
            if not self._has_failed:
                self._send(response, is_final=is_final)
            self._is_closed = is_final  # only now: if sending raised, the request fails with its sender

    def _send(self, response: InferenceResponse | None, *, is_final: bool) -> None:
        if response is None:
            self._sender.finish()
            return
        answer = self._taken(response)
        if isinstance(answer, FlowserveError):
            self._has_failed = True
            self._sender.fail(answer)
            return
        answer.is_last = is_final
        self._sender.send(answer)
        self._since_ns = self._clock()

    def _taken(self, response: InferenceResponse) -> Sent | FlowserveError:
        began_ns = self._clock()
        read = self._answers.read([response], self._work)
        outputs = [column[0] for column in read.outputs]
        if read.errors:
            return read.errors[0]
        took_ns, output_ns = began_ns - self._since_ns, self._clock() - began_ns
        return Sent(outputs, response._parameters, took_ns, output_ns, read.notes)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request. Further responses are dropped."""
        return self._has_failed or self._sender.is_cancelled()

    def __del__(self) -> None:
        if not self._is_closed and not self._has_failed:
            self._sender.fail(
                ModelFailed(
                    f"model '{self._model}' let go of a response sender without sending "
                    f"TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                )
            )


@shown_as("InferenceRequest")
class DecoupledRequest(ReceivedRequest):
    """A request of a decoupled model. The model may ask for its sender at any time, on any thread. If it frees the
    request without having asked, the request fails.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self._sender is None and self._work.senders is not None:
            self._work.senders[self._member].fail(abandoned(self._instance.model_name))


class PendingResponse:
    """The one response of a model that is not decoupled. The batch waits for it; it outlives the sender."""

    __slots__ = ("done", "response")

    def __init__(self) -> None:
        self.response: InferenceResponse | None = None
        self.done = threading.Event()


@shown_as("InferenceResponseSender")
class SingleResponseSender(InferenceResponseSender):
    """The response sender of a model that is not decoupled: exactly one response, which the batch waits for. Nothing
    may follow it, so it is final with or without the final flag.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._has_sent = False
        self._is_closed = False
        self._one_by_one = threading.Lock()
        self.pending = PendingResponse()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        _check(response, flags)
        with self._one_by_one:
            if self._is_closed:
                raise TritonModelException(_CLOSED)
            if response is not None:
                if self._has_sent:
                    raise TritonModelException(
                        f"Unable to send response. Non-decoupled model '{self._model}' cannot send more than one."
                    )
                self._has_sent = True
                self.pending.response = response
                self.pending.done.set()
            if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
                if not self._has_sent:
                    raise TritonModelException(
                        f"Unable to send response. Non-decoupled model '{self._model}' sent the final flag before any "
                        "response."
                    )
                self._is_closed = True

    def is_cancelled(self) -> bool:
        return False

    def __del__(self) -> None:
        self.pending.done.set()


class ExecutedRequest:
    """What a batch needs of a request after `execute` has returned. Only the model holds the request and its sender
    from then on: once it has freed both, there can be no response.
    """

    __slots__ = ("_is_rescheduled", "pending")

    def __init__(self, request: ReceivedRequest) -> None:
        self._is_rescheduled = request._is_rescheduled
        sender = request._sender
        self.pending: PendingResponse | None = None if sender is None else sender.pending


BatchMember = ReceivedRequest | ExecutedRequest


def has_response(request: ReceivedRequest) -> bool:
    """Whether the model (not decoupled) has sent the response to a request through its sender."""
    sender = request._sender
    return sender is not None and sender.pending.response is not None


def collect(
    requests: Sequence[ExecutedRequest], responses: list[Any], model: str, loop: asyncio.AbstractEventLoop | None
) -> None:
    """Replace each None in `responses` by the response that the model (not decoupled) sends through its sender. Blocks
    until it is sent. The `loop` of the model's coroutines, if there is one, runs meanwhile, since one of its tasks may
    send the response. Raises ModelFailed if the model neither returned nor sent any response.
    """
    if all(one is None for one in responses) and not any(
        request.pending or request._is_rescheduled for request in requests
    ):
        raise ModelFailed(
            f"model '{model}' returned no InferenceResponse: its execute returned None or a list of None, and answered "
            "through no response sender either (does each branch of it return its responses?)"
        )
    for m, request in enumerate(requests[: len(responses)]):
        pending = request.pending
        if responses[m] is None and pending is not None and not request._is_rescheduled:
            if loop is None:
                pending.done.wait()
            elif not pending.done.is_set():
                loop.run_until_complete(asyncio.to_thread(pending.done.wait))
            # One reference only: reference counts tell whether the model keeps a response.
            responses[m], pending.response = pending.response, None
            if responses[m] is None:
                text = f"model '{model}' let go of a response sender without having sent a response"
                responses[m] = InferenceResponse(error=TritonError(text))


def abandoned(model: str) -> ModelFailed:
    """The error of a request that a decoupled model freed without an answer."""
    return ModelFailed(f"model '{model}' let go of a request without asking for its response sender")


def refuse_returned(senders: Sequence[Sender], text: str) -> NoReturn:
    """Raises ModelFailed with this text, and fails the requests: a decoupled model returned something."""
    failed = ModelFailed(text)
    failed.raised = Raised("")
    for sender in senders:
        sender.fail(failed)  # before the requests are freed, which would report another error
    raise failed


def _check(response: object, flags: int) -> None:
    if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
        raise TritonModelException("Unable to send response. Unsupported flag provided.")
    if response is None and not flags:
        raise TritonModelException("Inference Response object must be provided when the response flags is set to zero.")
    if response is not None and not isinstance(response, InferenceResponse):
        raise TritonModelException(
            f"Unable to send response. InferenceResponse expected, got {type(response).__name__}."
        )
