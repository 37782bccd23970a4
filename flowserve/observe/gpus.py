"""What the machine's GPUs do: how busy they are, what they hold and what they draw, asked of NVML when somebody asks.

Decided here: what Triton's GPU families mean here. NVML is the driver's own library for such figures, asked directly,
so that nothing has to be installed for it; it counts all GPUs of the machine, whichever of them this process may use.
What one of them does not tell is left out rather than 0, and without NVML there is nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

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
    """Every GPU that NVML shows. Safe to call from any thread."""

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
        """The figures now."""
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
        """What NVML says, None where this GPU, or this version, does not tell."""
        function = getattr(self._nvml, call, None)
        return answer if function is not None and function(handle, ctypes.byref(answer)) == 0 else None
