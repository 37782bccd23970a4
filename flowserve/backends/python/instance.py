"""One instance of a Python model: an object of its class, the calls of its `execute`, its requests and their senders.

Decides when and with which arguments the methods of the class are called, which errors the failures of `execute`
become, how coroutines are run, and how a request that runs again (iterative sequences) may be answered. The model's
traceback goes to the log, never into a response. It does not know whether it runs on a thread, on the event loop or in
a worker process, and not how responses are checked (answers.py).

Coroutines: a model whose `execute` is a coroutine has an asyncio loop. A decoupled model in a process of its own runs
several of them at the same time, as on Triton: `execute` counts as returned when its coroutine is scheduled, so that
the next batch begins while one waits. In the server this is not possible, since threads other than the instance's own
may not call other models there.

Requests: the attributes of a member of a batch are looked up when the model reads them, so that an unread request costs
nearly nothing. Senders: decides what the model may do with a sender (Triton's rules and texts): many responses in
decoupled mode, or one response in the model's own time; and the error for a sender or a request that the model freed
without answering. When there is room for a response is decided by the implementation of `Sender` (base.py). A sender
may be used on any thread, also after `execute` has returned.

Callers: backend.py makes the instances; the runtime, or a worker process, runs them; models use requests and senders.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import ModuleType, NoneType
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from flowserve.backends.base import BlsClient, ClockNs, Results, Sender, Sent, Work
from flowserve.backends.python.answers import AnswerReader
from flowserve.backends.python.pb_utils.context import ModelScope, TritonModelException, own_process
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
from flowserve.backends.python.source import CLASS, RAISED, ModelSource, forget_model, line_of, reason
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError, Invalid, ModelFailed, Raised, model_raised
from flowserve.graph.types import inner_shape
from flowserve.memory.column import Column
from flowserve.memory.pool import POOLED_BYTES_MIN
from flowserve.values import TensorSpec

log = logging.getLogger("flowserve.python")

_CLOSED: Final = "Unable to send response. Response sender has been closed."
_ANY_ROWS: Final = -1
END_S_MAX: Final = 2.0  # limit for cancelled coroutines to end when the model is closed


class ReceivedRequest(InferenceRequest):
    """One member of a batch. Everything is looked up when the model reads it."""

    __slots__ = ("_flags", "_instance", "_kept_sender", "_member", "_work")

    _kept_sender: Any
    _flags: int

    def __init__(self, instance: PythonInstance, work: Work, member: int) -> None:
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
            self._is_closed = is_final
            if self._has_failed:
                return
            if response is not None:
                answer = self._taken(response)
                if isinstance(answer, FlowserveError):
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
        if read.errors:
            return read.errors[0]
        # An output without elements may have another number of rows.
        rows = {tensor.stop - tensor.start for tensor in outputs if tensor is not None and 0 not in tensor.shape}
        if len(rows) > 1:
            return ModelFailed(f"model '{self._model}' sent outputs of {sorted(rows)} rows in one response")
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


class DecoupledRequest(ReceivedRequest):
    """A request of a decoupled model. The model may ask for its sender at any time, on any thread. If it frees the
    request without having asked, the request fails.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self._sender is None and self._work.senders is not None:
            self._work.senders[self._member].fail(_abandoned(self._instance.model_name))


class PendingResponse:
    """The one response of a model that is not decoupled. The batch waits for it; it outlives the sender."""

    __slots__ = ("done", "response")

    def __init__(self) -> None:
        self.response: InferenceResponse | None = None
        self.done = threading.Event()


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


def _abandoned(model: str) -> ModelFailed:
    return ModelFailed(f"model '{model}' let go of a request without asking for its response sender")


def refuse_returned(responses: Sequence[object], senders: Sequence[Sender], model: str) -> None:
    """Raises ModelFailed, and fails the requests, if a decoupled model returned anything but None."""
    if any(response is not None for response in responses):
        failed = ModelFailed(
            f"Python model '{model}' is using the decoupled mode and the execute function must return None. It answers "
            "through get_response_sender() of each request"
        )
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


class LateFailure(NamedTuple):
    """The exception that a model raised after it had responded to some members of a batch, and the other `members`."""

    error: ModelFailed
    members: Sequence[int]


class PythonInstance:
    """One object of the model's class. Subclasses change which requests it receives and how its responses are
    processed.
    """

    _received: type[ReceivedRequest] = ReceivedRequest
    _received_decoupled: type[ReceivedRequest] = DecoupledRequest

    def __init__(self, source: ModelSource, name: str, group: InstanceGroup, *, owns_process: bool = False) -> None:
        """`owns_process`: the process runs this instance only."""
        self._source = source
        self._owns_process = owns_process
        self._name = name
        self._group = group
        config = source.config
        self.model_name = config.name
        self.version = source.files.version
        self.inputs = config.inputs
        self.is_iterative = config.sequence is not None and config.sequence.is_iterative
        self._answers = AnswerReader(source.config, copies=not owns_process, strict=source.strict_outputs)
        self._scope = ModelScope(source.context)  # replaced in `call_through` by one that may call other models
        self.context = source.context
        self._module: ModuleType | None = None
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutines: ConcurrentCoroutines | None = None
        self._execute: Any = None  # `execute` of the model's object, or the function that runs its coroutine
        self._clock: ClockNs = lambda: 0  # the clock of the running batch
        self._running: Work | None = None  # the running batch

    def call_through(self, caller: BlsClient) -> None:
        """All methods of the model may use `caller`; only `execute` may call other models with it."""
        source = self._source = copy(self._source)
        source.context = replace(source.context, caller=caller)
        self.context = replace(source.context, may_call=True)
        self._scope = ModelScope(self.context)

    def open(self) -> None:
        """Import the model, make its object and initialise it."""
        source = self._source
        if self._owns_process:
            own_process(self.context)
        module = self._module = source.import_fresh()
        model_class = source.model_class(module)
        with source.running("initialize"):
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(source.arguments(self._name, self._group))
        execute = getattr(self._model, "execute", None)
        if execute is None:
            raise Invalid(f"model '{source.config.name}': class {CLASS} in {source.shown} has no method execute")
        if inspect.iscoroutinefunction(execute) and self._runs_concurrently():
            self._coroutines = ConcurrentCoroutines(source.config.name, execute, self._failed)
            execute = self._coroutines.begin
        elif inspect.iscoroutinefunction(execute):
            self._loop = asyncio.new_event_loop()
            execute = partial(_run_coroutine, self._loop, execute)
        self._execute = execute

    def run(self, work: Work, clock: ClockNs) -> Results:
        senders = work.senders
        self._clock = clock
        kind = self._received if senders is None else self._received_decoupled
        requests: list[Any] = [*map(kind, repeat(self), repeat(work), range(len(work.rows)))]
        assign_inputs(requests, work, self.inputs)
        gathered_ns = clock()
        if self._owns_process:  # the model is active on all threads
            responses, late = self._responses(requests, work)
        else:
            with self._scope:
                responses, late = self._responses(requests, work)
        # Only types are compared, since an object returned by mistake, such as an array, may define its own equality.
        if senders is None and NoneType in map(type, responses):
            requests = [*map(ExecutedRequest, requests)]  # a new list: the model may still use the old one
            collect(requests, responses, self.model_name, self._loop)
        results = self._results(requests, responses, work, gathered_ns, clock())
        if late is not None:
            results.raised = late.error
            results.errors = {**results.errors, **dict.fromkeys(late.members, late.error)}
        return results

    def _responses(self, requests: list[Any], work: Work) -> tuple[list[Any], LateFailure | None]:
        """Call `execute`. Returns its responses in a new list: the model holds no reference to it, so that reference
        counts tell whether the model keeps a response. Also returns its exception, if it had sent responses before
        that.
        """
        self._running = work
        try:
            returned = self._execute(requests)
            if returned is None:
                return [None] * len(work.rows), None
            if not isinstance(returned, list):
                text = f"Expected a list in the execute return, found type '{type(returned)}'."
                raise TypeError(f"{text} It holds one InferenceResponse for each request")
            return [*returned], None
        except RAISED as error:
            if work.senders is None and any(has_response(request) for request in requests):
                return self._sent_before(requests, error)
            self._raise(error, work.senders or ())
        finally:
            self._running = None

    def _sent_before(self, requests: Sequence[ReceivedRequest], error: BaseException) -> tuple[list[Any], LateFailure]:
        """`execute` raised after it had sent responses: those count, and the other requests get the error."""
        failed = [m for m, request in enumerate(requests) if not has_response(request)]
        placeholder = InferenceResponse(error=TritonError("raised"))  # `run` sets the error
        responses = [placeholder if m in failed else None for m in range(len(requests))]
        return responses, LateFailure(self._failed(error), failed)

    def is_withdrawn(self, work: Work, member: int) -> bool:
        """Whether the client of a member has cancelled it. False for a batch that no longer runs, whose responses are
        being sent.
        """
        caller = self.context.caller
        try:
            return self._running is work and caller is not None and caller.is_withdrawn(member)
        except FlowserveError:
            return True  # the server is gone

    def _raise(self, error: BaseException, senders: Sequence[Sender]) -> NoReturn:
        """Fail the batch with the exception that `execute` raised."""
        failed = self._failed(error)
        for sender in senders:
            sender.fail(failed)  # before the frames free their requests, which would report another error
        try:
            raise failed from None
        finally:
            del failed, error  # breaks the reference cycle with this frame, which would delay the release of tensors

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        if work.senders is not None:
            refuse_returned(responses, work.senders, self.model_name)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns)
        if len(responses) != len(requests):
            raise ModelFailed(
                f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)} "
                f"(model '{self.model_name}': execute must return one for each request, in their order)"
            )
        results = self._answers.read(responses, work)
        results.gathered_ns = gathered_ns
        results.computed_ns = computed_ns
        return results

    def make_sender(self, work: Work, member: int) -> ResponseSender | SingleResponseSender:
        """The response sender of a member of a batch."""
        if work.senders is None:
            return SingleResponseSender(self.model_name)
        return ResponseSender(work.senders[member], self._answers, work, member, self.model_name, self._clock)

    def close(self) -> None:
        """Finalise the model. Exceptions are logged only, since the instance is closed in any case."""
        try:
            if hasattr(self._model, "finalize"):
                with self._source.running("finalize"):
                    self._model.finalize()
        except FlowserveError as error:
            if error.__cause__ is None:  # otherwise it is already in the log, with its traceback
                log.error("%s", error)
        self._model = self._execute = None
        if self._loop is not None:
            self._loop.close()
        if self._coroutines is not None:
            self._coroutines.close()
        if self._module is not None:
            forget_model(self._module)
        if self.context.caller is not None:
            self.context.caller.close()

    def _runs_concurrently(self) -> bool:
        """Whether the next batch may begin while the coroutine of one waits. Not for iterative models: their requests
        decide before `execute` returns whether they run again.
        """
        return self._owns_process and self._source.config.decoupled and not self.is_iterative

    def _failed(self, error: BaseException) -> ModelFailed:
        where = line_of(self._source.raised_at(error))
        text = (
            f"Failed to process the request(s) for model instance '{self._name}', message: {reason(error)} "
            f"(model '{self.model_name}', {where}{self._missing_input(error)})"
        )
        return model_raised(text, error)

    def _missing_input(self, error: BaseException) -> str:
        """A remedy if the model used a tensor that `get_input_tensor_by_name` did not find, "" otherwise."""
        if not isinstance(error, AttributeError) or error.obj is not None or not hasattr(Tensor, error.name or ""):
            return ""
        names = ", ".join(f"'{spec.name}'" for spec in self._source.config.inputs)
        return f": no tensor of that name; the model's inputs are {names}"


def _run_coroutine(loop: asyncio.AbstractEventLoop, execute: Callable[[Any], Any], requests: Sequence[Any]) -> Any:
    return loop.run_until_complete(execute(requests))


class IterativeInstance(PythonInstance):
    """An instance for iterative sequences: requests that the model reschedules run again. A rescheduled request may be
    answered without a response, or with its states if the server keeps them; it keeps its response sender.
    """

    _received_decoupled = ReceivedRequest  # a request that the model frees may run again

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sequence = self._source.config.sequence
        self._states = frozenset(state.output for state in sequence.states) if sequence is not None else frozenset()

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        again = [m for m, request in enumerate(requests) if request._is_rescheduled]
        if work.senders is not None:
            refuse_returned(responses, work.senders, self.model_name)
            self._keep_senders(requests, work, again)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns, rescheduled=again)
        for m in again[: len(responses)]:
            responses[m] = self._response_of_rescheduled(responses[m])
            work.wanted[m] = tuple(self._states)  # other outputs are returned by its last run
        results = super()._results(requests, responses, work, gathered_ns, computed_ns)
        results.rescheduled = [m for m in again if m not in results.errors]
        return results

    def make_sender(self, work: Work, member: int) -> Any:
        kept = None if work.senders is None else work.senders[member].kept
        return super().make_sender(work, member) if kept is None else kept

    def _keep_senders(self, requests: Sequence[Any], work: Work, again: Sequence[int]) -> None:
        """Keep the senders of rescheduled requests, used or not. Only the model keeps the others."""
        assert work.senders is not None
        for m, (request, sender) in enumerate(zip(requests, work.senders, strict=True)):
            kept = request._sender or sender.kept
            sender.kept = kept if m in again and not sender.is_cancelled() else None
            if kept is None and m not in again:
                sender.fail(_abandoned(self.model_name))

    def _response_of_rescheduled(self, response: Any) -> InferenceResponse:
        if response is None:
            return InferenceResponse()
        if isinstance(response, InferenceResponse):
            if response.has_error():
                return response
            if self._states:
                return InferenceResponse([one for one in response._outputs if one._name in self._states])
        # Triton's text, spelling included: clients match it.
        text = "Expected a None object in the execute function return list for reschduled request"
        return InferenceResponse(
            error=TritonError(f"{text}, found type '{type(response)}' (model '{self.model_name}')")
        )


class ConcurrentCoroutines:
    """The coroutines of one instance, on a thread with an asyncio loop: calls of `execute`. `failed` converts an
    exception of a coroutine to the error of its requests.
    """

    def __init__(
        self,
        model: str,
        execute: Callable[[Any], Awaitable[Any]],
        failed: Callable[[BaseException], FlowserveError],
    ) -> None:
        self._model = model
        self._execute = execute
        self._failed = failed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowserve coroutines", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[ReceivedRequest]) -> None:
        """Schedule the coroutine for a batch. Called in place of `execute`."""
        asyncio.run_coroutine_threadsafe(self._run(requests), self._loop)

    async def _run(self, requests: Sequence[ReceivedRequest]) -> None:
        senders = requests[0]._work.senders or ()
        try:
            returned = await self._execute(requests)
            refuse_returned([returned] if returned is None else returned, senders, self._model)
        except FlowserveError as error:
            self._fail(error, senders)
        except BaseException as error:  # as in `PythonInstance.run`, everything is the model's failure
            self._fail(self._failed(error), senders, error)

    @staticmethod
    def _fail(failed: FlowserveError, senders: Sequence[Sender], error: BaseException | None = None) -> None:
        for sender in senders:
            sender.fail(failed)
        # No request took the error: all have their responses, and the server has completed the batch.
        if failed.raised is not None and failed.raised.take() is not None:
            log.error("%s", failed, exc_info=error)

    def close(self) -> None:
        """Cancel the running coroutines. Blocks for END_S_MAX at most."""
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(END_S_MAX)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True) if tasks else None
        if ended is None:
            self._loop.stop()
        else:
            ended.add_done_callback(lambda _: self._loop.stop())
