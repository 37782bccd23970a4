"""One instance of a Python model: an object of its class, and the calls of its `execute`.

Decides when and with which arguments the methods of the class are called, which errors the failures of `execute`
become, how coroutines are run, and how a request that runs again (iterative sequences) may be answered. The model's
traceback goes to the log, never into a response, and the text of an exception only into the response to a request that
is alone in its batch. It does not know whether it runs on a thread, on the event loop or in a worker process, what a
model may do with a request and its sender (requests.py), nor how responses are checked (answers.py).

Coroutines: a model whose `execute` is a coroutine has an asyncio loop. A decoupled model in a process of its own runs
several of them at the same time, as on Triton: `execute` counts as returned when its coroutine is scheduled, so that
the next batch begins while one waits. In the server this is not possible, since threads other than the instance's own
may not call other models there.

Callers: backend.py makes the instances; the runtime, or a worker process, runs them.
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
from typing import Any, Final, NamedTuple

from flowserve.backends.base import BlsClient, ClockNs, Results, Sender, Work
from flowserve.backends.python.answers import AnswerReader, failure
from flowserve.backends.python.pb_utils.context import ModelScope, own_process
from flowserve.backends.python.pb_utils.inference import InferenceResponse, Tensor, TritonError
from flowserve.backends.python.requests import (
    BatchMember,
    DecoupledRequest,
    ExecutedRequest,
    ReceivedRequest,
    ResponseSender,
    SingleResponseSender,
    abandoned,
    assign_inputs,
    collect,
    has_response,
    refuse_returned,
)
from flowserve.backends.python.source import CLASS, RAISED, ModelSource, forget_model, line_of, reason
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError, Invalid, ModelFailed, model_raised, told

log = logging.getLogger("flowserve.python")

END_S_MAX: Final = 2.0  # limit for cancelled coroutines to end when the model is closed
_OBJECTION_CHARACTERS_MAX: Final = 500  # of what a model's `is_ready` returned or raised


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
        self._answers = AnswerReader(source.config, name, copies=not owns_process, strict=source.strict_outputs)
        self._returned = self._failure(
            f"Python model '{name}' is using the decoupled mode and the execute function must return None.",
            f"{source.shown}: it answers through get_response_sender() of each request",
        )
        self._scope = ModelScope(source.context)  # replaced in `call_through` by one that may call other models
        self.context = source.context
        self._module: ModuleType | None = None
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutines: ConcurrentCoroutines | None = None
        self._is_ready: Callable[[], Any] | None = None  # the model's method of that name
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
            self._coroutines = ConcurrentCoroutines(execute, self._failed, self._returned)
            execute = self._coroutines.begin
        elif inspect.iscoroutinefunction(execute):
            self._loop = asyncio.new_event_loop()
            execute = partial(_run_coroutine, self._loop, execute)
        self._execute = execute
        self._is_ready = self._find_is_ready()

    def readiness(self) -> Callable[[], str] | None:
        """The model's method `is_ready`, if it has one."""
        return None if self._is_ready is None else partial(self._objection, self._is_ready)

    def _find_is_ready(self) -> Callable[[], Any] | None:
        try:
            method = getattr(self._model, "is_ready", None)
        except RAISED:  # of a property: each check raises it again
            return partial(getattr, self._model, "is_ready")
        return method if callable(method) else None

    def _objection(self, method: Callable[[], Any]) -> str:
        try:
            with ModelScope(self._source.context):
                answer = method()
                if inspect.iscoroutine(answer):
                    answer = asyncio.run(answer)
                if answer is True:
                    return ""
                why = "" if answer is False else ", which is neither True nor False"
                text = f"its is_ready returned {answer!r}"[:_OBJECTION_CHARACTERS_MAX] + why
        except RAISED as error:
            log.error("model '%s': is_ready failed", self.model_name, exc_info=error)
            text = f"its is_ready raised {reason(error)}"[:_OBJECTION_CHARACTERS_MAX]
        return text.encode("utf-8", "backslashreplace").decode()

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
            if isinstance(returned, list) and work.senders is None:
                return [*returned], None
        except RAISED as error:
            return self._after_failure(self._failed(error, work), requests, work)
        finally:
            self._running = None
        if work.senders is not None:
            refuse_returned(work.senders, self._returned)
        text = f"Expected a list in the execute return, found type '{type(returned)}'."
        text = self._failure(text, f"{self._source.shown}: it holds one InferenceResponse for each request")
        return self._after_failure(ModelFailed(text), requests, work)

    def _after_failure(
        self, error: FlowserveError, requests: Sequence[ReceivedRequest], work: Work
    ) -> tuple[list[Any], LateFailure]:
        """`execute` failed. Raises the error, unless it has sent responses: those count, and the other requests get the
        error.
        """
        if work.senders is not None or not any(has_response(request) for request in requests):
            for sender in work.senders or ():
                sender.fail(error)  # before the frames free their requests, which would report another error
            try:
                raise error from None
            finally:
                del error  # breaks the reference cycle with this frame, which would delay the release of tensors
        failed = [m for m, request in enumerate(requests) if not has_response(request)]
        placeholder = InferenceResponse(error=TritonError("raised"))  # `run` sets the error
        responses = [placeholder if m in failed else None for m in range(len(requests))]
        return responses, LateFailure(error, failed)

    def is_withdrawn(self, work: Work, member: int) -> bool:
        """Whether the client of a member has cancelled it. False for a batch that no longer runs, whose responses are
        being sent.
        """
        caller = self.context.caller
        try:
            return self._running is work and caller is not None and caller.is_withdrawn(member)
        except FlowserveError:
            return True  # the server is gone

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        if work.senders is not None:
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns)
        if len(responses) != len(requests):
            text = "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            text += f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}"
            where = f"{self._source.shown}: execute must return one for each request, in their order"
            raise ModelFailed(self._failure(text, where))
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
        self._model = self._execute = self._is_ready = None
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

    def _failed(self, error: BaseException, work: Work) -> FlowserveError:
        members = self._members(work)
        if isinstance(error, Invalid) and members == 1:
            return Invalid(str(error))
        where = line_of(self._source.raised_at(error))
        text = self._failure(told(error, reason(error), members), f"{where}{self._missing_input(error)}")
        return model_raised(text, error)

    def _failure(self, message: str, where: str) -> str:
        return failure(self._name, message, self.model_name, where)

    def _members(self, work: Work) -> int:
        """The number of requests in a batch. Its empty slots of sequences are members without a sequence."""
        if self._source.config.sequence is None:
            return len(work.rows)
        return sum(request.sequence_id != 0 for request in work.requests) or len(work.rows)  # without ids: a warm-up

    def _missing_input(self, error: BaseException) -> str:
        """A remedy if the model used a tensor that `get_input_tensor_by_name` did not find, "" otherwise."""
        if not isinstance(error, AttributeError) or error.obj is not None or not hasattr(Tensor, error.name or ""):
            return ""
        names = ", ".join(f"'{spec.name}'" for spec in self._source.config.inputs)
        return f": no tensor of that name; the model's inputs are {names}"


class LateFailure(NamedTuple):
    """The exception that a model raised after it had responded to some members of a batch, and the other `members`."""

    error: FlowserveError
    members: Sequence[int]


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
                sender.fail(abandoned(self.model_name))

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
        text = self._failure(f"{text}, found type '{type(response)}'.", self._source.shown)
        return InferenceResponse(error=TritonError(text))


class ConcurrentCoroutines:
    """The coroutines of one instance, on a thread with an asyncio loop: calls of `execute`. `failed` converts an
    exception of a coroutine to the error of its requests; `returned` is the text for one that returned something.
    """

    def __init__(
        self,
        execute: Callable[[Any], Awaitable[Any]],
        failed: Callable[[BaseException, Work], FlowserveError],
        returned: str,
    ) -> None:
        self._returned = returned
        self._execute = execute
        self._failed = failed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowserve coroutines", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[ReceivedRequest]) -> None:
        """Schedule the coroutine for a batch. Called in place of `execute`."""
        asyncio.run_coroutine_threadsafe(self._run(requests), self._loop)

    async def _run(self, requests: Sequence[ReceivedRequest]) -> None:
        work = requests[0]._work
        senders = work.senders or ()
        try:
            returned = await self._execute(requests)
            if returned is not None:
                refuse_returned(senders, self._returned)
        except ModelFailed as error:  # of a model that returned something
            self._fail(error, senders)
        except BaseException as error:  # as in `PythonInstance.run`, everything is the model's failure
            self._fail(self._failed(error, work), senders, error)

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
