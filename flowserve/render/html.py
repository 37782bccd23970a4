"""A compiled graph as one HTML page: nested ensembles fold and unfold; a table below lists each step.

Decides the page, which is self-contained and works with the keyboard: the picture is zoomed and moved in its window
(`assets/view.js`), with a map of the whole while only a part is visible. It has one picture for each state of folding,
all drawn by `svg` in advance; the script only selects the visible one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from html import escape
from typing import Final

from flowserve.graph.types import Graph
from flowserve.render.labels import UNKNOWN, Configs, kind, model_lines, title
from flowserve.render.layout import Direction, direction_of
from flowserve.render.scopes import ensembles_of
from flowserve.render.svg import ASSETS, STYLE, render_svg

# Up to this number there is a picture for each nested ensemble; beyond it only all open and all folded.
PICTURES_MAX: Final = 40

PAGE_STYLE: Final = "".join(
    line for file in ("page.css", "view.css") for line in (ASSETS / file).read_text("utf-8").splitlines()
)
SCRIPT: Final = "".join((ASSETS / file).read_text("utf-8") for file in ("view.js", "page.js"))


def render_html(
    graph: Graph, configs: Configs, folded: Container[str] = (), *, direction: Direction | None = None
) -> str:
    """The text of an HTML file. With `folded` paths of all nested ensembles, it is shown folded at first. `direction`
    None: that of the completely unfolded picture.
    """
    head = escape(title(graph, configs))
    fold = " data-fold" if any(path in folded for path in ensembles_of(graph)) else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{head}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body{fold}>\n<h1>{head}</h1>\n"
        + "".join(_pictures(graph, configs, direction or direction_of(graph, configs)))
        + "".join(_table(graph, configs))
        + f"<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _pictures(graph: Graph, configs: Configs, direction: Direction) -> Iterator[str]:
    """The pictures; the completely unfolded one is first, so that a reader without scripts sees everything."""

    def picture(name: str, folded: Container[str]) -> str:
        mark = f'<svg data-open="{escape(name)}"{"" if name == "*" else " hidden"} '
        return render_svg(graph, configs, folded, style="", direction=direction).replace("<svg ", mark, 1)

    paths = ensembles_of(graph)
    yield '<p class="bar" hidden>'
    if paths:
        yield '<button data-show="*">unfold all</button><button data-show="">fold all</button>'
    yield '<button data-zoom="0.8" aria-label="smaller">-</button><button data-zoom="1" data-scale>100 %</button>'
    yield '<button data-zoom="1.25" aria-label="larger">+</button><button data-zoom="fit">fit</button></p>\n'
    yield '<div class="window"><div class="picture" tabindex="0" role="region" aria-label="picture of the graph">\n'
    yield picture("*", ())
    if paths:
        yield picture("", paths)
    for path in paths if len(paths) <= PICTURES_MAX else ():
        yield picture(path, {other for other in paths if not f"{path}/".startswith(f"{other}/")})
    yield "</div></div>\n"


def _table(graph: Graph, configs: Configs) -> Iterator[str]:
    yield "<table>\n<thead><tr><th>step</th><th>model</th><th>reads</th><th>writes</th></tr></thead>\n<tbody>\n"
    for node in graph.nodes:
        model = model_lines(node, configs.get(node.model.name, UNKNOWN))
        tensors = ([f"{spec.name} {kind(spec)}" for spec in specs] for specs in (node.inputs, node.outputs))
        cells = [node.name, *map("\n".join, (model, *tensors))]
        yield f"<tr>{''.join(f'<td><code>{escape(cell)}</code></td>' for cell in cells)}</tr>\n"
    yield "</tbody>\n</table>\n"
