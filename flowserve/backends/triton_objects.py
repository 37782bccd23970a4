"""Requests that a Python model written for Triton makes, its responses, and its errors.

Decided here: Triton's classes, as models write them. Its tensors are in triton_tensors.py, the requests that it is
given in python_requests.py. Models reach them through triton_python_backend_utils.py. Names that start with an
underscore are not for models.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowserve.backends.python_import import scope
from flowserve.backends.triton_tensors import (
    TRITONSERVER_MEMORY_CPU,
    PreferredMemory,
    Tensor,
    TritonModelException,
)

if TYPE_CHECKING:
    from flowserve.backends.python_calls import ModelCalls, ResponseIterator

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
_NO_PARAMETERS: Final[Mapping[str, Any]] = {}  # of nearly every response; nobody writes into it


class TritonError:
    """Why one request failed. `code` is one of the class's constants; unlike an exception it fails only its request."""

    __slots__ = ("_code", "_message")

    UNKNOWN: Final = 0
    INTERNAL: Final = 1
    NOT_FOUND: Final = 2
    INVALID_ARG: Final = 3
    UNAVAILABLE: Final = 4
    UNSUPPORTED: Final = 5
    ALREADY_EXISTS: Final = 6
    CANCELLED: Final = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


class InferenceTrace:
    """The trace that a request is part of. `get_context` is what a model's own spans begin with."""

    __slots__ = ("_context",)

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """A JSON object with the `traceparent` of the span in which the request is computed, as OpenTelemetry's
        propagators take it; None where there is no such span.
        """
        return json.dumps({"traceparent": self._context}) if self._context else None


class InferenceRequest:
    """A request as a model sees it, or one that it makes for another model."""

    __slots__ = ("_about", "_inputs")

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        requested_output_names: Sequence[str | bytes] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        inputs: Iterable[Tensor] = (),
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | str | None = None,
        priority: int = 0,
    ) -> None:
        name = text_of("model_name", model_name)
        self._inputs: list[Tensor] | None = _tensors(name, inputs)
        self._about: dict[str, Any] = {
            "request_id": request_id,
            "correlation_id": correlation_id,
            "requested_output_names": _names(requested_output_names),
            "model_name": name,
            "model_version": model_version,
            "flags": flags,
            "timeout": timeout,
            "priority": priority,
            "preferred_memory": preferred_memory,
            "trace": trace,
            "parameters": json.loads(parameters or "{}") if isinstance(parameters, str) else parameters or {},
        }

    def inputs(self) -> list[Tensor]:
        """The tensors that were given, in the configuration's order."""
        assert self._inputs is not None
        return self._inputs

    def request_id(self) -> str:
        return str(self._facts()["request_id"])

    def correlation_id(self) -> int | str:
        found: int | str = self._facts()["correlation_id"]
        return found

    def flags(self) -> int:
        return int(self._facts()["flags"])

    def timeout(self) -> int:
        """Microseconds, 0 for none."""
        return int(self._facts()["timeout"])

    def priority(self) -> int:
        return int(self._facts()["priority"])

    def parameters(self) -> str:
        """The request's own parameters, as a JSON object."""
        return json.dumps(self._facts()["parameters"])

    def requested_output_names(self) -> list[str]:
        return list(self._facts()["requested_output_names"])

    def model_name(self) -> str:
        return str(self._facts()["model_name"])

    def model_version(self) -> int:
        return int(self._facts()["model_version"])

    def preferred_memory(self) -> PreferredMemory:
        """Where whoever makes a request would like its answers; the host, for one that a model was given."""
        found: PreferredMemory = self._facts().get("preferred_memory") or PreferredMemory(TRITONSERVER_MEMORY_CPU)
        return found

    def trace(self) -> InferenceTrace:
        """What it was given. A request that a model makes is part of the trace of those that it runs, given or not."""
        found: InferenceTrace = self._facts().get("trace") or InferenceTrace()
        return found

    def set_flags(self, flags: int) -> None:
        """What `flags` says of a request for another model: that it begins or ends a sequence."""
        self._facts()["flags"] = flags

    def is_cancelled(self) -> bool:
        """False: nobody withdraws it but whoever made it."""
        return False

    def _facts(self) -> dict[str, Any]:
        return self._about

    def get_response_sender(self) -> Any:
        """Where a model answers a request it was given."""
        raise TritonModelException("Unable to get a response sender: the request was not given to this model")

    def set_release_flags(self, flags: int) -> None:
        """Say, before `execute` returns, whether a request that was given is done or is to be run again."""
        raise TritonModelException("Unable to set release flags: the request was not given to this model")

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Have another model answer, and wait for it; `decoupled` for one that may answer any number of times: then an
        iterator over its responses. What fails is a response with an error.
        """
        calls = self._calls()
        return calls.stream(self) if decoupled else calls.exec(self)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """The same to `await`. It is sent when this is called, so that several can be under way at the same time."""
        answers = self._calls().async_stream(self, is_stream=decoupled)
        return _now(answers) if decoupled else self._calls().async_exec(answers)

    def _calls(self) -> ModelCalls:
        owner = scope.owner
        if owner is None or owner.calls is None:
            raise TritonModelException(
                f"model '{self.model_name()}' cannot be called here: other models are called from execute, on its own "
                "thread, and, by a model in a process of its own, on threads that it has started"
            )
        return owner.calls


class InferenceResponseSender:
    """Where a model answers a request in its own time: `send` and `is_cancelled`. Made by `get_response_sender`."""


class InferenceResponse:
    """The answer to one request: tensors, or why there are none."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] | None = None,
        error: object = None,
        parameters: Mapping[str, Any] | str = "",
    ) -> None:
        self._parameters: Mapping[str, Any] = _parameters(parameters) if parameters else _NO_PARAMETERS
        self._outputs: list[Tensor] = [] if output_tensors is None else list(output_tensors)
        # Models written for old versions of Triton pass a message, or an exception, where an error is wanted.
        self._error = error if error is None or isinstance(error, TritonError) else TritonError(str(error))

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """What it says besides its tensors, as a JSON object."""
        return json.dumps(self._parameters)


def text_of(what: str, given: object) -> str:
    """A name that a model wrote. It may be `bytes`, as on Triton: one that comes out of a tensor of strings is."""
    if isinstance(given, bytes | bytearray):
        return given.decode()
    if not isinstance(given, str):
        raise TypeError(f"{what} wants a text, got {type(given).__name__} {given!r}")
    return given


def _names(given: object) -> list[str]:
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        raise TypeError(f"requested_output_names wants a list of names, got {given!r}")
    return [text_of("requested_output_names", one) for one in given]


def _tensors(model: str, given: Iterable[Tensor]) -> list[Tensor]:
    for one in (tensors := list(given)):
        if not isinstance(one, Tensor):
            text = f"inputs of a request for model '{model}' are Tensors, got {type(one).__name__}"
            hint = " (a tensor was looked up by a name that is not there)" if one is None else ""
            raise TritonModelException(f"model '{scope.model}': {text}{hint}")
    return tensors


async def _now(answers: ResponseIterator) -> ResponseIterator:
    return answers


def _parameters(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A response's parameters: a JSON object, or a dictionary, of strings, numbers and booleans."""
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping) or not all(
        isinstance(key, str) and isinstance(value, (str, int, float)) for key, value in found.items()
    ):
        text = "response parameters are a JSON object of strings, numbers and booleans"
        raise TritonModelException(f"model '{scope.model}': {text}, got {given!r}")
    return dict(found)
