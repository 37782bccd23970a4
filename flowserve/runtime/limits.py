"""What models ask of the rate limiter, and which of them could never run.

Decided here: which device an instance counts on, and which of two models that contradict each other is refused (the
later by name, so that it is always the same one). How resources are counted is scheduling/limiter.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Problems
from flowserve.scheduling.limiter import Limiter, Needs


def needs_of(group: InstanceGroup) -> Needs:
    """What each instance of a group holds while it runs. Those on the CPU count on device 0, as on Triton."""
    return Needs.of(group.rate_limiter, group.gpus[0] if group.gpus else 0)


def refusals(limiter: Limiter, configs: Mapping[str, ModelConfig]) -> dict[str, Problems]:
    """The models, of those about to be loaded, whose instances the limiter could never let run, and why."""
    refused: dict[str, Problems] = {}
    accepted: list[Needs] = []
    for name, config in sorted(configs.items()):
        problems = []
        here: list[Needs] = []
        for index, group in enumerate(config.instance_groups):
            if group.passive:
                continue
            needs = needs_of(group)
            problem = limiter.refusal(needs, [*accepted, *here])
            if problem is None:
                here.append(needs)
            else:
                place = config.source.place(f"instance_group[{index}].rate_limiter")
                problems.append(replace(problem, place=place))
        if problems:
            refused[name] = Problems(problems)
        else:
            accepted += here
    return refused
