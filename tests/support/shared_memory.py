"""The shared memory segments of given processes, so that a test can check that they are removed, independently of other
processes; and a check of an arena's blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from flowserve.memory.arena import Arena
from flowserve.memory.segment import PAGE

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


def check_arena(arena: Arena) -> None:
    """Free and lent blocks tile every segment, and no two free blocks are neighbours."""
    assert arena.lent_bytes >= 0  # collects returned blocks
    for space in arena._spaces:
        end = 0
        for start, size in sorted([*zip(space._starts, space._sizes, strict=True), *space.lent.items()]):
            assert start == end, f"a hole or an overlap at {end}"
            assert start % PAGE == size % PAGE == 0
            assert size > 0
            end = start + size
        assert end == space.segment.size
        gaps = zip(space._starts, space._sizes, space._starts[1:], strict=False)
        assert all(start + size < following for start, size, following in gaps)
