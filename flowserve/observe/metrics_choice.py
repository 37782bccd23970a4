"""What of the metrics the operator wants to see.

Decided here: the choices there are and their defaults. What each family is, metrics.py knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetricsChoice:
    """`quantiles`: of summaries, none for no summaries. `interval_ms`: over how long the machine's figures are taken,
    at least.
    """

    has_latency_counters: bool = True
    has_first_response: bool = True
    quantiles: tuple[float, ...] = ()
    has_machine: bool = True
    has_gpus: bool = True
    interval_ms: int = 2000


EVERYTHING: Final = MetricsChoice()
