"""Property: the stages of a batch on a route are counted like batches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowserve.backends.base import Results
from flowserve.errors import Internal
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.types import Graph
from flowserve.observe.statistics import Statistics
from flowserve.observe.traffic import NodeTraffic, node_traffics
from flowserve.runtime.engine.accounting import record_batch, record_finished, record_stages
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.route import find_route
from tests.support.recorder import simple_model, step_graph
from tests.support.strategies import Handle

GRAPHS = [step_graph(*edges) for edges in (["ab"], ["ab", "bc"], ["ab", "bc", "cd"], ["ab", "ac", "bd", "cd"])]


@dataclass(eq=False)
class Owner:
    """The attributes of a deployment that accounting reads."""

    traffic: tuple[NodeTraffic, ...]
    statistics: Statistics


@dataclass(frozen=True)
class Request:
    inputs: dict[str, list[int]]


class Counted:
    """One batch on a route of a graph, and its statistics."""

    def __init__(self, graph: Graph, queued_ns: Sequence[int], started_ns: int) -> None:
        self.plan: Plan = make_plan(graph)
        self.owner = Owner(node_traffics(graph), Statistics("graph", 1))
        self.statistics = [Statistics(node.name, 1) for node in graph.nodes]
        queues = [
            ModelQueue(model.key, model.batcher(), [0], statistics=statistics, route_groups={0: 0})
            for model, statistics in zip(map(simple_model, range(len(graph.nodes))), self.statistics, strict=True)
        ]
        request = Request({"X": [0]})
        tensors = [Handle(0, 1, 0, 1, object())]
        self.frames = [request_frame(self.plan, queues, tensors, 0, 0, request, self.owner) for _ in queued_ns]
        node = self.plan.nodes[0]
        tickets = [Ticket(frame, node, 1, None, ns) for frame, ns in zip(self.frames, queued_ns, strict=True)]
        self.batch = Batch(queues[0], 0, tickets, started_ns)
        route = find_route(self.plan, node, queues)
        assert route is not None
        assert len(route) == len(graph.nodes)
        self.batch.take(route, [0] * len(route))

    def counted(self, now_ns: int) -> list[Any]:
        record_finished([frame for frame in self.frames if frame.record.error is None], now_ns)
        for one in (*self.statistics, self.owner.statistics):
            one.add_up()
            one.last_error_ms = 0
        return [self.figures(one) for one in (*self.statistics, self.owner.statistics)]

    @staticmethod
    def figures(statistics: Statistics) -> list[Any]:
        found: list[Any] = []
        for name in Statistics.__dataclass_fields__:
            if not name.startswith("_") and name not in ("nodes", "responses"):
                value = getattr(statistics, name)
                found.append((name, list(value.counts) if hasattr(value, "counts") else value))
        return found


@given(st.data())
def test_properties_stages_of_a_route_count_as_batches_of_their_own(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from(GRAPHS))
    queued_ns = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    gaps = st.integers(0, 1000)
    one, other = (Counted(graph, queued_ns, 10) for _ in range(2))
    count = data.draw(st.integers(1, len(graph.nodes)))
    has_failed = count < len(graph.nodes) and data.draw(st.booleans())
    at_ns = 10
    made: list[Results] = []
    for node in graph.nodes[:count]:
        taken = [8] * len(node.inputs) if not made or data.draw(st.booleans()) else ()
        gathered_ns = at_ns + data.draw(gaps)
        at_ns = gathered_ns + data.draw(gaps)
        made.append(Results([], gathered_ns=gathered_ns, computed_ns=at_ns, placed=[8], taken=taken))
    now_ns = at_ns + data.draw(gaps)
    failed: set[int] = set()
    if not has_failed:
        failed = data.draw(st.sets(st.integers(0, len(queued_ns) - 1)))
        made[-1].errors = {m: Internal("failed") for m in failed}
    record_stages(one.batch, made, has_failed, now_ns, ())
    since_ns = 10
    for i, results in enumerate(made):
        stage = other.batch.stage(i)
        if i:
            stage.begin_at(since_ns)
        is_last = i == count - 1 and not has_failed
        over_ns = now_ns if is_last else results.computed_ns
        record_batch(other.statistics[i], stage, results, over_ns, [8] * len(stage.tickets[0].node.inputs), ())
        since_ns = results.computed_ns
    for each in (one, other):
        for m in failed:
            each.frames[m].record.error = Internal("failed")
        for m, frame in enumerate(each.frames):
            if m not in failed:
                assert sum(frame.record.took) == (made[-1].computed_ns if has_failed else now_ns) - queued_ns[m]
    assert [frame.record.took for frame in one.frames] == [frame.record.took for frame in other.frames]
    assert one.counted(now_ns) == other.counted(now_ns)
