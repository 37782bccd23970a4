"""Background writer: a thread that runs jobs one after the other.

Decides: the thread starts with the first job; a failed job is logged and the next one runs; optional jobs are dropped
if too many wait; `close` runs all jobs given before. Does not know the jobs. Callers: `trace_file`, `otel`.
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
    """`name` is the thread's; `failed` is called with an OSError of a job, to report it."""

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
        """Whether no job waits; a running job uses it to decide whether to write now."""
        return self._work.empty()

    def do(self, what: Callable[[], None]) -> None:
        """Add a job. Returns at once."""
        if self._thread is None:
            # Daemon: a hanging disk or network must not keep the process alive beyond its exit timeout.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(what)

    def offer(self, what: Callable[[], None]) -> None:
        """Add a job unless too many wait. Returns at once."""
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
        """Run the remaining jobs and end the thread. Blocks."""
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
