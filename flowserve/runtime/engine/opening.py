"""An engine from its beginning to its end.

Decided here: which tasks an engine lives on, and that they outlive a cancellation from outside until everything is
closed. What closing means is the engine's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.options import EngineOptions

log = logging.getLogger("flowserve.runtime")

TRACES_S_MAX: Final = 5.0  # traces that are not written by then are lost


@asynccontextmanager
async def open_engine(
    options: EngineOptions,
    *,
    on_close: Callable[[list[str]], None] | None = None,
    exit_timeout_s: float = 30.0,
    deadline: Callable[[], float] = lambda: math.inf,
) -> AsyncIterator[Engine]:
    """An engine that runs, empty until something is loaded into it. Leaving the block closes every instance, for
    `exit_timeout_s` at most, and not past `deadline()`, read at that time on the loop's clock: a server that has
    drained requests before has less time left.
    """
    async with _machinery() as machinery:
        engine = Engine(options)
        await machinery.start(engine.run)
        if engine.processes is None:
            log.info("Python models run on threads and share one process: processes of their own need Linux 5.3")
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                hung = await engine.close(min(trio.current_time() + exit_timeout_s, deadline()))
                with trio.move_on_after(TRACES_S_MAX):
                    await trio.to_thread.run_sync(engine.traces.close, abandon_on_cancel=True)
                if on_close is not None:
                    on_close(hung)
                if engine.processes is not None:
                    await engine.processes.close()


@asynccontextmanager
async def _machinery() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that go on until the block ends, also where it is cancelled from outside: closing needs
    them. An exception of one of them still ends the block.
    """

    async def work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as machinery:
            machinery.cancel_scope.shield = True
            task_status.started(machinery)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        machinery = await nursery.start(work)
        try:
            yield machinery
        finally:
            machinery.cancel_scope.cancel()
