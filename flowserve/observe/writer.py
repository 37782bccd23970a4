"""A thread that does, one after the other, what must not be waited for.

Decided here: that it is begun with the first thing to do, that what fails is logged and the next is done all the same,
that what may be lost is, where too much waits already, and that it ends after what it was given before. What is done,
others know.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

WAITING_MAX: Final = 10_000

log = logging.getLogger("flowserve.observe")


class Writer:
    """`name` is the thread's; `failed` is told of what the system refused, and says so in its own words."""

    def __init__(self, name: str, failed: Callable[[OSError], None]) -> None:
        self._name = name
        self._failed = failed
        self._is_losing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_begun(self) -> bool:
        return self._thread is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be done; for what is being done, to know whether there is more to come."""
        return self._work.empty()

    def do(self, what: Callable[[], None]) -> None:
        """Do this soon. Returns at once."""
        if self._thread is None:
            # Daemon: a disk or a network that hangs must not keep the process alive past its exit timeout.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(what)

    def offer(self, what: Callable[[], None]) -> None:
        """Do this soon, unless too much waits to be done. Returns at once."""
        waiting = self._work.qsize()
        if waiting >= WAITING_MAX:
            if not self._is_losing:
                self._is_losing = True
                log.warning("%s: %d wait to be written; some traces are lost", self._name, waiting)
            return
        if self._is_losing and waiting < WAITING_MAX // 2:
            self._is_losing = False
        self.do(what)

    def close(self) -> None:
        """End after what there is to do. Blocks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()

    def _serve(self) -> None:
        while (what := self._work.get()) is not None:
            try:
                what()
            except OSError as error:
                self._failed(error)
            except Exception:
                log.exception("a trace was lost")
