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
    DataType,
    ModelInput,
    ModelOutput,
)
from flowserve.config.rules import RuleInput
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Problem
from flowserve.values import shape_text

TENSORRT_PLATFORM: Final = "tensorrt_plan"
FORMATS: Final = (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW)
A_DIMENSION: Final = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def declarations(s: RuleInput) -> Iterator[Problem]:
    """Every tensor has a name, a data type and dims."""
    model = s.message.name
    for path, text, tensor in s.tensors():
        if not tensor.name:
            yield s.problem("M20", path, f"model {path.partition('[')[0]} must specify 'name' for {model}")
        if tensor.data_type == TYPE_INVALID:
            yield s.problem("M21", path, f"model {text} must specify 'data_type' for {model}")
        if not tensor.dims:
            hint = "a batch of single values has dims: [ 1 ]" if s.message.max_batch_size > 0 else ""
            yield s.problem("M22", path, f"model {text} must specify 'dims' for {model}", hint)
        sizes = [("M23", "dims", dim, "dimension") for dim in enumerate(tensor.dims)]
        sizes += [("M24", "reshape.shape", dim, "reshape dimensions") for dim in enumerate(tensor.reshape.shape)]
        for rule, field, (index, dim), what in sizes:
            if dim < 1 and dim != -1:
                problem = f"model {text} {what} {A_DIMENSION} for {model}"
                yield s.problem(rule, f"{path}.{field}[{index}]", problem, f"found {dim}")
    for index, given in enumerate(s.message.input):
        if given.format in FORMATS and len(given.dims) != 3:
            problem = f"model input NHWC/NCHW require 3 dims for {model}"
            yield s.problem("M28", f"input[{index}].format", problem, f"'{given.name}' has {len(given.dims)}")


def reshapes(s: RuleInput) -> Iterator[Problem]:
    """A reshape keeps the element count; between two varying dimensions, both sides have the same number of them."""
    model = s.message.name
    for path, text, tensor in s.tensors():
        if not tensor.HasField("reshape"):
            continue
        dims, shape, where = [*tensor.dims], [*tensor.reshape.shape], f"{path}.reshape"
        if not shape and s.message.max_batch_size == 0:
            problem = f"model {text} cannot have empty reshape for non-batching model as scalar tensors are not"
            yield s.problem("M25", where, f"{problem} supported for {model}")
        if not all(dim >= 1 or dim == -1 for dim in (*dims, *shape)):
            continue
        differs, hint = f"model {text} has different size for dims and reshape for {model}", f"{dims} to {shape}"
        if -1 in dims and -1 in shape:
            ours, theirs = _runs(dims), _runs(shape)
            if len(ours) != len(theirs):
                problem = f"model {text} has different number of variable-size dimensions for dims and reshape"
                yield s.problem("M27", where, f"{problem} for {model}", hint)
            elif ours != theirs:
                yield s.problem("M27", where, differs, hint)
        elif -1 in dims or -1 in shape or prod(dims) != prod(shape):
            yield s.problem("M26", where, differs, hint)


def _runs(dims: Sequence[int]) -> list[int]:
    """The element counts before, between and after the varying dimensions: [2, 4, -1, 6] gives [8, 6]."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def tensorrt_tensors(s: RuleInput) -> Iterator[Problem]:
    """Shape tensors and non-linear formats are for TensorRT."""
    model, is_tensorrt = s.message.name, s.message.platform == TENSORRT_PLATFORM
    for path, text, tensor in s.tensors():
        where, hint = f"{path}.is_non_linear_format_io", f"model {text}"
        if tensor.is_shape_tensor and not is_tensorrt:
            problem = f"shape tensors are only supported for TensorRT platform for {model}"
            yield s.problem("M29", f"{path}.is_shape_tensor", problem, hint)
        if tensor.is_non_linear_format_io and not is_tensorrt:
            problem = f"Non-linear IO format is only supported for the TensorRT platform for {model}"
            yield s.problem("M30", where, problem, hint)
        elif tensor.is_non_linear_format_io and len(tensor.dims) != 3:
            problem = f"Non-linear IO format {path.partition('[')[0]} requires 3 dims for {model}"
            yield s.problem("M30", where, problem, hint)


def unique_names(s: RuleInput) -> Iterator[Problem]:
    for rule, kind, tensors in (("M31", "input", s.message.input), ("M32", "output", s.message.output)):
        names = [tensor.name for tensor in tensors]
        for index, name in enumerate(names):
            if name and name in names[:index]:
                first = s.source.place(f"{kind}[{names.index(name)}]")
                text = f"{kind} '{name}' is specified more than once for {s.message.name}"
                yield s.problem(rule, f"{kind}[{index}].name", text, f"the first is at {first}")


def model_outputs(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    if not s.message.output and (s.message.backend or s.is_ensemble):  # without a backend, completion was not possible
        hint = "list them in config.pbtxt" + ("" if s.is_ensemble else ", or let the model's own file say them")
        yield s.problem("M33", "", f"model '{model}' must specify at least one 'output'", hint)
    for index, tensor in enumerate(s.message.output):
        if file := tensor.label_filename:
            path, text = f"output[{index}].label_filename", f"label file '{file}' of output '{tensor.name}'"
            if why := s.path_error(file):
                yield s.problem("M34", path, f"{text} {why} for {model}")
            elif not (s.folder / file).is_file():
                hint = "its path starts at the model's folder"
                yield s.problem("M34", path, f"{text} does not exist for {model}", hint)


def batch_inputs(s: RuleInput) -> Iterator[Problem]:
    model, inputs = s.message.name, [tensor.name for tensor in s.message.input]
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_input):
        path = f"batch_input[{index}]"
        yield from _sources_exist(s, "M35", path, tensor.Kind.Name(tensor.kind), tensor.source_input)
        if tensor.data_type not in (TYPE_INT32, TYPE_FP32):
            text = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {model}"
            yield s.problem("M36", f"{path}.data_type" if tensor.data_type else path, text)
        if not tensor.target_name:
            yield s.problem("M38", path, f"batch input must specify 'target_name' for {model}")
        for position, target in enumerate(tensor.target_name):
            where = f"{path}.target_name[{position}]"
            if target in inputs:
                text = f"target input name '{target}' is an input that clients send, too, for {model}"
                yield s.problem("M41", where, text, "leave it out of `input`: a batch input is made by the server")
            elif target in seen:
                yield s.problem("M41", where, f"target input name '{target}' can only be specified once for {model}")
            seen.add(target)


def batch_outputs(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    inputs = {tensor.name: tensor for tensor in s.message.input}
    outputs = {tensor.name: tensor for tensor in s.message.output}
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_output):
        path = f"batch_output[{index}]"
        yield from _sources_exist(s, "M39", path, tensor.Kind.Name(tensor.kind), tensor.source_input)
        source = inputs.get(tensor.source_input[0]) if len(tensor.source_input) == 1 else None
        for position, target in enumerate(tensor.target_name):
            where = f"{path}.target_name[{position}]"
            if target not in outputs:
                text = f"unknown target output name '{target}' for {model}"
                yield s.problem("M40", where, text, did_you_mean(target, outputs))
                continue
            if target in seen:
                yield s.problem("M40", where, f"target output name '{target}' can only be specified once for {model}")
            seen.add(target)
            yield from _shape_is_known(s, where, outputs[target], source)


def _sources_exist(s: RuleInput, rule: str, path: str, kind: str, sources: Sequence[str]) -> Iterator[Problem]:
    """A batch input or output has one source, and every source is an input."""
    if len(sources) != 1:
        text = f"{path.partition('[')[0].replace('_', ' ')} kind '{kind}' expects 1 source input, got {len(sources)}"
        yield s.problem(rule, path, f"{text} for {s.message.name}")
    names = [tensor.name for tensor in s.message.input]
    for index, source in enumerate(sources):
        if source not in names:
            text = f"unknown source input name '{source}' for {s.message.name}"
            yield s.problem("M37", f"{path}.source_input[{index}]", text, did_you_mean(source, names))


def _shape_is_known(s: RuleInput, path: str, target: ModelOutput, source: ModelInput | None) -> Iterator[Problem]:
    """The varying dimensions of a batch output are those of its source."""
    if target.HasField("reshape"):
        text = f"target output name '{target.name}' has a reshape for {s.message.name}"
        yield s.problem("M42", path, text, "write the shape that clients get as its dims")
    elif source is not None:
        dims = source.reshape.shape if source.HasField("reshape") else source.dims
        if -1 in target.dims[len(dims) :]:
            text = f"target output name '{target.name}' varies where input '{source.name}' has no dimension"
            ours, theirs = (shape_text(each) for each in (target.dims, dims))
            yield s.problem("M42", path, f"{text} for {s.message.name}", f"dims {ours} take their -1s from {theirs}")


def whole_batches(s: RuleInput) -> Iterator[Problem]:
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
            yield s.problem("M43", field, f"{field} is for models that take a batch as one tensor, and {text}", hint)


def warmup(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    most = max(m.max_batch_size, 1)
    known = {given.name: given for given in (*m.input, *_sequence_inputs(s))}
    for index, sample in enumerate(m.model_warmup):
        for name in sorted(sample.inputs):
            given, path = sample.inputs[name], f"model_warmup[{index}].inputs[{name}]"
            file, dims = given.input_data_file, [*given.dims]
            if any(dim < 0 for dim in dims):
                text = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                yield s.problem("M55", f"{path}.dims", f"{text} for {m.name}")
            if given.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set for {m.name}"
                yield s.problem("M55", path, text, "write zero_data: true, random_data: true or input_data_file")
            if file:
                text, where = f"warmup file '{file}' of input '{name}'", f"{path}.input_data_file"
                if why := s.path_error("warmup", file):
                    yield s.problem("M56", where, f"{text} {why} for {m.name}")
                elif not (s.folder / "warmup" / file).is_file():
                    yield s.problem(
                        "M56", where, f"{text} does not exist for {m.name}", f"put it into {s.folder.name}/warmup/"
                    )
            if name in known:
                yield from _sample_fits(s, path, known[name], given.data_type, dims)
            elif m.input:  # if none is listed, completion was not possible
                text = f"warmup input '{name}' is not an input of model {m.name}"
                yield s.problem("M57", path, text, did_you_mean(name, known) or f"it has {', '.join(known)}")
        if sample.batch_size > most:
            text = f"warmup sample '{sample.name}' of model {m.name} has batch_size {sample.batch_size}"
            yield s.problem("M58", f"model_warmup[{index}].batch_size", text, f"at most {most} requests run at once")


def _sequence_inputs(s: RuleInput) -> Iterator[ModelInput]:
    """The control and state inputs of a sequence model, which it has besides those it lists."""
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
        yield s.problem("M57", f"{path}.data_type", f"{what} has data_type {found}", f"the input is {wanted}")
    wanted_dims = [*declared.dims]
    is_alike = len(dims) == len(wanted_dims) and all(w in (-1, d) for w, d in zip(wanted_dims, dims, strict=True))
    if not is_alike and all(dim >= 0 for dim in dims):
        hint = f"the input's are {wanted_dims}, without the batch dimension"
        yield s.problem("M57", f"{path}.dims", f"{what} has dims {dims}", hint)
