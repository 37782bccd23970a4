"""Prometheus' text format: headers, labels and numbers, and templates for many deployments.

Decides: the constant text of a deployment's lines is formatted once and kept as a template, because labels cost fifty
times as much as numbers; and the text is produced in pieces, between which the event loop can run other work. Does not
know the families (`machine`, `deployment_metrics`, `model_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any, Final

from flowserve.observe.statistics import Queued, Statistics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
SUMMARY: Final = "summary"

LabelPairs = Iterable[tuple[str, str]]


def head(name: str, description: str, kind: str) -> str:
    """The two header lines of a family."""
    return f"# HELP {name} {escaped(description)}\n# TYPE {name} {kind}\n"


def family(name: str, description: str, kind: str, samples: Iterable[tuple[LabelPairs, float]]) -> str:
    """A complete family, one line per combination of labels."""
    lines = (f"{name}{label_text(labels)} {number(value)}\n" for labels, value in samples)
    return head(name, description, kind) + "".join(lines)


def label_text(labels: LabelPairs) -> str:
    inside = ",".join(f'{name}="{escaped(value, quotes=True)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def number(value: float) -> str:
    """A number in Prometheus' format: whole numbers without a decimal point."""
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)).removesuffix(".0")


SLICE: Final = 2  # deployments per piece: about 0.15 ms for two models with templates
JOINED: Final = 64  # deployments whose lines of one family are in one piece

_END: Final = "\0"  # separator of families, which cannot occur in their text
# The suffix of the family's name in a line, and the line's labels.
MetricLine = tuple[str, LabelPairs]


@dataclass(frozen=True, slots=True)
class FamilyTemplate:
    """One family. For a deployment, `values` returns a number, or its text, for each of `lines`. The lines are constant
    as long as the deployment's nodes, and the set of nodes with limited steps, are unchanged.
    """

    name: str
    kind: str
    text: str
    lines: Callable[[Statistics], Iterable[MetricLine]]
    values: Callable[[Statistics, Queued], Iterable[int | str]]


class MetricsPage:
    """The templates of one page."""

    def __init__(self, families: Sequence[FamilyTemplate]) -> None:
        self._families = families
        self._heads = [head(one.name, one.text, one.kind).encode() for one in families]
        self._known: dict[tuple[str, int], tuple[Any, str]] = {}

    def pieces(self, counters: Iterable[tuple[Statistics, Queued]]) -> Iterator[bytes]:
        """The text for deployments, each with its number of waiting requests. Most pieces are empty, because the lines
        of a family are adjacent: the text comes at the end.
        """
        ordered = sorted(counters, key=lambda pair: (pair[0].name, pair[0].version))
        columns: list[list[str]] = [[] for _ in self._heads]
        known: dict[tuple[str, int], tuple[Any, str]] = {}
        for number, (one, pending) in enumerate(ordered):
            template = known[one.name, one.version] = self._template(one)
            values = tuple(value for family in self._families for value in family.values(one, pending))
            for column, text in zip(columns, (template[1] % values).split(_END), strict=True):
                column.append(text)
            if number % SLICE == SLICE - 1:
                yield b""
        self._known = known  # without removed deployments
        for above, column in zip(self._heads, columns, strict=True):
            yield above
            for start in range(0, len(column), JOINED):
                yield "".join(column[start : start + JOINED]).encode(errors="replace")

    def _template(self, one: Statistics) -> tuple[Any, str]:
        """The template, with the state for which it is valid."""
        nodes = one.nodes, tuple(bool(node.most_inflight) for node in one.nodes)
        known = self._known.get((one.name, one.version))
        if known is not None and known[0] == nodes:
            return known
        families = (
            "".join(_line(family.name + suffix, labels) for suffix, labels in family.lines(one))
            for family in self._families
        )
        return nodes, _END.join(families)


def _line(name: str, labels: LabelPairs) -> str:
    return f"{name}{label_text(sorted(labels))}".replace("%", "%%").replace(_END, "") + " %s\n"
