"""Ctrl-C during imports.

Decides: it ends the process at once, without output. An import turns a KeyboardInterrupt into a traceback or into an
unrelated error, and nothing has started yet that would need a cleanup. Callers: `__main__`, `main`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130  # the exit status that shells use


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
