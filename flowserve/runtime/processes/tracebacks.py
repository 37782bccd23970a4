"""Joins the lines of a traceback in a model's output to one record.

Decides where a Python traceback begins and ends, including those of its causes, that it is an error wherever it was
printed, and how long its lines are held back for further lines. Only lines in Python's own format are recognised; any
other line is a record. Pure: lines in, records out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

RECORD_CHARS_MAX: Final = 65_536
CONTINUATION_WAIT_S: Final = 0.1  # how long lines are held back for further lines of the record
OF_LINES: Final = "of_lines"  # attribute of a log record whose text consists of several lines

_BEGIN: Final = "Traceback (most recent call last):"
_GROUP: Final = re.compile(r" +\+ Exception Group Traceback \(most recent call last\):")
# The line above an uncaught exception's traceback.
_ABOVE: Final = re.compile(r"Exception in thread .*:|Exception ignored in.*:")
_FATAL: Final = "Fatal Python error: "  # from faulthandler; all later lines belong to it
_END: Final = re.compile(r"[A-Za-z_][\w.<>]*(: .*|:)?")
_BETWEEN: Final = frozenset(
    {
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    }
)

# A log level, and a text, of several lines for a traceback.
Record = tuple[int, str]


class _At(Enum):
    """The position of the last line in a traceback."""

    NOWHERE = auto()
    ABOVE = auto()
    FRAMES = auto()
    GROUP = auto()  # ends at the first line that does not belong to it
    END = auto()
    GAP = auto()  # the empty line after it
    BETWEEN = auto()
    FATAL = auto()
    RECORD = auto()  # a log record of the model's process, which marks its lines


class Tracebacks:
    """The tracebacks of one instance. Memory is bounded by one record."""

    def __init__(self) -> None:
        self._at = _At.NOWHERE
        self._level = logging.INFO
        self._held: list[str] = []
        self._chars = 0

    @property
    def is_waiting(self) -> bool:
        """Whether lines are held back."""
        return bool(self._held)

    def printed(self, text: str) -> Iterator[Record]:
        """Add a line without a severity. Returns the records that are complete."""
        if self._at is _At.RECORD:
            yield logging.INFO, text  # of another thread; the record goes on
            return
        found = self._next(text)
        if found is None:
            yield from self.rest()
            found = self._next(text)
        if found is None:
            yield logging.INFO, text
        else:
            self._at = found
            yield from self._hold(logging.ERROR, text)

    def logged(self, level: int, text: str, *, goes_on: bool) -> Iterator[Record]:
        """Add a line of a log record. `goes_on`: the next line belongs to it."""
        if self._at is not _At.RECORD or level != self._level:
            yield from self.rest()
        if goes_on or self._held:
            self._at = _At.RECORD
            yield from self._hold(level, text)
            if not goes_on:
                yield from self.rest()
        else:
            yield level, text

    def rest(self) -> list[Record]:
        """The record is complete: returns the lines held back."""
        held, at = self._held, self._at
        self._held, self._at, self._chars = [], _At.NOWHERE, 0
        if at is _At.ABOVE:  # and nothing below
            return [(logging.INFO, line) for line in held]
        after = [(logging.INFO, held.pop())] if at is _At.GAP else []
        return [*([(self._level, "\n".join(held))] if held else ()), *after]

    def _hold(self, level: int, text: str) -> list[Record]:
        self._level = level
        self._held.append(text)
        self._chars += len(text)
        return self.rest() if self._chars > RECORD_CHARS_MAX else []

    def _next(self, text: str) -> _At | None:
        """The position of the next line in the traceback; None if it does not belong to one."""
        at = self._at
        if at in (_At.NOWHERE, _At.ABOVE, _At.BETWEEN):
            if text == _BEGIN:
                return _At.FRAMES
            if _GROUP.fullmatch(text):
                return _At.GROUP
            if text.startswith(_FATAL):
                return _At.FATAL
            if at is _At.NOWHERE:
                return _At.ABOVE if _ABOVE.fullmatch(text) else None
            return _At.BETWEEN if at is _At.BETWEEN and not text else None
        if at is _At.FRAMES:
            if text.startswith(" "):
                return _At.FRAMES
            return _At.END if _END.fullmatch(text) else None
        if at is _At.GROUP:
            return _At.GROUP if text.startswith(" ") else _At.GAP if not text else None
        if at is _At.END:
            return None if text else _At.GAP
        if at is _At.FATAL:
            return _At.FATAL
        return _At.BETWEEN if text in _BETWEEN else None
