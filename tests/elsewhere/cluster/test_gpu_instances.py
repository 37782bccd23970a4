"""An instance on another machine, here a process, that runs on a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from flowserve.elsewhere.placement import ModelPlace
from flowserve.values import DType
from tests.support.clusters import ask, local_cluster, serving
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

CONFIG = """
max_batch_size: 32 dynamic_batching { } instance_group { kind: KIND_GPU }
"""


def is_mapped(library: str, machine: int) -> bool:
    """Whether a process that this machine's has started has loaded a library."""
    found = subprocess.run(["pgrep", "-P", str(machine)], capture_output=True, text=True, check=True).stdout
    return any(library in Path(f"/proc/{child}/maps").read_text() for child in found.split())


@pytest.mark.gpu
async def test_an_onnx_model_on_another_machine_runs_on_its_gpu(tmp_path: Path) -> None:
    (tmp_path / "sum" / "1").mkdir(parents=True)
    node = onnx_node("Add", ["IN", "IN"], ["OUT"])
    model = onnx_model([node], [onnx_value("IN", DType.FP32, ("N", 4))], [onnx_value("OUT", DType.FP32, ("N", 4))])
    (tmp_path / "sum" / "1" / "model.onnx").write_bytes(model)
    (tmp_path / "sum" / "config.pbtxt").write_text(CONFIG)
    with local_cluster(1) as cluster:
        place = ModelPlace("sum", resources={"GPU": 1})
        async with serving(tmp_path, cluster, {"sum": place}) as (engine, _):
            for rows in (1, 32):
                value = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
                outputs = await ask(engine, "sum", value)
                assert (outputs["OUT"] == 2 * value).all()
            (machine,) = cluster.processes().values()
            assert is_mapped("libonnxruntime_providers_cuda", machine)
