"""The options of `python -m bench`: their names, values, defaults and help.

Decides which values are valid, and the defaults that depend on what is measured. Does not measure. Caller: `__main__`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench import acceptance, open_loop, wrk
from bench.growth.growth import PARTS, Part
from bench.reliability.figures import FIGURES
from bench.rows import ROW_WORKS
from bench.runs import Plan
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure flowserve over HTTP. docs/performance.md explains every column.",
        epilog="TRITONSERVER=COMMAND measures `COMMAND REPOSITORY HTTP_PORT` side by side, in turns; "
        "`python -m bench.triton FOLDER` makes such a command.",
    )
    made.add_argument(
        "--acceptance",
        action="store_true",
        help="measure the chain in processes and inline and the diamond in processes, with fixed and varying dims, "
        "and print them beside Triton and the targets",
    )
    made.add_argument(
        "--work",
        "--only",
        type=_works,
        metavar="A,B",
        help="default all; "
        + "; ".join(f"{work.name}: {work.about}" for work in WORKS.values())
        + "".join(f"; {name}: {about}" for name, about in ROW_WORKS.items()),
    )
    made.add_argument(
        "--concurrency",
        type=_numbers(256),
        metavar="N,M",
        help="connections of the closed loop; default 1,2,4,8,32,128, with --acceptance, --echo and --grpc 1,8,32",
    )
    made.add_argument(
        "--seconds",
        type=_seconds,
        help=f"measured in each run; default {SECONDS:g}, {SECONDS_GROWTH:g} with --growth",
    )
    made.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help=f"medians over so many; default {ROUNDS}, {ROUNDS_AGAINST} with --against, "
        f"{ROUNDS_ACCEPTANCE} with --acceptance",
    )
    made.add_argument(
        "--python-execution",
        type=_chosen("inline", "process", "thread"),
        metavar="PLACE,PLACE",
        help="where flowserve runs model.py: inline, process, thread; default inline, with --acceptance process,inline",
    )
    made.add_argument(
        "--dims",
        type=_chosen("fixed", "varying"),
        metavar="fixed|varying|both",
        help="of the tensors in the configs: numbers, or -1; default varying, with --acceptance both",
    )
    made.add_argument(
        "--shapes",
        type=_chosen("one", "rows", "lengths"),
        default=("one",),
        metavar="A,B",
        help="of the requests: one row each (default); 1 to 16 rows; lengths that change from request to request",
    )
    made.add_argument(
        "--heads",
        type=_chosen("equal", "changing"),
        default=("equal",),
        metavar="equal|changing|both",
        help="of the requests: changing means other headers, order of headers and JSON fields from request to request",
    )
    made.add_argument(
        "--client",
        type=_chosen("own", "wrk"),
        metavar="own|wrk|both",
        help="of the closed loop: the own load generator (default), or wrk where it is installed (default of --growth)",
    )
    made.add_argument(
        "--open-loop",
        type=_arrivals,
        nargs="?",
        default=(),
        const=open_loop.SHARES,
        metavar="A,B",
        help="Poisson arrivals besides, at rates such as 60%% of each server's measured capacity or 1500/s; "
        "without a value 30%%,60%%,85%%",
    )
    made.add_argument(
        "--against",
        "--beside",
        default="",
        metavar="FOLDER_PYTHON_OR_COMMAND",
        help="another flowserve, measured in turns with this one: a checkout, run by this interpreter, the Python of a "
        "virtual environment, or a command",
    )
    made.add_argument("--echo", action="store_true", help="measure the HTTP server alone, beside uvicorn's, instead")
    made.add_argument(
        "--start",
        type=_numbers(1000),
        metavar="N,M",
        help="measure the time until a server of N Python models in processes is ready and its memory, instead",
    )
    made.add_argument(
        "--growth",
        type=_part,
        nargs="*",
        metavar="PART[=N,M]",
        help="measure how the cost grows with steps, deployments, connections and sequences, instead; "
        f"default {' '.join(_with_sizes(part) for part in PARTS.values())}",
    )
    made.add_argument(
        "--latency",
        action="store_true",
        help="measure the open loop at shares of each server's own capacity, in processes and inline, and write one "
        f"table; default works {','.join(open_loop.WORKS)}",
    )
    made.add_argument(
        "--grpc",
        action="store_true",
        help="measure ModelInfer over gRPC, beside handlers of grpcio that do nothing, instead",
    )
    made.add_argument(
        "--in-process",
        action="store_true",
        help="measure the engine inside a program, beside direct calls of the same model, instead",
    )
    made.add_argument(
        "--libraries",
        action="store_true",
        help="measure the backends of the libraries that are installed, beside direct calls of each library, instead",
    )
    made.add_argument(
        "--cluster",
        action="store_true",
        help="measure instances on other machines, here processes, beside those of the server, instead",
    )
    made.add_argument(
        "--calls",
        action="store_true",
        help="count the calls of Python functions for each request, in the server and in worker processes, instead",
    )
    made.add_argument(
        "--packages",
        action="store_true",
        help="measure the calls and the CPU time of a request to the chain inline, by package, instead; with --against "
        "a checkout, of that too",
    )
    made.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="measure a chain of three steps on that device beside the same steps asked one by one, instead",
    )
    made.add_argument(
        "--sequences",
        type=_numbers(256),
        metavar="N,M",
        help="measure a stateful model with N sequences at a time beside the same model without state, instead",
    )
    made.add_argument(
        "--figures",
        type=_length,
        nargs="?",
        const=1.0,
        metavar="LENGTH",
        help="measure the reliability figures instead; LENGTH multiplies counts and durations, default 1: 5 minutes",
    )
    made.add_argument(
        "--select",
        type=_figures,
        default=tuple(FIGURES),
        metavar="A,B",
        help=f"figures of --figures; default all: {', '.join(FIGURES)}",
    )
    made.add_argument(
        "--chaos",
        type=_length,
        nargs="?",
        const=300.0,
        metavar="SECONDS",
        help="inject random faults into one server while every response is checked, instead; default 300 seconds",
    )
    made.add_argument(
        "--soak",
        type=_length,
        nargs="?",
        const=60.0,
        metavar="MINUTES",
        help="a mix of ordinary work, mistakes and control for a long time, instead; default 60 minutes",
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="of --chaos and --soak; default 1")
    made.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the tables of --growth or --latency between the comments `<!-- growth: begin -->` or `<!-- latency: "
        "begin -->` and `end` of that page as well",
    )
    made.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="of the files below; default %(default)s"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="default bench.json in the folder of the results")
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=".svg or .png; default bench.svg in the folder of the results, with --growth growth.svg",
    )
    return made


def plan_of(options: argparse.Namespace, say: Callable[[str], None]) -> Plan:
    """How loads are measured: the options, with the defaults of what is measured."""
    growth = options.growth is not None
    both = options.acceptance or options.latency
    rounds = ROUNDS_ACCEPTANCE if both else ROUNDS_AGAINST if options.against else ROUNDS
    short = options.acceptance or options.echo or options.grpc
    concurrency = acceptance.CONCURRENCY if short else open_loop.CONCURRENCY if options.latency else CONCURRENCY
    asked = options.client or (("wrk",) if growth else ("own",))
    clients = tuple(client for client in asked if client != "wrk" or wrk.installed())
    if clients != asked:
        say("wrk is not installed: only the own load generator is used")
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
