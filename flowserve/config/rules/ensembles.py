"""Rules about an ensemble that need nothing but its own file.

Decided here: which fields an ensemble has and has not, and that every step is whole. How its tensors join, and whether
its models exist, is judged in graph/rules.py, where all the configurations are known.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.config.rules.subject import Subject
from flowserve.errors import Problem

SCHEDULING = "ensemble_scheduling"


def no_instances(s: Subject) -> Iterator[Problem]:
    if s.is_ensemble and s.message.instance_group:
        text = f"instance group should not be specified for ensemble '{s.message.name}'"
        yield s.problem("instance_group", text, "give the models of its steps instances instead")


def no_optimization(s: Subject) -> Iterator[Problem]:
    if s.is_ensemble and s.message.HasField("optimization"):
        text = f"optimization should not be specified for ensemble '{s.message.name}'"
        yield s.problem("optimization", text, "it belongs into the models of its steps")


def no_warmup(s: Subject) -> Iterator[Problem]:
    if s.is_ensemble and s.message.model_warmup:
        text = f"model_warmup can not be specified for ensemble '{s.message.name}'"
        yield s.problem("model_warmup", text, "warm up the models of its steps instead")


def has_steps(s: Subject) -> Iterator[Problem]:
    if s.message.HasField(SCHEDULING) and not s.message.ensemble_scheduling.step:
        yield s.problem(SCHEDULING, f"must specify 'step' for ensemble '{s.message.name}'")


def every_step_is_whole(s: Subject) -> Iterator[Problem]:
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        given = {"model_name": step.model_name, "input_map": step.input_map, "output_map": step.output_map}
        for field, value in given.items():
            if not value:
                text = f"must specify '{field}' in step {index} of ensemble '{s.message.name}'"
                yield s.problem(f"{SCHEDULING}.step[{index}]", text)


def every_mapping_has_two_names(s: Subject) -> Iterator[Problem]:
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        for field, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
            for port, tensor in mapping.items():
                if not port or not tensor:
                    missing = "value" if port else "key"
                    text = f"{field} entry without '{missing}' in step {index} of ensemble '{s.message.name}'"
                    hint = "key is the model's tensor, value the ensemble's"
                    yield s.problem(f"{SCHEDULING}.step[{index}].{field}[{port}]", text, hint)
