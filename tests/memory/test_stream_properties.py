"""Property tests of streams: for any instances, devices and order of operations, every value is correct, no ordering is
missing, no memory is in use after the last tensor, and the ledger matches the actual copies.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.device_tensor import DeviceTensor, Mirror
from flowserve.memory.devices import Devices
from flowserve.memory.stream import ON_DEVICE, ON_HOST, DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, Array, MemoryPlace
from tests.support.fake_device import FakeInstance, FakeMachine, add_one, move

WIDTH = 32


class Failure(Exception):
    pass


def _fail(array: Array, made: Array) -> None:
    raise Failure


class World:
    """`held` are tensors with live references, each with the value of its elements."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.machine = FakeMachine(data.draw(st.integers(1, 2)), is_quick=data.draw(st.booleans()))
        budgets = st.sampled_from([0, 1024, 4096, 1 << 20])
        self.devices = Devices(self.machine.devices, gpu_bytes=data.draw(budgets), pinned_bytes=data.draw(budgets))
        count = data.draw(st.integers(1, 4))
        self.instances = [
            FakeInstance(DeviceStream(self.devices[i % self.devices.count]), add_one) for i in range(count)
        ]
        self.held: list[tuple[Tensor, int]] = []

    def arrive(self) -> None:
        """New requests, some with several readers."""
        for _ in range(self.data.draw(st.integers(1, 4))):
            value, rows = self.data.draw(st.integers(0, 99)), self.data.draw(st.integers(0, 3))
            tensor = Tensor(np.full((rows, WIDTH), value, np.float32), 0, rows)
            self.held.append((Mirror(tensor) if self.data.draw(st.booleans()) else tensor, value))

    def run(self) -> None:
        """A batch of any held tensors, on any instance; perhaps it fails."""
        if not self.held:
            return
        chosen = self.data.draw(st.lists(st.integers(0, len(self.held) - 1), min_size=1, max_size=4, unique=True))
        if self.data.draw(st.booleans()):
            chosen.sort()
        read_at = [self.data.draw(st.sampled_from([ON_HOST, ON_DEVICE, ON_HOST | ON_DEVICE])) for _ in chosen]
        instance = self.data.draw(st.sampled_from(self.instances))
        instance.kernel = _fail if self.data.draw(st.integers(0, 9)) == 0 else add_one
        try:
            made = instance.run([self.held[m][0] for m in chosen], read_at)
        except Failure:
            return
        self.held += [(tensor, self.held[m][1] + 1) for tensor, m in zip(made, chosen, strict=True)]

    def bring(self) -> None:
        """Move one tensor to the host or a device."""
        if not self.held:
            return
        tensor, value = self.held[self.data.draw(st.integers(0, len(self.held) - 1))]
        stream = self.data.draw(st.sampled_from(self.instances)).stream
        place = self.data.draw(st.sampled_from([HOST_MEMORY, stream.place]))
        self.held.append((move(stream, tensor, place), value))

    def let_go(self) -> None:
        kept = self.data.draw(st.integers(0, len(self.held)))
        del self.held[kept:]

    def look(self) -> None:
        """Every tensor has its expected value when copied to the host."""
        stream = self.instances[0].stream
        for tensor, value in self.held:
            assert (move(stream, tensor, HOST_MEMORY).array == value).all()


@given(st.data())
def test_properties_of_values_orderings_memory_and_the_ledger(data: st.DataObject) -> None:
    world = World(data)
    steps: list[Any] = [world.arrive, world.run, world.run, world.bring, world.let_go, world.look]
    for step in data.draw(st.lists(st.sampled_from(steps), max_size=20)):
        step()
        for place, pool in world.devices.statistics().items():
            assert pool.lent_bytes + pool.kept_bytes <= pool.budget_bytes
            assert world.machine.used_bytes(place) == pool.lent_bytes + pool.kept_bytes
    world.look()
    world.held.clear()
    for pool in world.devices.statistics().values():
        assert pool.lent_bytes == 0
    assert _by_side(world.machine.copies) == _by_side(
        {crossing: copies for crossing, (copies, _) in world.devices.ledger.entries().items()}
    )
    for instance in world.instances:
        instance.stream.wait()
    for place, pool in world.devices.statistics().items():
        assert pool.adopted == 0
        assert world.machine.used_bytes(place) == pool.kept_bytes


def _by_side(copies: Any) -> Counter[tuple[MemoryPlace, MemoryPlace]]:
    """Counts with pinned and ordinary host memory merged."""
    sides: Counter[tuple[MemoryPlace, MemoryPlace]] = Counter()
    for (source, to), count in copies.items():
        sides[_side(source), _side(to)] += count
    return sides


def _side(place: MemoryPlace) -> MemoryPlace:
    return HOST_MEMORY if place == PINNED_MEMORY else place


def test_a_full_device_gets_no_device_tensors() -> None:
    machine = FakeMachine()
    devices = Devices(machine.devices, gpu_bytes=0, pinned_bytes=0)
    instance = FakeInstance(DeviceStream(devices[0]), add_one)
    tensor = Tensor(np.zeros((1, WIDTH), np.float32), 0, 1)
    assert not isinstance(move(instance.stream, tensor, devices[0].place), DeviceTensor)
