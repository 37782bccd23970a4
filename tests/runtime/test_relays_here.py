"""Batches that go from step to step on the loop in one piece: whatever becomes of them, everybody hears and everything
is counted as if each step had been taken by itself.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trio.testing import wait_all_tasks_blocked

from flowserve import Engine
from flowserve.errors import FlowserveError
from flowserve.runtime import relay_runs, relays_here
from flowserve.runtime.embedded import AsyncEngine
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.opening import open_engine
from flowserve.runtime.relays_here import RelaysHere
from flowserve.scheduling.relays import Relay
from flowserve.testing.engine import add_chain, add_function
from flowserve.testing.onnx_files import onnx_model, onnx_node, onnx_value
from flowserve.values import Array, DType, Request

# What a step makes of `x`, the first input of each request of its batch. Some fail, by what they are given.
STEPS = {
    "plus": "y = x + 1",
    "in_place": "x += 1; y = x",
    "as_it_is": "y = x",
    "refuses": "y = x if int(x[0, 0]) % 7 else None",
    "raises": "y = x + 1\n            if int(x[0, 0]) % 11 == 0: raise ValueError('eleven')",
    "says": "y = x + 1; said = {'said': 1, 'sequence_id': 3}",
    "says_at_times": "y = x + 1\n            if int(x[0, 0]) % 5 == 0: said = {'sequence_id': 5}",
    "asks": "y = x + request.correlation_id()",
    "onnx": "",
}
JOINS = ("y = x + z", "x -= z; y = x", "z += x; y = z")
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x, *others = [tensor.as_numpy() for tensor in request.inputs()]
            z = others[0] if others else None
            said = {{}}
            {body}
            if y is None:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("seven")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)], parameters=said))
        return responses
"""


def tensor(name: str, width: int) -> str:
    return f'{{ name: "{name}", data_type: TYPE_FP32, dims: [ {width} ] }}'


@dataclass
class Graph:
    """A random graph of such steps, written as a repository: an ensemble "all" over a model for each step."""

    folder: Path
    width: int
    steps: list[str] = field(default_factory=list)
    is_open: bool = False  # its models leave open how wide their inputs are

    def write(self, rng: random.Random, kinds: Sequence[str]) -> None:
        unread = ["X"]
        made = ["X"]
        for number in range(rng.randint(2, 5)):
            reads = [unread.pop(0) if unread and rng.random() < 0.6 else rng.choice(made)]
            if len(made) > 1 and rng.random() < 0.4:
                reads.append(rng.choice(made))
            self._step(number, reads, rng.choice(JOINS) if len(reads) > 1 else rng.choice(kinds))
            unread = [name for name in unread if name not in reads] + [f"t{number}"]
            made.append(f"t{number}")
        number = len(self.steps)
        while len(unread) > 1:
            reads = [unread.pop(0), unread.pop(0)]
            self._step(number, reads, rng.choice(JOINS))
            unread.append(f"t{number}")
            number += 1
        if rng.random() < 0.2:
            unread.append(rng.choice([name for name in made[1:] if name not in unread]))
        outputs = ", ".join(tensor(name, self.width) for name in unread)
        self._file(
            "all/config.pbtxt",
            f'name: "all" platform: "ensemble" max_batch_size: 8 input [ {tensor("X", self.width)} ]\n'
            f"output [ {outputs} ] ensemble_scheduling {{ {' '.join(self.steps)} }}",
        )
        (self.folder / "all/1").mkdir()

    def _step(self, number: int, reads: Sequence[str], what: str) -> None:
        name = f"m{number}"
        is_open = self.is_open and what != "onnx"
        inputs = [tensor("XZ"[i], -1 if is_open else self.width) for i in range(len(reads))]
        head = f'name: "{name}" max_batch_size: 8 input [ {", ".join(inputs)} ] output [ {tensor("Y", self.width)} ]'
        head += " dynamic_batching { } instance_group [ { count: 1, kind: KIND_CPU } ]"
        if what == "onnx":
            value = [onnx_value(one, DType.FP32, ("N", self.width)) for one in ("X", "Y")]
            self._file(f"{name}/1/model.onnx", onnx_model([onnx_node("Neg", ["X"], ["Y"])], value[:1], value[1:]))
            head += ' backend: "onnxruntime" parameters { key: "execution", value: { string_value: "inline" } }'
        else:
            self._file(f"{name}/1/model.py", MODEL.format(body=STEPS.get(what, what)))
            head += ' backend: "python"'
        self._file(f"{name}/config.pbtxt", head)
        maps = " ".join(f'input_map {{ key: "{"XZ"[i]}" value: "{one}" }}' for i, one in enumerate(reads))
        self.steps.append(
            f'step {{ model_name: "{name}" model_version: -1 {maps} output_map {{ key: "Y" value: "t{number}" }} }}'
        )

    def _file(self, path: str, content: str | bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stops each relay had that was started."""
    found: list[int] = []
    start = RelaysHere.start

    def started(self: RelaysHere, relay: Relay) -> bool:
        is_started = start(self, relay)
        if is_started:
            found.append(len(relay.instances))
        return is_started

    monkeypatch.setattr(RelaysHere, "start", started)
    return found


def together(engine: AsyncEngine, name: str, inputs: Sequence[Array]) -> list[Any]:
    """Requests that come at once: what each is answered with, or told."""
    inner = engine._engine
    deployment = inner.find(name, "")
    inner.begin_burst(len(inputs))
    flows = []
    for array in inputs:
        request = Request({"X": array})
        request.stamp = inner.next_stamp()
        flows.append(inner.submit(deployment, request))
    inner.end_burst()
    answers: list[Any] = []
    for flow in flows:
        assert flow.done
        try:
            response = inner.response(flow)
            answers.append(({name: one.tolist() for name, one in response.outputs.items()}, response.parameters))
        except FlowserveError as error:
            answers.append(f"{type(error).__name__}: {error}")
    assert inner.dispatcher.in_flight == 0
    inner.dispatcher.check()
    return answers


def counts(engine: AsyncEngine) -> list[Any]:
    """What the statistics say that does not differ from run to run."""
    whole, *models = engine.statistics()
    if not any(row["inference_stats"]["fail"]["count"] for row in models):
        for which in ("queue", "compute_input", "compute_infer", "compute_output"):
            steps = sum(row["inference_stats"][which]["ns"] for row in models)
            assert whole["inference_stats"][which]["ns"] == steps, which
    return [
        (
            row["name"],
            row["inference_count"],
            row["execution_count"],
            {key: value["count"] for key, value in row["inference_stats"].items()},
            [(size["batch_size"], size["compute_infer"]["count"]) for size in row["batch_stats"]],
            row["flowserve"],
        )
        for row in (whole, *models)
    ]


async def told(folder: Path, bursts: Sequence[Sequence[Array]]) -> tuple[list[Any], list[Any]]:
    """The answers to these requests, and what is counted."""
    async with Engine(folder, python_execution="inline") as engine:
        answers = [together(engine, "all", [array.copy() for array in burst]) for burst in bursts]
        return answers, counts(engine)


def bursts_of(rng: random.Random, width: int) -> list[list[Array]]:
    bursts = []
    for _ in range(6):
        sizes = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(1, 6))]
        bursts.append([np.full((rows, width), rng.randint(1, 60), np.float32) for rows in sizes])
    return bursts


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kinds", ["usual", "all"])
async def test_a_batch_in_one_piece_is_answered_and_counted_as_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relayed: list[int], seed: int, kinds: str
) -> None:
    rng = random.Random(f"{kinds} {seed}")
    graph = Graph(tmp_path, rng.choice((4, 4, 20_000)), is_open=rng.random() < 0.3)
    graph.write(rng, ["plus", "in_place", "in_place", "as_it_is", "onnx"] if kinds == "usual" else list(STEPS))
    bursts = bursts_of(rng, graph.width)
    answers, counted = await told(tmp_path, bursts)
    monkeypatch.setattr(RelaysHere, "start", lambda *_: False)
    step_by_step, counted_then = await told(tmp_path, bursts)
    assert answers == step_by_step
    assert [row[:5] for row in counted] == [row[:5] for row in counted_then]
    for row, then in zip(counted, counted_then, strict=True):
        assert row[5] == then[5], row[0]


def chain(folder: Path, *bodies: str, name: str = "all") -> None:
    """An ensemble of these steps in a row; models that are there already are its steps all the same."""
    graph = Graph(folder, 4)
    for number, body in enumerate(bodies):
        graph._step(number, ["X" if number == 0 else f"t{number - 1}"], body)
    last = tensor(f"t{len(bodies) - 1}", 4)
    graph._file(
        f"{name}/config.pbtxt",
        f'name: "{name}" platform: "ensemble" max_batch_size: 8 input [ {tensor("X", 4)} ] output [ {last} ]\n'
        f"ensemble_scheduling {{ {' '.join(graph.steps)} }}",
    )
    (folder / name / "1").mkdir()


def rows_of(*values: float) -> list[Array]:
    return [np.full((1, 4), value, np.float32) for value in values]


def first_of(answers: Sequence[Any]) -> list[float]:
    """The first element of each answer's only output."""
    return [next(iter(outputs.values()))[0][0] for outputs, _ in answers]


def executions(engine: AsyncEngine) -> dict[str, int]:
    return {row["name"]: row["execution_count"] for row in engine.statistics()}


async def test_a_chain_and_a_diamond_are_run_through_in_one(tmp_path: Path, relayed: list[int]) -> None:
    graph = Graph(tmp_path, 4)
    graph._step(0, ["X"], "in_place")
    graph._step(1, ["t0"], "in_place")
    graph._step(2, ["t0"], "plus")
    graph._step(3, ["t1", "t2"], "x -= z; y = x")
    steps = " ".join(graph.steps)
    graph._file(
        "diamond/config.pbtxt",
        f'name: "diamond" platform: "ensemble" max_batch_size: 8 input [ {tensor("X", 4)} ]\n'
        f"output [ {tensor('t3', 4)} ] ensemble_scheduling {{ {steps} }}",
    )
    (tmp_path / "diamond/1").mkdir()
    async with Engine(tmp_path, python_execution="inline") as engine:
        assert first_of(together(engine, "diamond", rows_of(1, 2, 3))) == [0, 0, 0]
        assert relayed == [4]
        assert set(executions(engine).values()) == {1, 3}  # of the ensemble three


async def test_what_the_last_step_says_of_a_request_is_said(tmp_path: Path, relayed: list[int]) -> None:
    chain(tmp_path, "plus", "says")
    async with Engine(tmp_path, python_execution="inline") as engine:
        answers = together(engine, "all", rows_of(1, 2))
        assert relayed == [2]
        assert first_of(answers) == [3, 4]
        assert [said["sequence_id"] for _, said in answers] == [3, 3]


async def test_a_request_that_is_alone_goes_step_by_step(tmp_path: Path, relayed: list[int]) -> None:
    chain(tmp_path, "plus", "plus")
    async with Engine(tmp_path, python_execution="inline") as engine:
        assert first_of(together(engine, "all", rows_of(1))) == [3]
        assert not relayed


async def test_ensembles_that_share_a_model_meet_in_its_batch(tmp_path: Path, relayed: list[int]) -> None:
    """A batch that went on by itself would leave the others behind."""
    chain(tmp_path, "plus", "plus", name="one")
    steps = (
        'step { model_name: "first" model_version: -1 input_map { key: "X" value: "X" } '
        'output_map { key: "Y" value: "t" } } '
        'step { model_name: "m1" model_version: -1 input_map { key: "X" value: "t" } '
        'output_map { key: "Y" value: "u" } }'
    )
    graph = Graph(tmp_path, 4)
    graph._step(9, ["X"], "plus")
    (tmp_path / "m9").rename(tmp_path / "first")
    (tmp_path / "first/config.pbtxt").write_text((tmp_path / "first/config.pbtxt").read_text().replace("m9", "first"))
    graph._file(
        "other/config.pbtxt",
        f'name: "other" platform: "ensemble" max_batch_size: 8 input [ {tensor("X", 4)} ] '
        f"output [ {tensor('u', 4)} ] ensemble_scheduling {{ {steps} }}",
    )
    (tmp_path / "other/1").mkdir()
    async with Engine(tmp_path, python_execution="inline") as engine:
        inner = engine._engine
        inner.begin_burst(4)
        flows = []
        for name, array in zip(["other", "one", "other", "one"], rows_of(1, 2, 3, 4), strict=True):
            request = Request({"X": array})
            request.stamp = inner.next_stamp()
            flows.append(inner.submit(inner.find(name, ""), request))
        inner.end_burst()
        assert [next(iter(inner.response(flow).outputs.values()))[0, 0] for flow in flows] == [3, 4, 5, 6]
        counted = executions(engine)
        assert (counted["first"], counted["m0"], counted["m1"]) == (1, 1, 1)


async def test_a_model_that_raises_on_the_way_fails_who_is_there_and_nobody_after(
    tmp_path: Path, relayed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    chain(tmp_path, "import time; time.sleep(0.03); y = x + 1", "raises", "plus")
    async with Engine(tmp_path, python_execution="inline") as engine:
        told = together(engine, "all", rows_of(1, 10))
        assert all("ValueError: eleven" in one or "eleven" in one for one in told)
        assert all("in step 'm1'" in one or "m1" in one for one in told)
        assert first_of(together(engine, "all", rows_of(1, 2))) == [4, 5]
        assert relayed == [3, 3]
        assert executions(engine)["m2"] == 1
        failed = {row["name"]: row["inference_stats"]["fail"] for row in engine.statistics()}
        assert failed["m1"]["count"] == 2
        assert failed["m1"]["ns"] < 2 * 25_000_000  # none of the first step's time
    assert "Traceback" in caplog.text


async def test_one_poisonous_request_fails_alone_wherever_on_the_way_it_is_met(relayed: list[int]) -> None:
    def poisoned(array: Array) -> Array:
        if (array == 14).any():
            raise ValueError("poison")
        return array * 2

    async with open_engine(EngineOptions()) as engine:
        add_function(engine, "plus", [lambda array: array + 1], is_pure=True)
        add_function(engine, "twice", [poisoned], is_pure=True)
        add_function(engine, "minus", [lambda array: array - 1], is_pure=True)
        add_chain(engine, "chain", ["plus", "twice", "minus"])
        engine.begin_burst(4)
        flows = []
        for (array,) in zip(rows_of(1, 2, 13, 4)):
            request = Request({"IN": array})
            request.stamp = engine.next_stamp()
            flows.append(engine.submit(engine.find("chain"), request))
        engine.end_burst()
        assert relayed[0] == 3
        with pytest.raises(FlowserveError, match="poison"):
            engine.response(flows.pop(2))
        assert [engine.response(flow).outputs["OUT"][0, 0] for flow in flows] == [3, 5, 9]


async def test_what_was_read_for_the_last_time_is_let_go_of_on_the_way(relayed: list[int]) -> None:
    held: list[weakref.ref[Array]] = []
    alive: list[int] = []

    def step(array: Array) -> Array:
        alive.append(sum(one() is not None for one in held))
        made = array + 1
        held.append(weakref.ref(made))
        return made

    async with open_engine(EngineOptions()) as engine:
        names = [f"step_{i}" for i in range(6)]
        for name in names:
            add_function(engine, name, [step])
        add_chain(engine, "chain", names)
        engine.begin_burst(2)
        flows = [engine.submit(engine.find("chain"), Request({"IN": array})) for array in rows_of(1, 2)]
        engine.end_burst()
        assert [engine.response(flow).outputs["OUT"][0, 0] for flow in flows] == [7, 8]
        assert relayed == [6]
        assert alive == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("body", ["raises", "raise SystemExit(3)", "responses.append(1); y = x"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["in one piece", "step by step"])
async def test_a_batch_that_fails_is_let_go_of_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    relayed: list[int],
    body: str,
    is_whole: bool,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="flowserve")  # what is kept for the test's report holds its frames
    chain(tmp_path, "plus", body)
    if not is_whole:
        monkeypatch.setattr(RelaysHere, "start", lambda *_: False)
    async with Engine(tmp_path, python_execution="inline") as engine:
        inner = engine._engine
        given = [np.full((1, 4), 10, np.float32) for _ in range(3)]  # eleven, in the second step
        held = [weakref.ref(array) for array in given]
        inner.begin_burst(3)
        flows = [inner.submit(inner.find("all", ""), Request({"X": array})) for array in given]
        inner.end_burst()
        assert all(flow.error is not None for flow in flows)
        assert relayed == [2] * is_whole
        del given, flows
        assert [one() for one in held] == [None] * 3


@pytest.mark.parametrize("where", ["record_run_through", "_following", "gather"])
async def test_a_slip_in_a_relay_fails_its_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relayed: list[int], where: str
) -> None:
    chain(tmp_path, "plus", "plus")
    async with Engine(tmp_path, python_execution="inline") as engine:

        def slip(*_: object, **__: object) -> None:
            raise MemoryError("a slip") if where == "gather" else RuntimeError("a slip")

        with monkeypatch.context() as patch:
            patch.setattr(relays_here if where == "gather" else relay_runs, where, slip)
            told = together(engine, "all", rows_of(1, 2))
        if where == "gather":  # step by step there was memory
            assert first_of(told) == [3, 4]
            assert relayed == []
        else:
            assert all("what came of a batch cannot be taken in: RuntimeError: a slip" in one for one in told)
        await wait_all_tasks_blocked()
        assert first_of(together(engine, "all", rows_of(1, 2))) == [3, 4]
