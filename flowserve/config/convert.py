"""Converts the protobuf message to configuration records, and to the JSON that clients read.

Decides the mapping of each field. A tensor without a valid data type is omitted: it occurs only before the rules have
run. Of an output that is listed more than once the first listing counts, with the label file of any, as on Triton; the
JSON has all of them. Does not check anything. Callers: `load`, the load API.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from flowserve.config import model_config_pb2 as pb
from flowserve.config import types as records
from flowserve.config.build import MESSAGES, MODEL_CONFIG, Field, Message
from flowserve.values import BY_NUMBER, DType, TensorSpec

# A field that the schema of Triton 2.51, and of programs of its time, does not have.
LATER: Final = frozenset({"max_inflight_requests"})


def to_config(message: pb.ModelConfig, source: records.SourceMap) -> records.ModelConfig:
    """The record of one configuration."""
    listed = _specs(message.output)
    outputs = _by_name(listed)
    if len(outputs) < len(listed):
        source = _of_outputs(outputs, message, source)
    return records.ModelConfig(
        name=message.name,
        backend=message.backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=_specs(message.input),
        outputs=outputs,
        source=source,
        version_policy=_version_policy(message),
        dynamic_batching=_dynamic_batching(message),
        sequence=_sequence(message),
        ensemble=_ensemble(message),
        instance_groups=tuple(_instance_group(group) for group in message.instance_group),
        batch_inputs=_batch_inputs(message),
        batch_outputs=tuple(
            records.BatchOutput(tuple(made.target_name), source)
            for made in message.batch_output
            for source in made.source_input
        ),
        warmup=tuple(_warmup_sample(sample) for sample in message.model_warmup),
        default_model_filename=message.default_model_filename,
        parameters={key: message.parameters[key].string_value for key in message.parameters},
        json=to_json(message),
        decoupled=message.model_transaction_policy.decoupled,
        response_cache=message.response_cache.enable,
        listed_outputs=listed if len(outputs) < len(listed) else (),
    )


def to_json(message: pb.ModelConfig) -> dict[str, Any]:
    """The message as GET v2/models/NAME/config returns it: every plain field of Triton's, defaults included, and those
    of flowserve's own and of `LATER` that are set; proto names, enumerations by name, 64-bit integers as numbers.
    """
    printed = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _members(printed, MODEL_CONFIG)


def _members(printed: Mapping[str, Any], schema: Message) -> dict[str, Any]:
    fields = schema.fields
    return {
        name: _printed(one, fields[name])
        for name, one in printed.items()
        if one or not (fields[name].is_own or name in LATER)
    }


def _printed(value: Any, field: Field) -> Any:
    """Turn the strings that protobuf prints for 64-bit integers (for JavaScript) into numbers, as clients expect."""
    if isinstance(value, list):
        return [_printed(one, field) for one in value]
    if field.is_map:
        inner = MESSAGES[field.type].fields["value"]
        return {key: _printed(one, inner) for key, one in value.items()}
    if field.kind == "message":
        return _members(value, MESSAGES[field.type])
    return int(value) if field.kind in ("int64", "uint64") else value


def _specs(tensors: Iterable[pb.ModelInput | pb.ModelOutput]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=tensor.name,
            dtype=BY_NUMBER[tensor.data_type],
            dims=tuple(tensor.dims),
            optional=isinstance(tensor, pb.ModelInput) and tensor.optional,
            ragged=isinstance(tensor, pb.ModelInput) and tensor.allow_ragged_batch,
            reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
            labels=tensor.label_filename if isinstance(tensor, pb.ModelOutput) else "",
        )
        for tensor in tensors
        if tensor.data_type in BY_NUMBER
    )


def _by_name(listed: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Each output once. Before the rules have run, several may have no name."""
    found: dict[str | int, TensorSpec] = {}
    for index, spec in enumerate(listed):
        key = spec.name or index
        first = found.setdefault(key, spec)
        found[key] = replace(first, labels=first.labels or spec.labels)
    return tuple(found.values())


def _of_outputs(
    outputs: tuple[TensorSpec, ...], message: pb.ModelConfig, source: records.SourceMap
) -> records.SourceMap:
    """The places of `outputs` by their position there, instead of that in the file."""
    position = {spec.name: index for index, spec in enumerate(outputs)}
    moved: dict[str, str] = {}  # the first listing of each output, to its path there
    for index, tensor in enumerate(message.output):
        if tensor.name in position:
            moved[f"output[{index}]"] = f"output[{position.pop(tensor.name)}]"
    places = {}
    for path, place in source.places.items():
        listing, bracket, rest = path.partition("]")
        if not path.startswith("output["):
            places[path] = place
        elif (listing := listing + bracket) in moved:
            places[moved[listing] + rest] = place
    return records.SourceMap(source.file, places)


def _batch_inputs(message: pb.ModelConfig) -> tuple[records.BatchInput, ...]:
    return tuple(
        records.BatchInput(
            kind=pb.BatchInput.Kind.Name(made.kind),
            targets=tuple(made.target_name),
            dtype=BY_NUMBER[made.data_type],
            source=source,
        )
        for made in message.batch_input
        if made.data_type in BY_NUMBER
        for source in made.source_input
    )


def _warmup_sample(sample: pb.ModelWarmup) -> records.WarmupSample:
    return records.WarmupSample(
        name=sample.name,
        batch_size=sample.batch_size,
        count=sample.count or 1,
        inputs={
            name: records.WarmupInput(
                dtype=BY_NUMBER[given.data_type],
                dims=tuple(given.dims),
                is_random=given.WhichOneof("input_data_type") == "random_data",
                file=given.input_data_file,
            )
            for name, given in sample.inputs.items()
            if given.data_type in BY_NUMBER
        },
    )


def _version_policy(message: pb.ModelConfig) -> records.VersionPolicy:
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    latest = policy.latest.num_versions if choice else 1  # 0 unless it is the choice
    return records.VersionPolicy(latest, all=choice == "all", specific=tuple(policy.specific.versions))


def _dynamic_batching(message: pb.ModelConfig) -> records.DynamicBatching | None:
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    return records.DynamicBatching(
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policies={
            level: _queue_policy(batching.priority_queue_policy[level]) for level in batching.priority_queue_policy
        },
    )


def _sequence(message: pb.ModelConfig) -> records.SequenceBatching | None:
    """The sequence batching; the default strategy is direct, as on Triton."""
    if not message.HasField("sequence_batching"):
        return None
    batching = message.sequence_batching
    is_direct = not batching.HasField("oldest")
    chosen = batching.direct if is_direct else batching.oldest
    return records.SequenceBatching(
        idle_us=batching.max_sequence_idle_microseconds,
        is_direct=is_direct,
        controls=tuple(_control(tensor.name, one) for tensor in batching.control_input for one in tensor.control),
        states=tuple(_state(state) for state in batching.state if state.data_type in BY_NUMBER),
        max_queue_delay_us=chosen.max_queue_delay_microseconds,
        slot_share=batching.direct.minimum_slot_utilization,
        candidates=batching.oldest.max_candidate_sequences,
        preferred_batch_sizes=tuple(batching.oldest.preferred_batch_size),
        is_iterative=batching.iterative_sequence,
    )


def _control(name: str, control: pb.ModelSequenceBatching.Control) -> records.SequenceControl:
    kind = pb.ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix("CONTROL_SEQUENCE_")
    if kind == "CORRID":
        return records.SequenceControl(name, kind, BY_NUMBER.get(control.data_type, DType.UINT64))
    pairs: list[tuple[DType, Sequence[float]]] = [
        (DType.INT32, control.int32_false_true),
        (DType.FP32, control.fp32_false_true),
        (DType.BOOL, control.bool_false_true),
    ]
    dtype, pair = next(((dtype, pair) for dtype, pair in pairs if len(pair) == 2), (DType.BOOL, (False, True)))
    return records.SequenceControl(name, kind, dtype, pair[0], pair[1])


def _state(state: pb.ModelSequenceBatching.State) -> records.SequenceState:
    initial = state.initial_state[0] if state.initial_state else None
    return records.SequenceState(
        input=state.input_name,
        output=state.output_name,
        dtype=BY_NUMBER[state.data_type],
        dims=tuple(state.dims),
        initial_dims=None if initial is None else tuple(initial.dims),
        file="" if initial is None else initial.data_file,
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> records.QueuePolicy:
    return records.QueuePolicy(
        timeout_action=pb.ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _ensemble(message: pb.ModelConfig) -> records.Ensemble | None:
    if not message.HasField("ensemble_scheduling"):
        return None
    scheduling = message.ensemble_scheduling
    return records.Ensemble(
        steps=tuple(
            records.EnsembleStep(
                model=step.model_name,
                version=step.model_version,
                input_map=dict(sorted(step.input_map.items())),  # protobuf's own order differs between processes
                output_map=dict(sorted(step.output_map.items())),
                path=f"ensemble_scheduling.step[{index}]",
                when=tuple(map(_row_test, step.when)),
                each=_each_item(step.each) if step.HasField("each") else None,
                name=step.name,
            )
            for index, step in enumerate(scheduling.step)
        ),
        max_inflight_requests=scheduling.max_inflight_requests,
        fills=tuple(
            records.Fill(fill.tensor, fill.value, fill.string_value, fill.present, f"ensemble_scheduling.fill[{index}]")
            for index, fill in enumerate(scheduling.fill)
        ),
    )


def _row_test(test: pb.ModelEnsembling.Test) -> records.RowTest:
    return records.RowTest(
        tensor=test.tensor,
        negate=getattr(test, "not"),
        above=test.above if test.HasField("above") else None,
        below=test.below if test.HasField("below") else None,
        equals=tuple(test.equals),
        otherwise=test.otherwise,
    )


def _each_item(each: pb.ModelEnsembling.Each) -> records.EachItem:
    return records.EachItem(tuple(each.tensor), each.count, each.at_most or records.ITEMS_MAX)


def _instance_group(group: pb.ModelInstanceGroup) -> records.InstanceGroup:
    return records.InstanceGroup(
        name=group.name,
        kind=pb.ModelInstanceGroup.Kind.Name(group.kind),
        count=max(group.count, 0),
        gpus=tuple(group.gpus),
        passive=group.passive,
        rate_limiter=records.RateLimiter(
            resources=tuple(
                records.LimitedResource(resource.name, resource.count, getattr(resource, "global"))
                for resource in group.rate_limiter.resources
            ),
            priority=group.rate_limiter.priority or 1,
        ),
        profiles=tuple(int(profile) for profile in group.profile if profile.isascii() and profile.isdigit()),
    )
