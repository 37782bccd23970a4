"""A request that is alone, to one model that runs on the loop, is answered on the spot.

Decided here: to which deployments that may happen. Nothing is there to be batched with, nobody waits, an instance is
free: the dispatcher would start the request this very moment, and what flow, queue and batch add is only their cost,
as much as a small model's. That a request is alone says the pump. Whatever is not as usual, failures included, is left
to the common way, which runs the request once more; so only models are run here that may be.
"""

from __future__ import annotations

from typing import Protocol

from flowserve.backends.base import Work
from flowserve.errors import FlowserveError
from flowserve.runtime.accounts import sizes_of
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.instance import LocalHost
from flowserve.runtime.parameters import NONE
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.router import Flow
from flowserve.values import Request, Response


class OnTheSpot(Protocol):
    """A way for requests that come alone, past flow, queue and batch."""

    @property
    def is_free(self) -> bool:
        """Whether the next one may take it, if it is alone. Asked once for each."""

    def answer(self, deployment: Deployment, request: Request) -> Response | Flow | None:
        """The answer of the deployment that this is the way of; its flow where that comes later; None where the common
        way is to find it, with nothing done.
        """


class FastPath:
    """The way of one deployment's requests while they come alone. `leads_through` says whether it has one."""

    def __init__(self, deployment: Deployment, clock: ClockNs) -> None:
        (node,) = deployment.plan.nodes
        self._queue: ModelQueue = deployment.route[0]
        self._clock = clock
        self._slots = node.inputs
        self._outputs = {
            name: j for name, slot in deployment.output_slot.items() for j, written, _ in node.writes if written == slot
        }

    @staticmethod
    def leads_through(deployment: Deployment) -> bool:
        """Whether requests to a deployment are of one pure model whose instances may run on the loop, and nothing is to
        be done besides.
        """
        if deployment.graph.is_ensemble or deployment.plan.nesting is not None or deployment.gate is not None:
            return False
        (queue,) = deployment.route
        is_common = queue.bound is None and queue.order is None and not queue.batcher.may_wait
        return is_common and queue.is_pure and all(type(host) is LocalHost for host in queue.instances)

    @property
    def is_free(self) -> bool:
        return bool(self._queue.free) and self._queue.closed is None

    def answer(self, deployment: Deployment, request: Request) -> Response | None:
        began_ns = self._clock()
        admission = deployment.admission
        try:
            tensors = admission.admit(request)
        except FlowserveError:
            return None
        rows = next((tensor.stop - tensor.start for tensor in tensors if tensor is not None and tensor.stop >= 0), 1)
        host: LocalHost = self._queue.free[0]
        wanted = admission.wanted(request)
        inputs = [tensors[slot] for slot in self._slots]
        results = host.run_alone(Work([[one] for one in inputs], [rows], [request], [wanted]))
        if results is None:
            return None
        outputs = {}
        for name in wanted:
            tensor = results.outputs[self._outputs[name]][0]
            if tensor is not None:
                outputs[name] = tensor.array
        traffic = deployment.traffic[0]
        traffic.ran(rows, results.placed)
        sizes = None if traffic.is_fixed else sizes_of(inputs)
        traffic.took_in(rows, sizes, results.copied)
        now_ns = self._clock()
        gathered_ns, computed_ns = results.gathered_ns, results.computed_ns
        deployment.statistics.ran(
            rows or 1,
            1,
            now_ns - began_ns,
            0,
            gathered_ns - began_ns,
            computed_ns - gathered_ns,
            now_ns - computed_ns,
            now_ns,
        )
        return Response(deployment.name, deployment.version, outputs, request.id, NONE)
