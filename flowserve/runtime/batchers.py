"""Which batcher a model's configuration asks for.

Decided here: how the words of a configuration become a batcher's policies, and that a model pays for no more than it
asks for: without `dynamic_batching` the default scheduler, without levels and queue policies a plain queue.
"""

from __future__ import annotations

from flowserve.config.types import DynamicBatching, ModelConfig, QueuePolicy
from flowserve.scheduling.batcher import Batcher, BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.queues import LevelPolicy, Levels, PolicyBatcher


def batcher_for(config: ModelConfig) -> Batcher:
    """The queue of one version of a plain model."""
    batching = config.dynamic_batching
    if batching is None:
        return OneByOne()
    levels = _levels(batching)
    if levels is None:
        return DynamicBatcher(_batch_policy(config, batching)) if config.max_batch_size else OneByOne()
    return PolicyBatcher(_batch_policy(config, batching), levels)


def keeps_order(config: ModelConfig) -> bool:
    """Whether its answers leave in the order in which its requests came."""
    return config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering


def _batch_policy(config: ModelConfig, batching: DynamicBatching) -> BatchPolicy:
    limit = config.max_batch_size or 1  # without a batch dimension requests run alone, and may queue all the same
    return BatchPolicy(
        max_batch_size=limit,
        preferred=tuple(sorted(batching.preferred_batch_sizes)) or (limit,),
        max_queue_delay_ns=batching.max_queue_delay_us * 1000,
    )


def _levels(batching: DynamicBatching) -> Levels | None:
    """None where one line that refuses nobody does."""
    policy = _queue_policy(batching.default_queue_policy)
    if not (batching.priority_levels or policy.max_size or policy.timeout_ns):
        return None
    return Levels(
        batching.priority_levels,
        batching.default_priority_level if batching.priority_levels else 0,
        policy,
        {level: _queue_policy(policy) for level, policy in batching.priority_queue_policies.items()},
    )


def _queue_policy(policy: QueuePolicy) -> LevelPolicy:
    return LevelPolicy(
        max_size=policy.max_queue_size,
        timeout_ns=policy.default_timeout_us * 1000,
        may_override=policy.allow_timeout_override,
        is_delayed=policy.timeout_action == "DELAY",
    )
