"""Determines which deployments can be served together, their load order, and what a change affects.

Decides the consequences of one failure for the others. Decides also which deployments a change affects, which are
unloaded together with an ensemble, and which changes can take effect independently: `Containment` of ensembles and
models is indexed in both directions and maintained as it changes, so that the cost of a query is proportional to its
result: each change makes several queries, possibly among a thousand models.

Pure: configurations or names in, graphs, errors or names out; another call of `resolve` with one more failure gives the
complete new result. Does not know where configurations come from, or how models are loaded and unloaded. Callers:
`runtime/loading`, `authoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problems
from flowserve.graph.types import Graph, compile_model

# Name -> the names of its steps; empty for a plain model.
Steps = Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The deployments that can be served. `models` and `ensembles` are together the names of `graphs`, which has one
    graph per version.

    `models` are the plain ones, by name; they can be loaded in any order. Each of `ensembles` is after everything it
    contains. `failed` has the error of every other deployment, including the given failures.
    """

    models: tuple[str, ...]
    ensembles: tuple[str, ...]
    graphs: Mapping[str, Mapping[int, Graph]]
    failed: Mapping[str, FlowserveError]


def resolve(
    configs: Mapping[str, ModelConfig],
    versions: Mapping[str, Sequence[int]],
    failed: Mapping[str, FlowserveError],
    only: Collection[str] | None = None,
) -> Resolution:
    """Compile all deployments that can be. `versions[name]` are the versions to serve of `configs[name]`.

    `only`: the names to compile; the others are assumed to be valid and, except for `failed`, are not in the result.
    """
    asked = configs.keys() if only is None else only
    failures = dict(failed)
    reasons = {name: _reason(error) for name, error in failures.items()}
    available = {
        name: dict.fromkeys(versions[name], config) for name, config in configs.items() if name not in failures
    }
    models = tuple(sorted(name for name in available if name in asked and not configs[name].is_ensemble))
    graphs = {name: {version: compile_model(configs[name], version) for version in versions[name]} for name in models}
    ensembles: list[str] = []
    for name in _ensembles({name: configs[name] for name in available}, asked):
        # Imported only for ensembles: networkx takes longer to import than this whole package.
        from flowserve.graph.compile import compile_ensemble

        try:
            graphs[name] = {
                version: compile_ensemble(configs[name], version, available, reasons) for version in versions[name]
            }
            ensembles.append(name)
        except Problems as problems:
            failures[name] = problems
            reasons[name] = _reason(problems)
    return Resolution(models, tuple(ensembles), graphs, failures)


def _ensembles(configs: Mapping[str, ModelConfig], asked: Collection[str]) -> list[str]:
    """The requested ensembles, each after those it contains."""
    if not any(configs[name].is_ensemble for name in asked if name in configs):
        return []
    from flowserve.graph.wiring import containment_order

    return [name for name in containment_order(configs) if name in asked]


def _reason(error: FlowserveError) -> str:
    """One line for an error, for the messages of dependent ensembles. An ensemble that failed only because of a step
    passes on the step's line ("Model 'decode' failed with error: ..."); otherwise the lines of nested ensembles would
    contain all those below.
    """
    first, *others = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, Problems) and error.problems[0].rule == "G3":
        text = error.problems[0].message
        below = text.partition(" failed with error: ")[2]
        first = below if below.startswith("Model '") else text.partition(" which is not valid. ")[2] or first
    return f"{first} (and {len(others)} more)" if others else first


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
