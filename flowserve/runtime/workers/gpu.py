"""A worker whose instance computes on a GPU of the server's process.

Decides in which memory the tensors of such a batch are: outputs stay on the GPU if the next instance reads them there
(decision 0024), and inputs that several GPU instances read get a place for copies. It always runs on a thread, because
it may wait for the device. A batch with a route passes its stages on the first instance's thread, each on the stream of
its own instance, so that between two stages there are a few calls instead of two hand-offs between threads. If any of a
reader's instances is on the host, the output is copied to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from flowserve.backends.base import DeviceWork, Instance, OnDevice, Results, Work
from flowserve.errors import FlowserveError
from flowserve.graph.plan import PlanNode
from flowserve.memory.device_tensor import SHARED, DeviceMirror, DeviceTensor, Mirror
from flowserve.memory.stream import ON_DEVICE, ON_HOST
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.runtime.workers.local import LocalWorker, pass_stages
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.model_queue import ModelQueue


class GpuWorker(LocalWorker):
    """One instance on a GPU; `place` is its memory."""

    def __init__(
        self, name: str, model: str, instance: Instance, output_count: int | None, *facts: Any, **options: Any
    ) -> None:
        super().__init__(name, model, instance, output_count, *facts, **options)
        assert isinstance(instance, OnDevice)
        self.place = instance.place
        self.route_group = ("gpu", instance.place) if instance.is_of_any_thread else None
        self._outputs = output_count or 0
        self.has_state = True  # after a route, `finish` sets `running` of the workers of later stages
        # Held until the end of the last route on which another worker's thread runs this instance. It is a lock that
        # serves as an event: an `Event` costs 4 us more for each batch.
        self._lent: threading.Lock | None = None

    def close(self) -> None:
        """As `Worker.close`. A batch may still run whose callers have all left."""
        if self._lent is not None:
            with self._lent:
                pass
        super().close()

    def run(self, batch: Batch) -> Outcome | None:
        if batch.route is None:
            return super().run(batch)
        work = self._work_of(batch.tickets)
        if batch.contexts:
            work.contexts = batch.contexts[0]
        read_at = self._readers_on_route(batch)
        in_use = threading.Lock()
        in_use.acquire()  # `_pass` releases it on the thread
        for i, worker in enumerate(batch.instances[1:], 1):
            worker.running = batch.stage(i)
            worker._lent = in_use
        self.run_on_thread(batch, lambda: self._pass(batch, work, read_at, in_use))
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        if batch.route is not None:
            for worker in batch.instances[1:]:
                worker.running = None
        return super().finish(batch, outcome)

    def _readers_on_route(self, batch: Batch) -> list[list[int]]:
        """The places where each output of each stage is read; the same for all batches of a route."""
        route = batch.route
        assert route is not None
        if route.worker_data is None:
            frame = batch.tickets[0].frame  # all members have the same plan and the same queues
            route.worker_data = [_readers(frame, node) for node in route.nodes]
        found: list[list[int]] = route.worker_data
        return found

    def _pass(self, batch: Batch, work: Work, read_at: list[list[int]], in_use: threading.Lock) -> Outcome:
        """Pass the stages of a route on this thread, which releases `in_use` at the end."""
        count = len(work.rows)

        def run_stage(batch: Batch, i: int, work: Work) -> Results | FlowserveError | None:
            if batch.is_recalled:
                return None
            following = _on_device(work, [[where] * count for where in read_at[i]])
            worker: GpuWorker = batch.instances[i]
            return worker.compute(following, batch.rows, self._clock(), inline=False)

        try:
            batch.started_ns = self._clock()
            outcome = self.compute(work, batch.rows, batch.started_ns, inline=False)
            if not isinstance(outcome, Results):
                return Passed([], outcome)
            return pass_stages(batch, work, outcome, run_stage)
        finally:
            in_use.release()

    def _work_of(self, tickets: Sequence[Ticket]) -> DeviceWork:
        crossings: dict[tuple[int, int], _Crossings] = {}  # most batches have the same step of one graph
        outputs: list[list[int]] = [[] for _ in range(self._outputs)]
        for ticket in tickets:
            key = (id(ticket.frame.plan), ticket.node.index)
            found = crossings.get(key)
            if found is None:
                found = crossings[key] = _Crossings(ticket)
            found.share_inputs(ticket)
            for column, where in zip(outputs, found.readers, strict=True):
                column.append(where)
        return _on_device(super()._work_of(tickets), outputs)


def _on_device(work: Work, read_at: Sequence[Sequence[int]]) -> DeviceWork:
    """The same batch for an instance on a device; `read_at[j][m]` are the places where output j of member m is read."""
    return DeviceWork(
        work.inputs, work.rows, work.requests, work.wanted, work.may_write, work.senders, work.contexts, read_at=read_at
    )


def _readers(frame: Frame, node: PlanNode) -> list[int]:
    """The places where each output of a step is read."""
    found = [0] * len(node.outputs)
    for j, slot, _ in node.writes:
        found[j] = _readers_of(frame, slot)
    return found


def _readers_of(frame: Frame, slot: int) -> int:
    """The places where a tensor is read, also as rows of other tensors, which are copied where those are read."""
    plan, queues = frame.plan, frame.queues
    found = ON_HOST if slot in plan.output_slots else 0
    for consumer in plan.consumers[slot]:
        if consumer < len(queues):
            found |= _reads(queues[consumer])
            continue
        assert plan.regions is not None
        operation = plan.regions.operations[consumer - len(queues)]
        if slot in operation.examined:
            found |= ON_HOST
        elif operation.derived is not None:
            found |= _readers_of(frame, operation.slot)
    return found


class _Crossings:
    """The tensors of one step that change memory. `readers[j]` are the places where output j is read."""

    __slots__ = ("_shared", "readers")

    def __init__(self, ticket: Ticket) -> None:
        plan, node, queues = ticket.frame.plan, ticket.node, ticket.frame.queues
        self.readers = _readers(ticket.frame, node)
        self._shared = [
            slot
            for slot in set(node.inputs)
            if 0 <= slot < plan.converted
            and any(
                other != node.index and other < len(queues) and _reads(queues[other]) & ON_DEVICE
                for other in plan.consumers[slot]
            )
        ]

    def share_inputs(self, ticket: Ticket) -> None:
        """Inputs that other instances on devices also read get a place for copies."""
        for slot in self._shared:
            tensor = ticket.tensors[slot]
            if tensor is not None and not isinstance(tensor, SHARED):
                ticket.tensors[slot] = (DeviceMirror if isinstance(tensor, DeviceTensor) else Mirror)(tensor)


def _reads(queue: ModelQueue) -> int:
    """The places where the instances of a queue read their inputs."""
    readers = 0
    for worker in queue.instances:
        readers |= ON_DEVICE if isinstance(worker, GpuWorker) else ON_HOST
    return readers
