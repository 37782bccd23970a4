"""Prometheus text of the machine, the GPUs, memory pools, and models' own metrics.

Decides names, labels and units of all except the models' own, and the meaning of Triton's CPU and GPU families. CPU
utilization is the share of all processors' time that was not idle since the last reading that is at least the interval
old, measured in the processors' own ticks; used memory is memory not available to programs. GPU figures come from NVML,
the driver's own library, called directly so that no package is needed; it covers all GPUs of the machine, regardless of
which the process uses. A figure that the system (Linux's /proc, NVML) does not provide is omitted rather than 0.

Copies between memories and pools are shown only with a GPU: otherwise there is no copy between memories. Deployments,
of which there may be many, are in `deployment_metrics`. docs/metrics.md lists every family. Caller: `http`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from flowserve.memory.devices import Devices, devices
from flowserve.observe.exposition import COUNTER, GAUGE, family
from flowserve.observe.model_metrics import ModelMetrics
from flowserve.values import PINNED_MEMORY

PROC: Final = Path("/proc")
LIBRARY: Final = "libnvidia-ml.so.1"
_TICKS_PER_SECOND: Final = 100  # per processor; the unit in which the kernel reports times
_UUID_BYTES: Final = 96

_MACHINE: Final = (
    ("nv_cpu_utilization", "Share of the processors' time in use, 0 to 1"),
    ("nv_cpu_memory_total_bytes", "Memory of the machine"),
    ("nv_cpu_memory_used_bytes", "Memory in use, not available to programs"),
)
_ENERGY: Final = "nv_energy_consumption"
_GPUS: Final = (
    ("nv_gpu_utilization", GAUGE, "Share of the time in which the GPU computed, 0 to 1"),
    ("nv_gpu_memory_total_bytes", GAUGE, "Memory of the GPU"),
    ("nv_gpu_memory_used_bytes", GAUGE, "Memory of the GPU in use"),
    ("nv_gpu_power_usage", GAUGE, "Power of the GPU in watts"),
    ("nv_gpu_power_limit", GAUGE, "Power limit of the GPU in watts"),
    (_ENERGY, COUNTER, "Energy of the GPU in joules since the server started"),
)


def machine_text(machine: MachineMeter | None, gpus: GpuMeter | None, models: ModelMetrics | None) -> bytes:
    """The families of the machine, of the process's GPU memory, of all GPUs, and of models. Blocks: reads files and
    queries drivers.
    """
    own = "".join((*_machine(machine), *(_memories(found) if (found := devices()).count else ()), *_gpus(gpus)))
    return own.encode() + (b"" if models is None else models.text())


def _machine(machine: MachineMeter | None) -> Iterator[str]:
    now = None if machine is None else machine.read()
    for (name, text), value in zip(_MACHINE, now or (), strict=False):
        yield family(name, text, GAUGE, [((), value)])


def _gpus(gpus: GpuMeter | None) -> Iterator[str]:
    found = gpus.read() if gpus is not None else {}
    for name, kind, text in _GPUS if found else ():
        values = [((("gpu_uuid", uuid),), figures[name]) for uuid, figures in found.items() if name in figures]
        yield family(name, text, kind, values)


def _memories(devices: Devices) -> Iterator[str]:
    """The families of copies between memories and of memory pools."""
    found = [((("from", str(a)), ("to", str(b))), said) for (a, b), said in devices.ledger.entries().items()]
    text = "Copies of a batch's tensor from one memory to another"
    yield family("flowserve_memory_copies_total", text, COUNTER, [(labels, count) for labels, (count, _) in found])
    copied = [(labels, total) for labels, (_, total) in found]
    yield family("flowserve_memory_copied_bytes_total", "Bytes of those copies", COUNTER, copied)
    pools = devices.statistics()
    pinned = pools[PINNED_MEMORY]
    text = "Budget of the pinned memory pool in bytes"
    yield family("nv_pinned_memory_pool_total_bytes", text, GAUGE, [((), pinned.budget_bytes)])
    text = "Bytes of the pinned memory pool used by tensors"
    yield family("nv_pinned_memory_pool_used_bytes", text, GAUGE, [((), pinned.lent_bytes)])
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


class MachineMeter:
    """CPU and memory figures. Each reading is compared with an earlier one, at least `interval_ms` old. Thread-safe."""

    def __init__(self, proc: Path = PROC, interval_ms: int = 0) -> None:
        self._proc = proc
        self._least = interval_ms * (os.cpu_count() or 1) * _TICKS_PER_SECOND // 1000
        self._lock = threading.Lock()
        self._busy, self._total = self._times() or (0, 0)
        self._utilization = 0.0

    def read(self) -> tuple[float, int, int] | None:
        """The utilization from 0 to 1, and the total and the used memory in bytes; None if the system does not provide
        them.
        """
        memory = self._memory()
        with self._lock:
            times = self._times()
            if times is None or memory is None:
                return None
            busy, total = times
            if total > self._total and total - self._total >= self._least:
                share = (busy - self._busy) / (total - self._total)
                self._utilization = min(max(share, 0.0), 1.0)
                self._busy, self._total = busy, total
            return self._utilization, *memory

    def _times(self) -> tuple[int, int] | None:
        """Ticks of all processors since the machine started: (not idle, all)."""
        try:
            name, *fields = (self._proc / "stat").read_text("ascii").partition("\n")[0].split()
            ticks = [int(field) for field in fields[:8]]  # the next two are included in the first ones
        except (OSError, ValueError):
            return None
        if name != "cpu" or len(ticks) < 5:
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    def _memory(self) -> tuple[int, int] | None:
        try:
            lines = (self._proc / "meminfo").read_text("ascii").splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
            return sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"]
        except (OSError, ValueError, KeyError):
            return None


class _Utilization(ctypes.Structure):
    _fields_: ClassVar[Any] = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


# The figures by family: NVML's call, its result, and the value in the unit of the family.
_NVML: Final[Mapping[str, tuple[str, type[Any], Callable[[Any], float]]]] = {
    "nv_gpu_utilization": ("nvmlDeviceGetUtilizationRates", _Utilization, lambda rates: rates.gpu / 100),
    "nv_gpu_memory_total_bytes": ("nvmlDeviceGetMemoryInfo", _Memory, lambda memory: memory.total),
    "nv_gpu_memory_used_bytes": ("nvmlDeviceGetMemoryInfo", _Memory, lambda memory: memory.used),
    "nv_gpu_power_usage": ("nvmlDeviceGetPowerUsage", ctypes.c_uint, lambda power: power.value / 1000),
    "nv_gpu_power_limit": ("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint, lambda power: power.value / 1000),
}


class GpuMeter:
    """Figures of every GPU known to NVML. Thread-safe."""

    def __init__(self, open_library: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        try:
            nvml = open_library(LIBRARY)
        except OSError:
            return
        if nvml.nvmlInit_v2() == 0:
            self._nvml = nvml
            self._handles = self._found()
        self._began = {uuid: self._energy(handle) for uuid, handle in self._handles.items()}

    def read(self) -> Mapping[str, Mapping[str, float]]:
        """The current figures of each GPU: UUID -> name of the family -> value."""
        with self._lock:
            return {uuid: dict(self._figures(uuid, handle)) for uuid, handle in self._handles.items()}

    def _found(self) -> dict[str, Any]:
        count = ctypes.c_uint(0)
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        found = {}
        for index in range(count.value):
            handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
                continue
            if self._nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES)) == 0:
                found[uuid.value.decode("ascii", "replace")] = handle
        return found

    def _figures(self, uuid: str, handle: Any) -> Iterator[tuple[str, float]]:
        for name, (call, result, figure) in _NVML.items():
            answer = self._ask(call, handle, result())
            if answer is not None:
                yield name, figure(answer)
        energy, began = self._energy(handle), self._began[uuid]
        if energy is not None and began is not None:
            yield _ENERGY, (energy - began) / 1000

    def _energy(self, handle: Any) -> int | None:
        """Millijoules since the driver was loaded."""
        total = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.c_ulonglong())
        return None if total is None else int(total.value)

    def _ask(self, call: str, handle: Any, answer: Any) -> Any:
        """NVML's result, None if this GPU or this version does not provide it."""
        function = getattr(self._nvml, call, None)
        return answer if function is not None and function(handle, ctypes.byref(answer)) == 0 else None
