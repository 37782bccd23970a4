"""Containment of ensembles and models, maintained as it changes. Pure: names in, names out.

Decides which deployments a change affects, which are unloaded together with an ensemble, and which changes can take
effect independently. Both directions are indexed, so that the cost of a query is proportional to its result: each
change makes several queries, possibly among a thousand models. Does not load or unload. Caller: `runtime/loading`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from flowserve.config.types import ModelConfig

# Name -> the names of its steps; empty for a plain model.
Steps = Mapping[str, Collection[str]]


def steps_of(config: ModelConfig) -> frozenset[str]:
    """The names of an ensemble's steps; empty for a plain model."""
    return frozenset(step.model for step in config.steps)


class Containment:
    """The steps of every known name. A step may be an unknown name."""

    def __init__(self, steps: Steps | None = None) -> None:
        self._inside: dict[str, frozenset[str]] = {}
        self._around: dict[str, set[str]] = {}  # the inverse of `_inside`
        for name, inside in (steps or {}).items():
            self.put(name, inside)

    def put(self, name: str, inside: Collection[str]) -> None:
        """Make `name` known, with these steps."""
        self.drop(name)
        self._inside[name] = frozenset(inside)
        for step in self._inside[name]:
            self._around.setdefault(step, set()).add(name)

    def drop(self, name: str) -> None:
        """Make `name` unknown; ensembles that contain it stay known."""
        for step in self._inside.pop(name, ()):
            self._around[step].discard(name)
            if not self._around[step]:
                del self._around[step]

    def above(self, names: Iterable[str]) -> frozenset[str]:
        """Every ensemble that contains one of `names`, at any depth, including members of `names`."""
        return _reached(names, lambda name: self._around.get(name, ()))

    def below(self, names: Iterable[str], changed: Steps) -> frozenset[str]:
        """Everything that `names` contain, at any depth; `changed` overrides the known steps."""
        return _reached(names, lambda name: changed.get(name, self._inside.get(name, ())))

    def goes_with(self, name: str, stays: Callable[[str], bool]) -> frozenset[str]:
        """The names unloaded together with `name` and its dependents: steps, at any depth, that need not stay and that
        no other ensemble contains.
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
        """The names of `changed` in groups: two names that are connected by containment, also indirectly, are in one
        group. `changed` overrides the known steps.
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
    """Everything reachable from `names`."""
    reached: set[str] = set()
    waiting = list(names)
    while waiting:
        new = set(onward(waiting.pop())) - reached
        reached |= new
        waiting += new
    return frozenset(reached)
