"""`python -m tests.compatibility FOLDER`: how flowserve serves the model repositories of FOLDER, compared with Triton.

Decides arguments, the order of work and the exit status: 1 if there are differences that are not documented, or,
without a tritonserver, if flowserve does not serve or answer.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.compatibility.compare import Result, compare
from tests.compatibility.report import print_result, print_total, write_json
from tests.compatibility.repositories import find_repositories
from tests.compatibility.stand_ins import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    launcher = options.against or os.environ.get("TRITONSERVER", "")
    if launcher:
        os.environ["TRITONSERVER"] = launcher
    repositories = find_repositories(options.folder)
    if not repositories:
        print(f"no model repository in {options.folder}", file=sys.stderr)
        return 2
    machine = Machine(
        has_gpu=options.gpu,
        kept_backends=frozenset({"python", "onnxruntime", "ensemble", *options.keep}),
        has_module=_modules_of(launcher),
    )
    results: list[Result] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both ways to end it stop the servers
    try:
        for repository in repositories:
            result = compare(
                repository, machine, with_triton=bool(launcher), backends_of_triton=options.backends_of_triton
            )
            print_result(result, with_triton=bool(launcher), verbose=options.verbose)
            results.append(result)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if options.out:
            write_json(options.out, results)
    print_total(results, with_triton=bool(launcher))
    return int(any(one.different if launcher else one.failures for one in results))


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=summary)
    parser.add_argument("folder", type=Path, help="a folder with model repositories, at any depth; it is not changed")
    parser.add_argument(
        "--against",
        metavar="LAUNCHER",
        help="the launcher of a tritonserver, as `python -m bench.triton` makes it; default: TRITONSERVER; "
        "without one, flowserve alone is asked",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON too")
    parser.add_argument("--verbose", action="store_true", help="print stand-ins and documented differences too")
    parser.add_argument("--gpu", action="store_true", help="leave instances on GPUs; both servers have GPUs")
    parser.add_argument(
        "--keep",
        metavar="BACKEND",
        action="append",
        default=[],
        help="a backend that both servers have: its models need no stand-ins if their files are there; repeatable",
    )
    parser.add_argument(
        "--backends-of-triton",
        metavar="NAME,...",
        type=lambda text: tuple(text.split(",")),
        default=("python",),
        help="its backends; without onnxruntime, Python models run the ONNX files there (default: python)",
    )
    return parser


def _modules_of(launcher: str) -> Callable[[str], bool]:
    """Whether a module exists for flowserve's models and, if its environment lies beside the launcher, for Triton's."""
    python = Path(shlex.split(launcher)[0]).parent / "venv" / "bin" / "python" if launcher else None

    @cache
    def has_module(name: str) -> bool:
        if find_spec(name) is None:
            return False
        if python is None or not python.is_file():
            return True
        program = f"import importlib.util; raise SystemExit(importlib.util.find_spec({name!r}) is None)"
        return subprocess.run([python, "-c", program], check=False).returncode == 0

    return has_module


if __name__ == "__main__":
    sys.exit(main())
