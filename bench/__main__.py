"""`python -m bench`: measure flowserve, beside Triton where the environment variable TRITONSERVER names one.

This module holds the command line; works.py has the workloads and measure.py the order of the runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

import trio
from rich.table import Table

from bench import acceptance, open_loop, servers, wrk
from bench.calls import measure_calls
from bench.cluster import measure_cluster
from bench.devices import measure_device
from bench.growth.growth import PARTS, Growth, Part, measure_growth
from bench.growth.loads import Load
from bench.growth.report import tables
from bench.growth.report import write_plot as write_growth_plot
from bench.in_process import measure_in_process
from bench.libraries import measure_libraries
from bench.measure import measure_echo, measure_work
from bench.packages import measure_packages
from bench.reliability.figures import FIGURES, measure_figures, run_chaos
from bench.reliability.soak import soak
from bench.report import Results, open_console, print_tables, write_json, write_plot
from bench.rows import ROW_WORKS, measure_rows
from bench.runs import WARMUP_S, Limit, Plan, Run
from bench.sequences import measure_sequences
from bench.servers import BenchFailed
from bench.start import measure_start
from bench.tables import replace_part
from bench.works import WORKS

RESULTS: Final = Path(__file__).parent / "results"

# A comparison with another flowserve looks for differences of a few per cent, which needs more runs.
ROUNDS: Final = 3
ROUNDS_AGAINST: Final = 9
ROUNDS_ACCEPTANCE: Final = 5

CONCURRENCY: Final = (1, 2, 4, 8, 32, 128)
SECONDS: Final = 2.0
SECONDS_GROWTH: Final = 1.0

# The largest size of --growth: a mistyped number should not fill the memory.
MOST_OF_A_PART: Final = 100_000

# A load average above which other programs clearly use the machine.
BUSY: Final = 0.7


def _works(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = [*WORKS, *ROW_WORKS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no work named {', '.join(unknown)}; there are {', '.join(known)}")
    if 0 < sum(name in ROW_WORKS for name in names) < len(names):
        raise argparse.ArgumentTypeError(f"{' and '.join(ROW_WORKS)} have tables of their own: name no other work")
    return names


def _numbers(most: int) -> Callable[[str], tuple[int, ...]]:
    """Reads "1,8,32"."""

    def read(text: str) -> tuple[int, ...]:
        try:
            counts = tuple(int(part) for part in text.split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1 or max(counts) > most:
            raise argparse.ArgumentTypeError(f"expected numbers from 1 to {most} with commas between, got {text!r}")
        return counts

    return read


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60.0:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 60 seconds, got {text!r}")
    return seconds


def _length(text: str) -> float:
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 0.05 <= length <= 10_000:
        raise argparse.ArgumentTypeError(f"expected 0.05 to 10000, got {text!r}")
    return length


def _figures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in FIGURES]:
        raise argparse.ArgumentTypeError(f"no figure named {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    return names


def _part(text: str) -> Part:
    """Reads "steps" or "steps=1,2,5"."""
    name, given, sizes = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"nothing named {name!r} grows; there are {', '.join(PARTS)}")
    return replace(PARTS[name], sizes=_numbers(MOST_OF_A_PART)(sizes)) if given else PARTS[name]


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 50:
        raise argparse.ArgumentTypeError(f"expected 1 to 50, got {text!r}")
    return int(text)


def _chosen(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Reads "a,b", or "both" for all of the choices."""

    def read(text: str) -> tuple[str, ...]:
        values = choices if text == "both" else tuple(text.split(","))
        if not set(values) <= set(choices):
            raise argparse.ArgumentTypeError(f"expected {', '.join(choices)} or both, got {text!r}")
        return values

    return read


def _arrivals(text: str) -> tuple[str, ...]:
    """Reads "30%,1500/s"."""
    values = tuple(text.split(","))
    if not all(re.fullmatch(r"[1-9]\d*(%|/s)", value) for value in values):
        raise argparse.ArgumentTypeError(f"expected rates such as 60% or 1500/s with commas between, got {text!r}")
    return values


def _with_sizes(part: Part) -> str:
    return f"{part.name}={','.join(map(str, part.sizes))}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure flowserve over HTTP. docs/performance.md explains every column.",
        epilog="TRITONSERVER=COMMAND measures `COMMAND REPOSITORY HTTP_PORT` side by side, in turns; "
        "`python -m bench.triton FOLDER` makes such a command.",
    )
    parser.add_argument(
        "--acceptance",
        action="store_true",
        help="measure the chain in processes and inline and the diamond in processes, with fixed and varying dims, "
        "and print them beside Triton and the targets",
    )
    parser.add_argument(
        "--work",
        "--only",
        type=_works,
        metavar="A,B",
        help="default all; "
        + "; ".join(f"{work.name}: {work.about}" for work in WORKS.values())
        + "".join(f"; {name}: {about}" for name, about in ROW_WORKS.items()),
    )
    parser.add_argument(
        "--concurrency",
        type=_numbers(256),
        metavar="N,M",
        help="connections of the closed loop; default 1,2,4,8,32,128, with --acceptance, --echo and --grpc 1,8,32",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        help=f"measured in each run; default {SECONDS:g}, {SECONDS_GROWTH:g} with --growth",
    )
    parser.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help=f"medians over so many; default {ROUNDS}, {ROUNDS_AGAINST} with --against, "
        f"{ROUNDS_ACCEPTANCE} with --acceptance",
    )
    parser.add_argument(
        "--python-execution",
        type=_chosen("inline", "process", "thread"),
        metavar="PLACE,PLACE",
        help="where flowserve runs model.py: inline, process, thread; default inline, with --acceptance process,inline",
    )
    parser.add_argument(
        "--dims",
        type=_chosen("fixed", "varying"),
        metavar="fixed|varying|both",
        help="of the tensors in the configs: numbers, or -1; default varying, with --acceptance both",
    )
    parser.add_argument(
        "--shapes",
        type=_chosen("one", "rows", "lengths"),
        default=("one",),
        metavar="A,B",
        help="of the requests: one row each (default); 1 to 16 rows; lengths that change from request to request",
    )
    parser.add_argument(
        "--heads",
        type=_chosen("equal", "changing"),
        default=("equal",),
        metavar="equal|changing|both",
        help="of the requests: changing means other headers, order of headers and JSON fields from request to request",
    )
    parser.add_argument(
        "--client",
        type=_chosen("own", "wrk"),
        metavar="own|wrk|both",
        help="of the closed loop: the own load generator (default), or wrk where it is installed (default of --growth)",
    )
    parser.add_argument(
        "--open-loop",
        type=_arrivals,
        nargs="?",
        default=(),
        const=open_loop.SHARES,
        metavar="A,B",
        help="Poisson arrivals besides, at rates such as 60%% of each server's measured capacity or 1500/s; "
        "without a value 30%%,60%%,85%%",
    )
    parser.add_argument(
        "--against",
        "--beside",
        default="",
        metavar="FOLDER_PYTHON_OR_COMMAND",
        help="another flowserve, measured in turns with this one: a checkout, run by this interpreter, the Python of a "
        "virtual environment, or a command",
    )
    parser.add_argument("--echo", action="store_true", help="measure the HTTP server alone, beside uvicorn's, instead")
    parser.add_argument(
        "--start",
        type=_numbers(1000),
        metavar="N,M",
        help="measure the time until a server of N Python models in processes is ready and its memory, instead",
    )
    parser.add_argument(
        "--growth",
        type=_part,
        nargs="*",
        metavar="PART[=N,M]",
        help="measure how the cost grows with steps, deployments, connections and sequences, instead; "
        f"default {' '.join(_with_sizes(part) for part in PARTS.values())}",
    )
    parser.add_argument(
        "--latency",
        action="store_true",
        help="measure the open loop at shares of each server's own capacity, in processes and inline, and write one "
        f"table; default works {','.join(open_loop.WORKS)}",
    )
    parser.add_argument(
        "--grpc",
        action="store_true",
        help="measure ModelInfer over gRPC, beside handlers of grpcio that do nothing, instead",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="measure the engine inside a program, beside direct calls of the same model, instead",
    )
    parser.add_argument(
        "--libraries",
        action="store_true",
        help="measure the backends of the libraries that are installed, beside direct calls of each library, instead",
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="measure instances on other machines, here processes, beside those of the server, instead",
    )
    parser.add_argument(
        "--calls",
        action="store_true",
        help="count the calls of Python functions for each request, in the server and in worker processes, instead",
    )
    parser.add_argument(
        "--packages",
        action="store_true",
        help="measure the calls and the CPU time of a request to the chain inline, by package, instead; with --against "
        "a checkout, of that too",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="measure a chain of three steps on that device beside the same steps asked one by one, instead",
    )
    parser.add_argument(
        "--sequences",
        type=_numbers(256),
        metavar="N,M",
        help="measure a stateful model with N sequences at a time beside the same model without state, instead",
    )
    parser.add_argument(
        "--figures",
        type=_length,
        nargs="?",
        const=1.0,
        metavar="LENGTH",
        help="measure the reliability figures instead; LENGTH multiplies counts and durations, default 1: 5 minutes",
    )
    parser.add_argument(
        "--select",
        type=_figures,
        default=tuple(FIGURES),
        metavar="A,B",
        help=f"figures of --figures; default all: {', '.join(FIGURES)}",
    )
    parser.add_argument(
        "--chaos",
        type=_length,
        nargs="?",
        const=300.0,
        metavar="SECONDS",
        help="inject random faults into one server while every response is checked, instead; default 300 seconds",
    )
    parser.add_argument(
        "--soak",
        type=_length,
        nargs="?",
        const=60.0,
        metavar="MINUTES",
        help="a mix of ordinary work, mistakes and control for a long time, instead; default 60 minutes",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --chaos and --soak; default 1")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the tables of --growth or --latency between the comments `<!-- growth: begin -->` or `<!-- latency: "
        "begin -->` and `end` of that page as well",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "bench.json", metavar="FILE", help="default %(default)s")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f".svg or .png; default {RESULTS / 'bench.svg'}, with --growth {RESULTS / 'growth.svg'}",
    )
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(plan: Plan, works: Sequence[str], runs: list[Run], limits: list[Limit]) -> None:
    """Add the results to `runs` and `limits` work by work: a failure keeps those of the works before it."""
    for name in works:
        work_runs, work_limits = measure_work(WORKS[name], plan, _say)
        runs += work_runs
        limits += work_limits


def _terminated(number: int, frame: object) -> NoReturn:
    # Unwinds the stack, so that the started servers are stopped.
    raise SystemExit(128 + number)


def _plan(options: argparse.Namespace) -> Plan:
    """The options, with the defaults of what is measured."""
    growth = options.growth is not None
    both = options.acceptance or options.latency
    rounds = ROUNDS_ACCEPTANCE if both else ROUNDS_AGAINST if options.against else ROUNDS
    short = options.acceptance or options.echo or options.grpc
    concurrency = acceptance.CONCURRENCY if short else open_loop.CONCURRENCY if options.latency else CONCURRENCY
    asked = options.client or (("wrk",) if growth else ("own",))
    clients = tuple(client for client in asked if client != "wrk" or wrk.installed())
    if clients != asked:
        _say("wrk is not installed: only the own load generator is used")
    return Plan(
        concurrency=options.concurrency or concurrency,
        seconds=options.seconds or (SECONDS_GROWTH if growth else SECONDS),
        rounds=options.rounds or rounds,
        executions=options.python_execution or (("process", "inline") if both else ("inline",)),
        dims=options.dims or (("varying", "fixed") if options.acceptance else ("varying",)),
        shapes=options.shapes,
        heads=options.heads,
        clients=clients or ("own",),
        arrivals=options.open_loop or (open_loop.SHARES if options.latency else ()),
        against=options.against,
    )


def _measure_reliability(options: argparse.Namespace) -> str:
    """Print the table. Returns which figures missed their goals, "" for none."""
    if options.chaos:
        figures = [trio.run(run_chaos, options.chaos, options.seed)]
    elif options.soak:
        figures = trio.run(soak, options.soak, _say, options.seed)
    else:
        figures = measure_figures(options.select, options.figures, _say)
    table = Table("rows", "goal", "measured", "met")
    for figure in figures:
        table.add_row(figure.rows, figure.goal, figure.measured, "yes" if figure.is_met else "NO")
    open_console().print(table)
    missed = [figure.rows for figure in figures if not figure.is_met]
    return f"bench: goals missed: {', '.join(missed)}" if missed else ""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    plan = _plan(options)
    load_before = os.getloadavg()[0]
    if load_before > BUSY:
        _say(f"other programs use this machine (load average {load_before:.1f}): trust the ratios, not the figures")
    runs: list[Run] = []
    limits: list[Limit] = []
    failure = ""
    try:
        if options.growth is not None:
            parts = options.growth or list(PARTS.values())
            load = Load(plan.seconds, min(WARMUP_S, plan.seconds), plan.clients[0])
            growths = measure_growth(parts, load, plan.rounds, _say)
            _save_growth(growths, plan, load_before, options.page, options.plot or RESULTS / "growth.svg")
        elif options.figures or options.chaos or options.soak:
            failure = _measure_reliability(options)
        elif options.start:
            measure_start(options.start, _say)
        elif options.sequences:
            for concurrency in options.sequences:
                print(measure_sequences(concurrency, plan.rounds, plan.seconds, _say))
        elif options.grpc:
            from bench.grpc_front import measure_grpc  # needs grpcio, which the rest does not

            print(measure_grpc(plan, _say))
        elif options.device:
            for chain in measure_device(options.device, plan.rounds, plan.seconds, _say):
                print(chain)
        elif options.calls:
            print(*measure_calls(_say), sep="\n")
        elif options.packages:
            concurrency = options.concurrency or (1, 32)
            print(*measure_packages(options.against, concurrency, options.rounds or 3, plan.seconds, _say), sep="\n")
        elif options.in_process:
            print(measure_in_process(plan.rounds, plan.seconds, _say))
        elif options.cluster:
            print(*measure_cluster(plan.rounds, plan.seconds, _say), sep="\n")
        elif options.libraries:
            print(*measure_libraries(plan.rounds, plan.seconds, _say), sep="\n")
        elif options.work and options.work[0] in ROW_WORKS:
            print(measure_rows(options.work, plan.rounds, plan.seconds, _say))
        elif options.echo:
            runs += measure_echo(plan, _say)
        else:
            if not os.environ.get("TRITONSERVER"):
                _say("TRITONSERVER is not set: no Triton is measured")
            if options.acceptance:
                runs += acceptance.measure_acceptance(plan, options.work or tuple(WORKS), _say)
                failure = "" if runs else "bench: no load with targets was selected"
            elif options.latency:
                _measure(plan, options.work or open_loop.WORKS, runs, limits)
            else:
                _measure(plan, options.work or tuple(WORKS), runs, limits)
    except BenchFailed as error:
        failure = f"bench: {error}"
    except KeyboardInterrupt:
        sys.exit(130)
    if runs:
        measured = {run.server for run in runs}
        configuration = [line for line in servers.configuration(plan.against) if line.split(":")[0] in measured]
        results = Results.of(plan, load_before, configuration, runs, limits)
        print_tables(results, only_figures=options.acceptance)
        if options.acceptance:
            lines = acceptance.compared(runs)
            open_console().print(acceptance.table(lines, plan))
            print(*acceptance.verdict(lines), sep="\n")
        if options.latency:
            how = _how(plan, load_before, "python -m bench --latency")
            if servers.TRITON in measured:
                how += f" Triton's allocator: {servers.triton_allocator() or 'its own'}."
            _save_tables("latency", f"{how}\n\n{open_loop.latencies(runs)}", options.page)
        _save(results, options.json, options.plot or RESULTS / "bench.svg")
    if failure:
        sys.exit(failure)


def _how(plan: Plan, load_before: float, command: str) -> str:
    """The sentence above measured tables."""
    return (
        f"Written by `{command}`: medians of {plan.rounds} rounds of {plan.seconds:g} s (lowest to highest), "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {load_before:.1f} before."
    )


def _save_growth(growths: Sequence[Growth], plan: Plan, load_before: float, page: Path | None, plot: Path) -> None:
    how = _how(plan, load_before, "python -m bench --growth") + f" Client: {plan.clients[0]}."
    text = f"{how}\n\n{tables(growths)}"
    if importlib.util.find_spec("matplotlib"):
        write_growth_plot(growths, plot)
        print(f"plot: {plot}")
        if page:
            text += f"\n\n![The figures as a plot]({Path(os.path.relpath(plot, page.parent)).as_posix()})"
    else:
        print("no plot: matplotlib is not installed")
    _save_tables("growth", text, page)


def _save_tables(name: str, text: str, page: Path | None) -> None:
    """Print the Markdown, and write it as a file of the results and into the page."""
    print(text)
    path = RESULTS / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"tables: {path}")
    if page:
        replace_part(page, name, text)
        print(f"tables: {page}")


def _save(results: Results, json_path: Path, plot_path: Path) -> None:
    write_json(results, json_path)
    print(f"figures: {json_path}")
    if importlib.util.find_spec("matplotlib"):
        write_plot(results, plot_path)
        print(f"plot: {plot_path}")
    else:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
