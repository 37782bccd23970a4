"""The names that request parameters may have, and headers that become parameters.

Decides which names the protocol uses or reserves, that a pattern must match a header's whole name (in lower case, as
HTTP passes it), and that a request's own parameter takes precedence over a header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from flowserve.errors import Invalid
from flowserve.values import Request

RESERVED_PREFIX: Final = "triton_"
KNOWN_PARAMETERS: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"})
BINARY_OUTPUT: Final = "binary_data_output"  # in HTTP only
_KEPT_NAMES: Final = 1024


def reserved(key: str) -> Invalid:
    """The error for a parameter whose name begins with the reserved prefix."""
    return Invalid(
        f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage and should not be specified "
        f"(found '{key}')"
    )


def forwarding_of(pattern: re.Pattern[str] | None, option: str) -> Forwarding | None:
    """None if the operator gave no pattern."""
    return None if pattern is None else Forwarding(pattern, option)


class Forwarding:
    """Adds headers to the parameters of a request. `option`: the operator's option, for error messages."""

    def __init__(self, pattern: re.Pattern[str], option: str) -> None:
        self._option = option
        # Clients send few distinct names.
        self._is_forwarded: Callable[[str], bool] = lru_cache(_KEPT_NAMES)(
            lambda name: pattern.fullmatch(name) is not None
        )

    def add(self, request: Request, headers: Iterable[tuple[str, str]]) -> None:
        """Add the matching headers to the request's parameters. Raises Invalid for a header with a reserved name."""
        forwarded: dict[str, str] = {}
        for name, value in headers:
            if self._is_forwarded(name):
                if name in KNOWN_PARAMETERS or name == BINARY_OUTPUT or name.startswith(RESERVED_PREFIX):
                    raise Invalid(
                        f"the header '{name}' cannot be forwarded: as a parameter this name is reserved "
                        f"({self._option})"
                    )
                forwarded[name] = value
        if forwarded:
            request.parameters = {**forwarded, **request.parameters}
