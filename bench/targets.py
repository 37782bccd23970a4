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


Place = tuple[str, int]  # work, concurrency

# The execution that counts as "trusted nodes": Python models on the event loop, in the server's own process.
TRUSTED: Final = "inline"

# Those with an ONNX node stand whether the Python steps around it are trusted or have processes of their own.
_WITH_ONNX: Final[Mapping[Place, Target]] = {("mlp", 32): Target(2.5, 4.0), ("cnn", 8): Target(1.3, 1.6)}

# Requests per second over those of a Triton whose steps are Python models, by where ours run and by place.
THROUGHPUT: Final[Mapping[str, Mapping[Place, Target]]] = {
    TRUSTED: {
        ("chain", 1): Target(3.0, 5.0),
        ("chain", 8): Target(2.5, 4.0),
        ("chain", 32): Target(2.5, 4.0),
        ("diamond", 8): Target(2.5, 4.0),
        ("diamond", 32): Target(2.5, 4.0),
        ("chain_big", 8): Target(2.5, 4.0),
        ("chain_big", 32): Target(2.5, 4.0),
        **_WITH_ONNX,
    },
    "process": {
        ("chain", 1): Target(1.5, 2.0),
        ("chain", 8): Target(2.0, 2.5),
        ("chain", 32): Target(2.0, 3.0),
        ("diamond", 1): Target(1.5, 2.0),
        ("diamond", 8): Target(2.0, 2.5),
        ("diamond", 32): Target(2.0, 3.0),
        **_WITH_ONNX,
    },
}

# Requests per second of a model with state over those of the same model without, with 64 sequences at a time.
SEQUENCES: Final = Target(0.7, 0.9)

# p99 over Triton's p99, at each of the places above.
P99: Final = Target(1.0, 0.5, less_is_better=True)

# Requests per second over what direct calls reach at their best batch size, by (work, concurrency).
LIMIT: Final[Mapping[Place, Target]] = {("cnn", 8): Target(0.75, 0.82)}

# CPU of direct calls over the server's less an echo's of the same body: what is left of the CPU for the work itself.
CPU_SHARE: Final = Target(0.9, 0.9)

# Server CPU that each further inline step costs a request, microseconds, at concurrency 32: (chain - identity) / 2.
EXTRA_STEP_US: Final = Target(5.0, 2.0, less_is_better=True)
EXTRA_STEP_CONCURRENCY: Final = 32

# Requests per second of a Starlette echo on our server over the same on uvicorn.
ECHO: Final = Target(0.8, 1.1)

# Requests per second of an ensemble over those of its slowest member alone.
SLOWEST: Final = Target(0.8, 0.9)

# Requests per second over another flowserve's: below this it is no noise any more.
BEFORE: Final = Target(0.95, 1.0)

# Batches that stay together, where tensors are small and requests many: rows the first node saw, the last node's over
# them, bytes per request that were copied between nodes in spite of coming out of one batch.
TOGETHER: Final[frozenset[Place]] = frozenset({("chain", 32), ("diamond", 32), ("mlp", 32)})
FIRST_BATCH: Final = Target(8.0, 16.0)
LAST_OVER_FIRST: Final = Target(0.9, 1.0)
REGATHERED: Final = Target(0.0, 0.0, less_is_better=True)
