"""What has to change when something is loaded, unloaded or found changed. Pure: names and stamps in, names out.

Decided here: who is affected by whom, who goes with an ensemble that is unloaded, what can be put in force
independently of the rest, and when a folder that changes has come to rest. Time is integer nanoseconds that come in.
It does not know how any of it is carried out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from flowserve.config.types import ModelConfig
from flowserve.graph.wiring import written_steps
from flowserve.repository.snapshot import Stamp

# How long a folder must stay as it is before it is loaded: a copy that is under way changes it all the time.
QUIET_NS: Final = 1_000_000_000

# Name -> the names of its steps; none for a plain model.
Steps = Mapping[str, Collection[str]]


def steps_of(config: ModelConfig) -> frozenset[str]:
    """The names an ensemble is made of; none for a plain model."""
    return frozenset(step.model for step in written_steps(config))


def above(names: Collection[str], steps: Steps) -> frozenset[str]:
    """Every ensemble that contains one of `names`, at any depth; of `names` themselves, those that contain another."""
    found: set[str] = set()
    wave = set(names)
    while wave:
        wave = {name for name, inside in steps.items() if name not in found and not wave.isdisjoint(inside)}
        found |= wave
    return frozenset(found)


def goes_with(name: str, steps: Steps, explicit: Collection[str]) -> frozenset[str]:
    """What an unload of `name` with its dependents takes along: steps, at any depth, that nobody loaded by name and
    that nothing else is made of.
    """
    gone = {name}
    while True:
        needed = {step for other, inside in steps.items() if other not in gone for step in inside}
        more = {
            step
            for one in gone
            for step in steps.get(one, ())
            if step in steps and step not in gone and step not in needed and step not in explicit
        }
        if not more:
            return frozenset(gone - {name})
        gone |= more


def groups(names: Iterable[str], steps: Steps) -> list[frozenset[str]]:
    """`names` in groups, by name: two that are joined by containment, also through others, are in one."""
    of: dict[str, set[str]] = {}
    for outer in {*names, *steps}:
        joined = {outer}.union(*(of.get(name, {name}) for name in (outer, *steps.get(outer, ()))))
        of.update(dict.fromkeys(joined, joined))
    wanted = set(names)
    return sorted({frozenset(of[name] & wanted) for name in wanted}, key=min)


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
