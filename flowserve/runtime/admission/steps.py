"""The response cache for the steps of ensembles: looks up the steps of a model that has one, and keeps their results.

Decides what is in the key of a step, and that tensors in device memory are neither looked up nor kept. Entries are
those of the model's own requests (`controller`): a step and a request with the same inputs answer each other. Steps
share the tensors of an entry, which are read-only: a model that may write into its inputs gets a copy of them. The
scheduler decides which step runs, and which waits for an equal one. Called by the engine, for models with a cache only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.tensor import Tensor
from flowserve.observe.log_fields import of_request
from flowserve.observe.statistics import Statistics
from flowserve.runtime.admission.controller import (
    CachedResponse,
    ResponseCache,
    Served,
    cache_key,
    cached_copy,
)
from flowserve.runtime.workers.outputs import unlike_outputs, unusable_output
from flowserve.runtime.workers.parameters import take_parameters_of
from flowserve.scheduling.batch import Batch, Lookup
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import HOST_MEMORY, Array

log = logging.getLogger("flowserve.runtime")


def look_up_all(lookups: Iterable[Lookup]) -> None:
    """Execute the lookups of one decision, in order."""
    for queue, ticket in lookups:
        try:
            queue.cache.look_up(queue, ticket)
        except Exception as error:  # it concerns one request, which ends; the others continue
            name = queue.key.name
            log.exception("a step of model '%s' could not be looked up", name, extra=_fields(ticket, name))
            queue.cache.fail(ticket, Internal(f"model '{name}': its cached response cannot be used: {error}"))


def _fields(ticket: Ticket, model: str) -> Mapping[str, Any]:
    return of_request(ticket.flow.whole.request, model=model)


class StepCache:
    """The response cache of one loaded model, for its steps in ensembles. `served`: the first part of its keys."""

    def __init__(
        self,
        cache: ResponseCache,
        served: Served,
        statistics: Statistics,
        scheduler: Scheduler,
        clock: Callable[[], int],
    ) -> None:
        self.served = served
        self._cache = cache
        self._statistics = statistics
        self._scheduler = scheduler
        self._clock = clock

    def look_up(self, queue: ModelQueue, ticket: Ticket) -> None:
        """Execute a `Lookup`: answer the step, or let it run."""
        if ticket.flow.record.done:  # an earlier lookup ended it
            return
        began_ns = self._clock()
        key = response = None
        try:
            key = self._key(ticket)
            if key is not None and self._scheduler.may_answer(queue):
                response = self._cache.get(key)
        except Exception:  # no memory for the bytes of a key: the step runs
            text, name = "a step of model '%s' cannot be looked up in the response cache", self.served[0]
            log.exception(text, name, extra=_fields(ticket, name))
        if response is not None:
            self._answer(ticket, response, began_ns)
            return
        now_ns = self._clock()
        ticket.lookup = () if key is None else (key, now_ns - began_ns)
        self._scheduler.run_step(ticket, key, now_ns)

    def fail(self, ticket: Ticket, error: FlowserveError) -> None:
        """End the request of a step whose lookup raised."""
        if not ticket.flow.record.done:
            self._scheduler.answer_step(ticket, [()] * len(ticket.node.outputs), error, self._clock())

    def keep(self, batch: Batch, results: Results) -> None:
        """Cache the results of a batch's steps, and answer the steps that wait for them. Called before the scheduler
        completes the batch.
        """
        for m, ticket in enumerate(batch.tickets):
            lookup = getattr(ticket, "lookup", ())  # a request of the model itself has none
            if not lookup or m in results.errors:
                continue
            key, lookup_ns = lookup
            followers = self._scheduler.land(batch.queue, ticket)
            began_ns = self._clock()
            response = self._kept(key, ticket, results, m)
            self._statistics.missed(lookup_ns + self._clock() - began_ns)
            for follower in followers:
                if follower.flow.record.done:  # another step of its flow was answered before, and ended it
                    continue
                if response is not None:
                    self._answer(follower, response, follower.queued_ns)
                else:
                    follower.lookup = ()
                    self._scheduler.run_step(follower, None, self._clock())

    def _kept(self, key: bytes, ticket: Ticket, results: Results, m: int) -> CachedResponse | None:
        made: dict[str, Tensor] = {}
        for name, j in _outputs(ticket):
            tensor = results.outputs[j][m]
            if tensor is not None:
                made[name] = tensor
        if any(tensor.place != HOST_MEMORY for tensor in made.values()):
            return None
        try:
            response, nbytes = cached_copy(made, results.parameters.get(m))
            self._cache.put(key, response, nbytes)
        except Exception:  # no memory for a copy
            name = self.served[0]
            log.exception("a response of '%s' cannot be cached", name, extra=_fields(ticket, name))
            return None
        return response

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
        now_ns = self._clock()
        self._statistics.hit(now_ns - ticket.queued_ns, now_ns - began_ns)
        self._scheduler.answer_step(ticket, outputs, error, now_ns)

    def _key(self, ticket: Ticket) -> bytes | None:
        """The key of a step; None if some input is in device memory."""
        flow, node = ticket.flow, ticket.node
        specs = flow.plan.graph.nodes[node.index].inputs
        inputs: dict[str, Array] = {}
        for spec, slot in zip(specs, node.inputs, strict=True):
            tensor = ticket.tensors[slot] if slot >= 0 else None
            if tensor is None:
                continue
            if tensor.place != HOST_MEMORY:
                return None
            inputs[spec.name] = tensor.array
        return cache_key(self.served, flow.request, node.wanted, inputs)


def _outputs(ticket: Ticket) -> list[tuple[str, int]]:
    """The outputs of a step that are read, each with its index."""
    specs = ticket.flow.plan.graph.nodes[ticket.node.index].outputs
    return [(specs[j].name, j) for j, *_ in ticket.node.writes]
