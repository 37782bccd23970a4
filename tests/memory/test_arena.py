"""Shared memory: blocks are returned when their last view is gone, and no reader sees another block's bytes."""

from __future__ import annotations

import fcntl
import gc
import os

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flowserve.errors import Internal
from flowserve.memory.arena import LARGEST_SEGMENT_BYTES, Arena, aligned
from flowserve.memory.segment import PAGE, Lease, Segment, locate
from flowserve.values import Array
from tests.support.shared_memory import check_arena


def test_a_block_is_returned_with_its_last_view_and_not_before() -> None:
    arena = Arena()
    view = arena.lease(1000).view()
    part = view[100:200].view(np.int32).reshape(5, 5)[2]
    del view
    assert arena.lent_bytes == PAGE
    del part
    assert arena.lent_bytes == 0


def test_a_free_block_is_reused_before_new_memory() -> None:
    arena = Arena()
    first = arena.lease(10 * PAGE)
    place = first.offset
    del first
    assert arena.lease(3 * PAGE).offset == place


def test_free_neighbours_are_merged() -> None:
    arena = Arena(first_segment_bytes=4 * PAGE)
    pieces = [arena.lease(PAGE) for _ in range(4)]
    for index in (1, 3, 0, 2):
        pieces[index] = None  # type: ignore[call-overload]  # the lease ends here
    whole = arena.lease(4 * PAGE)
    assert (whole.offset, len(arena.segments)) == (0, 1)


def test_a_block_that_does_not_fit_gets_a_new_larger_segment() -> None:
    arena = Arena(first_segment_bytes=4 * PAGE)
    leases = [arena.lease(size) for size in (3 * PAGE, 2 * PAGE, 100 * PAGE)]
    assert [segment.size for segment in arena.segments] == [4 * PAGE, 8 * PAGE, 100 * PAGE]
    assert len({lease.segment.number for lease in leases}) == 3


def test_only_a_very_large_block_returns_its_pages_to_the_kernel() -> None:
    arena = Arena()
    held = []
    for nbytes in (1 << 20, LARGEST_SEGMENT_BYTES + 1):
        lease = arena.lease(nbytes)
        view = lease.view()
        view[:: 8 * PAGE] = 7
        held.append(os.fstat(lease.segment.fd).st_blocks)
        del view, lease
        assert arena.lent_bytes == 0
        held.append(os.fstat(arena.segments[-1].fd).st_blocks)
    small, small_home, large, large_home = held
    assert small == small_home > 0
    assert large > large_home == 0
    again = arena.lease(LARGEST_SEGMENT_BYTES + 1)
    assert again.segment is arena.segments[-1]
    assert not again.view()[:: 8 * PAGE].any()


def test_a_lease_that_ends_inside_the_garbage_collector_is_returned() -> None:
    arena = Arena()
    circle: list[object] = [arena.lease(100).view()]
    circle.append(circle)
    del circle
    gc.collect()
    assert arena.lent_bytes == 0


def test_a_lease_is_returned_once_whatever_numpy_derives_from_it() -> None:
    gone: list[str] = []
    lease = Lease(Segment.create(PAGE), 0, 64, gone.append, "home")
    derived = [lease[8:16], np.asarray(lease), lease.piece((2, 4), np.dtype(np.float32), 32), lease.view()[3:]]
    del lease
    while derived:
        assert not gone, "a view is still alive"
        derived.pop()
    assert gone == ["home"]


def test_an_array_is_located_by_its_memory() -> None:
    lease = Arena().lease(4096)
    block = np.ndarray((16, 8), np.float32, lease.view(), 64)
    for array, offset in ((block, 64), (block[3:5], 160), (block[3:5].reshape(-1)[4:], 176)):
        found = locate(array)
        assert found is not None
        assert found[0] is lease
        assert found[1] == lease.offset + offset
    assert locate(block[:, 2:4]) is None, "its rows do not lie side by side"
    assert locate(np.zeros(4)) is None
    assert locate(np.zeros((4, 4))[1]) is None


def test_a_shared_segment_cannot_be_shrunk() -> None:
    segment = Segment.create(PAGE)
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_a_received_segment_is_refused_unless_its_size_is_sealed(seals: int) -> None:
    fd = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(Internal, match="size is not sealed"):
        Segment.read_shared(fd, 1)


@pytest.mark.parametrize("size", [0, 100])
def test_a_received_segment_must_have_whole_pages(size: int) -> None:
    fd = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(Internal, match=f"it has {size} bytes"):
        Segment.read_shared(fd, 1)


def test_a_descriptor_that_is_no_shared_memory_is_refused(tmp_path: os.PathLike[str]) -> None:
    file = os.open(os.path.join(tmp_path, "file"), os.O_CREAT | os.O_RDWR)
    with pytest.raises(Internal):
        Segment.read_shared(file, 1)


def test_a_reader_cannot_write_and_sees_what_the_writer_writes() -> None:
    writer = Segment.create(PAGE)
    reader = Segment.read_shared(os.dup(writer.fd), 1)
    writer.memory[7] = 9
    assert reader.memory[7] == 9
    assert not reader.memory.flags.writeable
    assert not Lease(reader, 0, 8, lambda _: None, None).view().flags.writeable
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(writer.open_for_reading(), b"x", 0)


def test_a_private_reader_writes_into_its_own_pages_until_it_discards_them() -> None:
    writer = Segment.create(2 * PAGE)
    reader = Segment.read_private(writer.open_for_reading(), 1)
    writer.memory[:] = 5
    reader.memory[10] = 6
    assert writer.memory[10] == 5
    whole = np.empty(20, np.uint8)
    reader.read_into(whole, 0)
    assert set(whole.tolist()) == {5}, "the writer's bytes, past the reader's own"
    writer.memory[:] = 7
    assert reader.memory[11] == 5, "its own page is stale"
    reader.forget_writes(10, 11)
    assert set(reader.memory.tolist()) == {7}


class Blocks(RuleBasedStateMachine):
    """A writer that fills blocks, readers that write into private mappings, and views of any lifetime."""

    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(first_segment_bytes=4 * PAGE)
        self.readers: dict[int, Segment] = {}
        self.live: dict[int, tuple[Array, int, int]] = {}  # by key: a view, its value, the bytes of its whole block
        self.next = 0

    def reader_of(self, segment: Segment) -> Segment:
        if segment.number not in self.readers:
            self.readers[segment.number] = Segment.read_private(segment.open_for_reading(), segment.number)
        return self.readers[segment.number]

    @rule(target=views, nbytes=st.integers(1, 6 * PAGE))
    def take(self, nbytes: int) -> int:
        view = self.arena.lease(nbytes).view()
        assert len(view) == nbytes
        assert view.ctypes.data % 64 == 0
        self.next += 1
        view[:] = self.next % 251
        self.live[self.next] = (view, self.next % 251, nbytes)
        return self.next

    @rule(key=views, first=st.integers(0, 100), last=st.integers(1, 100))
    def look_at_a_part(self, key: int, first: int, last: int) -> None:
        if key in self.live:
            view, value, nbytes = self.live[key]
            self.live[key] = (view[min(first, len(view) - 1) :][:last], value, nbytes)

    @rule(key=consumes(views))
    def drop(self, key: int) -> None:
        self.live.pop(key, None)

    @rule(key=views)
    def read_and_scribble(self, key: int) -> None:
        """As a model in another process does: read the writer's bytes, then overwrite them."""
        if key not in self.live:
            return
        view, value, _ = self.live[key]
        found = locate(view)
        assert found is not None
        reader = self.reader_of(found[0].segment)
        start, stop = found[1], found[1] + len(view)
        theirs = reader.memory[start:stop]
        assert (theirs == value).all()
        theirs[:] = 255
        reader.forget_writes(start, stop)

    @invariant()
    def every_view_keeps_its_contents(self) -> None:
        for view, value, _ in self.live.values():
            assert (view == value).all()

    @invariant()
    def blocks_are_in_use_exactly_while_a_view_lives(self) -> None:
        pages = sum(-(-nbytes // PAGE) for *_, nbytes in self.live.values())
        assert self.arena.lent_bytes == pages * PAGE
        check_arena(self.arena)

    def teardown(self) -> None:
        self.live.clear()
        assert self.arena.lent_bytes == 0


TestBlocks = Blocks.TestCase


def test_tensors_of_one_block_begin_at_whole_cache_lines() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
