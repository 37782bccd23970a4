"""Which models' requests stay on their GPU, and where a tensor is at home."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowserve.config.types import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy, SourceMap
from flowserve.memory.device_tensor import DeviceTensor, Mirror
from flowserve.memory.devices import Devices
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.runtime.homes import queue_for, residence
from flowserve.scheduling.affinity import NOWHERE, Affine
from flowserve.testing.fake_device import FakeMachine
from flowserve.values import HOST_MEMORY, gpu_memory

ON_TWO = InstanceGroup("g", "KIND_GPU", 1, (0, 1))
MODEL = ModelConfig("m", "python", "", 8, (), (), SourceMap("m"), DynamicBatching(), instance_groups=(ON_TWO,))


def is_affine(config: ModelConfig, *, is_limited: bool = False) -> bool:
    count = sum(group.count * (len(group.gpus) or 1) for group in config.instance_groups)
    return isinstance(queue_for(config, range(count), is_limited=is_limited), Affine)


def test_requests_stay_where_a_model_is_on_several_devices() -> None:
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
def test_who_is_next_is_not_decided_by_devices_where_it_is_a_promise(batching: DynamicBatching) -> None:
    assert not is_affine(replace(MODEL, dynamic_batching=batching))
    assert not is_affine(MODEL, is_limited=True)


def test_a_tensor_is_at_home_where_it_lies_or_where_its_copy_does() -> None:
    found = Devices(FakeMachine(2).devices)
    stream = DeviceStream(found[1])
    there = Tensor(np.zeros((3, 4), np.float32), 0, 2)
    assert residence(there) == (NOWHERE, 32)
    copy = there.to(gpu_memory(1), stream)
    assert isinstance(copy, DeviceTensor)
    assert residence(copy) == (1, 32)
    mirror = Mirror(there)
    assert residence(mirror) == (NOWHERE, 32)
    mirror.copies[1] = copy
    assert residence(mirror) == (1, 32)
    assert residence(copy.to(HOST_MEMORY, stream))[0] == NOWHERE
