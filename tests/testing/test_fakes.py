"""Fakes replace models of any kind in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowserve import Engine
from flowserve.testing import Faked, FakeModel

CONFIG = """\
backend: "python"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
{more}
"""
STATE = """max_batch_size: 4
sequence_batching { state { input_name: "OLD" output_name: "NEW" data_type: TYPE_FP32 dims: [ 2 ] } direct { } }
"""


def one_model(folder: Path, more: str) -> Path:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").write_text("import what_is_not_here\n")
    (folder / "m" / "config.pbtxt").write_text(CONFIG.format(more=more))
    return folder


def ask(*values: float, rows: bool = True) -> dict[str, Any]:
    array = np.array(values, np.float32)
    return {"X": array.reshape(1, -1) if rows else array}


def test_a_fake_of_a_decoupled_model_sends_a_response_per_yield(tmp_path: Path) -> None:
    one_model(tmp_path, "model_transaction_policy { decoupled: true }")
    fake = FakeModel(lambda x: iter([x, x + 1]))
    with Engine(Faked(tmp_path, {"m": fake})) as engine:
        assert [one["Y"].tolist() for one in engine.stream("m", ask(1, 2, rows=False))] == [[1, 2], [2, 3]]
    assert len(fake.calls) == 1
    with Engine(Faked(tmp_path, {"m": FakeModel()})) as engine:
        assert [one["Y"].tolist() for one in engine.stream("m", ask(1, 2, rows=False))] == [[0, 0]]


def test_a_fake_of_a_model_with_implicit_state_gets_and_returns_it(tmp_path: Path) -> None:
    one_model(tmp_path, STATE)
    fake = FakeModel(lambda x, old: (old, old + x))
    with Engine(Faked(tmp_path, {"m": fake})) as engine:
        told = [engine.infer("m", ask(1, 2), sequence_id=7, sequence_start=not number)["Y"] for number in range(3)]
    assert [one.tolist() for one in told] == [[[0, 0]], [[1, 2]], [[2, 4]]]
    with Engine(Faked(tmp_path, {"m": FakeModel()})) as engine:
        zeros = engine.infer("m", ask(1, 2), sequence_id=7, sequence_start=True)
        assert (zeros.keys(), zeros["Y"].tolist()) == ({"Y"}, [[0, 0]])
