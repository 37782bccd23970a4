"""Streams as laws: random graphs with decoupled steps against plain nested loops."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import GRAPH, ModelKey
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.streams import (
    Content,
    Model,
    StreamRequest,
    StreamSim,
    draw_wires,
    make_graph,
    right_answers,
)


def count_of(seed: int, most: int) -> Callable[[Content], int]:
    """How often a step answers: any number up to `most`, always the same for the same input."""

    def answers(made: Content) -> int:
        return Random(f"{seed} {made.made_of}").randint(0, most)

    return answers


def draw_world(seed: int) -> StreamSim:
    random = Random(seed)
    models = []
    for n in range(6):
        slow = random.choice([(1, 1), (1, 9), (5, 20)])
        answers = count_of(seed, random.choice([1, 3, 7])) if n >= 4 else None
        models.append(
            Model(
                ModelKey("abcdef"[n], 1),
                random.randint(1, 3),
                slow,
                answers,
                # A decoupled model that keeps its instance may wait in circles; see the tests of those.
                keeps_instance=False,
                max_batch_size=random.choice([1, 8]),
            )
        )
    while True:
        wires, outputs = draw_wires(random, models)
        if any(models[m].answers is not None for m, _ in wires):
            break
    limit = random.choice([0, 1, 2, 4])
    graph = make_graph(models, wires, outputs, limit, is_shared=random.random() < 0.25)
    requests = []
    for number in range(random.randint(1, 4)):
        request = StreamRequest(number, random.randint(0, 10), reads_every_ns=random.choice([0, 0, 3, 30]))
        if random.random() < 0.2:
            request.leaves_after_ns = random.randint(0, 60)
        right = right_answers(graph, {model.key: model for model in models}, request)
        if random.random() < 0.2 and right:
            request.fails_at = random.choice(random.choice(right))
        requests.append(request)
    return StreamSim(graph, models, requests, seed)


@given(st.integers(0, 2**32))
def test_every_answer_is_the_right_one_and_in_its_place(seed: int) -> None:
    draw_world(seed).run()


def chain(
    limit: int,
    *ns: int,
    answers: int = 1000,
    instances: int = 1,
    reads_every_ns: int = 0,
    requests: int = 1,
    keeps_instance: bool = True,
) -> StreamSim:
    models = [Model(ModelKey("p", 1), 1, (1, 1), lambda _: answers, keeps_instance)]
    models += [Model(ModelKey(f"m{i}", 1), instances, (each, each), max_batch_size=1) for i, each in enumerate(ns)]
    wires = [(0, [GRAPH])] + [(i + 1, [i]) for i in range(len(ns))]
    graph = make_graph(models, wires, [len(ns)], limit)
    given = [StreamRequest(number, reads_every_ns=reads_every_ns) for number in range(requests)]
    return StreamSim(graph, models, given)


@pytest.mark.parametrize("limit", [1, 4, 16])
@pytest.mark.parametrize("ns", [(10,), (1, 1, 10), (10, 1, 1), (3, 10, 2)])
@pytest.mark.fault("P7")
def test_nothing_piles_up_behind_a_producer_ten_times_faster(limit: int, ns: tuple[int, ...]) -> None:
    sim = chain(limit, *ns, answers=300).run()
    assert len(sim.answers[0]) == 300
    assert sim.most_live <= limit * len(ns) + limit


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.fault("P10")
def test_sixteen_streams_of_eight_answers(limit: int) -> None:
    sim = chain(limit, 10, answers=8, requests=16).run()
    assert [len(answers) for answers in sim.answers.values()] == [8] * 16


def loop_of(limit: int, instances: int, requests: int = 1, answers: int = 9) -> StreamSim:
    """A decoupled model that keeps its instance, and is a later step of its own graph, too."""
    counts: dict[object, int] = {0: answers, 1: 1}  # of the first step and of the second
    model = Model(ModelKey("p", 1), instances, (1, 1), lambda made: counts[made.made_of[0]], max_batch_size=1)
    graph = make_graph([model], [(0, [GRAPH]), (0, [0])], [1], limit)
    return StreamSim(graph, [model], [StreamRequest(number) for number in range(requests)])


def test_a_pause_that_could_never_end_fails_and_names_the_circle() -> None:
    sim = loop_of(2, instances=1)
    sim.run()
    assert sim.ended[0].startswith("max_inflight_requests 2 can never be kept: step 'n0' waits in its send until")
    assert "a step 'n1' is over, which needs an instance of model 'p'" in sim.ended[0]


def test_two_requests_that_keep_both_instances_are_told_apart_from_one_that_may_wait() -> None:
    sim = loop_of(2, instances=2, requests=2).run()
    assert sorted(bool(text) for text in sim.ended.values()) == [False, True]


@pytest.mark.parametrize(("limit", "instances"), [(0, 1), (9, 1), (1, 2)])
def test_what_can_go_on_is_left_alone(limit: int, instances: int) -> None:
    sim = loop_of(limit, instances).run()
    assert sim.ended == {0: ""}


@given(st.integers(0, 2**32))
def test_whatever_keeps_its_instances_ends(seed: int) -> None:
    """Models that answer before execute returns, in loops of any kind: nobody waits for ever, and what is answered is
    right.
    """
    random = Random(seed)
    models = [
        Model(ModelKey("abc"[n], 1), random.randint(1, 2), (1, 5), answers, max_batch_size=1)
        for n, answers in enumerate([None, count_of(seed, 6), count_of(seed + 1, 6)])
    ]
    wires, outputs = draw_wires(random, models)
    graph = make_graph(models, wires, outputs, random.choice([0, 1, 2]))
    if graph.is_decoupled:
        StreamSim(graph, models, [StreamRequest(number) for number in range(3)], seed).run()


def test_a_stream_that_is_over_is_held_by_no_circle_of_references() -> None:
    sim = chain(2, 3, answers=20)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        sim.run()
        sim.flows.clear()
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, Flow | Ticket)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_nobody_is_the_last_reader_of_what_other_iterations_read_too() -> None:
    models = [Model(ModelKey("p", 1), answers=lambda _: 2), Model(ModelKey("m", 1))]
    graph = make_graph(models, [(0, [GRAPH]), (1, [GRAPH, 0]), (1, [1])], [2], 0)
    seen: dict[str, list[bool]] = {}

    class Sim(StreamSim):
        def _run(self, batch: Batch) -> None:
            for ticket in batch.tickets:
                seen[ticket.node.name] = [ticket.flow.is_last_reader(slot) for slot in ticket.node.inputs]
            super()._run(batch)

    Sim(graph, models, [StreamRequest(0)]).run()
    assert seen == {"n0": [False], "n1": [False, True], "n2": [True]}
