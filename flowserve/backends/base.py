"""What a backend is, and what each side may assume.

A `Backend` knows a kind of model file. `load` gives a `LoadedModel` (one per model version: the file, read once), and
that gives one `Instance` per copy that may run at the same time. The runtime drives them so:

* `complete` and `load` are called on a worker thread, may block, and raise `Invalid` (or `Unsupported`) with a text
  that names both sides.
* an instance's `open`, `run` and `close` are never called at the same time, `open` first, `close` last; `run` may
  happen on the event loop (inline) or on the instance's own thread, whichever the runtime measured cheaper. So `run`
  never awaits and never touches trio.
* `run` gets tensors it may keep only until it returns, and whose arrays it must not write to unless `Work.may_write`
  says so. What it returns is owned by the runtime: arrays it does not write to again.
* tensors have the shapes of the configuration's `dims` on both sides; a backend applies `TensorSpec.reshape` itself.
* members of a batch have equal shapes but for their rows, except in inputs that are `TensorSpec.ragged`. What the
  configuration asks to be made of a batch (`batch_inputs`, `batch_outputs`) is the backend's to make, or to refuse.
* a failure of the whole batch is raised; a failure of one member is put in `Results.errors`.

Backends do not know graphs, queues or clocks: `run` reports the two moments the statistics need through the clock it
is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, Request, Response

ClockNs = Callable[[], int]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where one version of a model lies. `folder` is the model's folder, `version_folder` the one with its files."""

    repository: Path
    folder: Path
    version: int

    @property
    def version_folder(self) -> Path:
        return self.folder / str(self.version)

    def __reduce__(self) -> tuple[Any, ...]:
        """With paths as text: other versions of Python keep the class in another module."""
        return _files_at, (str(self.repository), str(self.folder), self.version)


def _files_at(repository: str, folder: str, version: int) -> ModelFiles:
    return ModelFiles(Path(repository), Path(folder), version)


@dataclass(slots=True, eq=False)
class Sent:
    """One answer of a decoupled model: its outputs in order, and what it says besides. `infer_ns`: how long the model
    took for it, waits in its send left out; `output_ns`: how long it took to take it over.
    """

    outputs: Sequence[Tensor | None]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    infer_ns: int = 0
    output_ns: int = 0


class Sender(Protocol):
    """Where a decoupled model's answers to one request go. On any thread, and as long as somebody has it. A request
    that runs again has the sender that it had; `kept` is what the backend wants to find there then.
    """

    kept: Any

    def send(self, sent: Sent) -> None:
        """One answer. Waits until there is room for it; returns at once where nobody wants it any more."""

    def fail(self, error: FlowserveError) -> None:
        """The request failed; there are no more answers."""

    def finish(self, *, is_empty: bool = False) -> None:
        """There are no more answers. `is_empty`: that was said by itself, and not with the last of them."""

    def is_cancelled(self) -> bool:
        """Whether nobody wants any more answers."""


@dataclass(slots=True, eq=False)
class Work:
    """One batch, as an instance sees it.

    `inputs[i][m]` is the model's i-th input for member m, None where an optional input was not given. `rows[m]` is
    the member's row count (1 for a model without batching). `requests[m]` is the client's request the member belongs
    to. `wanted[m]` names the outputs asked of it. `may_write[i][m]` tells whether the member is the last reader of
    that input. `senders[m]`, of a decoupled model only, is where answers to it go: `run` then returns empty `Results`,
    and inputs may be kept until the last answer. `contexts[m]`, where anybody is traced, is the `traceparent` of the
    span that the member runs in, "" for none. `keeps_whole`: outputs may be columns (memory/columns.py), since they are
    mostly read whole.
    """

    inputs: list[list[Tensor | None]]
    rows: list[int]
    requests: Sequence[Request]
    wanted: list[tuple[str, ...]]
    may_write: list[list[bool]] | None = None
    senders: Sequence[Sender] | None = None
    contexts: Sequence[str] | None = None
    keeps_whole: bool = False


@dataclass(slots=True, eq=False)
class Results:
    """`outputs[j][m]` is the model's j-th output for member m, None where it made none. `errors[m]`, where given, is
    why member m failed.

    `gathered_ns` and `computed_ns`: when the inputs were in place, and when the computation was over.

    `copied[i]`: bytes of input i that were copied before the model could read them in one piece, because the members'
    rows were not neighbours in one block, or lay where the model cannot read them (an odd address, memory that its
    process does not see). What is not copied was handed on as it lay. `placed[j]`: bytes of output j that were laid
    side by side when a model's answers, one for each request, were taken. Both are () where there was nothing of it.
    `parameters[m]`, where given, is what member m's answer says besides its tensors. `rescheduled`: members that are
    not answered but run again, in a model of iterative sequences; of their outputs only states count.
    """

    outputs: list[list[Tensor | None]]
    errors: Mapping[int, FlowserveError] = field(default_factory=dict)
    gathered_ns: int = 0
    computed_ns: int = 0
    copied: Sequence[int] = ()
    placed: Sequence[int] = ()
    parameters: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    rescheduled: Sequence[int] = ()


class Alike:
    """How nearly every batch is answered: `outputs[j][m]` is member m's one row of the model's j-th output, all of the
    output's one shape and type, and nothing is said besides. Times as in `Results`.
    """

    __slots__ = ("computed_ns", "gathered_ns", "outputs")

    def __init__(self, outputs: Sequence[Sequence[Array]], gathered_ns: int, computed_ns: int) -> None:
        self.outputs = outputs
        self.gathered_ns = gathered_ns
        self.computed_ns = computed_ns


class Instance(Protocol):
    """One copy of a model, ready to run one batch at a time."""

    def open(self) -> None:
        """Whatever must happen once, on the thread that will run it, before the first `run`. May block."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        """Compute one batch. Never called concurrently with itself."""

    def close(self) -> None:
        """Give everything back. Called once, after the last `run`."""


class LoadedModel(Protocol):
    """One version of a model, read from disk; makes instances."""

    # True where a batch that raised may be run again in halves: same inputs, same outputs, no effects.
    is_pure: bool
    # True where the runtime may run an instance on the event loop when it measures that to be cheaper.
    may_run_inline: bool

    def instance(self, name: str, group: InstanceGroup) -> Instance:
        """A new instance, not yet opened."""

    def close(self) -> None:
        """Called once, after every instance is closed."""


@dataclass(frozen=True, slots=True)
class Remote:
    """What a child process does to have something: import `entry` ("package.module:function") and call it with
    `arguments`, which travel by pickle from the server to the child (never back).
    """

    entry: str
    arguments: tuple[Any, ...]


# What comes of a call: a response, or why there is none; None after the last response of a call that may have many.
Answer = Response | FlowserveError | None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request that a model makes of a deployment, `version` "" for its latest. `is_stream`: it takes any number of
    responses, with None after the last; otherwise it gets one answer. An error is always the last.
    """

    model: str
    version: str
    request: Request
    is_stream: bool = False


# What an instance's code may ask of the server, with these arguments; all that is answered is what JSON can say.
LOAD: Final = "load"  # model, configuration as JSON or ""; with files
UNLOAD: Final = "unload"  # model, whether what it is made of goes, too
IS_READY: Final = "is ready"  # model, version or ""
OPEN_FAMILY: Final = "open family"  # name, description, "counter", "gauge" or "histogram"; answers the family's number
METRIC: Final = "metric"  # the family's number, labels, buckets or None
METRIC_VALUE: Final = "metric value"  # the family's number, labels
IS_WITHDRAWN: Final = "is withdrawn"  # which member of the batch that is executed
NO_FILES: Final[Mapping[str, bytes]] = {}


class Cells(Protocol):
    """What a metric of a model's own is counted in. A counter: what was counted. A gauge: when it was last set, in
    nanoseconds of the caller's clock, to what, and what was added since. A histogram: the sum, and how often for each
    bucket.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


class Caller(Protocol):
    """How an instance's code reaches the server: it calls other models, while it runs and on threads of its own; and it
    asks for models and metrics, also while it is opened. On any thread. `clock` is one for all of a server's.
    """

    clock: ClockNs

    def begin(self, call: Call, answered: Callable[[Answer], None]) -> Callable[[], None]:
        """Send a call. The request's arrays are copied before this returns. `answered` is called for each answer, on
        any thread and never waiting; arrays in it are the caller's own. Returns what withdraws the call, for whoever
        has lost interest. Raises Unsupported where it cannot be made here.
        """

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Block until `is_there()`, which an answer makes true."""

    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
        """Around waiting on an asyncio loop, on whose thread this is called."""

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        """Ask the server, and wait for what it says. Raises FlowserveError; Unsupported where nobody may wait."""

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        """Have a metric shown until its family is dropped. It is counted in what is returned: so many cells, all zero.
        Raises FlowserveError.
        """

    def drop(self, family: int) -> None:
        """A family is not wanted any more. At any moment, never waiting."""

    def is_withdrawn(self, member: int) -> bool:
        """Whether nobody waits any more for a member of the batch that the instance executes."""

    def close(self) -> None:
        """The instance is closed: nothing is asked any more, and no metric of its own is shown."""


def answer_or_raise(answer: Any) -> Any:
    """What was asked for; raised, where it is why there is nothing."""
    if isinstance(answer, FlowserveError):
        try:
            raise answer
        finally:
            del answer  # or this frame would hold it, and it the frames of a batch: until the collector comes
    return answer


@runtime_checkable
class CallsModels(Protocol):
    """What an `Instance` has besides where its code may call other models."""

    def call_through(self, caller: Caller) -> None:
        """From now on it calls through this. Before it is opened."""


@runtime_checkable
class RunsWhole(Protocol):
    """What an `Instance` has besides that takes each input of a batch as one array."""

    def run_whole(self, work: Work, inputs: Sequence[Array], clock: ClockNs) -> Results | Alike:
        """As `run`, where all members have all inputs, side by side: `inputs[i]` is their rows, in the shapes of the
        configuration, and may be written to. `work.inputs` is empty.
        """


@runtime_checkable
class SharesOutputs(Protocol):
    """What an `Instance` has besides that can have outputs in memory that other processes may read."""

    def share(self, output: int) -> None:
        """From now on this output lies there, if it can. On any thread, once it is open, also during a run."""


@runtime_checkable
class RunsInProcess(Protocol):
    """What a `LoadedModel` has besides where its instances may live in child processes."""

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """How a child makes the instance that `instance(name, group)` would make here: the entry returns an
        `Instance`, not yet opened.
        """


@runtime_checkable
class UsesGpus(Protocol):
    """What a `Backend` has besides whose instances may be on GPUs: they find theirs as the only one in the `gpus` of
    their group, whose kind is KIND_GPU.
    """

    # How many instances a group gets on each GPU when the configuration does not say.
    gpu_instance_count: int


@runtime_checkable
class CompletesInProcess(Protocol):
    """What a `Backend` has besides that runs a model's own code to complete its configuration."""

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """As `complete`, but the model's code runs only within `run`, which does what it is told in a process of its
        own and returns what JSON makes of the result.
        """


@runtime_checkable
class Verifies(Protocol):
    """What a `Backend` has besides that can tell from a version's files, without a device, what `load` would refuse."""

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Judge one version, running nothing of it. `config` is the one that it would be loaded with. May block. Raises
        Problems, Invalid or Unsupported.
        """


class Backend(Protocol):
    """A kind of model. Registered in backends/registry.py, or by the entry point group `flowserve.backends`."""

    name: str
    # The file a version folder holds unless the configuration names another: "model.onnx".
    default_filename: str
    # How many instances a group gets when the configuration does not say.
    default_instance_count: int

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """Read what the model says about itself. `config` is what the user wrote so far, unchecked."""

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LoadedModel:
        """Read one version. `options` are what the server knows and the model does not: `execution` ("thread",
        "inline" or "auto": where instances will run) and `runs_at_once` (how many instances of this backend the
        server will have, all models together, so that they can share the cores).
        """
