"""ONNX pipelines on a GPU, from files to responses: the real loader, engine and onnxruntime, on a fake device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.config.types import Gpus
from flowserve.memory.devices import Devices
from flowserve.memory.devices import devices as process_devices
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, DType, Request, gpu_memory
from tests.support.fake_device import FakeMachine
from tests.support.fake_onnx import onnx_on
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

IN, OUT = (HOST_MEMORY, gpu_memory(0)), (gpu_memory(0), PINNED_MEMORY)
GPU = "instance_group { kind: KIND_GPU }\n"
CPU = "instance_group { kind: KIND_CPU }\n"
GPU0 = "instance_group { kind: KIND_GPU gpus: [ 0 ] }\n"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 32
input { name: "IN" data_type: TYPE_FP32 dims: 4 }
output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "t" } }
  step { model_name: "b" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "u" } }
  step { model_name: "c" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "OUT" } }
}
"""


def _doubling() -> bytes:
    node = onnx_node("Add", ["x", "x"], ["y"])
    return onnx_model([node], [onnx_value("x", DType.FP32, ("N", 4))], [onnx_value("y", DType.FP32, ("N", 4))])


def _repository(folder: Path, where: Mapping[str, str]) -> Path:
    for name, group in where.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(_doubling())
        (folder / name / "config.pbtxt").write_text(f"max_batch_size: 32\ndynamic_batching {{ }}\n{group}")
    (folder / "chain" / "1").mkdir(parents=True)
    (folder / "chain" / "config.pbtxt").write_text(ENSEMBLE)
    return folder


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def devices(machine: FakeMachine) -> Iterator[Devices]:
    with onnx_on(machine) as devices:
        yield devices
    assert sum(pool.lent_bytes + pool.adopted for pool in devices.statistics().values()) == 0


@asynccontextmanager
async def serving(repository: Path) -> AsyncIterator[Engine]:
    async with (
        open_engine(EngineOptions(gpus=Gpus((0,)))) as engine,
        open_control(engine, [repository], ControlOptions()) as control,
    ):
        assert await control.start(lambda event: None) == {}
        yield engine


async def _ask(engine: Engine, name: str, count: int) -> list[float]:
    answers = [0.0] * count
    port = "IN" if name == "chain" else "x"

    async def one(i: int) -> None:
        request = Request({port: np.full((1, 4), i, np.float32)}, stamp=engine.next_stamp())
        response = await engine.infer(engine.deployments.find(name), request)
        answers[i] = float(next(iter(response.outputs.values()))[0, 0])

    async with trio.open_nursery() as nursery:
        for i in range(count):
            nursery.start_soon(one, i)
    return answers


def _copies(devices: Devices) -> dict[object, int]:
    return {crossing: copies for crossing, (copies, _) in devices.ledger.entries().items()}


SPACES = """
platform: "ensemble"
max_batch_size: 32
input { name: "IN" data_type: TYPE_FP32 dims: 4 }
output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
output { name: "ITEMS" data_type: TYPE_FP32 dims: [ -1, 4 ] }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "t" } }
  step { model_name: "flag" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "k" value: "k" } }
  step { model_name: "b" model_version: -1 when { tensor: "k" above: 30 }
    input_map { key: "x" value: "t" } output_map { key: "y" value: "u" } }
  step { model_name: "a" model_version: -1 when { tensor: "k" otherwise: true }
    input_map { key: "x" value: "t" } output_map { key: "y" value: "u" } }
  step { model_name: "c" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "OUT" } }
  step { model_name: "stack" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "s" } }
  step { model_name: "b" model_version: -1 each { tensor: "s" }
    input_map { key: "x" value: "s" } output_map { key: "y" value: "v" } }
  step { model_name: "c" model_version: -1 input_map { key: "x" value: "v" } output_map { key: "y" value: "ITEMS" } }
}
"""


def _write(folder: Path, name: str, model: bytes, group: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.onnx").write_bytes(model)
    (folder / name / "config.pbtxt").write_text(f"max_batch_size: 32\ndynamic_batching {{ }}\n{group}")


async def _check_spaces(repository: Path, group: str, devices: Devices, *, is_shown: bool) -> None:
    """Only the inputs of three requests are uploaded, and only tests and outputs are downloaded."""
    _repository(repository, {"a": group, "b": group, "c": group})
    rows = [onnx_value("x", DType.FP32, ("N", 4))]
    axis = onnx_node("Constant", [], ["axis"], value_ints=[1])
    first = [axis, onnx_node("ReduceMax", ["x", "axis"], ["k"])]
    _write(repository, "flag", onnx_model(first, rows, [onnx_value("k", DType.FP32, ("N", 1))]), group)
    twice = [axis, onnx_node("Unsqueeze", ["x", "axis"], ["z"]), onnx_node("Concat", ["z", "z"], ["y"], axis=1)]
    _write(repository, "stack", onnx_model(twice, rows, [onnx_value("y", DType.FP32, ("N", 2, 4))]), group)
    # With u as an output, the tensor of the two conditions is read on the device and on the host.
    shown = 'output { name: "u" data_type: TYPE_FP32 dims: 4 }' if is_shown else ""
    (repository / "chain/config.pbtxt").write_text(shown + SPACES)
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    answers: dict[int, Mapping[str, np.ndarray]] = {}
    async with serving(repository) as engine:
        before = _bytes(devices)

        async def one(i: int) -> None:
            request = Request({"IN": x[2 * i : 2 * i + 2]}, stamp=engine.next_stamp())
            answers[i] = (await engine.infer(engine.deployments.find("chain"), request)).outputs

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(one, i)
    for i, outputs in answers.items():
        wanted = x[2 * i : 2 * i + 2] * 8
        np.testing.assert_array_equal(outputs["OUT"], wanted)
        assert not is_shown or outputs["u"].tolist() == (wanted / 2).tolist()
        np.testing.assert_array_equal(outputs["ITEMS"], np.repeat(wanted[:, None] * 2, 2, axis=1))
    crossed = {crossing: nbytes - before.get(crossing, 0) for crossing, nbytes in _bytes(devices).items()}
    assert crossed[IN] == x.nbytes
    assert crossed[OUT] == 6 * 4 + (3 + is_shown) * x.nbytes  # a test for each row, and the outputs


def _bytes(devices: Devices) -> dict[object, int]:
    return {crossing: nbytes for crossing, (_, nbytes) in devices.ledger.entries().items()}


@pytest.mark.parametrize("is_shown", [False, True])
async def test_rows_of_conditions_and_items_stay_on_the_device(
    tmp_path: Path, devices: Devices, *, is_shown: bool
) -> None:
    await _check_spaces(tmp_path, GPU, devices, is_shown=is_shown)


@pytest.mark.gpu
@pytest.mark.parametrize("is_shown", [False, True])
async def test_on_hardware_rows_of_conditions_and_items_stay_on_the_device(tmp_path: Path, *, is_shown: bool) -> None:
    await _check_spaces(tmp_path, GPU0, process_devices(), is_shown=is_shown)


# A cascade whose second model runs for some rows, and for one item of each of these: the others are filled.
FILLED = """
platform: "ensemble"
max_batch_size: 32
input { name: "IN" data_type: TYPE_FP32 dims: 4 }
output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
output { name: "SOME" data_type: TYPE_FP32 dims: 4 }
output { name: "written" data_type: TYPE_BOOL dims: 1 }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "t" } }
  step { model_name: "flag" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "k" value: "k" } }
  step { model_name: "b" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "u" } }
  step { model_name: "c" model_version: -1 when { tensor: "k" above: 1 }
    input_map { key: "x" value: "t" } output_map { key: "y" value: "w" } }
  step { model_name: "b" model_version: -1 when { tensor: "k" above: 1 }
    input_map { key: "x" value: "w" } output_map { key: "y" value: "u" } }
  step { model_name: "c" model_version: -1 when { tensor: "k" above: 2 }
    input_map { key: "x" value: "u" } output_map { key: "y" value: "SOME" } }
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "OUT" } }
  fill { tensor: "SOME" value: -5 present: "written" }
}
"""


async def _answers(repository: Path, group: str) -> list[Mapping[str, np.ndarray]]:
    """The responses to forty requests of one to four random rows, sent together."""
    _repository(repository, {"a": group, "b": group, "c": group})
    rows = [onnx_value("x", DType.FP32, ("N", 4))]
    axis = onnx_node("Constant", [], ["axis"], value_ints=[1])
    largest = [axis, onnx_node("ReduceMax", ["x", "axis"], ["k"])]
    _write(repository, "flag", onnx_model(largest, rows, [onnx_value("k", DType.FP32, ("N", 1))]), group)
    (repository / "chain/config.pbtxt").write_text(FILLED)
    random = np.random.default_rng(7)
    given = [random.standard_normal((1 + i % 4, 4)).astype(np.float32) for i in range(40)]
    answers: list[Mapping[str, np.ndarray]] = [{}] * len(given)
    async with serving(repository) as engine:

        async def one(i: int) -> None:
            request = Request({"IN": given[i]}, stamp=engine.next_stamp())
            answers[i] = (await engine.infer(engine.deployments.find("chain"), request)).outputs

        async with trio.open_nursery() as nursery:
            for i in range(len(given)):
                nursery.start_soon(one, i)
    return answers


async def _check_as_on_the_cpu(folder: Path, group: str) -> None:
    (folder / "cpu").mkdir()
    (folder / "gpu").mkdir()
    wanted = await _answers(folder / "cpu", CPU)
    found = await _answers(folder / "gpu", group)
    for there, here in zip(found, wanted, strict=True):
        assert {name: array.tolist() for name, array in there.items()} == {
            name: array.tolist() for name, array in here.items()
        }
    written = np.concatenate([answer["written"] for answer in wanted])
    assert 0 < written.sum() < len(written)


async def test_a_cascade_with_filled_rows_answers_as_on_the_cpu(tmp_path: Path, devices: Devices) -> None:
    await _check_as_on_the_cpu(tmp_path, GPU)
    assert _copies(devices)


@pytest.mark.gpu
async def test_on_hardware_a_cascade_with_filled_rows_answers_as_on_the_cpu(tmp_path: Path) -> None:
    before = _bytes(process_devices()).get(IN, 0)
    await _check_as_on_the_cpu(tmp_path, GPU0)
    assert _bytes(process_devices())[IN] - before == 100 * 4 * 4  # each of the hundred rows, once


@pytest.mark.parametrize("count", [1, 32])
async def test_a_pipeline_of_three_onnx_models_is_copied_once_to_the_device_and_once_back(
    tmp_path: Path, devices: Devices, count: int
) -> None:
    async with serving(_repository(tmp_path, {"a": GPU, "b": GPU, "c": GPU})) as engine:
        assert await _ask(engine, "chain", count) == [8.0 * i for i in range(count)]
        assert _copies(devices) == {IN: 1, OUT: 1}
        assert [(node.batches, node.rows) for node in engine.deployments.find("chain").traffic] == [(1, count)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 32])
async def test_on_hardware_a_pipeline_of_three_is_copied_once_to_the_device_and_once_back(
    tmp_path: Path, count: int
) -> None:
    before = _copies(process_devices())
    async with serving(_repository(tmp_path, {"a": GPU0, "b": GPU0, "c": GPU0})) as engine:
        assert await _ask(engine, "chain", count) == [8.0 * i for i in range(count)]
    crossed = {crossing: copies - before.get(crossing, 0) for crossing, copies in _copies(process_devices()).items()}
    assert (crossed[IN], crossed[OUT], sum(crossed.values())) == (1, 1, 2)


async def test_a_cpu_step_between_gpu_steps_adds_one_copy_in_each_direction(tmp_path: Path, devices: Devices) -> None:
    async with serving(_repository(tmp_path, {"a": GPU, "b": CPU, "c": GPU})) as engine:
        assert await _ask(engine, "chain", 8) == [8.0 * i for i in range(8)]
        assert _copies(devices) == {IN: 2, OUT: 2}
        assert await _ask(engine, "a", 2) == [0.0, 2.0]  # and a direct caller


async def test_a_model_without_an_instance_group_is_placed_on_the_gpu(tmp_path: Path, devices: Devices) -> None:
    async with serving(_repository(tmp_path, {"a": "", "b": "", "c": ""})) as engine:
        assert await _ask(engine, "chain", 4) == [0.0, 8.0, 16.0, 24.0]
        assert _copies(devices) == {IN: 1, OUT: 1}


REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            sender = request.get_response_sender()
            for n in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", given + np.float32(n))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """
backend: "python"
max_batch_size: 32
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
model_transaction_policy { decoupled: true }
parameters { key: "execution" value: { string_value: "thread" } }
"""


async def test_each_response_of_a_decoupled_model_goes_through_the_gpu(tmp_path: Path, devices: Devices) -> None:
    repository = _repository(tmp_path, {"b": GPU, "c": GPU})
    (repository / "a" / "1").mkdir(parents=True)
    (repository / "a" / "1" / "model.py").write_text(REPEAT)
    (repository / "a" / "config.pbtxt").write_text(REPEAT_CONFIG)
    async with serving(repository) as engine:
        request = Request({"IN": np.ones((1, 4), np.float32)}, stamp=engine.next_stamp())
        async with engine.stream(engine.deployments.find("chain"), request) as answers:
            found = [float(answer.outputs["OUT"][0, 0]) async for answer in answers]
        assert found == [4, 8, 12]
        copies = _copies(devices)
        assert copies[IN] == copies[OUT] <= 3


SEQUENCE = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } }
instance_group { kind: KIND_GPU }
"""


async def test_a_model_of_sequences_on_the_gpu_has_its_tensors_on_the_host(tmp_path: Path, devices: Devices) -> None:
    node = onnx_node("Add", ["x", "START"], ["y"])
    inputs = [onnx_value("x", DType.FP32, ("N", 4)), onnx_value("START", DType.FP32, ("N", 1))]
    (tmp_path / "s" / "1").mkdir(parents=True)
    (tmp_path / "s" / "1" / "model.onnx").write_bytes(
        onnx_model([node], inputs, [onnx_value("y", DType.FP32, ("N", 4))])
    )
    (tmp_path / "s" / "config.pbtxt").write_text(SEQUENCE)
    async with serving(tmp_path) as engine:
        answers = []
        for is_first in (True, False):
            request = Request(
                {"x": np.ones((1, 4), np.float32)},
                sequence_id=7,
                sequence_start=is_first,
                sequence_end=not is_first,
                stamp=engine.next_stamp(),
            )
            response = await engine.infer(engine.deployments.find("s"), request)
            answers.append(float(response.outputs["y"][0, 0]))
        assert answers == [2, 1]
        assert _copies(devices) == {}  # onnxruntime copies by itself
