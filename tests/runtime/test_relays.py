"""Batches that go from process to process: the same answers as by way of the server, and nobody kept, lost or mixed up
by whatever happens to one of the processes on the way.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.errors import FlowserveError, InstanceDied, ModelFailed
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime import relay_paths
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.process_host import ProcessHost
from flowserve.scheduling.relays import Relay, RelayingDispatcher
from flowserve.testing.backends import config_of
from flowserve.testing.engine import add_chain
from flowserve.testing.processes import OUT, ServedInProcesses, row
from flowserve.values import Array, Request

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

STEPS = {"twice": "given * 2", "plus": "given + 1", "minus": "given - 3"}
# What a bad request holds when it comes to the model.
DIES = "        if 99 < given[0, 0] < 101:\n            os.kill(os.getpid(), 9)\n"
CALLS = """        if 99 < given[0, 0] < 101:
            tensors = [pb_utils.Tensor("IN", given)]
            answer = pb_utils.InferenceRequest(model_name="{}", inputs=tensors, requested_output_names=["OUT"]).exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
"""
WAITS = """        if {low} < given[0, 0] < {high}:
            import time
            open({came!r}, "w").close()
            while os.path.exists({closed!r}):
                time.sleep(0.002)
"""


class Seen:
    """The relays of an engine: how long each way was, and how many are on their way."""

    def __init__(self, served: ServedInProcesses, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(relay_paths, "QUICK_NS", 1 << 60)  # however busy the machine is that runs this
        processes = served.engine.processes
        assert processes is not None
        self.all = processes.relays
        self.ways: list[int] = []
        start = self.all.start

        def started(relay: Relay) -> bool:
            is_started = start(relay)
            if is_started:
                self.ways.append(len(relay.instances))
            return is_started

        patch.setattr(self.all, "start", started)
        # The engine asks by this name for each.
        assert self.all.start is started

    def assert_nobody_is_kept(self, hosts: Sequence[ProcessHost]) -> None:
        assert not self.all._active
        assert all(host.running is None and host.relay is None for host in hosts)


class Gate:
    """A model waits with a request of this number for as long as it is closed."""

    def __init__(self, served: ServedInProcesses, number: float = 100) -> None:
        folder = served.repository.path
        self._closed, self._came = folder / f"closed_{number}", folder / f"came_{number}"
        self.body = WAITS.format(low=number - 1, high=number + 1, came=str(self._came), closed=str(self._closed))
        self.close()

    def close(self) -> None:
        self._came.unlink(missing_ok=True)
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink()

    async def somebody_waits(self) -> None:
        await until(self._came.exists)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - other processes wake nobody here
            await trio.sleep(0.002)


@pytest.fixture
def seen(served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(served, monkeypatch)


async def chain(served: ServedInProcesses, seen: Seen, **bodies: str) -> list[ProcessHost]:
    """`twice`, `plus` and `minus` in a row as "chain", with other bodies for some of them."""
    hosts = [await served.add(name, bodies.get(name, OUT.format(what))) for name, what in STEPS.items()]
    add_chain(served.engine, "chain", list(STEPS))
    await ask(served, range(8))  # it comes back early: their memory is not known yet
    seen.ways.clear()
    return hosts


async def ask(served: ServedInProcesses, numbers: Sequence[float], name: str = "chain") -> list[Array | FlowserveError]:
    with trio.fail_after(20):
        return await served.ask_all(name, [row(number) for number in numbers])


def right(answers: Sequence[Any], numbers: Sequence[float]) -> bool:
    return [answer.tolist() if isinstance(answer, np.ndarray) else answer for answer in answers] == [
        row(number * 2 - 2).tolist() for number in numbers
    ]


async def until_it_is_back(served: ServedInProcesses, numbers: Sequence[float]) -> None:
    with trio.fail_after(20):
        while not right(await ask(served, numbers), numbers):  # noqa: ASYNC110 - somebody must ask
            await trio.sleep(0.05)


async def test_a_small_batch_goes_through_three_processes_and_comes_back_once(
    served: ServedInProcesses, seen: Seen
) -> None:
    hosts = await chain(served, seen)
    read: list[str] = []
    for host in hosts:
        assert host.link is not None
        host.link.read = partial(_noted, read, host.name, host.link.read)  # type: ignore[method-assign]
    for k in range(20):
        numbers = [k + m for m in range(8)]
        assert right(await ask(served, numbers), numbers)
    assert seen.ways == [3] * 20
    assert set(read) == {"minus_0"}
    assert served.lent_bytes() == 0
    seen.assert_nobody_is_kept(hosts)
    for host in hosts:  # blocks came home, and are used again: nobody's memory grew
        assert host.link is not None
        assert host.link.segment_count == 1


def _noted(read: list[str], name: str, reads: Callable[[], Any]) -> Any:
    read.append(name)
    return reads()


async def test_what_is_counted_is_what_would_be_counted_by_way_of_the_server(
    served: ServedInProcesses, seen: Seen
) -> None:
    await chain(served, seen)
    for _ in range(4):
        await ask(served, range(8))
    assert seen.ways == [3] * 4
    for name in STEPS:
        told = served.engine.find(name).statistics.as_json(0)
        assert told["inference_count"] == 40
        assert told["execution_count"] == 5
        success = told["inference_stats"]["success"]
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        total = told["inference_stats"]
        assert success["count"] == 40
        assert 0 < sum(total[part]["ns"] for part in parts) <= success["ns"] * 1.001
        assert all(total[part]["ns"] >= 0 for part in parts)
    nodes = {node.name: node for node in served.engine.find("chain").traffic}
    assert [nodes[name].rows for name in STEPS] == [40] * 3
    assert [nodes[name].placed for name in STEPS] == [[40 * 256]] * 3
    edge = nodes["plus"].edges[0]
    assert (nodes["plus"].handed_on(edge), edge.copied) == (40 * 256, 0)


async def test_large_batches_and_requests_that_are_alone_go_by_way_of_the_server(
    served: ServedInProcesses, seen: Seen
) -> None:
    await chain(served, seen)
    assert right(await ask(served, range(9)), range(9))
    assert seen.ways == []


@pytest.mark.parametrize("what", ["member", "batch"])
async def test_who_fails_on_the_way_fails_by_name_and_the_others_go_on(
    served: ServedInProcesses, seen: Seen, what: str
) -> None:
    how = {
        "member": "return pb_utils.InferenceResponse(error=pb_utils.TritonError('bad'))",
        "batch": "raise ValueError('bad')",
    }
    fails = f"        if given[0, 0] == 100:\n            {how[what]}\n"
    hosts = await chain(served, seen, plus=fails + OUT.format("given + 1"))
    for _ in range(3):
        answers = await ask(served, [1, 50, 2])
        assert isinstance(answers[1], ModelFailed)
        assert "'plus'" in str(answers[1])
        assert "bad" in str(answers[1])
        if what == "member":
            assert right([answers[0], answers[2]], [1, 2])
        else:
            assert all(isinstance(answer, ModelFailed) for answer in answers)
        assert right(await ask(served, [3, 4]), [3, 4])
    assert seen.ways == [3] * 6
    assert served.lent_bytes() == 0
    seen.assert_nobody_is_kept(hosts)


@pytest.mark.fault("R2")
@pytest.mark.parametrize("dying", list(STEPS))
async def test_a_process_that_dies_on_the_way_fails_its_requests_by_name_and_keeps_nobody(
    served: ServedInProcesses, seen: Seen, dying: str
) -> None:
    first = {"twice": 100, "plus": 50, "minus": 49.5}[dying]
    hosts = await chain(served, seen, **{dying: DIES + OUT.format(STEPS[dying])})
    for _ in range(2):
        answers = await ask(served, [first, 1, 2])
        assert all(isinstance(answer, InstanceDied) for answer in answers)
        assert f"'{dying}_0'" in str(answers[0])
        assert "SIGKILL" in str(answers[0])
        await until_it_is_back(served, [1, 2, 3])
        before = len(seen.ways)
        assert right(await ask(served, [4, 5]), [4, 5])
        assert right(await ask(served, [6, 7]), [6, 7])
        assert len(seen.ways) > before
    seen.assert_nobody_is_kept(hosts)
    for _ in range(40):  # what the others had made came home
        assert right(await ask(served, range(8)), range(8))
    assert served.lent_bytes() == 0
    for host in hosts:
        assert host.link is not None
        assert host.link.segment_count == 1


async def test_a_model_that_takes_long_keeps_no_instance_but_its_own(served: ServedInProcesses, seen: Seen) -> None:
    gate = Gate(served)
    hosts = await chain(served, seen, plus=gate.body + OUT.format("given + 1"))
    slow: list[Any] = []

    async def ask_slowly() -> None:
        slow.extend(await ask(served, [50, 1]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_slowly)
        await gate.somebody_waits()
        for name, want in (("twice", 14), ("minus", 4)):
            (answer,) = await ask(served, [7], name)
            assert isinstance(answer, np.ndarray)
            assert answer.tolist() == row(want).tolist()
        assert not slow
        gate.open()
    assert right(slow, [50, 1])
    assert seen.ways == [3]
    assert right(await ask(served, [3, 4]), [3, 4])
    seen.assert_nobody_is_kept(hosts)
    assert served.lent_bytes() == 0


@pytest.mark.fault("R2")
async def test_processes_that_die_while_another_takes_long_are_told_apart(
    served: ServedInProcesses, seen: Seen
) -> None:
    gate = Gate(served)
    hosts = await chain(served, seen, plus=gate.body + OUT.format("given + 1"))
    for victim in (0, 2, 1):
        gate.close()
        slow: list[Any] = []

        async def ask_slowly(slow: list[Any] = slow) -> None:
            slow.extend(await ask(served, [50, 1]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_slowly)
            await gate.somebody_waits()
            child = hosts[victim].child
            assert child is not None
            child.kill()
        assert all(isinstance(answer, InstanceDied) for answer in slow)
        assert f"'{hosts[victim].name}'" in str(slow[0])
        gate.open()
        await until_it_is_back(served, [1, 2])
        await until(lambda: not seen.all._active)
        seen.assert_nobody_is_kept(hosts)
    assert right(await ask(served, range(8)), range(8))
    assert served.lent_bytes() == 0


@pytest.mark.fault("R2")
async def test_a_batch_that_lies_unread_in_a_process_that_dies_is_not_waited_for(
    served: ServedInProcesses, seen: Seen
) -> None:
    first, second = Gate(served), Gate(served, 7)
    dies = second.body + "        if given[0, 0] == 7:\n            os.kill(os.getpid(), 9)\n"
    hosts = await chain(served, seen, twice=first.body + OUT.format("given * 2"), plus=dies + OUT.format("given + 1"))
    slow: list[Any] = []
    died: list[Any] = []

    async def ask_slowly() -> None:
        slow.extend(await ask(served, [100, 1]))

    async def ask_plus() -> None:
        died.extend(await ask(served, [7], "plus"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_slowly)
        await first.somebody_waits()
        nursery.start_soon(ask_plus)  # it is free again before long
        await second.somebody_waits()
        first.open()
        await until(lambda: hosts[0].relay is None)  # it has handed on
        second.open()
    assert isinstance(died[0], InstanceDied)
    assert all(isinstance(answer, InstanceDied) for answer in slow)
    await until_it_is_back(served, [1, 2])
    seen.assert_nobody_is_kept(hosts)
    assert served.lent_bytes() == 0


async def test_a_model_that_calls_one_of_its_own_way_is_answered_and_takes_part_no_more(
    served: ServedInProcesses, seen: Seen
) -> None:
    for name in ("twice", "minus"):
        await served.add(name, OUT.format(STEPS[name]))
    for called in ("twice", "minus", "plus"):
        served.hosts.pop("plus", None)
        plus = f"plus_{called}"
        calls = CALLS.format(plus if called == "plus" else called)
        hosts = [served.hosts["twice"], await served.add(plus, calls + OUT.format("given + 1")), served.hosts["minus"]]
        name = f"chain_{called}"
        add_chain(served.engine, name, ["twice", plus, "minus"])
        await ask(served, range(8), name)
        seen.ways.clear()
        answers = await ask(served, [1, 50], name)
        assert seen.ways == [3]
        if called == "plus":  # nobody else could answer it
            assert "can never be answered" in str(answers[1])
        else:
            assert right(answers, [1, 50])
        assert right(await ask(served, [2, 3], name), [2, 3])
        assert seen.ways == [3]
        seen.assert_nobody_is_kept(hosts)


async def test_what_is_known_of_a_way_goes_with_its_graph(served: ServedInProcesses, seen: Seen) -> None:
    hosts = await chain(served, seen)
    assert right(await ask(served, [1, 2]), [1, 2])
    path = [one for one in gc.get_objects() if isinstance(one, relay_paths.Path) and one.runners[0] is hosts[0]]
    gone = weakref.ref(path.pop())
    served.engine.withdraw_name("chain", "it is unloaded")
    gc.collect()
    assert gone() is None
    to_tell = [bool(host.link._ended_paths) for host in hosts if host.link is not None]
    assert to_tell == [True, True, False], "only who hands on was told, and hears that it is over"


async def test_inputs_that_a_model_keeps_or_writes_to_stay_its_own(served: ServedInProcesses, seen: Seen) -> None:
    keeps = "        self.kept.append(given)\n        given += 1\n        given *= 1\n"
    check = "        assert all(one[0, 0] == one[0, -1] for one in self.kept)\n"
    tells = OUT.format("given if given[0, 0] < 900 else given * 0 + sum(one[0, 0] for one in self.kept)")
    hosts = await chain(served, seen, plus=keeps + check + tells)
    for k in range(10):
        assert right(await ask(served, [k, k + 1]), [k, k + 1])
    # What `plus` was given each time, and one more, all of which it still has.
    kept = sum(2 * m + 1 for m in range(8)) + sum(4 * k + 4 for k in range(10))
    answer, _ = await ask(served, [450, 0])
    assert isinstance(answer, np.ndarray)
    assert answer[0, 0] - (kept + 901 - 3) in (0, 1)  # the other one of the same batch came before, or after
    assert len(seen.ways) >= 10
    seen.assert_nobody_is_kept(hosts)


async def test_the_diamond_goes_one_after_the_other(served: ServedInProcesses, seen: Seen) -> None:
    for name in ("a", "b", "c"):
        await served.add(name, OUT.format({"a": "given * 2", "b": "given + 1", "c": "given - 3"}[name]))
    await served.add("d", OUT.format("given * 10"))
    two = "        other = request.inputs()[1].as_numpy()\n" + OUT.format("given * 10 + other")
    await served.add("both", two, inputs=("IN", "OTHER"))
    parts = [served.engine.find(name) for name in ("a", "b", "c", "both")]
    nodes = tuple(
        Node(i, part.name, ModelKey(part.name, 1), part.graph.inputs, part.graph.outputs, 16)
        for i, part in enumerate(parts)
    )
    edges = (
        Edge("IN", GRAPH, 0, 0, 0),
        Edge("x", 0, 0, 1, 0),
        Edge("x", 0, 0, 2, 0),
        Edge("y", 1, 0, 3, 0),
        Edge("z", 2, 0, 3, 1),
        Edge("OUT", 3, 0, GRAPH, 0),
    )
    given, made = parts[0].graph.inputs, parts[0].graph.outputs
    config = config_of(name="diamond", inputs=list(given), outputs=list(made), max_batch_size=16)
    served.engine.announce(config, Graph("diamond", 1, given, made, 16, nodes, edges, is_ensemble=True))
    for _ in range(6):
        answers = await ask(served, [1, 2, 3], "diamond")
        assert [answer[0, 0] for answer in answers if isinstance(answer, np.ndarray)] == [
            (2 * n + 1) * 10 + 2 * n - 3 for n in (1, 2, 3)
        ]
    assert seen.ways[-3:] == [4, 4, 4]


async def test_a_tensor_in_between_that_the_client_wants_too_is_answered(served: ServedInProcesses, seen: Seen) -> None:
    hosts = await chain(served, seen)
    parts = [served.engine.find(name) for name in STEPS]
    nodes = tuple(
        Node(i, part.name, ModelKey(part.name, 1), part.graph.inputs, part.graph.outputs, 16)
        for i, part in enumerate(parts)
    )
    edges = [Edge("IN", GRAPH, 0, 0, 0), Edge("x", 0, 0, 1, 0), Edge("y", 1, 0, 2, 0)]
    edges += [Edge("OUT", 2, 0, GRAPH, 0), Edge("y", 1, 0, GRAPH, 1)]
    given, made = parts[0].graph.inputs, parts[2].graph.outputs
    both = (*made, replace(made[0], name="Y"))
    config = config_of(name="told", inputs=list(given), outputs=list(both), max_batch_size=16)
    served.engine.announce(config, Graph("told", 1, given, both, 16, nodes, tuple(edges), is_ensemble=True))
    for _ in range(4):
        got: list[Any] = []

        async def one(number: float, got: list[Any] = got) -> None:
            request = Request({"IN": row(number)}, stamp=served.engine.next_stamp())
            response = await served.engine.infer(served.engine.find("told"), request)
            got.append((number, response.outputs["OUT"][0, 0], response.outputs["Y"][0, 0]))

        async with trio.open_nursery() as nursery:
            for number in (1.0, 2.0):
                nursery.start_soon(one, number)
        assert sorted(got) == [(1.0, 0.0, 3.0), (2.0, 2.0, 5.0)]
    assert seen.ways[-3:] == [3, 3, 3]
    assert served.lent_bytes() == 0
    seen.assert_nobody_is_kept(hosts)


async def test_a_relay_that_cannot_be_taken_in_fails_alone(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [await served.add(name, OUT.format(what)) for name, what in STEPS.items()]
    add_chain(served.engine, "chain", [*STEPS])
    seen = Seen(served, monkeypatch)
    children = [host.child for host in hosts]
    for _ in range(20):
        await served.ask_all("chain", [row(number) for number in range(4)])
    dispatcher = served.engine.dispatcher
    assert isinstance(dispatcher, RelayingDispatcher)
    deliver = dispatcher.relayed

    def slip(*_: object) -> None:
        monkeypatch.setattr(dispatcher, "relayed", deliver)
        raise RuntimeError("a slip")

    seen.ways.clear()
    monkeypatch.setattr(dispatcher, "relayed", slip)
    with trio.fail_after(20):
        failed = await served.ask_all("chain", [row(number) for number in range(4)])
        assert seen.ways == [3], "a relay"
        assert ["a slip" in str(answer) for answer in failed] == [True] * 4
        answers = await served.ask_all("chain", [row(number) for number in range(4)])
    assert [answer[0, 0] for answer in answers if isinstance(answer, np.ndarray)] == [2 * n - 2 for n in range(4)]
    seen.assert_nobody_is_kept(hosts)
    assert [host.child for host in hosts] == children
