"""Routes through worker processes: a batch passes several processes and returns in one reply.

Every test runs real processes behind a real engine. Afterwards no request, instance or memory may be held: see
`Routed.check_idle`.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import FlowserveError, InstanceDied, ModelFailed, Overloaded
from flowserve.graph.types import ModelKey
from flowserve.observe.statistics import Statistics
from flowserve.observe.trace import Trace
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.ipc.channel import Channel
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.runtime.workers.supervisor import Delays
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.routes import Routes
from flowserve.values import Array, DType, Request
from tests.support.engine import add_chain
from tests.support.processes import OUT, ServedInProcesses, all_at_once, no_more_descriptors

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

MS = 1_000_000
MODELS = ("one", "two", "three")
STEP = {"one": 2, "two": 3, "three": 5}  # the factor of each model of the chain
WHOLE = 30

# A row is [value, acts, what, ...]. The model with number `acts` does `what` with a request that contains such a row.
ERROR, RAISE, EXIT, SLEEP, EXIT_LATER, NOTHING, DTYPE, DIMS, ROWS, CALLS, LIE = range(1, 12)
BODY = """
        import time
        what = int(given[0, 2]) if given.shape[1] > 2 and given[0, 1] == {number} else 0
        if given.shape[1] > 4 and given[0, 3] == {number}:
            what = int(given[0, 4])
        if what == 1:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError('model {number} refuses'))
        if what == 2:
            raise ValueError('model {number} raises')
        if what == 3:
            os._exit(3)
        if what == 4:
            time.sleep(0.15)
        if what == 5:
            threading.Timer(0.2, os._exit, (4,)).start()
        if what == 6:
            return pb_utils.InferenceResponse([])
        made = given.copy()
        made[:, 0] *= {factor}
        if what == 7:
            made = made.astype(np.int32)
        if what == 8:
            made = made.reshape(len(made), -1, 1)
        if what == 9:
            made = np.concatenate([made, made])
        if what == 10:
            request = pb_utils.InferenceRequest(
                model_name='beside', requested_output_names=['OUT'], inputs=[pb_utils.Tensor('IN', given)])
            response = request.exec()
            if response.has_error():
                raise ValueError(response.error().message())
            made[:, 0] += pb_utils.get_output_tensor_by_name(response, 'OUT').as_numpy()[:, 0]
        if what == 11:
            from flowserve.backends.worker import shm
            make = shm.stage_words
            lie = [1, int(given[0, 5]), int(given[0, 6]), given.ndim, *given.shape]
            shm.stage_words = lambda *facts: make(*facts)[:5] + lie
"""


def chain_body(name: str) -> str:
    number = MODELS.index(name)
    return BODY.format(number=number, factor=STEP[name]) + OUT.format("made")


def row(value: float, acts: int = -1, what: int = 0, *, rows: int = 1, width: int = 3) -> Array:
    array = np.zeros((rows, width), np.float32)
    array[:, 0] = value
    array[:, 1] = acts
    array[:, 2] = what
    return array


class Routed:
    """Models in processes behind an engine, and a record of each batch that took a route.

    `routes` has for each such batch its models, the number of completed stages, and the error of the next stage.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.served = ServedInProcesses(engine, folder)
        self.routes: list[tuple[list[str], int, FlowserveError | None]] = []
        self.over: Counter[int] = Counter()  # how often each request finished, by its stamp
        engine.observers.append(self)

    async def add_chain(self, width: int = -1, limit: int = 32) -> None:
        """Serve `chain`, which is one, two, three; `width` -1: the dims vary."""
        for name in MODELS:
            await self.served.add(name, chain_body(name), width=width, limit=limit)
        add_chain(self.engine, "chain", MODELS)
        await wait_all_tasks_blocked()

    async def add_gated_chain(self, folder: Path) -> tuple[Path, Path]:
        """As `add_chain`, but instead of sleeping a model creates the first file and waits for the second."""
        begun, proceed = folder / "begun", folder / "proceed"
        waiting = f"""
            open({str(begun)!r}, "w").close()
            while not os.path.exists({str(proceed)!r}):
                time.sleep(0.002)
        """.strip()
        for name in MODELS:
            await self.served.add(name, chain_body(name).replace("time.sleep(0.15)", waiting), width=-1)
        add_chain(self.engine, "chain", MODELS)
        await wait_all_tasks_blocked()
        return begun, proceed

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        if batch.route is not None and isinstance(outcome, Passed):
            names = [queue.key.name for queue in batch.route.queues]
            self.routes.append((names, len(outcome.made), outcome.error))

    def queued(self, frame: Frame) -> None: ...
    def batched(self, batch: Batch, now_ns: int) -> None: ...
    def started(self, batch: Batch) -> None: ...
    def finished(self, frame: Frame) -> None:
        self.over[frame.record.stamp] += 1

    failed = finished

    async def ask(self, name: str, array: Array, **facts: Any) -> Array:
        """OUT of a response, without rows if it is missing."""
        request = Request({"IN": array}, stamp=self.engine.next_stamp(), **facts)
        response = await self.engine.infer(self.engine.deployments.find(name), request)
        return response.outputs.get("OUT", np.empty((0, 0), np.float32))

    async def ask_all(self, name: str, arrays: Sequence[Array]) -> list[Array | FlowserveError]:
        """Send the requests in one loop iteration, so that they are one batch."""
        return await all_at_once(partial(self.ask, name), arrays)

    def queue(self, name: str) -> ModelQueue:
        worker = self.served.workers[name]
        return next(queue for queue in self.engine.scheduler.models.queues if worker in queue.instances)

    def channel(self, name: str) -> Channel:
        channel = self.served.workers[name].port.channel
        assert isinstance(channel, Channel)
        return channel

    def pids(self) -> dict[str, int]:
        """The process ids of the running processes."""
        children = {name: worker.port.child for name, worker in self.served.workers.items()}
        return {name: child.pid for name, child in children.items() if child is not None}

    async def restarted(self, pids: dict[str, int], count: int) -> None:
        """Wait until that many of these processes have ended and been replaced."""
        await self.until(lambda: sum(self.pids().get(name, pid) != pid for name, pid in pids.items()) == count)

    def kill(self, name: str) -> None:
        child = self.served.workers[name].port.child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)

    def counts(self, name: str) -> tuple[int, int, int]:
        """Successful requests, rows, and batches of a model or ensemble."""
        statistics = self.statistics(name)
        return statistics.success_count, statistics.inference_count, statistics.execution_count

    def statistics(self, name: str) -> Statistics:
        statistics: Statistics = self.engine.deployments.statistics_of(ModelKey(name, 1))
        statistics.add_up()
        return statistics

    async def until(self, is_so: Callable[[], bool], seconds: float = 5) -> None:
        with trio.fail_after(seconds):
            while not is_so():  # noqa: ASYNC110
                await trio.sleep(0.002)

    async def check_idle(self) -> None:
        """No request, batch, instance or block of memory is held."""
        engine, scheduler = self.engine, self.engine.scheduler
        assert engine.loaded.processes is not None
        workers = self.served.workers
        await self.until(lambda: all(worker.port.child is not None for worker in workers.values()))
        await self.until(lambda: not any(self.queue(name).away for name in workers))
        await self.until(lambda: not any(worker.running for worker in workers.values()))
        await wait_all_tasks_blocked()
        scheduler.check()
        assert {*self.over.values()} <= {1}, "each request is over once"
        self.over.clear()
        assert not scheduler.in_flight
        assert not scheduler.routes.running
        assert not engine.loaded.processes.runs
        assert not engine.completions.waiting
        for name in workers:
            queue = self.queue(name)
            assert [*queue.free] == [*queue.instances], name
            assert not queue.running
            assert not len(queue.batcher)
            assert not self.channel(name)._held
        for results in self.served.results.values():
            results.clear()
        self.routes.clear()
        assert self.served.lent_bytes() == 0


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Routed]:
    delays = Delays(first_ns=5 * MS, longest_ns=20 * MS)
    async with open_engine(EngineOptions(restarts=delays)) as engine:
        yield Routed(engine, folder)


@pytest.fixture
async def routed(tmp_path: Path) -> AsyncIterator[Routed]:
    async with opened(tmp_path) as routed:
        yield routed


@contextmanager
def without_routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches return to the scheduler after each stage, as if no plan had a run of nodes."""
    with monkeypatch.context() as patch:
        patch.setattr(Routes, "choose", lambda *_: None)
        yield


def first_of(answers: Sequence[Array | FlowserveError]) -> list[float | str]:
    """The first value of each response, or the name of its error."""
    return [type(one).__name__ if isinstance(one, FlowserveError) else float(one[0, 0]) for one in answers]


# ---------------------------------------------------------------------- shapes, sizes, dtypes


async def test_rows_and_dims_vary_along_chain_of_three(routed: Routed) -> None:
    await routed.add_chain()
    rows = requests = batches = 0
    for count, width in itertools.product((1, 2, 7, 32), (3, 4, 500)):
        array = np.random.default_rng(count).random((count, width), np.float32)
        array[:, 1] = -1
        wanted = array.copy()
        wanted[:, 0] *= WHOLE
        np.testing.assert_allclose(await routed.ask("chain", array), wanted, rtol=1e-5)
        parts = [row(value, rows=1 + value % 3, width=width) for value in range(min(count, 10))]
        answers = await routed.ask_all("chain", parts)
        assert first_of(answers) == [value * WHOLE for value in range(len(parts))]
        assert [len(one) for one in answers if isinstance(one, np.ndarray)] == [len(one) for one in parts]
        rows += count + sum(map(len, parts))
        requests += 1 + len(parts)
        batches += 2
        del answers
    assert routed.routes == [([*MODELS], 3, None)] * batches
    for name in (*MODELS, "chain"):
        assert routed.counts(name) == (requests, rows, requests if name == "chain" else batches)
    await routed.check_idle()


async def test_requests_of_different_widths_take_routes_of_their_own(routed: Routed) -> None:
    await routed.add_chain()
    answers = await routed.ask_all("chain", [row(value, width=3 + value % 2) for value in range(8)])
    assert first_of(answers) == [value * WHOLE for value in range(8)]
    assert [one.shape[1] for one in answers if isinstance(one, np.ndarray)] == [3, 4] * 4
    del answers
    assert all(counts[:2] == (8, 8) for counts in map(routed.counts, MODELS))
    await routed.check_idle()


async def test_output_grows_beyond_arena_and_shrinks_again(routed: Routed) -> None:
    """Each stage repeats its input as often as the request says: new memory appears in the middle of a route."""
    body = OUT.format("np.tile(given, (1, int(given[0, 0])))")
    for name in MODELS:
        await routed.served.add(name, body, width=-1, limit=32)
    add_chain(routed.engine, "chain", MODELS)
    await wait_all_tasks_blocked()
    for repeats, width in ((1, 4), (10, 4), (30, 10), (40, 10), (2, 1), (40, 10), (1, 10)):
        array = np.full((2, width), repeats, np.float32)
        answer = await routed.ask("chain", array)
        assert answer.shape == (2, width * repeats**3)
        assert (answer == repeats).all()
        del answer
    assert [made for _, made, _ in routed.routes] == [3] * 7
    routed.served.results.clear()  # the recorded results would keep the blocks
    for turn in range(30):
        await routed.ask("chain", np.full((2, 10), 20, np.float32))
        if turn == 5:
            segments = {name: len(routed.channel(name)._segments) for name in MODELS}
    assert {name: len(routed.channel(name)._segments) for name in MODELS} == segments, "blocks are used again"
    await routed.check_idle()


async def test_strings_whose_lengths_vary_pass_three_processes(routed: Routed) -> None:
    body = OUT.format("np.array([[t + t for t in r] + [b'%d' % len(given)] for r in given], object)")
    for name in MODELS:
        await routed.served.add(name, body, width=-1, dtype=DType.BYTES, limit=32)
    add_chain(routed.engine, "chain", MODELS)
    await wait_all_tasks_blocked()
    for rows, length in ((1, 0), (1, 3), (5, 1000), (32, 7), (2, 30_000)):
        given = np.array([[b"a\0b"[: length % 4] + b"x" * length, "ü".encode()]] * rows, np.object_)
        answer = await routed.ask("chain", given)
        number = b"%d" % rows
        assert answer.tolist() == [[t * 8 for t in given[0]] + [number * 4, number * 2, number]] * rows
        del answer
    assert routed.routes == [([*MODELS], 3, None)] * 5
    await routed.check_idle()


async def test_message_too_long_for_hand_off_returns_to_server_and_continues(routed: Routed) -> None:
    """Facts of requests that do not fit into a datagram are sent to the next process by the server."""
    await routed.add_chain()
    assert (await routed.ask("chain", row(2), id="x" * 50_000)).tolist() == row(2 * WHOLE).tolist()
    assert [(len(names), made, error) for names, made, error in routed.routes] == [(3, 1, None), (2, 1, None)]
    assert all(counts == (1, 1, 1) for counts in map(routed.counts, (*MODELS, "chain")))
    await routed.check_idle()


# ---------------------------------------------------------------------- calls of other models, recall


@pytest.mark.parametrize("acts", [0, 1, 2])
async def test_model_on_route_calls_model_beside_it(routed: Routed, acts: int) -> None:
    await routed.add_chain()
    await routed.served.add("beside", OUT.format("given + 7"), width=-1)
    await wait_all_tasks_blocked()
    factors = [STEP[name] for name in MODELS]
    before, after = int(np.prod(factors[: acts + 1])), int(np.prod(factors[acts + 1 :]))
    wanted = [(value * before + value * before // factors[acts] + 7) * after for value in range(1, 5)]
    answers = await routed.ask_all("chain", [row(value, acts, CALLS) for value in range(1, 5)])
    assert first_of(answers) == wanted
    del answers
    assert all(routed.counts(name) == (4, 4, 1) for name in MODELS)
    assert routed.counts("beside")[:2] == (4, 4)
    await routed.check_idle()


@pytest.mark.parametrize("called", ["two", "three"])
async def test_model_on_route_calls_later_model_of_its_route(routed: Routed, called: str) -> None:
    """The instance that the route had reserved runs the call, and then the batch."""
    body = chain_body("one").replace("'beside'", f"'{called}'")
    await routed.served.add("one", body, width=-1)
    for name in ("two", "three"):
        await routed.served.add(name, chain_body(name), width=-1)
    add_chain(routed.engine, "chain", MODELS)
    await wait_all_tasks_blocked()
    with trio.fail_after(5):
        for value in range(1, 5):
            wanted = (2 + STEP[called]) * value * 15
            assert first_of([await routed.ask("chain", row(value, 0, CALLS))]) == [wanted]
    counts = {name: routed.counts(name)[0] for name in MODELS}
    assert counts == {"one": 4, "two": 4, "three": 4} | {called: 8}
    await routed.check_idle()


@pytest.mark.parametrize(
    ("acts", "direct"), [(0, "two"), (0, "three"), (1, "three"), (1, "one"), (2, "one"), (2, "two")]
)
async def test_direct_request_does_not_wait_for_slow_stage_of_route(routed: Routed, acts: int, direct: str) -> None:
    await routed.add_chain()
    over: list[str] = []

    async def ask(name: str, array: Array) -> None:
        assert first_of([await routed.ask(name, array)]) == [array[0, 0] * STEP.get(name, WHOLE)]
        over.append(name)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "chain", row(2, acts, SLEEP))
            await trio.sleep(0.05)
            assert routed.engine.scheduler.routes.running
            nursery.start_soon(ask, direct, row(3))
    assert over == [direct, "chain"], "it is answered while the slow model still runs"
    assert routed.counts("chain") == (1, 1, 1)
    assert {name: routed.counts(name) for name in MODELS} == dict.fromkeys(MODELS, (1, 1, 1)) | {direct: (2, 2, 2)}
    await routed.check_idle()


async def test_batches_keep_their_members_under_recalls(routed: Routed) -> None:
    """Concurrent requests to the chain and to each of its models, until many batches were recalled."""
    await routed.add_chain()
    wrong: list[Any] = []

    async def client(name: str, number: int) -> None:
        for value in range(number, number + 40):
            factor = STEP.get(name, WHOLE)
            answer = await routed.ask(name, row(value, value % 3, SLEEP if name == "chain" and value % 20 == 0 else 0))
            if answer[0, 0] != value * factor:
                wrong.append((name, value, answer))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for name in ("chain", "chain", *MODELS):
                for number in range(2):
                    nursery.start_soon(client, name, 100 * number + 1)
    assert wrong == []
    assert routed.counts("chain")[:2] == (160, 160)
    assert all(routed.counts(name)[:2] == (240, 240) for name in MODELS)
    await routed.check_idle()


# ---------------------------------------------------------------------- failures of members, outputs that do not fit


@pytest.mark.parametrize("acts", [0, 1, 2])
async def test_failed_member_does_not_end_route_of_others(routed: Routed, acts: int) -> None:
    await routed.add_chain()
    asked = [row(value, acts, ERROR if value in (2, 5) else 0) for value in range(8)]
    for turn in (1, 2, 3):
        answers = await routed.ask_all("chain", asked)
        for value, answer in enumerate(answers):
            if value in (2, 5):
                assert isinstance(answer, ModelFailed)
                assert f"model {acts} refuses" in str(answer)
            else:
                assert isinstance(answer, np.ndarray)
                assert answer[0, 0] == value * WHOLE
        del answers, answer
        for i, name in enumerate(MODELS):
            requests = 8 * turn if i < acts else 6 * turn
            assert routed.counts(name) == (requests, 8 * turn if i <= acts else 6 * turn, turn), name
            assert routed.statistics(name).fail_count == (2 * turn if i == acts else 0)
    assert routed.counts("chain")[:2] == (18, 18)
    assert routed.statistics("chain").fail_count == 6
    await routed.check_idle()


FAULTS = [(what, acts) for what in (RAISE, NOTHING, DTYPE, DIMS, ROWS) for acts in (0, 1, 2)]


@pytest.mark.parametrize(("what", "acts"), FAULTS)
async def test_output_that_cannot_be_passed_on_fails_as_without_route(
    routed: Routed, monkeypatch: pytest.MonkeyPatch, what: int, acts: int
) -> None:
    await routed.add_chain(width=3)
    asked = [row(value, acts, what if value == 1 else 0) for value in range(4)]
    with_route = await routed.ask_all("chain", asked)
    assert routed.routes
    counts = {name: (routed.counts(name), routed.statistics(name).failures.copy()) for name in (*MODELS, "chain")}
    with without_routes(monkeypatch):
        routed.routes.clear()
        without = await routed.ask_all("chain", asked)
        assert not routed.routes
    assert [_told(one) for one in with_route] == [_told(one) for one in without]
    assert any(
        isinstance(one, FlowserveError) or not one.size or (one.dtype, one.shape) != (np.float32, (1, 3))
        for one in without
    )
    del with_route, without
    for name, (had, failed) in counts.items():
        assert routed.counts(name) == tuple(2 * count for count in had), name
        assert routed.statistics(name).failures == {reason: 2 * count for reason, count in failed.items()}
    assert first_of(await routed.ask_all("chain", [row(1), row(2)])) == [WHOLE, 2 * WHOLE]
    await routed.check_idle()


def _told(answer: Array | FlowserveError) -> Any:
    return (type(answer), str(answer)) if isinstance(answer, FlowserveError) else answer.tolist()


# ---------------------------------------------------------------------- processes that end


@pytest.mark.parametrize("how", [EXIT, EXIT_LATER])
@pytest.mark.parametrize("acts", [0, 1, 2])
async def test_process_that_exits_in_its_stage_fails_its_batch_only(routed: Routed, acts: int, how: int) -> None:
    """`EXIT_LATER`: the process ends after its batch, so that only the next request may detect it."""
    await routed.add_chain()
    pids = routed.pids()
    with trio.fail_after(5):
        answers = await routed.ask_all("chain", [row(value, acts, how) for value in range(4)])
        if how == EXIT:
            text = f"model '{MODELS[acts]}', instance '{MODELS[acts]}_0': its process ended with exit status 3"
            assert {type(one) for one in answers} == {InstanceDied}
            assert all(text in str(one) for one in answers)
            assert routed.statistics(MODELS[acts]).fail_count == 4
        else:
            assert first_of(answers) == [value * WHOLE for value in range(4)]
        await routed.restarted({name: pid for name, pid in pids.items() if name == MODELS[acts]}, 1)
        del answers
        for value in (5, 6):
            assert first_of(await routed.ask_all("chain", [row(value)])) == [value * WHOLE]
    for i, name in enumerate(MODELS):
        assert routed.counts(name)[2] == (3 if how == EXIT_LATER or i < acts else 2), name
        assert (routed.pids()[name] == pids[name]) == (i != acts), "no other process ends"
    await routed.check_idle()


@pytest.mark.parametrize(("start", "nbytes"), [(1 << 40, 24), (0, 8)])
async def test_process_with_an_invalid_report_about_its_stage_fails_its_batch_only(
    routed: Routed, start: int, nbytes: int
) -> None:
    """Process 0 reports an output behind its block, or one with fewer bytes than its shape needs. Process 1 returns the
    batch with that report.
    """
    await routed.add_chain()
    pids = routed.pids()
    with trio.fail_after(5):
        lied = row(1, 0, LIE, width=7)
        lied[0, 3:] = 1, RAISE, start, nbytes
        (answer,) = await routed.ask_all("chain", [lied])
        assert isinstance(answer, InstanceDied)
        assert "model 'one', instance 'one_0': its process sent an invalid message (" in str(answer)
        await routed.restarted({"one": pids["one"]}, 1)
        del answer
        assert first_of(await routed.ask_all("chain", [row(2)])) == [2 * WHOLE]
    assert all((routed.pids()[name] == pids[name]) == (name != "one") for name in MODELS), "no other process ends"
    await routed.check_idle()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("acts", "killed"), [*itertools.product(range(3), range(3))])
async def test_process_is_killed_before_while_and_after_it_has_the_batch(
    routed: Routed, tmp_path: Path, acts: int, killed: int, *, waits: bool
) -> None:
    """The batch is in the slow model `acts` when process `killed` ends. `waits`: further requests wait for the
    route.
    """
    begun, proceed = await routed.add_gated_chain(tmp_path)
    pids = routed.pids()
    told: list[list[Array | FlowserveError]] = []

    async def ask(asked: Sequence[Array]) -> None:
        told.append(await routed.ask_all("chain", asked))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, [row(value, acts, SLEEP) for value in range(4)])
            await routed.until(begun.exists)
            if waits:
                nursery.start_soon(ask, [row(value) for value in range(3)])
                await trio.sleep(0.02)
            routed.kill(MODELS[killed])
            await routed.until(lambda: MODELS[killed] not in routed.pids())
            proceed.touch()
        told.sort(key=len)
        slow = told.pop()
        if killed == acts:
            assert [str(one) for one in slow if isinstance(one, InstanceDied) and MODELS[acts] in str(one)] == [
                str(slow[0])
            ] * 4
        else:
            assert first_of(slow) == [value * WHOLE for value in range(4)]
        for answers in told:
            assert first_of(answers) == [value * WHOLE for value in range(3)]
        del slow
        told.clear()
        assert first_of([await routed.ask("chain", row(9))]) == [9 * WHOLE]
    for i, name in enumerate(MODELS):
        assert (routed.pids()[name] == pids[name]) == (i != killed), "no other process ends"
    await routed.check_idle()


@pytest.mark.parametrize("acts", [0, 1, 2])
@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(range(3), 2)])
async def test_second_process_ends_before_end_of_first_is_resolved(
    routed: Routed, tmp_path: Path, acts: int, first: int, second: int
) -> None:
    begun, proceed = await routed.add_gated_chain(tmp_path)
    pids = routed.pids()
    answers: list[Array | FlowserveError] = []

    async def ask() -> None:
        answers.extend(await routed.ask_all("chain", [row(value, acts, SLEEP) for value in range(3)]))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await routed.until(begun.exists)
            routed.kill(MODELS[first])
            await trio.sleep(0.01)
            routed.kill(MODELS[second])
            await routed.until(lambda: MODELS[second] not in routed.pids())
            proceed.touch()
        await routed.restarted(pids, 2)
        if acts in (first, second):
            assert {type(one) for one in answers} == {InstanceDied}
            assert all(f"'{MODELS[first]}_0'" in str(one) or f"'{MODELS[second]}_0'" in str(one) for one in answers)
        else:
            assert first_of(answers) == [value * WHOLE for value in range(3)]
        answers.clear()
        assert first_of([await routed.ask("chain", row(9))]) == [9 * WHOLE]
    await routed.check_idle()


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("acts", "free"), [*itertools.permutations(range(3), 2)])
async def test_process_that_a_recalled_batch_has_left_ends(
    routed: Routed, acts: int, free: int, *, is_lost: bool
) -> None:
    """A direct request causes a recall of the batch: only the slow process `acts` still has it when process `free`
    ends. `is_lost`: afterwards the slow process ends too.
    """
    await routed.add_chain()
    pids = routed.pids()
    answers: list[Array | FlowserveError] = []

    async def ask() -> None:
        answers.extend(await routed.ask_all("chain", [row(value, acts, SLEEP) for value in range(3)]))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.03)
            assert first_of([await routed.ask(MODELS[free], row(4))]) == [4 * STEP[MODELS[free]]]
            routed.kill(MODELS[free])
            if is_lost:
                await routed.until(lambda: MODELS[free] not in routed.pids())
                routed.kill(MODELS[acts])
        if is_lost:
            text = f"model '{MODELS[acts]}', instance '{MODELS[acts]}_0': its process was killed by signal 9"
            assert [text in str(one) for one in answers] == [True] * 3
        else:
            assert first_of(answers) == [value * WHOLE for value in range(3)]
        answers.clear()
        await routed.restarted(pids, 1 + is_lost)
        assert first_of([await routed.ask("chain", row(9))]) == [9 * WHOLE]
    await routed.check_idle()


@pytest.mark.parametrize(("acts", "killed"), [*itertools.permutations(range(3), 2)])
async def test_ended_process_is_released_while_another_stage_of_its_route_runs(
    routed: Routed, tmp_path: Path, acts: int, killed: int
) -> None:
    """Otherwise a direct request to its model, or a call from the other stage, would wait for that stage."""
    begun, proceed = await routed.add_gated_chain(tmp_path)
    answers: list[Array | FlowserveError] = []

    async def ask() -> None:
        answers.extend(await routed.ask_all("chain", [row(2, acts, SLEEP)]))

    direct = MODELS[killed]
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await routed.until(begun.exists)
            routed.kill(direct)
            await routed.until(lambda: direct not in routed.pids())
            assert first_of([await routed.ask(direct, row(3))]) == [3 * STEP[direct]]
            assert not answers
            proceed.touch()
    assert first_of(answers) == [2 * WHOLE]
    answers.clear()
    await routed.check_idle()


@pytest.mark.parametrize("called", ["two", "three"])
async def test_model_on_route_calls_later_model_whose_process_has_ended(
    routed: Routed, tmp_path: Path, called: str
) -> None:
    begun, proceed = tmp_path / "begun", tmp_path / "proceed"
    waiting = f"""if what == 10:
            open({str(begun)!r}, "w").close()
            while not os.path.exists({str(proceed)!r}):
                time.sleep(0.002)"""
    body = chain_body("one").replace("'beside'", f"'{called}'").replace("if what == 10:", waiting)
    await routed.served.add("one", body, width=-1)
    for name in ("two", "three"):
        await routed.served.add(name, chain_body(name), width=-1)
    add_chain(routed.engine, "chain", MODELS)
    await wait_all_tasks_blocked()
    answers: list[Array | FlowserveError] = []

    async def ask() -> None:
        answers.extend(await routed.ask_all("chain", [row(3, 0, CALLS)]))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await routed.until(begun.exists)
            routed.kill(called)
            await routed.until(lambda: called not in routed.pids())
            proceed.touch()
    assert first_of(answers) == [(2 + STEP[called]) * 3 * 15]
    answers.clear()
    await routed.check_idle()


async def test_error_of_stage_is_reported_if_process_before_it_has_ended(routed: Routed) -> None:
    """The outputs of the first process can no longer be read, but are not needed for the error."""
    await routed.add_chain()
    child = routed.served.workers["two"].port.child
    body = "        import time; time.sleep(0.15)\n        raise ValueError('no')"
    answers: list[Array | FlowserveError] = []
    await routed.served.add("slow", body, width=-1)
    add_chain(routed.engine, "short", ["one", "slow"])
    await wait_all_tasks_blocked()

    async def ask() -> None:
        answers.extend(await routed.ask_all("short", [row(value) for value in range(3)]))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.05)
            routed.kill("one")
    assert all("message: ValueError in a batch of 3 requests" in str(one) for one in answers), answers
    assert routed.served.workers["two"].port.child is child
    await routed.check_idle()


async def test_lack_of_a_descriptor_fails_one_batch_of_a_route(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket of the next process cannot be sent at first; only the batch fails, and no process ends."""
    await routed.add_chain()
    for name in MODELS:
        await routed.ask(name, row(1))  # which then has memory
    children = {name: worker.port.child for name, worker in routed.served.workers.items()}
    # A log record that pytest keeps would reference the batch through its traceback.
    monkeypatch.setattr(logging.getLogger("flowserve.runtime"), "disabled", True)
    with no_more_descriptors(), pytest.raises(Overloaded, match="a socket cannot be shown"):
        await routed.ask("chain", row(1))
    for value in (1, 2):
        assert first_of([await routed.ask("chain", row(value))]) == [value * WHOLE]
    assert {name: worker.port.child for name, worker in routed.served.workers.items()} == children
    await routed.check_idle()


async def test_process_holds_no_sockets_of_processes_that_ended(routed: Routed) -> None:
    body = OUT.format("given * 0 + len(os.listdir('/proc/self/fd'))")
    await routed.served.add("counts", body, width=-1)
    await routed.served.add("two", chain_body("two"), width=-1)
    add_chain(routed.engine, "chain", ["counts", "two"])
    await wait_all_tasks_blocked()
    seen: list[float] = []
    with trio.fail_after(10):
        for _ in range(6):
            seen.append(float((await routed.ask("chain", row(1)))[0, 1]))
            seen.append(float((await routed.ask("chain", row(1)))[0, 1]))
            routed.kill("two")
            await routed.until(lambda: "two" not in routed.pids())
    assert len({*seen[3::2]}) == 1, seen
    await routed.check_idle()


async def test_worker_that_is_killed_again_and_again_under_load_loses_no_request(routed: Routed) -> None:
    await routed.add_chain()
    told: Counter[str] = Counter()
    is_over = False

    async def client(number: int) -> None:
        value = number
        while not is_over:
            value += 1
            try:
                answer = await routed.ask("chain", row(value % 1000, rows=1 + value % 5))
                told["right" if (answer[:, 0] == value % 1000 * WHOLE).all() else "wrong"] += 1
            except FlowserveError as error:
                told[type(error).__name__] += 1
                await trio.sleep(0.002)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(client, 37 * number)
            for number in range(20):
                name = MODELS[number % 3]
                await routed.until(lambda: len(routed.pids()) == 3)
                await trio.sleep(0.03)
                routed.kill(name)
                await trio.sleep(0.01)
            is_over = True
    assert told["wrong"] == 0
    assert {*told} <= {"right", "wrong", "InstanceDied", "Unavailable"}
    assert told["right"] > 50
    await routed.check_idle()


# ---------------------------------------------------------------------- callers that leave, traces, statistics


@pytest.mark.parametrize("acts", [0, 1, 2])
async def test_requests_may_be_cancelled_while_their_batch_is_on_its_route(routed: Routed, acts: int) -> None:
    await routed.add_chain()
    told: dict[int, Array] = {}

    async def ask(value: int, seconds: float) -> None:
        with trio.move_on_after(seconds):
            told[value] = await routed.ask("chain", row(value, acts, SLEEP))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for value in range(6):
                nursery.start_soon(ask, value, 0.05 if value % 2 else 5)
    assert {value: answer[0, 0] for value, answer in told.items()} == {value: value * WHOLE for value in (0, 2, 4)}
    told.clear()
    assert routed.counts("chain")[0] == 3
    assert all(routed.counts(name)[2] == 1 for name in MODELS), "what runs runs out"
    assert first_of([await routed.ask("chain", row(9))]) == [9 * WHOLE]
    await routed.check_idle()


async def test_trace_and_statistics_of_route_are_those_of_single_steps(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await routed.add_chain(width=3)

    async def trace(array: Array) -> Trace:
        deployment = routed.engine.deployments.find("chain")
        watch = routed.engine.tracing.watch()
        request = Request({"IN": array}, stamp=routed.engine.next_stamp())
        await routed.engine.infer(deployment, request, watch.make(deployment.make_frame))
        watch.close()
        assert watch.trace is not None
        return watch.trace

    with_route = await trace(row(2, rows=3))
    assert routed.routes
    shown = {name: statistics_of(routed, name) for name in (*MODELS, "chain")}
    with without_routes(monkeypatch):
        routed.routes.clear()
        without = await trace(row(2, rows=3))
        assert not routed.routes
    assert structure(with_route) == structure(without)
    for one in (with_route, without):
        moments = [one.arrived_ns]
        for step in one.steps:
            ran = step.execution
            moments += [step.ready_ns, step.queued_ns, ran.started_ns, ran.gathered_ns, ran.computed_ns, ran.ended_ns]
        moments.append(one.ended_ns)
        assert moments == sorted(moments)
    for name, had in shown.items():
        now = statistics_of(routed, name)
        assert {key: now[key] - had[key] for key in had} == had, name
    del with_route, without
    await routed.check_idle()


def structure(trace: Trace) -> Any:
    """The contents of a trace without its times and numbers."""
    steps = [
        (step.node.name, step.rows, step.error, step.execution.instance, step.execution.rows) for step in trace.steps
    ]
    return trace.error, steps


def statistics_of(routed: Routed, name: str) -> dict[str, int]:
    """The counts of a model's or ensemble's statistics, with the bytes of its graph's edges."""
    statistics = routed.statistics(name)
    counts = dict(zip(("requests", "rows", "batches"), routed.counts(name), strict=True))
    counts["failed"] = statistics.fail_count
    counts |= {f"batches of {rows}": batch.count for rows, batch in statistics.batches.items()}
    assert statistics.queue_ns >= 0
    assert statistics.compute_infer_ns > 0
    assert statistics.success_ns >= statistics.compute_infer_ns
    return counts
