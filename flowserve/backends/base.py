"""The interface of a backend.

A `Backend` handles one kind of model file. `load` returns a `LoadedModel` (one per model version, read once), which
makes one `Instance` per copy that may run at the same time. The runtime calls them as follows:

* `complete` and `load` are called on a worker thread, may block, and raise `Invalid` (or `Unsupported`) with a text
  that names both sides of a disagreement.
* The methods `open`, `run` and `close` of an instance are never called at the same time; `open` is first, `close` last.
  `run` may be called on the event loop (inline) or on the instance's own thread, whichever was measured to be cheaper.
  So `run` never awaits and never uses trio.
* `run` may keep its tensors only until it returns, and must not write to their arrays unless `Work.may_write` allows
  it. The runtime owns what it returns: the instance does not write to those arrays again.
* Tensors have the shapes of the configuration's `dims` on both sides. The backend applies `TensorSpec.reshape`.
* The members of a batch have equal shapes except for their rows and for inputs with `TensorSpec.ragged`. The backend
  computes the configured `batch_inputs` and `batch_outputs`, or refuses the model.
* An exception fails the whole batch. `Results.errors` fails single members.

A backend does not know graphs, queues or clocks: `run` reads the two times that statistics need from the clock it is
given.

Protocols marked `runtime_checkable` are optional features that an object may implement in addition.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, runtime_checkable

from flowserve.config.suggest import misnamed
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, Problem, Problems
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import MemoryPlace, Request, Response

ClockNs = Callable[[], int]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one version of a model. `folder` is the model's folder, `version_folder` the one of the version."""

    repository: Path
    folder: Path
    version: int

    @property
    def version_folder(self) -> Path:
        return self.folder / str(self.version)

    def model_file(self, config: ModelConfig, default_filename: str) -> Path:
        """The model's file or folder, which the configuration names, or else the backend. Raises Invalid if it is
        missing, with the names of the files that are there.
        """
        name = config.default_model_filename or default_filename
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            message = f"default_model_filename '{name}' leads out of the version's folder"
            raise Problems([Problem(message, config.source.place("default_model_filename"))])
        path = self.version_folder / name
        failed = f"failed to load '{config.name}' version {self.version}: "
        try:
            is_there = path.exists()
        except OSError as error:
            raise Invalid(f"{failed}{self.shown(path)} cannot be read: {error.strerror}") from error
        if not is_there:
            raise Invalid(f"{failed}file {self.shown(path)} does not exist; {self._neighbours(name)}")
        return path

    def shown(self, path: Path) -> str:
        """`path` relative to the repository, as messages show it."""
        return path.relative_to(self.repository).as_posix()

    def _neighbours(self, name: str) -> str:
        where = self.shown(self.version_folder)
        if not self.version_folder.is_dir():
            return f"there is no folder {where} either"
        found = sorted(entry.name for entry in self.version_folder.iterdir())
        if not found:
            if (self.folder / name).exists():
                return f"it is one folder too high: move {self.shown(self.folder / name)} into {where}/"
            return f"folder {where} is empty; put the file there"
        if probably := misnamed(found, [name]):
            return (
                f"{where}/{probably[0]} is not read; did you mean {name}? default_model_filename can name another file"
            )
        return f"folder {where} holds {', '.join(found)}; default_model_filename can name another file"

    def __reduce__(self) -> tuple[Any, ...]:
        """With paths as text: the module of Path differs between versions of Python."""
        return _files_at, (str(self.repository), str(self.folder), self.version)


def _files_at(repository: str, folder: str, version: int) -> ModelFiles:
    return ModelFiles(Path(repository), Path(folder), version)


@dataclass(slots=True)
class OutputNotes:
    """How the outputs of a batch, or of one response, differ from the configuration, by the outputs' names.

    `unlike`: those with another data type or shape, each with a text for the log about one of the differences and its
    consequence.
    `left_out`: those that requests wanted and the model did not return, each with the number of such responses.
    `orders[m]`: the outputs of member m in the order in which the model returned them, if that is not the
    configuration's.
    """

    unlike: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    orders: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def or_none(self) -> OutputNotes | None:
        """None if there is nothing to note."""
        return self if self.unlike or self.left_out or self.orders else None


@dataclass(slots=True, eq=False)
class Sent:
    """One response of a decoupled model: its outputs in the configuration's order, and its parameters. `infer_ns`: the
    time that the model took for it, without waits in `send`; `output_ns`: the time for taking over its outputs.
    `notes`: how the outputs differ from the configuration. `is_last`: it carries the final flag, and ends the request.
    """

    outputs: Sequence[Tensor | None]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    infer_ns: int = 0
    output_ns: int = 0
    notes: OutputNotes | None = None
    is_last: bool = False


class Sender(Protocol):
    """Receives a decoupled model's responses to one request. May be used on any thread while it is referenced. A
    request that runs again keeps its sender; `kept` is an object that the backend stores there until then.
    """

    kept: Any

    def send(self, sent: Sent) -> None:
        """Send one response. Blocks until there is room for it; returns at once if the request is cancelled."""

    def offer(self, sent: Sent) -> bool:
        """Send one response if there is room for it, without waiting; also True if the request is cancelled, whose
        responses are dropped. False if there is no room: offer it again when `watch` reports room. A request is
        answered by `send` or by `offer`, not by both; `offer` is called on one thread at a time.
        """

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on any thread and without waiting for it, when there is room for a response that `offer`
        refused, and when the client cancels the request, or at once if it already has. Replaces an earlier `changed`.
        """

    def fail(self, error: FlowserveError) -> None:
        """Fail the request; there are no more responses."""

    def finish(self) -> None:
        """There are no more responses, which the last one did not say (`Sent.is_last`): the final flag came alone."""

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""


@dataclass(slots=True, eq=False)
class Work:
    """One batch, as an instance receives it.

    `inputs[i]` is the column of the model's i-th input; `inputs[i][m]` is the tensor of member m, None if it lacks an
    optional input. `rows[m]` is the row count of member m (1 for a model without batching, and for a member without
    rows). `requests[m]` is the client's request that the member belongs to. `wanted[m]` names the outputs that it
    requests. `may_write[i][m]`: whether the member is the last reader of that input. `senders[m]`, for decoupled models
    only, takes the responses: then `run` returns empty `Results`, and inputs may be kept until the last response.
    `contexts[m]`, if a member is traced, is the `traceparent` of its span, "" for none.
    """

    inputs: Sequence[Column]
    rows: list[int]
    requests: Sequence[Request]
    wanted: list[tuple[str, ...]]
    may_write: list[list[bool]] | None = None
    senders: Sequence[Sender] | None = None
    contexts: Sequence[str] | None = None


# The common case of a batch without facts about its members: shared, as results are not modified.
NO_ERRORS: Final[Mapping[int, FlowserveError]] = {}
NO_PARAMETERS: Final[Mapping[int, Mapping[str, Any]]] = {}


@dataclass(slots=True, eq=False)
class Results:
    """The outcome of a batch.

    `outputs[j][m]` is the model's j-th output for member m, None if it made none. `outputs[j]` is a column
    (memory/column.py) or any other sequence of tensors. `errors[m]` is the error of member m, if it failed.

    `gathered_ns` and `computed_ns`: the times when the inputs were in place, and when the computation ended.

    `copied[i]`: bytes of input i that were copied because the model could not read them in place: the members' rows
    were not contiguous in one block, not aligned, or not in memory of its process. `placed[j]`: bytes of output j that
    were placed contiguously when the model's responses, one for each request, were taken over. Both may be () for none.
    `parameters[m]`: response parameters of member m. `rescheduled`: members that are not answered but run again, in a
    model of iterative sequences; of their outputs only states are used. `taken[i]`: bytes of input i, which the worker
    sets. `notes`: how the outputs differ from the configuration; only outputs that are named there may differ.
    `raised`: what the model raised after it had responded to some members; the others have it in `errors`.
    """

    outputs: Sequence[Sequence[Tensor | None]]
    errors: Mapping[int, FlowserveError] = field(default_factory=dict)
    gathered_ns: int = 0
    computed_ns: int = 0
    copied: Sequence[int] = ()
    placed: Sequence[int] = ()
    parameters: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    rescheduled: Sequence[int] = ()
    taken: Sequence[int] = ()
    notes: OutputNotes | None = None
    raised: FlowserveError | None = None


class Instance(Protocol):
    """One copy of a model, ready to run one batch at a time."""

    def open(self) -> None:
        """Prepare the instance, on the thread that will run it, before the first `run`. May block."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        """Compute one batch."""

    def close(self) -> None:
        """Free all resources. Called once, after the last `run`."""


class LoadedModel(Protocol):
    """One version of a model, read from disk. Makes instances."""

    # Whether a batch that raised may run again in halves: the same inputs give the same outputs, without side effects.
    is_pure: bool
    # Whether the runtime may run an instance on the event loop if it measures that to be cheaper.
    may_run_inline: bool

    def instance(self, name: str, group: InstanceGroup) -> Instance:
        """A new instance, not yet opened."""

    def close(self) -> None:
        """Called once, after every instance is closed."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A function call in a worker process: import `entry` ("package.module:function") and call it with `arguments`,
    which are pickled from the server to the worker (never back). `shared`: instances with the same secret are served by
    one process (worker/sharing.py), "" for a process of its own.
    """

    entry: str
    arguments: tuple[Any, ...]
    shared: str = ""

    def call(self) -> Any:
        """Make the call in this process."""
        module, _, function = self.entry.partition(":")
        return getattr(importlib.import_module(module), function)(*self.arguments)


# The result of a call of another model.
Answer = Response | FlowserveError


@dataclass(frozen=True, slots=True, eq=False)
class BlsCall:
    """A request of a model to a deployment, `version` "" for its latest. `is_stream`: it gets any number of responses,
    of which the last `is_final`, and is empty if the final flag came alone; otherwise one response. An error is last.
    """

    model: str
    version: str
    request: Request
    is_stream: bool = False


# Requests of an instance's code to the server, with these arguments. Answers are JSON values.
LOAD: Final = "load"  # model, configuration as JSON or ""; with files
UNLOAD: Final = "unload"  # model, whether the models of an ensemble are unloaded too
IS_READY: Final = "is ready"  # model, version or ""
OPEN_FAMILY: Final = "open family"  # name, description, "counter", "gauge" or "histogram"; answer: its number
METRIC: Final = "metric"  # the family's number, labels, buckets or None
METRIC_VALUE: Final = "metric value"  # the family's number, labels
IS_WITHDRAWN: Final = "is withdrawn"  # the member of the batch that is executed
NO_FILES: Final[Mapping[str, bytes]] = {}


class Cells(Protocol):
    """The numbers in which a metric of a model is counted. A counter: [count]. A gauge: [time of the last set in
    nanoseconds of the caller's clock, value set, sum added since]. A histogram: [sum, count of each bucket ...].
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


class BlsClient(Protocol):
    """The connection of an instance's code to the server. The code calls other models, while it runs and on threads of
    its own; it asks for models and metrics, also while it is opened. Used on any thread. All clients of a server share
    one `clock`.
    """

    clock: ClockNs

    def begin(self, call: BlsCall, answered: Callable[[Answer], None]) -> Callable[[bool], None]:
        """Send a call. The request's arrays are copied before this returns. `answered` is called for each result, on
        any thread, and must not block; the model owns the arrays in it. Returns a function that withdraws the call;
        with True the call still has a last result, an error with the code CANCELLED if it was not over. Raises
        Unsupported if it cannot be made here, such as on the event loop.
        """

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Block until `is_there()` is true; it is called after each result."""

    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
        """Context manager around a wait on an asyncio loop, on the loop's thread."""

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        """Ask the server and wait for its answer. Raises FlowserveError; Unsupported if waiting is not allowed here."""

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        """Show a metric until its family is dropped. Returns the `count` cells to count in, all zero. Raises
        FlowserveError.
        """

    def drop(self, family: int) -> None:
        """End a metric family. Called at any time; never blocks."""

    def is_withdrawn(self, member: int) -> bool:
        """Whether the client of this member of the current batch has cancelled its request."""

    def close(self) -> None:
        """The instance is closed: no calls follow, and its metrics are no longer shown."""


def answer_or_raise(answer: Any) -> Any:
    """The answer; raised if it is an error."""
    if isinstance(answer, FlowserveError):
        try:
            raise answer
        finally:
            del answer  # breaks the reference cycle with this frame, which would keep the tensors of a batch alive
    return answer


@runtime_checkable
class KnowsReadiness(Protocol):
    """Implemented by an `Instance` whose own code may say that it is not ready."""

    def readiness(self) -> Callable[[], str] | None:
        """The function that returns why it is not ready, or ""; None if there is no such code. Called after `open`. The
        function blocks, raises nothing, and is called on any thread, also during a run.
        """


@runtime_checkable
class CallsModels(Protocol):
    """Implemented by an `Instance` whose code may call other models."""

    def call_through(self, caller: BlsClient) -> None:
        """Use this connection. Called before `open`."""


@runtime_checkable
class NeedsOthers(Protocol):
    """Implemented by an `Instance` that depends on something outside of the server."""

    def outage(self) -> str:
        """Why it cannot work at present, or "". Called at any time, on the event loop; never blocks."""

    def statistics(self) -> Mapping[str, Any]:
        """The other server's statistics of its model, as JSON; {} if they are unknown. Called as `outage`."""


@runtime_checkable
class SharesOutputs(Protocol):
    """Implemented by an `Instance` that can write outputs to memory that other processes read."""

    def share(self, output: int) -> None:
        """Write this output to shared memory from now on, if possible. Any thread, after `open`, also during a run."""


@dataclass(slots=True, eq=False)
class DeviceWork(Work):
    """A batch for an instance on a device: its inputs may be `DeviceTensor`s and `Mirror`s.

    `read_at[j][m]` states where output j of member m is read (ON_HOST, ON_DEVICE or both, of memory/stream.py); None:
    all outputs are read on the host. Outputs that are read on the host are there when `run` returns; the others may
    still be being computed.
    """

    read_at: Sequence[Sequence[int]] | None = None


@runtime_checkable
class OnDevice(Protocol):
    """Implemented by an `Instance` that computes on a GPU and takes `DeviceWork`: it reads its inputs from the host or
    any device, and leaves its outputs in the memory where they are read next. It runs on its own thread, never on the
    event loop. `is_of_any_thread`: runs may come from several threads, one at a time; otherwise all runs come from the
    thread that opened the instance.
    """

    @property
    def place(self) -> MemoryPlace: ...

    @property
    def is_of_any_thread(self) -> bool: ...


@runtime_checkable
class RunsInProcess(Protocol):
    """Implemented by a `LoadedModel` whose instances may be in worker processes."""

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """The call by which a worker process makes the instance that `instance(name, group)` would make here. It
        returns an `Instance`, not yet opened.
        """


@runtime_checkable
class UsesGpus(Protocol):
    """Implemented by a `Backend` whose instances may be on GPUs: the group of such an instance has kind KIND_GPU and
    one GPU in `gpus`.
    """

    # Default number of instances of a group on each GPU.
    gpu_instance_count: int


@runtime_checkable
class CompletesInProcess(Protocol):
    """Implemented by a `Backend` that executes a model's code to complete its configuration."""

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """As `complete`, but the model's code is executed only by `run`, which makes the call in a process of its own
        and returns its result as JSON values.
        """


@runtime_checkable
class Verifies(Protocol):
    """Implemented by a `Backend` that can check a version's files without a device."""

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raise Problems, Invalid or Unsupported as `load` would, without executing the model. `config` is the
        configuration that it would be loaded with. May block.
        """


class Backend(Protocol):
    """A kind of model. Registered in backends/registry.py, or by the entry point group `flowserve.backends`."""

    name: str
    # The model file in a version's folder, unless the configuration names another: "model.onnx".
    default_filename: str
    # Default number of instances of a group.
    default_instance_count: int

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """The fields that the model's files add to the configuration. `config` is what the user wrote, unchecked."""

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LoadedModel:
        """Read one version. `options` come from the server: the operator's options for this backend, `execution`
        ("thread", "inline" or "auto": where instances will run), `runs_at_once` (number of instances of this backend
        in the server, of all models, which share the cores) and `strict_outputs` ("true": an output that differs from
        the configuration, or is missing, is an error).
        """
