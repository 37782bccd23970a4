"""Outputs that a model answers and its configuration does not have: told, so that a slip of the pen is found.

Decided here: what the log says of them, and how often. That they are left out is decided where answers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from flowserve.config.suggest import meant

log = logging.getLogger("flowserve.python")

NAMES_MAX: Final = 100  # some models make names up as they go; nobody's log or memory is filled


class Strays:
    """Those of one instance, which have been told."""

    __slots__ = ("_known", "_model", "_told")

    def __init__(self, model: str, known: Collection[str]) -> None:
        self._model = model
        self._known = known
        self._told: set[str] = set()

    def tell(self, name: str) -> None:
        """Once for each name."""
        if name in self._told or len(self._told) >= NAMES_MAX:
            return
        self._told.add(name)
        text = "model '%s' answered output '%s', which its configuration does not have; it is left out%s"
        log.warning(text, self._model, name, meant(name, self._known))
