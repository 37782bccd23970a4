"""Completes a configuration: from the declarations in the model's own file (autocomplete), and with defaults.

Decides: the file fills in fields that the user omitted; fields given in both must agree, and a contradiction names both
sides. A `model.py` is a declaration by its author, not a measurement: it may add tensors and raise the batch size, as
on Triton. Also decides every default, as on Triton, and which of them are removed again if a client sends the
configuration back with changes. Does not read model files, and does not know a backend's default number of instances:
both are in the backend's `Completion`. Callers: `load`, the load API.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from flowserve.config import model_config_pb2 as pb
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import NO_GPUS, Completion, Gpus, ModelConfig, SourceMap
from flowserve.errors import Problem
from flowserve.values import TensorSpec, fits, shape_text

TensorSide = Literal["input", "output"]
Tensor = pb.ModelInput | pb.ModelOutput
RULE: Final = "M90"
# Backends whose models write their own configuration, and so may extend the user's.
AUTHORS: Final = frozenset({"python", "vllm"})
# Backends whose files contain default values for optional inputs.
HAVE_DEFAULTS: Final = frozenset({"onnxruntime"})
SEQUENCE_IDLE_DEFAULT_US: Final = 1_000_000


def merge(
    message: pb.ModelConfig, completion: Completion, source: SourceMap, *, is_strict: bool = False
) -> list[Problem]:
    """Fill `message` in place, or nothing of it if `is_strict`. Returns every contradiction."""
    both_given = _is_whole(message.input) and _is_whole(message.output)
    merger = _Merger(message, completion, source, both_given, is_strict)
    about_batches = [*merger.batch_size()]
    about_tensors = [*merger.tensors("input"), *merger.tensors("output")]
    if not is_strict:
        merger.policies()
    return about_batches or about_tensors  # a wrong batch size shifts every dimension, so report only that


@dataclass(slots=True)
class _Merger:
    message: pb.ModelConfig
    completion: Completion
    source: SourceMap
    # As on Triton, an ONNX file completes nothing if the user specified both inputs and outputs completely.
    both_given: bool
    is_strict: bool

    @property
    def _is_author(self) -> bool:
        return self.message.backend in AUTHORS

    def batch_size(self) -> Iterator[Problem]:
        m, theirs = self.message, self.completion.max_batch_size
        if theirs is None:
            return
        if self._is_author:
            if m.max_batch_size > theirs:
                text = (
                    f"configuration specified max_batch_size {m.max_batch_size}, but in auto-complete-config function"
                )
                yield self._problem("max_batch_size", f"{text} for model {m.name} specified max_batch_size {theirs}")
            m.max_batch_size = max(m.max_batch_size, theirs)
        elif m.max_batch_size > 0 and theirs == 0:
            text = f"autofill failed for model '{m.name}': model does not support batching while non-zero"
            hint = "every input and output of the model's file needs a first dimension that varies; or write"
            yield self._problem("max_batch_size", f"{text} max_batch_size is specified", f"{hint} max_batch_size: 0")
        elif "max_batch_size" not in self.source.places and not self.both_given and not self.is_strict:
            m.max_batch_size = theirs

    def tensors(self, side: TensorSide) -> Iterator[Problem]:
        theirs = self.completion.inputs if side == "input" else self.completion.outputs
        if theirs is None:
            return
        ours: Sequence[Tensor] = self.message.input if side == "input" else self.message.output
        given: dict[str, int] = {}
        for index, tensor in enumerate(ours):
            given.setdefault(tensor.name, index)  # of an output listed more than once, the first counts
        if not given and not self.is_strict:
            for spec in theirs:
                if not spec.optional or self.message.backend not in HAVE_DEFAULTS:  # left out, as on Triton
                    self._add(side, spec)
            return
        yield from self._unknown(side, ours, theirs)
        for spec in theirs:
            if spec.name in given:
                yield from self._join(side, given[spec.name], ours[given[spec.name]], spec)
            elif self._is_author:
                self._add(side, spec)

    def policies(self) -> None:
        m = self.message
        if self.completion.decoupled is not None:
            m.model_transaction_policy.decoupled = self.completion.decoupled
        wants_batcher = self.completion.dynamic_batching and m.max_batch_size > 1
        if wants_batcher and m.WhichOneof("scheduling_choice") is None and (self._is_author or not self.both_given):
            m.dynamic_batching.SetInParent()

    def _unknown(self, side: TensorSide, ours: Sequence[Tensor], theirs: Sequence[TensorSpec]) -> Iterator[Problem]:
        """Names that only one side knows. A model may have more outputs than the configuration, but not more inputs."""
        if self._is_author:
            return
        known = [spec.name for spec in theirs]
        for index, tensor in enumerate(ours):
            may_be_absent = isinstance(tensor, pb.ModelInput) and tensor.optional
            if tensor.name and tensor.name not in known and not may_be_absent:
                text = f"unexpected inference {side} '{tensor.name}', allowed {side}s are: {', '.join(known)}"
                hint = did_you_mean(tensor.name, known) or f"those are what the file of model '{self.message.name}' has"
                yield self._problem(f"{side}[{index}].name", text, hint)
        given = {tensor.name for tensor in ours}
        missing = [spec.name for spec in theirs if spec.name not in given and not spec.optional]
        if side == "input" and missing:
            want = sum(not spec.optional for spec in theirs)
            text = f"unable to load model '{self.message.name}', configuration expects {len(ours)} inputs, model"
            hint = f"missing in the configuration: {', '.join(missing)}"
            yield self._problem("input", f"{text} provides {want}", hint)

    def _join(self, side: TensorSide, index: int, ours: Tensor, spec: TensorSpec) -> Iterator[Problem]:
        path, name = f"{side}[{index}]", self.message.name
        if not ours.data_type:
            if not self.is_strict:
                ours.data_type = _data_type(spec)
        elif ours.data_type != spec.dtype.number:
            text = f"unable to load model '{name}', {side} '{spec.name}' is {pb.DataType.Name(ours.data_type)} in the"
            text = f"{text} configuration, but the model provides {spec.dtype.config_name}"
            yield self._problem(f"{path}.data_type", text)
        if not ours.dims:
            if not self.is_strict:
                self._set_dims(ours, spec)
            return
        seen = ours.reshape.shape if ours.HasField("reshape") else ours.dims
        batches = self.message.max_batch_size > 0
        written = (-1, *seen) if batches else (*seen,)
        model = self._full_dims(spec)
        is_single_value = written == (1,) and model == ()  # without batching
        if not (is_single_value or fits(written, model)):
            theirs, stated = (f"{len(dims)} dimensions (shape {shape_text(dims)})" for dims in (model, written))
            text = f"model '{name}', tensor '{spec.name}': the model expects {theirs} but the model configuration"
            hint = "an initial batch dimension is counted because max_batch_size > 0" if batches else ""
            yield self._problem(f"{path}.dims", f"{text} specifies {stated}", hint)

    def _full_dims(self, spec: TensorSpec) -> tuple[int, ...]:
        """The full shape in the model's file: a completion omits the batch dimension if the model batches."""
        dims = spec.dims if spec.reshape is None else spec.reshape
        theirs = self.completion.max_batch_size
        leaves_batch_out = (self.message.max_batch_size if theirs is None else theirs) > 0
        return (-1, *dims) if leaves_batch_out else dims

    def _add(self, side: TensorSide, spec: TensorSpec) -> None:
        tensor: Tensor
        if side == "input":
            tensor = self.message.input.add(name=spec.name, optional=spec.optional, allow_ragged_batch=spec.ragged)
        else:
            tensor = self.message.output.add(name=spec.name, label_filename=spec.labels)
        tensor.data_type = _data_type(spec)
        self._set_dims(tensor, spec)

    def _set_dims(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Scalars have dims [1] for clients; with batching they are reshaped to [] for the model, as on Triton."""
        batches = self.message.max_batch_size > 0
        dims = spec.dims if batches or spec.reshape is not None else self._full_dims(spec)
        if spec.reshape is not None:
            tensor.reshape.shape.extend(spec.reshape)
        tensor.dims.extend(dims or (1,))
        if not dims and batches:
            tensor.reshape.SetInParent()

    def _problem(self, path: str, message: str, hint: str = "") -> Problem:
        return Problem(message, self.source.place(path), RULE, hint)


def _is_whole(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors need no completion."""
    return bool(tensors) and all(tensor.data_type and tensor.dims for tensor in tensors)


def _data_type(spec: TensorSpec) -> pb.DataType:
    return cast("pb.DataType", spec.dtype.number)


# ---------------------------------------------------------------------------------------------- defaults


def fill_defaults(message: pb.ModelConfig, completion: Completion | None = None, gpus: Gpus = NO_GPUS) -> None:
    """Apply all defaults in place. `completion` has the backend's default number of instances. Idempotent."""
    if message.version_policy.WhichOneof("policy_choice") is None:
        message.version_policy.latest.num_versions = 1
    if message.HasField("dynamic_batching"):
        _prefer_the_largest(message.dynamic_batching.preferred_batch_size, message.max_batch_size)
    if message.HasField("sequence_batching"):
        batching = message.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or SEQUENCE_IDLE_DEFAULT_US
        if batching.HasField("oldest"):
            _prefer_the_largest(batching.oldest.preferred_batch_size, message.max_batch_size)
    if message.HasField("ensemble_scheduling"):
        message.model_transaction_policy.decoupled = False  # an ensemble's own flag has no meaning; its steps decide
    else:
        for name in ("input_pinned_memory", "output_pinned_memory"):
            if not message.optimization.HasField(name):
                getattr(message.optimization, name).enable = True
        _fill_instance_groups(message, completion or Completion(), gpus)


def forget_defaults(message: pb.ModelConfig, served: ModelConfig) -> None:
    """Remove defaults from a configuration that was read from a server if they no longer fit: with another
    max_batch_size, the preferred size changes. `served`: the current, or last, configuration of that name.
    """
    if message.max_batch_size == served.max_batch_size:
        return
    for sizes in (message.dynamic_batching.preferred_batch_size, message.sequence_batching.oldest.preferred_batch_size):
        if [*sizes] == [served.max_batch_size]:
            del sizes[:]


def _prefer_the_largest(sizes: MutableSequence[int], max_batch_size: int) -> None:
    if not sizes and max_batch_size > 0:
        sizes.append(max_batch_size)


def _fill_instance_groups(message: pb.ModelConfig, completion: Completion, gpus: Gpus) -> None:
    """A model without groups gets one with the model's name; unnamed groups are numbered. A group without a kind uses
    the GPUs that it lists, or all, if they exist and its backend uses GPUs; else the CPU.
    """
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            can_use = gpus.ids and completion.gpu_instance_count and set(group.gpus) <= set(gpus.ids)
            group.kind = pb.ModelInstanceGroup.KIND_GPU if can_use else pb.ModelInstanceGroup.KIND_CPU
            if not can_use:
                del group.gpus[:]
        is_on_gpus = group.kind == pb.ModelInstanceGroup.KIND_GPU
        if is_on_gpus and not group.gpus:
            group.gpus.extend(gpus.ids)
        if group.count < 1:
            group.count = completion.gpu_instance_count if is_on_gpus else completion.instance_count


def gpus_to_cpu(message: pb.ModelConfig) -> list[str]:
    """Move every group to the CPU (`--gpu=off`). Returns the names of the groups that requested a GPU."""
    moved = []
    for index, group in enumerate(message.instance_group):
        if group.kind == pb.ModelInstanceGroup.KIND_GPU:
            moved.append(group.name or f"{message.name}_{index}")
            group.kind = pb.ModelInstanceGroup.KIND_CPU
            del group.gpus[:]
    return moved
