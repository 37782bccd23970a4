"""asyncio's loop as a guest of trio's: whose turn it is, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import trio
import trio.lowlevel

from flowserve.grpc.guest import Guest


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    made = Guest()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()
    made.finish(asyncio.sleep(0), 10)


def begin(guest: Guest, *coroutines: Coroutine[Any, Any, object]) -> None:
    for one in coroutines:
        guest.begin(one)


async def test_what_is_posted_is_called_in_order_and_futures_wake_tasks(guest: Guest) -> None:
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


async def test_timers_of_the_guest_are_due_in_their_order(guest: Guest) -> None:
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


async def test_what_arrives_on_a_socket_wakes_the_guest(guest: Guest) -> None:
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


async def test_a_guest_that_always_has_something_to_do_leaves_trio_its_turns(guest: Guest) -> None:
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


async def test_work_that_raises_raises_where_it_was_asked_for(guest: Guest) -> None:
    assert guest.at_once(lambda: asyncio.get_running_loop()) is guest.loop
    with pytest.raises(ZeroDivisionError):
        guest.at_once(lambda: 1 // 0)


async def test_the_last_turns_are_bounded() -> None:
    guest = Guest()
    said: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.02)
        said.append("done")

    guest.finish(slow(), 10)
    assert said == ["done"]
    hung = Guest()
    waits = hung.loop.create_future()

    async def for_ever() -> None:
        await waits

    began = trio.current_time()
    work = for_ever()
    hung.finish(work, 0.1)
    assert trio.current_time() - began < 5
    assert hung.loop.is_closed()


async def test_an_answer_that_comes_after_the_end_is_nobodys() -> None:
    guest = Guest()
    guest.finish(asyncio.sleep(0), 10)
    said: list[int] = []
    guest.post(said.append, 1)
    assert not said
