"""A kernel has made a CUDA context useless: who fails, who goes on, what the server says of itself, and what starts
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from flowserve import Engine
from flowserve.errors import InstanceDied, ModelFailed, Unavailable
from flowserve.memory.devices import Devices
from flowserve.testing.fake_device import FakeMachine
from flowserve.testing.fake_onnx import onnx_on
from flowserve.testing.onnx_files import onnx_identity
from flowserve.testing.serve import Served, serving
from flowserve.values import Array

ERROR = "CUDA_ERROR_ILLEGAL_ADDRESS"
ONNX = "max_batch_size: 8\ninstance_group {{ kind: {} }}\n"
PYTHON = """
backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
instance_group {{ kind: {kind} count: 1 }}
parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}
"""
ONES: Array = np.ones((1, 4), np.float32)


ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def _write(folder: Path, name: str, config: str, file: str, content: bytes) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / file).write_bytes(content)
    (folder / name / "config.pbtxt").write_text(config)


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine(is_quick=True)
    with onnx_on(machine):
        yield machine


def test_what_is_on_a_lost_gpu_is_refused_and_not_ready_and_the_rest_goes_on(
    tmp_path: Path, machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, "there", ONNX.format("KIND_GPU"), "model.onnx", onnx_identity())
    _write(tmp_path, "here", ONNX.format("KIND_CPU"), "model.onnx", onnx_identity())
    thread = PYTHON.format(kind="KIND_GPU", execution="thread")  # which may compute there without our knowing
    _write(tmp_path, "thread", thread, "model.py", ECHO.encode())
    with Engine(tmp_path) as engine:
        assert engine.infer("there", {"x": ONES})["y"].tolist() == [[1] * 4]
        machine.lost = ERROR
        with pytest.raises(ModelFailed, match=ERROR):
            engine.infer("there", {"x": ONES})
        for _ in range(2):
            for name in ("there", "thread"):
                with pytest.raises(Unavailable, match=rf"cannot be used by this process any more \({ERROR}\); rest"):
                    engine.infer(name, {"x": ONES})
        assert engine.infer("here", {"x": ONES})["y"].tolist() == [[1] * 4]
    said = [record.message for record in caplog.records if "says that it is not live" in record.message]
    assert len(said) == 1


def test_a_failure_that_leaves_the_gpu_as_it_was_is_that_batchs_alone(tmp_path: Path) -> None:
    _write(tmp_path, "there", ONNX.format("KIND_GPU"), "model.onnx", onnx_identity())
    machine = FakeMachine(is_quick=True)
    with onnx_on(machine) as found, Engine(tmp_path) as engine:
        assert isinstance(found, Devices)
        machine.lost = ERROR
        found.look_for_loss = lambda: None  # type: ignore[method-assign]  # what is wrong passes
        with pytest.raises(ModelFailed, match=ERROR):
            engine.infer("there", {"x": ONES})
        machine.lost = ""
        assert engine.infer("there", {"x": ONES})["y"].tolist() == [[1] * 4]


# A model that says of its own process what the driver would say, the first time that it is started.
LOSES = """
from pathlib import Path
import flowserve.backends.child.main as child
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        mark = Path(MARK)
        self.fails = not mark.exists()
        mark.touch()

    def execute(self, requests):
        if self.fails:
            child.why_lost = lambda: "CUDA_ERROR_ILLEGAL_ADDRESS"
            HOW
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.parametrize(
    "how",
    [
        "raise RuntimeError('an illegal memory access')",
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('an illegal memory access'))]",
    ],
    ids=["raises", "answers an error"],
)
def test_a_process_that_lost_its_gpu_ends_and_another_takes_its_place(tmp_path: Path, how: str) -> None:
    config = PYTHON.format(kind="KIND_CPU", execution="process")
    code = LOSES.replace("HOW", how).replace("MARK", repr(str(tmp_path / "begun")))
    _write(tmp_path / "models", "m", config, "model.py", code.encode())
    with Engine(tmp_path / "models") as engine:
        with pytest.raises(InstanceDied, match=r"instance 'm_0.*': its process lost the GPU and ended"):
            engine.infer("m", {"x": ONES})
        assert _until(lambda: engine.infer("m", {"x": ONES})["y"].tolist() == [[1] * 4])


DECOUPLED = """
from pathlib import Path
import flowserve.backends.child.main as child
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        mark = Path(MARK)
        self.fails = not mark.exists()
        mark.touch()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.fails:
                child.why_lost = lambda: "CUDA_ERROR_ILLEGAL_ADDRESS"
                answer = pb_utils.InferenceResponse(error=pb_utils.TritonError("an illegal memory access"))
            else:
                answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_so_does_one_whose_model_answers_many_times(tmp_path: Path) -> None:
    config = PYTHON.format(kind="KIND_CPU", execution="process") + "model_transaction_policy { decoupled: true }\n"
    code = DECOUPLED.replace("MARK", repr(str(tmp_path / "begun")))
    _write(tmp_path / "models", "m", config, "model.py", code.encode())
    with Engine(tmp_path / "models") as engine:
        with pytest.raises(ModelFailed, match="an illegal memory access"):
            [*engine.stream("m", {"x": ONES})]
        assert _until(lambda: [one["y"].tolist() for one in engine.stream("m", {"x": ONES})] == [[[1] * 4]])


def _until(is_so: Callable[[], bool]) -> bool:
    """Whether it comes to that within some seconds."""
    for _ in range(200):
        try:
            if is_so():
                return True
        except (Unavailable, InstanceDied):
            pass
        time.sleep(0.05)
    return False


BAD = r"""
import cupy
import triton_python_backend_utils as pb_utils

CODE = 'extern "C" __global__ void stray(float* p) { p[threadIdx.x + (1ll << 40)] = 1; }'

class TritonPythonModel:
    def initialize(self, args):
        self.stray = cupy.RawKernel(CODE, "stray")

    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0, 0] < 0:
            self.stray((1,), (32,), (cupy.zeros(4, "f4"),))
        cupy.cuda.Device().synchronize()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def _ask(served: Served, model: str, value: float = 1.0) -> httpx.Response:
    given = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}]
    return httpx.post(f"{served.base_url}/v2/models/{model}/infer", json={"inputs": given}, timeout=60)


@pytest.mark.gpu
def test_on_hardware_a_stray_kernel_costs_its_own_process_or_the_servers_gpu(tmp_path: Path) -> None:
    _write(tmp_path, "there", ONNX.format("KIND_GPU"), "model.onnx", onnx_identity())
    _write(tmp_path, "here", ONNX.format("KIND_CPU"), "model.onnx", onnx_identity())
    for execution in ("process", "thread"):
        _write(tmp_path, execution, PYTHON.format(kind="KIND_GPU", execution=execution), "model.py", BAD.encode())
    with serving(tmp_path) as served:
        assert [_ask(served, name).status_code for name in ("there", "here", "process", "thread")] == [200] * 4
        assert "its process lost the GPU and ended" in _ask(served, "process", -1).text
        assert _until(lambda: _ask(served, "process").status_code == 200)
        assert _ask(served, "there").status_code == 200
        assert "illegal memory access" in _ask(served, "thread", -1).text
        refused = _ask(served, "there")
        assert (refused.status_code, "restart the server" in refused.text) == (503, True)
        assert [_ask(served, name).status_code for name in ("here", "process")] == [200] * 2
        states = [httpx.get(f"{served.base_url}/v2/{path}").status_code for path in ("health/live", "health/ready")]
        assert states == [400, 400]
        assert httpx.get(f"{served.base_url}/v2/models/there/ready").status_code == 400
        assert httpx.get(f"{served.base_url}/v2/models/here/ready").status_code == 200
        assert served.stop() == 0
