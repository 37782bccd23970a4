"""The machine, the GPUs and what models show of their own, as Prometheus text.

Decided here: names, labels and units of the first two. Deployments, of which there may be very many, have a text of
their own (deployment_metrics.py). docs/metrics.md lists every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from flowserve.memory.devices import devices
from flowserve.observe.device_metrics import device_families
from flowserve.observe.exposition import COUNTER, GAUGE, family
from flowserve.observe.gpus import GpuMeter, GpuReadings
from flowserve.observe.machine import Machine, Readings
from flowserve.observe.model_metrics import ModelMetrics

_MACHINE: Final[tuple[tuple[str, str, Callable[[Readings], float]], ...]] = (
    ("nv_cpu_utilization", "Share of the processors' time in use, 0 to 1", lambda now: now.utilization),
    ("nv_cpu_memory_total_bytes", "Memory of the machine", lambda now: now.memory_total),
    ("nv_cpu_memory_used_bytes", "Memory that nobody else could have", lambda now: now.memory_used),
)
_GPUS: Final[tuple[tuple[str, str, str, Callable[[GpuReadings], float | None]], ...]] = (
    ("nv_gpu_utilization", GAUGE, "Share of the time in which the GPU computed, 0 to 1", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", GAUGE, "Memory of the GPU", lambda gpu: gpu.memory_total),
    ("nv_gpu_memory_used_bytes", GAUGE, "What of it is in use", lambda gpu: gpu.memory_used),
    ("nv_gpu_power_usage", GAUGE, "Watts that the GPU draws", lambda gpu: gpu.power),
    ("nv_gpu_power_limit", GAUGE, "Watts that it may draw", lambda gpu: gpu.power_limit),
    ("nv_energy_consumption", COUNTER, "Joules that it has drawn since the server started", lambda gpu: gpu.energy),
)


def machine_text(machine: Machine | None, gpus: GpuMeter | None, models: ModelMetrics | None) -> bytes:
    """How busy the machine is, what the process's GPUs hold, what all GPUs do, and what models show. Blocks: files and
    drivers are asked.
    """
    own = "".join((*_machine(machine), *(device_families(found) if (found := devices()).count else ()), *_gpus(gpus)))
    return own.encode() + (b"" if models is None else models.text())


def _machine(machine: Machine | None) -> Iterator[str]:
    now = None if machine is None else machine.read()
    if now is not None:
        for name, text, read in _MACHINE:
            yield family(name, text, GAUGE, [((), read(now))])


def _gpus(gpus: GpuMeter | None) -> Iterator[str]:
    found = gpus.read() if gpus is not None else ()
    for name, kind, text, read in _GPUS if found else ():
        values = ((gpu.uuid, read(gpu)) for gpu in found)
        yield family(name, text, kind, [((("gpu_uuid", uuid),), value) for uuid, value in values if value is not None])
