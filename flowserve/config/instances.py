"""Where the instances of a model are, and what they are called.

Decided here: what a group comes to once it is known which GPUs there are: so many instances on each of them, one after
the other. Which GPUs there are is found out by memory/devices.py, and handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowserve.config.types import InstanceGroup, ModelConfig


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that models may use. `absence` says why there are none. `is_off`: the operator wants none of them used,
    and what asks for one runs on the CPU. `is_assumed`: it will run on some other machine, which has what is asked for.
    """

    ids: tuple[int, ...] = ()
    absence: str = ""
    is_off: bool = False
    is_assumed: bool = False


NO_GPUS = Gpus()
OFF = Gpus(is_off=True)
ASSUMED = Gpus(is_assumed=True)


def instances_of(config: ModelConfig) -> list[tuple[str, InstanceGroup]]:
    """The name of every instance of a model, and its group, whose `gpus` are the one it is on: () on the CPU, and on
    GPUs of which it is only assumed that they are there.
    """
    instances = []
    for group in config.instance_groups:
        if not group.gpus:
            instances += [(f"{group.name}_{number}", group) for number in range(group.count)]
        for gpu in group.gpus:
            here = replace(group, gpus=(gpu,))
            instances += [(f"{group.name}_{number}_gpu{gpu}", here) for number in range(group.count)]
    return instances
