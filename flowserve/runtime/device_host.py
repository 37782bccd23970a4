"""Where a batch meets a model on a GPU.

Decided here, on the loop, before a batch starts: who reads each of its outputs, so that the instance brings to the host
what somebody reads there and leaves all else where it is; and which of its inputs other instances on devices read too,
so that those cross once. So every step, and the answer, finds tensors where it looks for them, and instances on the
host pay nothing for there being devices. It never touches a device itself: that happens on the instance's thread.

Who reads an output is told from the graph and from the instances that its models have (graph/transfers.py says the same
of configurations). Where any of a reader's instances is on the host, the output comes to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from flowserve.backends.base import Instance, Work
from flowserve.backends.device import DeviceWork, OnDevice
from flowserve.graph.plan import PlanNode
from flowserve.memory.delivery import ON_DEVICE, ON_HOST
from flowserve.memory.device_tensor import SHARED, DeviceMirror, DeviceTensor, Mirror
from flowserve.runtime.instance import LocalHost
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.router import Flow, Ticket


class DeviceHost(LocalHost):
    """One instance on a device. Always on a thread: it may wait for the device, and must not hold up the loop.

    `elsewhere` is held while another instance's thread runs a batch of this one.
    """

    elsewhere: threading.Lock | None = None

    def __init__(self, name: str, model: str, instance: Instance, *facts: Any, **options: Any) -> None:
        """As any host's; the instance is one on a device."""
        super().__init__(name, model, instance, *facts, **options)
        assert isinstance(instance, OnDevice)
        self.place = instance.place
        self.is_of_any_thread = instance.is_of_any_thread  # while its own has nothing to do

    def close(self) -> None:
        """As that of any host. Everybody may have left a batch that still runs."""
        if self.elsewhere is not None:
            with self.elsewhere:
                pass
        super().close()

    def gather(self, tickets: Sequence[Ticket]) -> DeviceWork:
        """What it is given of a batch."""
        return self._gather(tickets)

    def _gather(self, tickets: Sequence[Ticket]) -> DeviceWork:
        crossings: dict[tuple[int, int], _Crossings] = {}  # most tickets of a batch are the same step of one graph
        outputs: list[list[int]] = [[] for _ in range(self._output_count)]
        for ticket in tickets:
            key = (id(ticket.flow.plan), ticket.node.index)
            found = crossings.get(key)
            if found is None:
                found = crossings[key] = _Crossings(ticket)
            found.share_inputs(ticket.flow)
            for column, where in zip(outputs, found.readers, strict=True):
                column.append(where)
        return on_device(super()._gather(tickets), outputs)


def on_device(work: Work, read_at: Sequence[Sequence[int]]) -> DeviceWork:
    """The same batch for an instance on a device; `read_at[j][m]` says who reads output j of member m."""
    return DeviceWork(work.inputs, work.rows, work.requests, work.wanted, work.may_write, work.senders, read_at=read_at)


def readers(flow: Flow, node: PlanNode) -> list[int]:
    """Who reads each output of a step."""
    plan, route = flow.plan, flow.route
    found = [0] * len(node.outputs)
    for j, slot, consumers in node.writes:
        found[j] = ON_HOST if slot in plan.output_slots else 0
        for consumer in consumers:
            found[j] |= _reads(route[consumer])
    return found


class _Crossings:
    """What of one step changes its memory. `readers[j]` are those of output j."""

    __slots__ = ("_shared", "readers")

    def __init__(self, ticket: Ticket) -> None:
        plan, node, route = ticket.flow.plan, ticket.node, ticket.flow.route
        self.readers = readers(ticket.flow, node)
        self._shared = [
            slot
            for slot in set(node.inputs)
            if 0 <= slot < plan.converted
            and any(other != node.index and _reads(route[other]) & ON_DEVICE for other in plan.consumers[slot])
        ]

    def share_inputs(self, flow: Flow) -> None:
        """Inputs that other instances on devices read besides get a place for copies."""
        for slot in self._shared:
            tensor = flow.tensors[slot]
            if tensor is not None and not isinstance(tensor, SHARED):
                flow.tensors[slot] = (DeviceMirror if isinstance(tensor, DeviceTensor) else Mirror)(tensor)


def _reads(queue: ModelQueue) -> int:
    """Where the instances of a queue read their inputs."""
    readers = 0
    for host in queue.instances:
        readers |= ON_DEVICE if isinstance(host, DeviceHost) else ON_HOST
    return readers
