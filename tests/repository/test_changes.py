"""When a folder that changes has come to rest. Pure, with laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowserve.repository.changes import QUIET_NS, Settled, Watch
from flowserve.repository.snapshot import Stamp


def stamp(size: int) -> Stamp:
    return (("1/model.onnx", size, 0, 0, 0),)


def watching(**folders: int) -> Watch:
    watch = Watch()
    watch.knows({name: stamp(size) for name, size in folders.items()})
    return watch


def look(watch: Watch, now_ns: int, **folders: int) -> Settled:
    return watch.look({name: stamp(size) for name, size in folders.items()}, now_ns)


NOTHING = Settled({}, frozenset())


def test_a_folder_that_looks_as_before_is_left_alone() -> None:
    watch = watching(m=1)
    assert look(watch, 0, m=1) == NOTHING
    assert not watch.is_restless


def test_a_change_is_told_once_it_has_stayed_for_the_quiet_time_and_only_once() -> None:
    watch = watching(m=1)
    assert look(watch, 0, m=2) == NOTHING
    assert watch.is_restless
    assert look(watch, QUIET_NS - 1, m=2) == NOTHING
    assert look(watch, QUIET_NS, m=2) == Settled({"m": stamp(2)}, frozenset())
    assert look(watch, 5 * QUIET_NS, m=2) == NOTHING
    assert not watch.is_restless


def test_a_folder_that_goes_on_changing_is_waited_for() -> None:
    watch = watching(m=1)
    for size in range(2, 20):
        assert look(watch, size * QUIET_NS * 2 // 3, m=size) == NOTHING
    last = 19 * QUIET_NS * 2 // 3
    assert look(watch, last + QUIET_NS, m=19).changed == {"m": stamp(19)}


def test_a_folder_that_changes_back_did_not_change() -> None:
    watch = watching(m=1)
    look(watch, 0, m=2)
    assert look(watch, QUIET_NS, m=1) == NOTHING
    assert not watch.is_restless


def test_new_folders_and_those_that_are_gone_come_to_rest_too() -> None:
    watch = watching(old=1)
    look(watch, 0, new=1)
    assert look(watch, QUIET_NS, new=1) == Settled({"new": stamp(1)}, frozenset({"old"}))
    assert look(watch, 9 * QUIET_NS, new=1) == NOTHING


def test_a_new_folder_that_goes_again_before_it_rested_was_never_there() -> None:
    watch = watching()
    look(watch, 0, new=1)
    assert look(watch, QUIET_NS) == NOTHING
    assert not watch.is_restless


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2 * QUIET_NS)), max_size=30))
def test_only_what_was_seen_unchanged_for_the_quiet_time_is_ever_told(script: list[tuple[int, int]]) -> None:
    watch = watching(m=0)
    now_ns, since_ns, last = 0, 0, 0
    for size, pause_ns in script:
        now_ns += pause_ns
        if size != last:
            since_ns, last = now_ns, size
        told = look(watch, now_ns, m=size)
        if told.changed:
            assert told.changed == {"m": stamp(size)}
            assert now_ns - since_ns >= QUIET_NS
