"""Batches that go from step to step on one GPU on one thread: whatever becomes of them, everybody hears, and all is
counted and copied as if each step had been taken by itself. The GPUs are fakes that raise where an order is missing.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve import Engine
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.devices import Devices
from flowserve.runtime import relay_runs, relays_on_gpu
from flowserve.runtime.embedded import AsyncEngine
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.opening import open_engine
from flowserve.runtime.relays_on_gpu import RelaysOnGpu
from flowserve.scheduling.relays import Relay
from flowserve.testing.engine import add_chain, add_kernel
from flowserve.testing.fake_device import FakeMachine, add_one
from flowserve.testing.fake_onnx import onnx_on
from flowserve.testing.onnx_files import onnx_model, onnx_node, onnx_value
from flowserve.values import Array, DType, Request


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stops each relay had that was started."""
    found: list[int] = []
    start = RelaysOnGpu.start

    def started(self: RelaysOnGpu, relay: Relay) -> bool:
        is_started = start(self, relay)
        if is_started:
            found.append(len(relay.instances))
        return is_started

    monkeypatch.setattr(RelaysOnGpu, "start", started)
    return found


def _write(folder: Path, rng: random.Random) -> None:
    """A random graph of ONNX models, one or two of which may be on the CPU."""
    width, made, steps = 4, ["X"], []
    unread: set[str] = set()
    for number in range(rng.randint(2, 6)):
        reads = [made[-1] if rng.random() < 0.7 else rng.choice(made)]
        if len(made) > 1 and rng.random() < 0.4:
            reads.append(rng.choice(made))
        node = onnx_node("Add", ["a", "b"], ["y"]) if len(reads) > 1 else onnx_node("Neg", ["a"], ["y"])
        values = [onnx_value(name, DType.FP32, ("N", width)) for name in ("a", "b", "y")]
        name = f"m{number}"
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(onnx_model([node], values[: len(reads)], values[2:]))
        kind = "KIND_CPU" if rng.random() < 0.15 else "KIND_GPU"
        count = 2 if rng.random() < 0.2 else 1
        batching = "" if rng.random() < 0.1 else "dynamic_batching { }"
        (folder / name / "config.pbtxt").write_text(
            f"max_batch_size: 8 {batching} instance_group {{ kind: {kind} count: {count} }}\n"
        )
        maps = " ".join(f'input_map {{ key: "{port}" value: "{one}" }}' for port, one in zip("ab", reads, strict=False))
        made.append(f"t{number}")
        unread = (unread - {*reads}) | {made[-1]}
        steps.append(
            f'step {{ model_name: "{name}" model_version: -1 {maps} output_map {{ key: "y" value: "{made[-1]}" }} }}'
        )
    answered = [name for name in made[1:] if name in unread or rng.random() < 0.15]
    tensor = '{{ name: "{}" data_type: TYPE_FP32 dims: [ 4 ] }}'
    (folder / "all" / "1").mkdir(parents=True)
    (folder / "all" / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 8 input [ {tensor.format("X")} ]\n'
        f"output [ {', '.join(map(tensor.format, answered))} ] ensemble_scheduling {{ {' '.join(steps)} }}"
    )


async def _ask(engine: AsyncEngine, name: str, inputs: Sequence[Array]) -> list[Any]:
    """Requests that come at once: what each is answered with, or told."""
    answers: list[Any] = [None] * len(inputs)

    async def one(m: int) -> None:
        try:
            answers[m] = {key: array.tolist() for key, array in (await engine.infer(name, {"X": inputs[m]})).items()}
        except FlowserveError as error:
            answers[m] = f"{type(error).__name__}: {error}"

    async with trio.open_nursery() as nursery:
        for m in range(len(inputs)):
            nursery.start_soon(one, m)
    return answers


async def _told(folder: Path, bursts: Sequence[Sequence[Array]]) -> tuple[list[Any], list[Any], Any]:
    """The answers, what the models have been run with, and what was copied."""
    with onnx_on(FakeMachine(is_quick=True)) as found:
        async with Engine(folder) as engine:
            answers = [await _ask(engine, "all", burst) for burst in bursts]
            rows = engine.statistics()
        assert sum(pool.lent_bytes + pool.adopted for pool in found.statistics().values()) == 0
        return answers, _counts(rows), _copies(found)


def _counts(rows: Sequence[Any]) -> Any:
    """What models ran with, and what became of each tensor's bytes on the edges: of two that read it at the same time,
    either may be the one that brings it to the GPU.
    """
    edges: Counter[tuple[str, str]] = Counter()
    nodes = []
    for row in rows:
        for node in row["flowserve"]["nodes"]:
            nodes.append((row["name"], node["name"], node["batch_count"], node["batch_rows"], node["outputs"]))
            for edge in node["inputs"]:
                edges += Counter({(edge["tensor"], what): edge[what] for what in edge if what.endswith("_bytes")})
    return nodes, edges, [(row["name"], row["inference_count"], row["execution_count"]) for row in rows]


def _copies(found: Devices) -> dict[object, tuple[int, int]]:
    return {crossing: (copies, nbytes) for crossing, (copies, nbytes) in found.ledger.entries().items()}


@pytest.mark.parametrize("seed", range(16))
async def test_a_batch_on_one_thread_is_answered_and_counted_as_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    _write(tmp_path, rng)
    # One at a time: how requests meet in batches is then the same, whoever is quicker.
    bursts = [[np.full((rng.choice((1, 2, 8)), 4), rng.randint(1, 60), np.float32)] for _ in range(6)]
    told = await _told(tmp_path, bursts)
    monkeypatch.setattr(RelaysOnGpu, "start", lambda *_: False)
    assert told == await _told(tmp_path, bursts)


@pytest.mark.parametrize("seed", range(6))
async def test_requests_that_come_together_find_their_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relayed: list[int], seed: int
) -> None:
    rng = random.Random(f"together {seed}")
    _write(tmp_path, rng)
    bursts = [[np.full((rng.choice((1, 2, 3)), 4), rng.randint(1, 60), np.float32) for _ in range(6)] for _ in range(4)]
    answers, _, _ = await _told(tmp_path, bursts)
    monkeypatch.setattr(RelaysOnGpu, "start", lambda *_: False)
    assert answers == (await _told(tmp_path, bursts))[0]


async def _run(engine: Any, value: float) -> float:
    request = Request({"IN": np.full((1, 4), value, np.float32)}, stamp=engine.next_stamp())
    response = await engine.infer(engine.find("chain"), request)
    return float(response.outputs["OUT"][0, 0])


@pytest.mark.parametrize("is_quick", [True, False])
async def test_a_chain_is_run_through_on_one_thread_while_it_is_quick(
    monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    threads: list[str] = []

    def kernel(array: Array, made: Array) -> None:
        threads.append(threading.current_thread().name)
        add_one(array, made)

    if not is_quick:
        monkeypatch.setattr(relays_on_gpu, "QUICK_NS", 0)
    monkeypatch.setattr(relays_on_gpu, "SKIPPED", 2)
    found = Devices(FakeMachine().devices)
    async with open_engine(EngineOptions()) as engine:
        for name in ("a", "b"):
            add_kernel(engine, name, [(kernel, found[0])])
        add_chain(engine, "chain", ["a", "b"])
        for _ in range(4):
            assert await _run(engine, 1) == 3
    alone, apart = ["flowserve a_0"] * 2, ["flowserve a_0", "flowserve b_0"]
    assert threads == (alone * 4 if is_quick else [*alone, *apart, *apart, *alone])


async def test_models_that_keep_things_by_thread_stay_on_their_own(relayed: list[int]) -> None:
    found = Devices(FakeMachine().devices)
    async with open_engine(EngineOptions()) as engine:
        add_kernel(engine, "a", [(add_one, found[0])])
        add_kernel(engine, "b", [(add_one, found[0])], is_of_any_thread=False)
        add_chain(engine, "chain", ["a", "b"])
        assert await _run(engine, 1) == 3
    assert relayed == []


async def test_what_is_on_two_gpus_is_handed_over_between_them(relayed: list[int]) -> None:
    found = Devices(FakeMachine(2).devices)
    async with open_engine(EngineOptions()) as engine:
        for name, gpu in (("a", 0), ("b", 1), ("c", 1)):
            add_kernel(engine, name, [(add_one, found[gpu])])
        add_chain(engine, "chain", ["a", "b", "c"])
        assert await _run(engine, 1) == 4
    assert relayed == [2]


@pytest.mark.parametrize(("module", "where"), [(relay_runs, "record_run_through"), (relays_on_gpu, "on_device")])
async def test_a_slip_in_a_relay_fails_its_batch_alone(
    monkeypatch: pytest.MonkeyPatch, relayed: list[int], module: Any, where: str
) -> None:
    def slip(*_: object, **__: object) -> None:
        raise RuntimeError("a slip")

    found = Devices(FakeMachine().devices)
    async with open_engine(EngineOptions()) as engine:
        for name in ("a", "b"):
            add_kernel(engine, name, [(add_one, found[0])])
        add_chain(engine, "chain", ["a", "b"])
        with monkeypatch.context() as patch:
            patch.setattr(module, where, slip)
            with pytest.raises(Internal, match="what came of a batch cannot be taken in: RuntimeError: a slip"):
                await _run(engine, 1)
        assert await _run(engine, 1) == 3
        engine.dispatcher.check()
    assert relayed == [2, 2]


async def test_an_instance_is_closed_after_what_another_thread_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Devices(FakeMachine().devices)
    begun, goes_on = threading.Event(), threading.Event()
    was_open: list[bool] = []
    async with open_engine(EngineOptions()) as engine:
        add_kernel(engine, "a", [(add_one, found[0])])
        (last,) = add_kernel(engine, "b", [(add_one, found[0])])
        add_chain(engine, "chain", ["a", "b"])
        inner = last.run

        def run(*arguments: Any) -> Any:
            begun.set()
            assert goes_on.wait(10)
            was_open.append(last.is_open)
            return inner(*arguments)

        monkeypatch.setattr(last, "run", run)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_run, engine, 1)
                assert await trio.to_thread.run_sync(begun.wait, 10)
                scope.cancel()
        threading.Timer(0.3, goes_on.set).start()  # by then the server, which nobody needs, wants to be gone
    assert was_open == [True]
    assert not last.is_open
