"""Idle memory is returned, used memory is not: pool, arena and device pools on an integer clock, and the heap."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.arena import Arena
from flowserve.memory.device_memory import BlockPool
from flowserve.memory.heap import BUSY_BYTES_MIN, BUSY_PAUSE_NS, QUIET_BYTES_MIN, QUIET_PAUSE_NS, TrimRule, discard
from flowserve.memory.pool import IDLE_NS, POOLED_BYTES_MIN, Pool, size_class
from flowserve.memory.segment import PAGE, Lease
from flowserve.values import PINNED_MEMORY, Array, MemoryPlace, gpu_memory
from tests.support.fake_device import FakeMachine
from tests.support.shared_memory import check_arena

SECOND_NS = 1_000_000_000
LARGE = 1_000_000


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.fault("W8")
def test_a_buffer_is_taken_out_of_the_pool_after_ten_seconds_without_use_and_its_pages_are_returned() -> None:
    pool = Pool()
    buffers = [pool.take(LARGE) for _ in range(64)]
    for array in buffers:
        array[...] = 1
    del buffers, array
    kept = pool.take(LARGE)
    before = resident_bytes()
    assert pool.take_idle(SECOND_NS) == []
    assert pool.take_idle(SECOND_NS + IDLE_NS - 1) == []
    idle = pool.take_idle(SECOND_NS + IDLE_NS)
    assert len(idle) == 63
    assert (pool.kept_bytes, pool.lent_bytes) == (0, size_class(LARGE))
    for buffer in idle:
        buffer.discard()
    if os.path.exists("/proc/self/statm"):
        assert before - resident_bytes() > 60 * LARGE
    assert (kept == 1).all()  # in use all the time


# What a caller may do: take a buffer, drop one, let time pass and sweep.
Event = tuple[str, int]
events = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 2)),
        st.tuples(st.just("drop"), st.integers(0, 20)),
        st.tuples(st.just("sweep"), st.sampled_from([0, 1, IDLE_NS // 4, IDLE_NS // 2, IDLE_NS - 1, IDLE_NS])),
    ),
    max_size=60,
)


@pytest.mark.fault("W8")
@given(events=events)
def test_property_the_pool_gives_up_exactly_the_buffers_that_were_free_for_ten_seconds(events: list[Event]) -> None:
    pool = Pool()
    lent: list[Array] = []
    free: dict[int, int | None] = {}  # by address: the first sweep that found it free
    sizes: dict[int, int] = {}
    now_ns = 0
    array: Array | None = None
    for kind, number in events:
        if kind == "take":
            array = pool.take(POOLED_BYTES_MIN << number)
            lent.append(array)
            address = array.ctypes.data
            free.pop(address, None)
            sizes[address] = size_class(POOLED_BYTES_MIN << number)
        elif kind == "drop" and lent:
            array = lent.pop(number % len(lent))
            free[array.ctypes.data] = None
        elif kind == "sweep":
            now_ns += number
            given_up = {buffer.address for buffer in pool.take_idle(now_ns)}
            for address, since_ns in free.items():
                free[address] = now_ns if since_ns is None else since_ns
            assert given_up == {one for one, since_ns in free.items() if now_ns - (since_ns or 0) >= IDLE_NS}
            for address in given_up:
                del free[address]
        array = None  # nothing else refers to one
        assert pool.lent_bytes == sum(sizes[one.ctypes.data] for one in lent)
        assert pool.kept_bytes == sum(sizes[address] for address in free)


def blocks_of(arena: Arena) -> int:
    """Bytes of physical memory of all segments."""
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena.segments)


def release(arena: Arena, now_ns: int) -> None:
    for lease in arena.take_idle(now_ns):
        lease.segment.empty(lease.offset, lease.offset + lease.nbytes)


def fill(arena: Arena, nbytes: int, value: int) -> Array:
    view = arena.lease(nbytes).view()
    view[...] = value
    return view


@pytest.mark.fault("W8")
def test_free_memory_of_an_arena_is_returned_after_ten_seconds_and_used_memory_stays() -> None:
    arena = Arena()
    held = [fill(arena, LARGE, value) for value in range(8)]
    release(arena, 0)
    full = blocks_of(arena)
    assert full >= 8 * LARGE
    del held[1::2], held[:2]  # the last of 8 stays, and one before
    release(arena, IDLE_NS - 1)
    assert blocks_of(arena) == full
    assert arena.is_warm
    release(arena, IDLE_NS)
    assert blocks_of(arena) <= 2 * (LARGE + PAGE)
    assert [(int(view.min()), int(view.max())) for view in held] == [(4, 4), (6, 6)]
    # What is given back later goes too, and then nothing is left to be looked at.
    del held[:]
    release(arena, IDLE_NS + 1)
    assert blocks_of(arena) == 0
    assert not arena.is_warm
    check_arena(arena)
    view = fill(arena, 3 * LARGE, 7)
    assert len(arena.segments) <= 4  # the memory is used again
    assert (view == 7).all()


@pytest.mark.fault("W8")
def test_memory_that_batches_use_again_and_again_is_never_returned() -> None:
    arena = Arena()
    burst = [fill(arena, LARGE, 1) for _ in range(8)]
    del burst
    for second in range(40):
        fill(arena, LARGE, 2)  # one batch at a time, at the lowest address
        release(arena, second * SECOND_NS)
    assert LARGE <= blocks_of(arena) <= LARGE + PAGE
    assert arena.is_warm


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 6 * PAGE)),
            st.tuples(st.just("drop"), st.integers(0, 20)),
            st.tuples(st.just("collect"), st.sampled_from([1, IDLE_NS // 2, IDLE_NS])),
            st.tuples(st.just("empty"), st.integers(0, 20)),
        ),
        max_size=50,
    )
)
def test_property_the_release_of_an_arena_touches_no_block_in_use(events: list[Event]) -> None:
    """Also where blocks are taken between the collection of idle memory and its return on another thread."""
    arena = Arena(first_segment_bytes=8 * PAGE)
    lent: list[tuple[int, Array]] = []
    idle: list[Lease] = []
    lease: Lease | None = None
    view: Array | None = None
    now_ns = value = 0
    for kind, number in events:
        if kind == "take":
            value = value % 250 + 1
            lent.append((value, fill(arena, number, value)))
        elif kind == "drop" and lent:
            del lent[number % len(lent)]
        elif kind == "collect":
            now_ns += number
            idle += arena.take_idle(now_ns)
        elif kind == "empty" and idle:
            lease = idle.pop(number % len(idle))
            lease.segment.empty(lease.offset, lease.offset + lease.nbytes)
            lease = None
        for expected, view in lent:
            assert (view == expected).all()
    del lent, idle
    view = lease = None
    for _ in range(3):
        now_ns += IDLE_NS
        release(arena, now_ns)
    assert blocks_of(arena) == 0
    assert not arena.is_warm
    check_arena(arena)
    assert arena.lent_bytes == 0


@pytest.mark.fault("W8")
@pytest.mark.parametrize("place", [gpu_memory(0), PINNED_MEMORY], ids=str)
def test_free_blocks_of_a_device_pool_go_back_to_the_driver_after_ten_seconds(place: MemoryPlace) -> None:
    machine = FakeMachine()
    device = machine.devices[0]
    pool = BlockPool(device, place, 100 * LARGE)
    stream = device.stream()
    first, second, third = (pool.take(LARGE, stream) for _ in range(3))
    assert second is not None
    second.used(device.record(stream))
    assert machine.used_bytes(place) == 3 * size_class(LARGE)
    del first
    pool.release_idle(0)
    del second
    pool.release_idle(IDLE_NS - 1)
    assert pool.statistics().kept_bytes == 2 * size_class(LARGE)
    pool.release_idle(IDLE_NS)  # the first only
    assert pool.statistics().kept_bytes == size_class(LARGE)
    device.synchronize(device.record(stream))  # the device is done with the second
    pool.release_idle(2 * IDLE_NS)
    assert pool.statistics().kept_bytes == 0
    assert pool.statistics().lent_bytes == machine.used_bytes(place) == size_class(LARGE)
    assert third is not None


def test_the_heap_is_looked_at_rarely_and_trimmed_when_free_memory_has_grown() -> None:
    """A timeline on the integer clock."""
    rule = TrimRule()

    def look(second: float, free: int, *, is_quiet: bool = True) -> str:
        now_ns = round(second * SECOND_NS)
        if not rule.may_look(now_ns, is_quiet=is_quiet):
            return "too early"
        return "trim" if rule.must_trim(now_ns, free, is_quiet=is_quiet) else "enough"

    quiet_s, busy_s = QUIET_PAUSE_NS / SECOND_NS, BUSY_PAUSE_NS / SECOND_NS
    assert look(0, QUIET_BYTES_MIN - 1) == "enough"
    assert look(quiet_s - 0.1, 2 * QUIET_BYTES_MIN) == "too early"
    assert look(quiet_s, 2 * QUIET_BYTES_MIN) == "trim"
    assert look(2 * quiet_s, 3 * QUIET_BYTES_MIN - 1) == "enough"  # it was trimmed but for this
    assert look(3 * quiet_s, QUIET_BYTES_MIN) == "enough"  # the free memory is used again
    assert look(4 * quiet_s, 2 * QUIET_BYTES_MIN) == "trim"  # and was freed again
    at = 4 * quiet_s + busy_s
    assert look(at - 0.1, BUSY_BYTES_MIN * 2, is_quiet=False) == "too early"
    assert look(at, BUSY_BYTES_MIN, is_quiet=False) == "enough"
    assert look(at + busy_s, BUSY_BYTES_MIN * 2, is_quiet=False) == "trim"
    assert rule.must_trim(round((at + 2 * busy_s) * SECOND_NS), None, is_quiet=True)  # another C library


def test_the_interior_pages_of_a_buffer_only_are_discarded() -> None:
    """Its neighbours on the heap share its first and its last page."""
    whole = np.full(10 * PAGE, 7, np.uint8)
    start = -whole.ctypes.data % PAGE
    discard(whole.ctypes.data + start + 100, 3 * PAGE)
    assert (whole[: start + 100] == 7).all()
    assert (whole[start : start + PAGE] == 7).all()
    assert not whole[start + PAGE : start + 3 * PAGE].any()
    assert (whole[start + 3 * PAGE :] == 7).all()
