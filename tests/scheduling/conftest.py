"""Short names for the tests of one state machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from flowserve.graph.plan import make_plan
from flowserve.scheduling.frames.frame import Frame, Ticket, request_frame
from tests.support.recorder import Recorder, rows_of, simple_model
from tests.support.strategies import plain_graph


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sequences", type=int, default=2000, help="how many clients of sequences to simulate; 10000 before a release"
    )


@pytest.fixture
def server() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def ticket() -> Callable[..., Ticket]:
    """`ticket(rows=2, at=60, key="x")`: a step of a new request unless `frame` is given."""
    plan = make_plan(plain_graph(simple_model(0)))

    def make(rows: int = 1, at: int = 0, key: Hashable = None, frame: Frame | None = None) -> Ticket:
        made = Ticket(frame or request_frame(plan, (), [rows_of(rows)], at), plan.nodes[0], rows, key)
        made.queued_ns = at
        return made

    return make
