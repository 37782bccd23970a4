"""What would happen to these requests, without running anything: which batches form when, and who is refused.

Decided here: which deployment of a graph or a repository is simulated, and how durations and counts may be given. How
it lives in simulated time is simulated.py's, what is told of it history.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid, NotFound
from flowserve.graph.types import Graph
from flowserve.runtime.reading import Reading, read_repositories
from flowserve.scheduling.limiter import Available
from flowserve.testing.history import Arrival, Simulation
from flowserve.testing.simulated import MS_NS, World
from flowserve.testing.sources import Source, folder_of

Duration = float | Callable[[int], float]  # milliseconds of a batch, or those of a batch of so many rows
Count = int | Callable[[int], int]  # a number, or that of the request with this number


def simulate(
    source: Source,
    name: str = "",
    *,
    arrivals: Iterable[Arrival | float],
    takes_ms: Duration | Mapping[str, Duration] = 1.0,
    answers: Count | Mapping[str, Count] = 1,
    rate_limit: Sequence[Available] | None = None,
) -> Simulation:
    """Send requests to a deployment of `source` (a graph, or a repository's folder) in simulated time.

    `name` may be left out for a graph, and where there is only one deployment that nothing else contains. An arrival
    that is a number is a request of one row at that millisecond. `takes_ms`: how long a batch takes, for all models or
    by name (1 where nothing is said); of a decoupled model, how long each of its answers takes. `answers`: how often a
    decoupled model answers a step, likewise; its instance is kept until the last. `rate_limit` as `flowserve run
    --rate-limit`: the resources given, None for off. All tensors of one kind are taken to be of one shape, and whoever
    asks takes each answer at once. Answers are not remembered (response_cache). Blocks while configurations are read.

    Raises Problems and NotFound for what cannot be served, Invalid for a number that means nothing or is for a model
    that the graph does not have, Unsupported for models of iterative sequences.
    """
    path, own_name, kept = folder_of(source)
    reading = read_repositories([path])
    graph = _graph(reading, name or own_name)
    models = {node.model.name for node in graph.nodes}
    took, count = _by_model("takes_ms", takes_ms, models, 1.0), _by_model("answers", answers, models, 1)
    _refuse_answers(answers, {node.model.name for node in graph.nodes if node.decoupled})
    requests = [one if isinstance(one, Arrival) else Arrival(one) for one in arrivals]
    for number, one in enumerate(requests):
        _refuse_arrival(number, one)
    world = World(
        graph,
        reading.configs,
        lambda model, rows: _ns(took(model, rows), f"takes_ms of '{model}'"),
        lambda model, number: _whole(count(model, number), 0, f"answers of '{model}'"),
        rate_limit,
    )
    del kept  # nothing is read any more
    return world.live(requests)


def _refuse_arrival(number: int, one: Arrival) -> None:
    _ns(one.at_ms, f"at_ms of arrival {number}")
    _ns(one.timeout_ms, f"timeout_ms of arrival {number}")
    _whole(one.rows, 1, f"rows of arrival {number}")


def _refuse_answers(answers: Count | Mapping[str, Count], decoupled: Collection[str]) -> None:
    """A count that would be left aside is a mistake in a test."""
    named = [name for name in answers if name not in decoupled] if isinstance(answers, Mapping) else []
    if named:
        raise Invalid(f"answers names '{named[0]}', which is not decoupled: it answers each step once")
    if not isinstance(answers, Mapping) and answers != 1 and not decoupled:
        raise Invalid("answers is given, and no model of the graph is decoupled: each answers a step once")


def _ns(milliseconds: Any, what: str) -> int:
    try:
        nanoseconds: int = round(milliseconds * MS_NS)
    except (TypeError, ValueError, OverflowError):  # no number, or none that is finite
        nanoseconds = -1
    if nanoseconds < 0:
        raise Invalid(f"{what} is a number of milliseconds from 0 on, not {milliseconds!r}")
    return nanoseconds


def _whole(number: Any, least: int, what: str) -> int:
    if not isinstance(number, int | np.integer) or number < least:
        raise Invalid(f"{what} is a whole number from {least} on, not {number!r}")
    return int(number)


def _by_model(what: str, given: Any, models: Collection[str], default: Any) -> Callable[[str, int], Any]:
    """What was given for a model, and for the rows or the request it is asked for."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in models:
            hint = did_you_mean(name, models) or f"its models are {', '.join(sorted(models))}"
            raise Invalid(f"{what} names '{name}', which the graph does not have ({hint})")

    def said(model: str, number: int) -> Any:
        one = given.get(model, default) if isinstance(given, Mapping) else given
        return one(number) if callable(one) else one

    return said


def _graph(reading: Reading, name: str) -> Graph:
    resolution = reading.resolution
    contained = {node.model.name for graphs in resolution.graphs.values() for g in graphs.values() for node in g.nodes}
    alone = len(resolution.graphs) == 1
    roots = [one for one in (*resolution.graphs, *resolution.failed) if alone or one not in contained]
    name = name or (roots[0] if len(roots) == 1 else "")
    if name in resolution.failed:
        raise resolution.failed[name]
    if name not in resolution.graphs:
        there = sorted({*resolution.graphs, *resolution.failed})
        known = did_you_mean(name, there) or f"there are {', '.join(there) or 'none'}"
        raise NotFound(f"no deployment '{name}' to simulate ({known})" if name else f"which deployment? {known}")
    versions = resolution.graphs[name]
    return versions[max(versions)]
