"""`simulate`: the deployment of a graph or a repository in simulated time, without running its models.

Decides which deployment is meant, and checks the durations and counts it is given. How requests and batches are
simulated is decided by `flowserve.simulation`. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid, NotFound
from flowserve.graph.types import Graph
from flowserve.runtime.loading.reading import Reading, read_repositories
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.simulation.deployment import MS_NS, SimulatedDeployment
from flowserve.simulation.records import Arrival, Simulation
from flowserve.simulation.rows import ItemCounts, RowPlan, Taken
from flowserve.testing.fakes import Source, folder_of

Duration = float | Callable[[int], float]  # milliseconds of a batch, or a function of its rows
Count = int | Callable[[int], int]  # a number, or a function of the request's number
NOTHING_GIVEN: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Clients:
    """A closed loop: `count` clients, each of which sends its next request when the one before it has ended, until
    `requests` were sent. Each request has `rows` rows.
    """

    count: int
    requests: int = 1000
    rows: int = 1


def simulate(
    source: Source,
    name: str = "",
    *,
    arrivals: Iterable[Arrival | float] | Clients,
    takes_ms: Duration | Mapping[str, Duration] = 1.0,
    answers: Count | Mapping[str, Count] = 1,
    rate_limit: Sequence[Available] | None = None,
    taken: Taken = NOTHING_GIVEN,
    items: ItemCounts = NOTHING_GIVEN,
) -> Simulation:
    """Send requests to a deployment of `source` (a graph, or a repository's folder) in simulated time.

    `name` may be left out for a graph, and where there is only one deployment that nothing else contains. An arrival
    that is a number is a request of one row at that millisecond; `Clients` are a closed loop. `takes_ms`: the duration
    of a batch, for all models or by name (default 1); for a decoupled model the duration of each response. `answers`:
    the number of responses of a decoupled model per step, likewise; its instance is busy until the last. `rate_limit`
    as `flowserve run --rate-limit`: the resources, None for off. `taken`: the share of rows that pass a condition, by
    its text (`{"kind = 0": 0.3}`), default 1; `items`: the items of each row, by the tensors that are taken apart
    (`{"crops": 5}`), default 1; both may be functions of the request's number. All tensors of one input or output have
    one shape, and callers read each response immediately. The response cache is off. Blocks while configurations are
    read.

    Raises Problems and NotFound for a graph that cannot be served, Invalid for a number out of range or for an unknown
    model, Unsupported for models of iterative sequences.
    """
    path, own_name, kept = folder_of(source)
    reading = read_repositories([path])
    graph = _graph(reading, name or own_name)
    models = {node.model.name for node in graph.nodes}
    took, count = _by_model("takes_ms", takes_ms, models, 1.0), _by_model("answers", answers, models, 1)
    _refuse_answers(answers, {node.model.name for node in graph.nodes if node.decoupled})
    clients: Clients | None = None
    if isinstance(arrivals, Clients):
        clients = arrivals
        for what, least in (("count", 1), ("requests", 1), ("rows", 1)):
            _whole(getattr(clients, what), least, f"{what} of the clients")
        arrivals = [Arrival(0, rows=clients.rows)] * clients.requests
    requests = [one if isinstance(one, Arrival) else Arrival(one) for one in arrivals]
    for number, one in enumerate(requests):
        _ns(one.at_ms, f"at_ms of arrival {number}")
        _ns(one.timeout_ms, f"timeout_ms of arrival {number}")
        _whole(one.rows, 1, f"rows of arrival {number}")
    world = SimulatedDeployment(
        graph,
        reading.configs,
        lambda model, rows: _ns(took(model, rows), f"takes_ms of '{model}'"),
        lambda model, number: _whole(count(model, number), 0, f"answers of '{model}'"),
        rate_limit,
        RowPlan(graph, taken, items),
    )
    del kept  # the configurations have been read
    return world.live(requests, len(requests) if clients is None else clients.count)


def _refuse_answers(answers: Count | Mapping[str, Count], decoupled: Collection[str]) -> None:
    """Raise Invalid for a count that has no effect, which is a mistake in a test."""
    named = [name for name in answers if name not in decoupled] if isinstance(answers, Mapping) else []
    if named:
        raise Invalid(f"answers names '{named[0]}', which is not decoupled: it answers each step once")
    if not isinstance(answers, Mapping) and answers != 1 and not decoupled:
        raise Invalid("answers is given, and no model of the graph is decoupled: each answers a step once")


def _ns(milliseconds: Any, what: str) -> int:
    try:
        nanoseconds: int = round(milliseconds * MS_NS)
    except (TypeError, ValueError, OverflowError):  # not a finite number
        nanoseconds = -1
    if nanoseconds < 0:
        raise Invalid(f"{what} is a number of milliseconds from 0 on, not {milliseconds!r}")
    return nanoseconds


def _whole(number: Any, least: int, what: str) -> int:
    if not isinstance(number, int | np.integer) or number < least:
        raise Invalid(f"{what} is a whole number from {least} on, not {number!r}")
    return int(number)


def _by_model(what: str, given: Any, models: Collection[str], default: Any) -> Callable[[str, int], Any]:
    """The value for a model, and for a number of rows or the number of a request."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in models:
            hint = did_you_mean(name, models) or f"its models are {', '.join(sorted(models))}"
            raise Invalid(f"{what} names '{name}', which the graph does not have ({hint})")

    def value(model: str, number: int) -> Any:
        one = given.get(model, default) if isinstance(given, Mapping) else given
        return one(number) if callable(one) else one

    return value


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
