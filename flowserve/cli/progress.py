"""Output of a server's start: a line per model while it loads, then a table of the served deployments and their URLs.

Decides the wording, and the plain form for logs and pipes; `terminal` has the form for terminals, which imports rich
and is therefore chosen by the caller, `run`. Does not load, wait or listen: only values come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self, TextIO

from flowserve.cli.logs import escape
from flowserve.runtime.engine.deployment import Deployment, Entry
from flowserve.runtime.loading.registry import LoadEvent

HEADINGS: Final = ("deployment", "versions", "what", "batch", "call")


class Progress:
    """Prints one line per event, and the table at the end. Names and reasons come from files, so they are escaped."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, event: LoadEvent) -> None:
        """Called on the event loop for every event of a model while it loads."""
        print(event_line(event), file=self._out, flush=True)

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        """Print the table of served deployments; `url` is the server's."""
        rows = [HEADINGS, *(deployment_row(name, entry) for name, entry in sorted(entries.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        print(f"served at {url}", *lines, sep="\n", file=self._out, flush=True)


def event_line(event: LoadEvent) -> str:
    """One line about the event."""
    took = f" in {event.seconds:.2f} s" if event.seconds else ""
    word = event.state if event.state in ("loading", "ready") else "failed"
    return f"{word:7} {escape(event.name)}{took}"


def deployment_row(name: str, entry: Entry) -> tuple[str, ...]:
    """One row of the table, with the columns of HEADINGS."""
    latest = entry.latest
    if latest is None:
        return escape(name), "-", "not available", "-", "-"
    batch = str(latest.graph.max_batch_size or "-")
    call = f"/v2/models/{escape(name)}/{'generate_stream' if latest.graph.is_decoupled else 'infer'}"
    return escape(name), ", ".join(map(str, entry.versions)), _what(latest), batch, call


def _what(deployment: Deployment) -> str:
    """`graph of 4 steps` for an ensemble, the backend for a model."""
    if not deployment.graph.is_ensemble:
        return deployment.config.backend
    count = len(deployment.graph.nodes)
    return f"graph of {count} {'step' if count == 1 else 'steps'}"
