"""Copies between host and device, their number and ordering, on a fake device that raises if an ordering is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flowserve.graph.types import Conversion
from flowserve.memory.device_memory import Block
from flowserve.memory.device_tensor import DeviceTensor, Mirror
from flowserve.memory.devices import Devices
from flowserve.memory.stream import ALIGNMENT, ON_DEVICE, ON_HOST, DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, Array, gpu_memory
from tests.support.fake_device import FakeDevice, FakeInstance, FakeMachine, Race, add_one, move

GPU = gpu_memory(0)
IN, OUT, WITHIN = (HOST_MEMORY, GPU), (GPU, PINNED_MEMORY), (GPU, GPU)


class Bench:
    """A machine, and instances on it, each on its own stream."""

    def __init__(self, instances: int = 3, gpus: int = 1, **budgets: Any) -> None:
        self.machine = FakeMachine(gpus)
        self.devices = Devices(self.machine.devices, **budgets)
        self.instances = [FakeInstance(DeviceStream(self.devices[i % gpus]), add_one) for i in range(instances)]

    def copies(self) -> dict[object, int]:
        return {crossing: copies for crossing, (copies, _) in self.devices.ledger.entries().items()}

    def held(self) -> int:
        return sum(one.lent_bytes + one.adopted for one in self.devices.statistics().values())


def _rows(*values: float) -> list[Tensor]:
    """One request of one row for each value, each in its own memory."""
    return [Tensor(np.full((1, 4), value, np.float32), 0, 1) for value in values]


def _first(tensor: Tensor) -> float:
    array: Array = tensor.array
    return float(array.ravel()[0])


@pytest.mark.parametrize("count", [1, 32])
def test_a_chain_of_three_makes_one_upload_and_one_download_and_no_copy_between(count: int) -> None:
    bench = Bench()
    tensors = _rows(*range(count))
    for instance in bench.instances[:-1]:
        tensors = instance.run(tensors, [ON_DEVICE] * count)
        assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    tensors = bench.instances[-1].run(tensors)
    assert [_first(tensor) for tensor in tensors] == [value + 3 for value in range(count)]
    assert bench.copies() == {IN: 1, OUT: 1}
    assert bench.machine.copies == {(PINNED_MEMORY, GPU): 1, (GPU, PINNED_MEMORY): 1}
    assert bench.machine.synchronised == 1  # the host blocked once, at the last node
    del tensors
    assert bench.held() == 0


def test_members_that_are_not_neighbours_are_concatenated_on_the_device() -> None:
    bench = Bench()
    first = bench.instances[0].run(_rows(1, 2, 3), [ON_DEVICE] * 3)
    joined = bench.instances[1].run([first[2], first[0]])
    assert [_first(tensor) for tensor in joined] == [5, 3]
    assert bench.copies() == {IN: 1, WITHIN: 2, OUT: 1}


def test_a_batch_of_host_and_device_members_uploads_only_host_members() -> None:
    bench = Bench()
    there = bench.instances[0].run(_rows(1, 2), [ON_DEVICE] * 2)
    mixed = bench.instances[1].run([*_rows(10), *there, *_rows(20)])
    assert [_first(tensor) for tensor in mixed] == [11, 3, 4, 21]
    assert bench.devices.ledger.entries()[IN] == (2, 16 * 2 + 16 * 2)


def test_an_input_of_two_instances_is_uploaded_once() -> None:
    bench = Bench()
    shared: list[Tensor] = [Mirror(tensor) for tensor in _rows(1, 2)]
    assert [_first(tensor) for tensor in bench.instances[0].run(shared)] == [2, 3]
    assert [_first(tensor) for tensor in bench.instances[1].run(shared)] == [2, 3]
    assert [_first(tensor) for tensor in bench.instances[2].run(shared[:1])] == [2]
    assert bench.copies() == {IN: 1, OUT: 3}


def test_unaligned_rows_are_copied_to_an_aligned_address() -> None:
    bench = Bench()
    made = bench.instances[0].run(_rows(1, 2), [ON_DEVICE] * 2)
    assert _first(bench.instances[1].run(made[1:])[0]) == 4
    assert bench.copies() == {IN: 1, WITHIN: 1, OUT: 1}
    stream = bench.instances[2].stream
    with stream.batch():
        array, copied = stream.gather(made[1:])
        assert (array.address % ALIGNMENT, copied) == (0, 16)


def test_an_output_read_on_host_and_device_is_downloaded_once_and_stays() -> None:
    bench = Bench()
    both = bench.instances[0].run(_rows(1, 2), [ON_HOST | ON_DEVICE] * 2)
    assert [_first(tensor) for tensor in both] == [2, 3]
    assert [_first(tensor) for tensor in bench.instances[1].run(both)] == [3, 4]
    assert bench.copies() == {IN: 1, OUT: 2}


def test_only_rows_read_on_the_host_are_downloaded() -> None:
    bench = Bench()
    made = bench.instances[0].run(_rows(0, 1, 2, 3), [ON_HOST, ON_HOST, ON_DEVICE, ON_HOST])
    assert [isinstance(tensor, DeviceTensor) for tensor in made] == [False, False, True, False]
    assert [_first(made[m]) for m in (0, 1, 3)] == [1, 2, 4]
    assert bench.devices.ledger.entries()[OUT] == (2, 3 * 16)


def test_a_tensor_without_a_batch_dimension_is_transferred_the_same_way() -> None:
    bench = Bench()
    whole = [Tensor(np.array(41, np.int64))]
    made = bench.instances[1].run(bench.instances[0].run(whole, [ON_DEVICE]))
    assert made[0].array.shape == ()
    assert _first(made[0]) == 43


def test_a_conversion_on_the_device_is_a_view() -> None:
    bench = Bench()
    made = bench.instances[0].run(_rows(1), [ON_DEVICE])[0]
    converted = made.converted(Conversion(reshapes=(((4,), (2, 2)),), batch=-1))
    assert converted.shape == (2, 2)
    assert bench.instances[1].run([converted])[0].array.tolist() == [[3, 3], [3, 3]]
    assert WITHIN not in bench.copies()


def test_between_two_devices_a_batch_is_copied_once() -> None:
    bench = Bench(instances=2, gpus=2)
    made = bench.instances[0].run(_rows(1, 2, 3), [ON_DEVICE] * 3)
    assert [_first(tensor) for tensor in bench.instances[1].run(made)] == [3, 4, 5]
    assert bench.copies()[GPU, gpu_memory(1)] == 1


def test_move_copies_between_host_and_device_and_returns_a_tensor_already_in_place() -> None:
    bench = Bench()
    stream = bench.instances[0].stream
    tensor = _rows(7)[0]
    there = move(stream, tensor, GPU)
    assert isinstance(there, DeviceTensor)
    assert move(stream, there, GPU) is there
    back = move(bench.instances[1].stream, there, HOST_MEMORY)
    assert _first(back) == 7
    assert move(stream, back, HOST_MEMORY) is back
    assert bench.copies() == {IN: 1, OUT: 1}


def test_a_device_tensor_never_becomes_a_numpy_array_implicitly() -> None:
    bench = Bench()
    made = bench.instances[0].run(_rows(1), [ON_DEVICE])[0]
    with pytest.raises(TypeError, match="lies in gpu0, not on the host"):
        _ = made.array
    with pytest.raises(TypeError, match="lies in gpu0, not on the host"):
        np.asarray(made.block)


def test_with_a_full_device_tensors_are_in_pinned_memory_and_results_are_correct(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(gpu_bytes=0)
    tensors = bench.instances[0].run(_rows(1, 2), [ON_DEVICE] * 2)
    assert [_first(tensor) for tensor in bench.instances[1].run(tensors)] == [3, 4]
    assert bench.machine.used_bytes(GPU) == 0
    assert [record.message for record in caplog.records] == [
        "the pool of gpu0 (0 bytes) has no room for 32 bytes more: tensors lie in host memory meanwhile"
    ]
    del tensors
    assert bench.held() == 0


def test_without_pinned_memory_copies_block_and_results_are_correct() -> None:
    bench = Bench(pinned_bytes=0)
    tensors = bench.instances[0].run(_rows(1, 2), [ON_DEVICE] * 2)
    assert [_first(tensor) for tensor in bench.instances[1].run(tensors)] == [3, 4]
    assert bench.machine.used_bytes(PINNED_MEMORY) == 0


def test_a_failed_batch_leaks_nothing_and_its_memory_is_not_reused_too_early() -> None:
    bench = Bench(gpu_bytes=512)

    def fail(array: Array, made: Array) -> None:
        raise RuntimeError("no")

    bench.instances[0].kernel = fail
    with pytest.raises(RuntimeError, match="no"):
        bench.instances[0].run(_rows(1))
    assert bench.held() == 0
    assert _first(bench.instances[1].run(_rows(1))[0]) == 2  # the same memory, on another stream


def test_a_lost_device_fails_every_batch_and_leaks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeDevice, "record", lost)
    monkeypatch.setattr(FakeMachine, "check", lambda *_, **__: None)  # it does nothing any more, in whatever order
    for _ in range(3):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            bench.instances[0].run(_rows(1))
        assert bench.held() == 0


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "wait", lambda *_: None)


def _no_synchronising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "synchronize", lambda *_: None)


def _no_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "used", lambda *_: None)


def _no_events_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStream, "_upload_missing", _upload_without_event)


_upload_missing = DeviceStream._upload_missing


def _upload_without_event(self: DeviceStream, tensors: list[Tensor]) -> object:
    found, nbytes = _upload_missing(self, tensors)
    for tensor in found:
        tensor.block.ready = None
    return found, nbytes


def _chain(bench: Bench) -> None:
    bench.instances[1].run(bench.instances[0].run(_rows(1), [ON_DEVICE]), [ON_DEVICE])


def _exit(bench: Bench) -> None:
    bench.instances[0].run(_rows(1))


def _reuse(bench: Bench) -> None:
    for instance in bench.instances:
        instance.run(_rows(1), [ON_DEVICE])


def _shared(bench: Bench) -> None:
    shared: list[Tensor] = [Mirror(tensor) for tensor in _rows(1)]
    first, second = bench.instances[:2]
    with first.stream.batch():
        first.stream.gather(shared)
        second.run(shared)


@pytest.mark.parametrize(
    ("remove", "scene"),
    [
        (_no_wait, _chain),  # a reader does not wait for the writer
        (_no_wait, _shared),
        (_no_events_of_their_own, _shared),
        (_no_synchronising, _exit),  # the host reads what has not arrived
        (_no_wait, _reuse),  # memory goes to another stream
        (_no_uses, _reuse),
    ],
)
def test_each_ordering_is_needed_the_fake_device_detects_a_missing_one(
    remove: Callable[[pytest.MonkeyPatch], None],
    scene: Callable[[Bench], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene(Bench(gpu_bytes=1024))
    remove(monkeypatch)
    with pytest.raises(Race):
        scene(Bench(gpu_bytes=1024))


def test_a_stream_is_closed_after_its_work() -> None:
    bench = Bench()
    bench.instances[0].run(_rows(1), [ON_DEVICE])
    bench.instances[0].stream.close()
    with pytest.raises(AssertionError, match="closed"):
        bench.instances[0].run(_rows(1))
