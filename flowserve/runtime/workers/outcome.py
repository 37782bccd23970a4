"""Outcomes of batches.

Decides nothing; these records travel from the workers to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError


@dataclass(slots=True, eq=False)
class Returned:
    """The outcome of a decoupled model's batch: its instance is free. Its responses and its error, if it `has_failed`,
    were reported separately. `rescheduled`: as in `Results`.
    """

    gathered_ns: int = 0
    computed_ns: int = 0
    has_failed: bool = False
    rescheduled: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Passed:
    """The outcome of a batch with a route: `made[i]` are the results of stage i, for the completed stages. `error` is
    the error of the stage after those; None if the batch passed all stages or returned early.
    """

    made: list[Results]
    error: FlowserveError | None = None


Outcome = Results | Returned | Passed | FlowserveError
