"""An ONNX model between two models in processes: its outputs are read where onnxruntime wrote them, also if requests
are cancelled, fail or share a batch, or if a model is unloaded.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from onnx import TensorProto, helper

from flowserve import Engine
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.types import ModelKey
from flowserve.memory.segment import locate
from flowserve.runtime.embedding.embedded import AsyncEngine
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.values import Array, DType
from tests.support.backends import Repository
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value
from tests.support.processes import all_at_once
from tests.support.shared_memory import check_arena

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

MODEL = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while os.path.exists({gate!r}):
            time.sleep(0.002)
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, given):
        given += {plus}  # into pages of its own
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])
"""
CONFIG = """
backend: "{backend}"
max_batch_size: 16
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 16
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "NET" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling {
  step { model_name: "pre" model_version: -1
         input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "pre" } }
  step { model_name: "net" model_version: -1
         input_map { key: "IN" value: "pre" } output_map { key: "OUT" value: "NET" } }
  step { model_name: "post" model_version: -1
         input_map { key: "IN" value: "NET" } output_map { key: "OUT" value: "OUT" } }
}
"""


def net_file() -> bytes:
    """OUT is minus IN; a row that begins with 9 or more makes it fail."""
    nodes = [
        onnx_node("Gather", ["IN", "first"], ["number"], axis=1),
        onnx_node("Cast", ["number"], ["index"], to=TensorProto.INT64),
        onnx_node("Gather", ["zeros", "index"], ["zero"]),
        onnx_node("Sub", ["zero", "IN"], ["OUT"]),
    ]
    constants = [
        helper.make_tensor("first", TensorProto.INT64, [1], [0]),
        helper.make_tensor("zeros", TensorProto.FLOAT, [9], [0.0] * 9),
    ]
    given, made = onnx_value("IN", DType.FP32, ["N", 4]), onnx_value("OUT", DType.FP32, ["N", 4])
    return onnx_model(nodes, [given], [made], constants)


class Pipeline:
    """pre + 1, net * -1, post + 10. `gate` is a file: while it is there, post does not answer."""

    def __init__(self, engine: AsyncEngine, gate: Path) -> None:
        self.engine = engine
        self.gate = gate

    async def ask(self, array: Array) -> dict[str, Array]:
        return await self.engine.infer("ensemble", {"IN": array})

    async def ask_all(self, arrays: Sequence[Array]) -> list[dict[str, Array] | FlowserveError]:
        return await all_at_once(self.ask, arrays)

    def edge(self) -> dict[str, Any]:
        """The edge from net to post in the statistics."""
        nodes = self.engine.graph_statistics("ensemble")[0]["nodes"]
        edge: dict[str, Any]
        (edge,) = next(node["inputs"] for node in nodes if node["name"] == "post")
        assert edge["producer"] == "net"
        return edge

    def lent_bytes(self) -> int:
        """The bytes of net's outputs: of the block kept for the next run, and of blocks that are still read."""
        (worker,) = self.engine._engine.loaded.generations[ModelKey("net", 1)].workers
        placing = worker._instance._shared  # type: ignore[attr-defined]
        lent_bytes = int(placing.arena.lent_bytes)
        check_arena(placing.arena)
        return lent_bytes


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    repository, gate = Repository(tmp_path / "models"), tmp_path / "gate"
    for name, plus, path in (("pre", 1, ""), ("post", 10, str(gate))):
        repository.write(name, "1/model.py", MODEL.format(plus=plus, gate=path))
        repository.write(name, "config.pbtxt", CONFIG.format(backend="python"))
    repository.write("net", "1/model.onnx", net_file())
    repository.write("net", "config.pbtxt", CONFIG.format(backend="onnxruntime"))
    repository.write("ensemble", "config.pbtxt", ENSEMBLE)
    (tmp_path / "models" / "ensemble" / "1").mkdir()
    async with Engine(tmp_path / "models", python_execution="process") as engine:
        yield Pipeline(engine, gate)


def rows(number: float, count: int = 1) -> Array:
    return np.full((count, 4), number, np.float32)


def assert_right(answer: Any, number: float, count: int = 1) -> None:
    assert isinstance(answer, dict), answer
    assert answer["NET"].tolist() == rows(-number - 1, count).tolist()
    assert answer["OUT"].tolist() == rows(-number + 9, count).tolist()


async def test_shared_outputs_of_every_batch_size_are_read_without_a_copy(pipeline: Pipeline) -> None:
    kept = []
    for turn in range(3):
        for count in (1, 2, 16, 5):
            answer = await pipeline.ask(rows(turn, count))
            assert_right(answer, turn, count)
            kept.append((answer, turn, count))
        for members in ([1] * 16, [2, 1, 4], [1] * 5):
            answers = await pipeline.ask_all([rows(m % 7, count) for m, count in enumerate(members)])
            for m, count in enumerate(members):
                assert_right(answers[m], m % 7, count)
    edge = pipeline.edge()
    assert (edge["copied_bytes"], edge["regathered_bytes"]) == (0, 0)
    assert edge["handed_on_bytes"] == 3 * (24 + 16 + 7 + 5) * 16
    for each in kept:
        assert_right(*each)


async def test_failed_and_cancelled_requests_return_shared_memory(pipeline: Pipeline) -> None:
    for _ in range(3):
        answers = await pipeline.ask_all([rows(number) for number in (1, 9, 2, 3)])
        assert isinstance(answers[1], ModelFailed)
        for m, number in ((0, 1), (2, 2), (3, 3)):
            assert_right(answers[m], number)
        pipeline.gate.touch()
        async with trio.open_nursery() as nursery:
            leaving = trio.CancelScope()

            async def leave(scope: trio.CancelScope = leaving) -> None:
                with scope:
                    await pipeline.ask_all([rows(8)] * 3)

            nursery.start_soon(leave)
            await trio.sleep(0.02)  # they are at post, or being sent there: both are valid
            leaving.cancel()
            pipeline.gate.unlink()
        assert_right(await pipeline.ask(rows(4)), 4)
    del answers
    gc.collect()
    kept = pipeline.lent_bytes()
    for number in range(8):
        assert_right(await pipeline.ask(rows(number)), number)
    gc.collect()
    assert pipeline.lent_bytes() == kept


async def test_response_stays_valid_after_its_model_is_unloaded(pipeline: Pipeline) -> None:
    answers: list[dict[str, Array]] = []

    async def ask(number: float) -> None:
        answers.append(await pipeline.ask(rows(number)))

    before = await pipeline.ask(rows(1))
    assert locate(before["NET"]) is not None, "it is sent from where the process read it"
    assert not before["NET"].flags.writeable
    pipeline.gate.touch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 2)
        await trio.sleep(0.05)
        for name in ("ensemble", "net"):
            nursery.start_soon(pipeline.engine.unload, name)
        await trio.sleep(0.05)
        assert not answers
        pipeline.gate.unlink()
    gc.collect()
    assert_right(before, 1)
    assert_right(answers[0], 2)
    await pipeline.engine.load("net")
    assert (await pipeline.engine.infer("net", {"IN": rows(3)}))["OUT"].tolist() == rows(-3).tolist()
    await pipeline.engine.load("ensemble")  # a graph that is loaded after its model
    for number in range(8):
        assert_right(await pipeline.ask(rows(number)), number)
    assert pipeline.edge()["copied_bytes"] == 0
    assert_right(before, 1)
    assert_right(answers[0], 2)
