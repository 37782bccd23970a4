"""Python models written for Triton: a class `TritonPythonModel` in model.py.

Decided here: when the class's methods are called and with what, and what their failures become. Models import
`triton_python_backend_utils`, which is our module of that name; each instance has its model's code in a namespace of
its own (python_import.py); what they answer is judged and taken over in python_answers.py.

A model's own traceback goes to the log, never into an answer. This file does not know whether it runs on a thread or
on the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flowserve.backends import triton_python_backend_utils as pb_utils
from flowserve.backends.base import Caller, ClockNs, ModelFiles, Remote, Results, Work
from flowserve.backends.files import model_file, relative
from flowserve.backends.python_answers import AnswerReader
from flowserve.backends.python_async import SideBySide
from flowserve.backends.python_calls import ModelCalls
from flowserve.backends.python_code import NO_CODE, Code, code_in
from flowserve.backends.python_import import Owner, WorkingFor, adopt, forget_model, import_model, raised_at
from flowserve.backends.python_requests import Executing, GivenRequest, ModelFacts, hand_out
from flowserve.backends.python_sender import (
    ResponseSender,
    SentRequest,
    SingleResponseSender,
    collect,
    refuse_returned,
)
from flowserve.backends.triton_objects import InferenceRequest
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed, Place, Problem, Problems
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices
from flowserve.values import DType, TensorSpec

log = logging.getLogger("flowserve.python")

CLASS: Final = "TritonPythonModel"
_WAITS: Final = ("InferenceRequest", "load_model")
_BY_CONFIG_NAME: Final = {dtype.config_name: dtype for dtype in DType}
# What a model may raise without ending the thread it runs on: everything. Its sys.exit() and its asyncio.CancelledError
# are its own failure too, and behind a dead thread requests would wait for ever.
_RAISED: Final = BaseException


class PythonBackend:
    """The backend. A version is a folder with model.py, and whatever that imports from beside itself."""

    name = "python"
    default_filename = "model.py"
    default_instance_count = 1
    gpu_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """What the model's `auto_complete_config` adds. The model is imported only where it has one."""
        return self.complete_by(config, files, lambda remote: completed_here(*remote.arguments))

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """The same, with the model imported by `run`."""
        if "auto_complete_config" not in Source(config, files).text():
            return Completion()
        written = run(Remote(f"{__name__}:completed_here", (config, files)))
        return Completion() if written is None else _completion(config, written)

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


def completed_here(config: ModelConfig, files: ModelFiles) -> dict[str, Any] | None:
    """What the model's `auto_complete_config` makes of its configuration, None where it has none; in the process where
    it is called.
    """
    source = Source(config, files)
    module = source.import_fresh()
    try:
        function = getattr(source.model_class(module), "auto_complete_config", None)
        if function is None:
            return None
        with source.running("auto_complete_config"):
            answer = function(pb_utils.ModelConfig(json.dumps(config.json)))
    finally:
        forget_model(module)
    if not isinstance(answer, pb_utils.ModelConfig):
        raise Invalid(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object, "
            f"it returned {type(answer).__name__}"
        )
    return answer.as_dict()


def instance_here(
    config: ModelConfig, files: ModelFiles, name: str, group: InstanceGroup, code: Code
) -> PythonInstance:
    """What `PythonModel.instance` makes, in the process where it is called."""
    return _kind_of(config)(Source(config, files, code), name, group, is_alone=True)


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
        requests: list[Any] = (
            [self._given(about, work, 0)]
            if count == 1 and work.senders is None
            else [*map(self._request_class(work), repeat(about), repeat(work), range(count))]
        )
        hand_out(requests, work, about.inputs)
        gathered_ns = clock()
        with self._working:
            try:
                answered = self._execute(requests)
                # A list of our own: who else holds an answer is told from its reference count.
                responses: list[Any] = [None] * count if answered is None else [*answered]
                del answered
            except _RAISED as error:
                failed = self._failed(error)
                for sender in work.senders or ():
                    sender.fail(failed)  # before its frames let go of what they had: that would say something else
                try:
                    raise failed from error
                finally:
                    del failed  # or this frame would hold it, and it this frame: tensors would wait for the collector
        return self._results(requests, responses, work, gathered_ns, clock())

    def _request_class(self, work: Work) -> type[GivenRequest]:
        return self._given if work.senders is None else SentRequest

    def _results(
        self, requests: Sequence[GivenRequest], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        about = self._about
        if work.senders is not None:
            refuse_returned(responses, about.name)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns)
        if None in responses:
            collect(requests, responses, about.name)
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
            f"Failed to process the request(s) for model instance '{self._name}', message: {_text(error)} "
            f"(model '{self._about.name}')"
        )

    def _not_open(self, requests: list[InferenceRequest]) -> Sequence[Any]:
        raise RuntimeError(f"instance '{self._name}' is not open")

    @staticmethod
    def _run_coroutine(execute: Callable[[Any], Any], loop: asyncio.AbstractEventLoop) -> Callable[[Any], Any]:
        return lambda requests: loop.run_until_complete(execute(requests))


class Source:
    """Where a model's code is, and how it is brought to life. `code`: as it was loaded; what is not in it is read."""

    def __init__(self, config: ModelConfig, files: ModelFiles, code: Code = NO_CODE) -> None:
        self.config = config
        self.files = files
        self.path: Path = model_file(config, files, PythonBackend.default_filename)
        self.shown = relative(self.path, files)
        # Both, in this order, as on Triton.
        self.owner = Owner(config.name, [str(self.path.parent), str(files.folder)], code=code)

    def text(self) -> str:
        """The file. Raises `Invalid` where it is not Python."""
        try:
            known = self.owner.code.get(str(self.path))
            text = self.path.read_text(encoding="utf-8") if known is None else known.decode()
            compile(text, self.shown, "exec", dont_inherit=True)
        except SyntaxError as error:
            place = Place(self.shown, error.lineno or 1, error.offset or 1)
            text = f"model '{self.config.name}' is not valid Python: {error.msg}"
            raise Problems([Problem(text, place)]) from error
        except (OSError, ValueError) as error:
            raise Invalid(f"{self.shown}: model '{self.config.name}' cannot be read: {error}") from error
        return text

    def mentions(self, name: str) -> bool:
        """Whether the name stands anywhere in the model's code, as far as that is known."""
        return any(name.encode() in text for text in self.owner.code.values() or [self.path.read_bytes()])

    def import_fresh(self) -> ModuleType:
        # Other people's models are written for a module of this name, wherever it comes from.
        sys.modules["triton_python_backend_utils"] = pb_utils
        with self.running("import"):
            return import_model(self.path, self.owner)

    def model_class(self, module: ModuleType) -> Any:
        found = getattr(module, CLASS, None)
        if found is None:
            raise self.no_class()
        return found

    def no_class(self) -> Problems:
        return Problems([Problem(f"model '{self.config.name}' has no class {CLASS}", Place(self.shown))])

    def arguments(self, instance: str, group: InstanceGroup) -> dict[str, str]:
        """What `initialize` gets, all strings, as on Triton."""
        return {
            "model_config": json.dumps(self.config.json),
            "model_instance_kind": group.kind.removeprefix("KIND_"),
            "model_instance_name": instance,
            "model_instance_device_id": str(group.gpus[0] if group.gpus else 0),
            "model_repository": str(self.files.folder),
            "model_version": str(self.files.version),
            "model_name": self.config.name,
        }

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Around a call into the model that is not `execute`: failures name it and keep their traceback to the log."""
        try:
            with WorkingFor(self.owner):
                yield
        except FlowserveError:
            raise
        except _RAISED as error:
            log.error("model '%s': %s failed", self.config.name, what, exc_info=error)
            where = self.shown
            if (line := raised_at(error, self.owner)) is not None:
                where = f"{relative(Path(line.filename), self.files)}:{line.lineno}"
            raise ModelFailed(f"model '{self.config.name}' ({where}): {what} failed: {_text(error)}") from error


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _completion(config: ModelConfig, written: Mapping[str, Any]) -> Completion:
    """What the model added to its configuration. Tensors are given whole: the user's own are among them, unchanged."""
    policy = written.get("model_transaction_policy")
    return Completion(
        inputs=tuple(_spec(config, entry) for entry in written.get("input", ())) or None,
        outputs=tuple(_spec(config, entry) for entry in written.get("output", ())) or None,
        max_batch_size=None if config.max_batch_size else written.get("max_batch_size") or None,
        dynamic_batching="dynamic_batching" in written and config.dynamic_batching is None,
        decoupled=None if policy is None else bool(policy.get("decoupled", False)),
    )


def _spec(config: ModelConfig, entry: Mapping[str, Any]) -> TensorSpec:
    dtype = _BY_CONFIG_NAME.get(entry["data_type"])
    if dtype is None:
        raise Invalid(
            f"auto_complete_config function in model '{config.name}': tensor '{entry['name']}' has data type "
            f"'{entry['data_type']}', which is none of {', '.join(_BY_CONFIG_NAME)}"
        )
    reshape = entry.get("reshape")
    return TensorSpec(
        name=entry["name"],
        dtype=dtype,
        dims=tuple(int(dim) for dim in entry["dims"]),
        optional=bool(entry.get("optional", False)),
        ragged=bool(entry.get("allow_ragged_batch", False)),
        reshape=None if reshape is None else tuple(int(dim) for dim in reshape.get("shape", ())),
        labels=entry.get("label_filename", ""),
    )
