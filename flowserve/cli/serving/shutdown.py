"""Stop signals of a server, and its end in time.

Decides the meaning of the first and the second stop signal (SIGTERM, SIGINT, SIGHUP), and that the process ends at the
exit timeout even if the event loop is blocked, with the line of a model that blocks it. Callers: `run`, `workers`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Self

import trio

from flowserve.cli import logs

HANG_UP: Final = getattr(signal, "SIGHUP", None)  # the terminal was closed; not on every system
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, *((HANG_UP,) if HANG_UP else ()))
GRACE_S: Final = 0.5  # time for the event loop, after the exit timeout, to report what is still running


class Shutdown:
    """A context in which the first signal sets `asked` and starts the timeout, and the second ends the process at once.
    A second SIGHUP has no effect, because a terminal that is closed may send two, and a second SIGTERM has none in one
    of several servers (`has_parent`): a service manager may send one to each process, and the parent another. SIGHUP
    stays ignored if it was (nohup).

    It uses plain signal handlers rather than trio's receiver, because they also run while a model computes on the event
    loop.
    """

    def __init__(self, exit_timeout_s: float, repositories: Sequence[Path], *, has_parent: bool = False) -> None:
        self.asked = trio.Event()
        self.deadline = float("inf")  # on trio's clock, finite after the first signal
        self._exit_timeout_s = exit_timeout_s
        self._repositories = [one.resolve() for one in repositories]
        self._may_repeat = {HANG_UP, signal.SIGTERM} if has_parent else {HANG_UP}
        self._until_asked = trio.CancelScope()
        self._watchdog: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._token = trio.lowlevel.current_trio_token()
        self._before = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number != HANG_UP or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watchdog is not None:
            self._watchdog.cancel()

    @contextmanager
    def until_asked(self) -> Iterator[trio.CancelScope]:
        """A scope that the signal cancels; `cancelled_caught` is true if it did."""
        with trio.CancelScope() as scope:
            self._until_asked = scope
            if self.asked.is_set():
                scope.cancel()
            yield scope

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._watchdog is not None:
            if number in self._may_repeat:
                return
            end_now(128 + number, "second stop signal: ending at once")
        self._watchdog = threading.Timer(self._exit_timeout_s + GRACE_S, self._overdue)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._token.run_sync_soon(self._ask)

    def _ask(self) -> None:
        self.deadline = trio.current_time() + self._exit_timeout_s
        self.asked.set()
        self._until_asked.cancel()

    def _overdue(self) -> None:
        where = self._held_at() or "the event loop does not answer"
        end_now(1, f"not finished within the exit timeout (--exit-timeout-secs): {where}")

    def _held_at(self) -> str:
        """The innermost line of a model's own code that the event loop's thread executes, "" if there is none."""
        for frame in reversed(traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])):
            path = Path(frame.filename).resolve()
            for repository in self._repositories:
                if path.is_relative_to(repository):
                    return f"{path.relative_to(repository)}:{frame.lineno} holds the event loop in {frame.name}()"
        return ""


def end_now(status: int, message: str) -> None:
    """Write the reason to standard error and end the process, regardless of its threads."""
    # Not print(): a signal may arrive during one, and a buffered stream is not reentrant.
    os.write(2, logs.messages.line(message).encode(errors="backslashreplace"))
    os._exit(status)
