"""Graphs on GPUs, through a real engine: the copies to and from devices, and that no memory is held afterwards. The
GPUs are fakes that raise if an ordering is missing.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import ModelFailed
from flowserve.graph.transfers import ON_HOST, MemoryPlaces, transfers
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.devices import GPU_POOL_BYTES, Devices
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, Array, MemoryPlace, Request, gpu_memory
from tests.support.engine import add_chain, add_function, add_kernel
from tests.support.fake_device import FakeDevice, FakeMachine, Race, add_one

GPU0 = gpu_memory(0)
IN, OUT = (HOST_MEMORY, GPU0), (GPU0, PINNED_MEMORY)


class Machine:
    """A fake machine, with the figures of its pools and its ledger."""

    def __init__(self, gpus: int = 1, gpu_bytes: int = GPU_POOL_BYTES) -> None:
        self.fake = FakeMachine(gpus)
        self.devices = Devices(self.fake.devices, gpu_bytes=gpu_bytes)

    @property
    def memory(self) -> DeviceMemory:
        return self.devices[0]

    def copies(self) -> dict[tuple[MemoryPlace, MemoryPlace], int]:
        return {crossing: copies for crossing, (copies, _) in self.devices.ledger.entries().items()}

    def held(self) -> int:
        return sum(pool.lent_bytes + pool.adopted for pool in self.devices.statistics().values())


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    async with open_engine(EngineOptions()) as engine:
        await wait_all_tasks_blocked()
        yield engine
        await wait_all_tasks_blocked()
        assert engine.scheduler.in_flight == 0


async def ask(engine: Engine, name: str, values: Sequence[float]) -> list[dict[str, float]]:
    """The responses to requests of one row each, sent in one loop iteration."""
    answers: dict[float, dict[str, float]] = {}

    async def one(value: float) -> None:
        request = Request({"IN": np.full((1, 4), value, np.float32)}, stamp=engine.next_stamp())
        response = await engine.infer(engine.deployments.find(name), request)
        answers[value] = {name: float(array[0, 0]) for name, array in response.outputs.items()}

    async with trio.open_nursery() as nursery:
        for value in values:
            nursery.start_soon(one, value)
    return [answers[value] for value in values]


def add_graph(engine: Engine, name: str, parts: Sequence[str], edges: Sequence[Edge], outputs: int) -> Graph:
    """Serve an ensemble of these models, joined by these edges."""
    found = [engine.deployments.find(part) for part in parts]
    nodes = tuple(
        Node(i, part.name, ModelKey(part.name, 1), part.graph.inputs, part.graph.outputs, 32)
        for i, part in enumerate(found)
    )
    spec = found[0].graph.outputs[0]
    answers = tuple(type(spec)(f"OUT{i}", spec.dtype, spec.dims) for i in range(outputs))
    graph = Graph(name, 1, found[0].graph.inputs, answers, 32, nodes, tuple(edges), is_ensemble=True)
    engine.deployments.announce(ModelConfig(name, "", "ensemble", 32, graph.inputs, answers, SourceMap(name)), graph)
    return graph


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    assert made.held() == 0, "something is held after everything was answered"


@pytest.mark.parametrize("count", [1, 32])
async def test_a_chain_of_three_on_a_gpu_is_copied_once_to_the_device_and_once_back(
    machine: Machine, count: int
) -> None:
    async with running() as engine:
        steps = [add_kernel(engine, name, [(add_one, machine.memory)])[0] for name in ("a", "b", "c")]
        add_chain(engine, "chain", ["a", "b", "c"])
        assert await ask(engine, "chain", range(count)) == [{"OUT": value + 3} for value in range(count)]
        assert [step.batches for step in steps] == [[[1] * count]] * 3  # one batch through all steps
        assert machine.copies() == {IN: 1, OUT: 1}
        held_up = machine.fake.synchronised
        assert held_up == 1  # the host waits once, for the outputs


async def test_a_chain_with_a_host_step_in_the_middle_is_copied_twice_in_each_direction(machine: Machine) -> None:
    async with running() as engine:
        for name in ("a", "c"):
            add_kernel(engine, name, [(add_one, machine.memory)])
        add_function(engine, "b", [lambda array: array * 10], max_batch_size=32)
        add_chain(engine, "chain", ["a", "b", "c"])
        assert await ask(engine, "chain", [1, 2]) == [{"OUT": 21}, {"OUT": 31}]
        assert machine.copies() == {IN: 2, OUT: 2}


async def test_a_tensor_that_two_steps_on_the_gpu_read_is_copied_once_as_planned(machine: Machine) -> None:
    async with running() as engine:
        for name in ("a", "b"):
            add_kernel(engine, name, [(add_one, machine.memory)])
        edges = [
            Edge("IN", GRAPH, 0, 0, 0),
            Edge("IN", GRAPH, 0, 1, 0),
            Edge("x", 0, 0, GRAPH, 0),
            Edge("y", 1, 0, GRAPH, 1),
        ]
        graph = add_graph(engine, "both", ["a", "b"], edges, outputs=2)
        assert await ask(engine, "both", [1, 5]) == [{"OUT0": 2, "OUT1": 2}, {"OUT0": 6, "OUT1": 6}]
        assert machine.copies() == {IN: 1, OUT: 2} == _planned(graph, machine, [True, True])


async def test_a_tensor_that_the_gpu_and_the_response_read_is_copied_once_as_planned(machine: Machine) -> None:
    async with running() as engine:
        for name in ("a", "b"):
            add_kernel(engine, name, [(add_one, machine.memory)])
        add_function(engine, "h", [lambda array: array * 10], max_batch_size=32)
        edges = [
            Edge("IN", GRAPH, 0, 0, 0),
            Edge("x", 0, 0, 1, 0),
            Edge("x", 0, 0, 2, 0),
            Edge("x", 0, 0, GRAPH, 0),
            Edge("y", 1, 0, GRAPH, 1),
            Edge("z", 2, 0, GRAPH, 2),
        ]
        graph = add_graph(engine, "fan", ["a", "b", "h"], edges, outputs=3)
        assert await ask(engine, "fan", [1, 5]) == [
            {"OUT0": 2, "OUT1": 3, "OUT2": 20},
            {"OUT0": 6, "OUT1": 7, "OUT2": 60},
        ]
        assert machine.copies() == {IN: 1, OUT: 2} == _planned(graph, machine, [True, True, False])


async def test_an_ensemble_and_a_direct_request_share_a_batch_and_each_gets_its_rows(machine: Machine) -> None:
    async with running() as engine:
        steps = [add_kernel(engine, name, [(add_one, machine.memory)])[0] for name in ("a", "b")]
        add_chain(engine, "chain", ["a", "b"])
        answers: list[list[dict[str, float]]] = [[], []]

        async def into(i: int, name: str) -> None:
            answers[i] = await ask(engine, name, [1, 2])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(into, 0, "chain")
            nursery.start_soon(into, 1, "a")
        assert answers == [[{"OUT": 3}, {"OUT": 4}], [{"OUT": 2}, {"OUT": 3}]]
        assert steps[0].batches == [[1, 1, 1, 1]]


async def test_a_batch_is_copied_once_between_two_gpus() -> None:
    machine = Machine(gpus=2)
    async with running() as engine:
        add_kernel(engine, "a", [(add_one, machine.devices[0])])
        add_kernel(engine, "b", [(add_one, machine.devices[1])])
        add_chain(engine, "chain", ["a", "b"])
        assert await ask(engine, "chain", range(8)) == [{"OUT": value + 2} for value in range(8)]
    assert machine.copies()[GPU0, gpu_memory(1)] == 1
    assert machine.held() == 0


async def test_model_with_instances_on_host_and_gpu_gets_its_inputs_on_the_host(machine: Machine) -> None:
    """The instance is not yet chosen when the input is created."""
    async with running() as engine:
        add_kernel(engine, "a", [(add_one, machine.memory)])
        add_function(engine, "b", [lambda array: array + 1], max_batch_size=32)
        add_chain(engine, "chain", ["a", "b"])
        mixed = engine.deployments.find("chain").queues[1]
        mixed.instances = (*mixed.instances, *engine.deployments.find("a").queues[0].instances)
        assert await ask(engine, "chain", [1]) == [{"OUT": 3}]


async def test_failed_batch_is_retried_in_parts_and_its_device_memory_is_returned(machine: Machine) -> None:
    def poisoned(array: Array, made: Array) -> None:
        if (array == 14).any():
            raise ModelFailed("fourteen")
        made[...] = array

    async with running() as engine:
        add_kernel(engine, "a", [(add_one, machine.memory)])
        add_kernel(engine, "b", [(poisoned, machine.memory)], is_pure=True)
        add_chain(engine, "chain", ["a", "b"])
        good: list[float] = []

        async def one(value: float) -> None:
            try:
                good.append((await ask(engine, "chain", [value]))[0]["OUT"])
            except* ModelFailed:
                assert value == 13

        async with trio.open_nursery() as nursery:
            for value in (11, 12, 13, 14):
                nursery.start_soon(one, value)
        assert sorted(good) == [12, 13, 15]


async def test_requests_cancelled_while_the_gpu_computes_free_their_memory(machine: Machine) -> None:
    gate = threading.Event()

    def slow(array: Array, made: Array) -> None:
        assert gate.wait(10)
        made[...] = array

    async with running() as engine:
        add_kernel(engine, "a", [(add_one, machine.memory)])
        steps = add_kernel(engine, "b", [(slow, machine.memory)])
        add_chain(engine, "chain", ["a", "b"])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, "chain", [1, 2])
                await _until(lambda: bool(steps[0].batches))
                scope.cancel()
        gate.set()


async def test_a_drain_waits_for_the_gpu_and_frees_its_memory(machine: Machine) -> None:
    gate = threading.Event()

    def slow(array: Array, made: Array) -> None:
        assert gate.wait(10)
        made[...] = array

    async with running() as engine:
        steps = add_kernel(engine, "a", [(slow, machine.memory)])
        add_kernel(engine, "b", [(add_one, machine.memory)])
        add_chain(engine, "chain", ["a", "b"])
        answers: list[dict[str, float]] = []

        async def collect() -> None:
            answers.extend(await ask(engine, "chain", [1, 2]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await _until(lambda: bool(steps[0].batches))
            assert machine.held() > 0
            gate.set()
            assert await engine.drain(trio.current_time() + 10) == []
        assert answers == [{"OUT": 2}, {"OUT": 3}]
        assert machine.held() == 0


async def test_responses_are_correct_without_free_device_memory() -> None:
    machine = Machine(gpu_bytes=512)
    async with running() as engine:
        for name in ("a", "b", "c"):
            add_kernel(engine, name, [(add_one, machine.memory)])
        add_chain(engine, "chain", ["a", "b", "c"])
        assert await ask(engine, "chain", range(32)) == [{"OUT": value + 3} for value in range(32)]
        assert await ask(engine, "chain", range(32)) == [{"OUT": value + 3} for value in range(32)]
    assert machine.held() == 0
    assert machine.devices.statistics()[GPU0].refused > 0


@pytest.mark.parametrize("method", ["wait", "synchronize"])
async def test_the_fake_device_detects_a_missing_wait(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(FakeDevice, method, lambda *_: None)
    monkeypatch.setattr(FakeDevice, "close_stream", lambda *_: None)
    async with running() as engine:
        for name in ("a", "b"):
            add_kernel(engine, name, [(add_one, machine.memory)])
        add_chain(engine, "chain", ["a", "b"])
        with pytest.raises(ExceptionGroup) as caught:
            await ask(engine, "chain", [1])
    assert "nothing orders it behind" in str(caught.value.exceptions[0])
    assert issubclass(Race, AssertionError)


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # another thread makes it true
            await trio.sleep(0.001)


def _planned(graph: Graph, machine: Machine, on_gpu: Sequence[bool]) -> dict[tuple[MemoryPlace, MemoryPlace], int]:
    """The planned copies of the graph for a batch that stays together. Outputs are in pinned memory."""
    places: list[MemoryPlaces] = [frozenset({GPU0}) if gpu else ON_HOST for gpu in on_gpu]
    counts = {IN: 0, OUT: 0}
    for transfer in transfers(graph, places):
        if transfer.kind == "copy":
            counts[IN if transfer.to == (GPU0,) else OUT] += 1
    return counts
