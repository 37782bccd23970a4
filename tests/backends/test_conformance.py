"""Every backend follows the rules of backends/base.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import ModelFiles, Work
from flowserve.config.types import Completion, InstanceGroup
from flowserve.errors import Invalid, ModelFailed
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column, scatter
from flowserve.memory.devices import Devices, using
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, Request
from tests.support.backends import Opened, Repository, config_of, sample, spec, tensors, values
from tests.support.fake_device import FakeMachine
from tests.support.fake_tensorrt import FakePlan, FakeTensorRt
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

PYTHON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", -x), pb_utils.Tensor("z", abs(x))]) for x in tensors]
"""
FUNCTION = """
from flowserve import model

@model({"x": "FP32[4]"}, {"y": "FP32[4]", "z": "FP32[4]"}, max_batch_size=8)
def function(x):
    return -x, abs(x)
"""
NARROW = """
from flowserve import model

@model({"x": "FP32[-1]"}, {"y": "FP32[4]"}, max_batch_size=8)
def function(x):
    return -x
"""
X, Y, Z = (onnx_value(name, DType.FP32, ("N", 4)) for name in "xyz")
MODELS = {
    "callable": FUNCTION.encode(),
    "python": PYTHON.encode(),
    "onnxruntime": onnx_model([onnx_node("Neg", ["x"], ["y"]), onnx_node("Abs", ["x"], ["z"])], [X], [Y, Z]),
    "tensorrt": b"plan",
}
# Their common template is tested in test_library.py, with a fake library.
LIBRARIES = {"fil", "openvino", "pytorch", "tensorflow"}
ANY = ("FLOAT", (-1, 4))
PLAN = FakePlan(
    inputs={"x": ANY},
    outputs={"y": ANY, "z": ANY},
    profiles=[{"x": ((1, 4), (4, 4), (8, 4))}],
    compute=lambda given: {"y": -given["x"], "z": abs(given["x"])},
    shapes=lambda shapes: {"y": shapes["x"], "z": shapes["x"]},
)
FREE = FakePlan(
    inputs={"x": ("FLOAT", (-1, -1))},
    outputs={"y": ("FLOAT", (-1, -1))},
    profiles=[{"x": ((1, 1), (1, 6), (8, 8))}],
    compute=lambda given: {"y": -given["x"]},
    shapes=lambda shapes: {"y": shapes["x"]},
)
Open = Callable[..., Opened]


@pytest.fixture(params=sorted({*registry.default_files()} - LIBRARIES))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "tensorrt":
        yield str(request.param)
        return
    machine = FakeMachine()
    library = FakeTensorRt(machine, {b"plan": PLAN, b"free": FREE})
    monkeypatch.setattr(registry.find("tensorrt"), "_library", lambda: library)
    with using(Devices(machine.devices)):
        yield "tensorrt"


def groups(backend: str) -> tuple[InstanceGroup, ...]:
    """The instance group: on the CPU where the backend can run there."""
    return (InstanceGroup("m", "KIND_GPU", 1, (0,)),) if backend == "tensorrt" else ()


@pytest.fixture
def model(backend: str, repository: Repository, opened: Open) -> Opened:
    """The outputs are y = -x and z = |x|."""
    repository.write("m", f"1/{registry.find(backend).default_filename}", MODELS[backend])
    outputs = [spec("y"), spec("z")]
    return opened(
        config_of(backend, inputs=[spec("x")], outputs=outputs, max_batch_size=8, instance_groups=groups(backend))
    )


def test_every_backend_is_tested_here(backend: str) -> None:
    assert backend in MODELS


def test_outputs_are_indexed_by_output_and_member(model: Opened) -> None:
    one, two = sample(DType.FP32), 2 * sample(DType.FP32, 2)
    results = model.run({"x": one}, {"x": two})
    assert values(results, 0) == [(-one).tolist(), (-two).tolist()]
    assert values(results, 1) == [one.tolist(), two.tolist()]
    assert [tensor.shape for tensor in tensors(results.outputs[0])] == [(1, 4), (2, 4)]
    assert dict(results.errors) == {}


def test_both_times_are_read_from_the_given_clock_in_order(model: Opened) -> None:
    ticks = count(100)
    column: list[Tensor | None] = [*scatter(sample(DType.FP32), [1])]
    results = model.instance.run(Work([Column.of([*column], [1])], [1], [Request({})], [("y",)]), lambda: next(ticks))
    assert (results.gathered_ns, results.computed_ns) == (100, 101)


def test_a_read_only_input_is_unchanged(model: Opened) -> None:
    array = sample(DType.FP32, 3)
    array.flags.writeable = False
    model.run({"x": array}, may_write=False)
    assert array.tolist() == sample(DType.FP32, 3).tolist()


def test_only_wanted_outputs_are_returned(model: Opened) -> None:
    results = model.run({"x": sample(DType.FP32)}, wanted=("z",))
    assert results.outputs[0] == [None]
    assert values(results, 1) == [sample(DType.FP32).tolist()]


def test_later_runs_do_not_change_earlier_outputs(model: Opened) -> None:
    (first,) = tensors(model.run({"x": sample(DType.FP32)}).outputs[0])
    kept = first.array.tolist()
    model.run({"x": 5 * sample(DType.FP32)})
    assert first.array.tolist() == kept


def test_a_small_batch_reaches_the_next_model_without_a_copy(model: Opened) -> None:
    results = model.whole(sample(DType.FP32, 4))
    assert not any(results.copied) or model.config.backend == "tensorrt", "what is on a GPU comes from there"
    present = [tensor for tensor in results.outputs[0] if tensor is not None]
    joined, copied = gather(present, Pool())
    assert copied == 0
    assert joined.tolist() == (-sample(DType.FP32, 4)).tolist()


def test_outputs_are_contiguous_and_aligned(model: Opened) -> None:
    for column in model.whole(sample(DType.FP32, 4)).outputs:
        for tensor in tensors(column):
            assert tensor.block.flags.c_contiguous
            assert tensor.block.flags.aligned


def test_instances_of_one_model_run_at_the_same_time(model: Opened) -> None:
    second = model.model.instance("m_1", (*groups(model.config.backend), InstanceGroup("m"))[0])
    second.open()
    other = Opened(model.config, model.model, second)
    one, two = model.run({"x": sample(DType.FP32)}), other.run({"x": sample(DType.FP32)})
    second.close()
    assert values(one) == values(two) == values(model.run({"x": sample(DType.FP32)}))


def test_a_loaded_model_has_the_attributes_that_the_runtime_reads(model: Opened) -> None:
    assert type(model.model.is_pure) is bool
    assert type(model.model.may_run_inline) is bool


@pytest.mark.fault("C12")
def test_a_missing_file_is_invalid_by_its_relative_name(backend: str, repository: Repository) -> None:
    found = registry.find(backend)
    (repository.path / "m" / "1").mkdir(parents=True)
    for ask in (found.complete, lambda config, files: found.load(config, files, {})):
        with pytest.raises(Invalid) as caught:
            ask(config_of(backend), repository.files())
        assert f"file m/1/{found.default_filename} does not exist; folder m/1 is empty" in str(caught.value)


def test_a_missing_version_is_invalid_by_its_relative_name(backend: str, repository: Repository) -> None:
    (repository.path / "m").mkdir()
    with pytest.raises(Invalid, match="there is no folder m/7 either"):
        registry.find(backend).load(config_of(backend), ModelFiles(repository.path, repository.path / "m", 7), {})


def test_a_complete_configuration_is_not_changed(backend: str, repository: Repository) -> None:
    repository.write("m", f"1/{registry.find(backend).default_filename}", MODELS[backend])
    config = config_of(backend, inputs=[spec("x")], outputs=[spec("y"), spec("z")], max_batch_size=8)
    completion = registry.find(backend).complete(config, repository.files())
    # A function's decorator declares everything, so the configuration must be the same.
    assert completion in (Completion(), Completion(config.inputs, config.outputs, 8, dynamic_batching=True))


@pytest.mark.fault("S10")
def test_an_invalid_output_is_reported_with_model_and_output(
    backend: str, repository: Repository, opened: Open
) -> None:
    x, y = (onnx_value(name, DType.FP32, ("N", "K")) for name in "xy")
    free = {
        **MODELS,
        "callable": NARROW.encode(),
        "onnxruntime": onnx_model([onnx_node("Neg", ["x"], ["y"])], [x], [y]),
        "tensorrt": b"free",
    }
    repository.write("m", f"1/{registry.find(backend).default_filename}", free[backend])
    inputs, outputs = [spec("x", [-1])], [spec("y", [4])]
    config = config_of(backend, inputs=inputs, outputs=outputs, max_batch_size=8, instance_groups=groups(backend))
    model = opened(config, strict_outputs="true")
    text = "model 'm', output 'y': the configuration promises shape [1,4], the model answered [1,6]"
    if backend == "python":
        text += "; return that shape, or change dims"
    if backend == "callable":  # there the decorator declares the outputs
        text = "model 'm', output 'y': its function promises shape [1,4] and returned [1,6]"
    try:
        errors = list(model.run({"x": np.ones((1, 6), np.float32)}).errors.values())
    except ModelFailed as error:
        errors = [error]
    assert [str(error) for error in errors] == [text]
