"""Rules for the dynamic batcher and for sequence batching: queues, control tensors, strategies, implicit state.

Decides which settings are invalid or contradict each other, as on Triton. Does not know their effect (`scheduling`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowserve.config.model_config_pb2 import (
    TYPE_INT32,
    TYPE_INT64,
    TYPE_STRING,
    TYPE_UINT32,
    TYPE_UINT64,
    ModelQueuePolicy,
    ModelSequenceBatching,
)
from flowserve.config.rules import RuleInput
from flowserve.errors import Problem

BATCHING: Final = "dynamic_batching"
SEQUENCES: Final = "sequence_batching"
LISTS: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")
ID_TYPES: Final = (TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING)
_Control = ModelSequenceBatching.Control
_State = ModelSequenceBatching.State


def preferred_sizes(s: RuleInput) -> Iterator[Problem]:
    """Preferred batch sizes are positive and no larger than a batch may be."""
    model, most = s.message.name, s.message.max_batch_size
    dynamic, oldest = s.message.dynamic_batching, s.message.sequence_batching.oldest
    for rule, path, sizes, subject in (
        ("M50", BATCHING, dynamic.preferred_batch_size, "dynamic batching preferred size"),
        ("M65", f"{SEQUENCES}.oldest", oldest.preferred_batch_size, "sequence batching preferred batch size"),
    ):
        for index, size in enumerate(sizes):
            where = f"{path}.preferred_batch_size[{index}]"
            if size <= 0:
                yield s.problem(rule, where, f"{subject} must be positive for {model}", f"found {size}")
            elif 0 <= most < size:
                text = f"{subject} must be <= max batch size for {model}"
                yield s.problem(rule, where, text, f"{size} is more than {most}")


def priorities(s: RuleInput) -> Iterator[Problem]:
    batching, model = s.message.dynamic_batching, s.message.name
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        path = f"{BATCHING}.default_priority_level" if default else f"{BATCHING}.priority_levels"
        yield s.problem("M51", path, f"default priority level must be in range [1, {levels}] for {model}")
    policies = [(f"{BATCHING}.default_queue_policy", batching.default_queue_policy)]
    for level in sorted(batching.priority_queue_policy):
        path = f"{BATCHING}.priority_queue_policy[{level}]"
        policies.append((path, batching.priority_queue_policy[level]))
        if levels and not 1 <= level <= levels:
            text = f"priority queue policy must have priority level in range [1, {levels}] for {model}"
            yield s.problem("M52", path, text, f"found {level}")
    if not batching.preserve_ordering:
        return
    if levels > 1:
        text = f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
        yield s.problem("M53", f"{BATCHING}.priority_levels", text)
    for path, policy in policies:
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            text = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            yield s.problem("M54", path, text)


def control_tensors(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    names: set[str] = set()
    kinds: set[str] = set()
    for index, tensor in enumerate(s.message.sequence_batching.control_input):
        path = f"{SEQUENCES}.control_input[{index}]"
        if not tensor.name:
            yield s.problem("M60", path, f"sequence batching control tensor must have a name for {model}")
        elif tensor.name in names:
            text = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield s.problem("M61", f"{path}.name", f"{text} for {model}")
        names.add(tensor.name)
        for position, control in enumerate(tensor.control):
            where, kind = f"{path}.control[{position}]", _Control.Kind.Name(control.kind)
            if kind in kinds:
                yield s.problem("M62", where, f"sequence batching specifies multiple {kind} tensors for {model}")
            kinds.add(kind)
            is_id = control.kind == _Control.CONTROL_SEQUENCE_CORRID
            yield from (_id_control if is_id else _boolean_control)(s, where, kind, control)


def _boolean_control(s: RuleInput, path: str, kind: str, control: _Control) -> Iterator[Problem]:
    """It has one pair of values for false and true."""
    end = f"for {kind} for {s.message.name}"
    given = [name for name in LISTS if len(getattr(control, name))]
    if not given:
        either = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        yield s.problem("M63", path, f"sequence batching must specify {either} {end}")
    elif len(given) > 1:
        text = "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
        yield s.problem("M63", path, f"{text} 'bool_false_true' {end}")
    elif len(getattr(control, given[0])) != 2:
        text = f"sequence batching control '{given[0]}' must have exactly 2 entries {end}"
        yield s.problem("M63", f"{path}.{given[0]}", text)


def _id_control(s: RuleInput, path: str, kind: str, control: _Control) -> Iterator[Problem]:
    if any(len(getattr(control, name)) for name in LISTS):
        text = "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or"
        yield s.problem("M64", path, f"{text} 'bool_false_true' for {kind} for {s.message.name}")
    if control.data_type not in ID_TYPES:
        text = f"unexpected data type for control {kind} for {s.message.name}. Allowed data types are"
        yield s.problem("M64", path, f"{text} TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING")


def slot_utilization(s: RuleInput) -> Iterator[Problem]:
    share = s.message.sequence_batching.direct.minimum_slot_utilization
    if not 0.0 <= share <= 1.0:
        text = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {s.message.name}"
        yield s.problem("M66", f"{SEQUENCES}.direct.minimum_slot_utilization", text, f"found {share:g}")


def server_inputs(s: RuleInput) -> Iterator[Problem]:
    """Clients cannot send inputs that the server computes."""
    batching = s.message.sequence_batching
    listed = {tensor.name for tensor in s.message.input}
    taken: set[str] = set()
    made = [(f"control_input[{n}].name", "control input", one.name) for n, one in enumerate(batching.control_input)]
    made += [(f"state[{n}].input_name", "state input", one.input_name) for n, one in enumerate(batching.state)]
    for path, kind, name in made:
        text = f"sequence batching {kind} '{name}'"
        if name in listed:
            yield s.problem("M74", f"{SEQUENCES}.{path}", f"{text} must not be listed as input for {s.message.name}")
        elif name in taken and kind == "state input":
            yield s.problem("M74", f"{SEQUENCES}.{path}", f"{text} is specified twice for {s.message.name}")
        taken.add(name)


def states(s: RuleInput) -> Iterator[Problem]:
    for index, state in enumerate(s.message.sequence_batching.state):
        path = f"{SEQUENCES}.state[{index}]"
        if state.initial_state:
            yield from _initial_state(s, f"{path}.initial_state", state)
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            text = "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'"
            yield s.problem("M73", f"{path}.use_growable_memory", f"{text} for state input '{state.input_name}'")
        for field in ("input_name", "output_name", "data_type", "dims"):
            if not getattr(state, field):
                yield s.problem("M75", path, f"sequence batching state must have {field} for {s.message.name}")


def _initial_state(s: RuleInput, path: str, state: _State) -> Iterator[Problem]:
    name, initial, where = state.input_name, state.initial_state[0], f"{path}[0]"
    if len(state.initial_state) > 1:
        text = f"initial_state field for state input '{name}' must contain exactly one or zero element."
        yield s.problem("M67", f"{path}[1]", f"{text} Found '{len(state.initial_state)}' elements.")
    if initial.data_type != state.data_type:
        text = f"The data type used for 'initial_state' field of state '{name}' does not match"
        yield s.problem("M68", where, f"{text} the state data type.")
    if not initial.name:
        yield s.problem("M69", where, f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        text = "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state"
        yield s.problem("M70", f"{where}.dims", f"{text} input '{name}'. {len(initial.dims)} != {len(state.dims)}")
    else:
        for index, (one, other) in enumerate(zip(initial.dims, state.dims, strict=True)):
            if one < 0:
                text = f"'initial_state' field for state input name '{name}' contains variable dimensions."
                yield s.problem("M70", f"{where}.dims[{index}]", text)
            elif other != -1 and one != other:
                text = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description."
                yield s.problem("M70", f"{where}.dims[{index}]", f"{text} {one} != {other}")
    if initial.WhichOneof("state_data") is None:
        text = f"initial_state setting expects state'{name}' to have state_data set"
        hint = "write zero_data: true, or data_file with the name of a file in initial_state/"
        yield s.problem("M71", where, text, hint)
    if initial.data_file and (why := s.path_error("initial_state", initial.data_file)):
        text = f"initial_state file '{initial.data_file}' of state input '{name}' {why}"
        yield s.problem("M72", f"{where}.data_file", text)
