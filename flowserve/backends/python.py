"""Python models written for Triton: a class `TritonPythonModel` in model.py.

Decided here: when the class's methods are called and with what, and what the failures of `execute` become. Each
instance has its model's code in a namespace of its own (python_import.py); what is known of that code is
python_source.py's, what models answer is judged and taken over in python_answers.py.

A model's own traceback goes to the log, never into an answer. This file does not know whether it runs on a thread or
on the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import repeat
from types import ModuleType
from typing import Any, Final, NoReturn

from flowserve.backends.base import Caller, ClockNs, ModelFiles, Remote, Results, Sender, Work
from flowserve.backends.python_answers import AnswerReader
from flowserve.backends.python_async import SideBySide
from flowserve.backends.python_calls import ModelCalls
from flowserve.backends.python_code import Code, code_in
from flowserve.backends.python_completion import ENTRY, completed_here, completion
from flowserve.backends.python_import import Owner, WorkingFor, adopt, forget_model
from flowserve.backends.python_requests import Executing, GivenRequest, ModelFacts, hand_out
from flowserve.backends.python_sender import (
    Executed,
    Remains,
    ResponseSender,
    SentRequest,
    SingleResponseSender,
    collect,
    lacks_some,
    refuse_returned,
)
from flowserve.backends.python_source import CLASS, MODEL_FILE, RAISED, Source, reason
from flowserve.backends.triton_objects import InferenceRequest
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices

log = logging.getLogger("flowserve.python")

_WAITS: Final = ("InferenceRequest", "load_model")


class PythonBackend:
    """The backend. A version is a folder with model.py, and whatever that imports from beside itself."""

    name = "python"
    default_filename = MODEL_FILE
    default_instance_count = 1
    gpu_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """What the model's `auto_complete_config` adds. The model is imported only where it has one."""
        return self.complete_by(config, files, lambda remote: completed_here(*remote.arguments))

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """The same, with the model imported by `run`."""
        if "auto_complete_config" not in Source(config, files).text():
            return Completion()
        written = run(Remote(ENTRY, (config, files)))
        return Completion() if written is None else completion(config, written)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Whether the file is Python and speaks of the class; it is not imported."""
        source = Source(config, files)
        text = source.text()
        if CLASS not in text and "import *" not in text:
            raise source.no_class()

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> PythonModel:
        """Of `options`, `execution` says whether instances may run on the loop: only where somebody asked for it."""
        source = Source(config, files, code_in(files.folder, files.version_folder))
        # One that asks for something may wait for it: by measurement it never comes to wait on the loop for it.
        text = source.text()
        chosen = ("inline",) if any(name in text for name in _WAITS) else ("inline", "auto")
        return PythonModel(source, may_run_inline=options.get("execution", "") in chosen)


class PythonModel:
    """One version. Each instance imports the code for itself."""

    is_pure = False

    def __init__(self, source: Source, *, may_run_inline: bool) -> None:
        self.may_run_inline = may_run_inline
        self._source = source

    def instance(self, name: str, group: InstanceGroup) -> PythonInstance:
        if group.kind == "KIND_GPU" and group.gpus and stays_on_device(self._source.config):
            from flowserve.backends.python_device import DevicePythonInstance

            return DevicePythonInstance(self._source, name, group, devices()[group.gpus[0]])
        return _kind_of(self._source.config)(self._source, name, group)

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """In a process of its own, where nothing of the server's can be broken."""
        source = self._source
        return Remote(f"{__name__}:instance_here", (source.config, source.files, name, group, source.owner.code))

    def close(self) -> None:
        """Nothing is held between instances."""


def instance_here(
    config: ModelConfig, files: ModelFiles, name: str, group: InstanceGroup, code: Code
) -> PythonInstance:
    """What `PythonModel.instance` makes, in the process where it is called."""
    kind = _kind_of(config)
    if kind is PythonInstance and not config.decoupled:
        from flowserve.backends.python_whole import WholeInstance

        kind = WholeInstance
    return kind(Source(config, files, code), name, group, is_alone=True)


def _kind_of(config: ModelConfig) -> type[PythonInstance]:
    if config.sequence is None or not config.sequence.is_iterative:
        return PythonInstance
    from flowserve.backends.python_iterative import IterativeInstance

    return IterativeInstance


class PythonInstance:
    """One object of the model's class."""

    _given: type[GivenRequest] = GivenRequest

    def __init__(self, source: Source, name: str, group: InstanceGroup, *, is_alone: bool = False) -> None:
        """`is_alone`: the process is its own, and so are all threads in it."""
        self._source = source
        self._is_alone = is_alone
        self._name = name
        self._group = group
        config = source.config
        self._about = ModelFacts(
            config.name,
            source.files.version,
            config.inputs,
            self._make_sender,
            is_iterative=config.sequence is not None and config.sequence.is_iterative,
        )
        self._answers = AnswerReader(source.config, copies=not is_alone)
        self._working = WorkingFor(source.owner)  # after `call_through` one that may call
        self.owner = source.owner
        self._module: ModuleType | None = None
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._side_by_side: SideBySide | None = None
        self._execute: Callable[[list[InferenceRequest]], Sequence[Any] | None] = self._not_open
        self._clock: ClockNs = lambda: 0  # that of the batch it runs

    def call_through(self, caller: Caller) -> None:
        """Its `execute` may call other models, by this; all of it may ask for models and metrics."""
        source = self._source = copy(self._source)
        owner = source.owner
        source.owner = Owner(owner.model, owner.folders, None, owner.code, caller)
        calls = ModelCalls(owner.model, caller)
        self.owner = Owner(owner.model, owner.folders, calls, owner.code, caller)
        self._working = WorkingFor(self.owner)

    def open(self) -> None:
        """Import the model, make its object and initialise it."""
        source = self._source
        if self._is_alone:
            adopt(self.owner)
        module = self._module = source.import_fresh()
        model_class = source.model_class(module)
        with source.running("initialize"):
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(source.arguments(self._name, self._group))
        execute = getattr(self._model, "execute", None)
        if execute is None:
            raise Invalid(f"model '{source.config.name}': class {CLASS} in {source.shown} has no method execute")
        if inspect.iscoroutinefunction(execute) and self._runs_side_by_side():
            self._side_by_side = SideBySide(source.config.name, self._failed)
            execute = self._side_by_side.around(execute)
        elif inspect.iscoroutinefunction(execute):
            self._loop = asyncio.new_event_loop()
            execute = self._run_coroutine(execute, self._loop)
        if self.owner.caller is not None and source.mentions("is_cancelled"):
            executing = Executing(self.owner.caller)
            self._about.is_withdrawn = executing.is_withdrawn
            execute = executing.around(execute)
        self._execute = execute

    def run(self, work: Work, clock: ClockNs) -> Results:
        about = self._about
        count = len(work.rows)
        self._clock = clock
        requests: list[Any] = [*map(self._request_class(work), repeat(about), repeat(work), range(count))]
        hand_out(requests, work, about.inputs)
        gathered_ns = clock()
        with self._working:
            try:
                answered = self._execute(requests)
                responses = self._listed(answered, count)
                del answered
            except RAISED as error:
                self._raise(error, work.senders or ())
        if work.senders is None and lacks_some(responses):
            requests = [*map(Remains, requests)]  # a list of our own: the model may go on using the one it was given
            collect(requests, responses, about.name, self._loop)
        return self._results(requests, responses, work, gathered_ns, clock())

    def _listed(self, answered: Sequence[Any] | None, count: int) -> list[Any]:
        """What `execute` returned, in a list of our own: who else holds an answer is told from its reference count."""
        if answered is None:
            return [None] * count
        try:
            return [*answered]
        except TypeError:
            kind = type(answered).__name__
            raise TypeError(f"Expected a list in the execute return, found type '{kind}'") from None

    def _raise(self, error: BaseException, senders: Sequence[Sender]) -> NoReturn:
        """Fail a batch for what `execute` raised."""
        failed = self._failed(error)
        for sender in senders:
            sender.fail(failed)  # before its frames let go of what they had: that would say something else
        try:
            raise failed from error
        finally:
            del failed, error  # or this frame would hold it, and it this frame: tensors would wait for the collector

    def _request_class(self, work: Work) -> type[GivenRequest]:
        return self._given if work.senders is None else SentRequest

    def _results(
        self, requests: Sequence[Executed], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
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
        """Finalise the model. What it raises is logged: the instance is gone either way."""
        try:
            if hasattr(self._model, "finalize"):
                with self._source.running("finalize"):
                    self._model.finalize()
        except FlowserveError as error:
            if error.__cause__ is None:  # else the log has it already, with its traceback
                log.error("%s", error)
        self._model = None
        self._execute = self._not_open
        if self._loop is not None:
            self._loop.close()
        if self._side_by_side is not None:
            self._side_by_side.close()
        if self._module is not None:
            forget_model(self._module)
        if self.owner.caller is not None:
            self.owner.caller.close()

    def _runs_side_by_side(self) -> bool:
        """Whether the coroutine of one batch may wait while the next begins. An iterative model says before it returns
        which requests are to be run again.
        """
        return self._is_alone and self._source.config.decoupled and not self._about.is_iterative

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
