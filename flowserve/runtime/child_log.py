"""What one child process prints, from its pipe into the log.

Decided here: when the pipe is read, and how much of what lies in it at the end still is. What of it is one record, and
how many there may be, printed.py decides.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Final, Self

import trio

from flowserve.runtime.clock import ClockNs
from flowserve.runtime.printed import Printed
from flowserve.runtime.tracebacks import OF_LINES, Record

_READ_BYTES: Final = 65536
# How much of what a process printed at its end is still read; others that it started may hold its pipe and print on.
_LAST_WORDS_BYTES_MAX: Final = 1 << 20


class ChildLog:
    """What comes through `fd`, which it takes, under the name of `model`; read until the block ends."""

    def __init__(self, fd: int, model: str, clock: ClockNs) -> None:
        self._fd = fd
        self._log = logging.getLogger(f"flowserve.model.{model}")
        self._printed = Printed()
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._write(self._printed.rest())

    async def read(self) -> None:
        """Until its end, or for ever."""
        while True:
            with trio.move_on_after(self._printed.patience_s) as patience:
                await trio.lowlevel.wait_readable(self._fd)
            if patience.cancelled_caught:
                self._write(self._printed.nothing_more())
            elif not self._read_piece():
                return

    def read_last_words(self) -> None:
        """What lies in the pipe once the process has ended."""
        with suppress(BlockingIOError):
            for _ in range(0, _LAST_WORDS_BYTES_MAX, _READ_BYTES):
                if not self._read_piece():
                    return

    def _read_piece(self) -> int:
        piece = os.read(self._fd, _READ_BYTES)
        self._write(self._printed.take(piece, self._clock()))
        return len(piece)

    def _write(self, records: list[Record]) -> None:
        for level, text in records:
            self._log.log(level, "%s", text, extra={OF_LINES: "\n" in text})
