"""What simulated requests are, and what became of them: which batches formed when, and who was refused.

Decided here: the records that `simulate` takes and gives, and how they read as a timeline. Times are milliseconds. How
they come about is simulated.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowserve.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `priority` and `timeout_ms` are what it says itself, 0 for nothing; `sequence_id` is that of the
    sequence it belongs to, with its flags.
    """

    at_ms: float
    rows: int = 1
    priority: int = 0
    timeout_ms: float = 0.0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What ran together. `requests` are numbers of arrivals, in the order they stand in the batch; a request whose
    steps run several times may stand there several times. `end_ms` is when the instance was free again.
    """

    model: str
    instance: str
    requests: tuple[int, ...]
    rows: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, and when. `error` None: it was answered. `answers_ms`: when each of its answers was there,
    one of each for most deployments.
    """

    request: int
    at_ms: float
    latency_ms: float
    error: Exception | None = None
    answers_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulation:
    """`batches` in the order they started, `outcomes` in the order requests ended. `str()` of it is a timeline."""

    batches: tuple[FormedBatch, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def refused(self) -> tuple[int, ...]:
        """The requests that found no room (in a queue, or at the limit of the whole deployment), or whose time was
        over while they waited.
        """
        return tuple(sorted(one.request for one in self.outcomes if isinstance(one.error, Unavailable)))

    def batches_of(self, model: str) -> tuple[FormedBatch, ...]:
        return tuple(batch for batch in self.batches if batch.model == model)

    def __str__(self) -> str:
        lines = [
            (one.start_ms, 0, f"{one.instance} runs {_listed(one.requests)} until {one.end_ms:g} ms")
            for one in self.batches
        ]
        lines += [(at_ms, 1, text) for one in self.outcomes for at_ms, text in _told(one)]
        lines.sort(key=lambda line: line[:2])
        return "\n".join(f"{at:8.3f} ms  {text}" for at, _, text in lines)


def _told(outcome: Outcome) -> Iterator[tuple[float, str]]:
    who, after = f"request {outcome.request}", f"after {outcome.latency_ms:g} ms"
    if outcome.error is None and outcome.answers_ms == (outcome.at_ms,):
        yield outcome.at_ms, f"{who} is answered, {after}"
        return
    arrived_ms = outcome.at_ms - outcome.latency_ms
    for number, at_ms in enumerate(outcome.answers_ms, 1):
        yield at_ms, f"{who} gets answer {number}, after {at_ms - arrived_ms:g} ms"
    if outcome.error is not None:
        yield outcome.at_ms, f"{who} is refused: {outcome.error}, {after}"
    else:
        yield outcome.at_ms, f"{who} is over, {after}, with {len(outcome.answers_ms)} answers"


def _listed(numbers: Sequence[int]) -> str:
    return f"request{'s' if len(set(numbers)) > 1 else ''} {', '.join(map(str, numbers))}"
