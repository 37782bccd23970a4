"""Detection of the pages that a process has written, by its page table."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from flowserve.memory.segment import PAGE, PageTable, Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


def reader_of(writer: Segment) -> Segment:
    return Segment.read_private(writer.open_for_reading(), 1)


@pytest.mark.parametrize("nbytes", [100, PAGE, 200 * PAGE])
def test_read_pages_are_distinguished_from_written_pages(nbytes: int) -> None:
    writer = Segment.create(256 * PAGE)
    reader = reader_of(writer)
    pages = PageTable()
    start, stop = 4 * PAGE, 4 * PAGE + nbytes
    for at in (start, stop - 1):
        writer.memory[start:stop] = 3
        assert int(reader.memory[start:stop].max()) == 3
        assert not pages.is_written(reader, start, stop), "read"
        reader.memory[at] = 3  # the same value
        assert pages.is_written(reader, start, stop), "written"
        reader.forget_writes(start, stop)
        assert not pages.is_written(reader, start, stop), "forgotten"
    reader.memory[start - 1] = reader.memory[-(-stop // PAGE) * PAGE] = 1
    assert not pages.is_written(reader, start, stop), "its neighbours"


def test_untouched_pages_are_not_written() -> None:
    assert not PageTable().is_written(reader_of(Segment.create(8 * PAGE)), 0, 8 * PAGE)


def test_without_a_table_pages_count_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    reader = reader_of(Segment.create(PAGE))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        pages = PageTable()
    assert pages.is_written(reader, 0, 8)


def test_unwritten_pages_show_the_writers_next_contents() -> None:
    """Pages that are kept must never be copies: the block is reused for other tensors."""
    writer = Segment.create(PAGE)
    reader = reader_of(writer)
    array = np.ndarray((4,), np.float32, reader.map, 64)
    for number in range(3):
        writer.memory[64:80].view(np.float32)[:] = number
        assert array.tolist() == [number] * 4
        assert not PageTable().is_written(reader, 64, 80)
