"""A Python model that calls other models: `InferenceRequest.exec` and `async_exec`.

Decided here: how a request that a model made becomes one of ours, what of it is refused before it is sent, and how
answers and failures look to the model: a failure is a response with an error, as on Triton; only what the model wrote
wrongly is raised. How a call reaches the server is the `Caller`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from flowserve.backends.base import Answer, Call, Caller
from flowserve.backends.python_answers import as_bytes
from flowserve.backends.triton_objects import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    TritonError,
)
from flowserve.backends.triton_tensors import Tensor, TritonModelException, on_host
from flowserve.errors import AlreadyExists, Cancelled, FlowserveError, Invalid, NotFound, Unavailable, Unsupported
from flowserve.values import BY_NUMPY, Array, Request

if TYPE_CHECKING:
    from typing import Self  # which the oldest Python that models run in has not

_CODES: Final[dict[type[FlowserveError], int]] = {
    NotFound: TritonError.NOT_FOUND,
    AlreadyExists: TritonError.ALREADY_EXISTS,  # before what it is a kind of
    Invalid: TritonError.INVALID_ARG,
    Unavailable: TritonError.UNAVAILABLE,
    Unsupported: TritonError.UNSUPPORTED,
    Cancelled: TritonError.CANCELLED,
}


class ResponseIterator:
    """The responses to one call, each as it comes: for `for`, which blocks, and in `async def` for `async for`, too."""

    def __init__(self, caller: Caller, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: the one that runs, of whoever awaits responses."""
        self._caller = caller
        self._loop = loop
        self._arrived = asyncio.Event()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._leave: Callable[[], None] = _stay
        self._is_stream = True
        self._has_begun = False
        self._is_over = False

    def _begin(self, call: Call) -> Self:
        """Send the call, whether or not anybody asks for responses."""
        self._is_stream = call.is_stream
        try:
            self._leave = self._caller.begin(call, partial(_take, self._answers, self._loop, self._arrived))
        except FlowserveError as error:
            raise TritonModelException(str(error)) from None
        return self

    def cancel(self) -> None:
        """Nobody wants more of them."""
        if not self._is_over:
            self._is_over = True
            self._leave()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferenceResponse:
        self._has_begun = True
        if not self._is_over:
            try:
                self._caller.wait(lambda: not self._answers.empty())
                response = self._next(self._answers.get())
            except BaseException:
                self.cancel()
                raise
            if response is not None:
                return response
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceResponse:
        self._has_begun = True
        if not self._is_over:
            assert self._loop is not None, "made where a loop runs"
            try:
                if self._answers.empty():
                    with self._caller.awaited_on(self._loop):
                        while self._answers.empty():
                            self._arrived.clear()
                            await self._arrived.wait()
                response = self._next(self._answers.get())
            except BaseException:
                self.cancel()
                raise
            if response is not None:
                return response
        raise StopAsyncIteration

    def __del__(self) -> None:
        if self._has_begun:
            self.cancel()

    def _next(self, answer: Answer) -> InferenceResponse | None:
        self._is_over = not self._is_stream or answer is None or isinstance(answer, FlowserveError)
        return None if answer is None else _response(answer)


def _take(
    answers: SimpleQueue[Answer], loop: asyncio.AbstractEventLoop | None, arrived: asyncio.Event, answer: Answer
) -> None:
    """On any thread, never waiting. It does not hold the iterator, whose end withdraws the call."""
    answers.put(answer)
    if loop is not None:
        try:
            loop.call_soon_threadsafe(arrived.set)
        except RuntimeError:  # the loop is closed: nobody awaits it any more
            return


class ModelCalls:
    """What one instance's code calls other models through. On any of its threads."""

    def __init__(self, model: str, caller: Caller) -> None:
        self._model = model
        self._caller = caller

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Blocks until the answer is there."""
        return next(ResponseIterator(self._caller)._begin(self._call(request, is_stream=False)))

    def stream(self, request: InferenceRequest) -> ResponseIterator:
        """Each answer as it comes. It is sent at once, whether or not anybody iterates."""
        return ResponseIterator(self._caller)._begin(self._call(request, is_stream=True))

    async def async_exec(self, answers: ResponseIterator) -> InferenceResponse:
        """What `async_stream` began, where there is one answer."""
        return await anext(answers)

    def async_stream(self, request: InferenceRequest, *, is_stream: bool = True) -> ResponseIterator:
        """As `stream`, without blocking the asyncio loop that runs."""
        answers = ResponseIterator(self._caller, asyncio.get_running_loop())
        return answers._begin(self._call(request, is_stream=is_stream))

    def _call(self, request: InferenceRequest, *, is_stream: bool) -> Call:
        name = request.model_name()
        if not name:
            raise TritonModelException(f"model '{self._model}': the request names no model (model_name)")
        version = request.model_version()
        flags = request.flags()
        for tensor in request.inputs():
            given = tensor.name()
            if not isinstance(given, str):
                raise TritonModelException(f"model '{self._model}': names of tensors are strings, got {given!r}")
        inputs = {tensor.name(): self._array(name, tensor) for tensor in request.inputs()}
        if len(inputs) < len(request.inputs()):
            raise TritonModelException(f"model '{self._model}': a request for model '{name}' gives an input twice")
        if request.timeout() < 0 or request.priority() < 0:
            raise TritonModelException(f"model '{self._model}': timeout and priority of a request are 0 or more")
        sequence = request.correlation_id()
        parameters = request._facts()["parameters"]
        if not isinstance(parameters, dict) or not all(
            isinstance(key, str) and isinstance(value, (str, int, float)) for key, value in parameters.items()
        ):
            raise TritonModelException(
                f"model '{self._model}': parameters of a request are a JSON object of strings, numbers and booleans, "
                f"got {parameters!r}"
            )
        return Call(
            name,
            "" if version < 0 else str(version),
            Request(
                inputs,
                tuple(request.requested_output_names()) or None,
                id=request.request_id(),
                priority=request.priority(),
                timeout_us=request.timeout(),
                sequence_id=sequence if isinstance(sequence, str) else int(sequence),
                sequence_start=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
                sequence_end=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
                parameters=parameters,
            ),
            is_stream,
        )

    def _array(self, called: str, tensor: Tensor) -> Array:
        array = on_host(tensor).as_numpy()
        if array.dtype.kind in "OSU":
            return as_bytes(array)
        if array.dtype not in BY_NUMPY:
            raise TritonModelException(
                f"model '{self._model}': input '{tensor.name()}' for model '{called}' has data type {array.dtype}, "
                "which no model takes"
            )
        return array


def _response(answer: Answer) -> InferenceResponse:
    if isinstance(answer, FlowserveError):
        codes = [code for kind, code in _CODES.items() if isinstance(answer, kind)]
        return InferenceResponse(error=TritonError(str(answer), codes[0] if codes else TritonError.INTERNAL))
    assert answer is not None
    return InferenceResponse([Tensor(name, array) for name, array in answer.outputs.items()])


def _stay() -> None:
    """Nothing was sent yet, or it could not be."""
