"""Standard output whose disk is full.

Decides which errors mean that output cannot be written, and that a server starts and goes on without it. Callers:
`main`, for all commands; `run` and `progress`, for a server.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Final, TextIO

NOT_WRITTEN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})

_log = logging.getLogger("flowserve.cli")


def say(*lines: str, out: TextIO | None = None) -> None:
    """Print lines of a server. If they cannot be written, a line in the log says so, and later ones are dropped."""
    out = out or sys.stdout
    try:
        print(*lines, sep="\n", file=out, flush=True)
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        drop_output(out)
        _log.warning("standard output cannot be written: %s; the server goes on without it", error.strerror)


def drop_output(out: TextIO) -> None:
    """Redirect `out` to /dev/null; otherwise Python reports an error when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
