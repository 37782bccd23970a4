"""Operations on the same names, one after the other."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.runtime.turns import Turns


class Scene:
    """Operations that begin when asked and end when their event is set; `log` is what happened."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.turns = Turns()
        self.log: list[str] = []
        self.ends: dict[str, trio.Event] = {}
        self._nursery = nursery

    async def ask(self, label: str, names: str, gives_back: str = "") -> None:
        self.ends[label] = trio.Event()

        async def operate() -> None:
            async with self.turns.take(names) as turn:
                self.log.append(label)
                self.turns.done(turn, gives_back)
                await self.ends[label].wait()

        self._nursery.start_soon(operate)
        await wait_all_tasks_blocked()

    async def end(self, label: str) -> None:
        self.ends[label].set()
        await wait_all_tasks_blocked()


async def test_operations_that_share_no_name_do_not_wait(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "ab")
    await scene.ask("2", "cd")
    assert scene.log == ["1", "2"]
    await scene.end("1")
    await scene.end("2")


async def test_operations_that_share_a_name_go_in_the_order_of_asking(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "ab")
    await scene.ask("2", "bc")
    await scene.ask("3", "cd")
    await scene.ask("4", "e")
    assert scene.log == ["1", "4"], "3 waits for 2, which came earlier"
    await scene.end("1")
    assert scene.log == ["1", "4", "2"]
    await scene.end("2")
    assert scene.log == ["1", "4", "2", "3"]
    await scene.end("3")
    await scene.end("4")


async def test_a_name_that_is_given_back_is_free_before_the_operation_ends(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "ab", gives_back="a")
    await scene.ask("2", "a")
    await scene.ask("3", "b")
    assert scene.log == ["1", "2"]
    await scene.end("1")
    assert scene.log == ["1", "2", "3"]
    await scene.end("2")
    await scene.end("3")


async def test_who_is_cancelled_while_waiting_leaves_the_line(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "a")
    with trio.move_on_after(0):
        async with scene.turns.take("a"):
            raise AssertionError("it is not its turn")
    await scene.ask("2", "a")
    await scene.end("1")
    assert scene.log == ["1", "2"]
    await scene.end("2")
