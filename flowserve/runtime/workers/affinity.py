"""Selects the models whose requests stay on the GPU of their tensors.

Decides that these are models with instances on several devices and without a rule for the order in which requests
leave their queue: sequences have an instance anyway, and priorities, timeouts, `preserve_ordering` and the rate limiter
have rules of their own. scheduling/affinity.py decides which device a request uses. Called by loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowserve.config.instances import instances_of
from flowserve.config.types import ModelConfig
from flowserve.memory.device_tensor import Mirror
from flowserve.runtime.workers.queues import batcher_for, keeps_order
from flowserve.scheduling.affinity import NO_DEVICE, AffinityBatcher
from flowserve.scheduling.queue import Batcher, Queue


def queue_for(config: ModelConfig, instances: Sequence[Any], *, is_limited: bool) -> Batcher:
    """The queue of one version of a plain model whose instances that serve are these, in the configuration's order."""
    queue = batcher_for(config)
    groups = [group for _, group in instances_of(config) if not group.passive]
    devices = [group.gpus[0] if group.gpus else NO_DEVICE for group in groups]
    is_plain = type(queue) is Queue and not queue.may_expire and not keeps_order(config)
    if is_limited or not is_plain or len({*devices}) < 2:
        return queue
    places = dict(zip(instances, devices, strict=True))
    return AffinityBatcher(lambda: batcher_for(config), config.max_batch_size, places.__getitem__, residence)


def residence(tensor: Any) -> tuple[int, int]:
    """The GPU that a tensor, or a copy of it, lies on, and its bytes."""
    if tensor.place.is_gpu:
        return tensor.place.number, tensor.nbytes
    if isinstance(tensor, Mirror) and tensor.copies:
        return next(iter(tensor.copies)), tensor.nbytes
    return NO_DEVICE, tensor.nbytes
