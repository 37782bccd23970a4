"""How many processors this process may use: those it is bound to, within the limit of its control group.

Decides that a limit of 2.5 processors counts as 2, since more threads would be stopped in the middle of a period. Does
not know what they are used for. Callers: backends that choose a number of threads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SHARED_BY: Final = "_FLOWSERVE_SERVERS"  # the environment variable with the number of servers behind one port
_PROC: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")


def cores_allowed(proc: Path = _PROC, root: Path = _ROOT) -> int:
    """At least 1. `proc` and `root`: the folders in which the kernel lists the process's groups and their limits. If
    several servers share the processors (`SHARED_BY`), each gets its part.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = group_limit(proc, root)
    cores = bound if limit is None else min(bound, int(limit))
    return max(1, cores // int(os.environ.get(SHARED_BY, "1")))


def group_limit(proc: Path = _PROC, root: Path = _ROOT) -> float | None:
    """The processors that the control group, and those around it, allow; None for no limit. Both versions of control
    groups are read.
    """
    found = []
    for line in _text(proc).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            found += [_limit_of(_text(home / "cpu.max").split()) for home in _up(root, path)]
        elif "cpu" in controllers.split(","):
            for home in _up(root / "cpu", path):
                found.append(_limit_of([_text(home / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]))
    limits = [limit for limit in found if limit is not None]
    return min(limits, default=None)


def _up(root: Path, path: str) -> list[Path]:
    """The group's folder and those around it. In a container, its own group is often shown as the root."""
    homes = [root]
    for part in path.strip("/").split("/"):
        if part and part != "..":
            homes.append(homes[-1] / part)
    return homes


def _limit_of(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # "max", -1, or no such file
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
