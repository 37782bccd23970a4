"""Outputs in which a model and its configuration differ: told, so that a slip of the pen is found.

Decided here: what the log says of outputs that a model answers and its configuration does not have, of those that
it has and a model leaves out, of those whose type or shape is another, and of what is no tensor at all; and how often.
That the first go no further, that a request is answered without the second, as on Triton, and that it fails for the
others is decided where answers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from flowserve.config.suggest import meant
from flowserve.errors import FlowserveError

log = logging.getLogger("flowserve.python")

NAMES_MAX: Final = 100  # some models make names up as they go; nobody's log or memory is filled


class Strays:
    """Those of one instance, which have been told."""

    __slots__ = ("_known", "_missed", "_model", "_told", "_unlike")

    def __init__(self, model: str, known: Collection[str]) -> None:
        self._model = model
        self._known = known
        self._told: set[str] = set()
        self._missed: set[str] = set()
        self._unlike: set[str] = set()

    def tell(self, name: object) -> None:
        """Once for each name, which a model's author may have made of anything."""
        name = str(name)
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

    def unlike(self, name: str, error: FlowserveError) -> None:
        """An output was of another type or shape than is configured: `error` is what those hear who asked. Told once
        for each name: their requests fail, and whoever wrote the model may be none of them.
        """
        if name not in self._unlike:
            self._unlike.add(name)
            log.error("%s", error)
