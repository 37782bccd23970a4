"""What a simulation takes and returns: arrivals, batches and ends of requests, and their text as a timeline.

Times are milliseconds. Does not know how requests are simulated (`deployment`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowserve.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `priority` and `timeout_ms` are its own parameters, 0 for none; `sequence_id` is the correlation id of
    its sequence, with the flags START and END.
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
    """A batch. `requests` are numbers of arrivals, in the order of the batch; a request may be in it several times if
    several of its steps run the model. `end_ms` is when the instance was free again.
    """

    model: str
    instance: str
    requests: tuple[int, ...]
    rows: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request. `error` None: it was answered. `answers_ms`: the time of each response; one, unless a model
    is decoupled.
    """

    request: int
    at_ms: float
    latency_ms: float
    error: Exception | None = None
    answers_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulation:
    """`batches` in the order of starting, `outcomes` in the order in which requests ended. `str()` is a timeline."""

    batches: tuple[FormedBatch, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second, from the first arrival to the last response."""
        answered = [one for one in self.outcomes if one.error is None]
        began_ms = min((one.at_ms - one.latency_ms for one in self.outcomes), default=0.0)
        took_ms = max((one.at_ms for one in answered), default=0.0) - began_ms
        return 1000 * len(answered) / took_ms if took_ms > 0 else 0.0

    @property
    def refused(self) -> tuple[int, ...]:
        """The requests refused by a full queue or by admission control, and those whose timeout passed in a queue."""
        return tuple(sorted(one.request for one in self.outcomes if isinstance(one.error, Unavailable)))

    def batches_of(self, model: str) -> tuple[FormedBatch, ...]:
        return tuple(batch for batch in self.batches if batch.model == model)

    def __str__(self) -> str:
        lines = [
            (one.start_ms, 0, f"{one.instance} runs {_listed(one.requests)} until {one.end_ms:g} ms")
            for one in self.batches
        ]
        lines += [(at_ms, 1, text) for one in self.outcomes for at_ms, text in _entries(one)]
        lines.sort(key=lambda line: line[:2])
        return "\n".join(f"{at:8.3f} ms  {text}" for at, _, text in lines)


def _entries(outcome: Outcome) -> Iterator[tuple[float, str]]:
    name, after = f"request {outcome.request}", f"after {outcome.latency_ms:g} ms"
    if outcome.error is None and outcome.answers_ms == (outcome.at_ms,):
        yield outcome.at_ms, f"{name} is answered, {after}"
        return
    arrived_ms = outcome.at_ms - outcome.latency_ms
    for number, at_ms in enumerate(outcome.answers_ms, 1):
        yield at_ms, f"{name} gets answer {number}, after {at_ms - arrived_ms:g} ms"
    if outcome.error is not None:
        yield outcome.at_ms, f"{name} is refused: {outcome.error}, {after}"
    else:
        yield outcome.at_ms, f"{name} is over, {after}, with {len(outcome.answers_ms)} answers"


def _listed(numbers: Sequence[int]) -> str:
    return f"request{'s' if len(set(numbers)) > 1 else ''} {', '.join(map(str, numbers))}"
