"""asyncio's event loop as a guest of trio's: callbacks, timers and sockets are served, and trio is not starved."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import trio
import trio.lowlevel

from flowserve.grpc.guest import GuestLoop


@pytest.fixture
async def guest() -> AsyncIterator[GuestLoop]:
    made = GuestLoop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()
    made.finish(asyncio.sleep(0), 10)


def begin(guest: GuestLoop, *coroutines: Coroutine[Any, Any, object]) -> None:
    for one in coroutines:
        guest.start_task(one)


async def test_posted_callbacks_run_in_order_and_futures_wake_tasks(guest: GuestLoop) -> None:
    said: list[int] = []
    done = trio.Event()
    answered = guest.loop.create_future()

    async def wait() -> None:
        said.append(await answered)
        done.set()

    begin(guest, wait())
    for n in range(3):
        guest.post(said.append, n)
    await trio.testing.wait_all_tasks_blocked()
    assert said == [0, 1, 2]
    answered.set_result(7)
    guest.wake()
    with trio.fail_after(10):
        await done.wait()
    assert said == [0, 1, 2, 7]


async def test_timers_fire_in_their_order(guest: GuestLoop) -> None:
    said: list[str] = []
    done = trio.Event()

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        said.append(name)
        if len(said) == 3:
            done.set()

    begin(guest, sleep("last", 0.06), sleep("first", 0.01), sleep("second", 0.03))
    with trio.fail_after(10):
        await done.wait()
    assert said == ["first", "second", "last"]


async def test_data_on_a_socket_wakes_the_loop(guest: GuestLoop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        told = trio.Event()

        async def read() -> None:
            assert await guest.loop.sock_recv(theirs, 10) == b"hello"
            told.set()

        begin(guest, read())
        await trio.testing.wait_all_tasks_blocked()
        ours.send(b"hello")
        with trio.fail_after(10):
            await told.wait()


async def test_a_loop_that_is_always_busy_does_not_starve_trio(guest: GuestLoop) -> None:
    ours, theirs = socket.socketpair()
    is_over = False

    def again() -> None:
        if not is_over:
            guest.loop.call_soon(again)

    with ours, theirs:
        ours.send(b"never read")
        guest.post(guest.loop.add_reader, theirs, lambda: None)
        guest.post(again)
        with trio.fail_after(10):
            for _ in range(5):
                await trio.lowlevel.checkpoint()
        is_over = True
        guest.post(guest.loop.remove_reader, theirs)
        await trio.testing.wait_all_tasks_blocked()


async def test_run_sync_returns_the_result_or_raises_the_exception(guest: GuestLoop) -> None:
    assert guest.run_sync(lambda: asyncio.get_running_loop()) is guest.loop
    with pytest.raises(ZeroDivisionError):
        guest.run_sync(lambda: 1 // 0)


async def test_finish_ends_at_its_timeout() -> None:
    guest = GuestLoop()
    said: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.02)
        said.append("done")

    guest.finish(slow(), 10)
    assert said == ["done"]
    hung = GuestLoop()
    waits = hung.loop.create_future()

    async def for_ever() -> None:
        await waits

    began = trio.current_time()
    work = for_ever()
    hung.finish(work, 0.1)
    assert trio.current_time() - began < 5
    assert hung.loop.is_closed()


async def test_callbacks_posted_after_finish_are_dropped() -> None:
    guest = GuestLoop()
    guest.finish(asyncio.sleep(0), 10)
    said: list[int] = []
    guest.post(said.append, 1)
    assert not said
