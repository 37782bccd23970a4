"""Limits the objects that the garbage collector of a server examines.

Python's collector looks at all objects of the process again whenever a quarter as many new ones have survived, and
blocks the event loop meanwhile: 20 to 40 ms for the objects of a small server, several times a second under load, and
in proportion to the number of deployments. Nearly all of these objects are code and loaded models, which become garbage
only when something is loaded or unloaded. So the objects that survive a full collection after the last such change are
frozen: later collections examine only objects that were created since, mostly by requests. The next change unfreezes
all of them, so that the parts of an unloaded model are found by the next full collection; the number of frozen objects
is bounded by those that survived the last one.

Freezing affects the whole process, so only a server does it, never an engine inside a program. Knows neither models nor
the event loop. Called by cli/run.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Any, Final, Self

_OLDEST: Final = 2


class FrozenHeap:
    """A context in which the objects of loaded models are frozen. Used on one thread."""

    def __init__(self) -> None:
        self._must_freeze = False

    def __enter__(self) -> Self:
        gc.callbacks.append(self._collected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    def changed(self) -> None:
        """Something was loaded or unloaded: nothing is frozen until the next full collection has ended."""
        gc.unfreeze()
        self._must_freeze = True

    def settle(self) -> None:
        """Collect and freeze now. Blocks, in proportion to the objects of the process."""
        self._must_freeze = True
        gc.collect()

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if self._must_freeze and phase == "stop" and info["generation"] == _OLDEST:
            self._must_freeze = False
            gc.freeze()
