"""Which shared memory segments processes have, so that a test can check that these are gone, whatever else runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SHM = "/dev/shm/"


def segments_of(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that these processes have mapped or opened. Ended processes have none."""
    found: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            descriptors = [*Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {line[line.index(SHM) :] for line in maps.splitlines() if SHM in line}
        for descriptor in descriptors:
            try:
                found.add(os.readlink(descriptor))
            except OSError:  # closed meanwhile
                continue
    return {path for path in found if path.startswith(SHM) and not path.endswith(" (deleted)")}


def left_of(segments: Iterable[str]) -> list[str]:
    """Those of these segments that still exist."""
    return [path for path in segments if Path(path).exists()]
