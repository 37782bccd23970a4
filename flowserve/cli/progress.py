"""What the operator sees of a start: a line per model while it loads, then a table of what is served and where.

Decided here: the wording, and that a terminal is told in its own way (terminal.py) and everything else in plain lines
for a log, so that a server nobody watches does not import what draws on terminals. Only values come in; nothing here
loads, waits or listens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, Self, TextIO

from flowserve.cli.logs import escape
from flowserve.runtime.deployment import Deployment, Entry
from flowserve.runtime.registry import LoadEvent

HEADINGS: Final = ("deployment", "versions", "what", "batch", "call")


class Progress:
    """Prints one line per event, and the table in the end. Names and reasons come from files: they are escaped."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, event: LoadEvent) -> None:
        """Called on the event loop for everything that happens to a model while loading."""
        print(line_of(event), file=self._out, flush=True)

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        """What is served under which name, and where."""
        rows = [HEADINGS, *(row_of(name, entry) for name, entry in sorted(entries.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        print(f"served at {url}", *lines, sep="\n", file=self._out, flush=True)


def progress() -> Progress:
    """On standard output, as suits it."""
    if not sys.stdout.isatty():
        return Progress(sys.stdout)
    from flowserve.cli.terminal import TerminalProgress

    return TerminalProgress(sys.stdout)


def line_of(event: LoadEvent) -> str:
    """What happened, in one line."""
    took = f" in {event.seconds:.2f} s" if event.seconds else ""
    word = event.state if event.state in ("loading", "ready") else "failed"
    return f"{word:7} {escape(event.name)}{took}"


def row_of(name: str, entry: Entry) -> tuple[str, ...]:
    """One name: what it is, its versions, what it takes and gives, and the path to call."""
    latest = entry.latest
    if latest is None:
        return escape(name), "-", "not available", "-", "-"
    batch = str(latest.graph.max_batch_size or "-")
    call = f"/v2/models/{escape(name)}/{'generate_stream' if latest.graph.is_decoupled else 'infer'}"
    return escape(name), ", ".join(map(str, entry.versions)), _what(latest), batch, call


def _what(deployment: Deployment) -> str:
    """`graph of 4 models` for an ensemble, the backend for a model."""
    if not deployment.graph.is_ensemble:
        return deployment.config.backend
    count = len(deployment.graph.nodes)
    return f"graph of {count} {'step' if count == 1 else 'steps'}"
