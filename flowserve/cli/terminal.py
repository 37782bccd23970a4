"""Output of a server's start on a terminal, and the console for tables. The only module of `flowserve run` with rich.

Decides the appearance, and how many names the live line of loading models shows. Does not know the wording
(`progress`). Callers: `run`, `bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self, TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowserve.cli.logs import escape
from flowserve.cli.progress import HEADINGS, Progress, deployment_row, event_line
from flowserve.runtime.engine.deployment import Entry
from flowserve.runtime.loading.registry import LoadEvent

PLAIN_WIDTH: Final = 120
NAMES_MAX: Final = 5  # in the live line, which is redrawn with every line above it


def output() -> Console:
    """Standard output as a console. Names and reasons come from files, so nothing in them is interpreted as markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=PLAIN_WIDTH, soft_wrap=True)
    return console


class TerminalProgress(Progress):
    """Coloured lines, and a last line that names the models that are still loading."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._console = output()
        self._status = self._console.status("reading")
        self._loading: dict[str, None] = {}  # in the order of their start

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def report(self, event: LoadEvent) -> None:
        if event.state == "loading":
            self._loading[event.name] = None
        else:
            self._loading.pop(event.name, None)
            self._console.print(event_line(event), style="green" if event.state == "ready" else "red")
        self._status.update(Text(loading_line([*self._loading])))

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        table = Table(box=SIMPLE, title=f"served at {url}", title_justify="left", pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, overflow="fold")
        for name, entry in sorted(entries.items()):
            table.add_row(*deployment_row(name, entry), style="red" if entry.latest is None else None)
        self._console.print(table)


def loading_line(names: list[str]) -> str:
    """The models that are loading, shortened to one line."""
    if not names:
        return "reading"
    others = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return "loading " + ", ".join(map(escape, names[:NAMES_MAX])) + others
