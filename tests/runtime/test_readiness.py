"""One wait for all child processes: who became ready is called, and nobody has the loop to himself."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator

import pytest
import trio

from flowserve.runtime.pump import NoBursts
from flowserve.runtime.readiness import Readiness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")


@pytest.fixture
async def readiness() -> AsyncIterator[Readiness]:
    async with trio.open_nursery() as nursery:
        made = Readiness(NoBursts())
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()


def fail(error: Exception) -> None:
    raise error


class _Turns(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_what_becomes_ready_while_another_is_read_is_read_in_the_same_turn(readiness: Readiness) -> None:
    (first, tell_first), (second, tell_second) = socket.socketpair(), socket.socketpair()
    turns = _Turns()
    called: list[tuple[str, int]] = []
    done = trio.Event()

    def read_first() -> None:
        first.recv(1)
        called.append(("first", turns.count))
        tell_second.send(b"x")

    def read_second() -> None:
        second.recv(1)
        called.append(("second", turns.count))
        done.set()

    with first, tell_first, second, tell_second:
        readiness.watch(first.fileno(), read_first, fail)
        readiness.watch(second.fileno(), read_second, fail)
        trio.lowlevel.add_instrument(turns)
        tell_first.send(b"x")
        with trio.fail_after(5):
            await done.wait()
    (one, turn), (other, same_turn) = called
    assert (one, other) == ("first", "second")
    assert turn == same_turn


async def test_one_that_is_always_ready_leaves_the_others_their_turns(readiness: Readiness) -> None:
    never_read, tell = socket.socketpair()
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    with never_read, tell:
        readiness.watch(never_read.fileno(), count, fail)
        tell.send(b"x")
        with trio.fail_after(5):
            while not calls:
                await trio.lowlevel.checkpoint()
            before = calls
            for _ in range(10):
                await trio.lowlevel.checkpoint()
        readiness.forget(never_read.fileno())
    assert before <= calls <= before + 100


async def test_what_is_forgotten_after_the_end_does_no_harm() -> None:
    made = Readiness(NoBursts())
    child, other = socket.socketpair()
    with child, other:
        made.watch(child.fileno(), list, fail)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        made.forget(child.fileno())


async def test_who_cannot_read_hears_why_and_the_others_are_read(
    readiness: Readiness, caplog: pytest.LogCaptureFixture
) -> None:
    (broken, tell_broken), (other, tell_other) = socket.socketpair(), socket.socketpair()
    heard: list[Exception] = []
    done = trio.Event()

    def read_broken() -> None:
        raise RuntimeError("a slip")

    with broken, tell_broken, other, tell_other:
        readiness.watch(broken.fileno(), read_broken, heard.append)
        readiness.watch(other.fileno(), done.set, fail)
        tell_broken.send(b"x")
        with trio.fail_after(5):
            while not heard:
                await trio.lowlevel.checkpoint()
            tell_other.send(b"x")
            await done.wait()
        readiness.forget(other.fileno())
    assert [str(error) for error in heard] == ["a slip"]
    assert "Traceback" in caplog.text
