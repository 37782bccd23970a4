"""The points at which the engine calls the observers of a request, such as tracing.

Decides the six points. An observer changes no result of a batch; the engine handles its exceptions.
Observers are in a list of the engine (`Engine.observers`), which is empty without tracing.
"""

from __future__ import annotations

from typing import Protocol

from flowserve.runtime.workers.outcome import Outcome
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Flow


class Observer(Protocol):
    """Called on the event loop, in the middle of a step."""

    def queued(self, flow: Flow) -> None:
        """A valid request was accepted, and is about to be given to admission control and the scheduler."""

    def batched(self, batch: Batch, now_ns: int) -> None:
        """A batch was formed, and is about to start. `batch.contexts` may be set here."""

    def started(self, batch: Batch) -> None:
        """A batch was given to its worker, and may have run there already."""

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        """A batch is back; the scheduler does not know it yet."""

    def finished(self, flow: Flow) -> None:
        """A request has finished with all its outputs; its caller has not been notified yet."""

    def failed(self, flow: Flow) -> None:
        """A request has failed with `flow.error`; its caller has not been notified yet."""
