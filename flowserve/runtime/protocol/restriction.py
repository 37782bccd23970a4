"""Restricted APIs: groups of calls that require a key, for every protocol.

Decides which groups exist, the syntax of the operator's option, that keys are compared in constant time, and when
errors must not reveal the names of models. Each protocol decides which group a call belongs to, and how it rejects one.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flowserve.errors import Invalid

GROUPS: Final = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
INDEX: Final = "model-repository"  # the group that lists the models


@dataclass(frozen=True, slots=True)
class Restriction:
    """The key of `groups`: the header `name` (lower-case) with exactly `value`."""

    groups: tuple[str, ...]
    name: str
    value: str

    def is_opened_by(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self.value.encode("utf-8"))


def parse_restriction(text: str) -> Restriction:
    """`GROUP[,GROUP...]:HEADER=VALUE`. Raises `Invalid` for other forms."""
    listed, colon, pair = text.partition(":")
    name, equals, value = pair.partition("=")
    if not (colon and equals and name.strip() and value):
        raise Invalid("expected GROUP[,GROUP...]:HEADER=VALUE")
    groups = tuple(one.strip() for one in listed.split(","))
    for group in groups:
        if group not in GROUPS:
            raise Invalid(f"unknown restricted api '{group}'; use {', '.join(GROUPS)}")
    if not (name.isascii() and value.isprintable()):
        raise Invalid("a header's name is ASCII and its value printable")
    return Restriction(groups, name.strip().lower(), value)


def hides_names(restrictions: Iterable[Restriction]) -> bool:
    """Whether the names and errors of models require a key."""
    return INDEX in by_group(restrictions)


def by_group(restrictions: Iterable[Restriction]) -> dict[str, Restriction]:
    """The restriction of each restricted group."""
    return {group: restriction for restriction in restrictions for group in restriction.groups}
