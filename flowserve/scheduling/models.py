"""The models of a server: their queues, and those among them that `schedule` has to examine, now or later.

Decides when a queue is examined: after a change, or when time alone changes what may run. Does not know tickets. The
runtime adds and removes models, and reads the queues; the scheduler examines them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.rate_limit.order import RateLimit
from flowserve.scheduling.sequence.batcher import Sequences


class Models:
    """The queues of all models. `rate_limit` is None without a rate limiter."""

    def __init__(self, rate_limit: RateLimit | None) -> None:
        self.queues: list[ModelQueue] = []
        self.changed: deque[ModelQueue] = deque()
        self.timed: dict[ModelQueue, None] = {}  # queues whose tickets or sequences may time out or wait for a delay
        self._rate_limit = rate_limit
        self.ending: set[ModelQueue] = set()  # queues that are removed when their batches are complete

    def add(self, queue: ModelQueue) -> None:
        """Add a model: requests may refer to this queue from now on."""
        self.queues.append(queue)
        queue.join(self.changed)
        if self._rate_limit is not None:
            self._rate_limit.add(queue)

    def remove(self, queue: ModelQueue) -> None:
        """Remove a model whose queue no request refers to any more."""
        self.queues.remove(queue)
        self.timed.pop(queue, None)
        if self._rate_limit is not None:
            self._rate_limit.remove(queue)

    def remove_when_idle(self, queue: ModelQueue) -> None:
        """Remove a model as soon as none of its instances runs a batch."""
        self.ending.add(queue)
        self.remove_idle()

    def remove_idle(self) -> None:
        """Remove the `ending` models whose batches are complete."""
        for queue in [queue for queue in self.ending if not queue.running]:
            self.ending.remove(queue)
            self.remove(queue)

    @property
    def sequences(self) -> list[Sequences]:
        """The sequence batchers."""
        return [queue.bound for queue in self.queues if isinstance(queue.bound, Sequences)]

    def soonest(self) -> int | None:
        """When time alone changes what may run next; None if never."""
        soonest = None
        for queue in [*self.timed]:
            # Time alone does not help a queue that waits for resources: the end of a batch does.
            has_resources = self._rate_limit is None or not self._rate_limit.is_waiting(queue)
            at_ns = queue.deadline(has_resources=has_resources)
            if at_ns is not None and (soonest is None or at_ns < soonest):
                soonest = at_ns
            elif at_ns is None and not len(queue.batcher):
                del self.timed[queue]
        return soonest

    def expired(self, now_ns: int) -> Iterator[ModelQueue]:
        """The queues with tickets or sequences whose timeout passed."""
        for queue in [*self.timed]:
            at_ns = queue.batcher.expiry()
            if at_ns is not None and at_ns <= now_ns:
                yield queue

    def mark_due(self, now_ns: int) -> None:
        """Mark the queues that waited for this time."""
        for queue in self.timed:
            at_ns = queue.batcher.deadline()
            if at_ns is not None and at_ns <= now_ns:
                queue.mark()
