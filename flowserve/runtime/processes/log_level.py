"""The log level of worker processes, in memory that they share with the server.

Decides that a change of the level takes effect in running processes at once: each reads the memory for every record.
Does not know what is logged. Callers: `forkservers.py`, and the program that configures the log (`cli`).
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from functools import lru_cache
from typing import Final, NamedTuple

_LEVEL_MAX: Final = 255


class _Shared(NamedTuple):
    fd: int
    memory: mmap.mmap


@lru_cache(None)
def _shared() -> _Shared:
    fd = os.memfd_create("log_level")
    os.ftruncate(fd, 1)
    return _Shared(fd, mmap.mmap(fd, 1))


def share_log_level() -> int:
    """The file descriptor of one byte: the level of the logger `flowserve`, now and after `tell_log_level`."""
    tell_log_level()
    return _shared().fd


def tell_log_level() -> None:
    """Set the level of worker processes to that of the logger `flowserve`. No effect without worker processes."""
    if sys.platform == "linux":
        _shared().memory[0] = min(logging.getLogger("flowserve").getEffectiveLevel(), _LEVEL_MAX)
