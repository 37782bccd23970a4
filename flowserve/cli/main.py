"""The command `flowserve`: its subcommands, their arguments, and usage errors.

Decides the commands and the form of usage errors: one line on standard error, exit status 2. Does not know what a
command does: each has its module of that name with `execute(arguments, parser)`, which returns the exit status. It is
imported when the command runs, so that `--help` is fast. Only `completion` is here: it prints what this module
declares.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from flowserve.cli.elsewhere.options import add_place_options, add_placement
from flowserve.cli.environment import from_environment, unknown_variables
from flowserve.cli.interrupts import INTERRUPTED, silent_interrupts
from flowserve.cli.option_values import (
    add_option,
    levels,
    model_time,
    positive,
    profile,
    request_parameter,
    seconds,
    whole_number,
)
from flowserve.cli.options import (
    INSTEAD,
    NOT_YET,
    add_config_options,
    add_quiet,
    add_repositories,
    add_run_arguments,
    contradiction,
    missing,
    named_repositories,
)
from flowserve.cli.standard_output import NOT_WRITTEN, drop_output
from flowserve.cli.stores import add_store_options, open_mirrors, repository
from flowserve.errors import FlowserveError, Unsupported
from flowserve.version import __version__

USAGE_ERROR: Final = 2
EXAMPLES: Final = Path(__file__).with_name("examples")  # a file for each command
PICTURES: Final = ("text", "dot", "mermaid", "svg", "png", "html", "json")  # as in render/formats.py
DIRECTIONS: Final = ("TB", "LR")  # as in render/layout.py

DESCRIPTION: Final = """\
Serve pipelines of models from a Triton model repository.

A repository is a folder of model folders. Each holds a config.pbtxt and numbered
version folders; a model whose config.pbtxt has an `ensemble_scheduling` block is a
graph of the others.
"""


# argparse's text for an unknown command.
_WRONG_COMMAND: Final = re.compile(r"COMMAND: invalid choice: '(.*)' \(choose from (.*)\)$", re.DOTALL)
# What other programs call these commands.
_OTHER_NAMES: Final = {"serve": "run", "start": "run", "up": "run", "validate": "check", "draw": "graph", "init": "new"}
QUIET: Final = ("-q", "--quiet")
SHELLS: Final = ("bash", "zsh", "tcsh")


class _Parser(argparse.ArgumentParser):
    """argparse, except that an error is one line without the usage, which `--help` shows."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if wrong := _WRONG_COMMAND.match(message):
            near = difflib.get_close_matches(wrong[1], wrong[2].replace("'", "").split(", "), n=1)
            near = [_OTHER_NAMES[wrong[1]]] if wrong[1] in _OTHER_NAMES else near
            message = f"there is no command {wrong[1]!r}" + (f"; did you mean {near[0]}?" if near else "")
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def _examples(command: str) -> str:
    """The text below the options in a command's help."""
    file = EXAMPLES / f"{command}.txt"
    return file.read_text("utf-8") if file.exists() else ""


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command, and one per subcommand."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="flowserve", description=DESCRIPTION, epilog=_examples("flowserve"), **style)
    parser.add_argument("-V", "--version", action="version", version=f"flowserve {__version__}")
    add_quiet(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    made: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        text = _examples(name)
        made[name] = commands.add_parser(name, help=summary, description=description, epilog=text, **style)
        add_quiet(made[name])
        return made[name]

    run = command(
        "run",
        "load a repository and serve it over HTTP and gRPC",
        "Load every model of REPO and serve them over HTTP and gRPC (KServe v2 as in Triton).",
    )
    add_run_arguments(run)

    check = command(
        "check",
        "validate a repository and print its compiled graphs",
        "Read every configuration of REPO; print all problems with their places, or the compiled graphs.",
    )
    text = "a model repository, or several that are served together; or one deployment's folder"
    add_repositories(check, text)
    add_store_options(check)
    add_placement(check)
    check.add_argument("--json", action="store_true", help="print one line of JSON instead")
    text = "load every model too, as the server does, which runs its code, and report those that do not load"
    check.add_argument("--load", action="store_true", help=text)
    text = "with --load: abandon the loads when none has ended for so long; default %(default)g"
    add_option(check, "--load-timeout-secs SECONDS", text, seconds, 120.0)
    add_config_options(check)

    graph = command(
        "graph",
        "draw the graph of a deployment",
        "Draw one deployment of REPO (or all of them, as text). Nothing is served, no network is needed.",
    )
    text = "a model repository, or one deployment's folder of it"
    graph.add_argument("repository", metavar="PATH", nargs="?", type=Path, help=text)
    graph.add_argument("model", metavar="MODEL", nargs="?", default="", help="which deployment of the repository")
    graph.add_argument("--format", choices=PICTURES, help="default: by the suffix of FILE, otherwise text")
    graph.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of standard output")
    text = "top to bottom or left to right; default: LR, or TB for a graph that would be too wide"
    graph.add_argument("--direction", choices=DIRECTIONS, help=text)
    graph.add_argument("--fold", action="store_true", help="draw each nested ensemble as one box")
    add_placement(graph)

    infer = command(
        "infer",
        "send one request to a server",
        "Send one request to the server at URL and print its answer.",
    )
    infer.add_argument("url", metavar="URL", help="http://host:port, or host:port")
    infer.add_argument("model", metavar="MODEL")
    add_option(infer, "--model-version N", "default: the latest", whole_number(1))
    add_option(infer, "--input NAME=VALUE", "once for each input", repeatable=True)
    add_option(infer, "--output NAME[=FILE]", "only these; FILE: .npy, .json, or bytes", repeatable=True)
    parameter = "request parameter: priority=1, timeout=50000 (microseconds), or any other"
    add_option(infer, "--parameter NAME=VALUE", parameter, request_parameter, repeatable=True)
    add_option(infer, "--sequence-id ID", "correlation ID of the sequence: a number, or text")
    infer.add_argument("--sequence-start", action="store_true", help="the sequence begins with this request")
    infer.add_argument("--sequence-end", action="store_true", help="the sequence ends with this request")
    infer.add_argument("--json", action="store_true", help="one line of JSON")

    bench = command(
        "bench",
        "measure a server, or find the best configuration of a repository",
        "Send made-up requests (or --input) to MODEL at URL, so many at a time, and print percentiles.",
    )
    bench.add_argument("target", metavar="URL MODEL", nargs="*", help="with --sweep only MODEL")
    add_option(bench, "--concurrency FROM:TO", "doubling, or N,M,...; default 1:32", levels, "1:32")
    bench.add_argument("--seconds", type=seconds, default=2.0, help="measured at each level; default 2")
    add_option(bench, "--input NAME=VALUE", "as for infer", repeatable=True)
    add_option(bench, "--parameter NAME=VALUE", parameter, request_parameter, repeatable=True)
    text = "send concurrent sequences of N requests each; default 20 if MODEL has sequences"
    add_option(bench, "--sequence-length N", text, whole_number(1), 0)
    text = "try configurations of MODEL in this process, without a server"
    add_option(bench, "--sweep REPOSITORY", text, Path)
    bench.add_argument("--p99-ms", type=seconds, help="with --sweep: recommend only configurations within this bound")
    bench.add_argument("--json", action="store_true", help="one line of JSON")

    place = command(
        "place",
        "propose which models run on other machines",
        "Measure the deployment MODEL of REPO here, and propose a placement file for `flowserve run --cluster`.",
    )
    place.add_argument("repository", metavar="REPO", type=Path, help="a model repository")
    place.add_argument("model", metavar="MODEL", help="which deployment of the repository")
    add_place_options(place)
    text = "requests per second that it is to serve; default: what this machine serves now"
    add_option(place, "--rate R", text, positive)
    add_option(place, "--input NAME=VALUE", "as for infer", repeatable=True)
    text = "the time of a row on the machine that is meant for it, instead of the measured one"
    add_option(place, "--takes MODEL=MS", text, model_time, repeatable=True)
    add_option(place, "--concurrency N", "requests at a time; default %(default)s", whole_number(1, 1024), 8)
    place.add_argument("--seconds", type=seconds, default=2.0, help="for each of three measurements; default 2")
    place.add_argument("-o", "--out", metavar="FILE", type=Path, help="write the placement file to FILE")
    place.add_argument("--json", action="store_true", help="one line of JSON")

    new = command(
        "new",
        "write a small, working graph to start from",
        "Write the repository FOLDER: a graph of two Python models, commented, with a test.",
    )
    text = "must not exist; its last component is the graph's name"
    new.add_argument("folder", metavar="FOLDER", type=Path, help=text)

    export = command(
        "export",
        "write manifests that serve a repository in a cluster",
        "Write Kubernetes manifests that serve REPO, a folder or a URL such as s3://BUCKET/FOLDER, into a folder.",
    )
    export.add_argument("kind", metavar="kubernetes", choices=("kubernetes",), help="for which kind of cluster")
    add_repositories(export, "the model repository")
    add_option(export, "--name NAME", "of everything in the cluster; default flowserve", default="flowserve")
    add_option(export, "--image IMAGE", "the server's image; default flowserve:cpu", default="flowserve:cpu")
    text = "the volume claim that has the models, mounted at /models; default models. Not for a repository in a store"
    add_option(export, "--claim NAME", text, default="")
    add_option(export, "--min-replicas N", "default 1", whole_number(0), 1)
    add_option(export, "--max-replicas N", "default 4", whole_number(1), 4)
    export.add_argument("-o", "--output", metavar="FOLDER", type=Path, required=True, help="the manifests' folder")
    add_store_options(export)

    plan = command(
        "build-plan",
        "compile an ONNX file for this machine's GPU, with TensorRT",
        "Build a TensorRT plan from the ONNX file MODEL, on the GPU that is to serve it. Needs TensorRT.",
    )
    plan.add_argument("model", metavar="MODEL", type=Path, help="an ONNX file")
    plan.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="such as REPO/net/1/model.plan")
    text = "smallest, best and largest shapes of the inputs; repeatable, each an optimisation profile"
    add_option(plan, "--profile NAME:MIN:OPT:MAX[,...]", text, profile, repeatable=True)
    plan.add_argument("--fp16", action="store_true", help="compute in FP16 where that is faster (TensorRT 10)")
    add_option(plan, "--workspace-mib MIB", "default: no limit", whole_number(0), 0)
    add_option(plan, "--gpu N", "the GPU to build on; default 0", whole_number(0), 0)

    completion = command(
        "completion",
        "print a script that completes commands and options in a shell",
        "Print the completion script of SHELL. Needs shtab: pip install shtab.",
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser, made


def _refuse_leftovers(parser: argparse.ArgumentParser, leftovers: Sequence[str]) -> None:
    """Report the first unknown argument; an option before a stray word, which may be its value."""
    if not leftovers:
        return
    options = [word for word in leftovers if word.startswith("-")]
    if not options:
        parser.error(f"unexpected argument {leftovers[0]!r}")
    name = options[0].partition("=")[0]
    if name in INSTEAD:
        parser.error(f"{name}: {INSTEAD[name]}")
    if name in NOT_YET:
        parser.error(f"{name}: {missing(NOT_YET[name])}")
    known = [word for action in parser._actions for word in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1)
    parser.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))


def main(arguments: Sequence[str] | None = None, *, replica: str = "") -> int:
    """Run one command. Returns the exit status: 0, 1 for a failure, 2 for a usage error (raised as SystemExit), 130
    after Ctrl-C. `replica`: which of several servers behind a port this process is, "" for none.
    """
    _prepare_streams()
    try:
        status = _main(arguments, replica)
        sys.stdout.flush()
    except FlowserveError as error:
        sys.stderr.write(f"flowserve: {error}\n")
        return 1
    except BrokenPipeError:  # the reader closed the pipe: `| head`
        drop_output(sys.stdout)
        return 1
    except OSError as error:
        if error.errno not in NOT_WRITTEN or error.filename is not None:
            raise
        drop_output(sys.stdout)
        sys.stderr.write(f"flowserve: the output cannot be written: {error.strerror}\n")
        return 1
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # trio wraps it in a group
        if isinstance(error, BaseExceptionGroup) and not error.subgroup(KeyboardInterrupt):
            raise
        return INTERRUPTED
    return status


def _prepare_streams() -> None:
    """Escape characters that the terminal, pipe or locale cannot encode: names come from users."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it lasts as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python's default for standard error


def _main(arguments: Sequence[str] | None, replica: str) -> int:
    parser, subparsers = _parsers()
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if len(words) > 1 and words[0] in QUIET:  # before the command or after it; argparse would forget it before
        words[:2] = words[1], words[0]
    if words and words[0] in subparsers:
        for line in unknown_variables(subparsers.values(), os.environ):
            print(f"flowserve: warning: {line}", file=sys.stderr)
        words[1:1] = from_environment(subparsers[words[0]], os.environ)
    parsed, leftovers = parser.parse_known_args(words)
    if parsed.command is None:
        _refuse_leftovers(parser, leftovers)
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    command = subparsers[parsed.command]
    if parsed.command in ("run", "check", "export"):
        if not any(word.startswith("-") for word in leftovers):
            parsed.repositories += map(repository, leftovers)  # those after an option, which argparse does not consume
            leftovers = []
        parsed.repositories = named_repositories(parsed)
    _refuse_leftovers(command, leftovers)
    required = {"run": "repositories", "check": "repositories", "export": "repositories", "graph": "repository"}.get(
        parsed.command
    )
    if required and not getattr(parsed, required):
        command.error(f"which repository? Say: {command.prog} REPO")
    if parsed.command == "run":
        parsed.words, parsed.replica = words, replica
        return _run(parsed, command)
    if parsed.command == "completion":
        return _print_completion(parser, parsed.shell)
    with silent_interrupts():
        module = import_module(f"flowserve.cli.{parsed.command.replace('-', '_')}")
    status: int = module.execute(parsed, command)
    return status


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        raise Unsupported("completion needs shtab: pip install shtab") from None
    print(shtab.complete(parser, shell))
    return 0


def _run(parsed: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    from flowserve.cli.target import find_graph, is_target, refuse_among

    if wrong := contradiction(parsed):
        command.error(wrong)
    try:
        parsed.mirrors = open_mirrors(parsed)
        refuse_among(parsed.repositories)
        if len(parsed.repositories) == 1 and is_target(parsed.repositories[0]):
            private = find_graph(str(parsed.repositories[0])).write_private()
            parsed.repositories = [private.path]
    except FlowserveError as error:
        from flowserve.cli.check import print_failure

        print_failure("", error)
        return 1
    if parsed.workers > 1 and not parsed.replica:
        with silent_interrupts():
            from flowserve.cli.serving.workers import run_workers

        return run_workers(parsed)
    with silent_interrupts():
        from flowserve.cli.run import run

    return run(parsed)
