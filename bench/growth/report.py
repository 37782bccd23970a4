"""The growth tables as Markdown, and the plot.

A cell is the median of the rounds, with the lowest and the highest in brackets. The text is what docs/performance.md
contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.growth.growth import Growth
from bench.growth.readings import Line
from bench.tables import cell, markdown_table

_ALL_SIZES = "all sizes"
# Sizes that differ by more than this factor have a logarithmic axis.
_WIDE = 50


def tables(growths: Sequence[Growth]) -> str:
    """One table for each part, with a heading of level 3."""
    return "\n\n".join(f"### {growth.part.title}\n\n{_table(growth)}" for growth in growths)


def _table(growth: Growth) -> str:
    """A row for each figure of each load, a column for each size; slopes have one for all sizes as well."""
    sizes = sorted({line.size for line in growth.lines if line.size is not None})
    rows: list[list[str]] = []
    for load in dict.fromkeys(line.load for line in growth.lines):
        mine = {line.size: line for line in growth.lines if line.load == load}
        columns = [mine.get(size) for size in (*sizes, None)]
        both = [{**line.figures, **line.slopes} if line else {} for line in columns]
        # Dictionaries keep their order: figures first, then slopes.
        headings = dict.fromkeys(heading for line in mine.values() for heading in line.figures)
        headings |= dict.fromkeys(heading for line in mine.values() for heading in line.slopes)
        rows += [[load, heading, *(cell(found.get(heading)) for found in both)] for heading in headings]
    return markdown_table(["load", growth.part.unit, *(f"{size:,}" for size in sizes), _ALL_SIZES], rows)


def write_plot(growths: Sequence[Growth], path: Path) -> None:
    """A row of panels for each part, a line for each load; bars show the lowest and the highest round."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text, and not as curves
    from matplotlib import pyplot

    columns = max(len(growth.part.plotted) for growth in growths)
    size = (4.6 * columns, 3.2 * len(growths))
    figure, axes = pyplot.subplots(len(growths), columns, figsize=size, squeeze=False, layout="constrained")
    for row, growth in zip(axes, growths, strict=True):
        for axis, heading in zip(row, growth.part.plotted, strict=False):
            _plot(axis, growth, heading)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _plot(axis: Any, growth: Growth, heading: str) -> None:
    lines = [line for line in growth.lines if line.size is not None and heading in line.figures]
    for load in dict.fromkeys(line.load for line in lines):
        mine = [line for line in lines if line.load == load]
        spreads = [line.figures[heading] for line in mine]
        below = [spread.median - spread.low for spread in spreads]
        above = [spread.high - spread.median for spread in spreads]
        medians = [spread.median for spread in spreads]
        axis.errorbar(_sizes(mine), medians, (below, above), marker="o", markersize=3, capsize=2, label=load)
    sizes = _sizes(lines)
    if max(sizes) > _WIDE * min(sizes):
        axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_title(heading)
    axis.set_xlabel(growth.part.unit)
    axis.legend(frameon=False, fontsize="small")


def _sizes(lines: Sequence[Line]) -> list[int]:
    return [line.size for line in lines if line.size is not None]
