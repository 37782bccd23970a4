"""The tint of a node's box by its backend, common to all formats with colours.

Decides the colours: one tint for each backend, the same in every picture where the backend is one of flowserve's own;
other backends get the remaining tints in the order of their names. In a picture with models on other machines the tint
is that of the place: one for the server, and one for each kind of machine, in the order of their names. Does not decide
where a tint is applied. Callers: `svg`, `text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Final

from flowserve.graph.types import Graph
from flowserve.render.labels import UNKNOWN, Configs


@dataclass(frozen=True, slots=True)
class Tint:
    """Fill and outline, for light and for dark surroundings."""

    name: str
    fill: str
    line: str
    dark_fill: str
    dark_line: str


BLUE: Final = Tint("blue", "#ddf4ff", "#0969da", "#12294a", "#4493f8")
GREEN: Final = Tint("green", "#dafbe1", "#1a7f37", "#10311c", "#3fb950")
PURPLE: Final = Tint("purple", "#fbefff", "#8250df", "#2b1d48", "#ab7df8")
TEAL: Final = Tint("teal", "#d7f5f0", "#0a7d72", "#0b302d", "#2fb9aa")
PINK: Final = Tint("pink", "#ffeff7", "#bf3989", "#3a1a2e", "#db61a2")
INDIGO: Final = Tint("indigo", "#e6e9ff", "#4250c9", "#1d2150", "#8a95ff")
CORAL: Final = Tint("coral", "#ffe8df", "#b24a1d", "#3b1f12", "#e88a5f")
AMBER: Final = Tint("amber", "#fff3cd", "#8a6100", "#33280a", "#d9a520")
CYAN: Final = Tint("cyan", "#dff3fa", "#0b6f8f", "#0c2a36", "#49b3d6")
RED: Final = Tint("red", "#ffebe9", "#c4262e", "#3d1214", "#f47067")
OLIVE: Final = Tint("olive", "#eef3cf", "#5c6b00", "#272c0c", "#a3b53a")
SAND: Final = Tint("sand", "#f3ece3", "#7a5c3a", "#2e251b", "#b5916a")
TINTS: Final = (BLUE, GREEN, PURPLE, TEAL, PINK, INDIGO, CORAL, AMBER, CYAN, RED, OLIVE, SAND)
# BLUE is also that of a model whose backend is unknown.
_OF_BACKEND: Final[Mapping[str, Tint]] = {
    "": BLUE,
    "onnxruntime": BLUE,
    "python": GREEN,
    "tensorrt": PURPLE,
    "callable": TEAL,
    "remote": PINK,
    "openvino": INDIGO,
    "pytorch": CORAL,
    "tensorflow": AMBER,
    "fil": CYAN,
    "vllm": RED,
}
_OTHERS: Final = (OLIVE, SAND)


def tints_of(graph: Graph, configs: Configs) -> tuple[Tint, ...]:
    """The tint of each node, by index."""
    places = [configs.get(node.model.name, UNKNOWN).placed for node in graph.nodes]
    if any(places):
        found = dict(zip(sorted(set(places) - {""}), cycle(TINTS[1:]), strict=False))
        return tuple(found[place] if place else BLUE for place in places)
    backends = [configs.get(node.model.name, UNKNOWN).backend for node in graph.nodes]
    others = sorted({backend for backend in backends if backend not in _OF_BACKEND})
    of = {**_OF_BACKEND, **dict(zip(others, cycle(_OTHERS), strict=False))}
    return tuple(of[backend] for backend in backends)
