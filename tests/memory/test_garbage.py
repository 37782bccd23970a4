"""Objects of what is loaded are not examined again, and become ordinary objects with the next load or unload."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from flowserve.memory.garbage import FrozenHeap


class Part:
    """One object of a cycle, as the parts of a model are."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def heap() -> Iterator[FrozenHeap]:
    # Other tests' garbage would make the counts inexact, and the pytest process must not stay frozen.
    gc.collect()
    with FrozenHeap() as heap:
        yield heap
    assert gc.get_freeze_count() == 0


def test_what_exists_after_the_start_is_not_examined_by_later_collections(heap: FrozenHeap) -> None:
    kept = [Part() for _ in range(1000)]
    heap.settle()
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < 1000
    assert kept


def test_garbage_of_before_the_start_is_collected_and_not_frozen(heap: FrozenHeap) -> None:
    gone = weakref.ref(Part())
    heap.settle()
    assert gone() is None


def test_requests_of_later_are_collected(heap: FrozenHeap) -> None:
    heap.settle()
    frozen = gc.get_freeze_count()
    gone = weakref.ref(Part())
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() <= frozen  # a collection without a load freezes nothing more


def test_the_parts_of_an_unloaded_model_are_found_by_the_next_full_collection(heap: FrozenHeap) -> None:
    model = Part()
    gone = weakref.ref(model)
    heap.settle()
    del model
    gc.collect()
    assert gone() is not None  # it is frozen
    heap.changed()
    gc.collect(0)
    assert gc.get_freeze_count() == 0  # only a full collection has found all garbage
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() > 0
