"""Which folders of a repository changed. Pure: stamps in, names out.

Decided here: when a folder that changes has come to rest. Time is integer nanoseconds that come in. It does not know
how folders are looked at, nor what is done about those that changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flowserve.repository.snapshot import Stamp

# How long a folder must stay as it is before it is loaded: a copy that is under way changes it all the time.
QUIET_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Settled:
    """Folders that changed and came to rest. `gone` are names whose folder is not there any more."""

    changed: Mapping[str, Stamp]
    gone: frozenset[str]


class Watch:
    """Remembers how each folder looked when it was last acted upon, and tells which ones look otherwise, and have for
    a while.
    """

    def __init__(self, quiet_ns: int = QUIET_NS) -> None:
        self._quiet_ns = quiet_ns
        self._known: dict[str, Stamp] = {}
        self._restless: dict[str, tuple[Stamp | None, int]] = {}  # how it looks, and since when

    @property
    def is_restless(self) -> bool:
        """Whether some folder changed and has not come to rest: look again soon."""
        return bool(self._restless)

    def knows(self, stamps: Mapping[str, Stamp]) -> None:
        """These were acted upon as they look here."""
        self._known.update(stamps)

    def has(self, name: str) -> bool:
        """Whether there was a folder of that name when it was last acted upon."""
        return name in self._known

    def look(self, stamps: Mapping[str, Stamp], now_ns: int) -> Settled:
        """How everything looks now. What is returned counts as acted upon."""
        changed: dict[str, Stamp] = {}
        gone: set[str] = set()
        for name in {*stamps, *self._known, *self._restless}:
            seen = stamps.get(name)
            if seen == self._known.get(name):
                self._restless.pop(name, None)
                continue
            before, since_ns = self._restless.get(name, (None, None))
            if since_ns is None or before != seen:
                self._restless[name] = seen, now_ns
            elif now_ns - since_ns >= self._quiet_ns:
                del self._restless[name]
                if seen is None:
                    gone.add(name)
                    del self._known[name]
                else:
                    changed[name] = self._known[name] = seen
        return Settled(changed, frozenset(gone))
