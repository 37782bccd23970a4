"""Requests to the server other than inference: load and unload models, readiness of a model, metrics.

Decides which of these a model may make, which parameters a load or unload has in any protocol, their types, when it is
allowed, and that a load that would wait for the load of its own caller is refused. The caller may be third-party code
in a process of its own, so all arguments are checked. `calls.py` and `remote_calls.py` decide how the requests of
models arrive, the protocols how a parameter is encoded (base64 in JSON, a field of a message), loading/control.py what
loading means. Called by http, grpc and the modules of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from flowserve.backends.base import IS_READY, LOAD, METRIC, METRIC_VALUE, OPEN_FAMILY, UNLOAD
from flowserve.errors import FlowserveError, Internal, Invalid, NotFound, Unavailable, Unsupported
from flowserve.observe.model_metrics import Cells, ModelMetrics, cells_of, check_buckets, check_labels
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.repository.override import Override

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


class ServerRequests:
    """The requests of an engine's models. Used on its event loop, unless stated otherwise. `is_ready`: whether a model
    is ready, by name and version.
    """

    def __init__(self, is_ready: Callable[[str, str], bool]) -> None:
        self.metrics = ModelMetrics()
        self.control: RepositoryControl | None = None  # None for an engine without a repository
        self._is_ready = is_ready

    def begin(
        self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes], loads: str, answered: Answered
    ) -> None:
        """Execute a request; `answered` receives the reply or the FlowserveError. `loads`: the name of the caller if it
        is being loaded, else "".
        """
        try:
            if what in (LOAD, UNLOAD):
                name, detail = _checked(what, arguments)
                control = allowed(self.control)
                if what == LOAD:
                    brought = override({**({CONFIG: detail} if detail else {}), **files})
                    control.post(lambda: control.load(name, brought, loads=loads), answered)
                else:
                    control.post(lambda: control.retire(name, dependents=detail, loads=loads), answered)
                return
            answer = self.is_ready(*_checked(what, arguments)) if what == IS_READY else self.answer(what, arguments)
        except FlowserveError as error:
            answered(error.with_traceback(None))  # its frames keep objects alive
        except Exception as error:  # if it propagated, the server would end
            log.exception("what a model asked for (%s) failed", what)
            answered(Internal(f"what was asked ({what}) failed: {type(error).__name__}: {error}"))
        else:
            answered(answer)

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """Execute a request about metrics. On any thread. Raises FlowserveError."""
        given = _checked(what, arguments)
        if what == OPEN_FAMILY:
            return self.metrics.open(*given)
        if what == METRIC_VALUE:
            return self.metrics.value(given[0], check_labels(given[1]))
        raise Invalid(f"unknown question {what[:100]!r}")

    def show(self, arguments: Sequence[Any], cells: Cells) -> None:
        """Add a metric whose values are in `cells`. On any thread. Raises FlowserveError."""
        family, labels, buckets = _checked(METRIC, arguments)
        kind = self.metrics.kind_of(family)
        edges = check_buckets(kind, buckets)
        if len(cells) != cells_of(kind, edges):
            raise Invalid(f"a {kind} is not counted in {len(cells)} cells")
        self.metrics.add(family, check_labels(labels), edges, cells)

    def is_ready(self, name: str, version: str) -> bool:
        """Whether the model is ready. False for an unknown one. Raises Invalid for an invalid version."""
        try:
            return self._is_ready(name, version)
        except (NotFound, Unavailable):
            return False


def _checked(what: str, arguments: Sequence[Any]) -> Sequence[Any]:
    types = _TYPES.get(what)
    if types is None:
        raise Invalid(f"unknown question {what[:100]!r}")
    if len(arguments) != len(types) or not all(isinstance(*pair) for pair in zip(arguments, types, strict=True)):
        raise Invalid(f"what was asked ({what}) has arguments of other types")
    return arguments


NOT_ALLOWED: Final = "explicit model load / unload is not allowed if polling is enabled"
FILE: Final = "file:"
CONFIG: Final = "config"
UNLOAD_DEPENDENTS: Final = "unload_dependents"
FILES_MAX: Final = 10_000  # of one load call; each takes about 0.2 ms, most of it to create the file


class RepositoryControl(Protocol):
    """Executes these calls (loading/control.py)."""

    @property
    def mirrors(self) -> Sequence[RepositoryMirror]: ...

    def post(self, make: Callable[[], Awaitable[Any]], answered: Callable[[Any], None]) -> None: ...
    def load(self, name: str, override: Override | None = None, *, loads: str = "") -> Awaitable[Any]: ...
    def retire(self, name: str, *, dependents: bool = False, loads: str = "") -> Awaitable[Any]: ...


C = TypeVar("C")


def allowed(control: C | None) -> C:
    """The control that executes these calls. Raises Unavailable for an engine without a repository."""
    if control is None:
        raise Unavailable(f"{NOT_ALLOWED}; this server was not started from a repository")
    return control


def one_of_several() -> Unsupported:
    """The error for a call that names one of the server's repositories: they are served as one."""
    return Unsupported("'repository_name' specification is not supported")


def file_keys(parameters: Mapping[str, Any]) -> list[str]:
    """The parameters of a load call that hold files. Raises Invalid if they are too many."""
    keys = [key for key in parameters if key.startswith(FILE)]
    if len(keys) > FILES_MAX:
        remedy = "put the model into the repository instead"
        raise Invalid(f"a load call has at most {FILES_MAX} 'file:' parameters, and this one has {len(keys)}; {remedy}")
    return keys


def override(parameters: Mapping[str, Any]) -> Override | None:
    """The configuration and files of a load call, files as bytes. None: the repository's files are used."""
    files: dict[str, bytes] = {}
    for key in file_keys(parameters):
        if not isinstance(parameters[key], bytes):
            raise Invalid(f"the parameter '{key[:100]}' holds the file's contents, as bytes")
        files[key.removeprefix(FILE)] = parameters[key]
    for key in parameters:
        if key != CONFIG and not key.startswith(FILE):
            raise _unknown(key)
    config = parameters.get(CONFIG, "")
    if not isinstance(config, str):
        raise Invalid("the parameter 'config' is a string that holds the configuration as JSON")
    return Override(config, files) if config or files else None


def unload_dependents(parameters: Mapping[str, Any]) -> bool:
    """Whether an unload call also unloads the model's steps."""
    for key in parameters:
        if key != UNLOAD_DEPENDENTS:
            raise _unknown(key)
    dependents = parameters.get(UNLOAD_DEPENDENTS, False)
    if not isinstance(dependents, bool):
        raise Invalid(f"the parameter '{UNLOAD_DEPENDENTS}' is true or false")
    return dependents


def _unknown(key: str) -> Invalid:
    return Invalid(f"unexpected error on creating Triton parameter: {key[:100]!r} is not known here")
