"""A Python model that calls other models: `InferenceRequest.exec` and `async_exec`.

Decided here: how a request that a model made becomes one of ours, what of it is refused before it is sent, and how
answers and failures look to the model: a failure is a response with an error, as on Triton; only what the model wrote
wrongly is raised. How a call reaches the server is the `Caller`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Final

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
from flowserve.errors import Cancelled, FlowserveError, Invalid, NotFound, Unavailable, Unsupported
from flowserve.values import BY_NUMPY, Array, Request

_CODES: Final[dict[type[FlowserveError], int]] = {
    NotFound: TritonError.NOT_FOUND,
    Invalid: TritonError.INVALID_ARG,
    Unavailable: TritonError.UNAVAILABLE,
    Unsupported: TritonError.UNSUPPORTED,
    Cancelled: TritonError.CANCELLED,
}


class ModelCalls:
    """What one instance's code calls other models through. On any of its threads."""

    def __init__(self, model: str, caller: Caller) -> None:
        self._model = model
        self._caller = caller

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Blocks until the answer is there."""
        (response,) = self.stream(request, is_stream=False)
        return response

    def stream(self, request: InferenceRequest, *, is_stream: bool = True) -> Iterator[InferenceResponse]:
        """Each answer as it comes. It is sent at once, whether or not anybody iterates."""
        answers: SimpleQueue[Answer] = SimpleQueue()
        leave = self._begin(request, answers.put, is_stream=is_stream)
        return self._taken(answers, leave, is_stream=is_stream)

    def _taken(
        self, answers: SimpleQueue[Answer], leave: Callable[[], None], *, is_stream: bool
    ) -> Iterator[InferenceResponse]:
        is_over = False
        try:
            while not is_over:
                self._caller.wait(lambda: not answers.empty())
                answer = answers.get()
                is_over = not is_stream or answer is None or isinstance(answer, FlowserveError)
                if answer is not None:
                    yield _response(answer)
        finally:
            if not is_over:
                leave()

    async def async_exec(self, answers: AsyncIterator[InferenceResponse]) -> InferenceResponse:
        """What `async_stream` began, where there is one answer."""
        (response,) = [answer async for answer in answers]
        return response

    def async_stream(self, request: InferenceRequest, *, is_stream: bool = True) -> AsyncIterator[InferenceResponse]:
        """As `stream`, without blocking the asyncio loop that runs."""
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Answer] = asyncio.Queue()

        def answered(answer: Answer) -> None:
            try:
                loop.call_soon_threadsafe(answers.put_nowait, answer)
            except RuntimeError:  # the loop is closed: nobody awaits it any more
                return

        leave = self._begin(request, answered, is_stream=is_stream)
        return self._taken_async(loop, answers, leave, is_stream=is_stream)

    async def _taken_async(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: asyncio.Queue[Answer],
        leave: Callable[[], None],
        *,
        is_stream: bool,
    ) -> AsyncIterator[InferenceResponse]:
        is_over = False
        try:
            with self._caller.awaited_on(loop):
                while not is_over:
                    answer = await answers.get()
                    is_over = not is_stream or answer is None or isinstance(answer, FlowserveError)
                    if answer is not None:
                        yield _response(answer)
        finally:
            if not is_over:
                leave()

    def _begin(
        self, request: InferenceRequest, answered: Callable[[Answer], None], *, is_stream: bool
    ) -> Callable[[], None]:
        try:
            return self._caller.begin(self._call(request, is_stream=is_stream), answered)
        except FlowserveError as error:
            raise TritonModelException(str(error)) from None

    def _call(self, request: InferenceRequest, *, is_stream: bool) -> Call:
        name = request.model_name()
        if not name:
            raise TritonModelException(f"model '{self._model}': the request names no model (model_name)")
        version = request.model_version()
        flags = request.flags()
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
