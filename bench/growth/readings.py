"""Figures of one size in one round, and their summary over several rounds: medians, spread, slopes.

A slope is the growth of a figure for each additional step, deployment, connection or sequence. It is computed from the
readings of one round and its median is taken afterwards, because the speed of a machine changes from round to round.
Knows neither servers nor formats.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.tables import Spread


@dataclass(frozen=True, slots=True)
class Reading:
    """The `figures` of one `size` under one `load`, by heading; the heading contains the unit."""

    load: str
    size: int
    figures: dict[str, float]
    round: int = 0


@dataclass(frozen=True, slots=True)
class Slope:
    """The growth of `figure` per additional unit of size, times `scale`, under its own `heading`."""

    figure: str
    heading: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """One size under one load, or all sizes of that load (`size` is None): figures and slopes by heading.

    The slope of a size is that from the next smaller size; of all sizes it is the least-squares line.
    """

    load: str
    size: int | None
    figures: dict[str, Spread] = field(default_factory=dict)
    slopes: dict[str, Spread] = field(default_factory=dict)


def summarise(readings: Sequence[Reading], slopes: Sequence[Slope]) -> list[Line]:
    """For each load a line per size, smallest first, and where there are several sizes one for all of them."""
    lines = []
    for load in dict.fromkeys(reading.load for reading in readings):
        mine = [reading for reading in readings if reading.load == load]
        sizes = sorted({reading.size for reading in mine})
        for i, size in enumerate(sizes):
            found: dict[str, list[float]] = {}
            for reading in mine:
                for heading, figure in reading.figures.items() if reading.size == size else ():
                    found.setdefault(heading, []).append(figure)
            figures = {heading: Spread.of(values) for heading, values in found.items()}
            lines.append(Line(load, size, figures, _slopes(mine, slopes, sizes[i - 1 : i + 1]) if i else {}))
        if len(sizes) > 1:
            lines.append(Line(load, None, slopes=_slopes(mine, slopes, sizes)))
    return lines


def _slopes(readings: Sequence[Reading], slopes: Sequence[Slope], sizes: Sequence[int]) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for slope in slopes:
        rounds: dict[int, list[tuple[int, float]]] = {}
        for reading in readings:
            if reading.size in sizes and slope.figure in reading.figures:
                rounds.setdefault(reading.round, []).append((reading.size, reading.figures[slope.figure]))
        values = [
            statistics.linear_regression(*zip(*points, strict=True)).slope * slope.scale
            for points in rounds.values()
            if len(points) > 1
        ]
        if values:
            found[slope.heading] = Spread.of(values)
    return found
