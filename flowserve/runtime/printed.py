"""What a model prints becomes records of the log, within bounds.

Decided here: where a line ends, how long one may be, when one without an end is shown and how often one that is written
over (progress bars), how many a second an instance may add to the log, and what is said of those that were too many.
Memory is bounded by one line and one traceback (tracebacks.py), whatever is printed and however fast. Pure: pieces of
bytes and the time come in. Control characters are escaped where the log is written (cli/logs.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from math import inf
from typing import Final

from flowserve.runtime.tracebacks import PATIENCE_S, Record, Tracebacks

LINE_BYTES_MAX: Final = 4096
LINE_PATIENCE_S: Final = 1.0  # how long a line waits for its end
LINES_A_SECOND_MAX: Final = 1000  # and so many at once

_SECOND_NS: Final = 1_000_000_000
_WRITTEN_OVER_NS: Final = 5 * _SECOND_NS  # between two states of a line that is written over again and again
# As in sd-daemon(3); a child's own log writes them, and a model may. The plus says that the record goes on in the next.
_SEVERITY: Final = re.compile(r"<([0-7])(\+?)>")
_LEVELS: Final = {
    **dict.fromkeys("012", logging.CRITICAL),
    "3": logging.ERROR,
    "4": logging.WARNING,
    **dict.fromkeys("56", logging.INFO),
    "7": logging.DEBUG,
}


class Printed:
    """One instance's output."""

    def __init__(self) -> None:
        self._records = Tracebacks()
        self._begun = b""  # a line whose end has not come, no longer than the maximum
        self._is_cut = False  # whether the rest of that line is passed over
        self._is_shown = False  # whether what came of that line is in the log already
        self._written_over_ns = -_WRITTEN_OVER_NS  # when a state of a line that was written over was shown last
        self._second_ns = 0  # when the second began that is counted
        self._left = LINES_A_SECOND_MAX  # lines that may still come in it
        self._dropped = 0

    @property
    def patience_s(self) -> float:
        """How long to wait for more, and then call `nothing_more`; for ever where nothing is kept back."""
        if self._records.is_waiting:
            return PATIENCE_S
        return LINE_PATIENCE_S if self._begun else inf

    def take(self, piece: bytes, now_ns: int) -> list[Record]:
        """More was printed. Returns what is whole now."""
        return [*self._take(piece, now_ns)]

    def nothing_more(self) -> list[Record]:
        """Nothing came for so long that what was kept back is whole, or should be seen."""
        if self._records.is_waiting or not self._begun:
            return self._records.rest()
        return [*self._show(b"")]

    def rest(self) -> list[Record]:
        """Nothing will come: how many are missing, and the line that was not ended."""
        last = self._end_line(b"") if self._begun else ()
        return [*self._announce_dropped(), *last, *self._records.rest()]

    def _take(self, piece: bytes, now_ns: int) -> Iterator[Record]:
        if now_ns - self._second_ns >= _SECOND_NS:
            yield from self._announce_dropped()
            self._second_ns, self._left = now_ns, LINES_A_SECOND_MAX
        if not self._left:  # not worth splitting
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
                text = last + whole[len(states) :]  # of which a "\r" at the end may be half of the line's end
                if now_ns - self._written_over_ns >= _WRITTEN_OVER_NS and before.strip():
                    self._written_over_ns = now_ns
                    records = [*self._show(before)]
        self._begun, self._is_cut = _cut(self._begun, text, self._is_cut)
        return records

    def _show(self, text: bytes) -> Iterable[Record]:
        """A line so far. It is no empty line when its end comes."""
        records = self._end_line(text)
        self._is_shown = True
        return records

    def _end_line(self, text: bytes) -> Iterable[Record]:
        if b"\r" in text or self._begun.endswith(b"\r"):  # the last of what was written over
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
