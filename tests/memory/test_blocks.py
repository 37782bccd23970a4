"""Blocks of device memory come home with their last tensor, and are used again only behind what the device does."""

from __future__ import annotations

import pytest

from flowserve.memory.blocks import BlockPool
from flowserve.testing.fake_device import FakeMachine, Race
from flowserve.values import PINNED_MEMORY, gpu_memory

KIB = 1024


def _pool(machine: FakeMachine, budget_bytes: int = 64 * KIB) -> BlockPool:
    return BlockPool(machine.devices[0], gpu_memory(0), budget_bytes)


def test_a_block_comes_home_with_its_last_holder_and_serves_again() -> None:
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
    assert pool.statistics().reused == 1


def test_another_stream_that_gets_a_block_waits_for_its_last_use_without_holding_up_the_host() -> None:
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


def test_a_stream_takes_what_is_idle_before_what_another_one_still_uses() -> None:
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


def test_the_host_waits_before_it_gets_pinned_memory_that_a_device_still_reads() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = BlockPool(device, PINNED_MEMORY, 4 * KIB)
    stream = device.stream()
    block = pool.take(4 * KIB, None)
    assert block is not None
    machine.enqueue(stream, [machine.find(block.address, 1)], [])
    memory = block.memory
    with pytest.raises(Race, match="the host looks at it"):
        device.host_view(memory)  # type: ignore[arg-type]
    block.used(device.record(stream))
    del block
    block = pool.take(4 * KIB, None)
    assert block is not None
    device.host_view(block.memory)  # type: ignore[arg-type]
    assert machine.synchronised == 1


def test_a_budget_is_kept_and_what_waits_in_the_pool_makes_room() -> None:
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


def test_a_device_that_is_full_gets_back_what_waits_before_anybody_is_refused() -> None:
    machine = FakeMachine(memory_bytes=16 * KIB)
    pool = _pool(machine, 1024 * KIB)
    stream = machine.devices[0].stream()
    small = [pool.take(4 * KIB, stream) for _ in range(4)]
    assert pool.take(16 * KIB, stream) is None
    small.clear()
    large = pool.take(16 * KIB, stream)
    assert large is not None
    assert pool.take(KIB, stream) is None


def test_memory_goes_back_to_the_driver_only_after_the_host_saw_its_last_use_pass() -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = _pool(machine)
    stream = device.stream()
    block = pool.take(KIB, stream)
    assert block is not None
    machine.enqueue(stream, [], [machine.find(block.address, 1)])
    block.used(device.record(stream))
    del block
    pool.trim()
    assert machine.used_bytes(gpu_memory(0)) == 0
    assert machine.synchronised == 1


def test_adopted_memory_is_let_go_of_only_behind_its_last_use() -> None:
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
