"""The number of threads of a session on the CPU: one for short runs, unless it is configured."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import onnx.numpy_helper
import pytest

from flowserve.backends import registry
from flowserve.backends.onnx import session
from flowserve.config.types import ModelConfig
from flowserve.values import DType
from tests.support.backends import Repository, config_of, spec
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value

FILE = "1/model.onnx"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHORT = onnx_identity()

pytestmark = pytest.mark.skipif(CORES < 2, reason="with one core there is one thread")


def _long(width: int = 512, layers: int = 40) -> bytes:
    """About ten million multiplications per row: milliseconds."""
    weights = onnx.numpy_helper.from_array(np.full((width, width), 1e-3, np.float32), "w")
    names = ["x", *(f"x{i}" for i in range(1, layers)), "y"]
    nodes = [onnx_node("MatMul", [one, "w"], [after]) for one, after in pairwise(names)]
    shape = ("N", width)
    return onnx_model(nodes, [onnx_value("x", DType.FP32, shape)], [onnx_value("y", DType.FP32, shape)], [weights])


def _threads(
    repository: Repository, file: bytes, width: int = 4, options: dict[str, str] | None = None, **more: Any
) -> int:
    repository.write("m", FILE, file)
    config: ModelConfig = config_of(
        "onnxruntime", inputs=[spec("x", (width,))], outputs=[spec("y", (width,))], max_batch_size=8, **more
    )
    model: Any = registry.find("onnxruntime").load(config, repository.files(), options or {})
    count: int = model._session.get_session_options().intra_op_num_threads
    return count


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Higher limits for busy machines: an empty run stays below them, milliseconds do not."""
    monkeypatch.setattr(session, "_ROW_NS", 500_000)
    monkeypatch.setattr(session, "_ROWS_NS", 500_000)


def test_short_runs_get_one_thread_and_long_runs_the_cores(repository: Repository) -> None:
    assert _threads(repository, SHORT) == 1
    assert _threads(repository, _long(), 512) == CORES


def test_a_configured_thread_count_is_used(repository: Repository) -> None:
    said = {"intra_op_thread_count": "2"}
    assert _threads(repository, SHORT, parameters=said) == 2
    assert _threads(repository, SHORT, options=said) == 2
    assert _threads(repository, SHORT, parameters={"intra_op_thread_count": "0"}) == 1  # the default, as on Triton


def test_a_file_that_cannot_be_measured_gets_its_share_of_the_cores(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MEASURED_BYTES_MAX", 10)
    assert _threads(repository, SHORT) == CORES
