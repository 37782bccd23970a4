"""The work of the scheduler grows with the number of its events, not with its square: from n to 4 n below sixfold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from flowserve.errors import Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import Graph
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.call_graph import CalledFlow
from flowserve.scheduling.rate_limit.limiter import Available, Limiter, Needs
from flowserve.testing.strategies import chain_graph, plain_graph
from tests.support.growth import QUADRATIC_FROM, growth
from tests.support.recorder import Recorder, rows_of, simple_model

A, B, C, D = (simple_model(number, max_batch_size=2) for number in range(4))
pytestmark = pytest.mark.fault("W5")
Work = Callable[[], object]


# ------------------------------------------------------------------------------------------------------ calls of models


def call(server: Recorder, batch: Batch, graph: Graph) -> CalledFlow:
    """The execution of `batch` calls `graph`. Raises Unavailable if the call is refused."""
    plan = make_plan(graph)
    flow = CalledFlow(plan, [server.queues[node.model] for node in plan.nodes], [rows_of()], 0, 1 << 40)
    server.scheduler.call(batch, flow)
    return flow


def execution(server: Recorder) -> Batch:
    """A client's request to A has started, and is about to make calls."""
    for model in (A, B, C, D):
        server.serve(model)
    server.submit(plain_graph(A), "client")
    server.turn()
    return server.running[-1]


def test_calls_that_one_execution_makes_at_once_grow_linearly() -> None:
    def prepare(n: int) -> Work:
        server = Recorder()
        caller = execution(server)

        def work() -> None:
            flows = [call(server, caller, chain_graph("chain", [B, C])) for _ in range(n)]
            for flow in flows:
                server.scheduler.calls.over(caller, flow)

        return work

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_calls_of_a_model_that_waits_itself_grow_linearly() -> None:
    """Each of them is accepted because the execution that occupies its model can continue."""

    def prepare(n: int) -> Work:
        server = Recorder()
        caller = execution(server)
        call(server, caller, plain_graph(B))
        server.turn()
        call(server, server.running[-1], plain_graph(C))
        return lambda: [call(server, caller, plain_graph(B)) for _ in range(n)]

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_refused_calls_beside_open_ones_grow_linearly() -> None:
    def prepare(n: int) -> Work:
        server = Recorder()
        caller = execution(server)
        for _ in range(n):
            call(server, caller, plain_graph(B))

        def work() -> None:
            for _ in range(n):
                with suppress(Unavailable):
                    call(server, caller, plain_graph(A))

        return work

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_calls_of_models_that_need_resources_grow_linearly() -> None:
    def prepare(n: int) -> Work:
        server = Recorder(limiter=Limiter([Available("R", 2)]))
        for model in (A, B):
            server.serve(model, needs=[Needs({("R", 0): 1})])
        server.submit(plain_graph(A), "client")
        server.turn()
        caller = server.running[-1]

        def work() -> None:
            for _ in range(n):
                call(server, caller, plain_graph(B))
                server.turn()
                server.done(server.running[-1])

        return work

    assert growth(prepare, 60) < QUADRATIC_FROM
