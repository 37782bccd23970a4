"""Determines which deployments can be served together, and their load order.

Decides the consequences of one failure for the others. Pure: configurations in, graphs and errors out; another call
with one more failure gives the complete new result. Does not know where configurations come from, or how models are
loaded. Callers: `runtime/loading`, `authoring`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problems
from flowserve.graph.types import Graph, compile_model


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
