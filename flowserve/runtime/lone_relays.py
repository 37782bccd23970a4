"""A request that is alone, to a graph of quick models in processes, goes through all of them in one relay and is waited
for in place.

Decided here: to which graphs and when that may happen. Then flow, queues and batches are only cost, more than the
server's whole part of it besides. Where it is not back at once, or there is something to say of it, it gets its flow
after all and goes on as any relay does: nothing is run twice. That a request is alone say the pump and the processes'
occupancy; how relays go is decided in relays.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from flowserve.backends.base import Work
from flowserve.errors import FlowserveError
from flowserve.graph.plan import Plan
from flowserve.memory.tensor import Tensor
from flowserve.runtime.alone import Occupancy
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.lone_accounts import Ledger, LoneAccounts
from flowserve.runtime.parameters import NONE, of_ensemble
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.relay_paths import OnItsWay, Path
from flowserve.runtime.relays import Relays
from flowserve.scheduling.relays import RelayingDispatcher, Way, whole_way
from flowserve.scheduling.router import Flow
from flowserve.values import Request, Response

# So long all models of a relay may take together that the loop waits for; it does nothing else meanwhile.
PATIENCE_NS: Final = 1_500_000
# So long each of them may take: less than what one counts as that is slow or was never measured (`WAIT_NS_MAX`).
_EACH_NS: Final = 900_000
_PLANS_MAX: Final = 64


class _Course:
    """The way through a whole plan. `answers`: which output of the last stop is which of the graph's."""

    __slots__ = ("accounts", "answers", "path", "rows_max", "way")

    def __init__(self, way: Way, answers: list[tuple[str, int]], accounts: LoneAccounts) -> None:
        self.way = way
        self.answers = answers
        self.accounts = accounts
        self.rows_max = min(way.row_max, way.nodes[0].max_batch_size)
        self.path: Path | None = None  # the last that one took


class LoneRelays:
    """The way of one deployment's requests while they come alone. `lead_through` says whether it has one."""

    def __init__(
        self,
        dispatcher: RelayingDispatcher,
        occupancy: Occupancy,
        relays: Relays,
        ledger: Ledger,
        clock: ClockNs,
    ) -> None:
        self._dispatcher = dispatcher
        self._occupancy = occupancy
        self._relays = relays
        self._ledger = ledger
        self._clock = clock
        self._courses: dict[tuple[str, ...] | None, _Course | None] = {}  # by the outputs that are asked for

    @staticmethod
    def lead_through(deployment: Deployment) -> bool:
        """Whether requests to a deployment are of models in processes, and nothing is to be done besides."""
        if deployment.plan.nesting is not None or deployment.gate is not None or deployment.output_conversions:
            return False
        hosts = chain.from_iterable(queue.instances for queue in deployment.route)
        return all(isinstance(host, ProcessHost) for host in hosts)

    @property
    def is_free(self) -> bool:
        """Whether the next request is taken to be alone there."""
        return self._occupancy.expects_one

    def answer(self, deployment: Deployment, request: Request) -> Response | Flow | None:
        """The answer; its flow where that comes later; None where the common way is to find it, with nothing done."""
        try:
            course = self._courses[request.outputs]
        except KeyError:
            course = self._find(deployment, request.outputs)
        path = None if course is None else self._free_path(course)
        if course is None or path is None:
            return None
        try:
            tensors = deployment.admission.admit(request)
        except FlowserveError:
            return None
        way = course.way
        node = way.nodes[0]
        inputs = [tensors[slot] for slot in node.inputs]
        first = inputs[0]
        rows = 0 if first is None else first.stop - first.start
        if not 0 < rows <= course.rows_max:
            return None
        wanted = node.wanted or deployment.admission.wanted(request)
        sent = self._relays.send(path, Work([[one] for one in inputs], [rows], [request], [wanted]))
        if sent is None:
            return None
        self._ledger.catch_up()
        came = self._relays.wait_for(sent)
        if came is None:
            return self._go_on(deployment, request, tensors, way, sent)
        stops, last = came
        self._occupancy.passed_through()
        outputs = {}
        for name, j in course.answers:
            tensor = last.outputs[j][0]
            if tensor is not None:
                outputs[name] = tensor.array
        course.accounts.note(inputs, rows, sent.expected.packed.copied, sent.started_ns, stops, self._clock())
        says = of_ensemble(request) if deployment.graph.is_ensemble else NONE
        return Response(deployment.name, deployment.version, outputs, request.id, says)

    def _go_on(
        self,
        deployment: Deployment,
        request: Request,
        tensors: Sequence[Tensor | None],
        way: Way,
        sent: OnItsWay,
    ) -> Flow:
        """It was sent, and goes on as any relay."""
        flow = deployment.make_flow(
            _plan(deployment, request.outputs),
            deployment.route,
            tensors,
            sent.started_ns,
            request.stamp,
            request,
            deployment,
            request.priority,
            request.timeout_us * 1000,
        )
        flow.wanted = deployment.admission.wanted(request)
        self._relays.begin(sent, self._dispatcher.adopt(flow, way, sent.path.runners, sent.started_ns))
        return flow

    def _free_path(self, course: _Course) -> Path | None:
        path = course.path
        if path is None or not path.is_idle:
            queues = course.way.queues
            if not all(queue.free for queue in queues):
                return None
            path = course.path = self._relays.path(course.way, [queue.free[0] for queue in queues])
            if path is None or not path.is_idle:
                return None
        return path if path.takes_at_most(_EACH_NS, PATIENCE_NS) else None

    def _find(self, deployment: Deployment, outputs: tuple[str, ...] | None) -> _Course | None:
        if len(self._courses) >= _PLANS_MAX:  # outputs in every order, from a client that plays
            self._courses.clear()
        course = self._courses[outputs] = _course(deployment, outputs, self._ledger)
        return course


def _plan(deployment: Deployment, outputs: tuple[str, ...] | None) -> Plan:
    return deployment.plan_for(outputs) if outputs else deployment.plan


def _course(deployment: Deployment, outputs: tuple[str, ...] | None, ledger: Ledger) -> _Course | None:
    """The way through all of a plan, from what every request brings to what it is answered with."""
    if outputs and not deployment.outputs.keys() >= {*outputs}:
        return None
    way = whole_way(_plan(deployment, outputs), deployment.route)
    if way is None:
        return None
    made = {slot: j for j, slot, _ in way.nodes[-1].writes}
    answers = [(name, made.get(deployment.output_slot[name], -1)) for name in outputs or deployment.outputs]
    if any(j < 0 for _, j in answers):
        return None
    return _Course(way, answers, LoneAccounts(ledger, way, deployment))
