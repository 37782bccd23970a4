"""Rules for inputs and outputs, reshapes, label files, batch inputs and batch outputs, and warm-up samples.

Decides the checks that Triton makes, with its texts; that names are unique and a model has outputs; and errors of batch
inputs and outputs that Triton finds only when a batch runs: inputs that clients cannot send because the server computes
them, unknown shapes of batch outputs, and models that do not take a batch as one tensor. Does not compare with the
model's own file (`complete`, backends).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from flowserve.config.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INVALID,
    BatchInput,
    BatchOutput,
    DataType,
    ModelInput,
)
from flowserve.config.rules.subject import RuleInput
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Problem

TENSORRT_PLATFORM: Final = "tensorrt_plan"
FORMATS: Final = (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW)
A_DIMENSION: Final = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def every_tensor_has_a_name(s: RuleInput) -> Iterator[Problem]:
    for path, _, tensor in s.tensors():
        if not tensor.name:
            yield s.problem(path, f"model {path.partition('[')[0]} must specify 'name' for {s.message.name}")


def every_tensor_has_a_data_type(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.data_type == TYPE_INVALID:
            yield s.problem(path, f"model {text} must specify 'data_type' for {s.message.name}")


def every_tensor_has_dims(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if not tensor.dims:
            hint = "a batch of single values has dims: [ 1 ]" if s.message.max_batch_size > 0 else ""
            yield s.problem(path, f"model {text} must specify 'dims' for {s.message.name}", hint)


def every_dim_is_a_size(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        yield from _sizes(s, f"{path}.dims", tensor.dims, f"model {text} dimension")


def every_reshape_dim_is_a_size(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        yield from _sizes(s, f"{path}.reshape.shape", tensor.reshape.shape, f"model {text} reshape dimensions")


def _sizes(s: RuleInput, path: str, dims: Sequence[int], text: str) -> Iterator[Problem]:
    for index, dim in enumerate(dims):
        if dim < 1 and dim != -1:
            yield s.problem(f"{path}[{index}]", f"{text} {A_DIMENSION} for {s.message.name}", f"found {dim}")


def no_empty_reshape_without_batching(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.HasField("reshape") and not tensor.reshape.shape and s.message.max_batch_size == 0:
            problem = (
                f"model {text} cannot have empty reshape for non-batching model as scalar tensors are not supported"
            )
            yield s.problem(f"{path}.reshape", f"{problem} for {s.message.name}")


def reshape_keeps_the_element_count(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if not tensor.HasField("reshape") or not _all_sizes([*tensor.dims, *tensor.reshape.shape]):
            continue
        if -1 in tensor.dims and -1 in tensor.reshape.shape:
            continue
        one = -1 if -1 in tensor.dims else prod(tensor.dims)
        other = -1 if -1 in tensor.reshape.shape else prod(tensor.reshape.shape)
        if one != other:
            hint = f"{list(tensor.dims)} to {list(tensor.reshape.shape)}"
            yield s.problem(
                f"{path}.reshape", f"model {text} has different size for dims and reshape for {s.message.name}", hint
            )


def reshape_keeps_what_varies(s: RuleInput) -> Iterator[Problem]:
    """Between two varying dimensions, both sides must have the same number of elements."""
    for path, text, tensor in s.tensors():
        dims, shape = tensor.dims, tensor.reshape.shape
        if -1 not in dims or -1 not in shape or not _all_sizes([*dims, *shape]):
            continue
        ours, theirs = _runs(dims), _runs(shape)
        hint = f"{list(dims)} to {list(shape)}"
        if len(ours) != len(theirs):
            problem = f"model {text} has different number of variable-size dimensions for dims and reshape"
            yield s.problem(f"{path}.reshape", f"{problem} for {s.message.name}", hint)
        elif ours != theirs:
            problem = f"model {text} has different size for dims and reshape for {s.message.name}"
            yield s.problem(f"{path}.reshape", problem, hint)


def image_formats_have_three_dims(s: RuleInput) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.input):
        if tensor.format in FORMATS and len(tensor.dims) != 3:
            problem = f"model input NHWC/NCHW require 3 dims for {s.message.name}"
            yield s.problem(f"input[{index}].format", problem, f"'{tensor.name}' has {len(tensor.dims)}")


def shape_tensors_are_for_tensorrt(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.is_shape_tensor and s.message.platform != TENSORRT_PLATFORM:
            problem = f"shape tensors are only supported for TensorRT platform for {s.message.name}"
            yield s.problem(f"{path}.is_shape_tensor", problem, f"model {text}")


def non_linear_formats_are_for_tensorrt(s: RuleInput) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if not tensor.is_non_linear_format_io:
            continue
        where = f"{path}.is_non_linear_format_io"
        if s.message.platform != TENSORRT_PLATFORM:
            problem = f"Non-linear IO format is only supported for the TensorRT platform for {s.message.name}"
            yield s.problem(where, problem, f"model {text}")
        elif len(tensor.dims) != 3:
            kind = path.partition("[")[0]
            yield s.problem(where, f"Non-linear IO format {kind} requires 3 dims for {s.message.name}", f"model {text}")


def no_input_name_twice(s: RuleInput) -> Iterator[Problem]:
    yield from _twice(s, "input", [tensor.name for tensor in s.message.input])


def no_output_name_twice(s: RuleInput) -> Iterator[Problem]:
    yield from _twice(s, "output", [tensor.name for tensor in s.message.output])


def models_have_outputs(s: RuleInput) -> Iterator[Problem]:
    if not s.message.output and (s.message.backend or s.is_ensemble):  # without a backend, completion was not possible
        hint = "list them in config.pbtxt" + ("" if s.is_ensemble else ", or let the model's own file say them")
        yield s.problem("", f"model '{s.message.name}' must specify at least one 'output'", hint)


def label_files_are_inside(s: RuleInput) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.output):
        file = tensor.label_filename
        if not file:
            continue
        path, text = f"output[{index}].label_filename", f"label file '{file}' of output '{tensor.name}'"
        why = s.path_error(file)
        if why:
            yield s.problem(path, f"{text} {why} for {s.message.name}")
        elif not (s.folder / file).is_file():
            yield s.problem(
                path, f"{text} does not exist for {s.message.name}", "its path starts at the model's folder"
            )


def _twice(s: RuleInput, kind: str, names: Sequence[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name and name in names[:index]:
            first = s.source.place(f"{kind}[{names.index(name)}]")
            text = f"{kind} '{name}' is specified more than once for {s.message.name}"
            yield s.problem(f"{kind}[{index}].name", text, f"the first is at {first}")


def _all_sizes(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _runs(dims: Sequence[int]) -> list[int]:
    """The element counts before, between and after the varying dimensions: [2, 4, -1, 6] gives [8, 6]."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def _batch_tensors(s: RuleInput) -> Iterator[tuple[str, BatchInput | BatchOutput]]:
    """(path, tensor) of every batch input, then every batch output."""
    yield from ((f"batch_input[{index}]", tensor) for index, tensor in enumerate(s.message.batch_input))
    yield from ((f"batch_output[{index}]", tensor) for index, tensor in enumerate(s.message.batch_output))


def batch_inputs_have_one_source(s: RuleInput) -> Iterator[Problem]:
    yield from _one_source(s, BatchInput)


def batch_outputs_have_one_source(s: RuleInput) -> Iterator[Problem]:
    yield from _one_source(s, BatchOutput)


def _one_source(s: RuleInput, wanted: type[BatchInput | BatchOutput]) -> Iterator[Problem]:
    for path, tensor in _batch_tensors(s):
        if isinstance(tensor, wanted) and len(tensor.source_input) != 1:
            text = f"{path.partition('[')[0].replace('_', ' ')} kind '{tensor.Kind.Name(tensor.kind)}'"
            text = f"{text} expects 1 source input, got {len(tensor.source_input)}"
            yield s.problem(path, f"{text} for {s.message.name}")


def batch_inputs_are_numbers(s: RuleInput) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_input):
        if tensor.data_type not in (TYPE_INT32, TYPE_FP32):
            text = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {s.message.name}"
            path = f"batch_input[{index}]"
            yield s.problem(f"{path}.data_type" if tensor.data_type else path, text)


def batch_sources_exist(s: RuleInput) -> Iterator[Problem]:
    names = [tensor.name for tensor in s.message.input]
    for path, tensor in _batch_tensors(s):
        for index, source in enumerate(tensor.source_input):
            if source not in names:
                text = f"unknown source input name '{source}' for {s.message.name}"
                yield s.problem(f"{path}.source_input[{index}]", text, did_you_mean(source, names))


def batch_inputs_have_a_target(s: RuleInput) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.batch_input):
        if not tensor.target_name:
            yield s.problem(f"batch_input[{index}]", f"batch input must specify 'target_name' for {s.message.name}")


def batch_output_targets_exist_once(s: RuleInput) -> Iterator[Problem]:
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


def batch_input_targets_are_their_own(s: RuleInput) -> Iterator[Problem]:
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


def batch_output_shapes_are_known(s: RuleInput) -> Iterator[Problem]:
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


def batch_tensors_are_for_whole_batches(s: RuleInput) -> Iterator[Problem]:
    """A model.py gets requests instead of a batch, and the steps of an ensemble have their own batches."""
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


# ---------------------------------------------------------------------------------------------- warm-up


def warmup_inputs_are_whole(s: RuleInput) -> Iterator[Problem]:
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            given, path = sample.inputs[name], f"model_warmup[{index}].inputs[{name}]"
            if any(dim < 0 for dim in given.dims):
                text = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                yield s.problem(f"{path}.dims", f"{text} for {s.message.name}")
            if given.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set for {s.message.name}"
                yield s.problem(path, text, "write zero_data: true, random_data: true or input_data_file")


def warmup_files_exist_inside(s: RuleInput) -> Iterator[Problem]:
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            file = sample.inputs[name].input_data_file
            if file and (why := s.path_error("warmup", file)):
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                yield s.problem(path, f"warmup file '{file}' of input '{name}' {why} for {s.message.name}")
            elif file and not (s.folder / "warmup" / file).is_file():
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                text = f"warmup file '{file}' of input '{name}' does not exist for {s.message.name}"
                yield s.problem(path, text, f"put it into {s.name}/warmup/")


def warmup_inputs_exist(s: RuleInput) -> Iterator[Problem]:
    """A sequence model has further inputs besides those it lists. If none is listed, completion was not possible."""
    known = {given.name: given for given in (*s.message.input, *_sequence_inputs(s))}
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            path = f"model_warmup[{index}].inputs[{name}]"
            if name in known:
                yield from _sample_fits(
                    s, path, known[name], sample.inputs[name].data_type, [*sample.inputs[name].dims]
                )
            elif s.message.input:
                text = f"warmup input '{name}' is not an input of model {s.message.name}"
                yield s.problem(path, text, did_you_mean(name, known) or f"it has {', '.join(known)}")


def _sequence_inputs(s: RuleInput) -> Iterator[ModelInput]:
    """The control and state inputs of a sequence model."""
    for tensor in s.message.sequence_batching.control_input:
        for control in tensor.control[:1]:
            if control.int32_false_true:
                data_type = TYPE_INT32
            else:
                data_type = TYPE_FP32 if control.fp32_false_true else control.data_type or TYPE_BOOL
            yield ModelInput(name=tensor.name, data_type=data_type, dims=[1])
    for state in s.message.sequence_batching.state:
        yield ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _sample_fits(s: RuleInput, path: str, declared: ModelInput, data_type: int, dims: list[int]) -> Iterator[Problem]:
    what = f"warmup input '{declared.name}' of model {s.message.name}"
    if data_type != declared.data_type:
        found, wanted = (DataType.Name(number) for number in (data_type, declared.data_type))
        yield s.problem(f"{path}.data_type", f"{what} has data_type {found}", f"the input is {wanted}")
    wanted_dims = [*declared.dims]
    is_alike = len(dims) == len(wanted_dims) and all(w in (-1, d) for w, d in zip(wanted_dims, dims, strict=True))
    if not is_alike and all(dim >= 0 for dim in dims):
        hint = f"the input's are {wanted_dims}, without the batch dimension"
        yield s.problem(f"{path}.dims", f"{what} has dims {dims}", hint)


def warmup_batches_fit(s: RuleInput) -> Iterator[Problem]:
    most = max(s.message.max_batch_size, 1)
    for index, sample in enumerate(s.message.model_warmup):
        if sample.batch_size > most:
            text = f"warmup sample '{sample.name}' of model {s.message.name} has batch_size {sample.batch_size}"
            yield s.problem(f"model_warmup[{index}].batch_size", text, f"at most {most} requests run at once")
