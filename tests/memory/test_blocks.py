"""Blocks of device memory return to the pool with their last tensor, and are reused only after the device's work."""

from __future__ import annotations

import pytest

from flowserve.memory.device_memory import BlockPool
from flowserve.values import PINNED_MEMORY, gpu_memory
from tests.support.fake_device import FakeMachine, FakeMemory, Race

KIB = 1024


def _pool(machine: FakeMachine, budget_bytes: int = 64 * KIB) -> BlockPool:
    return BlockPool(machine.devices[0], gpu_memory(0), budget_bytes)


def test_a_block_is_returned_with_its_last_reference_and_reused() -> None:
    machine = FakeMachine()
    pool = _pool(machine)
    stream = machine.devices[0].stream()
    block = pool.take(4 * KIB, stream)
    assert block is not None
    address = block.address
    assert pool.statistics().lent_bytes == 4 * KIB
    del block
    assert pool.statistics().lent_bytes == 0
    again = pool.take(4 * KIB, stream)
    assert again is not None
    assert again.address == address
    assert pool.statistics().kept_bytes == 0


def test_another_stream_waits_for_the_last_use_of_a_reused_block_without_blocking_the_host() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = _pool(machine, 4 * KIB)
    first, second = device.stream(), device.stream()
    block = pool.take(4 * KIB, first)
    assert block is not None
    machine.enqueue(first, [], [machine.find(block.address, 1)])
    block.used(device.record(first))
    del block
    block = pool.take(4 * KIB, second)
    assert block is not None
    machine.enqueue(second, [], [machine.find(block.address, 1)])  # would be a Race without the wait
    assert machine.synchronised == 0


def test_a_stream_prefers_an_idle_block_to_one_that_another_stream_still_uses() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = _pool(machine)
    mine, other = device.stream(), device.stream()
    busy, idle = pool.take(4 * KIB, other), pool.take(4 * KIB, mine)
    assert busy is not None
    assert idle is not None
    busy.used(device.record(other))
    machine.enqueue(other, [], [])
    busy.used(device.record(other))
    free_address = idle.address
    del busy
    del idle
    taken = pool.take(4 * KIB, mine)
    assert taken is not None
    assert taken.address == free_address


def test_the_host_waits_for_a_device_that_still_reads_reused_pinned_memory() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = BlockPool(device, PINNED_MEMORY, 4 * KIB)
    stream = device.stream()
    block = pool.take(4 * KIB, None)
    assert block is not None
    machine.enqueue(stream, [machine.find(block.address, 1)], [])
    memory = block.memory
    assert isinstance(memory, FakeMemory)
    with pytest.raises(Race, match="the host looks at it"):
        device.host_view(memory)
    block.used(device.record(stream))
    del block
    block = pool.take(4 * KIB, None)
    assert block is not None
    assert isinstance(block.memory, FakeMemory)
    device.host_view(block.memory)
    assert machine.synchronised == 1


def test_a_budget_is_respected_and_free_blocks_are_released_to_make_room() -> None:
    machine = FakeMachine()
    pool = _pool(machine, 16 * KIB)
    stream = machine.devices[0].stream()
    held = [pool.take(4 * KIB, stream) for _ in range(4)]
    assert pool.take(4 * KIB, stream) is None
    held.pop()
    large = pool.take(8 * KIB, stream)
    assert large is None  # 12 of 16 are lent
    held.clear()
    large = pool.take(16 * KIB, stream)
    assert large is not None
    assert machine.used_bytes(gpu_memory(0)) == 16 * KIB
    assert pool.statistics().refused == 2


def test_free_blocks_are_released_to_a_full_device_before_a_request_is_refused() -> None:
    machine = FakeMachine(memory_bytes=16 * KIB)
    pool = _pool(machine, 1024 * KIB)
    stream = machine.devices[0].stream()
    small = [pool.take(4 * KIB, stream) for _ in range(4)]
    assert pool.take(16 * KIB, stream) is None
    small.clear()
    large = pool.take(16 * KIB, stream)
    assert large is not None
    assert pool.take(KIB, stream) is None


def test_memory_is_freed_only_after_the_host_saw_its_last_use_complete() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = _pool(machine, 4 * KIB)
    stream = device.stream()
    block = pool.take(KIB, stream)
    assert block is not None
    machine.enqueue(stream, [], [machine.find(block.address, 1)])
    block.used(device.record(stream))
    del block
    large = pool.take(4 * KIB, stream)
    assert large is not None
    assert machine.used_bytes(gpu_memory(0)) == 4 * KIB
    assert machine.synchronised == 1


def test_adopted_memory_is_released_only_after_its_last_use() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = _pool(machine)
    stream = device.stream()
    memory = device.allocate(KIB)
    block = pool.adopt(memory, memory.address, KIB)
    machine.enqueue(stream, [machine.find(block.address, 1)], [])
    event = device.record(stream)
    block.used(event)
    del block
    assert pool.statistics().adopted == 1
    device.synchronize(event)
    assert pool.statistics().adopted == 0
