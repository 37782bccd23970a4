"""The GPUs of a process; detection is cheap on a machine without one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from flowserve.errors import Unsupported
from flowserve.memory.devices import Devices, devices, using
from flowserve.memory.stream import ON_DEVICE, DeviceStream
from flowserve.memory.tensor import Tensor
from tests.support.fake_device import FakeMachine


def test_a_missing_gpu_is_named_together_with_the_existing_ones() -> None:
    found = Devices(FakeMachine(2).devices)
    assert found[1].place.number == 1
    with pytest.raises(Unsupported, match="there is no GPU 2 here: they are numbered from 0 to 1"):
        found[2]
    with pytest.raises(Unsupported, match="no driver"):
        Devices((), "no driver")[0]


def test_pools_are_limited_one_by_one_and_blocks_in_use_stay_in_use(caplog: pytest.LogCaptureFixture) -> None:
    found = Devices(FakeMachine(2).devices, gpu_bytes=4096)
    stream = found[0].device.stream()
    held = found[0].pool.take(2048, stream)
    found.limit(1024, {0: 512, 7: 1})
    budgets = {str(place): pool.budget_bytes for place, pool in found.statistics().items()}
    assert budgets == {"pinned": 1024, "gpu0": 512, "gpu1": 4096}
    assert held is not None
    assert found[0].pool.take(512, stream) is None
    del held
    assert found[0].pool.take(512, stream) is not None
    assert found.statistics()[found[0].place].kept_bytes <= 512
    assert [record.message for record in caplog.records] == ["there is no GPU 7 here whose pool could be limited"]


def test_tests_can_replace_the_gpus_of_the_process() -> None:
    before = devices()
    with using(Devices(FakeMachine().devices)) as found:
        assert devices() is found
    assert devices() is before


def test_detecting_gpus_without_a_driver_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flowserve.memory.devices import devices; found = devices(); "
        "heavy = {'cupy', 'onnxruntime'} & sys.modules.keys(); "
        "assert found.count or not heavy, heavy; print(found.count, found.why_none)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, why = done.stdout.strip().partition(" ")
    assert (int(count) > 0) != bool(why)


@pytest.mark.gpu
def test_on_hardware_rows_are_uploaded_and_downloaded_through_two_streams() -> None:
    memory = devices()[0]
    first, second = DeviceStream(memory), DeviceStream(memory)
    tensors = [Tensor(np.full((1, 1 << 20), value, np.float32), 0, 1) for value in range(4)]
    with first.batch():
        array, copied = first.gather(tensors)
        there = first.deliver([array], [1] * 4, [[ON_DEVICE] * 4])[0]
    assert copied == 4 << 22
    with second.batch():
        back, copied = second.gather(there[1:3])
        home = second.deliver([back], [1] * 2)[0]
    assert copied == 0
    assert [int(tensor.array[0, 0]) for tensor in home] == [1, 2]
    assert all((tensor.array == tensor.array[0, 0]).all() for tensor in home)
    first.close()
    second.close()


@pytest.mark.gpu
def test_on_hardware_memory_reused_across_streams_holds_the_last_write() -> None:
    """The same few blocks are reused as fast as the host can; a missing wait would appear as rows of another round."""
    memory = devices()[0]
    streams = [DeviceStream(memory) for _ in range(3)]
    for turn in range(300):
        tensors = [Tensor(np.full((1, 1 << 18), turn * 4 + row, np.float32), 0, 1) for row in range(4)]
        for number, stream in enumerate(streams):
            with stream.batch():
                # Another order each time, so that every stream copies.
                array, _ = stream.gather([*tensors[1:], tensors[0]])
                read_at = None if number == len(streams) - 1 else [[ON_DEVICE] * 4]
                tensors = stream.deliver([array], [1] * 4, read_at)[0]
        for row, tensor in enumerate(tensors):
            assert (tensor.array == turn * 4 + (row + len(streams)) % 4).all()
    for stream in streams:
        stream.close()
