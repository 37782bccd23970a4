"""Rules about the parameters that limit how much of a deployment is under way at once."""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.config.gate import KEYS, what_is_wrong
from flowserve.config.rules.subject import Subject
from flowserve.errors import Problem


def gate_parameters_are_right(s: Subject) -> Iterator[Problem]:
    for key in KEYS:
        if key not in s.message.parameters:
            continue
        value = s.message.parameters[key].string_value
        if why := what_is_wrong(key, value):
            yield s.problem(f"parameters[{key}]", f"model '{s.message.name}': {key} is '{value}'; {why}")
