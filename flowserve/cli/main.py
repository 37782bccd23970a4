"""The command `flowserve`: which words it understands, and what it says when it does not.

Decided here: the commands and the manner of their complaints: one line on standard error, exit status 2. What the
commands do is in the module of each; they are imported when called, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from flowserve.cli.commands import add_commands, run_command
from flowserve.cli.interrupts import INTERRUPTED, silent_interrupts
from flowserve.cli.options import add_config_name, add_run_arguments, contradiction, run_options
from flowserve.cli.refused_options import INSTEAD, NOT_YET
from flowserve.errors import FlowserveError
from flowserve.version import __version__

USAGE_ERROR: Final = 2
NOT_WRITTEN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
PICTURES: Final = ("text", "dot", "mermaid", "svg", "png", "html", "json")  # as in render/formats.py

DESCRIPTION: Final = """\
Serve pipelines of models from a Triton model repository.

A repository is a folder of model folders. Each holds a config.pbtxt and numbered
version folders; a model whose config.pbtxt has an `ensemble_scheduling` block is a
graph of the others.
"""

EXAMPLES: Final = """\
examples:
  flowserve check graphs/                     find every mistake, without serving anything
  flowserve graph graphs/read_text -o g.html  draw it
  flowserve run graphs/                       serve it on http://127.0.0.1:8000
  curl localhost:8000/v2/health/ready         ask whether it is ready
  flowserve infer localhost:8000 read_text --input IMAGE=@page.png
  flowserve new pipeline                      a graph of your own to begin with
  flowserve run --help                        ports, limits, logging
"""

RUN_EXAMPLES: Final = """\
examples:
  flowserve run graphs/                                serve on http://127.0.0.1:8000
  flowserve run steps:graph                            the graph of that name in the Python module steps
  flowserve run graphs/ --http-port 0                  pick a free port; the last line says which
  flowserve run graphs/ --http-address 0.0.0.0         let other machines in; put a gateway in front
  flowserve run graphs/ --exit-on-error false          serve what loads, though some model does not
  flowserve run graphs/ --python-execution inline      no thread between a fast Python model and the loop

SIGTERM or Ctrl-C: no new requests, those under way finish, then it ends with status 0.
Once more: it ends at once.
"""

CHECK_EXAMPLES: Final = """\
examples:
  flowserve check graphs/                     print every problem as file:line:column, or the compiled graphs
  flowserve check graphs/read_text            one deployment of it
  flowserve check graphs/ more/               two repositories that are served together
  flowserve check steps:graph                 a graph of that name in the Python module steps
  flowserve check graphs/ --json              for a program
"""

GRAPH_EXAMPLES: Final = """\
examples:
  flowserve graph graphs/                            every graph as text
  flowserve graph graphs/read_text -o read_text.svg  one of them as a picture; the name says which kind
  flowserve graph graphs/ read_text --format mermaid for a README
  flowserve graph graphs/read_text -o read_text.html nested ensembles fold; works offline
  flowserve graph steps:graph -o steps.svg           a graph of that name in the Python module steps
"""


class _Parser(argparse.ArgumentParser):
    """argparse, except that a complaint is one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """The whole command's parser, and one per subcommand."""
    parser = _Parser(
        prog="flowserve",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flowserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    run = commands.add_parser(
        "run",
        help="load a repository and serve it over HTTP and gRPC",
        description="Load every model of REPO and serve them over HTTP and gRPC (KServe v2, as Triton speaks it).",
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_arguments(run)

    check = commands.add_parser(
        "check",
        help="validate a repository and print its compiled graphs",
        description="Read every configuration of REPO; print all problems with their places, or the compiled graphs.",
        epilog=CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument(
        "repositories",
        metavar="REPO",
        nargs="*",
        type=Path,
        help="a model repository, or several that are served together; or one deployment's folder",
    )
    check.add_argument("--json", action="store_true", help="one line of JSON instead, on standard output")
    add_config_name(check)

    graph = commands.add_parser(
        "graph",
        help="draw the graph of a deployment",
        description="Draw one deployment of REPO (or all of them, as text). Nothing is served, no network is needed.",
        epilog=GRAPH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    graph.add_argument(
        "repository", metavar="PATH", nargs="?", type=Path, help="a model repository, or one deployment's folder of it"
    )
    graph.add_argument("model", metavar="MODEL", nargs="?", default="", help="which deployment of the repository")
    graph.add_argument("--format", choices=PICTURES, help="what the name of FILE says, else text")
    graph.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to, instead of standard output")
    others = add_commands(commands, argparse.RawDescriptionHelpFormatter)
    return parser, {"run": run, "check": check, "graph": graph, **others}


def _refuse_leftovers(parser: argparse.ArgumentParser, leftovers: Sequence[str]) -> None:
    """Complain about the first argument nobody took; an option before a stray word, which may be its value."""
    if not leftovers:
        return
    options = [word for word in leftovers if word.startswith("-")]
    if not options:
        parser.error(f"unexpected argument {leftovers[0]!r}")
    name = options[0].partition("=")[0]
    if name in INSTEAD:
        parser.error(f"{name}: {INSTEAD[name]}")
    if name in NOT_YET:
        parser.error(f"{name}: {NOT_YET[name]} not supported yet")
    known = [word for action in parser._actions for word in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1)
    parser.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for a failure, 2 for a misuse (raised as SystemExit), 130
    after Ctrl-C.
    """
    _prepare_streams()
    try:
        status = _main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads it has seen enough: `| head`
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in NOT_WRITTEN or error.filename is not None:
            raise
        _drop_output()
        sys.stderr.write(f"flowserve: the output cannot be written: {error.strerror}\n")
        return 1
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # which trio puts into a group
        if isinstance(error, BaseExceptionGroup) and not error.subgroup(KeyboardInterrupt):
            raise
        return INTERRUPTED
    return status


def _prepare_streams() -> None:
    """Names come from users, and not every terminal, pipe or locale has their characters: those are escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell's `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it lasts as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for standard error


def _has_color() -> bool:
    """Whether complaints may be coloured: https://no-color.org is what other tools keep to."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _drop_output() -> None:
    """Or Python complains when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(arguments: Sequence[str] | None) -> int:
    parser, subparsers = _parsers()
    parsed, leftovers = parser.parse_known_args(arguments)
    if parsed.command is None:
        _refuse_leftovers(parser, leftovers)
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    command = subparsers[parsed.command]
    if parsed.command in ("run", "check"):
        if not any(word.startswith("-") for word in leftovers):
            parsed.repositories += map(Path, leftovers)  # those behind an option, which argparse leaves over
            leftovers = []
        parsed.repository = parsed.repositories[0] if len(parsed.repositories) == 1 else Path()
    _refuse_leftovers(command, leftovers)
    if parsed.command in ("infer", "bench", "new", "build-plan"):
        return run_command(parsed, command)
    if not (parsed.repository if parsed.command == "graph" else parsed.repositories):
        command.error(f"which repository? Say: {command.prog} REPO")
    match parsed.command:
        case "run":
            return _run(parsed, command)
        case "graph":
            with silent_interrupts():
                from flowserve.cli.graph import GraphOptions, draw

            options = GraphOptions(parsed.repository, parsed.model, parsed.format or "", parsed.output)
            return draw(options, sys.stderr, color=_has_color())
        case _:
            with silent_interrupts():
                from flowserve.cli.check import check

            return check(
                parsed.repositories,
                sys.stdout,
                sys.stderr,
                color=_has_color(),
                config_name=parsed.model_config_name or "",
                as_json=parsed.json,
            )


def _run(parsed: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    from flowserve.cli.target import find_graph, is_target, refuse_among

    if wrong := contradiction(parsed):
        command.error(wrong)
    try:
        refuse_among(parsed.repositories)
        if is_target(parsed.repository):
            private = find_graph(str(parsed.repository)).write_private()
            parsed.repositories = [private.path]
    except FlowserveError as error:
        from flowserve.cli.check import Printer

        Printer(sys.stderr, _has_color()).failure("", error)
        return 1
    return _serve(parsed)


def _serve(parsed: argparse.Namespace) -> int:
    with silent_interrupts():
        from flowserve.cli.run import run

    return run(run_options(parsed))
