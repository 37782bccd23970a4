"""Processes that share one processor for a while: where they are held, and that they, and whatever they have started
meanwhile, get all of them back. Real processes throughout.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from flowserve.runtime import one_processor
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.one_processor import OneProcessor

ALL = os.sched_getaffinity(0) if SUPPORTED else set()
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(len(ALL) < 2, reason="wants Linux and two processors"),
]

# Reads what to start, and says its number.
TEXT = """
import subprocess, sys, threading
ended = threading.Event()
for line in sys.stdin:
    if line == "thread\\n":
        thread = threading.Thread(target=ended.wait, daemon=True)
        thread.start()
        print(thread.native_id, flush=True)
    elif line == "orphan\\n":
        print(int(subprocess.check_output(["sh", "-c", "sleep 20 > /dev/null & echo $!"])), flush=True)
    else:
        code = "import sys; print(flush=True); sys.stdin.read()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        print(process.pid, flush=True)
"""


class Process:
    """As far as who holds it knows a child."""

    ended = ""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TEXT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.start("thread")

    def start(self, what: str) -> int:
        """One more. Its number, once it is there."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{what}\n")
        stdin.flush()
        return int(stdout.readline())

    @property
    def processors(self) -> set[int]:
        return os.sched_getaffinity(self.pid)

    def close(self) -> None:
        self.process.communicate()


async def until_all_are_let_go(held: OneProcessor, era: int) -> None:
    with trio.fail_after(10):
        while held.era == era:  # noqa: ASYNC110 - nobody is told of it
            await trio.sleep(0.001)


@pytest.fixture
def processes() -> Iterator[Callable[[], Any]]:
    made: list[Process] = []

    def make() -> Process:
        made.append(Process())
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_who_is_held_shares_the_processor_of_the_loop_until_let_go(processes: Callable[[], Any]) -> None:
    a, b = processes(), processes()
    held = OneProcessor()
    era = held.era
    held.hold([a, b])
    assert a.processors == b.processors
    assert len(a.processors) == 1
    assert held.era == era
    assert os.sched_getaffinity(0) == ALL
    held.let_go()
    assert a.processors == b.processors == ALL
    assert held.era != era
    era = held.era
    held.let_go()
    assert held.era == era, "nobody was held"


async def test_one_who_comes_later_is_held_where_the_others_are(processes: Callable[[], Any]) -> None:
    held = OneProcessor()
    a, b = processes(), processes()
    held.hold([a])
    (there,) = a.processors
    os.sched_setaffinity(0, ALL - {there})
    try:
        held.hold([a, b])
    finally:
        os.sched_setaffinity(0, ALL)
    assert b.processors == {there}
    held.let_go()
    assert b.processors == ALL


@pytest.mark.parametrize("here", [False, True])
async def test_the_loop_waits_there_if_it_is_to_and_has_all_processors_otherwise(
    processes: Callable[[], Any], here: bool
) -> None:
    held = OneProcessor()
    a = processes()
    seen: list[set[int]] = []

    def poll(within_ms: int) -> list[tuple[int, int]]:
        assert within_ms == 7
        seen.append(os.sched_getaffinity(0))
        return [(3, select.POLLIN)]

    assert held.wait(poll, 7, here=here) == [(3, select.POLLIN)]
    held.hold([a])
    there = a.processors
    assert held.wait(poll, 7, here=here) == [(3, select.POLLIN)]
    held.let_go()
    held.wait(poll, 7, here=here)
    assert seen == [ALL, there if here else ALL, ALL]
    assert os.sched_getaffinity(0) == ALL


async def test_what_was_started_meanwhile_has_all_processors_as_well(processes: Callable[[], Any]) -> None:
    held = OneProcessor()
    a = processes()
    before = a.start("process")
    own = a.start("thread")
    held.hold([a])
    there = a.processors
    os.sched_setaffinity(own, there)  # it has chosen that itself
    started = [a.start("thread"), a.start("process")]
    assert all(os.sched_getaffinity(one) == there for one in started)
    held.let_go()
    assert [os.sched_getaffinity(one) for one in (a.pid, before, *started)] == [ALL] * 4
    assert os.sched_getaffinity(own) == there
    held.hold([a])
    elsewhere = ALL - a.processors
    os.sched_setaffinity(a.pid, elsewhere)  # somebody has chosen others for it
    held.let_go()
    assert a.processors == elsewhere


async def test_nobody_is_held_for_long_and_who_is_still_asked_is_held_anew(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(one_processor, "_HELD_S", 0.05)
    held = OneProcessor()
    asked, idle = processes(), processes()
    nursery.start_soon(held.run)
    era = held.era
    held.hold([asked, idle])
    assert idle.processors != ALL
    started = idle.start("thread")
    with trio.fail_after(10):
        while held.era == era:
            held.wait(lambda _: [], 1, here=True)
            await trio.sleep(0.001)
    assert asked.processors == idle.processors == os.sched_getaffinity(started) == ALL
    era = held.era
    held.hold([asked])
    assert asked.processors != ALL
    assert idle.processors == ALL
    await until_all_are_let_go(held, era)
    assert asked.processors == ALL


async def test_who_could_not_be_held_is_asked_for_again(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(one_processor, "_HELD_S", 0.05)
    held = OneProcessor()
    a = processes()
    os.sched_setaffinity(a.pid, {min(ALL)})
    nursery.start_soon(held.run)
    era = held.era
    held.hold([a])
    await until_all_are_let_go(held, era)


@pytest.mark.parametrize("what", ["thread", "process"])
async def test_what_is_started_at_the_last_moment_has_all_processors_as_well(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    choose = os.sched_setaffinity
    held = OneProcessor()
    a = processes()
    held.hold([a])
    started = []

    def free(number: int, processors: set[int]) -> None:
        if not started:
            started.append(a.start(what))
            assert os.sched_getaffinity(started[0]) != ALL
        choose(number, processors)

    monkeypatch.setattr(os, "sched_setaffinity", free)
    held.let_go()
    assert [os.sched_getaffinity(one) for one in (a.pid, *started)] == [ALL] * 2


async def test_orphans_have_all_processors_as_well(processes: Callable[[], Any]) -> None:
    held = OneProcessor()
    a = processes()
    held.hold([a])
    there = a.processors
    orphan = a.start("orphan")
    try:
        assert os.sched_getaffinity(orphan) == there
        held.let_go()
        assert os.sched_getaffinity(orphan) == ALL
    finally:
        os.kill(orphan, signal.SIGKILL)


async def test_who_is_given_others_while_the_loop_waits_keeps_them(processes: Callable[[], Any]) -> None:
    held = OneProcessor()
    a = processes()
    held.hold([a])
    elsewhere = ALL - a.processors

    def poll(_: int) -> list[tuple[int, int]]:
        os.sched_setaffinity(0, elsewhere)  # from outside, by whoever is in charge of the machine
        return []

    try:
        held.wait(poll, 1, here=True)
        assert os.sched_getaffinity(0) == elsewhere
    finally:
        os.sched_setaffinity(0, ALL)
    held.let_go()


async def test_who_is_held_on_one_that_the_container_loses_has_all_it_had_when_that_comes_back(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = os.sched_setaffinity
    held = OneProcessor()
    a = processes()
    held.hold([a])
    there = a.processors
    choose(a.pid, ALL - there)

    def refuse(number: int, processors: set[int]) -> None:
        if processors == there:
            raise OSError(errno.EINVAL, "not in the container's")
        choose(number, processors)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    held.let_go()
    assert a.processors == ALL


async def test_nobody_is_held_where_it_cannot_be_told_what_he_starts(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_processor, "_STARTED", "/proc/{}/task/{}/nothing")
    held = OneProcessor()
    a = processes()
    held.hold([a])
    assert a.processors == ALL


async def test_where_it_is_forbidden_everything_stays_as_it_is(
    processes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> None:
        raise PermissionError

    a, b = processes(), processes()
    held = OneProcessor()
    with monkeypatch.context() as forbidden:
        forbidden.setattr(os, "sched_setaffinity", forbid)
        held.hold([a, b])
        assert held.wait(lambda _: [(1, 1)], 1, here=True) == [(1, 1)]
        held.let_go()
    assert a.processors == b.processors == ALL
    held.hold([a, b])
    with monkeypatch.context() as forbidden:  # since then
        forbidden.setattr(os, "sched_setaffinity", forbid)
        assert held.wait(lambda _: [(1, 1)], 1, here=True) == [(1, 1)]
        held.let_go()
    held.hold([b])
    held.let_go()


async def test_who_has_one_processor_or_others_is_left_alone(processes: Callable[[], Any]) -> None:
    a, b = processes(), processes()
    held = OneProcessor()
    one = {min(ALL)}
    os.sched_setaffinity(a.pid, one)
    held.hold([a, b])
    there = b.processors
    held.let_go()
    assert (a.processors, b.processors) == (one, ALL)
    assert len(there) == 1
    os.sched_setaffinity(0, one)
    try:
        held.hold([b])
        held.wait(lambda _: [], 1, here=True)
        assert os.sched_getaffinity(0) == one
        held.let_go()
    finally:
        os.sched_setaffinity(0, ALL)
    assert b.processors == ALL


async def test_one_that_ends_meanwhile_is_no_trouble(processes: Callable[[], Any]) -> None:
    a, b = processes(), processes()
    held = OneProcessor()
    held.hold([a, b])
    a.close()
    held.let_go()
    held.hold([a, b])  # nobody has been told yet
    a.ended = "by itself"
    held.hold([b])
    assert b.processors != ALL
    held.let_go()
    assert b.processors == ALL
