"""The work of the scheduler grows with the number of its events, not with its square: from n to 4 n below sixfold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import pytest

from flowserve.errors import ModelFailed, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import Graph, ModelKey
from flowserve.scheduling.affinity import AffinityBatcher, CopyCost
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, filler_frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.rate_limit.limiter import Available, Limiter, Needs
from flowserve.scheduling.sequence.sequence import SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, IterativeDirect, IterativeOldest, Oldest
from tests.support.growth import QUADRATIC_FROM, growth
from tests.support.recorder import Recorder, rows_of, simple_model
from tests.support.strategies import Handle, chain_graph, handle_residence, plain_graph

A, B, C, D = (simple_model(number, max_batch_size=2) for number in range(4))
pytestmark = pytest.mark.fault("W5")
Work = Callable[[], object]


# ------------------------------------------------------------------------------------------------------ calls of models


def call(server: Recorder, batch: Batch, graph: Graph) -> Frame:
    """The execution of `batch` calls `graph`. Raises Unavailable if the call is refused."""
    plan = make_plan(graph)
    frame = request_frame(plan, [server.queues[node.model] for node in plan.nodes], [rows_of()], 0, 1 << 40)
    server.scheduler.call(batch, frame)
    return frame


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
            frames = [call(server, caller, chain_graph("chain", [B, C])) for _ in range(n)]
            for frame in frames:
                server.scheduler.calls.over(caller, frame)

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


# ------------------------------------------------------------------------------------------- steps at a response cache


@pytest.mark.parametrize("is_reversed", [False, True])
def test_equal_steps_whose_requests_leave_grow_linearly(is_reversed: bool) -> None:
    """The request whose step runs leaves each time, and the next one's step runs."""

    def prepare(n: int) -> Work:
        server = Recorder()
        server.serve(A)
        server.serve(B, is_cached=True)
        frames = [server.submit(chain_graph("chain", [B, A]), number) for number in range(n)]
        server.turn()

        def leave() -> None:
            for frame in reversed(frames) if is_reversed else frames:
                server.scheduler.cancel(frame)
                server.scheduler.schedule(0)

        return leave

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_equal_steps_whose_leader_fails_grow_linearly() -> None:
    def prepare(n: int) -> Work:
        server = Recorder()
        server.serve(A)
        queue = server.serve(B, is_cached=True)
        for number in range(n):
            server.submit(chain_graph("chain", [B, A]), number)
        server.turn()

        def fail() -> None:
            server.done(server.running[0], errors={0: ModelFailed("no")})
            server.scheduler.schedule(0)
            assert len(queue.batcher) >= n - 3  # one failed, and a batch of at most two started

        return fail

    assert growth(prepare, 60) < QUADRATIC_FROM


# --------------------------------------------------------------------------------------------------------- cancellation


class Ask(NamedTuple):
    """A request of a sequence."""

    of: int


def identify(frame: Frame) -> tuple[int, bool, bool]:
    return frame.request.of, True, False


def sequence_policy(slots: int) -> SequencePolicy:
    return SequencePolicy("a", slots, 1_000)


POLICY = BatchPolicy.simple(2)
LEVELS = Levels(4, 2, LevelPolicy(timeout_ns=500))
BATCHERS: dict[str, Callable[[], Batcher]] = {
    "fifo": lambda: Queue(POLICY),
    "levels": lambda: Queue(POLICY, LEVELS),
    "affinity": lambda: AffinityBatcher(lambda: Queue(POLICY), 2, [0, 1].__getitem__, handle_residence),
    "oldest": lambda: Oldest(sequence_policy(1000), identify, POLICY),
    "oldest, backlog": lambda: Oldest(sequence_policy(1), identify, POLICY),
    "direct": lambda: Direct(sequence_policy(2), identify, filler_frame(None)),
    "iterative": lambda: IterativeOldest(sequence_policy(1000), identify, POLICY),
    "iterative, backlog": lambda: IterativeDirect(sequence_policy(2), identify, filler_frame(None)),
}


def queued(batcher: Batcher, n: int) -> tuple[Recorder, list[Frame]]:
    """`n` requests, each of its own sequence, wait behind others that run on both instances."""
    server = Recorder()
    server.serve(A, batcher, instances=2)
    graph = plain_graph(A)
    for of in range(1, 5):
        server.submit(graph, Ask(of))
        server.turn()
    frames = [server.submit(graph, Ask(of), priority=of % 4 + 1) for of in range(5, 5 + n)]
    server.scheduler.schedule(0)
    return server, frames


@pytest.mark.parametrize("kind", BATCHERS)
def test_cancelled_requests_grow_linearly(kind: str) -> None:
    def prepare(n: int) -> Work:
        server, frames = queued(BATCHERS[kind](), n)

        def work() -> None:
            for frame in frames:
                server.scheduler.cancel(frame)
                server.scheduler.schedule(0)

        return work

    assert growth(prepare, 60) < QUADRATIC_FROM


@pytest.mark.parametrize("kind", BATCHERS)
def test_requests_that_are_cancelled_at_once_grow_linearly(kind: str) -> None:
    def prepare(n: int) -> Work:
        server, frames = queued(BATCHERS[kind](), n)
        return lambda: cancel_all(server, reversed(frames))

    assert growth(prepare, 60) < QUADRATIC_FROM


def test_cancelled_sequences_with_further_requests_grow_linearly() -> None:
    """Each cancellation ends a sequence, and refuses the request behind the cancelled one."""

    def prepare(n: int) -> Work:
        server, frames = queued(BATCHERS["oldest"](), n)
        for frame in frames:
            server.submit(plain_graph(A), frame.request)
        server.scheduler.schedule(0)
        return lambda: cancel_all(server, frames)

    assert growth(prepare, 60) < QUADRATIC_FROM


def cancel_all(server: Recorder, frames: Iterable[Frame]) -> None:
    for frame in frames:
        server.scheduler.cancel(frame)


# ------------------------------------------------------------------------------------------------------------ instances


def test_batches_of_more_instances_on_several_devices_grow_linearly() -> None:
    """Requests wait for the instances of one device, while those of the others are free."""

    def prepare(n: int) -> Work:
        server = Recorder()
        devices = [number % 8 for number in range(n)]
        slow = CopyCost(each_ns=1 << 40)
        affine = AffinityBatcher(lambda: Queue(BatchPolicy.single()), 1, devices.__getitem__, handle_residence, slow)
        server.serve(A, affine, instances=n)
        for number in range(n):
            server.submit(plain_graph(A), number, [Handle(0, 2, 0, 1, device=0)])
        server.turn()

        def work() -> None:
            for _ in range(4):
                server.done(server.running[0])
                server.scheduler.schedule(0)

        return work

    assert growth(prepare, 40) < QUADRATIC_FROM


# ---------------------------------------------------------------------------------------------------------- deployments


@pytest.mark.parametrize("kind", ["delay", "levels", "oldest"])
def test_a_request_costs_the_same_beside_more_idle_deployments(kind: str) -> None:
    delayed = BatchPolicy.simple(2, 1000)

    def prepare(n: int) -> Work:
        server = Recorder()
        server.serve(A)
        for version in range(n):
            batcher = Queue(delayed) if kind == "delay" else BATCHERS[kind]()
            server.scheduler.models.add(ModelQueue(ModelKey("idle", version), batcher, range(1)))

        def work() -> None:
            server.submit(plain_graph(A), "client")
            server.scheduler.schedule(0)
            server.scheduler.schedule(0)

        return work

    assert growth(prepare, 100) < 1.5
