"""Rules about the dynamic batcher and its queues.

Decided here: which settings contradict each other, as on Triton. What the batcher does with them is decided in
scheduling/.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.config.model_config_pb2 import ModelQueuePolicy
from flowserve.config.rules.subject import Subject
from flowserve.errors import Problem

BATCHING = "dynamic_batching"


def preferred_sizes_fit(s: Subject) -> Iterator[Problem]:
    sizes = s.message.dynamic_batching.preferred_batch_size
    yield from sizes_fit(s, f"{BATCHING}.preferred_batch_size", list(sizes), "dynamic batching preferred size")


def sizes_fit(s: Subject, path: str, sizes: list[int], subject: str) -> Iterator[Problem]:
    """Preferred batch sizes are positive and no larger than a batch may be."""
    for index, size in enumerate(sizes):
        if size <= 0:
            yield s.problem(f"{path}[{index}]", f"{subject} must be positive for {s.message.name}", f"found {size}")
        elif 0 <= s.message.max_batch_size < size:
            text = f"{subject} must be <= max batch size for {s.message.name}"
            yield s.problem(f"{path}[{index}]", text, f"{size} is more than {s.message.max_batch_size}")


def default_priority_exists(s: Subject) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        path = f"{BATCHING}.default_priority_level"
        path = path if default else f"{BATCHING}.priority_levels"
        yield s.problem(path, f"default priority level must be in range [1, {levels}] for {s.message.name}")


def policies_have_a_priority(s: Subject) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    levels = batching.priority_levels
    for level in sorted(batching.priority_queue_policy) if levels else ():
        if not 1 <= level <= levels:
            text = f"priority queue policy must have priority level in range [1, {levels}] for {s.message.name}"
            yield s.problem(f"{BATCHING}.priority_queue_policy[{level}]", text, f"found {level}")


def ordering_has_one_priority(s: Subject) -> Iterator[Problem]:
    batching = s.message.dynamic_batching
    if batching.preserve_ordering and batching.priority_levels > 1:
        text = f"Only one priority level is allowed when 'preserve_ordering' is true for {s.message.name}"
        yield s.problem(f"{BATCHING}.priority_levels", text)


def ordering_does_not_delay(s: Subject) -> Iterator[Problem]:
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
