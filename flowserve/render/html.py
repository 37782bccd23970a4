"""A compiled graph as one HTML page: nested ensembles fold and unfold; a table below lists each step.

Decides the page, which is self-contained and works with the keyboard. It has one picture for each state of folding, all
drawn by `svg` in advance; the script only selects the visible one.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from flowserve.graph.types import Graph
from flowserve.render.labels import UNKNOWN, Configs, kind, model_lines, title
from flowserve.render.scopes import scopes_of
from flowserve.render.svg import ASSETS, STYLE, render_svg

# Up to this number there is a picture for each nested ensemble; beyond it only all open and all folded.
PICTURES_MAX: Final = 40

PAGE_STYLE: Final = "".join((ASSETS / "page.css").read_text("utf-8").splitlines())
SCRIPT: Final = (ASSETS / "page.js").read_text("utf-8")


def render_html(graph: Graph, configs: Configs) -> str:
    """The text of an HTML file."""
    head = escape(title(graph, configs))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{head}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>\n<h1>{head}</h1>\n"
        + "".join(_pictures(graph, configs))
        + "".join(_table(graph, configs))
        + f"<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _pictures(graph: Graph, configs: Configs) -> Iterator[str]:
    """The pictures; the completely unfolded one is first, so that a reader without scripts sees everything."""
    paths = [scope.path for scope in scopes_of(graph).walk()]
    yield '<p class="bar" hidden>'
    if paths:
        yield '<button data-show="*">unfold all</button><button data-show="">fold all</button>'
    yield "<button data-fit>fit to the window, or not</button></p>\n"
    yield _picture(graph, configs, "*", set())
    if paths:
        yield _picture(graph, configs, "", set(paths))
    for path in paths if len(paths) <= PICTURES_MAX else ():
        yield _picture(graph, configs, path, {other for other in paths if not f"{path}/".startswith(f"{other}/")})


def _picture(graph: Graph, configs: Configs, name: str, folded: set[str]) -> str:
    hidden = "" if name == "*" else " hidden"
    svg = render_svg(graph, configs, folded, style="")
    return f'<div class="picture" data-open="{escape(name)}"{hidden}>\n{svg}</div>\n'


def _table(graph: Graph, configs: Configs) -> Iterator[str]:
    yield "<table>\n<thead><tr><th>step</th><th>model</th><th>reads</th><th>writes</th></tr></thead>\n<tbody>\n"
    for node in graph.nodes:
        model = model_lines(node, configs.get(node.model.name, UNKNOWN))
        tensors = ([f"{spec.name} {kind(spec)}" for spec in specs] for specs in (node.inputs, node.outputs))
        cells = [node.name, *map("\n".join, (model, *tensors))]
        yield f"<tr>{''.join(f'<td><code>{escape(cell)}</code></td>' for cell in cells)}</tr>\n"
    yield "</tbody>\n</table>\n"
