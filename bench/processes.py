"""CPU time and memory of a tree of processes, read from /proc (Linux only).

All descendants of the started process count as one server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """User and system time of process `root` and all its living descendants, in steps of one clock tick (10 ms)."""
    return sum(tree(root).values()) / _TICKS_PER_SECOND


def memory_bytes(root: int) -> int:
    """The proportional set size of the tree of `root`: a page that n processes share counts as an nth for each."""
    return sum(map(_proportional_bytes, tree(root)))


def tree(root: int) -> dict[int, int]:
    """`root` and all its living descendants, each with its CPU time in clock ticks."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        # The command's name is in parentheses and may itself contain blanks and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        pid, parent = int(folder.name), int(fields[1])
        ticks[pid] = int(fields[11]) + int(fields[12])
        children.setdefault(parent, []).append(pid)

    found, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = ticks.get(pid, 0)
        waiting += children.get(pid, ())
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended meanwhile
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
