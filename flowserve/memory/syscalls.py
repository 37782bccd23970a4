"""What Linux has and a Python may lack: any, or one that was built for an older C library, as conda's are.

Decided here: that such a Python asks the system itself. Models run in whatever Python they bring along.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Final

# The same number on every machine.
_PIDFD_OPEN: Final = 434


def memfd_create(name: str, flags: int) -> int:
    """`os.memfd_create`. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), flags))


def pidfd_open(pid: int) -> int:
    """`os.pidfd_open`. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0))


@cache
def processor_teller() -> Callable[[], int]:
    """What tells on which processor its caller runs just now; -1 where that cannot be told."""
    found: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
    return found


def _checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
