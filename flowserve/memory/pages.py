"""Which pages of a private mapping this process has written into.

Decided here: that is read from the kernel's own page table of this process. Whoever does not write, which is nearly
every model, keeps his pages then: throwing them away costs a system call and a page fault for every page that is read
again, which is several times as much as looking. Where the table cannot be read, or says what is not known here, pages
count as written.

This file does not know whose memory it is.
"""

from __future__ import annotations

import os
from typing import Final

from flowserve.memory.segment import PAGE, Segment

_ENTRY_BYTES: Final = 8
# The highest byte of an entry that shows the file's page, or nothing: bit 63 "present" always comes with bit 61 "of a
# file" there, bit 56 is "mapped only here".
_UNWRITTEN: Final = b"\x00\xa0\xa1"


class PageTable:
    """That of the process it is made in."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def is_written(self, segment: Segment, start: int, stop: int) -> bool:
        """Whether a page of these was ever written into since its writes were last forgotten, or may have been."""
        first = (segment.address + start) // PAGE
        nbytes = ((segment.address + stop - 1) // PAGE - first + 1) * _ENTRY_BYTES
        try:
            entries = os.pread(self._fd, nbytes, first * _ENTRY_BYTES)
        except OSError:
            return True
        if nbytes == _ENTRY_BYTES == len(entries):
            return entries[-1] not in _UNWRITTEN
        # What is left of the entries' highest bytes without those that tell of no write.
        return len(entries) != nbytes or bool(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].strip(_UNWRITTEN))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
