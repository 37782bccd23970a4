"""What models ask of the server besides calling others: to load and unload models, whether one is ready, metrics.

Decided here: which of it there is, that it follows the rules of the repository's own calls, and that a load that the
load of its own asker would have to wait for is refused. Whoever asks may be other people's code in a process of its
own, so what it says is checked. How it comes here is decided in calls.py and process_calls.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowserve.backends.base import IS_READY, LOAD, METRIC, METRIC_VALUE, OPEN_FAMILY, UNLOAD
from flowserve.errors import FlowserveError, Internal, Invalid, NotFound, Unavailable
from flowserve.observe.model_metrics import Cells, ModelMetrics, cells_of, check_buckets, check_labels
from flowserve.runtime.repository_calls import CONFIG, allowed, override

if TYPE_CHECKING:
    from flowserve.runtime.control import Control
    from flowserve.runtime.engine import Engine

log = logging.getLogger("flowserve.runtime")

_TYPES: Final[Mapping[str, tuple[Any, ...]]] = {
    LOAD: (str, str),
    UNLOAD: (str, bool),
    IS_READY: (str, str),
    OPEN_FAMILY: (str, str, str),
    METRIC: (int, dict, (list, tuple, type(None))),
    METRIC_VALUE: (int, dict),
}
Answered = Callable[[Any], None]


class Asks:
    """One for an engine. Touched on its loop, but for what says otherwise."""

    def __init__(self, engine: Engine) -> None:
        self.metrics = ModelMetrics()
        self.control: Control | None = None  # once there is one
        self._engine = engine

    def begin(
        self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes], loads: str, answered: Answered
    ) -> None:
        """Do it; `answered` hears the answer, or the FlowserveError. `loads`: the model that asks while it is loaded
        itself, "" for one that serves.
        """
        try:
            if what in (LOAD, UNLOAD):
                self._operate(what, *_checked(what, arguments), files=files, loads=loads, answered=answered)
                return
            answer = self.is_ready(*_checked(what, arguments)) if what == IS_READY else self.answer(what, arguments)
        except FlowserveError as error:
            answered(error.with_traceback(None))  # its frames hold what runs here, and are nobody's business elsewhere
        except Exception as error:  # raised further it would end the server
            log.exception("what a model asked for (%s) failed", what)
            answered(Internal(f"what was asked ({what}) failed: {type(error).__name__}: {error}"))
        else:
            answered(answer)

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What is asked of metrics. On any thread. Raises FlowserveError."""
        given = _checked(what, arguments)
        if what == OPEN_FAMILY:
            return self.metrics.open(*given)
        if what == METRIC_VALUE:
            return self.metrics.value(given[0], check_labels(given[1]))
        raise Invalid(f"nobody knows how to answer {what[:100]!r}")

    def show(self, arguments: Sequence[Any], cells: Cells) -> None:
        """Show a metric that is counted there. On any thread. Raises FlowserveError."""
        family, labels, buckets = _checked(METRIC, arguments)
        kind = self.metrics.kind_of(family)
        edges = check_buckets(kind, buckets)
        if len(cells) != cells_of(kind, edges):
            raise Invalid(f"a {kind} is not counted in {len(cells)} cells")
        self.metrics.add(family, check_labels(labels), edges, cells)

    def is_ready(self, name: str, version: str) -> bool:
        """Whether it would be served now. False for what is not known. Raises Invalid for a version that is none."""
        try:
            return not self._engine.outage(self._engine.find(name, version))
        except (NotFound, Unavailable):
            return False

    def _operate(
        self, what: str, name: str, detail: Any, *, files: Mapping[str, bytes], loads: str, answered: Answered
    ) -> None:
        control = allowed(self.control)
        if what == LOAD:
            brought = override({**({CONFIG: detail} if detail else {}), **files})
            control.post(lambda: control.load(name, brought, loads=loads), answered)
        else:
            control.post(lambda: control.retire(name, dependents=detail, loads=loads), answered)


def _checked(what: str, arguments: Sequence[Any]) -> Sequence[Any]:
    types = _TYPES.get(what)
    if types is None:
        raise Invalid(f"nobody knows how to answer {what[:100]!r}")
    if len(arguments) != len(types) or not all(isinstance(*pair) for pair in zip(arguments, types, strict=True)):
        raise Invalid(f"what was asked ({what}) has arguments of other types")
    return arguments
