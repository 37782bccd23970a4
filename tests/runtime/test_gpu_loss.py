"""A kernel has made a CUDA context unusable: which requests fail, which models continue, the reported health, and which
processes are restarted.
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
from flowserve.testing.serve import Served
from flowserve.values import Array
from tests.support.fake_device import FakeDevice, FakeMachine
from tests.support.fake_onnx import onnx_on
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

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


async def test_models_on_a_lost_gpu_are_unavailable_and_other_models_serve(
    tmp_path: Path, machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, "there", ONNX.format("KIND_GPU"), "model.onnx", onnx_identity())
    _write(tmp_path, "here", ONNX.format("KIND_CPU"), "model.onnx", onnx_identity())
    thread = PYTHON.format(kind="KIND_GPU", execution="thread")  # which may compute there without our knowing
    _write(tmp_path, "thread", thread, "model.py", ECHO.encode())
    async with Engine(tmp_path) as engine:
        inner = engine._engine.deployments

        def states() -> list[bool]:
            ready = [not inner.outage(inner.find(name)) for name in ("there", "thread", "here")]
            return [inner.is_live, inner.is_ready, *ready]

        assert (await engine.infer("there", {"x": ONES}))["y"].tolist() == [[1] * 4]
        assert states() == [True] * 5
        machine.lost = ERROR
        with pytest.raises(ModelFailed, match=ERROR):
            await engine.infer("there", {"x": ONES})
        for _ in range(2):
            for name in ("there", "thread"):
                with pytest.raises(Unavailable, match=rf"cannot be used by this process any more \({ERROR}\); restart"):
                    await engine.infer(name, {"x": ONES})
        assert (await engine.infer("here", {"x": ONES}))["y"].tolist() == [[1] * 4]
        assert states() == [False, False, False, False, True]
    said = [record.message for record in caplog.records if "says that it is not live" in record.message]
    assert len(said) == 1


def test_a_failure_that_does_not_lose_the_gpu_fails_only_its_batch(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "there", ONNX.format("KIND_GPU"), "model.onnx", onnx_identity())
    monkeypatch.setattr(FakeDevice, "why_lost", lambda _: "")  # the fault is temporary
    with Engine(tmp_path) as engine:
        machine.lost = ERROR
        with pytest.raises(ModelFailed, match=ERROR):
            engine.infer("there", {"x": ONES})
        machine.lost = ""
        assert engine.infer("there", {"x": ONES})["y"].tolist() == [[1] * 4]


# A model whose first process loses its GPU with its first batch: the model simulates the driver's error.
LOSES = """
from pathlib import Path
import flowserve.backends.worker.driver as child
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        mark = Path(MARK)
        self.fails = not mark.exists()
        mark.touch()

    def execute(self, requests):
        if self.fails:
            child.why_lost = lambda: "CUDA_ERROR_ILLEGAL_ADDRESS"
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("an illegal memory access"))
            HOW
        for request in requests:
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
            SEND
        return RETURN
"""
SENDS = "request.get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
FAILS = "requests[0].get_response_sender().send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL); return"


def _losing(folder: Path, how: str, *, decoupled: bool) -> Path:
    """A repository with that model; `how` it fails."""
    send, result = (SENDS, "None") if decoupled else ("pass", "[answer]")
    code = LOSES.replace("HOW", how).replace("SEND", send).replace("RETURN", result)
    policy = f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
    config = PYTHON.format(kind="KIND_CPU", execution="process") + policy
    _write(folder / "models", "m", config, "model.py", code.replace("MARK", repr(str(folder / "begun"))).encode())
    return folder / "models"


@pytest.mark.parametrize(
    "how",
    [
        "raise RuntimeError('an illegal memory access')",
        "return [failed]",
    ],
    ids=["raises", "answers an error"],
)
def test_a_process_that_lost_its_gpu_is_restarted(tmp_path: Path, how: str) -> None:
    with Engine(_losing(tmp_path, how, decoupled=False)) as engine:
        with pytest.raises(InstanceDied, match=r"instance 'm_0.*': its process lost the GPU and ended"):
            engine.infer("m", {"x": ONES})
        assert _until(lambda: engine.infer("m", {"x": ONES})["y"].tolist() == [[1] * 4])


def test_a_process_of_a_decoupled_model_that_lost_its_gpu_is_restarted(tmp_path: Path) -> None:
    with Engine(_losing(tmp_path, FAILS, decoupled=True)) as engine:
        with pytest.raises(ModelFailed, match="an illegal memory access"):
            [*engine.stream("m", {"x": ONES})]
        assert _until(lambda: [one["y"].tolist() for one in engine.stream("m", {"x": ONES})] == [[[1] * 4]])


def _until(is_so: Callable[[], bool]) -> bool:
    """Whether the condition holds within ten seconds."""
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
    return httpx.post(f"{served.base_url}/v2/models/{model}/infer", json={"inputs": given}, timeout=60, verify=False)


@pytest.mark.gpu
def test_on_hardware_an_illegal_memory_access_loses_the_gpu_of_its_process_only(tmp_path: Path) -> None:
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
        assert (refused.status_code, "restart it" in refused.text) == (503, True)
        assert [_ask(served, name).status_code for name in ("here", "process")] == [200] * 2
        states = [
            httpx.get(f"{served.base_url}/v2/{path}", verify=False).status_code
            for path in ("health/live", "health/ready")
        ]
        assert states == [400, 400]
        assert httpx.get(f"{served.base_url}/v2/models/there/ready", verify=False).status_code == 400
        assert httpx.get(f"{served.base_url}/v2/models/here/ready", verify=False).status_code == 200
        assert served.stop() == 0
