"""How much host memory this process may use: the machine's, or less if a control group (a container) limits it; and how
many files it may open.

Decides which limits are read: of the process's own control group and all above it, in version 2 (`memory.max`,
`memory.high`) and version 1 (`memory.limit_in_bytes`). A limit that the system does not report is ignored. Does not
know what the memory is used for. Caller: the command line, for the defaults of limits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

UNKNOWN_BYTES: Final = 4 << 30  # assumed where the system reports nothing
UNKNOWN_FILES: Final = 65536
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def memory_bytes(own: Path = _OWN, cgroups: Path = _CGROUPS) -> int:
    """The smallest of the limits, in bytes. `own` lists the process's control groups, which are below `cgroups`."""
    return min([_machine_bytes(), *_limits(own, cgroups)])


def open_files() -> int:
    """The number of files that this process may have open."""
    if sys.platform == "win32":
        return UNKNOWN_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNKNOWN_FILES if soft == resource.RLIM_INFINITY else soft


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return UNKNOWN_BYTES


def _limits(own: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            root, names = cgroups, ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ["memory.limit_in_bytes"]
        else:
            continue
        group = root / path.strip("/")
        # In a container the path may be the host's, of which only the root is visible.
        for folder in (group, *group.parents):
            for name in names:
                yield from _limit(folder / name)
            if folder == root:
                break


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdigit():  # "max" is no limit
        yield int(text)
