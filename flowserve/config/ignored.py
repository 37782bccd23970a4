"""Fields that are read and then left alone: hints about speed or naming on hardware that is not here.

Decided here: which those are. Each is a warning, so that nobody wonders; none changes a result. And what else is worth
a warning: an environment of its own, where a model cannot have one and may lean on it all the same; what somebody wrote
about batches that nothing comes of; and a parameter whose key is nearly one of ours, which would otherwise pass for the
model's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import Message

from flowserve.config.environments import ENVIRONMENT
from flowserve.config.gate import KEYS as GATE_KEYS
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.model_config_pb2 import ModelOptimizationPolicy
from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import Place, Problem

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
# Where Triton loads a library from that chooses which requests are batched together: from there, or where there is one
# of this name in the model's folder or a version's.
BATCH_STRATEGY: Final = "TRITON_BATCH_STRATEGY_PATH"
BATCH_STRATEGY_FILE: Final = "batchstrategy.so"
LIKENESS_MIN: Final = 0.85  # of a slip of the finger; most models' own keys are far below


def ignored_fields(message: ModelConfigProto, source: SourceMap) -> Iterator[Problem]:
    """A warning for each of the ignored fields that say something: servers write out all the others, too."""
    found = {path: attrgetter(path)(message) for path in IGNORED}
    for index, group in enumerate(message.instance_group):
        found |= {f"instance_group[{index}].{field}": getattr(group, field) for field in IGNORED_IN_GROUPS}
    for path, value in found.items():
        if path in source.places and _says_something(value):
            yield Problem(f"{path} is read and ignored", source.place(path), "R15")


def _says_something(value: Any) -> bool:
    if isinstance(value, ModelOptimizationPolicy.PinnedMemoryBuffer):
        return not value.enable  # as it is where nothing is said
    return bool(value.ListFields() if isinstance(value, Message) else value)


def unused_cache(config: ModelConfig) -> Iterator[Problem]:
    """A warning where answers are to be remembered, and there is no cache."""
    if config.response_cache:
        text = "response_cache is not used: there is no cache"
        hint = "flowserve run --cache-config local,size=BYTES has one"
        yield Problem(text, config.source.place("response_cache"), "R15", hint)


def unused_environment(config: ModelConfig, execution: str) -> Iterator[Problem]:
    """A warning where a Python model asks for an environment that it does not get: outside of a process of its own."""
    if config.backend == "python" and config.parameters.get(ENVIRONMENT) and execution != "process":
        text = f"{ENVIRONMENT} is not used: model '{config.name}' runs in the server's own Python environment"
        place = config.source.place(f"parameters[{ENVIRONMENT}]")
        hint = f'by execution "{execution}"; only "process" can have another. Else install there what the model imports'
        yield Problem(text, place, "R9", hint)


def unused_batching(config: ModelConfig, libraries: Sequence[Place]) -> Iterator[Problem]:
    """A warning where a batching strategy of somebody's, or policies for levels that there are not, have no effect.
    `libraries`: every `BATCH_STRATEGY_FILE` in the model's folder.
    """
    strategies = [(BATCH_STRATEGY_FILE, place) for place in libraries]
    if BATCH_STRATEGY in config.parameters:
        strategies.append((BATCH_STRATEGY, config.source.place(f"parameters[{BATCH_STRATEGY}]")))
    for what, place in strategies:
        text = f"{what} is not used: which requests are batched together is the server's own decision"
        hint = "preferred_batch_size, max_queue_delay_microseconds and queue policies are what it can be told"
        yield Problem(text, place, "R15", hint)
    batching = config.dynamic_batching
    if batching is not None and batching.priority_queue_policies and not batching.priority_levels:
        path = "dynamic_batching.priority_queue_policy"
        text = "priority_queue_policy is not used: without priority_levels there is no level that it could be for"
        yield Problem(text, config.source.place(path), "R15", "default_queue_policy is for all requests")


def misspelt_parameters(config: ModelConfig) -> Iterator[Problem]:
    """A warning where a parameter's key is nearly, and not quite, one that the server reads."""
    for key in sorted(config.parameters):  # protobuf's maps have no order, and another one in each process
        close = difflib.get_close_matches(key.casefold(), OURS, n=1, cutoff=LIKENESS_MIN)
        if close and key not in OURS:
            place = config.source.place(f"parameters[{key}]")
            text = f"parameter '{key}' is left to the model; the server does not read it"
            yield Problem(text, place, "R13", f'did you mean "{close[0]}"?')
