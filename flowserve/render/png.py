"""A compiled graph as a PNG, for chats, slides and terminals that show pictures: the SVG, rasterised.

Decides the resolution, and the font: `assets/fonts` has one for the letters of most European languages, so that the
picture is the same on machines without fonts; other letters come from the machine's fonts. resvg, which rasterises, is
optional and imported only here.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final
from xml.etree import ElementTree

from flowserve.errors import Unsupported
from flowserve.graph.types import Graph
from flowserve.render.labels import Configs
from flowserve.render.layout import Direction
from flowserve.render.svg import ASSETS, LIGHT_STYLE, render_svg

SCALE: Final = 2.0
PIXELS_MAX: Final = 80_000_000  # about 320 MB while drawing; a larger drawing gets a lower resolution
FONT: Final = "DejaVu Sans Mono"


def render_png(
    graph: Graph, configs: Configs, folded: Container[str] = (), *, direction: Direction | None = None
) -> bytes:
    """The bytes of a PNG file, in light colours; `folded` and `direction` as for `render_svg`. Raises Unsupported if
    resvg is not installed.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise Unsupported(
            "a PNG needs resvg, which is not installed: pip install 'flowserve[pictures]' (SVG needs nothing)"
        ) from None
    svg = render_svg(graph, configs, folded, style=LIGHT_STYLE, direction=direction)
    drawn = ElementTree.fromstring(svg)
    pixels = int(drawn.attrib["width"]) * int(drawn.attrib["height"])
    return svg_to_bytes(
        svg_string=svg,
        zoom=min(SCALE, (PIXELS_MAX / pixels) ** 0.5),
        font_files=[str(file) for file in sorted((ASSETS / "fonts").glob("*.ttf"))],
        font_family=FONT,
        monospace_family=FONT,
    )
