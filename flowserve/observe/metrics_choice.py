"""The operator's selection of metrics: options and defaults. Imported by the command line, so it must stay light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetricsChoice:
    """`quantiles`: quantiles of the summaries, () for no summaries. `interval_ms`: the minimum period over which the
    machine's figures are averaged.
    """

    has_latency_counters: bool = True
    has_first_response: bool = True
    quantiles: tuple[float, ...] = ()
    has_machine: bool = True
    has_gpus: bool = True
    interval_ms: int = 2000


EVERYTHING: Final = MetricsChoice()
