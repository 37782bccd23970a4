"""Rules about warm-up samples.

Decided here: what a sample must say, as on Triton, and what can be told to be wrong without running it. What its
tensors hold is decided in runtime/warmup.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.config.model_config_pb2 import TYPE_BOOL, TYPE_FP32, TYPE_INT32, DataType, ModelInput
from flowserve.config.rules.subject import Subject
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Problem


def warmup_inputs_are_whole(s: Subject) -> Iterator[Problem]:
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            given, path = sample.inputs[name], f"model_warmup[{index}].inputs[{name}]"
            if any(dim < 0 for dim in given.dims):
                text = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                yield s.problem(f"{path}.dims", f"{text} for {s.message.name}")
            if given.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set for {s.message.name}"
                yield s.problem(path, text, "write zero_data: true, random_data: true or input_data_file")


def warmup_files_are_there_and_inside(s: Subject) -> Iterator[Problem]:
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            file = sample.inputs[name].input_data_file
            if file and (why := s.escapes("warmup", file)):
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                yield s.problem(path, f"warmup file '{file}' of input '{name}' {why} for {s.message.name}")
            elif file and not (s.folder / "warmup" / file).is_file():
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                text = f"warmup file '{file}' of input '{name}' does not exist for {s.message.name}"
                yield s.problem(path, text, f"put it into {s.name}/warmup/")


def warmup_inputs_exist(s: Subject) -> Iterator[Problem]:
    """A model that takes sequences has inputs beside those it lists. Where none is listed, the model's own file could
    not be asked.
    """
    known = {given.name: given for given in (*s.message.input, *_of_sequences(s))}
    for index, sample in enumerate(s.message.model_warmup):
        for name in sorted(sample.inputs):
            path = f"model_warmup[{index}].inputs[{name}]"
            if name in known:
                yield from _fits(s, path, known[name], sample.inputs[name].data_type, [*sample.inputs[name].dims])
            elif s.message.input:
                text = f"warmup input '{name}' is not an input of model {s.message.name}"
                yield s.problem(path, text, did_you_mean(name, known) or f"it has {', '.join(known)}")


def _of_sequences(s: Subject) -> Iterator[ModelInput]:
    """Its controls and its states, as inputs."""
    for tensor in s.message.sequence_batching.control_input:
        for control in tensor.control[:1]:
            if control.int32_false_true:
                data_type = TYPE_INT32
            else:
                data_type = TYPE_FP32 if control.fp32_false_true else control.data_type or TYPE_BOOL
            yield ModelInput(name=tensor.name, data_type=data_type, dims=[1])
    for state in s.message.sequence_batching.state:
        yield ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _fits(s: Subject, path: str, declared: ModelInput, data_type: int, dims: list[int]) -> Iterator[Problem]:
    what = f"warmup input '{declared.name}' of model {s.message.name}"
    if data_type != declared.data_type:
        found, wanted = (DataType.Name(number) for number in (data_type, declared.data_type))
        yield s.problem(f"{path}.data_type", f"{what} has data_type {found}", f"the input is {wanted}")
    wanted_dims = [*declared.dims]
    is_alike = len(dims) == len(wanted_dims) and all(w in (-1, d) for w, d in zip(wanted_dims, dims, strict=True))
    if not is_alike and all(dim >= 0 for dim in dims):
        hint = f"the input's are {wanted_dims}, without the batch dimension"
        yield s.problem(f"{path}.dims", f"{what} has dims {dims}", hint)


def warmup_batches_fit(s: Subject) -> Iterator[Problem]:
    most = max(s.message.max_batch_size, 1)
    for index, sample in enumerate(s.message.model_warmup):
        if sample.batch_size > most:
            text = f"warmup sample '{sample.name}' of model {s.message.name} has batch_size {sample.batch_size}"
            yield s.problem(f"model_warmup[{index}].batch_size", text, f"at most {most} requests run at once")
