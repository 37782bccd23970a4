"""Requests that come alone to a graph of models in processes: through all of them in one go, with no flow unless there
is something to say, and nobody could tell but by the clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import FlowserveError, InstanceDied, Internal, Invalid, ModelFailed
from flowserve.runtime import alone, lone_accounts, lone_relays, one_processor, process_host, pump, relay_paths, relays
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.process_outputs import Garbled
from flowserve.scheduling.router import Flow
from flowserve.testing.backends import spec
from flowserve.testing.engine import add_chain
from flowserve.testing.processes import OUT, ServedInProcesses, all_at_once, row
from flowserve.values import Request

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

STEPS = {"twice": "given * 2", "plus": "given + 1", "minus": "given - 3"}
WARM = 20  # requests, after which the next is taken to be alone
BAD = "        if given[0, 0] == 100:\n            {}\n"
PATIENCE_NS, EACH_NS = lone_relays.PATIENCE_NS, lone_relays._EACH_NS


class Served:
    """A chain of three models, and which way its requests go. `on_the_spot`, `later`: how many were answered at once,
    and got their flow when they were on their way; all others are `common`.
    """

    def __init__(self, served: ServedInProcesses, patch: pytest.MonkeyPatch) -> None:
        self.processes = served
        self.engine = served.engine
        self.on_the_spot = self.later = self.common = 0
        patch.setattr(pump, "LONE_TURNS", 8)
        patch.setattr(alone, "STREAK", 8)
        patch.setattr(alone, "LOOK_EVERY", 16)
        # However busy the machine is that runs this.
        patch.setattr(lone_relays, "PATIENCE_NS", 1 << 60)
        patch.setattr(lone_relays, "_EACH_NS", 1 << 60)
        patch.setattr(relays, "_WAIT_MS", 10_000)
        note, go_on = lone_accounts.LoneAccounts.note, lone_relays.LoneRelays._go_on
        submit = self.engine.dispatcher.submit

        def counted(*given: Any) -> Any:
            self.on_the_spot += 1
            return note(*given)

        def went_on(*given: Any) -> Any:
            self.later += 1
            return go_on(*given)

        def submitted(flow: Any) -> None:
            self.common += 1
            submit(flow)

        patch.setattr(lone_accounts.LoneAccounts, "note", counted)
        patch.setattr(lone_relays.LoneRelays, "_go_on", went_on)
        patch.setattr(self.engine.dispatcher, "submit", submitted)

    async def chain(self, **bodies: str) -> list[ProcessHost]:
        """`bodies`: those of some of its models that do something else besides."""
        hosts = [
            await self.processes.add(name, bodies.get(name, "") + OUT.format(what)) for name, what in STEPS.items()
        ]
        add_chain(self.engine, "chain", list(STEPS))
        await self.alone(WARM)
        self.on_the_spot = self.later = self.common = 0
        return hosts

    async def ask(self, number: float, rows: int = 1, **facts: Any) -> Any:
        array = np.full((rows, 64), number, np.float32)
        request = Request({"IN": array}, stamp=self.engine.next_stamp(), **facts)
        with trio.fail_after(20):
            return await self.engine.infer(self.engine.find("chain"), request)

    async def alone(self, count: int) -> None:
        """So many requests, one by one, each answered as it should be."""
        for k in range(count):
            number = k % 32
            answer = await self.ask(number)
            assert answer.outputs["OUT"].tolist() == row(number * 2 - 2).tolist()
            await wait_all_tasks_blocked()

    async def until_alone_again(self) -> None:
        """Processes may have to come back first."""
        with trio.fail_after(20):
            while True:
                try:
                    await self.alone(WARM)
                    return
                except FlowserveError:
                    await trio.sleep(0.05)

    def executions(self) -> list[int]:
        return [self.engine.statistics(name)[0]["execution_count"] for name in STEPS]

    def assert_nobody_is_kept(self, hosts: Sequence[ProcessHost]) -> None:
        processes = self.engine.processes
        assert processes is not None
        assert not processes.relays._active
        assert processes.occupancy._running == 0
        assert self.engine.dispatcher.in_flight == 0
        assert all(host.running is None and host.relay is None for host in hosts)
        assert self.processes.lent_bytes() == 0
        self.engine.dispatcher.check()


@pytest.fixture
def lone(served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(served, monkeypatch)


async def test_a_request_alone_is_answered_on_the_spot_and_counted_as_any_other(lone: Served) -> None:
    hosts = await lone.chain()
    before = lone.executions()
    await lone.alone(48)
    assert lone.on_the_spot + lone.common == 48
    assert 3 <= lone.common <= 6, "now and then one sees whether others come too"
    assert [after - then for after, then in zip(lone.executions(), before, strict=True)] == [48] * 3
    answer = await lone.ask(2, rows=3, id="me", outputs=("OUT",), sequence_id=7, sequence_end=True)
    assert (answer.model, answer.id, answer.outputs["OUT"].tolist()) == ("chain", "me", [[2.0] * 64] * 3)
    assert answer.parameters == {"sequence_id": 7, "sequence_start": False, "sequence_end": True}
    count = WARM + 48
    for name in (*STEPS, "chain"):
        told = lone.engine.statistics(name)[0]
        assert (told["inference_count"], told["execution_count"]) == (count + 3, count + 1)
        stats = told["inference_stats"]
        parts = [stats[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output")]
        assert stats["success"]["count"] == count + 1
        assert min(parts) >= 0
        assert 0 < sum(parts) <= stats["success"]["ns"] * 1.001
    nodes = {node.name: node for node in lone.engine.find("chain").traffic}
    assert [(nodes[name].batches, nodes[name].rows) for name in STEPS] == [(count + 1, count + 3)] * 3
    first, second = nodes["twice"].edges[0], nodes["plus"].edges[0]
    assert (nodes["twice"].handed_on(first), first.copied) == (0, (count + 3) * 256)
    assert (nodes["plus"].handed_on(second), second.copied) == ((count + 3) * 256, 0)
    lone.assert_nobody_is_kept(hosts)
    for host in hosts:  # blocks came home, and are used again: nobody's memory grew
        assert host.link is not None
        assert host.link.segment_count == 1


async def test_what_is_not_back_at_once_comes_later_and_is_run_once(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = await lone.chain()
    monkeypatch.setattr(relay_paths.Path, "comes_back", lambda path, within_ms: False)
    before = lone.executions()
    await lone.alone(32)
    assert lone.later >= 8
    assert [after - then for after, then in zip(lone.executions(), before, strict=True)] == [32] * 3
    answers = await all_at_once(lone.ask, [1, 2, 3, 4])  # the first goes alone, the others are seen beside it
    assert [answer.outputs["OUT"][0, 0] for answer in answers] == [0, 2, 4, 6]
    with trio.move_on_after(0) as left:
        await lone.ask(5)
    assert left.cancelled_caught
    await wait_all_tasks_blocked()
    await lone.alone(2)
    lone.assert_nobody_is_kept(hosts)


async def test_whoever_comes_after_one_that_is_slow_for_once_is_answered_before_it(
    lone: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.touch()
    waits = f"while os.path.exists({str(closed)!r}):\n                import time; time.sleep(0.002)"
    hosts = await lone.chain(plus=BAD.format(waits))
    await lone.processes.add("other", OUT.format("given + 7"))
    monkeypatch.setattr(relays, "_WAIT_MS", 2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lone.ask, 50)
        await wait_all_tasks_blocked()
        assert lone.later == 1
        answers = await lone.processes.ask_all("other", [row(1), row(2)])
        assert [answer[0, 0] for answer in answers if not isinstance(answer, FlowserveError)] == [8, 9]
        closed.unlink()
    await lone.alone(3)
    lone.assert_nobody_is_kept(hosts)


@pytest.mark.parametrize(
    ("name", "number", "how"),
    [
        ("twice", 100, "raise ValueError('bad')"),
        ("plus", 50, "raise ValueError('bad')"),
        ("minus", 49.5, "raise ValueError('bad')"),
        ("plus", 50, "return pb_utils.InferenceResponse(error=pb_utils.TritonError('bad'))"),
        ("minus", 49.5, "return pb_utils.InferenceResponse(error=pb_utils.TritonError('bad'))"),
    ],
)
async def test_who_fails_fails_by_name_and_nothing_is_run_twice(
    lone: Served, name: str, number: float, how: str
) -> None:
    hosts = await lone.chain(**{name: BAD.format(how)})
    before = lone.executions()
    with pytest.raises(ModelFailed, match=f"'{name}'.*") as failed:
        await lone.ask(number)
    assert "bad" in str(failed.value)
    assert lone.later == 1
    reached = [*STEPS].index(name)
    ran = [after - then for after, then in zip(lone.executions(), before, strict=True)]
    is_told = "raise" not in how  # a batch that raises is no execution
    assert ran == [1] * reached + [int(is_told)] + [0] * (2 - reached)
    assert lone.engine.statistics("chain")[0]["inference_stats"]["fail"]["count"] == 1
    await lone.alone(3)
    lone.assert_nobody_is_kept(hosts)


@pytest.mark.fault("R2")
@pytest.mark.parametrize(("name", "number"), [("twice", 100), ("plus", 50), ("minus", 49.5)])
async def test_a_process_that_dies_fails_its_request_by_name_and_comes_back(
    lone: Served, name: str, number: float
) -> None:
    hosts = await lone.chain(**{name: BAD.format("os.kill(os.getpid(), 9)")})
    with pytest.raises(InstanceDied, match=f"'{name}_0'.*SIGKILL"):
        await lone.ask(number)
    assert lone.later == 1
    await lone.until_alone_again()
    assert lone.on_the_spot
    lone.assert_nobody_is_kept(hosts)


async def test_a_process_that_says_what_cannot_be_is_ended_and_its_request_told(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = await lone.chain()
    with monkeypatch.context() as once:
        once.setattr(relays, "ran_through", lambda *_: (_ for _ in ()).throw(Garbled("nonsense")))
        with pytest.raises(InstanceDied, match=r"'minus_0'.*what its process said cannot be \(nonsense\)"):
            await lone.ask(1)
    await lone.until_alone_again()
    lone.assert_nobody_is_kept(hosts)


async def test_inputs_that_a_model_keeps_stay_its_own(lone: Served) -> None:
    keeps = "        self.kept.append(given)\n        assert all((one == one[0, 0]).all() for one in self.kept)\n"
    hosts = await lone.chain(minus=keeps)
    await lone.alone(40)
    assert lone.later >= 36, "what is kept goes home later"
    assert all(host.running is None for host in hosts)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if SUPPORTED else True, reason="wants two processors")
async def test_processes_share_a_processor_where_that_is_quicker_and_part_when_others_come(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = SimpleNamespace(way=2, took=lambda _: None)
    monkeypatch.setattr(relay_paths, "Comparison", lambda _: choice)
    hosts = await lone.chain()
    everywhere = os.sched_getaffinity(0)

    def processors() -> list[set[int]]:
        return [os.sched_getaffinity(host.child.pid) for host in hosts if host.child is not None]

    def share() -> bool:
        first, *others = processors()
        return len(first) == 1 and others == [first] * 2

    await lone.alone(8)
    assert share()
    assert os.sched_getaffinity(0) == everywhere
    await all_at_once(lone.ask, range(4))
    assert processors() == [everywhere] * 3
    await lone.until_alone_again()
    assert share()
    choice.took = lambda _: setattr(choice, "way", 0)
    await lone.alone(8)
    assert processors() == [everywhere] * 3
    choice.way, choice.took = 1, lambda _: None
    await lone.alone(8)
    assert share()
    with trio.fail_after(20):
        while share():  # noqa: ASYNC110 - nobody comes any more, and nobody is told of it
            await trio.sleep(0.05)
    assert processors() == [everywhere] * 3
    lone.assert_nobody_is_kept(hosts)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if SUPPORTED else True, reason="wants two processors")
@pytest.mark.parametrize("on_the_spot", [True, False])
async def test_who_takes_long_for_once_has_all_processors_meanwhile(
    lone: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_the_spot: bool
) -> None:
    monkeypatch.setattr(relay_paths, "Comparison", lambda _: SimpleNamespace(way=2, took=lambda _: None))
    monkeypatch.setattr(one_processor, "_HELD_S", 60)
    for module in relays, process_host:
        monkeypatch.setattr(module, "_WAIT_MS", 20)
    monkeypatch.setattr(alone, "QUICK_NS", 1 << 60)
    closed = tmp_path / "closed"
    closed.touch()
    waits = f"while os.path.exists({str(closed)!r}):\n                import time; time.sleep(0.002)"
    hosts = await lone.chain(plus=BAD.format(waits))
    everywhere = os.sched_getaffinity(0)

    def processors() -> list[set[int]]:
        return [os.sched_getaffinity(host.child.pid) for host in hosts if host.child is not None]

    while everywhere in processors():  # on a busy machine any of them may take long
        await lone.alone(1)
    if not on_the_spot:
        monkeypatch.setattr(pump, "_ON_THE_SPOT_MAX", 0)
    lone.later = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lone.ask, 50)
        await wait_all_tasks_blocked()
        assert lone.later == on_the_spot
        assert processors() == [everywhere] * 3
        closed.unlink()
    lone.assert_nobody_is_kept(hosts)


async def test_what_is_compared_leaves_out_how_long_a_client_takes(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[int] = []
    choice = SimpleNamespace(way=0, took=took.append)
    monkeypatch.setattr(relay_paths, "Comparison", lambda _: choice)
    await lone.chain()
    took.clear()
    for _ in range(9):
        await lone.alone(1)
        await trio.sleep(0.1)
    assert len(took) == lone.on_the_spot > 4
    assert sorted(took)[len(took) // 2] < 90_000_000


async def test_one_that_is_not_back_in_time_counts_in_what_is_compared(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[int] = []
    monkeypatch.setattr(relay_paths, "Comparison", lambda _: SimpleNamespace(way=0, took=took.append))
    await lone.chain(plus=BAD.format("import time; time.sleep(0.05)"))
    monkeypatch.setattr(relays, "_WAIT_MS", 2)
    lone.on_the_spot = lone.later = 0
    took.clear()
    for _ in range(8):
        await lone.ask(50)
        await lone.until_alone_again()
    assert lone.later > 4
    assert len(took) == lone.on_the_spot + lone.later


async def test_what_cannot_be_admitted_is_refused_as_ever(lone: Served) -> None:
    hosts = await lone.chain()
    for facts, text in (
        ({"rows": 17}, "batch-size must be <= 16"),
        ({"outputs": ("WHAT",)}, "unexpected inference output 'WHAT'"),
    ):
        with pytest.raises(Invalid, match=text):
            await lone.ask(1, **facts)
    assert (lone.on_the_spot, lone.later) == (0, 0)
    lone.assert_nobody_is_kept(hosts)


async def test_slow_models_and_such_that_ask_others_go_the_common_way(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = await lone.chain()
    with monkeypatch.context() as slow:
        slow.setattr(lone_relays, "PATIENCE_NS", 0)
        await lone.alone(4)
    with monkeypatch.context() as asks:
        asks.setattr(ProcessHost, "asks_meanwhile", True)
        await lone.alone(4)
    assert (lone.on_the_spot, lone.later, lone.common) == (0, 0, 8)
    await lone.alone(20)
    assert lone.on_the_spot >= 16
    lone.assert_nobody_is_kept(hosts)


async def test_a_model_that_is_always_slow_is_not_waited_for_even_where_it_is_the_only_one(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone_relays, "PATIENCE_NS", PATIENCE_NS)
    monkeypatch.setattr(lone_relays, "_EACH_NS", EACH_NS)
    await lone.processes.add("slow", "        import time; time.sleep(0.002)\n" + OUT.format("given"))
    for number in range(32):
        await lone.processes.ask_all("slow", [row(number)])
        await wait_all_tasks_blocked()
    assert (lone.on_the_spot, lone.later, lone.common) == (0, 0, 32)


async def test_a_request_alone_that_goes_the_common_way_loses_no_turn_of_the_loop(
    lone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = await lone.chain()
    monkeypatch.setattr(lone_relays, "PATIENCE_NS", 0)
    monkeypatch.setattr(ProcessHost, "_waits", False)
    for number in range(4):
        lone.engine.begin_burst(1)  # as the HTTP server does
        request = Request({"IN": row(number)}, stamp=lone.engine.next_stamp())
        flow = lone.engine.ask(lone.engine.find("chain"), request)
        lone.engine.end_burst()
        assert isinstance(flow, Flow)
        assert hosts[0].running is not None, "it waits for the next turn"
        answered = trio.Event()
        flow.waiter = lambda _, answered=answered: answered.set()
        with trio.fail_after(20):
            await answered.wait()
        await wait_all_tasks_blocked()
    assert (lone.on_the_spot, lone.later, lone.common) == (0, 0, 4)


async def test_what_one_model_was_copied_is_counted_where_it_says_something_of_its_answer_too(lone: Served) -> None:
    says = OUT.format("given * 2").strip().removesuffix(")") + ", parameters={'a': 1})"
    hosts = await lone.chain(twice=BAD.format(says))
    twice = lone.engine.find("twice")
    edge = twice.traffic[0].edges[0]
    for number, parameters in ((1, {}), (100, {"a": 1})):
        copied, handed_on = edge.copied, twice.traffic[0].handed_on(edge)
        request = Request({"IN": np.full((1, 64), number, np.float32)}, stamp=lone.engine.next_stamp())
        answer = await lone.engine.infer(twice, request)
        assert (answer.outputs["OUT"][0, 0], answer.parameters) == (number * 2, parameters)
        lone.engine.counters()  # whoever reads has everything added up
        assert (edge.copied - copied, twice.traffic[0].handed_on(edge) - handed_on) == (256, 0)
    assert (lone.on_the_spot, lone.later) == (1, 1)
    lone.assert_nobody_is_kept(hosts)


async def test_what_could_not_be_sent_takes_no_news_with_it(lone: Served) -> None:
    hosts = await lone.chain()
    link = hosts[0].link
    assert link is not None
    await lone.alone(4)
    homes = len(link.homes)
    assert homes
    with pytest.raises(Internal, match="a parameter that is no text"):
        await lone.ask(1, parameters={"odd": object()})
    assert len(link.homes) == homes, "memory that its process is never told of is never used again"
    await lone.alone(4)
    lone.assert_nobody_is_kept(hosts)


async def test_what_is_handed_on_to_a_step_of_any_width_is_counted_however_it_went(lone: Served) -> None:
    await lone.chain()
    former = lone.engine.find("chain")
    first, *later = former.graph.nodes
    wide = [replace(node, inputs=(spec("IN", (-1,)),)) for node in later]
    lone.engine.announce(former.config, replace(former.graph, nodes=(first, *wide)))
    chain = lone.engine.find("chain")
    await lone.alone(24)
    for _ in range(8):
        await lone.processes.ask_all("chain", [row(1), row(2), row(3)])
    assert lone.on_the_spot
    lone.engine.counters()  # whoever reads has everything added up
    for traffic in chain.traffic:
        (edge,) = traffic.edges
        assert traffic.handed_on(edge) + edge.copied == traffic.rows * 256 == (24 + 8 * 3) * 256
