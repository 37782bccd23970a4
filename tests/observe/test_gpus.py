"""Figures of GPUs, with a fake NVML."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowserve.observe.machine import GpuMeter, machine_text

NOT_SUPPORTED = 3


def put(where: Any, kind: Any, *values: int) -> int:
    target = ctypes.cast(where, ctypes.POINTER(kind)).contents
    for field, value in zip([name for name, *_ in getattr(kind, "_fields_", ())] or ["value"], values, strict=False):
        setattr(target, field, value)
    return 0


class Three(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Two(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """NVML with two GPUs; the second provides only its memory."""

    def __init__(self) -> None:
        self.energy = 5_000
        self.is_initialised = False

    def nvmlInit_v2(self) -> int:
        self.is_initialised = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        assert self.is_initialised
        return put(count, ctypes.c_uint, 2)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return put(handle, ctypes.c_void_p, 100 + index.value)

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, length: Any) -> int:
        uuid.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, answer: Any) -> int:
        return put(answer, Two, 25, 90) if handle.value == 100 else NOT_SUPPORTED

    def nvmlDeviceGetMemoryInfo(self, handle: Any, answer: Any) -> int:
        return put(answer, Three, 80 << 30, 79 << 30, 1 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: Any, answer: Any) -> int:
        return put(answer, ctypes.c_uint, 61_500) if handle.value == 100 else NOT_SUPPORTED

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, answer: Any) -> int:
        return put(answer, ctypes.c_uint, 300_000) if handle.value == 100 else NOT_SUPPORTED

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, answer: Any) -> int:
        return put(answer, ctypes.c_ulonglong, self.energy) if handle.value == 100 else NOT_SUPPORTED


def missing(name: str) -> Any:
    raise OSError(name)


def test_every_figure_of_a_gpu_is_read_in_tritons_units() -> None:
    nvml = Nvml()
    meter = GpuMeter(lambda _: nvml)
    nvml.energy += 2_500
    memory = {"nv_gpu_memory_total_bytes": 80 << 30, "nv_gpu_memory_used_bytes": 1 << 30}
    power = {"nv_gpu_power_usage": 61.5, "nv_gpu_power_limit": 300.0, "nv_energy_consumption": 2.5}
    assert meter.read() == {"GPU-100": {"nv_gpu_utilization": 0.25, **memory, **power}, "GPU-101": memory}


def test_metrics_are_labelled_by_uuid_and_omit_missing_figures() -> None:
    nvml = Nvml()
    text = machine_text(None, GpuMeter(lambda _: nvml), None).decode()
    assert 'nv_energy_consumption{gpu_uuid="GPU-100"} 0' in text, "as Triton calls it"
    found = {
        (sample.name.removesuffix("_total"), sample.labels["gpu_uuid"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "gpu_uuid" in sample.labels
    }
    assert found == {
        ("nv_gpu_utilization", "GPU-100"): 0.25,
        ("nv_gpu_memory_total_bytes", "GPU-100"): 80 << 30,
        ("nv_gpu_memory_total_bytes", "GPU-101"): 80 << 30,
        ("nv_gpu_memory_used_bytes", "GPU-100"): 1 << 30,
        ("nv_gpu_memory_used_bytes", "GPU-101"): 1 << 30,
        ("nv_gpu_power_usage", "GPU-100"): 61.5,
        ("nv_gpu_power_limit", "GPU-100"): 300.0,
        ("nv_energy_consumption", "GPU-100"): 0.0,
    }


def test_without_nvml_there_are_no_gpu_metrics() -> None:
    assert GpuMeter(missing).read() == {}
    assert b"nv_gpu" not in machine_text(None, GpuMeter(missing), None)
    nvml = Nvml()
    nvml.nvmlInit_v2 = lambda: 9  # type: ignore[method-assign]  # its driver is not loaded
    assert GpuMeter(lambda _: nvml).read() == {}


@pytest.mark.gpu
def test_on_hardware_every_figure_has_a_sensible_size() -> None:
    for uuid, figures in GpuMeter().read().items():
        assert uuid.startswith("GPU-")
        assert figures.get("nv_gpu_memory_total_bytes", 1 << 30) > 1 << 28
        assert 0 <= figures.get("nv_gpu_utilization", 0) <= 1
