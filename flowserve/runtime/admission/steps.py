"""The response cache for the steps of ensembles: looks up the steps of a model that has one, and keeps their results.

Decides what a step that is answered from the cache continues with. Entries are those of the model's own requests: a
step and a request with the same inputs answer each other. Steps share the tensors of an entry, which are read-only: a
model that may write into its inputs gets a copy of them. The scheduler decides which step runs, and which waits for an
equal one; `cache` decides keys and entries. Called by the engine, for models with a cache only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, Internal
from flowserve.observe.log_fields import of_request
from flowserve.runtime.admission.cache import CachedResponse, DeploymentCache
from flowserve.runtime.workers.outputs import unlike_outputs, unusable_output
from flowserve.runtime.workers.parameters import take_parameters_of
from flowserve.scheduling.batch import Batch, Lookup
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.scheduler import Scheduler

log = logging.getLogger("flowserve.runtime")


def look_up_all(lookups: Iterable[Lookup]) -> None:
    """Execute the lookups of one decision, in order."""
    for queue, ticket in lookups:
        try:
            queue.cache.look_up(queue, ticket)
        except Exception as error:  # it concerns one request, which ends; the others continue
            name = queue.key.name
            extra = of_request(ticket.frame.whole.request, model=name)
            log.exception("a step of model '%s' could not be looked up", name, extra=extra)
            queue.cache.fail(ticket, Internal(f"model '{name}': its cached response cannot be used: {error}"))


class StepCache:
    """The response cache of one loaded model, for its steps in ensembles."""

    def __init__(self, cache: DeploymentCache, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self.responses = cache
        self._scheduler = scheduler
        self._clock = clock

    def look_up(self, queue: ModelQueue, ticket: Ticket) -> None:
        """Execute a `Lookup`: answer the step, or let it run."""
        if ticket.frame.record.done:  # an earlier lookup ended it
            return
        began_ns = self._clock()
        frame, node = ticket.frame, ticket.node
        read = zip(frame.plan.graph.nodes[node.index].inputs, node.inputs, strict=True)
        inputs = {
            spec.name: tensor for spec, slot in read if slot >= 0 and (tensor := ticket.tensors[slot]) is not None
        }
        response = self.responses.find(ticket, node.wanted, inputs, may_answer=queue.may_answer)
        if response is not None:
            self._answer(ticket, response, began_ns)
        else:
            self._scheduler.run_step(ticket, ticket.lookup[0] if ticket.lookup else None, self._clock())

    def fail(self, ticket: Ticket, error: FlowserveError) -> None:
        """End the request of a step whose lookup raised."""
        if not ticket.frame.record.done:
            self._scheduler.answer_step(ticket, [()] * len(ticket.node.outputs), error, self._clock())

    def keep(self, batch: Batch, results: Results) -> None:
        """Cache the results of a batch's steps, and answer the steps that wait for them. Called before the scheduler
        completes the batch.
        """
        flights = batch.queue.flights
        assert flights is not None
        for m, ticket in enumerate(batch.tickets):
            # A request of the model itself was not looked up here.
            if m in results.errors or not getattr(ticket, "lookup", ()):
                continue
            followers = flights.land(ticket)
            made = {name: results.outputs[j][m] for name, j in _outputs(ticket)}
            response = self.responses.keep(ticket, made, results.parameters.get(m))
            for follower in followers:
                if follower.frame.record.done:  # another step of its request was answered before, and ended it
                    continue
                if response is not None:
                    self._answer(follower, response, follower.queued_ns)
                else:
                    follower.lookup = ()
                    self._scheduler.run_step(follower, None, self._clock())

    def _answer(self, ticket: Ticket, response: CachedResponse, began_ns: int) -> None:
        outputs: list[Sequence[Any]] = [(None,)] * len(ticket.node.outputs)
        for name, j in _outputs(ticket):
            tensor = response.tensors.get(name)
            if tensor is not None:
                outputs[j] = (tensor,)
        row = [column[0] for column in outputs]
        error = unusable_output(ticket, row, unlike_outputs(ticket, row))
        if error is None and response.parameters:
            try:
                take_parameters_of(ticket, response.parameters)
            except FlowserveError as raised:
                error = raised
        self.responses.hit(ticket.queued_ns, began_ns)
        self._scheduler.answer_step(ticket, outputs, error, self._clock())


def _outputs(ticket: Ticket) -> list[tuple[str, int]]:
    """The outputs of a step that are read, each with its index."""
    specs = ticket.frame.plan.graph.nodes[ticket.node.index].outputs
    return [(specs[j].name, j) for j, *_ in ticket.node.writes]
