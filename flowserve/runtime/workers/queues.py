"""The batcher of a model, by its configuration.

Decides how the fields of a configuration become a batcher's policies. A model has only the cost of the features that it
configures: the default scheduler without `dynamic_batching`, a plain queue without levels and queue policies.
"""

from __future__ import annotations

from flowserve.config.types import DynamicBatching, ModelConfig, QueuePolicy, SequenceBatching
from flowserve.runtime.workers.state import filler_flow, sequence_of
from flowserve.scheduling.queue import Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.sequence.direct import Direct
from flowserve.scheduling.sequence.iterative import IterativeDirect, IterativeOldest
from flowserve.scheduling.sequence.oldest import Oldest
from flowserve.scheduling.sequence.sequence import SequencePolicy


def batcher_for(config: ModelConfig) -> Batcher:
    """The queue of one version of a plain model."""
    batching = config.dynamic_batching
    if config.sequence is not None:
        return _sequences(config, config.sequence)
    if batching is None:
        return Queue(BatchPolicy.single())
    levels = _levels(batching)
    if levels is None:
        return Queue(_batch_policy(config, batching)) if config.max_batch_size else Queue(BatchPolicy.single())
    return Queue(_batch_policy(config, batching), levels)


def keeps_order(config: ModelConfig) -> bool:
    """Whether its answers leave in the order in which its requests came."""
    batching = config.dynamic_batching
    return batching is not None and batching.preserve_ordering and not config.decoupled  # those keep it per request


def _sequences(config: ModelConfig, sequence: SequenceBatching) -> Batcher:
    """Slots of an instance are the rows of its batches, or for "oldest" the configured number."""
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
        return direct(policy, sequence_of, filler_flow(config.outputs), sequence.slot_share, delay_ns)
    preferred = tuple(sorted(sequence.preferred_batch_sizes)) or (rows,)
    oldest = IterativeOldest if sequence.is_iterative else Oldest
    return oldest(policy, sequence_of, BatchPolicy(rows, preferred, delay_ns))


def _batch_policy(config: ModelConfig, batching: DynamicBatching) -> BatchPolicy:
    limit = config.max_batch_size or 1  # without a batch dimension requests run alone, and may queue all the same
    return BatchPolicy(
        max_batch_size=limit,
        preferred=tuple(sorted(batching.preferred_batch_sizes)) or (limit,),
        max_queue_delay_ns=batching.max_queue_delay_us * 1000,
    )


def _levels(batching: DynamicBatching) -> Levels | None:
    """The policies of the levels; None if one unbounded queue is enough."""
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
