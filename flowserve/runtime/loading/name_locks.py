"""Locks on model names: operations on the same name run one after the other, in order of arrival.

Decides which operation is next. An operation takes all its names at once and waits for every earlier operation that
holds one of them, so two operations cannot deadlock. The exception is an operation that a model starts while it is
loaded itself: if its load would wait for it, the operation is refused. Does not know what an operation does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from flowserve.errors import Unavailable

INSIST_S: Final = 0.5


class NameLock:
    """One queued or running operation. `names`: the names that it still holds; the names of a group are released
    together. `within`: the name whose own operation continues only after this one, "" for none.
    """

    def __init__(self, names: Collection[str], within: str = "") -> None:
        self.names = set(names)
        self.groups: list[frozenset[str]] = [frozenset(names)]
        self.within = within
        self.is_waiting = True


class NameLocks:
    """The queue of operations. Used on one trio thread."""

    def __init__(self) -> None:
        self._queue: list[NameLock] = []
        self._moved = trio.Event()

    @asynccontextmanager
    async def take(
        self, names: Collection[str], within: str = "", insist: Callable[[], object] = lambda: None
    ) -> AsyncIterator[NameLock]:
        """Hold `names` exclusively inside the block, except names that `done` released. While another operation holds
        one of them, `insist` is called every INSIST_S seconds. Raises Unavailable on a deadlock: the operation on
        `within` waits for this one.
        """
        lock = NameLock(names, within)
        self._queue.append(lock)
        try:
            if within and self._waits_for_itself(lock):
                raise Unavailable(f"model '{within}' is being loaded, and this would have to wait for it")
            while any(before.names & lock.names for before in self._queue[: self._queue.index(lock)]):
                insist()
                with trio.move_on_after(INSIST_S):
                    await self._moved.wait()
            lock.is_waiting = False
            yield lock
        finally:
            self._queue.remove(lock)
            self._move()

    def done(self, lock: NameLock, names: Collection[str]) -> None:
        """Release these names of the operation."""
        lock.names -= set(names)
        self._move()

    def _waits_for_itself(self, lock: NameLock) -> bool:
        """Whether `lock` waits, directly or not, for the operation that waits for it."""
        todo = [*self._waited_for(lock)]
        seen = set(todo)
        while todo:
            before, group = todo.pop()
            if lock.within in group:
                return True
            more = [*self._waited_for(before)] if before.is_waiting else []
            for one in self._queue:
                if one.within in group:  # finishes after all of `group`
                    more += [*self._waited_for(one), *((one, whole & one.names) for whole in one.groups)]
            todo += [pair for pair in more if pair not in seen]
            seen.update(more)
        return False

    def _waited_for(self, lock: NameLock) -> Iterator[tuple[NameLock, frozenset[str]]]:
        for before in self._queue[: self._queue.index(lock)]:
            shared = before.names & lock.names
            yield from ((before, group & before.names) for group in before.groups if group & shared)

    def _move(self) -> None:
        moved, self._moved = self._moved, trio.Event()
        moved.set()
