"""Operations on the same names happen one after the other, in the order in which they were asked for.

Decided here: who goes next. An operation takes all its names in one go and waits for every earlier one that has any
of them, so that two can never wait for each other. Only one that somebody needs who is in the middle of an earlier one
could: that is refused where it would be for ever. It does not know what an operation is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from flowserve.errors import Unavailable

INSIST_S: Final = 0.5


class Turn:
    """One operation in line. `names` are those it still has; those of a group are given back together. `within`: the
    name whose own operation goes on only when this one is over, "" for none.
    """

    def __init__(self, names: Collection[str], within: str = "") -> None:
        self.names = set(names)
        self.groups: list[frozenset[str]] = [frozenset(names)]
        self.within = within
        self.is_waiting = True


class Turns:
    """The line. Touched from one trio thread."""

    def __init__(self) -> None:
        self._line: list[Turn] = []
        self._moved = trio.Event()

    @asynccontextmanager
    async def take(
        self, names: Collection[str], within: str = "", insist: Callable[[], object] = lambda: None
    ) -> AsyncIterator[Turn]:
        """Inside the block nobody else has any of `names`, except those that were given back with `done`. `insist` is
        called now and then while somebody does. Raises Unavailable where that would be for ever, because the operation
        on `within` waits for this one.
        """
        turn = Turn(names, within)
        self._line.append(turn)
        try:
            if within and self._waits_for_itself(turn):
                raise Unavailable(f"model '{within}' is being loaded, and this would have to wait for it")
            while any(before.names & turn.names for before in self._line[: self._line.index(turn)]):
                insist()
                with trio.move_on_after(INSIST_S):
                    await self._moved.wait()
            turn.is_waiting = False
            yield turn
        finally:
            self._line.remove(turn)
            self._move()

    def done(self, turn: Turn, names: Collection[str]) -> None:
        """The operation is through with these of its names."""
        turn.names -= set(names)
        self._move()

    def _waits_for_itself(self, turn: Turn) -> bool:
        """Whether the operation that goes on only when `turn` is over is among those that it waits for."""
        todo = [*self._waited_for(turn)]
        seen = set(todo)
        while todo:
            before, group = todo.pop()
            if turn.within in group:
                return True
            more = [*self._waited_for(before)] if before.is_waiting else []
            for one in self._line:
                if one.within in group:  # which is over when all of this is
                    more += [*self._waited_for(one), *((one, whole & one.names) for whole in one.groups)]
            todo += [pair for pair in more if pair not in seen]
            seen.update(more)
        return False

    def _waited_for(self, turn: Turn) -> Iterator[tuple[Turn, frozenset[str]]]:
        for before in self._line[: self._line.index(turn)]:
            shared = before.names & turn.names
            yield from ((before, group & before.names) for group in before.groups if group & shared)

    def _move(self) -> None:
        moved, self._moved = self._moved, trio.Event()
        moved.set()
