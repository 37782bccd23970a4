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
from flowserve.config.rules.subject import RuleInput
from flowserve.errors import Problem

BATCHING = "dynamic_batching"


def preferred_sizes_fit(s: RuleInput) -> Iterator[Problem]:
    sizes = s.message.dynamic_batching.preferred_batch_size
    yield from sizes_fit(s, f"{BATCHING}.preferred_batch_size", list(sizes), "dynamic batching preferred size")


def sizes_fit(s: RuleInput, path: str, sizes: list[int], subject: str) -> Iterator[Problem]:
    """Preferred batch sizes are positive and no larger than a batch may be."""
    for index, size in enumerate(sizes):
        if size <= 0:
            yield s.problem(f"{path}[{index}]", f"{subject} must be positive for {s.message.name}", f"found {size}")
        elif 0 <= s.message.max_batch_size < size:
            text = f"{subject} must be <= max batch size for {s.message.name}"
            yield s.problem(f"{path}[{index}]", text, f"{size} is more than {s.message.max_batch_size}")


def default_priority_exists(s: RuleInput) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        path = f"{BATCHING}.default_priority_level"
        path = path if default else f"{BATCHING}.priority_levels"
        yield s.problem(path, f"default priority level must be in range [1, {levels}] for {s.message.name}")


def policies_have_a_priority(s: RuleInput) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    levels = batching.priority_levels
    for level in sorted(batching.priority_queue_policy) if levels else ():
        if not 1 <= level <= levels:
            text = f"priority queue policy must have priority level in range [1, {levels}] for {s.message.name}"
            yield s.problem(f"{BATCHING}.priority_queue_policy[{level}]", text, f"found {level}")


def ordering_has_one_priority(s: RuleInput) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    if batching.preserve_ordering and batching.priority_levels > 1:
        text = f"Only one priority level is allowed when 'preserve_ordering' is true for {s.message.name}"
        yield s.problem(f"{BATCHING}.priority_levels", text)


def ordering_does_not_delay(s: RuleInput) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    if not batching.preserve_ordering:
        return
    policies = [(f"{BATCHING}.default_queue_policy", batching.default_queue_policy)]
    policies += [
        (f"{BATCHING}.priority_queue_policy[{level}]", batching.priority_queue_policy[level])
        for level in sorted(batching.priority_queue_policy)
    ]
    for path, policy in policies:
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            text = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
            yield s.problem(path, f"{text} for {s.message.name}")


_Control = ModelSequenceBatching.Control
SEQUENCE_BATCHING: Final = "sequence_batching"
LISTS: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")
ID_TYPES: Final = (TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING)


def _controls(s: RuleInput) -> Iterator[tuple[str, str, _Control]]:
    """(path, the name of its kind, control) of every control of every control input."""
    for index, tensor in enumerate(s.message.sequence_batching.control_input):
        for position, control in enumerate(tensor.control):
            yield (
                f"{SEQUENCE_BATCHING}.control_input[{index}].control[{position}]",
                _Control.Kind.Name(control.kind),
                control,
            )


def control_tensors_have_a_name(s: RuleInput) -> Iterator[Problem]:
    for index, tensor in enumerate(s.message.sequence_batching.control_input):
        if not tensor.name:
            text = f"sequence batching control tensor must have a name for {s.message.name}"
            yield s.problem(f"{SEQUENCE_BATCHING}.control_input[{index}]", text)


def no_control_tensor_twice(s: RuleInput) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.sequence_batching.control_input):
        if tensor.name in seen:
            text = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield s.problem(f"{SEQUENCE_BATCHING}.control_input[{index}].name", f"{text} for {s.message.name}")
        if tensor.name:
            seen.add(tensor.name)


def no_control_kind_twice(s: RuleInput) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, kind, _ in _controls(s):
        if kind in seen:
            yield s.problem(path, f"sequence batching specifies multiple {kind} tensors for {s.message.name}")
        seen.add(kind)


def boolean_controls_have_one_pair(s: RuleInput) -> Iterator[Problem]:
    end = s.message.name
    either = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
    for path, kind, control in _controls(s):
        if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
            continue
        given = [name for name in LISTS if len(getattr(control, name))]
        if not given:
            yield s.problem(path, f"sequence batching must specify {either} for {kind} for {end}")
        elif len(given) > 1:
            text = "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
            yield s.problem(path, f"{text} 'bool_false_true' for {kind} for {end}")
        elif len(getattr(control, given[0])) != 2:
            text = f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {end}"
            yield s.problem(f"{path}.{given[0]}", text)


def correlation_control_is_an_id(s: RuleInput) -> Iterator[Problem]:
    for path, kind, control in _controls(s):
        if control.kind != _Control.CONTROL_SEQUENCE_CORRID:
            continue
        if any(len(getattr(control, name)) for name in LISTS):
            text = "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or"
            yield s.problem(path, f"{text} 'bool_false_true' for {kind} for {s.message.name}")
        if control.data_type not in ID_TYPES:
            text = f"unexpected data type for control {kind} for {s.message.name}. Allowed data types are"
            yield s.problem(path, f"{text} TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING")


def oldest_sizes_fit(s: RuleInput) -> Iterator[Problem]:
    sizes = list(s.message.sequence_batching.oldest.preferred_batch_size)
    path = f"{SEQUENCE_BATCHING}.oldest.preferred_batch_size"
    yield from sizes_fit(s, path, sizes, "sequence batching preferred batch size")


def slot_utilization_is_a_share(s: RuleInput) -> Iterator[Problem]:
    share = s.message.sequence_batching.direct.minimum_slot_utilization
    if not 0.0 <= share <= 1.0:
        text = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {s.message.name}"
        yield s.problem(f"{SEQUENCE_BATCHING}.direct.minimum_slot_utilization", text, f"found {share:g}")


def states_begin_once(s: RuleInput) -> Iterator[Problem]:
    for index, state in enumerate(s.message.sequence_batching.state):
        if len(state.initial_state) > 1:
            text = f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element."
            path = f"{SEQUENCE_BATCHING}.state[{index}].initial_state[1]"
            yield s.problem(path, f"{text} Found '{len(state.initial_state)}' elements.")


_State = ModelSequenceBatching.State
_InitialState = ModelSequenceBatching.InitialState


def _initial_states(s: RuleInput) -> Iterator[tuple[str, _State, _InitialState]]:
    """(path, state, its initial state) of every state that has one."""
    for index, state in enumerate(s.message.sequence_batching.state):
        if state.initial_state:
            yield f"{SEQUENCE_BATCHING}.state[{index}].initial_state[0]", state, state.initial_state[0]


def initial_type_is_the_states(s: RuleInput) -> Iterator[Problem]:
    for path, state, initial in _initial_states(s):
        if initial.data_type != state.data_type:
            text = f"The data type used for 'initial_state' field of state '{state.input_name}' does not match"
            yield s.problem(path, f"{text} the state data type.")


def initial_states_have_a_name(s: RuleInput) -> Iterator[Problem]:
    for path, state, initial in _initial_states(s):
        if not initial.name:
            text = "Field 'name' must be set when using initial_state for state input"
            yield s.problem(path, f"{text} '{state.input_name}'.")


def initial_dims_fit_the_states(s: RuleInput) -> Iterator[Problem]:
    for path, state, initial in _initial_states(s):
        name, ours, theirs = state.input_name, list(initial.dims), list(state.dims)
        if len(ours) != len(theirs):
            text = "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state"
            yield s.problem(f"{path}.dims", f"{text} input '{name}'. {len(ours)} != {len(theirs)}")
            continue
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one < 0:
                text = f"'initial_state' field for state input name '{name}' contains variable dimensions."
                yield s.problem(f"{path}.dims[{index}]", text)
            elif other != -1 and one != other:
                text = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description."
                yield s.problem(f"{path}.dims[{index}]", f"{text} {one} != {other}")


def initial_states_have_data(s: RuleInput) -> Iterator[Problem]:
    for path, state, initial in _initial_states(s):
        if initial.WhichOneof("state_data") is None:
            text = f"initial_state setting expects state'{state.input_name}' to have state_data set"
            yield s.problem(path, text, "write zero_data: true, or data_file with the name of a file in initial_state/")


def initial_files_are_inside(s: RuleInput) -> Iterator[Problem]:
    for path, state, initial in _initial_states(s):
        if initial.data_file and (why := s.path_error("initial_state", initial.data_file)):
            text = f"initial_state file '{initial.data_file}' of state input '{state.input_name}' {why}"
            yield s.problem(f"{path}.data_file", text)


def controls_and_states_are_no_inputs(s: RuleInput) -> Iterator[Problem]:
    """Clients cannot send inputs that the server computes."""
    batching = s.message.sequence_batching
    listed = {tensor.name for tensor in s.message.input}
    taken: set[str] = set()
    made = [(f"control_input[{n}].name", "control input", one.name) for n, one in enumerate(batching.control_input)]
    made += [(f"state[{n}].input_name", "state input", one.input_name) for n, one in enumerate(batching.state)]
    for path, kind, name in made:
        text = f"sequence batching {kind} '{name}'"
        if name in listed:
            yield s.problem(f"{SEQUENCE_BATCHING}.{path}", f"{text} must not be listed as input for {s.message.name}")
        elif name in taken and kind == "state input":
            yield s.problem(f"{SEQUENCE_BATCHING}.{path}", f"{text} is specified twice for {s.message.name}")
        taken.add(name)


def states_are_whole(s: RuleInput) -> Iterator[Problem]:
    for index, state in enumerate(s.message.sequence_batching.state):
        path = f"{SEQUENCE_BATCHING}.state[{index}]"
        for field in ("input_name", "output_name", "data_type", "dims"):
            if not getattr(state, field):
                yield s.problem(path, f"sequence batching state must have {field} for {s.message.name}")


def growing_memory_is_one_buffer(s: RuleInput) -> Iterator[Problem]:
    for index, state in enumerate(s.message.sequence_batching.state):
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            text = "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'"
            path = f"{SEQUENCE_BATCHING}.state[{index}].use_growable_memory"
            yield s.problem(path, f"{text} for state input '{state.input_name}'")
