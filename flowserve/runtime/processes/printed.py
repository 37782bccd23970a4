"""Splits the output of a model into records of the log, within bounds.

Decides where a line ends, its maximum length, when an incomplete line is shown, how often a line that is overwritten
(progress bars) is shown, how many lines per second an instance may log, and the record about dropped ones; where a
Python traceback begins and ends, including those of its causes, that it is one record and an error wherever it was
printed, and how long its lines are held back for further lines. Only lines in Python's own format are recognised; any
other line is a record. Memory is bounded by one line and one traceback. Pure: receives pieces of bytes and the time.
Control characters are escaped where the log is written (cli/logs.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from math import inf
from typing import Final

LINE_BYTES_MAX: Final = 4096
LINE_PATIENCE_S: Final = 1.0  # an incomplete line is shown after this time
LINES_A_SECOND_MAX: Final = 1000  # also the size of a burst

_SECOND_NS: Final = 1_000_000_000
_WRITTEN_OVER_NS: Final = 5 * _SECOND_NS  # minimum time between two shown states of an overwritten line
# As in sd-daemon(3), written by a child's log and by some models. A plus: the next line continues the record.
_SEVERITY: Final = re.compile(r"<([0-7])(\+?)>")
_LEVELS: Final = {
    **dict.fromkeys("012", logging.CRITICAL),
    "3": logging.ERROR,
    "4": logging.WARNING,
    **dict.fromkeys("56", logging.INFO),
    "7": logging.DEBUG,
}

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


class Printed:
    """The output of one instance."""

    def __init__(self) -> None:
        self._records = Tracebacks()
        self._begun = b""  # an incomplete line, up to the maximum length
        self._is_cut = False  # whether the rest of that line is dropped
        self._is_shown = False  # whether the beginning of that line was logged already
        self._written_over_ns = -_WRITTEN_OVER_NS  # time of the last shown state of an overwritten line
        self._second_ns = 0  # start of the current one-second window
        self._left = LINES_A_SECOND_MAX  # lines that may still be logged in it
        self._dropped = 0

    @property
    def wait_s(self) -> float:
        """Seconds to wait for more output before `wait_is_over` is called; infinite if no output is held back."""
        if self._records.is_waiting:
            return CONTINUATION_WAIT_S
        return LINE_PATIENCE_S if self._begun else inf

    def take(self, piece: bytes, now_ns: int) -> list[Record]:
        """Add output. Returns the records that are complete."""
        return [*self._take(piece, now_ns)]

    def wait_is_over(self) -> list[Record]:
        """No output for `wait_s`: returns the output that was held back."""
        if self._records.is_waiting or not self._begun:
            return self._records.rest()
        return [*self._show(b"")]

    def rest(self) -> list[Record]:
        """The end of the output: the number of dropped lines, and the incomplete line."""
        last = self._end_line(b"") if self._begun else ()
        return [*self._announce_dropped(), *last, *self._records.rest()]

    def _take(self, piece: bytes, now_ns: int) -> Iterator[Record]:
        if now_ns - self._second_ns >= _SECOND_NS:
            yield from self._announce_dropped()
            self._second_ns, self._left = now_ns, LINES_A_SECOND_MAX
        if not self._left:  # counted without splitting
            count = piece.count(b"\n")
            if count:
                self._dropped += count
                self._begun, self._is_cut, self._is_shown = b"", False, False
            yield from self._begin_line(piece[piece.rfind(b"\n") + 1 :], now_ns)
            return
        *whole, last = piece.split(b"\n")
        for line in whole[: self._left]:
            yield from self._end_line(line)
        if len(whole) > self._left:
            self._dropped += len(whole) - self._left
        self._left -= min(len(whole), self._left)
        if not self._left:
            yield from self._records.rest()
        yield from self._begin_line(last, now_ns)

    def _begin_line(self, text: bytes, now_ns: int) -> Iterable[Record]:
        records: Iterable[Record] = ()
        if b"\r" in text or self._begun.endswith(b"\r"):
            whole = self._begun + text
            states = whole.rstrip(b"\r")
            before, is_over, last = states.rpartition(b"\r")
            if is_over:
                self._begun, self._is_cut = b"", False
                text = last + whole[len(states) :]  # a "\r" at its end may be part of "\r\n"
                if now_ns - self._written_over_ns >= _WRITTEN_OVER_NS and before.strip():
                    self._written_over_ns = now_ns
                    records = [*self._show(before)]
        self._begun, self._is_cut = _cut(self._begun, text, self._is_cut)
        return records

    def _show(self, text: bytes) -> Iterable[Record]:
        """Log an incomplete line. If the rest is empty, it is not logged as another line."""
        records = self._end_line(text)
        self._is_shown = True
        return records

    def _end_line(self, text: bytes) -> Iterable[Record]:
        if b"\r" in text or self._begun.endswith(b"\r"):  # only the last state of an overwritten line
            _, is_over, text = (self._begun + text).rstrip(b"\r").rpartition(b"\r")
            self._begun, self._is_cut = b"", self._is_cut and not is_over
        line, is_cut = _cut(self._begun, text, self._is_cut)
        was_shown = self._is_shown
        self._begun, self._is_cut, self._is_shown = b"", False, False
        if was_shown and not line.strip():
            return ()
        shown = line.decode(errors="backslashreplace")
        if is_cut:
            shown += f" ... (cut: longer than {LINE_BYTES_MAX} bytes)"
        severity = _SEVERITY.match(shown)
        if severity is None:
            return self._records.printed(shown)
        return self._records.logged(_LEVELS[severity[1]], shown[severity.end() :], goes_on=bool(severity[2]))

    def _announce_dropped(self) -> list[Record]:
        if not self._dropped:
            return []
        text = f"{self._dropped} lines are missing here: more than {LINES_A_SECOND_MAX} a second were printed"
        self._dropped = 0
        return [(logging.WARNING, text)]


def _cut(begun: bytes, more: bytes, is_cut: bool) -> tuple[bytes, bool]:
    room = LINE_BYTES_MAX - len(begun)
    return begun + more[:room], is_cut or len(more) > room


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
            yield logging.INFO, text  # printed by another thread; the record continues
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
