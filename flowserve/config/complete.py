"""Joins what the user wrote with what the model's own file says.

Decided here: the file fills in what the user left out, and where both speak they must agree; a disagreement names both
sides. What the file says, and how to read it, is the backend's knowledge (`Completion`). A `model.py` is its author's
word, not a measurement: it may add tensors and raise the batch size, as on Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from flowserve.config.model_config_pb2 import DataType, ModelInput, ModelOutput
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import Completion, SourceMap
from flowserve.errors import Problem
from flowserve.values import TensorSpec

Side = Literal["input", "output"]
RULE: Final = "M90"
# Backends whose models are asked to write their configuration, and so may say more than one thing.
AUTHORS: Final = frozenset({"python"})
# Backends whose files have values of their own for what they call optional.
HAVE_DEFAULTS: Final = frozenset({"onnxruntime"})


def merge(message: ModelConfigProto, completion: Completion, source: SourceMap) -> list[Problem]:
    """Fill `message` in place. Returns every disagreement."""
    both_given = _is_whole(message.input) and _is_whole(message.output)
    merger = _Merger(message, completion, source, both_given)
    about_batches = [*merger.batch_size()]
    about_tensors = [*merger.tensors("input"), *merger.tensors("output")]
    merger.policies()
    problems = about_batches or about_tensors  # a wrong batch size shifts every dimension: one mistake, not ten
    return [replace(problem, rule=RULE) for problem in problems]


@dataclass(slots=True)
class _Merger:
    message: ModelConfigProto
    completion: Completion
    source: SourceMap
    # Triton does not ask an ONNX file for anything where the user wrote both inputs and outputs whole.
    both_given: bool

    @property
    def _is_author(self) -> bool:
        return self.message.backend in AUTHORS

    def batch_size(self) -> Iterator[Problem]:
        m, theirs = self.message, self.completion.max_batch_size
        if theirs is None:
            return
        if self._is_author:
            if m.max_batch_size > theirs:
                yield self._problem(
                    "max_batch_size",
                    f"configuration specified max_batch_size {m.max_batch_size}, but in auto-complete-config function"
                    f" for model {m.name} specified max_batch_size {theirs}",
                )
            m.max_batch_size = max(m.max_batch_size, theirs)
        elif m.max_batch_size > 0 and theirs == 0:
            yield self._problem(
                "max_batch_size",
                f"autofill failed for model '{m.name}': model does not support batching while non-zero max_batch_size"
                " is specified",
                "every input and output of the model's file needs a first dimension that varies; or write"
                " max_batch_size: 0",
            )
        elif "max_batch_size" not in self.source.places and not self.both_given:
            m.max_batch_size = theirs

    def tensors(self, side: Side) -> Iterator[Problem]:
        theirs = self.completion.inputs if side == "input" else self.completion.outputs
        if theirs is None:
            return
        ours: Sequence[ModelInput | ModelOutput] = self.message.input if side == "input" else self.message.output
        given = {tensor.name: index for index, tensor in enumerate(ours)}
        if not given:
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

    def _unknown(
        self, side: Side, ours: Sequence[ModelInput | ModelOutput], theirs: Sequence[TensorSpec]
    ) -> Iterator[Problem]:
        """Names only one side knows. A model may make more outputs than a configuration mentions, not want more
        inputs.
        """
        if self._is_author:
            return
        known = [spec.name for spec in theirs]
        for index, tensor in enumerate(ours):
            may_be_absent = isinstance(tensor, ModelInput) and tensor.optional
            if tensor.name and tensor.name not in known and not may_be_absent:
                text = f"unexpected inference {side} '{tensor.name}', allowed {side}s are: {', '.join(known)}"
                hint = did_you_mean(tensor.name, known) or f"those are what the file of model '{self.message.name}' has"
                yield self._problem(f"{side}[{index}].name", text, hint)
        given = {tensor.name for tensor in ours}
        missing = [spec.name for spec in theirs if spec.name not in given and not spec.optional]
        if side == "input" and missing:
            want = sum(not spec.optional for spec in theirs)
            text = (
                f"unable to load model '{self.message.name}', configuration expects {len(ours)} inputs, model provides"
            )
            yield self._problem("input", f"{text} {want}", f"missing in the configuration: {', '.join(missing)}")

    def _join(self, side: Side, index: int, ours: ModelInput | ModelOutput, spec: TensorSpec) -> Iterator[Problem]:
        path, name = f"{side}[{index}]", self.message.name
        if not ours.data_type:
            ours.data_type = _data_type(spec)
        elif ours.data_type != spec.dtype.number:
            wanted = DataType.Name(ours.data_type)
            yield self._problem(
                f"{path}.data_type",
                f"unable to load model '{name}', {side} '{spec.name}' is {wanted} in the configuration, but the model"
                f" provides {spec.dtype.config_name}",
            )
        if not ours.dims:
            self._set_dims(ours, spec)
            return
        seen = ours.reshape.shape if ours.HasField("reshape") else ours.dims
        written = [-1, *seen] if self.message.max_batch_size > 0 else [*seen]
        model = self._full_dims(spec)
        if not _fits(written, model):
            yield self._problem(
                f"{path}.dims",
                f"model '{name}', tensor '{spec.name}': the model expects {len(model)} dimensions (shape"
                f" {_shape(model)}) but the model configuration specifies {len(written)} dimensions (shape"
                f" {_shape(written)})",
                "an initial batch dimension is counted because max_batch_size > 0"
                if self.message.max_batch_size > 0
                else "",
            )

    def _full_dims(self, spec: TensorSpec) -> list[int]:
        """The shape as the model's file has it: a completion leaves out the batch dimension where it batches."""
        dims = list(spec.dims if spec.reshape is None else spec.reshape)
        return [-1, *dims] if self._leaves_batch_out else dims

    @property
    def _leaves_batch_out(self) -> bool:
        theirs = self.completion.max_batch_size
        return (self.message.max_batch_size if theirs is None else theirs) > 0

    def _add(self, side: Side, spec: TensorSpec) -> None:
        if side == "input":
            given = self.message.input.add(name=spec.name, optional=spec.optional, allow_ragged_batch=spec.ragged)
            given.data_type = _data_type(spec)
            self._set_dims(given, spec)
        else:
            made = self.message.output.add(name=spec.name, label_filename=spec.labels)
            made.data_type = _data_type(spec)
            self._set_dims(made, spec)

    def _set_dims(self, tensor: ModelInput | ModelOutput, spec: TensorSpec) -> None:
        """Single values are [1] to clients. Batched ones are reshaped to nothing for the model, as on Triton."""
        batches = self.message.max_batch_size > 0
        if spec.reshape is None:
            dims = self._full_dims(spec)[1:] if batches and self._leaves_batch_out else self._full_dims(spec)
        else:
            dims = list(spec.dims)
            tensor.reshape.shape.extend(spec.reshape)
        tensor.dims.extend(dims or [1])
        if not dims and batches:
            tensor.reshape.SetInParent()

    def _problem(self, path: str, message: str, hint: str = "") -> Problem:
        return Problem(message, self.source.place(path), hint=hint)


def _is_whole(tensors: Sequence[ModelInput | ModelOutput]) -> bool:
    """Whether nothing is left to complete about these tensors."""
    return bool(tensors) and all(tensor.data_type and tensor.dims for tensor in tensors)


def _fits(written: Sequence[int], model: Sequence[int]) -> bool:
    """Whether every dimension that the model fixes is written so."""
    if not model and list(written) == [1]:  # a single value without batching
        return True
    return len(written) == len(model) and all(b in (-1, a) for a, b in zip(written, model, strict=True))


def _data_type(spec: TensorSpec) -> DataType:
    return cast("DataType", spec.dtype.number)


def _shape(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
