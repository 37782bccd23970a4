"""One wait for the sockets of all worker processes: those that are ready are served, and none keeps the loop busy."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trio

from flowserve.runtime.clock import running_clock
from flowserve.runtime.ipc.channel import Outbox, Readiness
from flowserve.runtime.loop import StepLoop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")


@pytest.fixture
async def readiness() -> AsyncIterator[Readiness]:
    async with trio.open_nursery() as nursery:
        made = Readiness(StepLoop(lambda: None, running_clock()))
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()


def fail(error: Exception) -> None:
    raise error


class _LoopIterations(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_a_socket_that_becomes_ready_while_another_is_read_is_read_in_the_same_iteration(
    readiness: Readiness,
) -> None:
    (first, tell_first), (second, tell_second) = socket.socketpair(), socket.socketpair()
    iterations = _LoopIterations()
    called: list[tuple[str, int]] = []
    done = trio.Event()

    def read_first() -> None:
        first.recv(1)
        called.append(("first", iterations.count))
        tell_second.send(b"x")

    def read_second() -> None:
        second.recv(1)
        called.append(("second", iterations.count))
        done.set()

    with first, tell_first, second, tell_second:
        readiness.watch(first.fileno(), read_first, fail)
        readiness.watch(second.fileno(), read_second, fail)
        trio.lowlevel.add_instrument(iterations)
        tell_first.send(b"x")
        with trio.fail_after(5):
            await done.wait()
    (one, iteration), (other, same_iteration) = called
    assert (one, other) == ("first", "second")
    assert iteration == same_iteration


async def test_a_socket_that_is_always_ready_does_not_keep_the_loop_from_other_tasks(readiness: Readiness) -> None:
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


async def test_a_socket_may_be_forgotten_after_the_end() -> None:
    made = Readiness(StepLoop(lambda: None, running_clock()))
    child, other = socket.socketpair()
    with child, other:
        made.watch(child.fileno(), lambda: None, fail)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        made.forget(child.fileno())


async def test_an_exception_of_one_reader_is_reported_to_it_and_the_others_are_read(
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


async def test_an_unsent_descriptor_is_closed_once_when_the_process_has_ended(readiness: Readiness) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    faults: list[Exception] = []
    done = trio.Event()
    with ours, theirs:
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1000))
        outbox = Outbox(ours, readiness)
        readiness.watch(ours.fileno(), done.set, faults.append)
        sent, other = os.pipe()
        outbox.send(b"x", sent)
        outbox.send(b"y", other)
        theirs.close()
        with trio.fail_after(5):
            await done.wait()
        readiness.forget(ours.fileno())
    assert not faults
    for descriptor in (sent, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(descriptor)
