"""A model's batcher and the resources that it needs, derived from its configuration.

Decides how the fields of a configuration become a batcher's policies. A model has only the cost of the features that it
configures: the default scheduler without `dynamic_batching`, a plain queue without levels and queue policies.

Selects the models whose requests stay on the GPU of their tensors: models with instances on several devices and without
a rule for the order in which requests leave their queue. Sequences have an instance anyway, and priorities, timeouts,
`preserve_ordering` and the rate limiter have rules of their own. scheduling/affinity.py decides which device a request
uses.

Decides the device on which an instance counts for the rate limiter, and which of two contradictory models is refused.
scheduling/rate_limit/ decides how resources are counted. Called by loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flowserve.config.types import (
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    instances_of,
)
from flowserve.errors import Problem, Problems
from flowserve.memory.device_tensor import Mirror
from flowserve.runtime.workers.state import filler, sequence_of
from flowserve.scheduling.affinity import NO_DEVICE, AffinityBatcher
from flowserve.scheduling.queue import PLAIN, Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs
from flowserve.scheduling.sequence.sequence import SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, IterativeDirect, IterativeOldest, Oldest


def queue_for(config: ModelConfig, instances: Sequence[Any], *, is_limited: bool) -> Batcher:
    """The queue of one version of a plain model with these serving instances, in the configuration's order."""
    queue = batcher_for(config)
    groups = [group for _, group in instances_of(config) if not group.passive]
    devices = [group.gpus[0] if group.gpus else NO_DEVICE for group in groups]
    is_plain = type(queue) is Queue and not queue.may_expire and not keeps_order(config)
    if is_limited or not is_plain or len({*devices}) < 2:
        return queue
    places = dict(zip(instances, devices, strict=True))
    return AffinityBatcher(lambda: _queue(config), config.max_batch_size, places.__getitem__, residence)


def batcher_for(config: ModelConfig) -> Batcher:
    """The queue of one version of a plain model."""
    return _queue(config) if config.sequence is None else _sequences(config, config.sequence)


def _queue(config: ModelConfig) -> Queue:
    batching = config.dynamic_batching
    if batching is None:
        return Queue(BatchPolicy.single())
    levels = levels_of(config)
    if levels.is_plain:
        return Queue(_batch_policy(config, batching)) if config.max_batch_size else Queue(BatchPolicy.single())
    return Queue(_batch_policy(config, batching), levels)


def keeps_order(config: ModelConfig) -> bool:
    """Whether its responses leave in the order of its requests."""
    batching = config.dynamic_batching
    return batching is not None and batching.preserve_ordering and not config.decoupled  # decoupled: kept per request


def _sequences(config: ModelConfig, sequence: SequenceBatching) -> Batcher:
    """The sequence batcher of a model. An instance has a slot for each row of its batches, or for "oldest" the
    configured number.
    """
    rows = max(1, config.max_batch_size)
    control = next((control for control in sequence.controls if control.kind == "CORRID"), None)
    delay_ns = sequence.max_queue_delay_us * 1000
    policy = SequencePolicy(
        model=config.name,
        slots=rows if sequence.is_direct else sequence.candidates or rows,
        idle_ns=sequence.idle_us * 1000,
        id_control=control.name if control else "",
        id_type=control.dtype.wire if control else "",
        has_shapes=any(-1 in state.dims for state in sequence.states),
    )
    if sequence.is_direct:
        direct = IterativeDirect if sequence.is_iterative else Direct
        return direct(policy, sequence_of, filler(config.outputs), sequence.slot_share, delay_ns)
    preferred = tuple(sorted(sequence.preferred_batch_sizes)) or (rows,)
    oldest = IterativeOldest if sequence.is_iterative else Oldest
    return oldest(policy, sequence_of, BatchPolicy(rows, preferred, delay_ns))


def _batch_policy(config: ModelConfig, batching: DynamicBatching) -> BatchPolicy:
    limit = config.max_batch_size or 1  # without a batch dimension requests run alone, and can still wait
    return BatchPolicy(
        max_batch_size=limit,
        preferred=tuple(sorted(batching.preferred_batch_sizes)) or (limit,),
        max_queue_delay_ns=batching.max_queue_delay_us * 1000,
    )


def levels_of(config: ModelConfig) -> Levels:
    """The priority levels of a model's queue, and their policies."""
    batching = config.dynamic_batching
    if batching is None:
        return PLAIN
    policy = _queue_policy(batching.default_queue_policy)
    return Levels(
        batching.priority_levels,
        batching.default_priority_level if batching.priority_levels else 0,
        policy,
        {level: _queue_policy(policy) for level, policy in batching.priority_queue_policies.items()}
        if batching.priority_levels
        else {},
    )


def _queue_policy(policy: QueuePolicy) -> LevelPolicy:
    return LevelPolicy(
        max_size=policy.max_queue_size,
        timeout_ns=policy.default_timeout_us * 1000,
        may_override=policy.allow_timeout_override,
        is_delayed=policy.timeout_action == "DELAY",
    )


def residence(tensor: Any) -> tuple[int, int]:
    """The GPU that has a tensor, or a copy of it, and its bytes."""
    if tensor.place.is_gpu:
        return tensor.place.number, tensor.nbytes
    if isinstance(tensor, Mirror) and tensor.copies:
        return next(iter(tensor.copies)), tensor.nbytes
    return NO_DEVICE, tensor.nbytes


def needs_of(group: InstanceGroup) -> Needs:
    """The resources of a running instance of a group. Instances on the CPU count on device 0, as on Triton."""
    return Needs.of(group.rate_limiter, group.gpus[0] if group.gpus else 0)


def asks_for_resources(config: ModelConfig) -> bool:
    """Whether some instance of a model holds a resource while it runs."""
    return any(needs.amounts for _, needs in _needs_by_group(config))


def refuse_what_never_runs(limiter: Limiter, config: ModelConfig, beside: Iterable[ModelConfig]) -> None:
    """Raise Problems if the limiter could never let some instance of a model run.

    `beside`: the models loaded at the same time that need resources, with or without itself. Of two contradictory
    models the later one by name is refused, so that the result does not depend on the order of loading.
    """
    accepted: list[Needs] = []
    for other in sorted(beside, key=lambda one: one.name):
        if other.name < config.name:
            problems, needs = _judge(limiter, other, accepted)
            accepted += [] if problems else needs
    problems, _ = _judge(limiter, config, accepted)
    if problems:
        raise Problems(problems)


def _judge(limiter: Limiter, config: ModelConfig, beside: Sequence[Needs]) -> tuple[list[Problem], list[Needs]]:
    """The problems of a model's groups, and the resources of its valid groups."""
    problems: list[Problem] = []
    accepted: list[Needs] = []
    for index, needs in _needs_by_group(config):
        problem = limiter.refusal(needs, [*beside, *accepted])
        if problem is None:
            accepted.append(needs)
        else:
            problems.append(replace(problem, place=config.source.place(f"instance_group[{index}].rate_limiter")))
    return problems, accepted


def _needs_by_group(config: ModelConfig) -> Iterator[tuple[int, Needs]]:
    """The resources of the instances of each serving group, by the group's number: once for each of its devices."""
    for index, group in enumerate(config.instance_groups):
        if not group.passive:
            for gpu in group.gpus or (0,):
                yield index, needs_of(replace(group, gpus=(gpu,)))
