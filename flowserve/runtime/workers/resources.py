"""What models ask of the rate limiter, and which of them could never run.

Decided here: which device an instance counts on, and which of two models that contradict each other is refused. How
resources are counted is scheduling/limiter.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs


def needs_of(group: InstanceGroup) -> Needs:
    """What an instance of a group holds while it runs. Those on the CPU count on device 0, as on Triton."""
    return Needs.of(group.rate_limiter, group.gpus[0] if group.gpus else 0)


def asks_for_resources(config: ModelConfig) -> bool:
    """Whether some instance of a model holds something while it runs."""
    return any(needs.amounts for _, needs in _needs_by_group(config))


def refuse_what_never_runs(limiter: Limiter, config: ModelConfig, beside: Iterable[ModelConfig]) -> None:
    """Raise Problems where the limiter could never let some instance of a model run.

    `beside`: what is loaded at the same time and asks for resources, the model itself included or not. Of two that
    contradict each other the later one by name is refused, so that it is always the same.
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
    """What is wrong with a model's groups, and what the others of them need."""
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
    """What the instances of each group that serves need, by the group's number: once for each device it is on."""
    for index, group in enumerate(config.instance_groups):
        if not group.passive:
            for gpu in group.gpus or (0,):
                yield index, needs_of(replace(group, gpus=(gpu,)))
