"""Rules about instances on GPUs: those that are listed, and those that are there.

Decided here: what is said to somebody whose model asks for a GPU that this machine has not, or that its backend could
do nothing with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowserve.config.model_config_pb2 import ModelInstanceGroup
from flowserve.config.rules.subject import Subject
from flowserve.errors import Problem

FORCE_CPU: Final = "FORCE_CPU_ONLY_INPUT_TENSORS"


def only_gpu_groups_list_gpus(s: Subject) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        name, path = _name(s, index), f"instance_group[{index}].gpus"
        if group.gpus and group.kind in (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL):
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            yield s.problem(path, f"{name} has kind {kind} but specifies one or more GPUs")
        for gpu in group.gpus:
            if gpu < 0:
                yield s.problem(path, f"{name} specifies invalid or unsupported gpu id {gpu}")


def no_gpu_is_listed_twice(s: Subject) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        for gpu in sorted({gpu for gpu in group.gpus if [*group.gpus].count(gpu) > 1}):
            text = f"{_name(s, index)} lists gpu id {gpu} twice"
            yield s.problem(f"instance_group[{index}].gpus", text, "for several instances on each GPU, write `count`")


def gpus_that_are_asked_for_are_there(s: Subject) -> Iterator[Problem]:
    """Groups that leave their kind open go to the CPU instead."""
    for index, group in enumerate(s.message.instance_group):
        if group.kind != ModelInstanceGroup.KIND_GPU or s.gpus.is_assumed:
            continue
        name, path = _name(s, index), f"instance_group[{index}]"
        if not s.gpus.ids:
            reason = f": {s.gpus.absence}" if s.gpus.absence else ""
            hint = (
                "write kind: KIND_CPU or leave `kind` out, or start with --gpu=off, which runs such models on the CPU"
            )
            yield s.problem(path, f"{name} has kind KIND_GPU but no GPUs are available{reason}", hint)
            continue
        for gpu in group.gpus:
            if gpu >= 0 and gpu not in s.gpus.ids:
                text = f"{name} specifies invalid or unsupported gpu id {gpu}. GPUs that can be used are:"
                yield s.problem(f"{path}.gpus", f"{text} {', '.join(map(str, s.gpus.ids))}")


def gpu_groups_are_for_backends_that_use_gpus(s: Subject) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        if group.kind == ModelInstanceGroup.KIND_GPU and not s.uses_gpus:
            text = f"{_name(s, index)} has kind KIND_GPU but backend '{s.message.backend}' computes on the CPU only"
            yield s.problem(f"instance_group[{index}]", text, "write kind: KIND_CPU, or leave `kind` out")


def inputs_are_forced_to_the_cpu_or_not(s: Subject) -> Iterator[Problem]:
    """A parameter of Triton's Python backend."""
    if FORCE_CPU not in s.message.parameters:
        return
    value = s.message.parameters[FORCE_CPU].string_value
    if value not in ("yes", "no"):
        text = f"Incorrect value for {FORCE_CPU}: '{value}' of model '{s.message.name}'"
        yield s.problem(f"parameters[{FORCE_CPU}]", text, 'write "yes" (the default) or "no"')


def _name(s: Subject, index: int) -> str:
    group = s.message.instance_group[index]
    return f"instance group {group.name or f'{s.message.name}_{index}'} of model {s.message.name}"
