"""What the operator sees of a start: a line per model while it loads, then a table of what is served and where.

Decided here: the wording and look, on a terminal (a live line of what is loading) and off it (plain lines for a log).
Only values come in; nothing here loads, waits or listens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from flowserve.cli.logs import escape
from flowserve.runtime.deployment import Deployment, Entry
from flowserve.runtime.registry import LoadEvent

PLAIN_WIDTH = 120


def output() -> Console:
    """Standard output. Names and reasons come from files, so nothing in them is taken as markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=PLAIN_WIDTH, soft_wrap=True)
    return console


class Progress:
    """Prints one line per event; on a terminal, also keeps a last line that names what is still loading."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._loading: list[str] = []
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("reading")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def report(self, event: LoadEvent) -> None:
        """Called on the event loop for everything that happens to a model while loading."""
        name = escape(event.name)
        match event.state:
            case "loading":
                self._loading.append(name)
                if self._status is None:
                    self._console.print(f"loading {name}")
            case "ready":
                self._done(name)
                took = f" in {event.seconds:.2f} s" if event.seconds else ""
                self._console.print(f"ready   {name}{took}", style="green")
            case _:
                self._done(name)
                self._console.print(f"failed  {name}", style="red")
        if self._status is not None:
            self._status.update(Text("loading " + ", ".join(self._loading) if self._loading else "reading"))

    def _done(self, name: str) -> None:
        if name in self._loading:
            self._loading.remove(name)


def served_table(entries: Mapping[str, Entry], url: str) -> Table:
    """One row per name: what it is, its versions, what it takes and gives, and the path to call."""
    table = Table(box=SIMPLE, title=f"served at {url}", title_justify="left", pad_edge=False)
    for heading in ("deployment", "versions", "what", "batch", "call"):
        table.add_column(heading, overflow="fold")
    for name, entry in sorted(entries.items()):
        latest = entry.latest
        if latest is None:
            table.add_row(escape(name), "-", "not available", "-", "-", style="red")
            continue
        table.add_row(
            escape(name),
            ", ".join(map(str, entry.versions)),
            _what(latest),
            str(latest.graph.max_batch_size or "-"),
            f"/v2/models/{escape(name)}/infer",
        )
    return table


def _what(deployment: Deployment) -> str:
    """`graph of 4 models` for an ensemble, the backend for a model."""
    if not deployment.graph.is_ensemble:
        return deployment.config.backend
    count = len(deployment.graph.nodes)
    return f"graph of {count} {'step' if count == 1 else 'steps'}"
