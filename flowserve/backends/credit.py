"""Flow control of a decoupled model's responses: one credit for each response; a sender without a credit blocks.

Decides how threads wait for credits, and when a wait is reported again. How responses and waits are sent is decided in
the subclasses: runtime/workers/streaming.py for threads of the server, worker/streaming.py for worker processes.

Callers: the subclasses.
"""

from __future__ import annotations

import threading
from typing import Any

from flowserve.backends.base import Sent
from flowserve.errors import FlowserveError


class CreditSender:
    """A `Sender` (base.py) that is granted credits, and withdrawn when its client has cancelled the request."""

    def __init__(self) -> None:
        self.kept: Any = None
        self._credits = threading.Semaphore(0)
        self._waiting = 0
        self._count = threading.Lock()
        self._is_withdrawn = False

    def grant(self, count: int) -> None:
        if count:
            self._credits.release(count)

    def withdraw(self) -> None:
        self.kept = None
        self._is_withdrawn = True
        self._credits.release()

    def send(self, sent: Sent) -> None:
        if not self._credits.acquire(blocking=False):
            self._wait()
        if self._is_withdrawn:
            self._credits.release()  # for the next thread that sends
            return
        self._tell_answer(sent)

    def fail(self, error: FlowserveError) -> None:
        self._tell_over(error)

    def finish(self, *, is_empty: bool = False) -> None:
        self._tell_over(None, is_empty=is_empty)

    def is_cancelled(self) -> bool:
        return self._is_withdrawn

    def _wait(self) -> None:
        with self._count:
            self._waiting += 1
        self._tell_waits()
        self._credits.acquire()
        with self._count:
            self._waiting -= 1
            others = self._waiting
        if others:
            self._tell_waits()

    def _tell_answer(self, sent: Sent) -> None:
        raise NotImplementedError

    def _tell_over(self, error: FlowserveError | None, *, is_empty: bool = False) -> None:
        raise NotImplementedError

    def _tell_waits(self) -> None:
        """A thread waits for a credit. Called on that thread."""
        raise NotImplementedError
