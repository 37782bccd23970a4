"""Rules about what is made of a whole batch: batch inputs and batch outputs.

Decided here: what Triton decides about them, with its texts, and what it finds out only when a batch runs: that no
client could send what the server makes, that the shape of a batch output can be told, and that the model takes batches
as one tensor at all. Nothing here compares with the model's own file; its backend does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowserve.config.model_config_pb2 import TYPE_FP32, TYPE_INT32, BatchInput, BatchOutput, ModelInput
from flowserve.config.rules.subject import Subject
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Problem


def batch_inputs_have_one_source(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_input):
        if len(tensor.source_input) != 1:
            kind = BatchInput.Kind.Name(tensor.kind)
            text = f"batch input kind '{kind}' expects 1 source input, got {len(tensor.source_input)}"
            yield s.problem(f"batch_input[{index}]", f"{text} for {s.message.name}")


def batch_inputs_are_numbers(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_input):
        if tensor.data_type not in (TYPE_INT32, TYPE_FP32):
            text = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {s.message.name}"
            path = f"batch_input[{index}]"
            yield s.problem(f"{path}.data_type" if tensor.data_type else path, text)


def batch_sources_exist(s: Subject) -> Iterator[Problem]:
    names = [tensor.name for tensor in s.message.input]
    listed: list[tuple[str, BatchInput | BatchOutput]] = []
    listed += [(f"batch_input[{index}]", tensor) for index, tensor in enumerate(s.message.batch_input)]
    listed += [(f"batch_output[{index}]", tensor) for index, tensor in enumerate(s.message.batch_output)]
    for path, tensor in listed:
        for index, source in enumerate(tensor.source_input):
            if source not in names:
                text = f"unknown source input name '{source}' for {s.message.name}"
                yield s.problem(f"{path}.source_input[{index}]", text, did_you_mean(source, names))


def batch_inputs_have_a_target(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_input):
        if not tensor.target_name:
            yield s.problem(f"batch_input[{index}]", f"batch input must specify 'target_name' for {s.message.name}")


def batch_outputs_have_one_source(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_output):
        if len(tensor.source_input) != 1:
            kind = BatchOutput.Kind.Name(tensor.kind)
            text = f"batch output kind '{kind}' expects 1 source input, got {len(tensor.source_input)}"
            yield s.problem(f"batch_output[{index}]", f"{text} for {s.message.name}")


def batch_output_targets_exist_once(s: Subject) -> Iterator[Problem]:
    names = [tensor.name for tensor in s.message.output]
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_output):
        for position, target in enumerate(tensor.target_name):
            path = f"batch_output[{index}].target_name[{position}]"
            if target not in names:
                text = f"unknown target output name '{target}' for {s.message.name}"
                yield s.problem(path, text, did_you_mean(target, names))
            elif target in seen:
                text = f"target output name '{target}' can only be specified once for {s.message.name}"
                yield s.problem(path, text)
            seen.add(target)


def batch_input_targets_are_their_own(s: Subject) -> Iterator[Problem]:
    inputs = [tensor.name for tensor in s.message.input]
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_input):
        for position, target in enumerate(tensor.target_name):
            path = f"batch_input[{index}].target_name[{position}]"
            if target in inputs:
                text = f"target input name '{target}' is an input that clients send, too, for {s.message.name}"
                hint = "leave it out of `input`: a batch input is made by the server"
                yield s.problem(path, text, hint)
            elif target in seen:
                text = f"target input name '{target}' can only be specified once for {s.message.name}"
                yield s.problem(path, text)
            seen.add(target)


def batch_output_shapes_can_be_told(s: Subject) -> Iterator[Problem]:
    sources = {tensor.name: tensor for tensor in s.message.input}
    targets = {tensor.name: tensor for tensor in s.message.output}
    for index, tensor in enumerate(s.message.batch_output):
        source = sources.get(tensor.source_input[0]) if len(tensor.source_input) == 1 else None
        for position, name in enumerate(tensor.target_name):
            path = f"batch_output[{index}].target_name[{position}]"
            target = targets.get(name)
            if target is None:
                continue
            if target.HasField("reshape"):
                text = f"target output name '{name}' has a reshape for {s.message.name}"
                yield s.problem(path, text, "write the shape that clients get as its dims")
            elif source is not None and -1 in target.dims[len(_inner(source)) :]:
                text = f"target output name '{name}' varies where input '{source.name}' has no dimension"
                hint = f"dims {_shown(target.dims)} take their -1s from {_shown(_inner(source))}"
                yield s.problem(path, f"{text} for {s.message.name}", hint)


def batch_tensors_are_for_whole_batches(s: Subject) -> Iterator[Problem]:
    """A model.py sees requests, and the steps of an ensemble have batches of their own."""
    if s.is_ensemble:
        text = f"ensemble '{s.message.name}' runs no batches of its own"
        hint = "write it into the configuration of the step that needs it"
    elif s.message.backend == "python":
        text = f"model '{s.message.name}' is a model.py, which gets the requests of a batch one by one"
        hint = "leave it out: execute() sees each request's own tensors, and their shapes"
    else:
        return
    for field in ("batch_input", "batch_output"):
        if len(getattr(s.message, field)):
            yield s.problem(field, f"{field} is for models that take a batch as one tensor, and {text}", hint)


def _inner(tensor: ModelInput) -> Sequence[int]:
    return tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims


def _shown(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
