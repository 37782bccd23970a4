"""Rules about inputs and outputs, reshapes and label files.

Decided here: what Triton decides when it validates a model's tensors, with its texts, plus that no name is used twice
and that a model has outputs. Nothing here compares with the model's own file; complete.py does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from flowserve.config.model_config_pb2 import TYPE_INVALID, ModelInput
from flowserve.config.rules.subject import Subject
from flowserve.errors import Problem

TENSORRT_PLATFORM: Final = "tensorrt_plan"
FORMATS: Final = (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW)
A_DIMENSION: Final = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def every_tensor_has_a_name(s: Subject) -> Iterator[Problem]:
    for path, _, tensor in s.tensors():
        if not tensor.name:
            yield s.problem(path, f"model {path.partition('[')[0]} must specify 'name' for {s.message.name}")


def every_tensor_has_a_data_type(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.data_type == TYPE_INVALID:
            yield s.problem(path, f"model {text} must specify 'data_type' for {s.message.name}")


def every_tensor_has_dims(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if not tensor.dims:
            hint = "a batch of single values has dims: [ 1 ]" if s.message.max_batch_size > 0 else ""
            yield s.problem(path, f"model {text} must specify 'dims' for {s.message.name}", hint)


def every_dim_is_a_size(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        for index, dim in enumerate(tensor.dims):
            if dim < 1 and dim != -1:
                problem = f"model {text} dimension {A_DIMENSION} for {s.message.name}"
                yield s.problem(f"{path}.dims[{index}]", problem, f"found {dim}")


def every_reshape_dim_is_a_size(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        for index, dim in enumerate(tensor.reshape.shape):
            if dim < 1 and dim != -1:
                problem = f"model {text} reshape dimensions {A_DIMENSION} for {s.message.name}"
                yield s.problem(f"{path}.reshape.shape[{index}]", problem, f"found {dim}")


def no_empty_reshape_without_batching(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.HasField("reshape") and not tensor.reshape.shape and s.message.max_batch_size == 0:
            problem = (
                f"model {text} cannot have empty reshape for non-batching model as scalar tensors are not supported"
            )
            yield s.problem(f"{path}.reshape", f"{problem} for {s.message.name}")


def reshape_keeps_the_element_count(s: Subject) -> Iterator[Problem]:
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


def reshape_keeps_what_varies(s: Subject) -> Iterator[Problem]:
    """Between two dimensions that vary there must lie the same number of elements on both sides."""
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


def image_formats_have_three_dims(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.input):
        if tensor.format in FORMATS and len(tensor.dims) != 3:
            problem = f"model input NHWC/NCHW require 3 dims for {s.message.name}"
            yield s.problem(f"input[{index}].format", problem, f"'{tensor.name}' has {len(tensor.dims)}")


def shape_tensors_are_for_tensorrt(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.is_shape_tensor and s.message.platform != TENSORRT_PLATFORM:
            problem = f"shape tensors are only supported for TensorRT platform for {s.message.name}"
            yield s.problem(f"{path}.is_shape_tensor", problem, f"model {text}")


def non_linear_formats_are_for_tensorrt(s: Subject) -> Iterator[Problem]:
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


def no_input_name_twice(s: Subject) -> Iterator[Problem]:
    yield from _twice(s, "input", [tensor.name for tensor in s.message.input])


def no_output_name_twice(s: Subject) -> Iterator[Problem]:
    yield from _twice(s, "output", [tensor.name for tensor in s.message.output])


def models_have_outputs(s: Subject) -> Iterator[Problem]:
    if not s.message.output and (s.message.backend or s.is_ensemble):  # without a backend nobody could have said
        hint = "list them in config.pbtxt" + ("" if s.is_ensemble else ", or let the model's own file say them")
        yield s.problem("", f"model '{s.message.name}' must specify at least one 'output'", hint)


def label_files_are_inside(s: Subject) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.output):
        file = tensor.label_filename
        if not file:
            continue
        path, text = f"output[{index}].label_filename", f"label file '{file}' of output '{tensor.name}'"
        why = s.escapes(file)
        if why:
            yield s.problem(path, f"{text} {why} for {s.message.name}")
        elif not (s.folder / file).is_file():
            yield s.problem(
                path, f"{text} does not exist for {s.message.name}", "its path starts at the model's folder"
            )


def _twice(s: Subject, kind: str, names: Sequence[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name and name in names[:index]:
            first = s.source.place(f"{kind}[{names.index(name)}]")
            text = f"{kind} '{name}' is specified more than once for {s.message.name}"
            yield s.problem(f"{kind}[{index}].name", text, f"the first is at {first}")


def _all_sizes(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _runs(dims: Sequence[int]) -> list[int]:
    """The element counts before, between and after the dimensions that vary: [2, 4, -1, 6] is [8, 6]."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs
