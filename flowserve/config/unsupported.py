"""Unsupported features in valid configurations: refusals and warnings.

Decides: a feature that would change results is refused by name. Ignored with a warning are hints about performance, or
about hardware that flowserve does not manage. Further warnings: a Python environment that the model cannot get,
batching settings without effect, a cache that does not exist, an output that is listed twice, and a parameter key that
is nearly one of flowserve's and would otherwise pass for the model's own. Callers: `load`, `repository`, `runtime`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import Message

from flowserve.config import model_config_pb2 as pb
from flowserve.config.backends import OTHER_BACKENDS
from flowserve.config.build import TWICE
from flowserve.config.parameters import ADMISSION_KEYS, ENVIRONMENT
from flowserve.config.rules import RuleInput
from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import Place, Problem

OTHER_BACKEND: Final = "N22"  # the rule that refuses a backend that is not installed


def refusals(s: RuleInput, available: frozenset[str]) -> Iterator[Problem]:
    """The features that are refused; of Triton's backends those that are not `available`, each with an alternative."""
    m = s.message

    def not_yet(rule: str, path: str, feature: str, hint: str = "") -> Problem:
        return s.problem(rule, path, f"model '{m.name}': {feature} is not supported yet", hint)

    # An ensemble's own flag has no meaning, because its steps decide.
    if m.model_transaction_policy.decoupled and not s.is_ensemble and m.backend == "onnxruntime":
        text = "a decoupled model_transaction_policy of an ONNX model"
        yield not_yet("N2", "model_transaction_policy.decoupled", text, "put it behind a model.py that is decoupled")
    for rule, field in (("N13", "is_shape_tensor"), ("N14", "is_non_linear_format_io")):
        for path, text, tensor in s.tensors():
            if getattr(tensor, field):
                yield not_yet(rule, f"{path}.{field}", f"{field} of {text}")
    for index, step in enumerate(m.ensemble_scheduling.step):
        if step.model_namespace:
            path = f"ensemble_scheduling.step[{index}].model_namespace"
            yield not_yet("N17", path, f"model_namespace of step {index}")
    if m.model_operations.op_library_filename:
        yield not_yet("N18", "model_operations", "model_operations (custom operators)")
    if m.model_repository_agents.agents:  # an agent may verify a checksum or decrypt the model
        yield not_yet("N19", "model_repository_agents", "model_repository_agents")
    if s.parameter("execution") == "ray":
        yield not_yet(
            "N21",
            "parameters[execution]",
            'execution "ray"',
            "name the model in a placement file, as docs/cluster.md describes",
        )
    if m.backend in OTHER_BACKENDS and m.backend not in available:
        path = "backend" if "backend" in s.source.places else "platform"
        yield not_yet(OTHER_BACKEND, path, m.platform or m.backend, OTHER_BACKENDS[m.backend])


# ---------------------------------------------------------------------------------------------- warnings

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
OURS: Final = ("execution", "execution_timeout", *ADMISSION_KEYS)
# Triton loads a custom batching strategy from this parameter's path, or from a library of this name in the model's
# folder or a version's.
BATCH_STRATEGY: Final = "TRITON_BATCH_STRATEGY_PATH"
BATCH_STRATEGY_FILE: Final = "batchstrategy.so"
LIKENESS_MIN: Final = 0.85  # similarity of a typing error; most models' own keys are far below


def ignored_fields(message: pb.ModelConfig, source: SourceMap) -> Iterator[Problem]:
    """A warning for each ignored field with a non-default value: servers write out fields at their default too."""
    found = {path: attrgetter(path)(message) for path in IGNORED}
    for index, group in enumerate(message.instance_group):
        found |= {f"instance_group[{index}].{field}": getattr(group, field) for field in IGNORED_IN_GROUPS}
    for path, value in found.items():
        if path in source.places and _has_effect(value):
            yield Problem(f"{path} is read and ignored", source.place(path), "R15")


def _has_effect(value: Any) -> bool:
    if isinstance(value, pb.ModelOptimizationPolicy.PinnedMemoryBuffer):
        return not value.enable  # enabled is the default
    return bool(value.ListFields() if isinstance(value, Message) else value)


def repeated_outputs(message: pb.ModelConfig, source: SourceMap) -> Iterator[Problem]:
    """A warning for each output that is listed again. The first listing counts, as on Triton."""
    first: dict[str, str] = {}
    for index, tensor in enumerate(message.output):
        path = first.setdefault(tensor.name, f"output[{index}]")
        if tensor.name and path != f"output[{index}]":
            text = f"output '{tensor.name}' is listed more than once; the first one counts"
            hint = "" if source.place(path).path else f"it is at {source.place(path)}"
            yield Problem(text, source.place(f"output[{index}]"), TWICE, hint)


def unused_whole_batches(s: RuleInput) -> Iterator[Problem]:
    """A warning for batch_input and batch_output where no model takes a batch as one tensor: a model.py gets requests,
    and the steps of an ensemble have their own batches.
    """
    if s.is_ensemble:
        text = "an ensemble runs no batches of its own"
        hint = "write it into the configuration of the step that needs it"
    elif s.message.backend == "python":
        text = "a model.py gets the requests of a batch one by one"
        hint = "execute() sees each request's own tensors, and their shapes"
    else:
        return
    for field in ("batch_input", "batch_output"):
        if len(getattr(s.message, field)):
            yield Problem(f"{field} is not used: {text}", s.source.place(field), "R15", hint)


def unused_cache(config: ModelConfig) -> Iterator[Problem]:
    """A warning if response_cache is enabled without a cache."""
    if config.response_cache:
        text = "response_cache is not used: there is no cache"
        hint = "flowserve run --cache-config local,size=BYTES has one"
        yield Problem(text, config.source.place("response_cache"), "R15", hint)


def unused_environment(config: ModelConfig, execution: str) -> Iterator[Problem]:
    """A warning if a Python model specifies an environment but does not run in its own process."""
    if config.backend == "python" and config.parameters.get(ENVIRONMENT) and execution != "process":
        text = f"{ENVIRONMENT} is not used: model '{config.name}' runs in the server's own Python environment"
        place = config.source.place(f"parameters[{ENVIRONMENT}]")
        hint = f'by execution "{execution}"; only "process" can have another. Else install there what the model imports'
        yield Problem(text, place, "R9", hint)


def unused_batching(config: ModelConfig, libraries: Sequence[Place]) -> Iterator[Problem]:
    """A warning for a custom batching strategy, and for queue policies of priority levels that do not exist.
    `libraries`: every `BATCH_STRATEGY_FILE` in the model's folder.
    """
    strategies = [(BATCH_STRATEGY_FILE, place) for place in libraries]
    if BATCH_STRATEGY in config.parameters:
        strategies.append((BATCH_STRATEGY, config.source.place(f"parameters[{BATCH_STRATEGY}]")))
    for what, place in strategies:
        text = f"{what} is not used: the server decides itself which requests are batched together"
        hint = "it can be influenced by preferred_batch_size, max_queue_delay_microseconds and queue policies"
        yield Problem(text, place, "R15", hint)
    batching = config.dynamic_batching
    if batching is not None and batching.priority_queue_policies and not batching.priority_levels:
        path = "dynamic_batching.priority_queue_policy"
        text = "priority_queue_policy is not used: without priority_levels there is no level that it could be for"
        yield Problem(text, config.source.place(path), "R15", "default_queue_policy is for all requests")


def misspelt_parameters(config: ModelConfig) -> Iterator[Problem]:
    """A warning for a parameter key that is similar, but not equal, to one that the server reads."""
    for key in sorted(config.parameters):  # the order of protobuf's maps differs between processes
        close = difflib.get_close_matches(key.casefold(), OURS, n=1, cutoff=LIKENESS_MIN)
        if close and key not in OURS:
            place = config.source.place(f"parameters[{key}]")
            text = f"parameter '{key}' is left to the model; the server does not read it"
            yield Problem(text, place, "R13", f'did you mean "{close[0]}"?')
