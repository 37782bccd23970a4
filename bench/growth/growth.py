"""The parts of a growth measurement and the order of its rounds.

Called by the command line. Every round measures all parts, every second round with the sizes in reverse order, so that
a change in the machine's speed does not look like growth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.growth import connections, deployments, loads, sequences, steps
from bench.growth.loads import Load
from bench.growth.readings import Line, Reading, Slope, summarise
from bench.runs import Say


@dataclass(frozen=True, slots=True)
class Part:
    """What grows. `unit` names the sizes, `plotted` the headings of the figures in the plot."""

    name: str
    title: str
    unit: str
    sizes: tuple[int, ...]
    measure: Callable[[Sequence[int], Load], list[Reading]]
    slopes: tuple[Slope, ...]
    plotted: tuple[str, ...]


PARTS: Final[Mapping[str, Part]] = {
    part.name: part
    for part in (
        Part(
            "steps",
            "Steps of a graph",
            "steps",
            (1, 2, 5, 10, 20, 30),
            steps.measure_steps,
            steps.SLOPES,
            (loads.CPU_US, loads.P99_MS),
        ),
        Part(
            "deployments",
            "Deployments of a server",
            "deployments",
            (1, 100, 1000),
            deployments.measure_deployments,
            deployments.SLOPES,
            (deployments.START_S, deployments.METRICS_MS),
        ),
        Part(
            "connections",
            "Connections of a server",
            "connections",
            (10, 100, 1000, 5000),
            connections.measure_connections,
            connections.SLOPES,
            (loads.REQUESTS_PER_SECOND, loads.P99_MS),
        ),
        Part(
            "sequences",
            "Live sequences of a model",
            "sequences",
            (1, 10, 100, 1000, 10_000),
            sequences.measure_sequences,
            sequences.SLOPES,
            (loads.CPU_US, loads.MEMORY_MIB),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Growth:
    """A part as it was measured."""

    part: Part
    lines: tuple[Line, ...]


def measure_growth(parts: Sequence[Part], load: Load, rounds: int, say: Say) -> list[Growth]:
    """Medians of all rounds. Raises BenchFailed."""
    readings: dict[str, list[Reading]] = {part.name: [] for part in parts}
    for number in range(rounds):
        for part in parts:
            sizes = sorted(set(part.sizes), reverse=bool(number % 2))
            say(f"{part.title.lower()}: round {number + 1} of {rounds}, {', '.join(map(str, sizes))}")
            readings[part.name] += [replace(one, round=number) for one in part.measure(sizes, load)]
    return [Growth(part, tuple(summarise(readings[part.name], part.slopes))) for part in parts]
