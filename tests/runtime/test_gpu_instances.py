"""Models with instances on GPUs, from files to responses, on a machine with two fake GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.config.types import Gpus, InstanceGroup, LimitedResource, ModelConfig, RateLimiter, SourceMap
from flowserve.errors import Problems
from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.workers.policies import refuse_what_never_runs
from flowserve.scheduling.rate_limit.limiter import Available, Limiter
from flowserve.values import Request

TWO = Gpus((0, 1))
CONFIG = """
backend: "python"
parameters { key: "execution" value: { string_value: "thread" } }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# Responds with its instance name and device.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.place = f"{args['model_instance_kind']} {args['model_instance_device_id']} {args['model_instance_name']}"

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.place], object))]) for _ in requests]
"""


async def test_every_instance_receives_its_gpu(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    (tmp_path / "m/1/model.py").write_text(MODEL)
    places: set[str] = set()
    async with (
        open_engine(EngineOptions(gpus=TWO)) as engine,
        open_control(engine, [tmp_path], ControlOptions()) as control,
    ):
        assert await control.start(lambda event: None) == {}

        async def ask() -> None:
            response = await engine.infer(engine.deployments.find("m"), Request(inputs={"IN": np.zeros(1, np.float32)}))
            places.add(response.outputs["OUT"][0].decode())

        async with trio.open_nursery() as nursery:
            for _ in range(2):  # in one loop iteration, so that each instance gets one
                nursery.start_soon(ask)
    assert places == {"GPU 0 m_0_gpu0", "GPU 1 m_0_gpu1"}


BY_DLPACK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            assert given.is_cpu() and given.__dlpack_device__() == (1, 0)
            doubled = np.from_dlpack(given) * 2
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", doubled)]))
        return answers
"""


@pytest.mark.parametrize("execution", ["process", "thread"] if SUPPORTED else ["thread"])
async def test_tensors_are_exchanged_by_dlpack_in_every_execution_place(tmp_path: Path, execution: str) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    config = CONFIG.replace('"thread"', f'"{execution}"').replace("TYPE_STRING", "TYPE_FP32")
    (tmp_path / "m/config.pbtxt").write_text(config)
    (tmp_path / "m/1/model.py").write_text(BY_DLPACK)
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(engine, [tmp_path], ControlOptions()) as control,
    ):
        assert await control.start(lambda event: None) == {}
        response = await engine.infer(engine.deployments.find("m"), Request(inputs={"IN": np.array([3.5], np.float32)}))
    assert response.outputs["OUT"].tolist() == [7.0]


@pytest.mark.fault("R9")
def test_resources_are_counted_on_every_gpu_that_a_group_is_on() -> None:
    limits = RateLimiter((LimitedResource("R", 2),))
    group = InstanceGroup("g", "KIND_GPU", 1, (0, 1), rate_limiter=limits)
    model = ModelConfig("m", "python", "", 0, (), (), SourceMap("m"), instance_groups=(group,))
    refuse_what_never_runs(Limiter([Available("R", 2)]), model, [])
    with pytest.raises(Problems, match='Resource count for "R" is limited to 1'):
        refuse_what_never_runs(Limiter([Available("R", 2, device=0), Available("R", 1, device=1)]), model, [])
