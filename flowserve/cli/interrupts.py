"""Ctrl-C during imports, and in commands that run an event loop.

Decides: during imports it ends the process at once, without output, because an import turns a KeyboardInterrupt into a
traceback or into an unrelated error, and nothing has started yet that would need a cleanup. In an event loop it is
raised where a task waits. Callers: `__main__`, `main`, the commands that measure.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

INTERRUPTED: Final = 130  # the exit status that shells use
T = TypeVar("T")


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """A context for imports. No effect in other threads than the main one, and if SIGINT has a handler or is ignored
    (nohup).
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_until_ctrl_c(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """`trio.run`, in which Ctrl-C raises KeyboardInterrupt only where a task waits. Elsewhere a library in C takes it
    for an error of its own: httptools for a response that is not HTTP, after which the command went on.
    """
    import trio

    return trio.run(function, *arguments, restrict_keyboard_interrupt_to_checkpoints=True)
