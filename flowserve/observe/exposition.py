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

from flowserve.observe.statistics import Statistics

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


PIECE_LINES: Final = 128  # per piece: some 0.1 ms, three times that for a deployment whose lines are new
READ: Final = 16  # deployments whose records are added up between two pieces

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
    values: Callable[[Statistics, int], Iterable[int | str]]


class _Lines:
    """The lines of a deployment with these `nodes`, without their values: the text and the number of lines per family,
    -1 before its first use.
    """

    __slots__ = ("counts", "nodes", "texts")

    def __init__(self, nodes: Any, families: int) -> None:
        self.nodes = nodes
        self.texts = [""] * families
        self.counts = [-1] * families


class MetricsPage:
    """The templates of one page."""

    def __init__(self, families: Sequence[FamilyTemplate]) -> None:
        self._families = families
        self._known: dict[tuple[str, int], _Lines] = {}

    def pieces(self, counters: Iterable[tuple[Statistics, int]]) -> Iterator[bytes]:
        """The text for deployments, each with its number of waiting requests, in pieces that take about equally long.

        The lines of a family are adjacent, as the format requires, so the pieces go from family to family, and only one
        of them is in memory. So the counters of different families are read at different times, those of one family of
        a deployment together. The first pieces are empty.
        """
        ordered = sorted(counters, key=lambda pair: (pair[0].name, pair[0].version))
        for number, (one, _) in enumerate(ordered, 1):
            one.add_up()
            if number % READ == 0:
                yield b""
        served = {(one.name, one.version) for one, _ in ordered}
        self._known = {key: lines for key, lines in self._known.items() if key in served}
        for index, family in enumerate(self._families):
            texts = [head(family.name, family.text, family.kind).replace("%", "%%")]
            values: list[int | str] = []
            for one, pending in ordered:
                key = one.name, one.version
                lines = self._known.get(key)
                if lines is None or lines.nodes is not one.nodes:
                    lines = self._known[key] = _Lines(one.nodes, len(self._families))
                found = [*family.values(one, pending)]
                # Lines are never removed while the nodes are the same: an equal number is the same lines.
                if lines.counts[index] != len(found):
                    lines.counts[index] = len(found)
                    lines.texts[index] = "".join(_line(family.name + suffix, of) for suffix, of in family.lines(one))
                texts.append(lines.texts[index])
                values += found
                if len(values) >= PIECE_LINES or len(texts) >= PIECE_LINES:
                    yield ("".join(texts) % tuple(values)).encode(errors="replace")
                    texts, values = [], []
            yield ("".join(texts) % tuple(values)).encode(errors="replace")


def _line(name: str, labels: LabelPairs) -> str:
    return f"{name}{label_text(sorted(labels))}".replace("%", "%%") + " %s\n"
