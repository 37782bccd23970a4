"""Instances in a cluster: what they are started from, and the actors in which they run.

An actor (`ClusterActor`) has the instance of one worker, or one of each model of a segment: then workers share it, and
a batch on a route is one message and one reply, with only the outputs of the last stage.

Decides when an actor is started and ended, in which memory its frames are received, and whether the instances of a
model may take several batches at once: not if one batch may wait for another, as those of a model that calls others.
cluster/ decides how actors are started, tcp.py how they are connected. Does not know queues or callers. Called by
wing.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowserve.backends.base import ModelFiles
from flowserve.backends.python.calling import calls_models
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.base import ActorJob, ClusterEngine, InstanceJob, MachineNeeds
from flowserve.elsewhere.cluster.files import digest_of
from flowserve.elsewhere.cluster.link import Tls
from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.elsewhere.tcp import DEPTH, ActorConnection, ActorPort
from flowserve.memory.arena import Arena
from flowserve.memory.pool import HOST
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.workers.base import WorkerContext


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A server's cluster. `give_up_s`: how long an instance may wait for a machine that has what it needs. `traffic`:
    the traffic of each machine, by its name.
    """

    engine: ClusterEngine
    give_up_s: float = 60.0
    tls: Tls | None = None
    traffic: dict[str, MachineTraffic] = field(default_factory=dict)


class ClusterModel:
    """One version of a model that runs on other machines. Nothing is loaded here. `is_alone`: its actors have no
    instances of other models.
    """

    may_run_inline = False

    def __init__(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str], *, is_alone: bool) -> None:
        """Reads all files to compute their digest; blocks."""
        self.config = config
        self.is_pure = False  # known when the first instance is open
        self._files = files
        self._options = options
        self._is_alone = is_alone
        self._digest = digest_of(files)
        # Whether a batch never waits for another: then an instance may take several.
        self.is_independent = config.sequence is None and not config.decoupled and not calls_models(files)

    def depth(self, *, is_limited: bool) -> int:
        """The batches that an instance takes at once; `is_limited`: the rate limiter counts them."""
        return DEPTH if self.is_independent and not is_limited else 1

    def job(self, number: int, name: str, group: InstanceGroup) -> InstanceJob:
        """The job of an actor's instance with that number."""
        if group.kind == "KIND_GPU":
            group = replace(group, gpus=group.gpus or (0,))  # the engine shows an actor its own GPUs only
        return InstanceJob(
            number,
            name,
            self.config,
            group,
            files=self._files,
            digest=self._digest,
            options=self._options,
            is_alone=self._is_alone,
        )

    def instance(self, name: str, group: InstanceGroup) -> Any:
        raise NotImplementedError  # its instances are in actors

    def close(self) -> None:
        """No effect: there is nothing to release."""


class ClusterActor:
    """One actor, for one worker or for one of each model of a segment. It is started when the first worker opens its
    instance, and ends when the last is closed; if it ends before, the next worker that opens starts it again.
    """

    def __init__(self, name: str, needs: MachineNeeds, cluster: ClusterOptions, clock: ClockNs) -> None:
        self.name = name
        self.cluster = cluster
        self.clock = clock
        self._needs = needs
        self._lock = threading.Lock()  # held while it is started, and while an instance is added or removed
        self._connection: ActorConnection | None = None
        self._arena: Arena | None = None  # memory for outputs that processes read; used on the reading thread only

    # ------------------------------------------------------------------ blocking, on other threads

    def join(self, port: ActorPort, context: WorkerContext) -> tuple[ActorConnection, int]:
        """Start opening an instance. Returns the connection, and the instance's number there. Raises Unavailable."""
        with self._lock:
            connection = self._connection
            if connection is None or connection.is_over:
                connection = self._connection = self._start(port, context)
            return connection, connection.add(port)

    def _start(self, port: ActorPort, context: WorkerContext) -> ActorConnection:
        engine = self.cluster.engine
        job = ActorJob(self.name, os.urandom(frames.SECRET_BYTES), self.cluster.tls)
        started = engine.start(job, self._needs, self.cluster.give_up_s)
        port.machine = started.machine
        try:
            port.check_given_up()
            return ActorConnection(
                job,
                started,
                engine,
                context,
                self.clock,
                traffic=self.cluster.traffic.setdefault(started.machine, MachineTraffic()),
                take=self.take,
            )
        except BaseException:
            engine.kill(started)
            raise

    def leave(self, connection: ActorConnection, number: int) -> None:
        """Remove an instance that is closed, or was not opened. The actor ends with its last one."""
        with self._lock:
            connection.remove(number)
            if connection.instances:
                return
            if self._connection is connection:
                self._connection = None
        connection.end()

    # ------------------------------------------------------------------ its memory

    def share(self) -> None:
        """Place outputs in shared memory from now on, because processes read them."""
        if self._arena is None:
            self._arena = Arena()

    def take(self, nbytes: int) -> Any:
        """Memory for the block of a reply, on the reading thread."""
        return HOST.take(nbytes) if self._arena is None else self._arena.lease(nbytes)
