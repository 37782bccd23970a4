"""How many models are loaded at the same time, and that one which hangs keeps no other waiting.

Decided here: a few at once, because they share the cores; but whoever takes longer than a moment computes nothing that
the others would have to wait for, or hangs, and is not counted any more. How many threads may hang all together is
bounded, too. What they do is the loader's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

AT_ONCE: Final = 4  # as tritonserver's default
PATIENCE_S: Final = 5.0
THREADS_MAX: Final = 64

T = TypeVar("T")


class LoadThreads:
    """`at_once` threads work, and besides them those that have been at it for more than `patience_s`."""

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = PATIENCE_S) -> None:
        self._turns = trio.Semaphore(at_once)
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._patience_s = patience_s

    async def run(self, work: Callable[[], T]) -> T:
        """What blocking `work` returns or raises, done on a thread when it is its turn. Whoever is cancelled leaves it
        behind.
        """
        await self._turns.acquire()
        turn = _Turn(self._turns)
        values: list[T] = []
        raised: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn.end_after, self._patience_s)
            try:
                values.append(await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads))
            except Exception as error:  # raised below: a nursery would wrap it
                raised = error
            finally:
                turn.end()
            nursery.cancel_scope.cancel()
        if raised is not None:
            raise raised
        return values[0]


class _Turn:
    """Ends once."""

    def __init__(self, turns: trio.Semaphore) -> None:
        self._turns: trio.Semaphore | None = turns

    def end(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()

    async def end_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.end()
