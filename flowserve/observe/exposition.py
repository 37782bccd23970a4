"""Prometheus' text format: what stands above the lines of a family, and how labels and numbers read.

Decided here: nothing that Prometheus does not. Which families there are, and what they say, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, isnan
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
SUMMARY: Final = "summary"

Labels = Iterable[tuple[str, str]]


def head(name: str, description: str, kind: str) -> str:
    """The two lines above those of a family."""
    return f"# HELP {name} {escaped(description)}\n# TYPE {name} {kind}\n"


def family(name: str, description: str, kind: str, samples: Iterable[tuple[Labels, float]]) -> str:
    """A whole family of one line for each combination of labels."""
    lines = (f"{name}{shown(labels)} {number(value)}\n" for labels, value in samples)
    return head(name, description, kind) + "".join(lines)


def shown(labels: Labels) -> str:
    inside = ",".join(f'{name}="{escaped(value, quotes=True)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def number(value: float) -> str:
    """As Prometheus and its readers write one: whole numbers without a point."""
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)).removesuffix(".0")
