"""What came of a batch that a worker ran.

Decides nothing; these records travel from the workers to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError


@dataclass(slots=True, eq=False)
class Returned:
    """What the run of a decoupled model's batch came to: its instance is free. Its responses, and why it `has_failed`,
    were reported by themselves. `rescheduled`: as in `Results`.
    """

    gathered_ns: int = 0
    computed_ns: int = 0
    has_failed: bool = False
    rescheduled: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Passed:
    """What became of a batch with a route: `made[i]` is what stage i made, as far as it came. `error` is why the stage
    after those failed; None where the batch passed all stages, or returned early.
    """

    made: list[Results]
    error: FlowserveError | None = None


Outcome = Results | Returned | Passed | FlowserveError
