"""Many connections and many models at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served
from tests.support.onnx_files import onnx_identity

MODELS = 500


@pytest.mark.fault("O2")
@pytest.mark.parametrize("model", ["times_three", "no_batcher", "fork"])
def test_each_of_four_hundred_connections_gets_one_response(wire: Any, model: str) -> None:
    more = {"outputs": [{"name": "TIMES"}]} if model == "fork" else {}
    factor = 1 if model == "no_batcher" else 3
    requests = [wire.infer_request(model, [[number] * 4], id=str(number), **more) for number in range(400)]
    answers = wire.together(requests)  # reads to the end of each connection, where a second answer would be
    assert [answer.status for answer in answers] == [200] * 400
    assert [answer.json["id"] for answer in answers] == [str(number) for number in range(400)]
    assert [answer.data for answer in answers] == [[factor * number] * 4 for number in range(400)]


@pytest.mark.slow
@pytest.mark.fault("C13")
def test_five_hundred_models_are_loaded_within_a_minute_and_listed(
    tmp_path: Path, serve: Callable[..., Served], wire_to: Callable[[Served], Any], add_model: Callable[..., Path]
) -> None:
    file = onnx_identity()
    names = [f"model_{number:03}" for number in range(MODELS)]
    for name in names:
        add_model(tmp_path, name, "", {"1/model.onnx": file})
    began = time.monotonic()
    wire = wire_to(serve(tmp_path))
    assert time.monotonic() - began < 60
    rows = wire.post("/v2/repository/index").json
    assert rows == [{"name": name, "version": "1", "state": "READY"} for name in names]
    assert wire.get("/v2/health/ready").status == 200
    assert wire.get(f"/v2/models/{names[-1]}/ready").status == 200
