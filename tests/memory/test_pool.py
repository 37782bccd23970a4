"""Buffers return to the pool when their last view is gone, on any thread."""

from __future__ import annotations

import gc
import os
import platform
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import ALIGNMENT, HOST, POOLED_BYTES_MIN, Pool, size_class
from flowserve.values import Array

LARGE = 600_000


def test_a_buffer_is_returned_with_its_last_view_and_reused() -> None:
    pool = Pool()
    array = pool.take(LARGE)
    address = array.ctypes.data
    del array
    assert (pool.lent_bytes, pool.kept_bytes) == (0, size_class(LARGE))
    again = pool.take(LARGE)
    assert again.ctypes.data == address
    assert (pool.lent_bytes, pool.kept_bytes) == (size_class(LARGE), 0)


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a[10:][5:],
        lambda a: a.view(np.float32).reshape(100, -1)[3:7].T,
        lambda a: a.view(np.int16)[::2].reshape(-1, 10)[0],
        lambda a: memoryview(a)[100:],
        lambda a: np.frombuffer(a, np.uint8)[4:],
        lambda a: np.asarray(memoryview(a.view(np.float64)))[0:1],
        lambda a: np.from_dlpack(a)[1:],
        lambda a: np.broadcast_to(a[:1], (5, 1)),
        lambda a: np.lib.stride_tricks.as_strided(a, (2,), (1,)),
    ],
)
def test_a_derived_view_keeps_the_buffer_in_use(derive: Callable[[Array], Any]) -> None:
    pool = Pool()
    view = derive(pool.take(LARGE))
    gc.collect()
    assert pool.lent_bytes > 0
    del view
    gc.collect()
    assert pool.lent_bytes == 0


def test_two_buffers_in_use_never_share_memory() -> None:
    pool = Pool()
    arrays = [pool.take(LARGE) for _ in range(4)]
    for i, array in enumerate(arrays):
        array[...] = i
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("nbytes", [0, 1, POOLED_BYTES_MIN - 1, POOLED_BYTES_MIN, POOLED_BYTES_MIN + 1, LARGE])
def test_a_buffer_has_the_requested_size_is_aligned_and_writable(nbytes: int) -> None:
    array = Pool().take(nbytes)
    assert array.nbytes == nbytes
    assert array.dtype == np.uint8
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.flags.writeable
    array[...] = 1


def test_small_buffers_are_not_kept() -> None:
    pool = Pool()
    small = pool.take(100)
    assert pool.lent_bytes == 0
    del small
    assert pool.kept_bytes == 0


def test_at_most_the_limit_is_kept_and_the_least_recently_used_size_is_dropped_first() -> None:
    pool = Pool(kept_bytes_max=4 * size_class(LARGE))
    old = [pool.take(LARGE) for _ in range(4)]
    del old
    assert pool.kept_bytes == 4 * size_class(LARGE)
    new = pool.take(2 * LARGE)
    del new
    assert pool.kept_bytes == 2 * size_class(LARGE) + size_class(2 * LARGE)
    again = pool.take(2 * LARGE)
    assert pool.kept_bytes == 2 * size_class(LARGE)
    del again


def test_nothing_is_kept_with_a_limit_of_zero() -> None:
    pool = Pool(kept_bytes_max=0)
    pool.take(LARGE)
    assert pool.kept_bytes == 0


def test_a_buffer_without_memory_is_not_counted_as_lent() -> None:
    pool = Pool()
    with pytest.raises(MemoryError):
        pool.take(1 << 56)
    assert pool.lent_bytes == 0


@given(nbytes=st.integers(POOLED_BYTES_MIN, 2**40))
def test_a_size_class_holds_what_it_serves_and_wastes_at_most_a_fifth(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert (size - nbytes) * 5 <= size
    assert size_class(size) == size


def test_concurrent_threads_leave_no_buffer_in_use() -> None:
    pool = Pool()
    wrong: list[int] = []

    def work(mark: int) -> None:
        held = []
        for i in range(300):
            array = pool.take(POOLED_BYTES_MIN + 1000 * (i % 5))
            array[:8] = mark
            held.append(array[:8])
            if len(held) == 4:
                wrong.extend(int(view[0]) for view in held if (view != mark).any())
                held = held[2:]

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.lent_bytes == 0
    assert pool.kept_bytes < 100 * POOLED_BYTES_MIN, "buffers are reused"


def test_a_buffer_freed_by_the_garbage_collector_inside_the_pool_is_returned() -> None:
    pool = Pool()
    for _ in range(50):
        cycle: list[object] = [pool.take(LARGE)]
        cycle.append(cycle)
        del cycle
    gc.collect()
    assert pool.lent_bytes == 0


def test_a_buffer_may_outlive_its_pool() -> None:
    array = Pool().take(LARGE)
    gc.collect()
    array[...] = 7
    assert array[-1] == 7


def test_malloc_is_tuned_on_glibc_only() -> None:
    assert tune_malloc() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_takes_memory_although_a_thread_of_its_parent_was_about_to() -> None:
    with HOST._lock:  # as if another thread were in `take`
        pid = os.fork()
        if not pid:
            signal.alarm(10)  # ends the process
            HOST.take(LARGE)
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
