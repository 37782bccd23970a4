"""The instances of a model: their names and devices.

Decides how an instance group is expanded for the available GPUs: `count` instances on each of them. Does not detect
GPUs (`memory/devices`): they are passed in. Callers: `runtime`, `rules`, `memory/devices` for the `Gpus` record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowserve.config.types import InstanceGroup, ModelConfig


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs available to models. `absence` is the reason if there are none. `is_off`: the operator has disabled
    GPUs, and instances that request one run on the CPU. `is_assumed`: the models will run on another machine that has
    the requested GPUs.
    """

    ids: tuple[int, ...] = ()
    absence: str = ""
    is_off: bool = False
    is_assumed: bool = False


NO_GPUS = Gpus()
OFF = Gpus(is_off=True)
ASSUMED = Gpus(is_assumed=True)


def instances_of(config: ModelConfig) -> list[tuple[str, InstanceGroup]]:
    """The name of every instance of a model, and its group with `gpus` reduced to the instance's own: () on the CPU,
    and if the GPUs are only assumed to exist.
    """
    instances = []
    for group in config.instance_groups:
        if not group.gpus:
            instances += [(f"{group.name}_{number}", group) for number in range(group.count)]
        for gpu in group.gpus:
            here = replace(group, gpus=(gpu,))
            instances += [(f"{group.name}_{number}_gpu{gpu}", here) for number in range(group.count)]
    return instances
