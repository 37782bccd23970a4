"""Which names request parameters may have, and headers that become parameters.

Decided here: the names that mean something to the protocol, those that are kept for it, that a header's name fits a
pattern as a whole (it arrives lower-case, as HTTP has it), and that a parameter of the request's own wins.
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
BINARY_OUTPUT: Final = "binary_data_output"  # over HTTP; gRPC has it no other way
_KEPT_NAMES: Final = 1024


def reserved(key: str) -> Invalid:
    """What is said of a parameter whose name begins as the protocol's own do."""
    return Invalid(
        f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage and should not be specified "
        f"(found '{key}')"
    )


def forwarding_of(pattern: re.Pattern[str] | None, option: str) -> Forwarding | None:
    """None where the operator gave no pattern."""
    return None if pattern is None else Forwarding(pattern, option)


class Forwarding:
    """`option` is what the operator said, for those who read of a header that cannot go along."""

    def __init__(self, pattern: re.Pattern[str], option: str) -> None:
        self._option = option
        # Clients send the same few names again and again.
        self._is_forwarded: Callable[[str], bool] = lru_cache(_KEPT_NAMES)(
            lambda name: pattern.fullmatch(name) is not None
        )

    def add(self, request: Request, headers: Iterable[tuple[str, str]]) -> None:
        """Put the headers that fit among the request's parameters. Raises Invalid for a name that means something."""
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
