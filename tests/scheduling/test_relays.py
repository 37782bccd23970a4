"""Which steps of a graph one batch runs through in one go. That it goes right whatever becomes of it, the simulator's
laws say (tests/simulation, test_dispatcher_laws.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from flowserve.graph.conversion import Conversion
from flowserve.graph.plan import make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.scheduling.affinity import Affine
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.calls import CalledFlow
from flowserve.scheduling.crowd import Crowd
from flowserve.scheduling.relays import Relay, RelayingDispatcher, Way, find_way, whole_way
from flowserve.scheduling.router import Flow
from flowserve.testing.recorder import rows_of
from flowserve.values import DType, TensorSpec

ANY = 1 << 30
PORT = TensorSpec("X", DType.FP32, (2,))
# What each step reads: (step, output), and GRAPH for the request's input.
Reads = Sequence[Sequence[tuple[int, int]]]
START: tuple[tuple[int, int], ...] = ((GRAPH, 0),)
CHAIN: Reads = (START, [(0, 0)], [(1, 0)])
DIAMOND: Reads = (START, [(0, 0)], [(0, 0)], [(1, 0), (2, 0)])


def graph_of(reads: Reads, answers: Sequence[tuple[int, int]] | None = None, models: str = "abcdefgh") -> Graph:
    """Step n is of the n-th of `models`, with as many outputs as are read or `answers`; by default the last's."""
    answers = [(len(reads) - 1, 0)] if answers is None else answers
    used = {source for step in reads for source in step} | {*answers}
    nodes = tuple(
        Node(
            n,
            f"{models[n]}#{n}",
            ModelKey(models[n], 1),
            (PORT,) * len(step),
            (PORT,) * max(j + 1 for i, j in used | {(n, 0)} if i == n),
            8,
        )
        for n, step in enumerate(reads)
    )
    edges = [Edge(f"t{i}_{j}", i, j, n, k) for n, step in enumerate(reads) for k, (i, j) in enumerate(step)]
    edges += [Edge(f"t{i}_{j}", i, j, GRAPH, k) for k, (i, j) in enumerate(answers)]
    outputs = tuple(replace(PORT, name=f"out{k}") for k in range(len(answers)))
    return Graph("graph", 1, (PORT,), outputs, 8, nodes, tuple(edges), is_ensemble=True)


def changed(graph: Graph, n: int, **changes: object) -> Graph:
    nodes = [*graph.nodes]
    nodes[n] = replace(nodes[n], **changes)
    return replace(graph, nodes=tuple(nodes))


def queues(
    graph: Graph, stays: str = "", alone: str = "", refuses: str = "", delays: str = ""
) -> tuple[ModelQueue, ...]:
    """One for each step. `stays`: models that hand nothing on; `alone`: that are handed one request at a time;
    `refuses`: that are handed nothing; `delays`: that wait for company.
    """
    made: dict[ModelKey, ModelQueue] = {}
    for node in graph.nodes:
        name = node.model.name
        delay_ns = 1000 if name in delays else 0
        batcher = OneByOne() if name in alone else DynamicBatcher(BatchPolicy.simple(8, delay_ns))
        queue = made.setdefault(node.model, ModelQueue(node.model, batcher, range(1)))
        queue.passes_on = name not in stays
        queue.receives = 0 if name in refuses else 1 if name in alone else ANY
    return tuple(made[node.model] for node in graph.nodes)


def way_of(graph: Graph, first: int = 0, wanted: Collection[str] | None = None, **queued: str) -> Way | None:
    plan = make_plan(graph, wanted)
    return find_way(plan, plan.nodes[first], queues(graph, **queued))


def stops(graph: Graph, first: int = 0, wanted: Collection[str] | None = None, **queued: str) -> list[int]:
    way = way_of(graph, first, wanted, **queued)
    return [] if way is None else [node.index for node in way.nodes]


def test_a_chain_is_run_through_from_wherever_it_begins() -> None:
    assert [stops(graph_of(CHAIN), first) for first in range(3)] == [[0, 1, 2], [1, 2], []]


def test_a_diamond_is_run_through_and_its_arms_alone_are_not() -> None:
    diamond = graph_of(DIAMOND)
    assert stops(diamond) == [0, 1, 2, 3]
    assert stops(diamond, first=1) == [], "its end reads the other arm, too"
    assert stops(diamond, refuses="c") == [], "c would wait until b is done"
    assert stops(diamond, refuses="d") == [], "nobody reads what b makes before the end"


def test_what_was_made_in_between_is_nobodys_unless_it_is_answered() -> None:
    chain, told = way_of(graph_of(CHAIN)), way_of(graph_of(CHAIN, [(1, 0), (2, 0)]))
    diamond, skips = way_of(graph_of(DIAMOND)), way_of(graph_of([*CHAIN[:2], [(0, 0), (1, 0)]]))
    assert chain is not None and told is not None and diamond is not None and skips is not None  # noqa: PT018, four for the types' sake
    assert [way.is_private for way in (chain, told, diamond, skips)] == [True, False, True, True]
    assert [left for _, left in chain.inner] == [0, 1]
    assert [left for _, left in diamond.inner] == [0, 1, 1]
    assert [left for _, left in skips.inner] == [1, 1]


def test_a_step_that_hands_nothing_on_is_the_last() -> None:
    assert stops(graph_of(CHAIN), stays="b") == [0, 1]
    assert stops(graph_of(CHAIN), stays="a") == []
    assert stops(graph_of(DIAMOND), stays="b") == [], "c would wait for b"


def test_a_model_whose_queue_waits_for_company_is_handed_nothing() -> None:
    assert stops(graph_of(CHAIN), refuses="c") == [0, 1]
    assert stops(graph_of(CHAIN), refuses="b") == []
    assert stops(graph_of(CHAIN), refuses="a") == [0, 1, 2], "the first has its batch"


def test_somebody_else_who_reads_what_is_made_ends_it_before() -> None:
    aside = graph_of([START, [(0, 0)], [(1, 0)], [(1, 0), (GRAPH, 0)]], [(2, 0), (3, 0)])
    assert stops(aside) == [0, 1], "the last step reads the request, too, and would wait for c"
    assert stops(aside, wanted=["out0"]) == [0, 1, 2], "nobody wants it"


def test_a_model_stands_in_a_relay_once() -> None:
    assert stops(graph_of(CHAIN, models="aba")) == [0, 1]
    assert stops(graph_of(CHAIN, models="aab")) == []


def test_subsets_of_the_outputs_have_ways_of_their_own() -> None:
    fork = graph_of([START, [(0, 0)], [(0, 0)]], [(1, 0), (2, 0)])
    assert stops(fork) == [0, 1, 2]
    assert stops(fork, wanted=["out0"]) == [0, 1]
    assert stops(fork, wanted=["out1"]) == [0, 2]


@pytest.mark.parametrize(
    "what", ["converts", "optional", "no batch dimension", "read twice", "open shape", "decoupled"]
)
def test_a_step_that_the_next_process_cannot_judge_is_not_run_through(what: str) -> None:
    graph = graph_of([START, [(0, 0), (0, 0)]] if what == "read twice" else CHAIN[:2])
    assert (stops(graph) == [0, 1]) == (what != "read twice")
    if what == "converts":
        edges = [replace(e, conversion=Conversion((((2,), (1, 2)),))) if e.consumer == 1 else e for e in graph.edges]
        graph = replace(changed(graph, 1, inputs=(replace(PORT, dims=(1, 2)),)), edges=tuple(edges))
    elif what == "optional":
        graph = changed(graph, 1, inputs=(replace(PORT, optional=True),))
    elif what == "no batch dimension":
        graph = changed(graph, 1, max_batch_size=0, inputs=(replace(PORT, dims=(1, 2)),))
    elif what == "open shape":
        graph = changed(graph, 0, outputs=(replace(PORT, dims=(-1,)),))
    elif what == "decoupled":
        graph = changed(graph, 0, decoupled=True)
    assert stops(graph) == []


def test_a_step_that_reads_nothing_is_no_stop() -> None:
    assert stops(graph_of([START, [(0, 0)], []], [(1, 0), (2, 0)])) == [0, 1]


def test_the_smallest_of_those_further_on_says_how_large_a_batch_may_be() -> None:
    graph = changed(changed(graph_of(CHAIN), 0, max_batch_size=2), 2, max_batch_size=4)
    way = way_of(graph)
    assert way is not None
    assert (way.row_max, way.member_max) == (4, ANY)
    way = way_of(graph, alone="b")
    assert way is not None
    assert (way.row_max, way.member_max) == (4, 1)


@pytest.mark.parametrize(
    ("reads", "answers", "queued", "whole"),
    [
        ([START], None, {}, [0]),
        (CHAIN, None, {}, [0, 1, 2]),
        (DIAMOND, None, {}, [0, 1, 2, 3]),
        ([START], None, {"stays": "a"}, []),
        (CHAIN, None, {"refuses": "c"}, []),
        (CHAIN, None, {"delays": "a"}, []),
        (CHAIN, [(1, 0), (2, 0)], {}, []),
        ([START, START, [(0, 0), (1, 0)]], None, {}, []),
        ([*DIAMOND, [(3, 0), (GRAPH, 0)]], None, {}, []),
    ],
    ids=["model", "chain", "diamond", "hands on", "reads", "waits", "told on the way", "two begin", "goes further"],
)
def test_one_that_is_alone_goes_through_a_whole_plan_or_not_at_all(
    reads: Reads, answers: Sequence[tuple[int, int]] | None, queued: dict[str, str], whole: list[int]
) -> None:
    graph = graph_of(reads, answers)
    way = whole_way(make_plan(graph), queues(graph, **queued))
    assert ([] if way is None else [node.index for node in way.nodes]) == whole


def test_one_that_is_alone_heeds_the_delay_of_a_model_that_is_down_for_now() -> None:
    graph = graph_of([START])
    route = queues(graph, delays="a")
    dispatcher = RelayingDispatcher(lambda _: None, lambda _: None, relay=lambda _: False)
    for queue in route:
        dispatcher.add(queue)
    dispatcher.close(route[0], "it crashes")
    assert whole_way(make_plan(graph), route) is None


class Server:
    """Relays that begin are kept, and so is what runs by itself."""

    def __init__(self, graph: Graph, **queued: str) -> None:
        self.relays: list[Relay] = []
        self.running: list[Batch] = []
        self.answers: list[Flow] = []
        self.plan, self.route = make_plan(graph), queues(graph, **queued)
        self.dispatcher = RelayingDispatcher(self.running.append, self.answers.append, relay=self._relay)
        for queue in dict.fromkeys(self.route):
            self.dispatcher.add(queue)

    def _relay(self, relay: Relay) -> bool:
        self.relays.append(relay)
        return True

    def submit(self, *rows: int) -> None:
        for one in rows:
            self.dispatcher.submit(Flow(self.plan, self.route, [rows_of(one)], 0))
        self.turn()

    def turn(self) -> None:
        self.dispatcher.pump(0)
        self.dispatcher.check()


def test_the_rest_of_those_who_waited_does_not_overtake_them_as_a_relay() -> None:
    server = Server(graph_of(CHAIN))
    first = server.route[0]
    first.instances = (0, 1)
    first.free.append(1)
    assert isinstance(first.batcher, DynamicBatcher)
    first.batcher.crowd = Crowd(lambda: server.dispatcher.begun, lambda: True, 2)
    server.submit(1, 1, 1, 1)
    assert [len(batch.tickets) for batch in server.running] == [2, 2]
    assert not server.relays


def test_a_batch_of_too_many_rows_or_members_runs_by_itself() -> None:
    small = changed(graph_of(CHAIN), 2, max_batch_size=4)
    for rows, goes in ([4], True), ([5], False), ([2, 2], True), ([2, 3], False), ([0, 2], False):
        server = Server(small)
        server.submit(*rows)
        assert (len(server.relays), len(server.running)) == (goes, not goes), rows
    server = Server(graph_of(CHAIN), alone="c")
    server.submit(1, 1)
    assert not server.relays


def test_a_queue_with_a_line_for_each_device_or_that_keeps_order_takes_no_part() -> None:
    lines = Affine(OneByOne, 8, [0, 1].__getitem__, lambda facts: (0, 8))
    for queue in (
        ModelQueue(ModelKey("a", 1), lines, range(2)),
        ModelQueue(ModelKey("a", 1), OneByOne(), range(2), keeps_order=True),
    ):
        queue.passes_on, queue.receives = True, 1
        Server(graph_of(CHAIN)).dispatcher.add(queue)
        assert (queue.passes_on, queue.receives) == (False, 0)


def test_a_flow_that_goes_on_after_its_relay_has_nothing_left_to_be_read() -> None:
    server = Server(graph_of([*DIAMOND, [(3, 0)]]), refuses="e")
    server.submit(1)
    (relay,) = server.relays
    assert [queue.key.name for queue in relay.way.queues] == ["a", "b", "c", "d"]
    (ticket,) = relay.batch.tickets
    server.dispatcher.set_free(relay, range(4))
    server.dispatcher.relayed(relay, [[rows_of()]], 0)
    server.turn()
    assert [batch.queue.key.name for batch in server.running] == ["e"]
    slots = [slot for node in server.plan.nodes for slot in node.outputs]
    assert [ticket.flow.readers[slot] for slot in slots] == [0, 0, 0, 1, 1]
    assert ticket.flow.missing == [0] * 5


def test_one_that_has_begun_alone_is_taken_over_and_answered() -> None:
    for reads in (CHAIN, [START]):
        server = Server(graph_of(reads))
        flow = Flow(server.plan, server.route, [rows_of(2)], 0)
        way = whole_way(server.plan, server.route)
        assert way is not None
        relay = server.dispatcher.adopt(flow, way, [0] * len(reads), 7)
        (ticket,) = relay.batch.tickets
        assert (ticket.rows, ticket.queued_ns, relay.batch.started_ns) == (2, 7, 7)
        server.submit(1)  # whoever comes now waits: all instances are taken
        assert (server.dispatcher.in_flight, server.relays, server.running) == (2, [], [])
        server.dispatcher.set_free(relay, range(len(reads)))
        server.dispatcher.relayed(relay, [[rows_of(2)]], 8)
        assert server.answers == [flow]
        assert all(count >= 0 for count in flow.readers)
        server.turn()
        assert len(server.relays) + len(server.running) == 1


def test_a_relay_that_came_by_is_nothing_that_a_call_waits_for() -> None:
    graph = graph_of([*CHAIN, [(2, 0)]])
    plan = make_plan(graph)
    way = find_way(plan, plan.nodes[0], queues(graph, refuses="d"))
    assert way is not None
    flow = CalledFlow(plan, queues(graph), [rows_of()], 0)
    flow.begin()
    flow.pass_over(plan.nodes[0], way.nodes, way.inner)
    flow.finish_step(way.nodes[-1], [[rows_of()]], 0)
    assert flow.finished == {0, 1, 2}
