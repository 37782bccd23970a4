"""The results as tables, as JSON and as a plot. docs/performance.md describes the columns and the fields."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.echo import UVICORN
from bench.ratios import Ratio, compare, echo_ratio, together
from bench.runs import Best, Limit, Plan, Row, Run, Variant, best_limits, summarise
from bench.servers import FLOWSERVE, TRITON

SCHEMA: Final = 2
_PIPE_WIDTH: Final = 220
_STYLE: Final = {"want": "green", "must": "yellow", "below": "red"}
_COLOURS: Final = {
    (FLOWSERVE, "inline"): "#2a6fdb",
    (FLOWSERVE, "process"): "#16469c",
    (FLOWSERVE, ""): "#2a6fdb",
    (TRITON, ""): "#8a8f98",
    (UVICORN, ""): "#c98a1b",
}


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that one call of `python -m bench` measured. `limits`: direct calls at their best, by work.
    `together`: whether batches stayed together. `load_before`: the load average of the minute before the measurement.
    `configuration`: one line for each server."""

    plan: Plan
    load_before: float
    configuration: Sequence[str]
    runs: Sequence[Run]
    limit_runs: Sequence[Limit]
    rows: Sequence[Row]
    limits: Mapping[str, Best]
    ratios: Sequence[Ratio]
    together: Sequence[Ratio]

    @classmethod
    def of(
        cls,
        plan: Plan,
        load_before: float,
        configuration: Sequence[str],
        runs: Sequence[Run],
        limit_runs: Sequence[Limit],
    ) -> Results:
        rows, limits = summarise(runs), best_limits(limit_runs)
        ratios = compare(rows, limits) + echo_ratio(rows)
        return cls(plan, load_before, configuration, runs, limit_runs, rows, limits, ratios, together(rows))


def open_console() -> Console:
    """Standard output. A pipe has no width; rich's default of 80 columns would cut the tables there."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def print_tables(results: Results, *, only_figures: bool = False) -> None:
    """The configuration and the figures of each load, and unless `only_figures` the comparisons."""
    console = open_console()
    for line in results.configuration:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_figures(results))
    if only_figures:
        return
    if results.limits:
        console.print(_limits(results.limits))
    if any(row.edges for row in results.rows):
        console.print(_edges(results.rows))
    if results.ratios:
        console.print(_ratios(results, results.ratios, "flowserve's ratios: figure (must / want)"))
    if results.together:
        console.print(_ratios(results, results.together, "do batches stay together? figure (must / want)"))


def _figures(results: Results) -> Table:
    plan = results.plan
    table = Table(title=f"medians of {plan.rounds} rounds of {plan.seconds:g} s", title_justify="left")
    table.add_column("work")
    table.add_column("c", justify="right")
    table.add_column("server")
    table.add_column("load")
    for heading in ("requests/s", "CPU us/request", "p50 ms", "p99 ms", "client CPU us", "client busy"):
        table.add_column(heading, justify="right")
    table.add_column("mean batch of each node")
    previous = ""
    for row in results.rows:
        if previous and row.work != previous:
            table.add_section()
        table.add_row(
            row.work if row.work != previous else "",
            str(row.concurrency),
            row.server,
            str(row.variant),
            f"{row.requests_per_second:,.0f}",
            f"{row.server_cpu_us:,.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.load_cpu_us:,.0f}",
            f"{row.load_busy:.0%}",
            "  ".join(f"{model.removeprefix(row.work + '_')} {mean:.1f}" for model, mean in row.mean_batch.items()),
        )
        previous = row.work
    return table


def _edges(rows: Sequence[Row]) -> Table:
    """One line for each edge, at the highest concurrency."""
    most = max(row.concurrency for row in rows if not row.variant.arrivals)
    table = Table(title=f"bytes of each edge, per request, at concurrency {most}", title_justify="left")
    for heading in ("work", "server", "load", "edge"):
        table.add_column(heading)
    for heading in ("handed on", "copied", "of these out of one batch", "placed"):
        table.add_column(heading, justify="right")
    for row in rows:
        for name, edge in row.edges.items() if row.concurrency == most and not row.variant.arrivals else ():
            figures = (edge.handed_on, edge.copied, edge.regathered, edge.placed)
            label = name.replace(f"{row.work}_", "")
            table.add_row(row.work, row.server, str(row.variant), label, *(f"{figure:,.0f}" for figure in figures))
    return table


def _limits(limits: Mapping[str, Best]) -> Table:
    table = Table(title="the same work by direct calls, no server", title_justify="left")
    table.add_column("work")
    table.add_column("rows/s", justify="right")
    table.add_column("at batch", justify="right")
    table.add_column("CPU us", justify="right")
    for work, best in limits.items():
        table.add_row(work, f"{best.rows_per_second:,.0f}", str(best.batch), f"{best.cpu_us:,.0f}")
    return table


def _ratios(results: Results, ratios: Sequence[Ratio], title: str) -> Table:
    """One line for each work, load and concurrency, one column for each comparison."""
    table = Table(title=title, title_justify="left")
    table.add_column("work")
    table.add_column("load")
    for heading in ("c", "requests/s", "CPU us/request"):
        table.add_column(heading, justify="right")
    columns = list(dict.fromkeys(ratio.what for ratio in ratios))
    for what in columns:
        table.add_column(what, justify="right")
    cells: dict[tuple[str, Variant, int], dict[str, str]] = {}
    for ratio in ratios:
        cells.setdefault((ratio.work, ratio.variant, ratio.concurrency), {})[ratio.what] = _cell(ratio)
    ours = {(row.work, row.variant, row.concurrency): row for row in results.rows if row.server == FLOWSERVE}
    for (work, variant, concurrency), found in cells.items():
        row = ours[work, variant, concurrency]
        figures = (f"{row.requests_per_second:,.0f}", f"{row.server_cpu_us:,.0f}")
        texts = (found.get(what, "") for what in columns)
        table.add_row(work, str(variant), str(concurrency), *figures, *texts)
    return table


def _cell(ratio: Ratio) -> str:
    figure = f"{ratio.figure:.2f}" if abs(ratio.figure) >= 0.01 or not ratio.figure else f"{ratio.figure:.0e}"
    if ratio.verdict is None:
        return figure
    return f"[{_STYLE[ratio.verdict]}]{figure} ({ratio.must:g} / {ratio.want:g}) {ratio.verdict}[/]"


def as_json(results: Results) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "machine": {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "load_before": results.load_before,
        },
        "configuration": list(results.configuration),
        "options": asdict(results.plan),
        "runs": [asdict(run) for run in results.runs],
        "limit_runs": [asdict(run) for run in results.limit_runs],
        "summary": [asdict(row) for row in results.rows],
        "limits": {work: asdict(best) for work, best in results.limits.items()},
        "ratios": [asdict(ratio) for ratio in [*results.ratios, *results.together]],
    }


def write_json(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(results), indent=1) + "\n")


def write_plot(results: Results, path: Path) -> None:
    """Requests per second of each closed loop, one bar for each server and concurrency; the direct calls are a line."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    panels: dict[tuple[str, Variant], list[Row]] = {}
    for row in results.rows:
        if not row.variant.arrivals:
            panels.setdefault((row.work, row.variant.of_peer()), []).append(row)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (4.2 * columns, 3.2 * lines + 0.6)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, ((work, variant), rows) in zip(axes.flat, panels.items(), strict=False):
        _plot_work(axis, rows, results.limits.get(work) if variant.plain else None)
        axis.set_title(f"{work} {variant}")
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supylabel("requests per second")
    figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _plot_work(axis: Any, rows: Sequence[Row], limit: Best | None) -> None:
    servers = list(dict.fromkeys((row.server, row.variant.execution) for row in rows))
    concurrencies = list(dict.fromkeys(row.concurrency for row in rows))
    width = 0.8 / len(servers)
    for i, (server, execution) in enumerate(servers):
        mine = [row for row in rows if (row.server, row.variant.execution) == (server, execution)]
        places = [concurrencies.index(row.concurrency) + (i - (len(servers) - 1) / 2) * width for row in mine]
        colour = _COLOURS.get((server, execution))
        axis.bar(places, [row.requests_per_second for row in mine], width, label=f"{server} {execution}", color=colour)
    top = max(row.requests_per_second for row in rows)
    # A line far above all servers would flatten the bars.
    if limit and limit.rows_per_second < 3 * top:
        axis.axhline(limit.rows_per_second, color="#444444", linestyle="--", linewidth=1, label="direct calls")
    axis.set_xticks(range(len(concurrencies)), [str(concurrency) for concurrency in concurrencies])
    axis.set_xlabel("concurrency")
