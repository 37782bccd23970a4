"""The figures of several servers behind one port as those of one.

Decides how two values of a figure are combined: counters, histograms and most gauges are added. Of figures of the
machine and of the past the largest is taken, of a load ratio the mean, of reachability the smallest, and of a quantile,
which cannot be computed from quantiles, the largest. Figures of a server that ended are added too, except gauges, so
that no counter decreases. Knows the text format and the shape of JSON, not the servers. Pure. Caller: `replicas/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from flowserve.observe.exposition import COUNTER, GAUGE, SUMMARY, number

# Kinds of reports: Prometheus' text; the rows of the statistics extension; those of the graphs; what the live page
# counts.
METRICS: Final = "metrics"
STATISTICS: Final = "statistics"
GRAPHS: Final = "graphs"
FIGURES: Final = "figures"

_QUANTILE: Final = 'quantile="'


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# By the name of a family, or its beginning; others are added.
_OTHERWISE: Final[tuple[tuple[str, Callable[[Sequence[float]], float]], ...]] = (
    ("flowserve_load_ratio", _mean),
    ("flowserve_repository_reachable", min),
    ("flowserve_node_inflight_most", max),
    ("nv_model_load_duration_secs", max),
    ("nv_cpu_", max),
    ("nv_gpu_", max),
    ("nv_energy_", max),
)
# Keys of JSON whose values are the largest; a list of a time and a text is compared by its time.
_LARGEST: Final = frozenset({"last_inference", "last_error"})
# Keys of JSON that are the present state of one server, and not counted.
PRESENT: Final = "present"
# The key of JSON with the counters of a remote model's server: every server behind the port reports the same.
THERE: Final = "there"
_BY_KEY: Final = ("batch_size",)  # lists of objects that are matched by this key


class Former:
    """The last figures of servers that have ended, of one kind."""

    def __init__(self) -> None:
        self.total: Any = None

    def copy(self) -> Former:
        other = Former()
        other.total = self.total
        return other

    def add(self, kind: str, report: Any) -> None:
        """`report` as in `combined`."""
        if kind == METRICS:
            self.total = combined_metrics([report] if self.total is None else [self.total, report])
        else:
            self.total = _counted(report) if self.total is None else _sum(self.total, _counted(report))


def combined(kind: str, reports: Sequence[Any], former: Former | None) -> Any:
    """The figures of one kind: bytes of Prometheus' text, or values of JSON. Empty without
    `reports`.
    """
    gone = None if former is None else former.total
    if not reports:  # the last server ends
        return b"" if kind == METRICS else {}
    if kind == METRICS:
        return combined_metrics(reports, gone)
    total = reports[0]
    for report in reports[1:]:
        total = _sum(total, report)
    return total if gone is None else _sum(total, gone, is_former=True)


# ---------------------------------------------------------------------------------------------- Prometheus' text


def combined_metrics(texts: Sequence[bytes], former: bytes | None = None) -> bytes:
    """One exposition. `former`: of servers that ended; only its counters, histograms and sums count, of metrics that a
    server still has.
    """
    heads: dict[str, list[str]] = {}  # the two lines above a family
    kinds: dict[str, str] = {}
    lines: dict[str, dict[str, list[float]]] = {}  # by family: its lines without their values
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                _, what, family, rest = line.split(" ", 3)
                if what == "TYPE":
                    kinds[family] = rest
                above = heads.setdefault(family, [])
                if len(above) < 2:
                    above.append(line)
                lines.setdefault(family, {})
                continue
            name, _, value = line.rpartition(" ")
            if name:
                lines[family].setdefault(name, []).append(float(value))
    if former is not None:
        _add_former(former.decode(), kinds, lines)
    made: list[str] = []
    for family, found in lines.items():
        made += heads[family]
        combine = next((how for begin, how in _OTHERWISE if family.startswith(begin)), sum)
        for name, values in found.items():
            if kinds.get(family) == SUMMARY and _QUANTILE in name:
                known = [value for value in values if value == value]  # not NaN
                made.append(f"{name} {number(max(known, default=float('nan')))}")
            else:
                made.append(f"{name} {number(combine(values))}")
    return ("\n".join(made) + "\n").encode() if made else b""


def _add_former(text: str, kinds: dict[str, str], lines: dict[str, dict[str, list[float]]]) -> None:
    family = ""
    for line in text.splitlines():
        if line.startswith("#"):
            family = line.split(" ", 3)[2]
            continue
        name, _, value = line.rpartition(" ")
        is_counted = kinds.get(family) not in (None, GAUGE) and not (kinds[family] == SUMMARY and _QUANTILE in name)
        if is_counted and name in lines[family] and not (kinds[family] == COUNTER and family.startswith("nv_energy_")):
            lines[family][name].append(float(value))


# ---------------------------------------------------------------------------------------------- JSON


def _sum(one: Any, other: Any, key: str = "", *, is_former: bool = False) -> Any:
    """`is_former`: the second is of servers that ended, and counts only under keys of the first."""
    if key == THERE:
        return one
    if key in _LARGEST:
        return max(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        names = one if is_former else {**one, **other}
        return {
            name: _sum(one[name], other[name], name, is_former=is_former)
            if name in one and name in other
            else one.get(name, other.get(name))
            for name in names
        }
    if isinstance(one, list) and isinstance(other, list):
        return _sum_of_lists(one, other, is_former=is_former)
    if isinstance(one, int | float) and not isinstance(one, bool) and isinstance(other, int | float):
        return one + other
    return one


def _sum_of_lists(one: list[Any], other: list[Any], *, is_former: bool) -> list[Any]:
    for key in _BY_KEY:
        if all(isinstance(item, dict) and key in item for item in (*one, *other)) and (one or other):
            mine, theirs = ({item[key]: item for item in items} for items in (one, other))
            whole = {**theirs, **mine}
            return [
                {**_sum(mine[value], theirs[value], is_former=is_former), key: value}
                if value in mine and value in theirs
                else whole[value]
                for value in sorted(whole)
            ]
    if len(one) != len(other):  # a deployment was replaced in one of the servers just now
        return one
    return [_sum(*pair, is_former=is_former) for pair in zip(one, other, strict=True)]


def _counted(report: Any) -> Any:
    """A report without the present state."""
    if isinstance(report, dict):
        return {name: _counted(value) for name, value in report.items() if name != PRESENT}
    return report
