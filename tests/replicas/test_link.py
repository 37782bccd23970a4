"""Calls between two processes of one server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import memory_stream_pair

from flowserve.errors import Invalid, NotFound
from flowserve.replicas.link import NOTHING, Handler, LinkClosed, ProcessLink, Result

NONE: Mapping[str, Handler] = {}


@asynccontextmanager
async def linked(handlers: Mapping[str, Handler], others: Mapping[str, Handler] = NONE) -> AsyncIterator[ProcessLink]:
    """The end that calls `handlers`; `others` are its own."""
    here, there = memory_stream_pair()
    one, other = ProcessLink(here, others), ProcessLink(there, handlers)
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        await nursery.start(other.run)
        yield one
        nursery.cancel_scope.cancel()


def echo(arguments: Any, data: bytes) -> Result:
    return arguments, data


@given(
    st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=5),
    st.binary(max_size=200_000),
)
def test_arguments_and_bytes_arrive_as_they_are(arguments: Any, data: bytes) -> None:
    async def main() -> None:
        async with linked({"echo": echo}) as link:
            assert await link.call("echo", arguments, data) == (arguments, data)

    trio.run(main)


async def test_an_error_arrives_as_its_class_and_the_connection_goes_on() -> None:
    def fail(arguments: Any, data: bytes) -> Result:
        raise NotFound("there is no such thing")

    async def fail_later(arguments: Any, data: bytes) -> Result:
        await trio.lowlevel.checkpoint()
        raise Invalid("it is invalid")

    async with linked({"fail": fail, "later": fail_later, "echo": echo}) as link:
        with pytest.raises(NotFound, match="there is no such thing"):
            await link.call("fail")
        with pytest.raises(Invalid, match="it is invalid"):
            await link.call("later")
        assert await link.call("echo", 1) == (1, b"")


async def test_many_calls_at_once_in_both_directions_get_their_own_results() -> None:
    async def slow(arguments: Any, data: bytes) -> Result:
        await trio.sleep(0.001 * (arguments % 7))
        return arguments, b""

    found: dict[int, Any] = {}

    async def ask(link: ProcessLink, number: int) -> None:
        found[number] = (await link.call("slow", number))[0]

    async with linked({"slow": slow}) as link:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(ask, link, number)
    assert found == {number: number for number in range(200)}


async def test_handlers_that_are_no_coroutines_run_in_the_order_of_the_calls() -> None:
    order: list[int] = []

    def note(arguments: Any, data: bytes) -> Result:
        order.append(arguments)
        return NOTHING

    async with linked({"note": note}) as link:
        for number in range(100):
            link.tell("note", number)
        await link.call("note", 100)
    assert order == [*range(101)]


async def test_the_end_of_the_connection_ends_open_calls() -> None:
    async def never(arguments: Any, data: bytes) -> Result:
        await trio.sleep_forever()
        return NOTHING

    here, there = memory_stream_pair()
    link = ProcessLink(here, {})
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        other = ProcessLink(there, {"never": never})
        nursery.start_soon(other.run)

        async def ask() -> None:
            with pytest.raises(LinkClosed):
                await link.call("never")

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await there.aclose()
    with pytest.raises(LinkClosed):
        await link.call("never")
    link.tell("never")  # harmless


async def test_a_cancelled_call_is_cancelled_at_the_other_end() -> None:
    cancelled = trio.Event()

    async def never(arguments: Any, data: bytes) -> Result:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        return NOTHING

    async with linked({"never": never}) as link:
        with trio.move_on_after(0.01):
            await link.call("never")
        with trio.fail_after(2):
            await cancelled.wait()
