"""A request that is alone, to one model that runs on the loop, is answered on the spot.

Decided here: to which deployments that may happen. Nothing is there to be batched with, nobody waits, an instance is
free: the dispatcher would start the request this very moment, and what flow, queue and batch add is only their cost,
as much as a small model's. That a request is alone says the pump. Whatever is not as usual, failures included, is left
to the common way, which runs the request once more; so only models are run here that may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowserve.backends.base import Work
from flowserve.errors import FlowserveError
from flowserve.memory.tensor import Tensor
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.instance import LocalHost
from flowserve.runtime.parameters import NONE
from flowserve.scheduling.batch import ModelQueue
from flowserve.values import Request, Response


class FastPath:
    """The way of one deployment's requests while they come alone. `leads_through` says whether it has one."""

    def __init__(self, deployment: Deployment, clock: ClockNs) -> None:
        (node,) = deployment.plan.nodes
        # Parts of the deployment and not itself: a circle would keep what was replaced until the collector comes.
        self._name, self._version, self._statistics = deployment.name, deployment.version, deployment.statistics
        self._admission = deployment.admission
        self._queue: ModelQueue = deployment.route[0]
        self._traffic = deployment.traffic[0]
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

    def answer(self, request: Request) -> Response | None:
        """The answer, or None where the common way is to find it."""
        queue = self._queue
        if not queue.free or queue.closed is not None:
            return None
        began_ns = self._clock()
        try:
            tensors = self._admission.admit(request)
        except FlowserveError:
            return None
        rows = next((tensor.stop - tensor.start for tensor in tensors if tensor is not None and tensor.stop >= 0), 1)
        host: LocalHost = queue.free[0]
        wanted = self._admission.wanted(request)
        results = host.run_alone(Work([[tensors[slot]] for slot in self._slots], [rows], [request], [wanted]))
        if results is None:
            return None
        outputs = {}
        for name in wanted:
            tensor = results.outputs[self._outputs[name]][0]
            if tensor is not None:
                outputs[name] = tensor.array
        traffic = self._traffic
        traffic.ran(rows, results.placed)
        if traffic.is_fixed and not any(results.copied):
            traffic.whole_rows += rows
        else:
            self._carry(tensors, results.copied)
        now_ns = self._clock()
        gathered_ns, computed_ns = results.gathered_ns, results.computed_ns
        self._statistics.ran(
            rows or 1,
            1,
            now_ns - began_ns,
            0,
            gathered_ns - began_ns,
            computed_ns - gathered_ns,
            now_ns - computed_ns,
            now_ns,
        )
        return Response(self._name, self._version, outputs, request.id, NONE)

    def _carry(self, tensors: Sequence[Tensor | None], copied: Sequence[int]) -> None:
        for edge in self._traffic.edges:
            tensor = tensors[self._slots[edge.input]]
            nbytes = 0 if tensor is None else tensor.nbytes
            edge.carried(nbytes, copied[edge.input] if copied else 0, out_of_one=False)
