"""The interface of a cluster's engine, which starts instances on other machines and reports their ends.

Decides the parameters of an actor (`ActorJob`) and of its instances (`InstanceJob`), what it needs (`MachineNeeds`),
and the record of a started one (`Started`) and of an ended one (`ActorEnd`). Jobs are sent through the engine, which is
trusted as a process trusts its command line; an actor's job contains the secret of the connection. Does not know an
engine. Callers: `agents`, `actor`, the engines' processes, runtime/ and the metrics.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flowserve.backends.base import ModelFiles
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.elsewhere.cluster.link import Tls
from flowserve.version import __version__


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """What an actor needs of its machine: amounts of resources ("CPU", "GPU") and labels."""

    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActorJob:
    """The parameters of an actor, which begins without an instance (`InstanceJob`). `name` is for its log."""

    name: str
    secret: bytes = field(repr=False)
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class InstanceJob:
    """An instance that an actor runs: `name` of one version of a model, from `files` whose contents have this `digest`.
    `number` is unique in that actor, from 1. `options` are those of `Backend.load`. `is_alone`: the actor has no other
    instance.
    """

    number: int
    name: str
    config: ModelConfig
    group: InstanceGroup
    files: ModelFiles
    digest: str
    options: Mapping[str, str]
    is_alone: bool = True


@dataclass(frozen=True, slots=True)
class Started:
    """An actor that listens at `host` and `port`. `number` is unique in its engine."""

    number: int
    host: str
    port: int
    machine: str
    process: int


@dataclass(frozen=True, slots=True)
class ActorEnd:
    """How an actor ended, for the users of its model. `with_machine`: its machine is lost, with all its actors."""

    text: str
    with_machine: bool = False


class ClusterEngine(Protocol):
    """Starts actors. All methods block, and are called on any thread."""

    def start(self, job: ActorJob, needs: MachineNeeds, give_up_s: float) -> Started:
        """Start an actor on a machine that meets its needs. Raises Unavailable if there is none within `give_up_s`."""

    def add(self, started: Started, job: InstanceJob) -> None:
        """Have an actor open an instance; the model's files are sent if its machine does not have them. Raises
        Unavailable. One call for an actor at a time.
        """

    def end_of(self, started: Started) -> ActorEnd:
        """How an actor ended whose connection is closed. Takes a few seconds at most."""

    def kill(self, started: Started) -> None:
        """End an actor immediately. No effect if it has ended."""

    @property
    def is_reachable(self) -> bool:
        """Whether it could probably start an actor now. Does not block."""

    def machines(self) -> Sequence[str]:
        """The available machines."""

    def close(self) -> None:
        """End all processes that it started."""


def versions() -> list[str]:
    """The versions that both ends must agree on: of flowserve, of Python, and of numpy."""
    return [__version__, ".".join(platform.python_version_tuple()[:2]), np.__version__.partition(".")[0]]
