"""Which models' requests stay on their GPU, and the device of a tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowserve.config.types import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy, SourceMap
from flowserve.memory.device_tensor import DeviceTensor, Mirror
from flowserve.memory.devices import Devices
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.runtime.workers.policies import queue_for, residence
from flowserve.scheduling.affinity import NO_DEVICE, AffinityBatcher
from flowserve.values import HOST_MEMORY, gpu_memory
from tests.support.fake_device import FakeMachine, move

ON_TWO = InstanceGroup("g", "KIND_GPU", 1, (0, 1))
MODEL = ModelConfig(
    "m", "python", "", 8, (), (), SourceMap("m"), dynamic_batching=DynamicBatching(), instance_groups=(ON_TWO,)
)


def is_affine(config: ModelConfig, *, is_limited: bool = False) -> bool:
    count = sum(group.count * (len(group.gpus) or 1) for group in config.instance_groups)
    return isinstance(queue_for(config, range(count), is_limited=is_limited), AffinityBatcher)


def test_a_model_on_several_devices_has_device_affinity() -> None:
    assert is_affine(MODEL)
    assert is_affine(replace(MODEL, dynamic_batching=None, max_batch_size=0))
    on_cpu_too = (replace(ON_TWO, gpus=(0,)), InstanceGroup("c", "KIND_CPU", 2))
    assert is_affine(replace(MODEL, instance_groups=on_cpu_too))
    assert not is_affine(replace(MODEL, instance_groups=(replace(ON_TWO, gpus=(1,), count=2),)))
    assert not is_affine(replace(MODEL, instance_groups=(replace(ON_TWO, gpus=(), kind="KIND_CPU", count=2),)))


@pytest.mark.parametrize(
    "batching",
    [
        DynamicBatching(preserve_ordering=True),
        DynamicBatching(priority_levels=2, default_priority_level=1),
        DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=4)),
    ],
)
def test_a_model_with_a_guaranteed_order_ignores_device_affinity(batching: DynamicBatching) -> None:
    assert not is_affine(replace(MODEL, dynamic_batching=batching))
    assert not is_affine(MODEL, is_limited=True)


def test_a_tensor_resides_on_its_device_or_on_the_device_of_its_copy() -> None:
    found = Devices(FakeMachine(2).devices)
    stream = DeviceStream(found[1])
    there = Tensor(np.zeros((3, 4), np.float32), 0, 2)
    assert residence(there) == (NO_DEVICE, 32)
    copy = move(stream, there, gpu_memory(1))
    assert isinstance(copy, DeviceTensor)
    assert residence(copy) == (1, 32)
    mirror = Mirror(there)
    assert residence(mirror) == (NO_DEVICE, 32)
    mirror.copies[1] = copy
    assert residence(mirror) == (1, 32)
    assert residence(move(stream, copy, HOST_MEMORY))[0] == NO_DEVICE
