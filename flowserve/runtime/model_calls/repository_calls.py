"""The parameters of calls that load and unload models, independent of the protocol.

Decides which parameters such a call may have, their types, and when a call is allowed. The protocols decide how a
parameter is encoded (base64 in JSON, a field of a message); loading/control.py decides what loading means. Called by
http, grpc and server_requests.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.repository.override import Override

NOT_ALLOWED: Final = "explicit model load / unload is not allowed if polling is enabled"
FILE: Final = "file:"
CONFIG: Final = "config"
UNLOAD_DEPENDENTS: Final = "unload_dependents"


class RepositoryControl(Protocol):
    """Executes these calls (loading/control.py)."""

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


def override(parameters: Mapping[str, Any]) -> Override | None:
    """The configuration and files of a load call, files as bytes. None: the repository's files are used."""
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key.startswith(FILE):
            if not isinstance(value, bytes):
                raise Invalid(f"the parameter '{key[:100]}' holds the file's contents, as bytes")
            files[key.removeprefix(FILE)] = value
        elif key != CONFIG:
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
