"""Ctrl-C while the program is still being read.

Decided here: that it ends the process at once and in silence. Imports turn a KeyboardInterrupt into a traceback of
theirs, or into an error about something else; and nothing has begun yet that would have to be put in order.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130  # as shells say it


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """For imports. Without effect beside the main thread, and where Ctrl-C means something of the caller's own, or
    nothing at all (nohup).
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
