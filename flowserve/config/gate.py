"""How much of a deployment may be under way at once, and for how long: parameters of its own.

Decided here: the names of these parameters and what each may say. What they do is decided in runtime/gate.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WAIT: Final = "wait"
REJECT: Final = "reject"
_NUMBERS: Final = ("deadline_ms", "max_requests", "max_request_bytes")
KEYS: Final = (*_NUMBERS, "when_full")


@dataclass(frozen=True, slots=True)
class GateOptions:
    """0 is no limit. `waits`: who finds no room waits for it, instead of being refused."""

    deadline_ms: int = 0
    max_requests: int = 0
    max_request_bytes: int = 0
    waits: bool = False

    @property
    def is_open(self) -> bool:
        """Nobody is kept out and nothing is timed."""
        return not (self.deadline_ms or self.max_requests or self.max_request_bytes)


def what_is_wrong(key: str, value: str) -> str:
    """What the parameter `key` wants instead of `value`, "" where it is right."""
    if key in _NUMBERS and not re.fullmatch(r"[1-9][0-9]{0,17}", value, re.ASCII):
        return "expected a whole number, 1 or more"
    if key == "when_full" and value not in (WAIT, REJECT):
        return f"expected {REJECT} or {WAIT}"
    return ""


def gate_options(parameters: Mapping[str, str]) -> GateOptions:
    """From parameters that are right."""
    numbers = {key: int(parameters[key]) for key in _NUMBERS if key in parameters}
    return GateOptions(**numbers, waits=parameters.get("when_full") == WAIT)
