"""Branches of an ensemble compute at the same time where their models are in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from flowserve.testing.serve import Served

SLEEP_S = 0.25
CODE = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(SLEEP_S)
        responses = []
        for request in requests:
            total = sum(tensor.as_numpy() for tensor in request.inputs())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", total.astype(np.float32))]))
        return responses
"""
STEPS = {"first": ("request",), "left": ("first",), "right": ("first",), "join": ("left", "right")}


def write(repository: Path) -> None:
    port = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1 ] }'
    steps = []
    for name, reads in STEPS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        inputs = "".join(f"input {port % f'X{i}'}\n" for i in range(len(reads)))
        config = f'backend: "python"\nmax_batch_size: 8\n{inputs}output {port % "Y"}'
        (repository / name / "config.pbtxt").write_text(config)
        sleep = SLEEP_S if name in ("left", "right") else 0
        (folder / "model.py").write_text(CODE.replace("SLEEP_S", str(sleep)))
        maps = "".join(f'input_map {{ key: "X{i}" value: "{read}" }} ' for i, read in enumerate(reads))
        maps += f'output_map {{ key: "Y" value: "{name}" }}'
        steps.append(f'step {{ model_name: "{name}" model_version: -1 {maps} }}')
    (repository / "fork" / "1").mkdir(parents=True)
    (repository / "fork" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 8\ninput {port % "request"}\noutput {port % "join"}\n'
        f"ensemble_scheduling {{ {' '.join(steps)} }}"
    )


@pytest.mark.server
def test_branches_in_processes_compute_at_the_same_time(tmp_path: Path, serve: Callable[..., Served]) -> None:
    write(tmp_path)
    server = serve(tmp_path)
    body = {"inputs": [{"name": "request", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    took_s = []
    with httpx.Client(base_url=server.base_url, timeout=30, verify=False) as client:
        for _ in range(4):
            began = time.monotonic()
            found = client.post("/v2/models/fork/infer", json=body).json()
            took_s.append(time.monotonic() - began)
            assert found["outputs"][0]["data"] == [2, 4]
    assert SLEEP_S <= min(took_s) < 1.8 * SLEEP_S, took_s
