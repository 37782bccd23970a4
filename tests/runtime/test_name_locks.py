"""Operations on the same names, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import Unavailable
from flowserve.runtime.loading.operations import NameLocks


class Scene:
    """Operations that begin on request and end when their event is set; `log` has their events."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.turns = NameLocks()
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


async def test_operations_that_share_a_name_run_in_order_of_request(nursery: trio.Nursery) -> None:
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


async def test_a_released_name_is_free_before_the_operation_ends(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "ab", gives_back="a")
    await scene.ask("2", "a")
    await scene.ask("3", "b")
    assert scene.log == ["1", "2"]
    await scene.end("1")
    assert scene.log == ["1", "2", "3"]
    await scene.end("2")
    await scene.end("3")


async def test_an_operation_cancelled_while_waiting_leaves_the_queue(nursery: trio.Nursery) -> None:
    scene = Scene(nursery)
    await scene.ask("1", "a")
    with trio.move_on_after(0):
        async with scene.turns.take("a"):
            raise AssertionError("it is not its turn")
    await scene.ask("2", "a")
    await scene.end("1")
    assert scene.log == ["1", "2"]
    await scene.end("2")


def refused(line: Sequence[tuple[str, Sequence[str]]], names: str, within: str) -> bool:
    """Whether an operation on `names`, started within the operation on `within`, is refused. `line`: the operations
    that run or wait, each with its names and the groups in which it releases them.
    """
    turns = NameLocks()

    async def scene() -> bool:
        async with trio.open_nursery() as nursery:
            for held, groups in line:
                asked, _, of = held.partition(" within ")

                async def operate(asked: str = asked, of: str = of, groups: Sequence[str] = groups) -> None:
                    async with turns.take(asked, of) as turn:
                        turn.groups = [*map(frozenset, groups)]
                        await trio.sleep_forever()

                nursery.start_soon(operate)
                await wait_all_tasks_blocked()
            try:
                with trio.move_on_after(0):
                    async with turns.take(names, within):
                        return False
                return False
            except Unavailable as error:
                return str(error) == f"model '{within}' is being loaded, and this would have to wait for it"
            finally:
                nursery.cancel_scope.cancel()

    return trio.run(scene)


@pytest.mark.parametrize(
    ("line", "names", "within", "is_refused"),
    [
        ([("a", ["a"])], "a", "a", True),  # it needs its own name
        ([("a", ["a"])], "b", "a", False),
        ([("ab", ["a", "b"])], "b", "a", False),  # b is released before a
        ([("abc", ["ab", "c"])], "b", "a", True),  # a and b are released together
        ([("abc", ["ab", "c"])], "c", "a", False),
        ([("b", ["b"]), ("a", ["a"])], "b", "a", False),  # the operation on b does not depend on a
        ([("b", ["b"]), ("a", ["a"]), ("a within b", [])], "b", "a", True),  # b needs a, and a needs b
        ([("a", ["a"]), ("b within a", ["b"])], "a", "b", True),
        ([("a", ["a"]), ("b within a", ["b"]), ("c within b", ["c"])], "a", "c", True),
        ([("a", ["a"]), ("b within a", ["b"]), ("c within b", ["c"])], "d", "c", False),
        ([("a", ["a"]), ("bc", ["b", "c"]), ("c within b", []), ("a within c", [])], "b", "a", True),
        ([("ax", ["a", "x"]), ("xb", ["x", "b"])], "b", "a", False),  # the second waits for x only
        ([("ax", ["ax"]), ("xb", ["x", "b"])], "b", "a", True),  # here it has to wait for a
        ([], "a", "a", False),  # a is not being loaded: its process was started again
    ],
)
def test_only_an_operation_that_would_wait_for_itself_is_refused(
    line: Sequence[tuple[str, Sequence[str]]], names: str, within: str, is_refused: bool
) -> None:
    assert refused(line, names, within) is is_refused
