"""The commands that are no server's: what `infer`, `bench`, `new` and `build-plan` can be told, and what runs for them.

Decided here: their arguments. Modules of the commands are imported when one is called.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from flowserve.cli.interrupts import silent_interrupts
from flowserve.cli.option_values import whole_number
from flowserve.errors import Invalid

LEVELS_MAX: Final = 1024

INFER_EXAMPLES: Final = """\
examples:
  flowserve infer localhost:8000 detect_language --input TEXT="good morning"
  flowserve infer localhost:8000 digit --input PIXELS=@seven.npy --json
  flowserve infer localhost:8000 read_text --input IMAGE=@page.png --output TEXT
  flowserve infer localhost:8000 net --input 'X=[1.0, 2.0]' --output Y=answer.npy
  flowserve infer localhost:8000 totals --input NUMBER=1 --sequence-id anna --sequence-start

A value is JSON, or @FILE: .npy and .json hold a tensor; of any other file a BYTES
input gets the bytes, a number input the picture [height, width, 3]. A batch
dimension of 1 may be left out.
"""

BENCH_EXAMPLES: Final = """\
examples:
  flowserve bench localhost:8000 digit                       1, 2, 4 ... 32 requests at a time
  flowserve bench localhost:8000 digit --concurrency 1,8     other levels
  flowserve bench localhost:8000 chat --input TEXT=hello     one that streams: when its responses come
  flowserve bench localhost:8000 totals --sequence-length 5  one with sequences, so many at a time
  flowserve bench --sweep graphs/ digit --p99-ms 20          which instances, batches and delays are best
  flowserve bench --sweep graphs/ digit --json               for a program
"""

BUILD_PLAN_EXAMPLES: Final = """\
examples:
  flowserve build-plan net.onnx -o models/net/1/model.plan --profile X:1x3x224x224:8x3x224x224:16x3x224x224
"""


def _request_parameter(word: str) -> tuple[str, object]:
    from flowserve.cli.inputs import request_parameter

    try:
        return request_parameter(word)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_PARAMETER: Final[dict[str, Any]] = {
    "metavar": "NAME=VALUE",
    "type": _request_parameter,
    "action": "append",
    "default": [],
    "help": "of the request: priority=1, timeout=50000 (microseconds), or one of your own",
}


def add_commands(commands: Any, formatter: type[argparse.HelpFormatter]) -> dict[str, argparse.ArgumentParser]:
    """Add them to argparse's subparsers; returns each by its name."""
    same = {"formatter_class": formatter, "allow_abbrev": False}
    infer = commands.add_parser(
        "infer",
        help="send one request to a server",
        description="Send one request to the server at URL and print its answer.",
        epilog=INFER_EXAMPLES,
        **same,
    )
    infer.add_argument("url", metavar="URL", help="http://host:port, or host:port")
    infer.add_argument("model", metavar="MODEL")
    infer.add_argument("--model-version", metavar="N", type=whole_number(1), help="default: the latest")
    infer.add_argument("--input", metavar="NAME=VALUE", action="append", default=[], help="once for each input")
    infer.add_argument(
        "--output", metavar="NAME[=FILE]", action="append", default=[], help="only these; FILE: .npy, .json, or bytes"
    )
    infer.add_argument("--parameter", **_PARAMETER)
    infer.add_argument("--sequence-id", metavar="ID", help="of the request's sequence: a number, or a text")
    infer.add_argument("--sequence-start", action="store_true", help="it begins with this request")
    infer.add_argument("--sequence-end", action="store_true", help="it ends with this request")
    infer.add_argument("--json", action="store_true", help="one line of JSON")

    bench = commands.add_parser(
        "bench",
        help="measure a server, or find the best configuration of a repository",
        description="Send made-up requests (or --input) to MODEL at URL, so many at a time, and print percentiles.",
        epilog=BENCH_EXAMPLES,
        **same,
    )
    bench.add_argument("target", metavar="URL MODEL", nargs="*", help="with --sweep MODEL alone")
    bench.add_argument(
        "--concurrency", metavar="FROM:TO", type=levels, default="1:32", help="doubling, or N,M,...; default 1:32"
    )
    bench.add_argument("--seconds", type=_seconds, default=2.0, help="measured at each level; default 2")
    bench.add_argument("--input", metavar="NAME=VALUE", action="append", default=[], help="as for infer")
    bench.add_argument("--parameter", **_PARAMETER)
    bench.add_argument(
        "--sequence-length",
        metavar="N",
        type=whole_number(1),
        default=0,
        help="so many sequences at a time, of N requests each; default 20 where MODEL has sequences",
    )
    bench.add_argument(
        "--sweep", metavar="REPOSITORY", type=Path, help="try configurations of MODEL in this process, without a server"
    )
    bench.add_argument("--p99-ms", type=_seconds, help="with --sweep: recommend only what keeps this bound")
    bench.add_argument("--json", action="store_true", help="one line of JSON")

    new = commands.add_parser(
        "new",
        help="write a small graph that runs, to begin with",
        description="Write the repository FOLDER: a graph of two Python models, commented, with a test.",
        **same,
    )
    new.add_argument("folder", metavar="FOLDER", type=Path, help="must not exist; its last part names the graph")
    return {"infer": infer, "bench": bench, "new": new, "build-plan": _add_build_plan(commands, same)}


def _add_build_plan(commands: Any, same: dict[str, Any]) -> argparse.ArgumentParser:
    plan: argparse.ArgumentParser = commands.add_parser(
        "build-plan",
        help="compile an ONNX file for this machine's GPU, with TensorRT",
        description="Build a TensorRT plan from the ONNX file MODEL, on the GPU that is to serve it. Needs TensorRT.",
        epilog=BUILD_PLAN_EXAMPLES,
        **same,
    )
    plan.add_argument("model", metavar="MODEL", type=Path, help="an ONNX file")
    plan.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="such as REPO/net/1/model.plan")
    plan.add_argument(
        "--profile",
        metavar="NAME:MIN:OPT:MAX[,...]",
        type=_profile,
        action="append",
        default=[],
        help="between which shapes inputs vary, and which is the best; once more for another optimisation profile",
    )
    plan.add_argument("--fp16", action="store_true", help="compute in FP16 where that is faster (TensorRT 10)")
    plan.add_argument("--workspace-mib", metavar="MIB", type=whole_number(0), default=0, help="default: what there is")
    plan.add_argument("--gpu", metavar="N", type=whole_number(0), default=0, help="build it on this one; default 0")
    return plan


def _profile(text: str) -> object:
    from flowserve.cli.build_plan import profile

    return profile(text)


def run_command(parsed: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    """Returns the exit status."""
    match parsed.command:
        case "infer":
            with silent_interrupts():
                from flowserve.cli.infer import InferOptions, infer

            if (parsed.sequence_start or parsed.sequence_end) and parsed.sequence_id is None:
                command.error("--sequence-start and --sequence-end say nothing without --sequence-id")
            options = InferOptions(
                parsed.url,
                parsed.model,
                str(parsed.model_version or ""),
                parsed.input,
                parsed.output,
                parsed.json,
                {**dict(parsed.parameter), **_sequence(parsed)},
            )
            return infer(options, sys.stdout, sys.stderr)
        case "bench":
            with silent_interrupts():
                from flowserve.cli.bench import BenchOptions, bench

            wanted = 1 if parsed.sweep else 2
            if len(parsed.target) != wanted:
                command.error(
                    f"say {'MODEL' if parsed.sweep else 'URL MODEL'}, got {' '.join(parsed.target) or 'nothing'}"
                )
            for name in ("input", "parameter") if parsed.sweep else ():
                if getattr(parsed, name):
                    command.error(f"--{name} says nothing with --sweep, which makes requests up")
            if parsed.p99_ms and not parsed.sweep:
                command.error("--p99-ms is the bound of a recommendation, which --sweep makes")
            return bench(
                BenchOptions(
                    parsed.target[0],
                    parsed.target[-1],
                    parsed.concurrency,
                    parsed.seconds,
                    parsed.input,
                    parsed.sweep,
                    parsed.p99_ms,
                    parsed.json,
                    dict(parsed.parameter),
                    parsed.sequence_length,
                ),
                sys.stderr,
            )
        case "build-plan":
            with silent_interrupts():
                from flowserve.cli.build_plan import build

            return build(parsed, sys.stdout, sys.stderr)
        case _:
            with silent_interrupts():
                from flowserve.cli.new import new

            return new(parsed.folder, sys.stdout, sys.stderr)


def _sequence(parsed: argparse.Namespace) -> dict[str, Any]:
    """What a request says of its sequence, if it has one."""
    if parsed.sequence_id is None:
        return {}
    _, found = _request_parameter(f"sequence_id={parsed.sequence_id}")
    is_one = type(found) in (int, str)  # not 1.5 or true, which can only be meant as texts
    flags = {"sequence_start": parsed.sequence_start, "sequence_end": parsed.sequence_end}
    return {"sequence_id": found if is_one else parsed.sequence_id, **flags}


def levels(text: str) -> tuple[int, ...]:
    """ "1:32" doubles from 1 to 32; "1,8" is what it says."""
    first, colon, last = text.partition(":")
    try:
        found = [int(part) for part in ([first, last] if colon else text.split(","))]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > LEVELS_MAX or (colon and found[0] > found[1]):
        raise argparse.ArgumentTypeError(f"expected FROM:TO or N,M,... from 1 to {LEVELS_MAX}, got {text!r}")
    if not colon:
        return tuple(found)
    chosen = []
    level = found[0]
    while level < found[1]:
        chosen.append(level)
        level *= 2
    return (*chosen, found[1])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 3600, got {text!r}")
    return seconds
