"""Outputs in which a model and its configuration differ: told, so that a slip of the pen is found.

Decided here: what the log says of outputs that a model answers and its configuration does not have, and of those that
it has and a model leaves out; and how often. That the former go no further and that a request is answered without the
latter, as on Triton, is decided where answers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from flowserve.config.suggest import meant

log = logging.getLogger("flowserve.python")

NAMES_MAX: Final = 100  # some models make names up as they go; nobody's log or memory is filled


class Strays:
    """Those of one instance, which have been told."""

    __slots__ = ("_known", "_missed", "_model", "_told")

    def __init__(self, model: str, known: Collection[str]) -> None:
        self._model = model
        self._known = known
        self._told: set[str] = set()
        self._missed: set[str] = set()

    def tell(self, name: str) -> None:
        """Once for each name."""
        if name in self._told or len(self._told) >= NAMES_MAX:
            return
        self._told.add(name)
        text = "model '%s' answered output '%s', which its configuration does not have; it is left out%s"
        log.warning(text, self._model, name, meant(name, self._known))

    def left_out(self, name: str, wanted: Iterable[Collection[str]]) -> None:
        """Somebody was answered without an output that is configured. `wanted` are the names that each of them asked
        for. Told once for each name.
        """
        if name in self._missed or not any(name in names for names in wanted):
            return
        self._missed.add(name)
        text = (
            "model '%s' left out output '%s', which its configuration has and a request asked for; the answer lacks it"
        )
        log.warning(text, self._model, name)
