"""Tensors, requests, responses and errors of Python models, and their calls of other models, with Triton's names.

Decides which arrays a model may write to, and how tensors are exchanged with other libraries: a tensor in host memory
is a numpy array; a tensor on a GPU stays there, and a model reads it by DLPack; a response's tensor on a GPU is copied
to the host when the response is taken over, unless it may stay. Decides also what an InferenceRequest and an
InferenceResponse may hold, which requests to another model are refused before they are sent, how a request becomes a
`BlsCall` (Triton's BLS), and how a model sees the responses to a call: an error is a response with an error, as on
Triton; a call that could not be sent raises. How a call reaches the server is decided by the `BlsClient` (base.py); the
requests of a batch are in requests.py of the python backend, checks of responses in answers.py. It knows of a
configuration only the specs of inputs.

Callers: models, and the python backend.
"""

from __future__ import annotations

import asyncio
import json
import os
import reprlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from flowserve.backends.base import Answer, BlsCall, BlsClient
from flowserve.backends.python.pb_utils.context import Constant, TritonModelException, active, shown_as
from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    FlowserveError,
    Invalid,
    ModelFailed,
    ModelUnknown,
    NotFound,
    Unavailable,
    Unsupported,
)
from flowserve.graph.types import inner_shape
from flowserve.memory import dlpack
from flowserve.memory.dlpack import ForeignTensor
from flowserve.memory.pool import HOST
from flowserve.memory.raw import to_bytes
from flowserve.memory.tensor import Tensor as _Rows
from flowserve.values import BY_NUMPY, Array, DType, Request, TensorSpec


@shown_as("TritonModelException")
class OnGpu(TritonModelException):
    """The elements of a tensor on a GPU were requested as a numpy array."""


@shown_as("MemoryType")
class MemoryType(Constant):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU


@shown_as("PreferredMemory")
class PreferredMemory:
    """The memory in which a model would like the response to a request it makes. Responses are always in host memory,
    which a model must handle on Triton too.
    """

    def __init__(self, preferred_memory_type: MemoryType | int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


@shown_as("Tensor")
class Tensor:
    """A named array. `numpy_array` is not copied. A model may change it again after it was sent in a response."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(numpy_array) is not np.ndarray or type(name) is not str:
            name, numpy_array = _checked(name, numpy_array)
        self._name = name
        self._array: Array | None = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The tensor as a writable array; BYTES tensors are object arrays of `bytes`."""
        assert self._array is not None
        return self._array

    def dtype(self) -> np.dtype[Any]:
        return self.as_numpy().dtype

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self.dtype())

    def shape(self) -> list[int]:
        return list(self.as_numpy().shape)

    def is_cpu(self) -> bool:
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of an object with DLPack support, or of a DLPack capsule."""
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == dlpack.CPU:
            try:
                return Tensor(name, np.from_dlpack(tensor))
            except (BufferError, RuntimeError):
                pass  # a data type that numpy does not import, such as BF16
        source = tensor if hasattr(tensor, "__dlpack__") else None
        try:
            found = dlpack.import_capsule(tensor if source is None else source.__dlpack__())
        except FlowserveError as error:
            raise TritonModelException(str(error)) from error
        return Tensor(name, found.on_host()) if found.device < 0 else GpuTensor(name, found, source)

    def to_dlpack(self) -> Any:
        """A DLPack capsule over this tensor's memory."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        array = self.as_numpy()
        if array.dtype == DType.BF16.numpy:
            return dlpack.export_capsule(ForeignTensor(array.ctypes.data, array.dtype, array.shape, -1, array))
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


def _checked(name: object, array: object) -> tuple[str, Array]:
    """The arguments of a Tensor. As on Triton, a name may be `bytes`; what else is refused has its text."""
    if not isinstance(name, str | bytes) or not isinstance(array, np.ndarray):
        text = "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
        text += "    1. c_python_backend_utils.Tensor(arg0: str, arg1: numpy.ndarray)\n\n"
        text += f"Invoked with: {reprlib.repr(name)}, {reprlib.repr(array)}"
        hint = "" if isinstance(array, np.ndarray) else " (np.array(VALUES, DTYPE) makes an array)"
        raise TypeError(text + hint)
    # Plain elements, also for masked arrays.
    return name_text("name", name), np.asarray(array)


@shown_as("Tensor")
class GpuTensor(Tensor):
    """A tensor on a GPU."""

    __slots__ = ("_source", "_there")

    def __init__(self, name: str, there: ForeignTensor, source: Any = None) -> None:
        """`source`: the object that the tensor came from, if it orders later readers after its own work."""
        self._name = name_text("name", name)
        self._array = None
        self._there = there
        self._source = source

    def as_numpy(self) -> NoReturn:
        """Raises TritonModelException, because the tensor is not in host memory."""
        raise OnGpu("Tensor is stored in GPU and cannot be converted to NumPy.")

    def dtype(self) -> np.dtype[Any]:
        return self._there.dtype

    def shape(self) -> list[int]:
        return list(self._there.shape)

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, **options: Any) -> Any:
        return dlpack.export_capsule(self._there) if self._source is None else self._source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._there.device


@shown_as("Tensor")
class _Input(Tensor):
    """An input tensor of a request: rows of a block, converted when the model reads them."""

    __slots__ = ("_may_write", "_rows", "_spec")

    def __init__(self, spec: TensorSpec, rows: _Rows, may_write: bool) -> None:
        self._name = spec.name
        self._array = None
        self._spec = spec
        self._rows = rows
        self._may_write = may_write

    def as_numpy(self) -> Array:
        array = self._array
        if array is None:
            array = self._rows.array
            # A model may write into its inputs. Only the last reader of a block gets its memory, other readers get a
            # copy: no two arrays that may be written to share memory.
            flags = array.flags
            if not (self._may_write and flags.writeable and flags.aligned):
                array = HOST.copy_of(array)
            if self._spec.reshape is not None:
                array = array.reshape(inner_shape(array.shape, self._spec))
            self._array = array
        return array

    def dtype(self) -> np.dtype[Any]:
        return self._rows.block.dtype

    def shape(self) -> list[int]:
        return list(inner_shape(self._rows.shape, self._spec))


def on_host(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it in host memory."""
    return Tensor(tensor._name, tensor._there.on_host()) if isinstance(tensor, GpuTensor) else tensor


def numpy_to_triton_type(data_type: Any) -> int:
    """The number in ModelConfig of a numpy dtype or scalar type; strings of any kind are TYPE_STRING."""
    dtype = np.dtype(data_type)
    return DType.BYTES.number if dtype.kind in "SU" else BY_NUMPY[dtype].number


def as_bytes(array: Array) -> Array:
    """An array of strings of any kind as an object array of `bytes`; the array itself if it is one already."""
    elements = array.ravel().tolist()
    if array.dtype.kind == "O" and set(map(type, elements)) <= {bytes}:
        return array
    converted = np.empty(len(elements), np.object_)
    converted[:] = [to_bytes(element) for element in elements]
    return converted.reshape(array.shape)


if TYPE_CHECKING:
    from typing import Self  # not in the oldest Python that models run in

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
_NO_PARAMETERS: Final[Mapping[str, Any]] = {}  # shared by nearly all responses; never written to


@shown_as("TritonError.__ErrorCode")
class ErrorCode(Constant):
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


@shown_as("TritonError")
class TritonError:
    """The error of one request. `code` is one of the class's constants. An exception would fail the whole batch."""

    __slots__ = ("_code", "_message")

    UNKNOWN: Final = ErrorCode.UNKNOWN
    INTERNAL: Final = ErrorCode.INTERNAL
    NOT_FOUND: Final = ErrorCode.NOT_FOUND
    INVALID_ARG: Final = ErrorCode.INVALID_ARG
    UNAVAILABLE: Final = ErrorCode.UNAVAILABLE
    UNSUPPORTED: Final = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: Final = ErrorCode.ALREADY_EXISTS
    CANCELLED: Final = ErrorCode.CANCELLED

    def __init__(self, message: str | bytes, code: ErrorCode | int = ErrorCode.INTERNAL) -> None:
        """`code` may be a number, which Triton refuses."""
        self._message = message.decode() if isinstance(message, bytes) else str(message)
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message


setattr(TritonError, "__ErrorCode", ErrorCode)  # where pickle looks for it


_KINDS: Final[Mapping[ErrorCode, type[FlowserveError]]] = {
    TritonError.UNKNOWN: ModelUnknown,
    TritonError.NOT_FOUND: NotFound,
    TritonError.ALREADY_EXISTS: AlreadyExists,  # before Invalid, which is its base class
    TritonError.INVALID_ARG: Invalid,
    TritonError.UNAVAILABLE: Unavailable,
    TritonError.UNSUPPORTED: Unsupported,
    TritonError.CANCELLED: Cancelled,
}


def error_of(refused: TritonError) -> FlowserveError:
    """A model's error as the server raises it."""
    return _KINDS.get(refused.code(), ModelFailed)(refused.message())


@shown_as("InferenceResponse")
class InferenceResponse:
    """The response to one request: its output tensors, or its error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] | None = None,
        error: object = None,
        parameters: Mapping[str, Any] | str = "",
    ) -> None:
        self._parameters: Mapping[str, Any] = _parameters(parameters) if parameters else _NO_PARAMETERS
        self._outputs: list[Tensor] = [] if output_tensors is None else list(output_tensors)
        # Models written for old versions of Triton pass a message or an exception where an error is expected.
        self._error = error if error is None or isinstance(error, TritonError) else TritonError(str(error))

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The response parameters as a JSON object."""
        return json.dumps(self._parameters)


@shown_as("InferenceResponseSender")
class InferenceResponseSender:
    """Sends the responses to one request: `send` and `is_cancelled`. Made by `InferenceRequest.get_response_sender`."""


@shown_as("ResponseIterator")
class ResponseIterator:
    """The responses to one call in the order of their arrival: with `for`, which blocks, or with `async for`."""

    def __init__(self, caller: BlsClient, call: BlsCall, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Send the call. It is sent whether or not its responses are read. `loop`: the running loop of a caller that
        awaits the responses.
        """
        self._caller = caller
        self._pid = os.getpid()
        self._loop = loop
        self._arrived = asyncio.Event()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._has_begun = False
        self._is_over = self._is_cancelled = False
        try:
            self._leave = caller.begin(call, partial(_take, self._answers, loop, self._arrived))
        except FlowserveError as error:
            raise TritonModelException(str(error)) from None

    def cancel(self) -> None:
        """Withdraw the call: `is_cancelled()` of the called model is true from now on. Its responses that have arrived
        can be read, and then the last: the final one, or an error with the code CANCELLED.
        """
        if not (self._is_over or self._is_cancelled):
            self._is_cancelled = True
            self._leave(True)

    def _abandon(self) -> None:
        """No more responses are read."""
        if not self._is_over:
            self._is_over = True
            self._leave(False)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferenceResponse:
        self._has_begun = True
        if not self._is_over:
            self._check_process()
            try:
                self._caller.wait(lambda: not self._answers.empty())
                return self._next(self._answers.get())
            except BaseException as error:
                self._abandon()
                if isinstance(error, FlowserveError):
                    raise TritonModelException(str(error)) from None
                raise
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceResponse:
        self._has_begun = True
        if not self._is_over:
            self._check_process()
            assert self._loop is not None, "made without a running loop"
            try:
                if self._answers.empty():
                    with self._caller.awaited_on(self._loop):
                        while self._answers.empty():
                            self._arrived.clear()
                            await self._arrived.wait()
                return self._next(self._answers.get())
            except BaseException as error:
                self._abandon()
                if isinstance(error, FlowserveError):
                    raise TritonModelException(str(error)) from None
                raise
        raise StopAsyncIteration

    def __del__(self) -> None:
        if self._has_begun:
            self._abandon()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TritonModelException(
                f"model '{active.model}' cannot wait for a call in a process that it has forked: the responses go to "
                "the process that made the call; make it in this one"
            )

    def _next(self, answer: Answer) -> InferenceResponse:
        self._is_over = isinstance(answer, FlowserveError) or answer.is_final
        return _response(answer)


@shown_as("InferenceTrace")
class InferenceTrace:
    """The trace that a request is part of. A model's own spans begin with `get_context`."""

    __slots__ = ("_context",)

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """A JSON object with the `traceparent` of the span in which the request is computed, as OpenTelemetry's
        propagators take it; None if there is no such span.
        """
        return json.dumps({"traceparent": self._context}) if self._context else None


@shown_as("InferenceRequest")
class InferenceRequest:
    """A request that a model makes for another model, or (in subclasses) one that it was given."""

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
        name = name_text("model_name", model_name)
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
        """The input tensors; of a request that was given to the model, in the configuration's order."""
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
        """The request parameters as a JSON object."""
        return json.dumps(self._facts()["parameters"])

    def requested_output_names(self) -> list[str]:
        return list(self._facts()["requested_output_names"])

    def model_name(self) -> str:
        return str(self._facts()["model_name"])

    def model_version(self) -> int:
        return int(self._facts()["model_version"])

    def preferred_memory(self) -> PreferredMemory:
        """The memory in which the model would like the response; the host for a request that it was given."""
        found: PreferredMemory = self._facts().get("preferred_memory") or PreferredMemory(TRITONSERVER_MEMORY_CPU)
        return found

    def trace(self) -> InferenceTrace:
        """The trace that was set. A request that a model makes is part of the trace of the request that it executes,
        whether or not one is set.
        """
        found: InferenceTrace = self._facts().get("trace") or InferenceTrace()
        return found

    def set_flags(self, flags: int) -> None:
        """Set the flags of a request for another model: whether it begins or ends a sequence."""
        self._facts()["flags"] = flags

    def is_cancelled(self) -> bool:
        """Always False: only the model itself can cancel this request."""
        return False

    def _facts(self) -> dict[str, Any]:
        return self._about

    def get_response_sender(self) -> Any:
        """The sender of responses to a request that was given to the model."""
        raise TritonModelException("Unable to get a response sender: the request was not given to this model")

    def set_release_flags(self, flags: int) -> None:
        """Set, before `execute` returns, whether a request that was given is done or runs again."""
        raise TritonModelException("Unable to set release flags: the request was not given to this model")

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call another model and wait for its response. `decoupled`: return an iterator over any number of responses
        instead, at once. Failures of the other model are responses with an error.
        """
        responses = self._begin(decoupled)
        return responses if decoupled else next(responses)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """As `exec`, to `await`. The call is sent at once, so that several calls can be in progress."""
        responses = self._begin(decoupled, asyncio.get_running_loop())
        return _awaitable(responses) if decoupled else anext(responses)

    def _begin(self, is_stream: bool, loop: asyncio.AbstractEventLoop | None = None) -> ResponseIterator:
        """Send the request. Raises TritonModelException if the model may not call other models."""
        context = active.context
        if context is None or context.caller is None or not context.may_call:
            raise TritonModelException(
                f"model '{self.model_name()}' cannot be called here: other models are called from execute, on its own "
                "thread, and, by a model in a process of its own, on threads that it has started"
            )
        return ResponseIterator(context.caller, _call_of(self, context.model, is_stream=is_stream), loop)


def name_text(what: str, given: object) -> str:
    """A name given by a model. As on Triton it may be `bytes`, as names taken from a tensor of strings are."""
    if isinstance(given, bytes | bytearray):
        return given.decode()
    if not isinstance(given, str):
        raise TypeError(f"{what} wants a text, got {type(given).__name__} {given!r}")
    return given


def _names(given: object) -> list[str]:
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        raise TypeError(f"requested_output_names wants a list of names, got {given!r}")
    return [name_text("requested_output_names", one) for one in given]


def _tensors(model: str, given: Iterable[Tensor]) -> list[Tensor]:
    for one in (tensors := list(given)):
        if not isinstance(one, Tensor):
            text = f"inputs of a request for model '{model}' are Tensors, got {type(one).__name__}"
            hint = " (a tensor was looked up by a name that is not there)" if one is None else ""
            raise TritonModelException(f"model '{active.model}': {text}{hint}")
    return tensors


async def _awaitable(responses: ResponseIterator) -> ResponseIterator:
    return responses


def _call_of(request: InferenceRequest, model: str, *, is_stream: bool) -> BlsCall:
    """The call of another model that `model` makes with this request. Raises TritonModelException if it is invalid."""
    name = request.model_name()
    version = request.model_version()
    flags = request.flags()
    inputs = {tensor.name(): _array(model, name, tensor) for tensor in request.inputs()}
    if len(inputs) < len(request.inputs()):
        raise TritonModelException(f"model '{model}': a request for model '{name}' gives an input twice")
    if request.timeout() < 0 or request.priority() < 0:
        raise TritonModelException(f"model '{model}': timeout and priority of a request are 0 or more")
    sequence = request.correlation_id()
    parameters = request._facts()["parameters"]
    if not _are_parameters(parameters):
        raise TritonModelException(
            f"model '{model}': parameters of a request are a JSON object of strings, numbers and booleans, "
            f"got {parameters!r}"
        )
    return BlsCall(
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


def _array(model: str, called: str, tensor: Tensor) -> Array:
    array = on_host(tensor).as_numpy()
    if array.dtype.kind in "OSU":
        return as_bytes(array)
    if array.dtype not in BY_NUMPY:
        raise TritonModelException(
            f"model '{model}': input '{tensor.name()}' for model '{called}' has data type {array.dtype}, "
            "which no model takes"
        )
    return array


def _parameters(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A response's parameters: a JSON object, or a dictionary, of strings, numbers and booleans."""
    found = json.loads(given) if isinstance(given, str) else given
    if not _are_parameters(found):
        text = "response parameters are a JSON object of strings, numbers and booleans"
        raise TritonModelException(f"model '{active.model}': {text}, got {given!r}")
    return dict(found)


def _are_parameters(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(key, str) and isinstance(value, (str, int, float)) for key, value in given.items()
    )


def _take(
    answers: SimpleQueue[Answer], loop: asyncio.AbstractEventLoop | None, arrived: asyncio.Event, answer: Answer
) -> None:
    """Called on any thread; never waits. It holds no reference to the iterator, whose end withdraws the call."""
    answers.put(answer)
    if loop is not None:
        try:
            loop.call_soon_threadsafe(arrived.set)
        except RuntimeError:  # the loop is closed: no task awaits the response
            return


def _response(answer: Answer) -> InferenceResponse:
    if isinstance(answer, FlowserveError):
        code = next((code for code, kind in _KINDS.items() if isinstance(answer, kind)), TritonError.INTERNAL)
        return InferenceResponse(error=TritonError(str(answer), code))
    return InferenceResponse([Tensor(name, array) for name, array in answer.outputs.items()], None, answer.parameters)
