"""Groups of calls that answer only to those who have their key, whichever protocol they come by.

Decided here: which groups there are, how the operator says which of them have which key, that keys are compared in
constant time, and when errors keep to themselves which models there are. Which call belongs to which group, and how one
without its key is turned away, each protocol decides.
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
INDEX: Final = "model-repository"  # the group that tells which models there are


@dataclass(frozen=True, slots=True)
class Restriction:
    """What `groups` answer to: the header `name` (lower-case) with exactly `value`."""

    groups: tuple[str, ...]
    name: str
    value: str

    def is_opened_by(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self.value.encode("utf-8"))


def parse_restriction(text: str) -> Restriction:
    """`GROUP[,GROUP...]:HEADER=VALUE`. Raises `Invalid` with what is wrong."""
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
    """Whether the names of models, and what is wrong with them, are for those only who have a key."""
    return INDEX in by_group(restrictions)


def by_group(restrictions: Iterable[Restriction]) -> dict[str, Restriction]:
    """The restriction of each group that has one."""
    return {group: restriction for restriction in restrictions for group in restriction.groups}
