"""Where flowserve wants to be: ratios within one run, since absolute figures differ from machine to machine.

Decided here: the figures. `must` is the least that is good enough, `want` what we are after. For throughput more is
better; for p99 and CPU less is. Which runs they are compared with is said by each table's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Target:
    must: float
    want: float
    less_is_better: bool = False

    def verdict(self, figure: float) -> str:
        """ "want", "must" or "below", by the better of the two that `figure` reaches."""
        sign = -1.0 if self.less_is_better else 1.0
        if sign * figure >= sign * self.want:
            return "want"
        return "must" if sign * figure >= sign * self.must else "below"


# The execution that counts as "trusted nodes": Python models on the event loop, in the server's own process.
TRUSTED: Final = "inline"

# Requests per second over those of a Triton whose steps are Python models, by (work, concurrency), nodes trusted.
THROUGHPUT: Final[Mapping[tuple[str, int], Target]] = {
    ("chain", 1): Target(3.0, 5.0),
    ("chain", 8): Target(2.5, 4.0),
    ("chain", 32): Target(2.5, 4.0),
    ("diamond", 8): Target(2.5, 4.0),
    ("diamond", 32): Target(2.5, 4.0),
    ("chain_big", 8): Target(2.5, 4.0),
    ("chain_big", 32): Target(2.5, 4.0),
    ("mlp", 32): Target(2.5, 4.0),
    ("cnn", 8): Target(1.3, 1.6),
}

# p99 over Triton's p99, at each of the places above.
P99: Final = Target(1.0, 0.5, less_is_better=True)

# Requests per second over what direct calls reach at their best batch size, by (work, concurrency).
LIMIT: Final[Mapping[tuple[str, int], Target]] = {("cnn", 8): Target(0.75, 0.82)}

# Server CPU that each further inline step costs a request, microseconds, at concurrency 32: (chain - identity) / 2.
EXTRA_STEP_US: Final = Target(5.0, 2.0, less_is_better=True)
EXTRA_STEP_CONCURRENCY: Final = 32

# Requests per second of a Starlette echo on our server over the same on uvicorn.
ECHO: Final = Target(0.8, 1.1)
