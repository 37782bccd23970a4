"""Flow control of a decoupled model's responses: one credit for each response; a sender without a credit blocks.

Decides how threads wait for credits, when a wait is reported again, and how a model that must not wait (`offer`) learns
that there is room. How responses and waits are sent is decided in the subclasses: runtime/workers/streaming.py for
threads of the server, worker/streaming.py for worker processes.

Callers: the subclasses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        self._has_refused = False  # whether the last `offer` was refused
        self._changed: Callable[[], None] | None = None

    def grant(self, count: int) -> None:
        if count:
            self._credits.release(count)
            if self._has_refused:
                self._tell_change()

    def withdraw(self) -> None:
        self.kept = None
        self._is_withdrawn = True
        self._credits.release()
        self._tell_change()

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        if self._is_withdrawn:
            changed()

    def offer(self, sent: Sent) -> bool:
        if not self._credits.acquire(blocking=False):
            if not self._has_refused:
                self._has_refused = True
                self._tell_waits()
            if not self._credits.acquire(blocking=False):  # no credit was granted before `_has_refused` was set
                return False
        self._has_refused = False
        self._pass_on(sent)
        return True

    def send(self, sent: Sent) -> None:
        if not self._credits.acquire(blocking=False):
            self._wait()
        self._pass_on(sent)

    def fail(self, error: FlowserveError) -> None:
        self._changed = None  # breaks a reference cycle with the model's object of the request
        self._tell_over(error)

    def finish(self) -> None:
        self._changed = None
        self._tell_over(None)

    def is_cancelled(self) -> bool:
        return self._is_withdrawn

    def _pass_on(self, sent: Sent) -> None:
        """Send a response, for which a credit was taken. Without a client only the end of the request is reported."""
        if self._is_withdrawn:
            self._credits.release()  # for the next thread that sends
            if sent.is_last:
                self.finish()
            return
        if sent.is_last:
            self._changed = None
        self._tell_answer(sent)

    def _tell_change(self) -> None:
        changed = self._changed
        if changed is not None:
            changed()

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
        """Report a response, and the end of the request if it is the last."""
        raise NotImplementedError

    def _tell_over(self, error: FlowserveError | None) -> None:
        """Report the end of the request: an error, or the final flag alone."""
        raise NotImplementedError

    def _tell_waits(self) -> None:
        """Report that a thread waits for a credit. Called on that thread."""
        raise NotImplementedError
