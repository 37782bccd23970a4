"""How busy the machine is: processors and memory, read from the system when somebody asks.

Decided here: what Triton's CPU families mean here: the share of all processors' time that was not idle since the last
reading, or since one before it where that is too young, and memory that programs could not have. How much time has
passed the processors' own ticks tell. Where the system does not tell (it is Linux's /proc), there are no figures rather
than zeros.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_TICKS_PER_SECOND: Final = 100  # of each processor; the kernel tells programs so, however often it ticks itself


@dataclass(frozen=True, slots=True)
class Readings:
    """`utilization` is from 0 to 1. Sizes in bytes."""

    utilization: float
    memory_total: int
    memory_used: int


class Machine:
    """Remembers the last reading, which the next one is compared with, `interval_ms` later at the earliest. Safe to
    call from any thread.
    """

    def __init__(self, proc: Path = PROC, interval_ms: int = 0) -> None:
        self._proc = proc
        self._least = interval_ms * (os.cpu_count() or 1) * _TICKS_PER_SECOND // 1000
        self._lock = threading.Lock()
        self._busy, self._total = self._times() or (0, 0)
        self._utilization = 0.0

    def read(self) -> Readings | None:
        """The figures now, None where the system does not tell."""
        memory = self._memory()
        with self._lock:
            times = self._times()
            if times is None or memory is None:
                return None
            busy, total = times
            if total > self._total and total - self._total >= self._least:
                share = (busy - self._busy) / (total - self._total)
                self._utilization = min(max(share, 0.0), 1.0)
                self._busy, self._total = busy, total
            return Readings(self._utilization, *memory)

    def _times(self) -> tuple[int, int] | None:
        """Ticks of all processors since the machine started: not idle, and all."""
        try:
            name, *fields = (self._proc / "stat").read_text("ascii").partition("\n")[0].split()
            ticks = [int(field) for field in fields[:8]]  # the two after these are in the first ones already
        except (OSError, ValueError):
            return None
        if name != "cpu" or len(ticks) < 5:
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    def _memory(self) -> tuple[int, int] | None:
        try:
            lines = (self._proc / "meminfo").read_text("ascii").splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
            return sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"]
        except (OSError, ValueError, KeyError):
            return None
