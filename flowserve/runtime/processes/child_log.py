"""Reads the output of one child process from its pipe and writes it to the log.

Decides when the pipe is read, and how much of it is still read after the process has ended. `printed.py` splits the
output into records and limits them.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Final, Self

import trio

from flowserve.runtime.clock import ClockNs
from flowserve.runtime.processes.printed import Printed
from flowserve.runtime.processes.tracebacks import OF_LINES, Record

_READ_BYTES: Final = 65536
# The bytes that are still read after a process has ended; processes that it started may keep its pipe and write on.
_FINAL_OUTPUT_BYTES_MAX: Final = 1 << 20


class ChildLog:
    """Logs the output from `fd`, which it owns, under the name of `model`. The block closes it."""

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
        """Read until the pipe is closed, or until cancelled."""
        while True:
            with trio.move_on_after(self._printed.wait_s) as timeout:
                await trio.lowlevel.wait_readable(self._fd)
            if timeout.cancelled_caught:
                self._write(self._printed.wait_is_over())
            elif not self._read_piece():
                return

    def read_rest(self) -> None:
        """Read what is left in the pipe after the process has ended."""
        with suppress(BlockingIOError):
            for _ in range(0, _FINAL_OUTPUT_BYTES_MAX, _READ_BYTES):
                if not self._read_piece():
                    return

    def _read_piece(self) -> int:
        piece = os.read(self._fd, _READ_BYTES)
        self._write(self._printed.take(piece, self._clock()))
        return len(piece)

    def _write(self, records: list[Record]) -> None:
        for level, text in records:
            self._log.log(level, "%s", text, extra={OF_LINES: "\n" in text})
