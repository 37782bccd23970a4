"""Detection of settled folders, with property tests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowserve.repository.snapshot import QUIET_NS, FolderWatch, Settled, Stamp


def stamp(size: int) -> Stamp:
    return (("1/model.onnx", size, 0, 0, 0),)


def watch_of(**folders: int) -> FolderWatch:
    watch = FolderWatch()
    watch.mark_seen({name: stamp(size) for name, size in folders.items()})
    return watch


def look(watch: FolderWatch, now_ns: int, **folders: int) -> Settled:
    return watch.update({name: stamp(size) for name, size in folders.items()}, now_ns)


NOTHING = Settled({}, frozenset())


def test_an_unchanged_folder_is_not_reported() -> None:
    watch = watch_of(m=1)
    assert look(watch, 0, m=1) == NOTHING
    assert not watch.has_unsettled


def test_a_change_is_reported_once_after_the_quiet_time() -> None:
    watch = watch_of(m=1)
    assert look(watch, 0, m=2) == NOTHING
    assert watch.has_unsettled
    assert look(watch, QUIET_NS - 1, m=2) == NOTHING
    assert look(watch, QUIET_NS, m=2) == Settled({"m": stamp(2)}, frozenset())
    assert look(watch, 5 * QUIET_NS, m=2) == NOTHING
    assert not watch.has_unsettled


def test_a_folder_that_keeps_changing_is_not_reported() -> None:
    watch = watch_of(m=1)
    for size in range(2, 20):
        assert look(watch, size * QUIET_NS * 2 // 3, m=size) == NOTHING
    last = 19 * QUIET_NS * 2 // 3
    assert look(watch, last + QUIET_NS, m=19).changed == {"m": stamp(19)}


def test_a_folder_that_changes_back_did_not_change() -> None:
    watch = watch_of(m=1)
    look(watch, 0, m=2)
    assert look(watch, QUIET_NS, m=1) == NOTHING
    assert not watch.has_unsettled


def test_new_and_removed_folders_settle_too() -> None:
    watch = watch_of(old=1)
    look(watch, 0, new=1)
    assert look(watch, QUIET_NS, new=1) == Settled({"new": stamp(1)}, frozenset({"old"}))
    assert look(watch, 9 * QUIET_NS, new=1) == NOTHING


def test_a_new_folder_removed_before_it_settled_is_not_reported() -> None:
    watch = watch_of()
    look(watch, 0, new=1)
    assert look(watch, QUIET_NS) == NOTHING
    assert not watch.has_unsettled


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2 * QUIET_NS)), max_size=30))
def test_property_only_folders_unchanged_for_the_quiet_time_are_reported(script: list[tuple[int, int]]) -> None:
    watch = watch_of(m=0)
    now_ns, since_ns, last = 0, 0, 0
    for size, pause_ns in script:
        now_ns += pause_ns
        if size != last:
            since_ns, last = now_ns, size
        told = look(watch, now_ns, m=size)
        if told.changed:
            assert told.changed == {"m": stamp(size)}
            assert now_ns - since_ns >= QUIET_NS
