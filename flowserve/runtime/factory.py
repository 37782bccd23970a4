"""Selects the kind of worker of an instance.

Decides it from the `execution` parameter of a model or the server's default for its backend. Knows every kind
of worker, and not how they run batches. Called by loading/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from flowserve.backends import registry
from flowserve.backends.base import LoadedModel, OnDevice, RunsInProcess
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Unsupported
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.ipc.tensors import InputPacker
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.remote.shm import ProcessPool, ProcessPort
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import RunsElsewhere, StateAdapter, Worker
from flowserve.runtime.workers.gpu import GpuWorker
from flowserve.runtime.workers.local import LocalWorker, Placement
from flowserve.runtime.workers.streaming import ResponseStreams

log = logging.getLogger("flowserve.load")

MakeWorker = Callable[[str, InstanceGroup], Worker]

PROCESS: Final = "process"
# Python models are third-party code: they run in processes where the system supports it.
PYTHON_EXECUTION: Final = PROCESS if SUPPORTED else "thread"
# The default execution place of a backend's instances; the model or the operator may override it.
DEFAULT: Final = "auto"


def execution_of(config: ModelConfig, python_execution: str) -> str:
    """Where the model's instances run: "process", "thread", "inline", or "auto" (by measurement)."""
    if "execution" in config.parameters:
        return config.parameters["execution"]
    if config.backend == "python":
        return python_execution
    found = registry.default_execution(config.backend) if config.backend else ""
    return "thread" if found == PROCESS and not SUPPORTED else found or DEFAULT


def worker_maker(
    config: ModelConfig,
    model: LoadedModel,
    execution: str,
    pool: ProcessPool | None,
    streams: ResponseStreams,
    clock: ClockNs,
    state: StateAdapter | None = None,
) -> MakeWorker:
    """A function that creates the worker of an instance, not yet open, from the instance's name and group.

    `state`: the adapter of a model of sequences; then `config` and `model` are those with its controls and states
    (`inner`). Raises Unsupported if the model cannot run in that place.
    """
    sink = streams if config.decoupled else None
    if execution == PROCESS:
        if pool is None:
            raise Unsupported(f'model \'{config.name}\': execution "process" is for Linux; use "thread"')
        if not isinstance(model, RunsInProcess):
            raise Unsupported(
                f"model '{config.name}': its backend '{config.backend}' does not run in processes; "
                'use execution "thread", "inline" or "auto"'
            )
        packer = InputPacker(config.inputs, [spec.name for spec in config.outputs])
        is_plain = sink is None and state is None

        def make_remote(name: str, group: InstanceGroup) -> Worker:
            port = ProcessPort(name, config, model.remote(name, group), packer, pool, is_plain=is_plain)
            return RemoteWorker(name, config, port, pool.clock, state=state, streams=sink)

        return make_remote
    placement = Placement() if execution == DEFAULT and model.may_run_inline else None

    def make(name: str, group: InstanceGroup) -> Worker:
        worker: LocalWorker
        instance = model.instance(name, group)
        is_plain = state is None and not config.decoupled
        if is_plain and isinstance(instance, OnDevice):
            if execution == "inline":
                raise Unsupported(
                    f"model '{config.name}': an instance on a GPU cannot run inline, since the event loop must not "
                    'wait for it; use execution "thread", or kind: KIND_CPU'
                )
            worker = GpuWorker(name, config.name, instance, len(config.outputs), clock, may_write=not model.is_pure)
        else:
            worker = LocalWorker(
                name,
                config.name,
                instance,
                None if config.decoupled else len(config.outputs),
                clock,
                state=state,
                # A decoupled model always runs on its thread: while it ran on the event loop, no reader could take its
                # responses.
                streams=sink,
                placement=None if config.decoupled else placement,
                always_inline=execution == "inline" and not config.decoupled,
                may_write=config.decoupled or not model.is_pure,
            )
        worker.is_on_gpu = group.kind == "KIND_GPU"
        return worker

    return make


def execution_timeout_ns(config: ModelConfig, workers: Sequence[Worker]) -> int:
    """The run time of a batch after which its process is killed, 0 for no limit: the parameter `execution_timeout`, in
    seconds.
    """
    seconds = float(config.parameters.get("execution_timeout", 0))
    if seconds and not all(isinstance(worker, RunsElsewhere) for worker in workers):
        log.warning(
            "model '%s': execution_timeout has no effect, since it does not run in processes of its own", config.name
        )
        return 0
    return round(seconds * SECOND_NS)
