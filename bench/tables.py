"""Measured figures as cells of Markdown tables, in a results file and between two comments of a page.

A page that contains measured tables marks their place with `<!-- NAME: begin -->` and `<!-- NAME: end -->`, so that a
command replaces them as a whole and no figure is copied by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.servers import BenchFailed


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


def cell(spread: Spread | None) -> str:
    """The median with the lowest and the highest in brackets, unless all are equal; empty for None."""
    if spread is None:
        return ""
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)} to {number(spread.high)})"


def number(value: float) -> str:
    """Three digits, or all of a whole part; at most two after the point."""
    size = abs(value)
    if size < 0.005:
        return "0"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_part(page: Path, name: str, text: str) -> None:
    """Put `text` between the two comments of that name. Raises BenchFailed where the page has not exactly one pair."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended or begin in after:
        raise BenchFailed(f"{page} has no single pair of the comments {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
