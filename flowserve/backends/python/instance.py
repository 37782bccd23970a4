"""One instance of a Python model: an object of its class, and the calls of its `execute`.

Decides when the methods of the class are called and with what, what the failures of `execute` become, how coroutines
are run, and what a request that runs again (iterative sequences) may be answered with. The model's traceback goes to
the log, never into a response. It does not know whether it runs on a thread, on the event loop or in a worker process,
and not how responses are checked (answers.py).

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
from itertools import repeat
from types import ModuleType, NoneType
from typing import Any, Final, NoReturn

from flowserve.backends.base import BlsClient, ClockNs, Results, Sender, Work
from flowserve.backends.python.answers import AnswerReader
from flowserve.backends.python.pb_utils.context import ModelContext, ModelScope, own_process
from flowserve.backends.python.pb_utils.inference import InferenceRequest, InferenceResponse, TritonError
from flowserve.backends.python.requests import (
    BatchMember,
    DecoupledRequest,
    ExecutedRequest,
    ModelInfo,
    ReceivedRequest,
    ResponseSender,
    RunningBatch,
    SingleResponseSender,
    assign_inputs,
    collect,
    fail_abandoned,
    refuse_returned,
)
from flowserve.backends.python.source import CLASS, RAISED, ModelSource, forget_model, reason
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError, Invalid, ModelFailed

log = logging.getLogger("flowserve.python")

# Time for running coroutines to end after their cancellation, when the model is closed.
END_S_MAX: Final = 2.0


class PythonInstance:
    """One object of the model's class. Subclasses change which requests it receives and what its responses become."""

    _received: type[ReceivedRequest] = ReceivedRequest
    _received_decoupled: type[ReceivedRequest] = DecoupledRequest

    def __init__(self, source: ModelSource, name: str, group: InstanceGroup, *, owns_process: bool = False) -> None:
        """`owns_process`: the process runs this instance only."""
        self._source = source
        self._owns_process = owns_process
        self._name = name
        self._group = group
        config = source.config
        self._about = ModelInfo(
            config.name,
            source.files.version,
            config.inputs,
            self._make_sender,
            is_iterative=config.sequence is not None and config.sequence.is_iterative,
        )
        self._answers = AnswerReader(source.config, copies=not owns_process)
        self._scope = ModelScope(source.context)  # replaced in `call_through` by one that may call other models
        self.context = source.context
        self._module: ModuleType | None = None
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutines: ConcurrentCoroutines | None = None
        self._execute: Callable[[list[InferenceRequest]], Sequence[Any] | None] = self._not_open
        self._clock: ClockNs = lambda: 0  # of the batch that runs

    def call_through(self, caller: BlsClient) -> None:
        """All methods of the model may use `caller`; only `execute` may call other models with it."""
        source = self._source = copy(self._source)
        context = source.context
        source.context = ModelContext(context.model, context.folders, context.code, caller)
        self.context = ModelContext(context.model, context.folders, context.code, caller, may_call=True)
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
            self._coroutines = ConcurrentCoroutines(source.config.name, self._failed)
            execute = self._coroutines.around(execute)
        elif inspect.iscoroutinefunction(execute):
            self._loop = asyncio.new_event_loop()
            execute = self._run_coroutine(execute, self._loop)
        if self.context.caller is not None and source.mentions("is_cancelled"):
            running = RunningBatch(self.context.caller)
            self._about.is_withdrawn = running.is_withdrawn
            execute = running.around(execute)
        self._execute = execute

    def run(self, work: Work, clock: ClockNs) -> Results:
        about, senders = self._about, work.senders
        self._clock = clock
        kind = self._received if senders is None else self._received_decoupled
        requests: list[Any] = [*map(kind, repeat(about), repeat(work), range(len(work.rows)))]
        assign_inputs(requests, work, about.inputs)
        gathered_ns = clock()
        if self._owns_process:  # its model is active on all threads
            responses = self._responses(requests, work)
        else:
            with self._scope:
                responses = self._responses(requests, work)
        # Only types are compared, since an object returned by mistake, such as an array, may define its own equality.
        if senders is None and NoneType in map(type, responses):
            requests = [*map(ExecutedRequest, requests)]  # a new list: the model may still use the one it was given
            collect(requests, responses, about.name, self._loop)
        return self._results(requests, responses, work, gathered_ns, clock())

    def _responses(self, requests: list[Any], work: Work) -> list[Any]:
        """Call `execute`. Returns its responses in a new list: the model holds no reference to it, so that reference
        counts tell whether the model keeps a response.
        """
        try:
            returned = self._execute(requests)
            if returned is None:
                return [None] * len(work.rows)
            try:
                return [*returned]
            except TypeError:
                kind = type(returned).__name__
                raise TypeError(f"Expected a list in the execute return, found type '{kind}'") from None
        except RAISED as error:
            self._raise(error, work.senders or ())

    def _raise(self, error: BaseException, senders: Sequence[Sender]) -> NoReturn:
        """Fail the batch with the exception that `execute` raised."""
        failed = self._failed(error)
        for sender in senders:
            sender.fail(failed)  # before the frames free their requests, which would report another error
        try:
            raise failed from error
        finally:
            del failed, error  # breaks the reference cycle with this frame, which would delay the release of tensors

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        about = self._about
        if work.senders is not None:
            refuse_returned(responses, work.senders, about.name)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns)
        if len(responses) != len(requests):
            raise ModelFailed(
                f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)} "
                f"(model '{about.name}')"
            )
        results = self._answers.read(responses, work)
        results.gathered_ns = gathered_ns
        results.computed_ns = computed_ns
        return results

    def _make_sender(self, work: Work, member: int) -> ResponseSender | SingleResponseSender:
        name = self._about.name
        if work.senders is None:
            return SingleResponseSender(name)
        return ResponseSender(work.senders[member], self._answers, work, member, name, self._clock)

    def close(self) -> None:
        """Finalise the model. Exceptions are logged only, since the instance is closed in any case."""
        try:
            if hasattr(self._model, "finalize"):
                with self._source.running("finalize"):
                    self._model.finalize()
        except FlowserveError as error:
            if error.__cause__ is None:  # else it is in the log already, with its traceback
                log.error("%s", error)
        self._model = None
        self._execute = self._not_open
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
        return self._owns_process and self._source.config.decoupled and not self._about.is_iterative

    def _failed(self, error: BaseException) -> ModelFailed:
        log.error("model '%s', instance '%s' failed", self._about.name, self._name, exc_info=error)
        return ModelFailed(
            f"Failed to process the request(s) for model instance '{self._name}', message: {reason(error)} "
            f"(model '{self._about.name}')"
        )

    def _not_open(self, requests: list[InferenceRequest]) -> Sequence[Any]:
        raise RuntimeError(f"instance '{self._name}' is not open")

    @staticmethod
    def _run_coroutine(execute: Callable[[Any], Any], loop: asyncio.AbstractEventLoop) -> Callable[[Any], Any]:
        return lambda requests: loop.run_until_complete(execute(requests))


class IterativeInstance(PythonInstance):
    """An instance for iterative sequences: requests that the model reschedules run again. A rescheduled request may be
    answered with nothing, or with its states if the server keeps them; it finds the response sender that it had before.
    """

    _received_decoupled = ReceivedRequest  # a request that the model frees may come again

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sequence = self._source.config.sequence
        self._states = frozenset(state.output for state in sequence.states) if sequence is not None else frozenset()

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        again = [m for m, request in enumerate(requests) if request._is_rescheduled]
        if work.senders is not None:
            refuse_returned(responses, work.senders, self._about.name)
            self._keep_senders(requests, work, again)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns, rescheduled=again)
        for m in again[: len(responses)]:
            responses[m] = self._response_of_rescheduled(responses[m])
        results = super()._results(requests, responses, work, gathered_ns, computed_ns)
        results.rescheduled = [m for m in again if m not in results.errors]
        return results

    def _make_sender(self, work: Work, member: int) -> Any:
        kept = None if work.senders is None else work.senders[member].kept
        return super()._make_sender(work, member) if kept is None else kept

    def _keep_senders(self, requests: Sequence[Any], work: Work, again: Sequence[int]) -> None:
        """Keep the senders of rescheduled requests, used or not. Only the model keeps the others."""
        assert work.senders is not None
        for m, (request, sender) in enumerate(zip(requests, work.senders, strict=True)):
            kept = request._sender or sender.kept
            sender.kept = kept if m in again and not sender.is_cancelled() else None
            if kept is None and m not in again:
                fail_abandoned([request], [sender], self._about.name)

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
            error=TritonError(f"{text}, found type '{type(response)}' (model '{self._about.name}')")
        )


class ConcurrentCoroutines:
    """The coroutines of one instance, on a thread with an asyncio loop. `failed` converts an exception of a coroutine
    to the error of its requests.
    """

    def __init__(self, model: str, failed: Callable[[BaseException], FlowserveError]) -> None:
        self._model = model
        self._failed = failed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowserve coroutines", daemon=True)
        self._thread.start()

    def around(self, execute: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], None]:
        """Returns what is called in place of `execute`: it schedules the coroutine."""

        async def run(requests: Sequence[ReceivedRequest]) -> None:
            senders = requests[0]._work.senders or ()
            try:
                returned = await execute(requests)
                refuse_returned([returned] if returned is None else returned, senders, self._model)
            except FlowserveError as error:
                for sender in senders:
                    sender.fail(error)
            except BaseException as error:  # as in `PythonInstance.run`, everything is the model's failure
                failed = self._failed(error)
                for sender in senders:
                    sender.fail(failed)

        def begin(requests: Sequence[ReceivedRequest]) -> None:
            asyncio.run_coroutine_threadsafe(run(requests), self._loop)

        return begin

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
