"""The formats of pictures by name, and the file suffixes for each. Callers: `cli/graph`, `authoring`, `http`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from flowserve.errors import Invalid
from flowserve.graph.types import Graph
from flowserve.render.html import render_html
from flowserve.render.jsontext import render_json
from flowserve.render.labels import Configs
from flowserve.render.layout import DIRECTIONS, Direction
from flowserve.render.png import render_png
from flowserve.render.scopes import ensembles_of
from flowserve.render.svg import render_svg
from flowserve.render.text import render_dot, render_mermaid, render_text

# Drawings have a direction, and nested ensembles may be folded in them.
DRAWINGS: Final[Mapping[str, Callable[..., str | bytes]]] = {
    "dot": render_dot,
    "mermaid": render_mermaid,
    "svg": render_svg,
    "png": render_png,
    "html": render_html,
}
TEXTS: Final[Mapping[str, Callable[[Graph, Configs], str]]] = {"text": render_text, "json": render_json}
SUFFIXES: Final[Mapping[str, str]] = {
    ".txt": "text",
    ".dot": "dot",
    ".gv": "dot",
    ".mmd": "mermaid",
    ".svg": "svg",
    ".png": "png",
    ".html": "html",
    ".json": "json",
}


def format_of(file: Path) -> str:
    """The format of a file name's suffix. Raises Invalid for an unknown one."""
    if file.suffix in SUFFIXES:
        return SUFFIXES[file.suffix]
    raise Invalid(
        f"'{file.name}' does not say which picture it should hold; name a format, or end it in one of"
        f" {' '.join(SUFFIXES)}"
    )


def render(
    graph: Graph, configs: Configs, picture: str, *, direction: Direction | None = None, fold: bool = False
) -> bytes:
    """A picture as the bytes of its file. `picture` is a key of DRAWINGS or TEXTS. `fold`: each nested ensemble is one
    box. Raises Invalid for an unknown direction, and for a direction or folding of a format that has none.
    """
    if direction not in (None, *DIRECTIONS):
        raise Invalid(f"a picture has the direction {' or '.join(DIRECTIONS)}, not '{direction}'")
    if picture in TEXTS:
        if direction or fold:
            raise Invalid(f"the format {picture} has no {'direction' if direction else 'folding'}; {_SOME} have")
        return TEXTS[picture](graph, configs).encode()
    folded = ensembles_of(graph) if fold else ()
    drawn = DRAWINGS[picture](graph, configs, folded, direction=direction)
    return drawn.encode() if isinstance(drawn, str) else drawn


_SOME: Final = ", ".join(DRAWINGS)
