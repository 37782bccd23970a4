"""Which host an instance gets, and what hosts share.

Decided here: what the word in a model's `execution` parameter, or the server's default for its backend, comes to. It
knows every kind of host and nothing of what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Final

import trio

from flowserve.backends.base import LoadedModel, RunsInProcess
from flowserve.backends.device import OnDevice
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Unsupported
from flowserve.runtime.alone import Occupancy
from flowserve.runtime.carriers import passes_on, receives
from flowserve.runtime.children import SUPPORTED, Children, Spawn
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.device_host import DeviceHost
from flowserve.runtime.environments import Environment, Environments
from flowserve.runtime.instance import Host, LocalHost
from flowserve.runtime.one_processor import OneProcessor
from flowserve.runtime.placement import Placement
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.process_inputs import InputPacker
from flowserve.runtime.pump import Bursts
from flowserve.runtime.readiness import Readiness
from flowserve.runtime.relays import Relays
from flowserve.runtime.sequence_hosts import SequenceLocalHost, SequenceProcessHost
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.runtime.sequence_stream_hosts import SequenceStreamHost, SequenceStreamProcessHost
from flowserve.runtime.stream_host import StreamHost, StreamProcessHost
from flowserve.runtime.streaming import Streaming

log = logging.getLogger("flowserve.load")

MakeHost = Callable[[str, InstanceGroup], Host]

PROCESS: Final = "process"
# Python models are other people's code: in processes, wherever there can be any.
PYTHON_EXECUTION: Final = PROCESS if SUPPORTED else "thread"
# Where instances of a backend run, unless the model or the operator says otherwise: by measurement.
DEFAULT: Final = "auto"


class Processes:
    """What a server has for models in processes of their own. Made on the loop."""

    def __init__(self, clock: ClockNs, pump: Bursts) -> None:
        self.children = Children(clock)
        self.environments = Environments(self.children)
        self.spawn: Spawn = self.children.spawn
        self.readiness = Readiness(pump)
        self.one_processor = OneProcessor()
        self.occupancy = Occupancy(on_company=self.one_processor.let_go)
        self.relays = Relays(self.occupancy, self.one_processor, clock)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve them. Ends by cancellation, after `close`."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.children.run)
            nursery.start_soon(self.readiness.run, name="children's sockets")
            nursery.start_soon(self.relays.run, name="overdue relays")
            nursery.start_soon(self.one_processor.run, name="held on one processor")
            task_status.started()

    def within(self, environment: Environment) -> Processes:
        """The same, for a model that runs in that environment. Whoever has this does not keep it."""
        within = copy(self)
        within.spawn = environment.spawn
        return within

    async def close(self) -> None:
        """Whatever still lives is ended."""
        await self.children.close()
        self.environments.close()


def execution_of(config: ModelConfig, python_execution: str) -> str:
    """Where the model's instances run: "process", "thread", "inline", or "auto" (by measurement)."""
    return config.parameters.get("execution", python_execution if config.backend == "python" else DEFAULT)


def host_maker(
    config: ModelConfig,
    model: LoadedModel,
    execution: str,
    processes: Processes | None,
    streaming: Streaming,
    clock: ClockNs,
) -> MakeHost:
    """How each instance of one model version gets its host, not yet open; called with its name and its group.

    Raises Unsupported where the model cannot run in that place.
    """
    if execution == PROCESS:
        host = partial(StreamProcessHost, streaming=streaming) if config.decoupled else ProcessHost
        return _in_processes(config, model, processes, clock, host)
    if config.decoupled:
        return _decoupled(config, model, streaming, clock)
    placement = Placement() if execution == DEFAULT and model.may_run_inline else None

    def make(name: str, group: InstanceGroup) -> Host:
        instance = model.instance(name, group)
        on_device = isinstance(instance, OnDevice)
        if on_device and execution == "inline":
            raise Unsupported(
                f"model '{config.name}': an instance on a GPU cannot run inline, where nobody may wait for it; "
                'use execution "thread", or kind: KIND_CPU'
            )
        host = (DeviceHost if on_device else LocalHost)(
            name,
            config.name,
            instance,
            len(config.inputs),
            len(config.outputs),
            None if on_device else placement,
            clock,
            always_inline=execution == "inline",
            may_write=not model.is_pure,
            passes_on=passes_on(config),
            receives=receives(config),
        )
        return _on_its_gpu(host, group)

    return make


def _decoupled(
    config: ModelConfig,
    model: LoadedModel,
    streaming: Streaming,
    clock: ClockNs,
    host: Callable[..., LocalHost] = StreamHost,
) -> MakeHost:
    """On threads, whatever the operator's default is: on the loop, nobody could read what a model sends."""
    return lambda name, group: _on_its_gpu(
        host(name, config.name, model.instance(name, group), len(config.inputs), streaming, clock), group
    )


def _on_its_gpu(host: LocalHost, group: InstanceGroup) -> LocalHost:
    host.is_on_gpu = group.kind == "KIND_GPU"
    return host


def sequence_host_maker(
    ports: SequencePorts,
    model: LoadedModel,
    execution: str,
    processes: Processes | None,
    streaming: Streaming,
    clock: ClockNs,
) -> MakeHost:
    """As `host_maker`, for a model of sequences; `model` was loaded with `ports.inner`."""
    config = ports.inner
    if execution == PROCESS:
        host: Callable[..., Host] = SequenceProcessHost
        if config.decoupled:
            host = partial(SequenceStreamProcessHost, streaming=streaming)
        return _in_processes(config, model, processes, clock, partial(host, ports))
    if config.decoupled:
        return _decoupled(config, model, streaming, clock, partial(SequenceStreamHost, ports))
    placement = Placement() if execution == DEFAULT and model.may_run_inline else None
    return lambda name, group: _on_its_gpu(
        SequenceLocalHost(
            ports,
            name,
            config.name,
            model.instance(name, group),
            len(config.inputs),
            len(config.outputs),
            placement,
            clock,
            always_inline=execution == "inline",
            may_write=not model.is_pure,
        ),
        group,
    )


def _in_processes(
    config: ModelConfig,
    model: LoadedModel,
    processes: Processes | None,
    clock: ClockNs,
    host: Callable[..., Host] = ProcessHost,
) -> MakeHost:
    if processes is None:
        raise Unsupported(f'model \'{config.name}\': execution "process" is for Linux; use "thread"')
    if not isinstance(model, RunsInProcess):
        raise Unsupported(
            f"model '{config.name}': its backend '{config.backend}' does not run in processes; "
            'use execution "thread", "inline" or "auto"'
        )
    packer = InputPacker(config.inputs)
    return lambda name, group: host(
        name,
        config,
        model.remote(name, group),
        packer,
        processes.spawn,
        processes.readiness,
        processes.occupancy,
        processes.relays,
        clock,
    )


def execution_timeout_ns(config: ModelConfig, hosts: Sequence[Host]) -> int:
    """After how long a batch's process is killed, 0 for never: the parameter `execution_timeout`, in seconds."""
    seconds = float(config.parameters.get("execution_timeout", 0))
    if seconds and not all(isinstance(host, ProcessHost) for host in hosts):
        log.warning(
            "model '%s': execution_timeout has no effect, since it does not run in processes of its own", config.name
        )
        return 0
    return round(seconds * SECOND_NS)
