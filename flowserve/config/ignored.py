"""Fields that are read and then left alone: hints about speed or naming on hardware that is not here.

Decided here: which those are. Each is told once per load in the log, so that nobody wonders. And the parameters that
are worth a warning: an environment of its own, where a model cannot have one and may lean on it all the same, and a key
that is nearly one of ours, which would otherwise pass for the model's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from flowserve.config.environments import ENVIRONMENT
from flowserve.config.gate import KEYS as GATE_KEYS
from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import Problem

IGNORED: Final = (
    "optimization.priority",
    "optimization.cuda.busy_wait_events",
    "optimization.cuda.output_copy_stream",
    "optimization.execution_accelerators.cpu_execution_accelerator",
    "optimization.input_pinned_memory",
    "optimization.output_pinned_memory",
    "optimization.gather_kernel_buffer_threshold",
    "optimization.eager_batching",
    "cc_model_filenames",
    "metric_tags",
    "model_metrics",
    "runtime",
)
IGNORED_IN_GROUPS: Final = ("secondary_devices", "host_policy")
OURS: Final = ("execution", "execution_timeout", *GATE_KEYS)
LIKENESS_MIN: Final = 0.85  # of a slip of the finger; most models' own keys are far below


def ignored_fields(source: SourceMap, group_count: int) -> Iterator[str]:
    """The paths of the ignored fields that the user wrote."""
    yield from (path for path in IGNORED if path in source.places)
    for index in range(group_count):
        for field in IGNORED_IN_GROUPS:
            if (path := f"instance_group[{index}].{field}") in source.places:
                yield path


def unused_environment(config: ModelConfig, execution: str) -> Iterator[Problem]:
    """A warning where a Python model asks for an environment that it does not get: outside of a process of its own."""
    if config.backend == "python" and config.parameters.get(ENVIRONMENT) and execution != "process":
        text = f"{ENVIRONMENT} is not used: model '{config.name}' runs in the server's own Python environment"
        place = config.source.place(f"parameters[{ENVIRONMENT}]")
        hint = f'by execution "{execution}"; only "process" can have another. Else install there what the model imports'
        yield Problem(text, place, "R9", hint)


def misspelt_parameters(config: ModelConfig) -> Iterator[Problem]:
    """A warning where a parameter's key is nearly, and not quite, one that the server reads."""
    for key in sorted(config.parameters):  # protobuf's maps have no order, and another one in each process
        close = difflib.get_close_matches(key.casefold(), OURS, n=1, cutoff=LIKENESS_MIN)
        if close and key not in OURS:
            place = config.source.place(f"parameters[{key}]")
            text = f"parameter '{key}' is left to the model; the server does not read it"
            yield Problem(text, place, "R13", f'did you mean "{close[0]}"?')
