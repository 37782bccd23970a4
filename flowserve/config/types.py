"""Configuration records for all other packages.

Decides the frozen records that `config` returns. They contain checked values only and no protobuf types;
`ModelConfig.json` is the configuration in the form of the protocol. `SourceMap` has the places of fields, so that a
rule in any package can report the user's line; `instances_of` expands instance groups for the available GPUs, `count`
instances on each of them. Does not read files, nor detect GPUs (`memory/devices`). Callers: every package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flowserve.errors import Place
from flowserve.values import DType, TensorSpec


@dataclass(frozen=True, slots=True)
class SourceMap:
    """The place of each field of one file, by path: `"ensemble_scheduling.step[1].input_map[IMAGE]"`."""

    file: str
    places: Mapping[str, Place] = field(default_factory=dict)

    def place(self, path: str) -> Place:
        """The place of `path`, else of its nearest existing ancestor, else of the whole (""), else the file."""
        while path:
            found = self.places.get(path)
            if found is not None:
                return found
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return self.places.get("", Place(self.file))


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Triton's ModelQueuePolicy. `timeout_action` is "REJECT" or "DELAY"; 0 means no timeout, and no size limit."""

    timeout_action: str = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Triton's ModelDynamicBatching. `preferred_batch_sizes` is never empty for a batching model (default: the
    maximum). `priority_queue_policies` is keyed by priority level, 1 to `priority_levels`.
    """

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)


LATEST: Final = -1  # a step's `version`: the highest available


@dataclass(frozen=True, slots=True)
class RowTest:
    """A test of the one number that an ensemble tensor has in each row: of a BOOL tensor whether it is true; else
    whether it is `above` and `below` these numbers, or one of `equals`. `negate` reverses the test; NaN passes neither.
    `otherwise`: it passes no other test of this tensor among the same rows.
    """

    tensor: str
    negate: bool = False
    above: float | None = None
    below: float | None = None
    equals: tuple[int, ...] = ()
    otherwise: bool = False

    def passes(self, number: float) -> bool:
        """Whether a number passes; not defined for `otherwise`."""
        if number != number:  # NaN
            return False
        if self.above is None and self.below is None and not self.equals:
            found = bool(number)
        else:
            found = (self.above is None or number > self.above) and (self.below is None or number < self.below)
            found = found and (not self.equals or number in self.equals)
        return found is not self.negate

    def __str__(self) -> str:
        if self.otherwise:
            return f"{self.tensor} otherwise"
        parts = []
        if self.above is not None:
            parts.append(f"{self.tensor} > {self.above:g}")
        if self.below is not None:
            parts.append(f"{self.tensor} < {self.below:g}")
        if self.equals:
            parts.append(f"{self.tensor} = {' or '.join(map(str, self.equals))}")
        text = " and ".join(parts) or self.tensor
        return f"not {text}" if self.negate else text


ITEMS_MAX: Final = 10_000  # of one request, where `each` gives no limit


@dataclass(frozen=True, slots=True)
class EachItem:
    """The items of ensemble tensors: their first dimension after the batch dimension. The tensor `count`, "" for none,
    has the number of real items of each row. A request may have `at_most` items.
    """

    tensors: tuple[str, ...]
    count: str = ""
    at_most: int = ITEMS_MAX

    def __str__(self) -> str:
        return ", ".join(self.tensors)


@dataclass(frozen=True, slots=True)
class Fill:
    """The value of an ensemble tensor in rows and items that no step wrote: `value`, or `string` for a BYTES tensor.
    The BOOL tensor `present`, "" for none, is true where a step wrote. `path`: as of a step.
    """

    tensor: str
    value: float = 0.0
    string: str = ""
    present: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step: `input_map` is model input -> ensemble tensor, `output_map` is model output -> ensemble tensor.

    `path` is the step's path in the file, for `SourceMap.place`. It runs for the items of `each`, for those rows that
    pass all tests of `when`. `name` replaces the model's name in the names of nodes, "" for none.
    """

    model: str
    version: int
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]
    path: str = ""
    when: tuple[RowTest, ...] = ()
    each: EachItem | None = None
    name: str = ""

    def row_reads(self) -> Iterator[tuple[str, str]]:
        """The tensors that decide for which rows it runs, each with its path below the step."""
        if self.each is not None:
            yield from ((tensor, "each") for tensor in self.each.tensors)
            if self.each.count:
                yield self.each.count, "each.count"
        yield from ((test.tensor, f"when[{number}]") for number, test in enumerate(self.when))


@dataclass(frozen=True, slots=True)
class Ensemble:
    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0
    fills: tuple[Fill, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitedResource:
    """`count` units of a resource, of the instance's device or (`is_global`) of the whole server."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """The resources that an instance needs for an execution, with `--rate-limit`. `priority`: 1 is the highest."""

    resources: tuple[LimitedResource, ...] = ()
    priority: int = 1


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`kind` is one of "KIND_CPU", "KIND_GPU", "KIND_MODEL"; with KIND_GPU there are `count` instances on each of
    `gpus`. Instances of a `passive` group are loaded and initialised, but get no work. `profiles` are the numbers of
    the optimisation profiles that TensorRT may use.
    """

    name: str
    kind: str = "KIND_CPU"
    count: int = 1
    gpus: tuple[int, ...] = ()
    passive: bool = False
    rate_limiter: RateLimiter = RateLimiter()
    profiles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs available to models. `absence` is the reason if there are none. `is_off`: the operator has disabled
    GPUs, and instances that request one run on the CPU. `is_assumed`: the models will run on another machine that has
    the requested GPUs.
    """

    ids: tuple[int, ...] = ()
    absence: str = ""
    is_off: bool = False
    is_assumed: bool = False


NO_GPUS = Gpus()
OFF = Gpus(is_off=True)
ASSUMED = Gpus(is_assumed=True)


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A model input that the server computes from the shapes of a batch. `kind` is Triton's name
    ("BATCH_ELEMENT_COUNT"); each of `targets`, which are not inputs of the configuration, gets the same tensor;
    `source` is an input.
    """

    kind: str
    targets: tuple[str, ...]
    dtype: DType
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Flat outputs that are divided by the shapes of the input `source`."""

    targets: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """A control input of a sequence model. `kind` is "START", "END", "READY" or "CORRID"; `false` and `true` are the
    values of the first three.
    """

    name: str
    kind: str
    dtype: DType
    false: float = 0
    true: float = 1


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A tensor that the server keeps between the requests of a sequence: `output` of one request is `input` of the
    next. `dims` exclude the batch dimension. The first input has `initial_dims`, if given, and the contents of `file`
    in initial_state/, else zeros.
    """

    input: str
    output: str
    dtype: DType
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...] | None = None
    file: str = ""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Triton's ModelSequenceBatching. `is_direct`: strategy direct, with `slot_share` its minimum_slot_utilization;
    else oldest, with `preferred_batch_sizes` and `candidates` (concurrent sequences per instance; 0: as many as a batch
    has rows). `is_iterative`: each request is a sequence, and runs until its model is done with it.
    """

    idle_us: int
    is_direct: bool
    controls: tuple[SequenceControl, ...] = ()
    states: tuple[SequenceState, ...] = ()
    max_queue_delay_us: int = 0
    slot_share: float = 0.0
    candidates: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    is_iterative: bool = False


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """The contents of one input of a warm-up request: zeros, random values, or a `file` in warmup/. `dims` exclude the
    batch dimension.
    """

    dtype: DType
    dims: tuple[int, ...]
    is_random: bool = False
    file: str = ""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """`count` batches of `batch_size` equal requests; a `batch_size` of 0 disables the sample."""

    name: str
    batch_size: int
    count: int
    inputs: Mapping[str, WarmupInput]


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Exactly one of three policies: the `latest` N, all, or the `specific` ones."""

    latest: int = 1
    all: bool = False
    specific: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One deployment's configuration after defaults, autocomplete and rules.

    `backend` is "" for ensembles. `json` is the whole message as GET .../config returns it. `decoupled`: a plain model
    may send any number of responses per request; for an ensemble, its steps decide. `placed`: for pictures, where a
    placement file has its instances run; "": in the server. `segment`: for pictures, the segment that it belongs to.
    `outputs` are by name; `listed_outputs` are those of the file if it lists one more than once, else empty.
    """

    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: SourceMap
    version_policy: VersionPolicy = VersionPolicy()
    dynamic_batching: DynamicBatching | None = None
    sequence: SequenceBatching | None = None
    ensemble: Ensemble | None = None
    instance_groups: tuple[InstanceGroup, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    warmup: tuple[WarmupSample, ...] = ()
    default_model_filename: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Any] = field(default_factory=dict)
    decoupled: bool = False
    response_cache: bool = False
    placed: str = ""
    segment: str = ""
    listed_outputs: tuple[TensorSpec, ...] = ()

    @property
    def is_ensemble(self) -> bool:
        return self.ensemble is not None

    @property
    def steps(self) -> tuple[EnsembleStep, ...]:
        """The steps of an ensemble; () for a plain model."""
        return self.ensemble.steps if self.ensemble else ()

    @property
    def max_inflight_requests(self) -> int:
        """The limit of an ensemble; 0 for none, and for a plain model."""
        return self.ensemble.max_inflight_requests if self.ensemble else 0

    @property
    def active_groups(self) -> list[InstanceGroup]:
        """The instances that get work."""
        return [group for group in self.instance_groups if not group.passive]


def is_same_but_versions(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations are equal in all but their text and the versions that they select."""
    return _of_any_version(one) == _of_any_version(other)


def _of_any_version(config: ModelConfig) -> ModelConfig:
    json = {field: value for field, value in config.json.items() if field != "version_policy"}
    return replace(config, source=SourceMap(""), version_policy=VersionPolicy(), json=json)


def instances_of(config: ModelConfig) -> list[tuple[str, InstanceGroup]]:
    """The name of every instance of a model, and its group with `gpus` reduced to the instance's own: () on the CPU,
    and if the GPUs are only assumed to exist.
    """
    instances = []
    for group in config.instance_groups:
        if not group.gpus:
            instances += [(f"{group.name}_{number}", group) for number in range(group.count)]
        for gpu in group.gpus:
            here = replace(group, gpus=(gpu,))
            instances += [(f"{group.name}_{number}_gpu{gpu}", here) for number in range(group.count)]
    return instances


@dataclass(frozen=True, slots=True)
class Completion:
    """The declarations that a backend read from the model's own files, for configuration fields that the user omitted.

    `max_batch_size`, `decoupled` None: not declared. `inputs`/`outputs` exclude the batch dimension if
    `max_batch_size` > 0. `dynamic_batching`: enable the dynamic batcher (as Triton does for ONNX files whose first dims
    all vary). `instance_count`: the default number of instances of a group; `gpu_instance_count`: the same per GPU, 0
    if the backend does not use GPUs.
    """

    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    max_batch_size: int | None = None
    dynamic_batching: bool = False
    decoupled: bool | None = None
    instance_count: int = 1
    gpu_instance_count: int = 1
