"""Decoupled models whose `execute` is a coroutine: several run at the same time, as on Triton.

Decided here: they share an asyncio loop on a thread of its own, and `execute` counts as returned once its coroutine is
there; so the next batch may begin while one waits. What a coroutine raises, or returns, fails what its requests have
not answered yet. Only in a process that is one model's: elsewhere, threads that are not the instance's may not call
other models.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from flowserve.backends.python_requests import GivenRequest
from flowserve.backends.python_sender import refuse_returned
from flowserve.errors import FlowserveError

# What still runs when the model is closed has so long to notice that it is cancelled.
END_S_MAX: Final = 2.0


class SideBySide:
    """One instance's coroutines. `failed` makes of what one raised what its requests fail with."""

    def __init__(self, model: str, failed: Callable[[BaseException], FlowserveError]) -> None:
        self._model = model
        self._failed = failed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowserve coroutines", daemon=True)
        self._thread.start()

    def around(self, execute: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], None]:
        """What is called in place of `execute`."""

        async def go(requests: Sequence[GivenRequest]) -> None:
            senders = requests[0]._work.senders or ()
            try:
                returned = await execute(requests)
                refuse_returned([returned] if returned is None else returned, senders, self._model)
            except FlowserveError as error:
                for sender in senders:
                    sender.fail(error)
            except BaseException as error:  # as in the instance: whatever it is
                failed = self._failed(error)
                for sender in senders:
                    sender.fail(failed)

        def begin(requests: Sequence[GivenRequest]) -> None:
            asyncio.run_coroutine_threadsafe(go(requests), self._loop)

        return begin

    def close(self) -> None:
        """End what still runs. Blocks, for a bounded time."""
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(END_S_MAX)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True) if tasks else None
        if ended is None:
            self._loop.stop()
        else:
            ended.add_done_callback(lambda _: self._loop.stop())
