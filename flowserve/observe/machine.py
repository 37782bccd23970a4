"""Figures of the machine: processors, memory and GPUs, read from the system on request.

Decides the meaning of Triton's CPU and GPU families. CPU utilization is the share of all processors' time that was not
idle since the last reading that is at least the interval old, measured in the processors' own ticks; used memory is
memory not available to programs. GPU figures come from NVML, the driver's own library, called directly so that no
package is needed; it covers all GPUs of the machine, regardless of which the process uses. A figure that the system
(Linux's /proc, NVML) does not provide is omitted rather than 0. Caller: `metrics`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

PROC: Final = Path("/proc")
_TICKS_PER_SECOND: Final = 100  # per processor; the unit in which the kernel reports times


@dataclass(frozen=True, slots=True)
class MachineReadings:
    """`utilization` is from 0 to 1. Sizes in bytes."""

    utilization: float
    memory_total: int
    memory_used: int


class MachineMeter:
    """CPU and memory figures. Each reading is compared with an earlier one, at least `interval_ms` old. Thread-safe."""

    def __init__(self, proc: Path = PROC, interval_ms: int = 0) -> None:
        self._proc = proc
        self._least = interval_ms * (os.cpu_count() or 1) * _TICKS_PER_SECOND // 1000
        self._lock = threading.Lock()
        self._busy, self._total = self._times() or (0, 0)
        self._utilization = 0.0

    def read(self) -> MachineReadings | None:
        """The current figures, None if the system does not provide them."""
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
            return MachineReadings(self._utilization, *memory)

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


LIBRARY: Final = "libnvidia-ml.so.1"
_UUID_BYTES: Final = 96


class _Utilization(ctypes.Structure):
    _fields_: ClassVar[Any] = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """`utilization` is from 0 to 1, sizes in bytes, power in watts, energy in joules since the server started."""

    uuid: str
    utilization: float | None
    memory_total: int | None
    memory_used: int | None
    power: float | None
    power_limit: float | None
    energy: float | None


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

    def read(self) -> Sequence[GpuReadings]:
        """The current figures."""
        with self._lock:
            return [self._readings(uuid, handle) for uuid, handle in self._handles.items()]

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

    def _readings(self, uuid: str, handle: Any) -> GpuReadings:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle, _Utilization())
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, _Memory())
        power = self._ask("nvmlDeviceGetPowerUsage", handle, ctypes.c_uint())
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.c_uint())
        energy, began = self._energy(handle), self._began[uuid]
        return GpuReadings(
            uuid,
            None if rates is None else rates.gpu / 100,
            None if memory is None else memory.total,
            None if memory is None else memory.used,
            None if power is None else power.value / 1000,
            None if limit is None else limit.value / 1000,
            None if energy is None or began is None else (energy - began) / 1000,
        )

    def _energy(self, handle: Any) -> int | None:
        """Millijoules since the driver was loaded."""
        total = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.c_ulonglong())
        return None if total is None else int(total.value)

    def _ask(self, call: str, handle: Any, answer: Any) -> Any:
        """NVML's result, None if this GPU or this version does not provide it."""
        function = getattr(self._nvml, call, None)
        return answer if function is not None and function(handle, ctypes.byref(answer)) == 0 else None
