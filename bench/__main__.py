"""`python -m bench`: measure flowserve, beside Triton where the environment variable TRITONSERVER names one.

Decided here: the command line. What is measured stands in works, in which order in measure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from bench.devices import measure_device
from bench.in_process import measure_in_process
from bench.measure import measure_echo, measure_work
from bench.report import Results, print_tables, write_json, write_plot
from bench.runs import Limit, Plan, Run
from bench.sequences import measure_sequences
from bench.servers import BenchFailed
from bench.start import measure_start
from bench.works import WORKS

RESULTS: Final = Path(__file__).parent / "results"

# A comparison with another flowserve looks for differences of a few per cent, which takes more runs to see.
ROUNDS: Final = 3
ROUNDS_AGAINST: Final = 9

# A load average above which somebody else is clearly computing here.
BUSY: Final = 0.7


def _works(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in WORKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no work named {', '.join(unknown)}; there are {', '.join(WORKS)}")
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


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 50:
        raise argparse.ArgumentTypeError(f"expected 1 to 50, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure flowserve over HTTP. docs/performance.md explains every column.",
        epilog="TRITONSERVER=COMMAND measures `COMMAND REPOSITORY HTTP_PORT` side by side, in turns; "
        "`python -m bench.triton FOLDER` makes such a command.",
    )
    parser.add_argument(
        "--work",
        type=_works,
        default=tuple(WORKS),
        metavar="A,B",
        help="; ".join(f"{work.name}: {work.about}" for work in WORKS.values()),
    )
    parser.add_argument("--concurrency", type=_numbers(256), default=(1, 8, 32), metavar="N,M", help="default 1,8,32")
    parser.add_argument("--seconds", type=_seconds, default=2.0, help="measured in each run; default 2")
    parser.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help=f"medians over so many; default {ROUNDS}, {ROUNDS_AGAINST} with --against",
    )
    parser.add_argument(
        "--python-execution",
        choices=("inline", "thread", "process"),
        default="inline",
        help="where flowserve runs model.py; default inline, which is what the targets for trusted nodes are about",
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="FOLDER_OR_COMMAND",
        help="another flowserve, measured in turns with this one: a checkout, run by this interpreter, or a command",
    )
    parser.add_argument("--echo", action="store_true", help="measure the HTTP server alone, against uvicorn's, instead")
    parser.add_argument(
        "--start",
        type=_numbers(1000),
        metavar="N,M",
        help="how long a server of N Python models takes to be ready and what it holds, in processes, instead",
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
    parser.add_argument("--json", type=Path, default=RESULTS / "bench.json", metavar="FILE", help="default %(default)s")
    parser.add_argument(
        "--plot",
        type=Path,
        default=RESULTS / "bench.svg",
        metavar="FILE",
        help=".svg or .png; default %(default)s",
    )
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(plan: Plan, works: Sequence[str], runs: list[Run], limits: list[Limit]) -> None:
    """Add what is found to `runs` and `limits`, work by work, so that a failure does not cost what came before it."""
    if not os.environ.get("TRITONSERVER"):
        _say("TRITONSERVER is not set: no Triton is measured")
    for name in works:
        work_runs, work_limits = measure_work(WORKS[name], plan, _say)
        runs += work_runs
        limits += work_limits


def _terminated(number: int, frame: object) -> NoReturn:
    # Unwinds the stack, so that the servers that were started are stopped.
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    rounds = options.rounds or (ROUNDS_AGAINST if options.against else ROUNDS)
    plan = Plan(options.concurrency, options.seconds, rounds, options.python_execution, options.against)
    load_before = os.getloadavg()[0]
    if load_before > BUSY:
        _say(
            f"the machine is busy with other things (load average {load_before:.1f}): trust the ratios, not the figures"
        )
    runs: list[Run] = []
    limits: list[Limit] = []
    failure = ""
    try:
        if options.start:
            measure_start(options.start, _say)
        elif options.sequences:
            for concurrency in options.sequences:
                print(measure_sequences(concurrency, rounds, options.seconds, _say))
        elif options.grpc:
            from bench.grpc_front import measure_grpc  # needs grpcio, which the rest does not

            print(measure_grpc(plan, _say))
        elif options.device:
            for chain in measure_device(options.device, rounds, options.seconds, _say):
                print(chain)
        elif options.in_process:
            print(measure_in_process(rounds, options.seconds, _say))
        elif options.echo:
            runs += measure_echo(plan, _say)
        else:
            _measure(plan, options.work, runs, limits)
    except BenchFailed as error:
        failure = f"bench: {error}"
    except KeyboardInterrupt:
        sys.exit(130)
    if runs:
        _show(Results.of(plan, load_before, runs, limits), options.json, options.plot)
    if failure:
        sys.exit(failure)


def _show(results: Results, json_path: Path, plot_path: Path) -> None:
    print_tables(results)
    write_json(results, json_path)
    print(f"figures: {json_path}")
    if importlib.util.find_spec("matplotlib"):
        write_plot(results, plot_path)
        print(f"plot: {plot_path}")
    else:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
