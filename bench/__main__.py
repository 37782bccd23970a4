"""`python -m bench`: measure flowserve, beside Triton where the environment variable TRITONSERVER names one.

Decides which measurement an option asks for, and what is printed and saved of it. options.py has the command line,
works.py the workloads, and measure.py the order of the runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import trio
from rich.table import Table

from bench import acceptance, open_loop, servers
from bench.calls import measure_calls
from bench.cluster import measure_cluster
from bench.devices import measure_device
from bench.growth.growth import PARTS, Growth, measure_growth
from bench.growth.loads import Load
from bench.growth.report import tables
from bench.growth.report import write_plot as write_growth_plot
from bench.in_process import measure_in_process
from bench.libraries import measure_libraries
from bench.measure import measure_echo, measure_work
from bench.options import parser, plan_of
from bench.packages import measure_packages
from bench.reliability.figures import Figure, measure_figures, run_chaos
from bench.reliability.soak import soak
from bench.report import Results, open_console, print_tables, write_json, write_plot
from bench.rows import ROW_WORKS, measure_rows
from bench.runs import WARMUP_S, Limit, Plan, Run
from bench.sequences import measure_sequences
from bench.servers import BenchFailed
from bench.start import measure_start
from bench.tables import replace_part
from bench.works import WORKS

# A load average above which other programs clearly use the machine.
BUSY: Final = 0.7
PACKAGES_CONCURRENCY: Final = (1, 32)
PACKAGES_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the command. `load_before`: the load average of the minute before it."""

    options: argparse.Namespace
    plan: Plan
    load_before: float

    def results(self, runs: Sequence[Run], limits: Sequence[Limit] = ()) -> Results:
        """The results of these runs, with the configuration of the servers that were measured."""
        measured = {run.server for run in runs}
        lines = [line for line in servers.configuration(self.plan.against) if line.split(":")[0] in measured]
        return Results.of(self.plan, self.load_before, lines, runs, limits)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _terminated(number: int, frame: object) -> NoReturn:
    # Unwinds the stack, so that the started servers are stopped.
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    plan = plan_of(options, _say)
    load_before = os.getloadavg()[0]
    if load_before > BUSY:
        _say(f"other programs use this machine (load average {load_before:.1f}): trust the ratios, not the figures")
    measure = next(measure for is_asked_for, measure in MEASUREMENTS if is_asked_for(options))
    try:
        failure = measure(Call(options, plan, load_before))
    except BenchFailed as error:
        failure = f"bench: {error}"
    except KeyboardInterrupt:
        sys.exit(130)
    if failure:
        sys.exit(failure)


# ---------------------------------------------------------------------------------------------- measurements
# Each prints what it measured, saves it if it is kept, and returns why it failed, "" if it did not.


def _measure_growth(call: Call) -> str:
    options, plan = call.options, call.plan
    parts = options.growth or list(PARTS.values())
    load = Load(plan.seconds, min(WARMUP_S, plan.seconds), plan.clients[0])
    growths = measure_growth(parts, load, plan.rounds, _say)
    _save_growth(growths, call, options.plot or options.results / "growth.svg")
    return ""


def _measure_chaos(call: Call) -> str:
    return _judged([trio.run(run_chaos, call.options.chaos, call.options.seed)])


def _measure_soak(call: Call) -> str:
    return _judged(trio.run(soak, call.options.soak, _say, call.options.seed))


def _measure_figures(call: Call) -> str:
    return _judged(measure_figures(call.options.select, call.options.figures, _say))


def _judged(figures: Sequence[Figure]) -> str:
    """Print the table of the reliability figures. Returns which of them missed their goals."""
    table = Table("rows", "goal", "measured", "met")
    for figure in figures:
        table.add_row(figure.rows, figure.goal, figure.measured, "yes" if figure.is_met else "NO")
    open_console().print(table)
    missed = [figure.rows for figure in figures if not figure.is_met]
    return f"bench: goals missed: {', '.join(missed)}" if missed else ""


def _measure_start(call: Call) -> str:
    measure_start(call.options.start, _say)
    return ""


def _measure_sequences(call: Call) -> str:
    plan = call.plan
    return _printed(measure_sequences(count, plan.rounds, plan.seconds, _say) for count in call.options.sequences)


def _measure_grpc(call: Call) -> str:
    from bench.grpc_front import measure_grpc  # needs grpcio, which the rest does not

    return _printed([measure_grpc(call.plan, _say)])


def _measure_device(call: Call) -> str:
    return _printed(measure_device(call.options.device, call.plan.rounds, call.plan.seconds, _say))


def _measure_calls(call: Call) -> str:
    return _printed(measure_calls(_say))


def _measure_packages(call: Call) -> str:
    options = call.options
    concurrency, rounds = options.concurrency or PACKAGES_CONCURRENCY, options.rounds or PACKAGES_ROUNDS
    return _printed(measure_packages(options.against, concurrency, rounds, call.plan.seconds, _say))


def _measure_in_process(call: Call) -> str:
    return _printed([measure_in_process(call.plan.rounds, call.plan.seconds, _say)])


def _measure_cluster(call: Call) -> str:
    return _printed([*measure_cluster(call.plan.rounds, call.plan.seconds, _say)])


def _measure_libraries(call: Call) -> str:
    return _printed([*measure_libraries(call.plan.rounds, call.plan.seconds, _say)])


def _measure_rows(call: Call) -> str:
    return _printed([measure_rows(call.options.work, call.plan.rounds, call.plan.seconds, _say)])


def _printed(found: Iterable[object]) -> str:
    """Print each of the results when it is measured."""
    for one in found:
        print(one)
    return ""


def _measure_echo(call: Call) -> str:
    _report(call, measure_echo(call.plan, _say))
    return ""


def _measure_acceptance(call: Call) -> str:
    _mention_triton()
    runs = acceptance.measure_acceptance(call.plan, call.options.work or tuple(WORKS), _say)
    if not runs:
        return "bench: no load with targets was selected"
    results = call.results(runs)
    print_tables(results, only_figures=True)
    lines = acceptance.compared(runs)
    open_console().print(acceptance.table(lines, call.plan))
    print(*acceptance.verdict(lines), sep="\n")
    _save(results, call.options)
    return ""


def _measure_latency(call: Call) -> str:
    runs, limits, failure = _measured_works(call, open_loop.WORKS)
    if runs:
        results = call.results(runs, limits)
        print_tables(results)
        how = _how(call, "python -m bench --latency")
        if any(run.server == servers.TRITON for run in runs):
            how += f" Triton's allocator: {servers.triton_allocator() or 'its own'}."
        _save_tables("latency", f"{how}\n\n{open_loop.latencies(runs)}", call.options)
        _save(results, call.options)
    return failure


def _measure_works(call: Call) -> str:
    runs, limits, failure = _measured_works(call, tuple(WORKS))
    _report(call, runs, limits)
    return failure


def _measured_works(call: Call, works: Sequence[str]) -> tuple[list[Run], list[Limit], str]:
    """The results of the works of the options, or of `works`, up to the first failure, and that failure."""
    _mention_triton()
    runs: list[Run] = []
    limits: list[Limit] = []
    for name in call.options.work or works:
        try:
            work_runs, work_limits = measure_work(WORKS[name], call.plan, _say)
        except BenchFailed as error:
            return runs, limits, f"bench: {error}"
        runs += work_runs
        limits += work_limits
    return runs, limits, ""


def _mention_triton() -> None:
    if not os.environ.get("TRITONSERVER"):
        _say("TRITONSERVER is not set: no Triton is measured")


def _report(call: Call, runs: Sequence[Run], limits: Sequence[Limit] = ()) -> None:
    if runs:
        results = call.results(runs, limits)
        print_tables(results)
        _save(results, call.options)


def _given(option: str) -> Callable[[argparse.Namespace], bool]:
    """Whether the option is given, with or without a value."""
    return lambda options: getattr(options, option) not in (None, False)


# What is measured: the first whose options are given.
MEASUREMENTS: Final[Sequence[tuple[Callable[[argparse.Namespace], bool], Callable[[Call], str]]]] = (
    (_given("growth"), _measure_growth),
    (_given("chaos"), _measure_chaos),
    (_given("soak"), _measure_soak),
    (_given("figures"), _measure_figures),
    (_given("start"), _measure_start),
    (_given("sequences"), _measure_sequences),
    (_given("grpc"), _measure_grpc),
    (_given("device"), _measure_device),
    (_given("calls"), _measure_calls),
    (_given("packages"), _measure_packages),
    (_given("in_process"), _measure_in_process),
    (_given("cluster"), _measure_cluster),
    (_given("libraries"), _measure_libraries),
    (lambda options: bool(options.work) and options.work[0] in ROW_WORKS, _measure_rows),
    (_given("echo"), _measure_echo),
    (_given("acceptance"), _measure_acceptance),
    (_given("latency"), _measure_latency),
    (lambda _: True, _measure_works),
)

# ---------------------------------------------------------------------------------------------- what is kept


def _how(call: Call, command: str) -> str:
    """The sentence above measured tables."""
    plan = call.plan
    return (
        f"Written by `{command}`: medians of {plan.rounds} rounds of {plan.seconds:g} s (lowest to highest), "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {call.load_before:.1f} before."
    )


def _save_growth(growths: Sequence[Growth], call: Call, plot: Path) -> None:
    page = call.options.page
    how = _how(call, "python -m bench --growth") + f" Client: {call.plan.clients[0]}."
    text = f"{how}\n\n{tables(growths)}"
    if importlib.util.find_spec("matplotlib"):
        write_growth_plot(growths, plot)
        print(f"plot: {plot}")
        if page:
            text += f"\n\n![The figures as a plot]({Path(os.path.relpath(plot, page.parent)).as_posix()})"
    else:
        print("no plot: matplotlib is not installed")
    _save_tables("growth", text, call.options)


def _save_tables(name: str, text: str, options: argparse.Namespace) -> None:
    """Print the Markdown, and write it as a file of the results and into the page."""
    print(text)
    page, path = options.page, options.results / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"tables: {path}")
    if page:
        replace_part(page, name, text)
        print(f"tables: {page}")


def _save(results: Results, options: argparse.Namespace) -> None:
    json_path, plot_path = options.json or options.results / "bench.json", options.plot or options.results / "bench.svg"
    write_json(results, json_path)
    print(f"figures: {json_path}")
    if importlib.util.find_spec("matplotlib"):
        write_plot(results, plot_path)
        print(f"plot: {plot_path}")
    else:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
