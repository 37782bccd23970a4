"""Which deployments can be served together, and in which order they come up.

Decided here: what one failure means for the rest. Pure: configurations go in, graphs and reasons come out, and asking
again with one more failure gives the whole answer anew. It does not know where configurations come from nor how
models are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problems
from flowserve.graph.plain import compile_model
from flowserve.graph.types import Graph


@dataclass(frozen=True, slots=True)
class Resolution:
    """What can be served. `models` and `ensembles` hold exactly the names of `graphs`, which has one graph per version.

    `models` are the plain ones, by name: load them in any order. `ensembles` come after everything they contain.
    `failed` is everything else and why, the failures that were given included.
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
    """Compile everything that can be. `versions[name]` are the versions to serve of `configs[name]`.

    `only`: what to compile; the rest is taken to be right, and the answer is silent about it, except for `failed`.
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
        # Not before there is one: the library of graphs takes longer to import than all of this room.
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
    """Those that are asked for, each after those it contains."""
    if not any(configs[name].is_ensemble for name in asked if name in configs):
        return []
    from flowserve.graph.wiring import containment_order

    return [name for name in containment_order(configs) if name in asked]


def _reason(error: FlowserveError) -> str:
    """One line that stands for an error in the message of those who depend on it. What failed only because something
    in it did hands on that one's line ("Model 'decode' failed with error: ..."), or the lines of ensembles in ensembles
    would hold all those below.
    """
    first, *others = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, Problems) and error.problems[0].rule == "G3":
        text = error.problems[0].message
        below = text.partition(" failed with error: ")[2]
        first = below if below.startswith("Model '") else text.partition(" which is not valid. ")[2] or first
    return f"{first} (and {len(others)} more)" if others else first
