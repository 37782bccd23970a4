"""One servable version of one name: its configuration, its graph, its admission control and its counters.

Decides what belongs to a deployment, how a request becomes a flow there, and what state a name is in. Does not know how
it was loaded. Made by deployments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from weakref import ref

from flowserve.config.types import ModelConfig
from flowserve.errors import Unsupported
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.types import GRAPH, Graph
from flowserve.memory.arena import Arena
from flowserve.observe.statistics import Statistics
from flowserve.observe.traffic import NodeTraffic, node_traffics
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.engine.validation import Validator
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.flow import Flow
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.streaming.iterations import InflightSlots, StreamFlow, WholeFlow
from flowserve.values import Request, TensorSpec

_PLANS_MAX: Final = 64
# Triton's text, as its HTTP endpoint begins it.
ONE_ANSWER: Final = "HTTP end point doesn't support models with decoupled transaction policy"
MakeFlow = Callable[..., Flow]
NO_LABELS: Final[Mapping[str, Sequence[str]]] = {}


class Deployment:
    """A version that serves. `inputs` and `outputs` are its specs by name, in the configuration's order."""

    def __init__(
        self,
        config: ModelConfig,
        graph: Graph,
        statistics: Statistics,
        versions: list[int],
        queues: tuple[ModelQueue, ...],
        pins: frozenset[object] = frozenset(),
        labels: Mapping[str, Sequence[str]] = NO_LABELS,
    ) -> None:
        self.name = graph.name
        self.version = graph.version
        self.config = _as_it_responds(config, graph)
        self.graph = graph
        self.plan: Plan = make_plan(graph)
        self._plans: dict[tuple[str, ...], Plan] = {}
        self.queues = queues  # of each node's model
        self.keeps_order = any(queue.order is not None for queue in queues)
        self.pins = pins  # keep what those queues run on (generations.py) for as long as this deployment is referenced
        self.validator = Validator(graph)
        self.is_decoupled = graph.is_decoupled
        self.sequences = tuple(queue.bound for queue in queues if isinstance(queue.bound, Sequences))
        self.elder: Deployment | None = None  # that it replaced, while sequences that began there go on
        self.admission: AdmissionController | None = None  # where requests are limited or cached
        # Where a large request is best received: the memory of the process that reads it. None: anywhere.
        self.arena: Arena | None = None
        self.statistics = statistics
        self.traffic: tuple[NodeTraffic, ...] = node_traffics(graph)
        # How a request becomes a flow, by what its graph needs. `make_flow` is for one response, `make_stream` for any.
        self.make_flow, self.make_stream = _flow_makers(graph, self.plan, self.traffic)
        statistics.nodes = self.traffic  # of the newest graph; requests on an older one finish on that one's
        self.platform = config.platform or config.backend
        self.versions = versions  # all ready versions of the name, shared between its deployments
        self.inputs: Mapping[str, TensorSpec] = {spec.name: spec for spec in graph.inputs}
        self.outputs: Mapping[str, TensorSpec] = {spec.name: spec for spec in graph.outputs}
        self.labels = labels  # of outputs that have some: what each index of the output means
        self.output_slot = {spec.name: self.plan.output_slots[i] for i, spec in enumerate(graph.outputs)}
        # Of the outputs whose shape the client sees otherwise than their producer; mostly none.
        self.output_conversions = {
            graph.outputs[edge.input].name: edge.conversion
            for edge in graph.edges
            if edge.consumer == GRAPH and edge.conversion is not None
        }

    def deployment_of(self, request: Request) -> Deployment:
        """Where a request runs: that of a sequence where the sequence began, every other one here."""
        if request.sequence_id and not request.sequence_start:
            place: Deployment | None = self
            while place is not None:
                if place.goes_on(request):
                    return place
                place = place.elder
        return self

    def goes_on(self, request: Request) -> bool:
        """Whether a request belongs to a sequence that is open here."""
        return not request.sequence_start and any(one.is_live(request.sequence_id) for one in self.sequences)

    def replaces(self, elder: Deployment | None) -> None:
        """From now on requests come here; sequences that have begun there, or in what that replaced, go on until the
        last of them has ended.
        """
        while elder is not None and (elder.queues == self.queues or not any(one.live for one in elder.sequences)):
            elder = elder.elder
        self.elder = elder
        for sequences in () if elder is None else elder.sequences:
            sequences.on_quiet.append(partial(_look_again, ref(self)))  # which may be replaced itself by then

    def plan_for(self, outputs: tuple[str, ...]) -> Plan:
        """The plan without the steps that no requested output needs. `outputs` are names of outputs."""
        if not self.graph.is_ensemble or len(set(outputs)) == len(self.graph.outputs):
            return self.plan
        plan = self._plans.get(outputs)
        if plan is None:
            if len(self._plans) >= _PLANS_MAX:  # clients choose outputs in any order and number
                self._plans.clear()
            plan = self._plans[outputs] = make_plan(self.graph, outputs)
        return plan


def _as_it_responds(config: ModelConfig, graph: Graph) -> ModelConfig:
    """An ensemble is decoupled if one of its steps is, regardless of its own file; its metadata say so."""
    if not (graph.is_ensemble and graph.is_decoupled):
        return config
    return replace(config, json={**config.json, "model_transaction_policy": {"decoupled": True}})


def _flow_makers(graph: Graph, plan: Plan, gauges: Sequence[NodeTraffic]) -> tuple[MakeFlow, MakeFlow]:
    nesting = plan.nesting
    if nesting is None and not graph.is_decoupled:
        return Flow, Flow
    shared = InflightSlots(nesting.limits, gauges) if nesting is not None and nesting.is_shared else None

    def make(kind: type[StreamFlow], plan: Plan, *arguments: Any) -> Flow:
        if plan.nesting is None:
            return Flow(plan, *arguments)
        return kind(plan, *arguments, shared=shared, gauges=gauges)

    def refuse(*_: Any) -> Flow:
        how = "generate_stream asks for a stream of answers, as do gRPC's ModelStreamInfer and an engine's stream()"
        raise Unsupported(f"{ONE_ANSWER}: '{graph.name}' may answer any number of times; {how}")

    return (refuse if graph.is_decoupled else partial(make, WholeFlow)), partial(make, StreamFlow)


def _look_again(place: ref[Deployment]) -> None:
    """Sequences that a deployment kept its elder for have ended."""
    deployment = place()
    if deployment is not None:
        deployment.replaces(deployment.elder)


@dataclass(slots=True)
class Entry:
    """The entry of one name: its ready versions, or why it has none. `state` is its state in the repository index.

    A `reason` beside ready versions is why they could not be replaced. `is_wanted`: the server is not ready without it.
    """

    name: str
    state: str = "LOADING"
    reason: str = ""
    is_wanted: bool = False
    ready: dict[int, Deployment] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    @property
    def latest(self) -> Deployment | None:
        return self.ready[self.versions[-1]] if self.versions else None
