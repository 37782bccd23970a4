"""The resources that models need from the rate limiter, and the models that could never run.

Decides the device on which an instance counts, and which of two contradictory models is refused. scheduling/limiter.py
decides how resources are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs


def needs_of(group: InstanceGroup) -> Needs:
    """The resources of a running instance of a group. Instances on the CPU count on device 0, as on Triton."""
    return Needs.of(group.rate_limiter, group.gpus[0] if group.gpus else 0)


def asks_for_resources(config: ModelConfig) -> bool:
    """Whether some instance of a model holds something while it runs."""
    return any(needs.amounts for _, needs in _needs_by_group(config))


def refuse_what_never_runs(limiter: Limiter, config: ModelConfig, beside: Iterable[ModelConfig]) -> None:
    """Raise Problems where the limiter could never let some instance of a model run.

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
