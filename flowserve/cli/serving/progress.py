"""Output of a server's start: a line per model while it loads, then a table of the served deployments and their URLs;
and the console for tables.

Decides the wording, the plain form for logs and pipes, the appearance on a terminal, and how many names the live line
of loading models shows. rich is imported when a terminal is written to. Does not load, wait or listen: only values come
in. Callers: `run`, `bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Self, TextIO

from flowserve.cli.logs import escape
from flowserve.cli.standard_output import say
from flowserve.runtime.engine.deployments import Deployment, Entry
from flowserve.runtime.loading.registry import LoadEvent

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH: Final = 120
NAMES_MAX: Final = 5  # in the live line, which is redrawn with every line above it
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
        say(event_line(event), out=self._out)

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        """Print the table of served deployments; `url` is the server's."""
        rows = [HEADINGS, *(deployment_row(name, entry) for name, entry in sorted(entries.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        say(f"served at {url}", *lines, out=self._out)


class NoProgress(Progress):
    """Prints nothing."""

    def report(self, event: LoadEvent) -> None:
        pass

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        pass


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
        from rich.text import Text

        if event.state == "loading":
            self._loading[event.name] = None
        else:
            self._loading.pop(event.name, None)
            self._console.print(event_line(event), style="green" if event.state == "ready" else "red")
        self._status.update(Text(loading_line([*self._loading])))

    def served(self, entries: Mapping[str, Entry], url: str) -> None:
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(box=SIMPLE, title=f"served at {url}", title_justify="left", pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, overflow="fold")
        for name, entry in sorted(entries.items()):
            table.add_row(*deployment_row(name, entry), style="red" if entry.latest is None else None)
        self._console.print(table)


def progress_for(out: TextIO, *, is_quiet: bool) -> Progress:
    """What is printed to `out` while a server starts."""
    if is_quiet:
        return NoProgress(out)
    return TerminalProgress(out) if out.isatty() else Progress(out)


def output() -> Console:
    """Standard output as a console. Names and reasons come from files, so nothing in them is interpreted as markup."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=PLAIN_WIDTH, soft_wrap=True)
    return console


def loading_line(names: list[str]) -> str:
    """The models that are loading, shortened to one line."""
    if not names:
        return "reading"
    others = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return "loading " + ", ".join(map(escape, names[:NAMES_MAX])) + others


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
