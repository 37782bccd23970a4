"""What a model prints becomes records of the log, within bounds.

Decided here: where a line ends, how long one may be, how many a second an instance may add to the log, and what is
said of those that were too many. Memory is bounded by one line and one traceback (tracebacks.py), whatever is printed
and however fast. Pure: pieces of bytes and the time come in. Control characters are escaped where the log is written
(cli/logs.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Final

from flowserve.runtime.tracebacks import Record, Tracebacks

LINE_BYTES_MAX: Final = 4096
LINES_A_SECOND_MAX: Final = 1000  # and so many at once

_SECOND_NS: Final = 1_000_000_000
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
        self._second_ns = 0  # when the second began that is counted
        self._left = LINES_A_SECOND_MAX  # lines that may still come in it
        self._dropped = 0

    @property
    def is_waiting(self) -> bool:
        """Whether something is kept back until more comes, for `PATIENCE_S` at most."""
        return self._records.is_waiting

    def take(self, piece: bytes, now_ns: int) -> list[Record]:
        """More was printed. Returns what is whole now."""
        return [*self._take(piece, now_ns)]

    def nothing_more(self) -> list[Record]:
        """Nothing came for so long that what was kept back is whole."""
        return self._records.rest()

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
                self._begun, self._is_cut = b"", False
            self._begin_line(piece[piece.rfind(b"\n") + 1 :])
            return
        *whole, last = piece.split(b"\n")
        for line in whole[: self._left]:
            yield from self._end_line(line)
        if len(whole) > self._left:
            self._dropped += len(whole) - self._left
        self._left -= min(len(whole), self._left)
        if not self._left:
            yield from self._records.rest()
        self._begin_line(last)

    def _begin_line(self, text: bytes) -> None:
        self._begun, self._is_cut = _cut(self._begun, text, self._is_cut)

    def _end_line(self, text: bytes) -> Iterable[Record]:
        line, is_cut = _cut(self._begun, text, self._is_cut)
        self._begun, self._is_cut = b"", False
        shown = line.rstrip(b"\r").decode(errors="backslashreplace")
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
