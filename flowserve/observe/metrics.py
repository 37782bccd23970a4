"""Prometheus text of the machine, the GPUs, memory pools, and models' own metrics.

Decides names, labels and units of all except the models' own. Copies between memories and pools are shown only with a
GPU: otherwise there is no copy between memories. Deployments, of which there may be many, are in `deployment_metrics`.
docs/metrics.md lists every family. Caller: `http`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from flowserve.memory.devices import Devices, devices
from flowserve.observe.exposition import COUNTER, GAUGE, family
from flowserve.observe.machine import GpuMeter, GpuReadings, MachineMeter, MachineReadings
from flowserve.observe.model_metrics import ModelMetrics
from flowserve.values import PINNED_MEMORY

_MACHINE: Final[tuple[tuple[str, str, Callable[[MachineReadings], float]], ...]] = (
    ("nv_cpu_utilization", "Share of the processors' time in use, 0 to 1", lambda now: now.utilization),
    ("nv_cpu_memory_total_bytes", "Memory of the machine", lambda now: now.memory_total),
    ("nv_cpu_memory_used_bytes", "Memory in use, not available to programs", lambda now: now.memory_used),
)
_GPUS: Final[tuple[tuple[str, str, str, Callable[[GpuReadings], float | None]], ...]] = (
    ("nv_gpu_utilization", GAUGE, "Share of the time in which the GPU computed, 0 to 1", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", GAUGE, "Memory of the GPU", lambda gpu: gpu.memory_total),
    ("nv_gpu_memory_used_bytes", GAUGE, "Memory of the GPU in use", lambda gpu: gpu.memory_used),
    ("nv_gpu_power_usage", GAUGE, "Power of the GPU in watts", lambda gpu: gpu.power),
    ("nv_gpu_power_limit", GAUGE, "Power limit of the GPU in watts", lambda gpu: gpu.power_limit),
    ("nv_energy_consumption", COUNTER, "Energy of the GPU in joules since the server started", lambda gpu: gpu.energy),
)


def machine_text(machine: MachineMeter | None, gpus: GpuMeter | None, models: ModelMetrics | None) -> bytes:
    """The families of the machine, of the process's GPU memory, of all GPUs, and of models. Blocks: reads files and
    queries drivers.
    """
    own = "".join((*_machine(machine), *(device_families(found) if (found := devices()).count else ()), *_gpus(gpus)))
    return own.encode() + (b"" if models is None else models.text())


def _machine(machine: MachineMeter | None) -> Iterator[str]:
    now = None if machine is None else machine.read()
    if now is not None:
        for name, text, read in _MACHINE:
            yield family(name, text, GAUGE, [((), read(now))])


def _gpus(gpus: GpuMeter | None) -> Iterator[str]:
    found = gpus.read() if gpus is not None else ()
    for name, kind, text, read in _GPUS if found else ():
        values = ((gpu.uuid, read(gpu)) for gpu in found)
        yield family(name, text, kind, [((("gpu_uuid", uuid),), value) for uuid, value in values if value is not None])


def device_families(devices: Devices) -> Iterator[str]:
    """The families of copies between memories and of memory pools."""
    yield from _ledger(devices)
    yield from _pools(devices)


def _ledger(devices: Devices) -> Iterator[str]:
    found = [((("from", str(a)), ("to", str(b))), said) for (a, b), said in devices.ledger.entries().items()]
    text = "Copies of a batch's tensor from one memory to another"
    yield family("flowserve_memory_copies_total", text, COUNTER, [(labels, count) for labels, (count, _) in found])
    nbytes = [(labels, total) for labels, (_, total) in found]
    yield family("flowserve_memory_copied_bytes_total", "Bytes of those copies", COUNTER, nbytes)


def _pools(devices: Devices) -> Iterator[str]:
    pools = devices.statistics()
    pinned = pools[PINNED_MEMORY]
    for name, text, nbytes in (
        ("nv_pinned_memory_pool_total_bytes", "Budget of the pinned memory pool in bytes", pinned.budget_bytes),
        ("nv_pinned_memory_pool_used_bytes", "Bytes of the pinned memory pool used by tensors", pinned.lent_bytes),
    ):
        yield family(name, text, GAUGE, [((), nbytes)])
    held = [
        ((("memory", str(place)), ("state", state)), nbytes)
        for place, pool in pools.items()
        for state, nbytes in (("lent", pool.lent_bytes), ("kept", pool.kept_bytes), ("budget", pool.budget_bytes))
    ]
    text = "Bytes of a memory's pool: lent to tensors, kept for reuse, and the budget of both"
    yield family("flowserve_memory_pool_bytes", text, GAUGE, held)
    refused = [((("memory", str(place)),), pool.refused) for place, pool in pools.items()]
    text = "Tensors for which a memory's pool had no room, so that they were placed in another one"
    yield family("flowserve_memory_pool_refused_total", text, COUNTER, refused)
