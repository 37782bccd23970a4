"""What calls that load and unload models may bring along, whichever protocol they came by.

Decided here: which parameters such a call may have and of which type, and who may make one. How a protocol spells a
parameter (base64 in JSON, a field of a message) is decided where it is read; what loading means, in control.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.repository.override import Override

if TYPE_CHECKING:
    from flowserve.runtime.control import Control

NOT_ALLOWED: Final = "explicit model load / unload is not allowed if polling is enabled"
FILE: Final = "file:"
CONFIG: Final = "config"
UNLOAD_DEPENDENTS: Final = "unload_dependents"


def allowed(control: Control | None) -> Control:
    """Who carries such calls out. Raises Unavailable where there is nobody: the engine has no repository."""
    if control is None:
        raise Unavailable(f"{NOT_ALLOWED}; this server was not started from a repository")
    return control


def one_of_several() -> Unsupported:
    """What is said to a call for one of the server's repositories: they are served as one."""
    return Unsupported("'repository_name' specification is not supported")


def override(parameters: Mapping[str, Any]) -> Override | None:
    """What a load call brings along; files are bytes already. None: nothing, the repository's files count."""
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
    """Whether an unload call takes along what its model is made of."""
    for key in parameters:
        if key != UNLOAD_DEPENDENTS:
            raise _unknown(key)
    dependents = parameters.get(UNLOAD_DEPENDENTS, False)
    if not isinstance(dependents, bool):
        raise Invalid(f"the parameter '{UNLOAD_DEPENDENTS}' is true or false")
    return dependents


def _unknown(key: str) -> Invalid:
    return Invalid(f"unexpected error on creating Triton parameter: {key[:100]!r} is not known here")
