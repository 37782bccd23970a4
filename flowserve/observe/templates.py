"""Families of very many deployments as text, without keeping anybody waiting.

Decided here: what a line says besides its number is written once for a deployment and kept as a template, because
labels cost fifty times what numbers do; and a reading goes on in pieces, between which the loop may do other things.
Which families there are is decided in deployment_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowserve.observe.exposition import Labels, head, shown
from flowserve.observe.statistics import Statistics

SLICE: Final = 2  # deployments between two pieces: some 0.15 ms where each is a model, once it has its template
JOINED: Final = 64  # of them whose lines of one family are one piece

_END: Final = "\0"  # between families, where nothing else has it
# What stands behind the family's name in a line, and the line's labels.
Line = tuple[str, Labels]


@dataclass(frozen=True, slots=True)
class Family:
    """What one deployment adds to it: `values` has a number, or one as text, for each of `lines`. Those stay the same
    for as long as the deployment's nodes do, and as none of them that had no limited steps under way has some.
    """

    name: str
    kind: str
    text: str
    lines: Callable[[Statistics], Iterable[Line]]
    values: Callable[[Statistics, int], Iterable[int | str]]


class Templates:
    """Of one page."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._heads = [head(one.name, one.text, one.kind).encode() for one in families]
        self._known: dict[tuple[str, int], tuple[Any, str]] = {}

    def pieces(self, counters: Iterable[tuple[Statistics, int]]) -> Iterator[bytes]:
        """The text of deployments and how many requests wait for each. Most pieces are empty, since a family's lines
        stand together: the text comes at the end.
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
        self._known = known  # without those that are gone
        for above, column in zip(self._heads, columns, strict=True):
            yield above
            for start in range(0, len(column), JOINED):
                yield "".join(column[start : start + JOINED]).encode(errors="replace")

    def _template(self, one: Statistics) -> tuple[Any, str]:
        """With what it is true of."""
        nodes = one.nodes, tuple(bool(node.most_inflight) for node in one.nodes)
        known = self._known.get((one.name, one.version))
        if known is not None and known[0] == nodes:
            return known
        families = (
            "".join(_line(family.name + suffix, labels) for suffix, labels in family.lines(one))
            for family in self._families
        )
        return nodes, _END.join(families)


def _line(name: str, labels: Labels) -> str:
    return f"{name}{shown(sorted(labels))}".replace("%", "%%").replace(_END, "") + " %s\n"
