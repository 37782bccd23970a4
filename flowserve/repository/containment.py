"""What is made of what, kept as it changes. Pure: names in, names out.

Decided here: who is affected by whom, who goes with an ensemble that is unloaded, and what can be put in force
independently of the rest. Both directions are kept, so that a question costs what its answer is large: among a thousand
models each change asks several. It does not know how any of it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from flowserve.config.types import ModelConfig

# Name -> the names of its steps; none for a plain model.
Steps = Mapping[str, Collection[str]]


def steps_of(config: ModelConfig) -> frozenset[str]:
    """The names an ensemble is made of; none for a plain model."""
    return frozenset(step.model for step in config.steps)


class Containment:
    """What every known name is made of. A name may be contained that is not known itself."""

    def __init__(self, steps: Steps | None = None) -> None:
        self._inside: dict[str, frozenset[str]] = {}
        self._around: dict[str, set[str]] = {}  # exactly the names that some `_inside` has, and whose those are
        for name, inside in (steps or {}).items():
            self.put(name, inside)

    def put(self, name: str, inside: Collection[str]) -> None:
        """From now on `name` is known, and made of these."""
        self.drop(name)
        self._inside[name] = frozenset(inside)
        for step in self._inside[name]:
            self._around.setdefault(step, set()).add(name)

    def drop(self, name: str) -> None:
        """From now on `name` is not known; what is made of it still is."""
        for step in self._inside.pop(name, ()):
            self._around[step].discard(name)
            if not self._around[step]:
                del self._around[step]

    def above(self, names: Iterable[str]) -> frozenset[str]:
        """Every ensemble that contains one of `names`, at any depth; of `names` themselves, those that contain
        another.
        """
        return _reached(names, lambda name: self._around.get(name, ()))

    def below(self, names: Iterable[str], changed: Steps) -> frozenset[str]:
        """Everything that `names` are made of, at any depth, where `changed` are made of what it says."""
        return _reached(names, lambda name: changed.get(name, self._inside.get(name, ())))

    def goes_with(self, name: str, stays: Callable[[str], bool]) -> frozenset[str]:
        """What an unload of `name` with its dependents takes along: steps, at any depth, that need not stay and that
        nothing else is made of.
        """
        gone = {name}
        while True:
            more = {
                step
                for one in gone
                for step in self._inside.get(one, ())
                if step in self._inside and step not in gone and self._around[step] <= gone and not stays(step)
            }
            if not more:
                return frozenset(gone - {name})
            gone |= more

    def groups(self, changed: Steps) -> list[frozenset[str]]:
        """The names of `changed`, which are made of what it says, in groups, by name: two that are joined by
        containment, also through others, are in one.
        """
        around = Containment(changed)._around

        def joined(name: str) -> Iterable[str]:
            yield from changed.get(name, self._inside.get(name, ()))
            yield from around.get(name, ())
            yield from (outer for outer in self._around.get(name, ()) if outer not in changed)

        found: list[frozenset[str]] = []
        left = set(changed)
        for name in sorted(changed):
            if name in left:
                group = frozenset({name, *_reached([name], joined)} & changed.keys())
                found.append(group)
                left -= group
        return found


def _reached(names: Iterable[str], onward: Callable[[str], Iterable[str]]) -> frozenset[str]:
    """Everything that can be come to from one of `names`."""
    reached: set[str] = set()
    waiting = list(names)
    while waiting:
        new = set(onward(waiting.pop())) - reached
        reached |= new
        waiting += new
    return frozenset(reached)
