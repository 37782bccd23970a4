"""One open instance, driven by messages: in a worker process, and in an actor on another machine.

Decides that batches run one after another until the server ends the instance, what an instance receives of a batch's
message, and which errors the server gets: a model that raises fails its batch, a process that has lost its GPU ends.

The connection, the memory of tensors and the way of a batch on its route belong to the port (port.py). Does not know
the event loop, queues or graphs, nor which backend it runs. Called by main.py and by elsewhere/cluster/actor.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from flowserve.backends.base import ClockNs, Instance, Results, Work
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import Garbled, Job, encode_error, encode_notes
from flowserve.backends.worker.port import DriverPort, ReceivedBatch
from flowserve.errors import FlowserveError, model_raised, told
from flowserve.memory.device import why_lost
from flowserve.values import Request

log = logging.getLogger("flowserve.child")

# The least time between two checks whether the GPU is lost: a check takes 50 us where no driver is loaded, and a model
# may refuse every other request. After a loss all requests fail, so the next check finds it.
_LOOK_EVERY_NS: Final = 100_000_000
_PLAIN_REQUEST: Final = Request({}, None, *messages.PLAIN_FACTS)  # its attributes are only read


class BatchRequests(Sequence[Request]):
    """The requests of a batch, from the facts in its message; each is made when the backend reads it."""

    __slots__ = ("_facts",)

    def __init__(self, facts: Sequence[Sequence[Any]]) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return BatchRequests(self._facts[index])
        return Request({}, None, *self._facts[index])


class Driver:
    """Drives an open instance."""

    def __init__(self, port: DriverPort, job: Job, instance: Instance, clock: ClockNs) -> None:
        self._port = port
        self._job = job
        self._instance = instance
        names = [spec.name for spec in job.outputs]
        # Names by requested outputs, which clients choose in any order and number.
        self._names_of = lru_cache(100)(lambda outputs: tuple([names[j] for j in outputs]))
        self._has_failed = False  # whether a batch or some of its members failed
        self._look_ns = 0  # earliest time of the next check of the GPU
        self._pid = os.getpid()
        self._clock = clock

    def run(self) -> None:
        """Run batches until the instance is to end, or the server has ended. Raises Garbled, and SystemExit if the
        process has lost its GPU.
        """
        port = self._port
        while (batch := port.receive(self._take)) is not None:
            try:
                if port.begin(batch):
                    self._run(batch)
            except LookupError as error:  # a block, a route or a word that does not exist
                raise Garbled(f"a batch: {type(error).__name__}: {error}") from None

    def _take(self, kind: int, words: Sequence[int]) -> None:
        """Process a message that is not about batches, routes or memory. Raises Garbled."""
        raise Garbled(f"a message of kind {kind}")

    def _run(self, batch: ReceivedBatch) -> None:
        placed: Any = None
        text: Any = None
        times = 0, 0
        try:
            text, times, placed = self._execute(batch)
        except Garbled:
            raise
        except FlowserveError as error:
            text, self._has_failed = encode_error(error), True
        except Exception as error:
            # A backend's own fault: its traceback belongs in the log, never in a response.
            what = told(error, str(error), len(batch.rows))
            failed = model_raised(f"model '{self._job.model}', instance '{self._job.instance}' failed: {what}", error)
            text, self._has_failed = encode_error(failed), True
        if self._has_failed:
            self._look_for_loss()
        self._port.reply(batch, text, times, placed)

    def _look_for_loss(self) -> None:
        """After a failure: end this process if it has lost its GPU, since only a new process can use it. The batch is
        not answered, because the server would then send the next one.
        """
        self._has_failed = False
        now_ns = self._clock()
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + _LOOK_EVERY_NS
        why = why_lost()
        if why:
            log.error("instance %s: its process cannot use the GPU any more (%s), and ends", self._job.instance, why)
            raise SystemExit(messages.LOST_GPU)

    def _execute(self, batch: ReceivedBatch) -> tuple[Any, tuple[int, int], Any]:
        """Run the batch. Returns the text about members that failed, run again or have parameters, None if there are
        none; the times at which inputs were in place and outputs computed; and the outputs as the port has placed
        them. No tensor of the batch is referenced afterwards, except by the model: the port counts references.
        """
        results = self._instance.run(self._work(batch), self._clock)
        if os.getpid() != self._pid:
            os._exit(0)  # the model forked, and this is the child: only the parent answers, and output memory is shared
        placed = self._port.place(batch, results.outputs)  # before the times are read; if it raises, the batch fails
        times = results.gathered_ns, results.computed_ns
        self._has_failed = bool(results.errors)
        return text_about(results, is_on_route=bool(batch.route)), times, placed

    def _work(self, batch: ReceivedBatch) -> Work:
        rows = batch.rows
        count = len(rows)
        wanted = [*map(self._names_of, batch.wanted)]
        if len(wanted) < count:
            wanted *= count
        requests: Sequence[Request] = [_PLAIN_REQUEST] * count
        contexts = None
        if batch.about:
            facts, by_stage = messages.decode_about(batch.about, batch.text, count)
            if facts is not None:
                requests = BatchRequests(facts)
            contexts = by_stage[batch.stage] if by_stage else None
        inputs = self._port.inputs(batch)
        may_write = [[self._port.may_write(batch)] * count] * len(inputs)
        return Work(inputs, rows, requests, wanted, may_write, None, contexts)


def text_about(results: Results, *, is_on_route: bool) -> Any:
    """The text of DONE about members that failed, run again or have parameters, the notes, and the model's exception
    after its responses; None if there are none of these.
    """
    notes = results.notes
    if notes is not None and is_on_route:
        notes.orders.clear()  # an ensemble's response does not use that order, so the batch can stay on its route
        notes = results.notes = notes.or_none()
    raised = results.raised
    if not (results.errors or results.parameters or results.rescheduled or notes or raised):
        return None
    failed = {m: messages.RAISED if error is raised else encode_error(error) for m, error in results.errors.items()}
    whole = {} if notes is None else {"": encode_notes(notes)}
    if raised is not None:
        whole[messages.RAISED] = encode_error(raised)
    return {**results.parameters, **dict.fromkeys(results.rescheduled), **failed, **whole}
