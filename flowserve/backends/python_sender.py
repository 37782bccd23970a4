"""How a Python model answers through a response sender: any number of times, or once in its own time.

Decided here: what a model may do with a sender (Triton's rules and texts), and what it means when it lets go of one
before it has answered. Which answers are right is decided in python_answers.py, when there is room for one by whoever
is behind `Sender` (backends/base.py). A sender may be used on any thread, also after `execute` has returned.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from types import NoneType
from typing import Any, Final

from flowserve.backends.base import ClockNs, Sender, Sent, Work
from flowserve.backends.python_answers import AnswerReader
from flowserve.backends.python_requests import GivenRequest
from flowserve.backends.triton_objects import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    TritonError,
)
from flowserve.backends.triton_tensors import TritonModelException
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.memory.tensor import Tensor

log = logging.getLogger("flowserve.python")

_CLOSED: Final = "Unable to send response. Response sender has been closed."
_ANY_ROWS: Final = -1


class ResponseSender(InferenceResponseSender):
    """What `get_response_sender` gives a decoupled model."""

    def __init__(
        self, sender: Sender, answers: AnswerReader, work: Work, member: int, model: str, clock: ClockNs
    ) -> None:
        self._sender = sender
        self._answers = answers
        # An answer may have any number of rows.
        self._work = Work([], [_ANY_ROWS], [], [work.wanted[member]])
        self._model = model
        self._is_closed = False
        self._has_failed = False
        self._one_by_one = threading.Lock()
        self._clock = clock
        self._since_ns = clock()  # when the model began with its next answer

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Answer, or (with TRITONSERVER_RESPONSE_COMPLETE_FINAL) say that there are no more answers. Waits while those
        who read the answers are behind. What comes after an error, the final flag for one, is dropped.
        """
        _check(response, flags)
        is_final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._one_by_one:
            if self._is_closed:
                log.error("model '%s': %s", self._model, _CLOSED)
                raise TritonModelException(_CLOSED)
            self._is_closed = is_final
            if self._has_failed:
                return
            if response is not None:
                answer = self._taken(response)
                if isinstance(answer, FlowserveError):
                    if response.error() is None:
                        log.error("%s", answer)  # it is the model's own fault, and the model is not told
                    self._has_failed = True
                    self._sender.fail(answer)
                    return
                self._sender.send(answer)
                self._since_ns = self._clock()
        if is_final:
            self._sender.finish(is_empty=response is None)

    def _taken(self, response: InferenceResponse) -> Sent | FlowserveError:
        began_ns = self._clock()
        read = self._answers.read([response], self._work)
        outputs = [column[0] for column in read.outputs]
        error = read.errors[0] if read.errors else self._uneven(outputs)
        if error is not None:
            return error
        return Sent(outputs, response._parameters, began_ns - self._since_ns, self._clock() - began_ns)

    def _uneven(self, outputs: Sequence[Tensor | None]) -> ModelFailed | None:
        rows = {tensor.stop - tensor.start for tensor in outputs if tensor is not None}
        if len(rows) <= 1:
            return None
        return ModelFailed(f"model '{self._model}' sent outputs of {sorted(rows)} rows in one response")

    def is_cancelled(self) -> bool:
        """Nobody wants any more answers; those that are sent all the same are dropped."""
        return self._has_failed or self._sender.is_cancelled()

    def __del__(self) -> None:
        if not self._is_closed and not self._has_failed:
            self._sender.fail(
                ModelFailed(
                    f"model '{self._model}' let go of a response sender without sending "
                    f"TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                )
            )


class SentRequest(GivenRequest):
    """A request of a decoupled model. Its sender may be asked for at any time, on any thread; who lets go of it without
    having asked can never answer.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self._sender is None and self._work.senders is not None:
            answer_the_forgotten([self], [self._work.senders[self._member]], self._model.name)


class Promise:
    """The one response of a model that is not decoupled, while it waits for it; it outlives the sender."""

    __slots__ = ("is_over", "response")

    def __init__(self) -> None:
        self.response: InferenceResponse | None = None
        self.is_over = threading.Event()


class SingleResponseSender(InferenceResponseSender):
    """The same for a model that is not decoupled: exactly one response, which its batch waits for. Nothing may follow
    it, so it is the answer whether or not the final flag comes with it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._has_sent = False
        self._is_closed = False
        self._one_by_one = threading.Lock()
        self.promise = Promise()

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
                self.promise.response = response
                self.promise.is_over.set()
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
        self.promise.is_over.set()


class Remains:
    """What a batch needs of a request when `execute` has returned. The request itself is the model's alone then, and
    with it the sender: where nobody has either any more, nobody can answer.
    """

    __slots__ = ("_is_rescheduled", "promise")

    def __init__(self, request: GivenRequest) -> None:
        self._is_rescheduled = request._is_rescheduled
        sender = request._sender
        self.promise: Promise | None = None if sender is None else sender.promise


Executed = GivenRequest | Remains


def lacks_some(responses: list[Any]) -> bool:
    """Whether there is None among them. Only their types are compared: what a model returns by mistake, an array for
    one, has an equality of its own.
    """
    return NoneType in map(type, responses)


def collect(
    requests: Sequence[Remains], responses: list[Any], model: str, loop: asyncio.AbstractEventLoop | None
) -> None:
    """Put what a model that is not decoupled answered through senders into `responses`, where it has None. Waits for
    it; meanwhile the `loop` that its coroutines run on goes on, where there is one: a task of it may be who answers.
    Raises ModelFailed where there is nothing at all.
    """
    if all(one is None for one in responses) and not any(
        request.promise or request._is_rescheduled for request in requests
    ):
        raise ModelFailed(
            f"model '{model}' returned no InferenceResponse: its execute returned None or a list of None, and answered "
            "through no response sender either (does each branch of it return its responses?)"
        )
    for m, request in enumerate(requests[: len(responses)]):
        promise = request.promise
        if responses[m] is None and promise is not None and not request._is_rescheduled:
            if loop is None:
                promise.is_over.wait()
            elif not promise.is_over.is_set():
                loop.run_until_complete(asyncio.to_thread(promise.is_over.wait))
            responses[m], promise.response = promise.response, None  # who else holds it is told from its references
            if responses[m] is None:
                text = f"model '{model}' let go of a response sender without having sent a response"
                responses[m] = InferenceResponse(error=TritonError(text))


def answer_the_forgotten(requests: Sequence[InferenceRequest], senders: Sequence[Sender], model: str) -> None:
    """A decoupled model let go of these: whoever's sender was never asked for gets no answer any more."""
    for request, sender in zip(requests, senders, strict=True):
        if isinstance(request, GivenRequest) and request._sender is None:
            sender.fail(ModelFailed(f"model '{model}' let go of a request without asking for its response sender"))


def refuse_returned(responses: Sequence[object], senders: Sequence[Sender], model: str) -> None:
    """A decoupled model returns nothing."""
    if any(response is not None for response in responses):
        failed = ModelFailed(
            f"Python model '{model}' is using the decoupled mode and the execute function must return None. It answers "
            "through get_response_sender() of each request"
        )
        log.error("%s", failed)
        for sender in senders:
            sender.fail(failed)  # before its requests are let go of: that would say something else
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
