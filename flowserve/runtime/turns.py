"""Operations on the same names happen one after the other, in the order in which they were asked for.

Decided here: who goes next. An operation takes all its names in one go and waits for every earlier one that has any
of them, so that two can never wait for each other. It does not know what an operation is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import trio


class Turn:
    """One operation in line. `names` are those it still has."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = set(names)


class Turns:
    """The line. Touched from one trio thread."""

    def __init__(self) -> None:
        self._line: list[Turn] = []
        self._moved = trio.Event()

    @asynccontextmanager
    async def take(self, names: Collection[str]) -> AsyncIterator[Turn]:
        """Inside the block nobody else has any of `names`, except those that were given back with `done`."""
        turn = Turn(names)
        self._line.append(turn)
        try:
            while any(before.names & turn.names for before in self._line[: self._line.index(turn)]):
                await self._moved.wait()
            yield turn
        finally:
            self._line.remove(turn)
            self._move()

    def done(self, turn: Turn, names: Collection[str]) -> None:
        """The operation is through with these of its names."""
        turn.names -= set(names)
        self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, trio.Event()
        moved.set()
