"""TensorRT plans from files to responses, in a graph, on a fake device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.backends import registry
from flowserve.memory.devices import Devices, using
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.values import PINNED_MEMORY, Request, gpu_memory
from tests.support.fake_device import FakeMachine
from tests.support.fake_tensorrt import FakePlan, FakeTensorRt

FOUR = ("FLOAT", (-1, 4))
DOUBLE = FakePlan(
    inputs={"X": FOUR},
    outputs={"Y": FOUR},
    profiles=[{"X": ((1, 4), (2, 4), (8, 4))}],
    compute=lambda given: {"Y": given["X"] * 2},
    shapes=lambda shapes: {"Y": shapes["X"]},
)
ONE = ("INT32", (-1, 1))
ADDING = FakePlan(
    inputs={"IN": ONE, "OLD": ONE},
    outputs={"OUT": ONE, "NEW": ONE},
    profiles=[dict.fromkeys(("IN", "OLD"), ((1, 1), (2, 1), (8, 1)))],
    compute=lambda given: dict.fromkeys(("OUT", "NEW"), given["IN"] + given["OLD"]),
    shapes=lambda shapes: dict.fromkeys(("OUT", "NEW"), shapes["IN"]),
)
SUMS = """
platform: "tensorrt_plan"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  oldest { }
  state { input_name: "OLD" output_name: "NEW" data_type: TYPE_INT32 dims: [ 1 ] initial_state {
    name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true
  } }
}
"""
TWICE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1 input_map { key: "X" value: "IN" } output_map { key: "Y" value: "mid" } },
  { model_name: "second" model_version: -1 input_map { key: "X" value: "mid" } output_map { key: "Y" value: "OUT" } }
] }
"""


@asynccontextmanager
async def served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, machine: FakeMachine, plan: FakePlan
) -> AsyncIterator[Engine]:
    """An engine of the models in `folder`, whose plan files hold `plan`. Afterwards no device memory is used."""
    library = FakeTensorRt(machine, {b"plan": plan})
    monkeypatch.setattr(registry.find("tensorrt"), "_library", lambda: library)
    with using(Devices(machine.devices)) as found:
        async with (
            open_engine(EngineOptions(gpus=found.gpus)) as engine,
            open_control(engine, [folder], ControlOptions()) as control,
        ):
            assert await control.start(lambda event: None) == {}
            yield engine
        assert found[0].pool.statistics().lent_bytes == 0


async def test_a_batch_passes_two_plans_with_one_copy_in_each_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine()
    for name in ("first", "second"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1/model.plan").write_bytes(b"plan")  # the plan has all other facts
    (tmp_path / "twice/1").mkdir(parents=True)
    (tmp_path / "twice/config.pbtxt").write_text(TWICE)
    async with served(tmp_path, monkeypatch, machine, DOUBLE) as engine:
        machine.copies.clear()
        rows = np.arange(8, dtype=np.float32).reshape(2, 4)
        response = await engine.infer(engine.deployments.find("twice"), Request(inputs={"IN": rows}))
        assert response.outputs["OUT"].tolist() == (rows * 4).tolist()
        assert machine.copies == {(PINNED_MEMORY, gpu_memory(0)): 1, (gpu_memory(0), PINNED_MEMORY): 1}
        del response


async def test_the_state_of_each_sequence_is_kept_between_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine()
    (tmp_path / "sums/1").mkdir(parents=True)
    (tmp_path / "sums/1/model.plan").write_bytes(b"plan")
    (tmp_path / "sums/config.pbtxt").write_text(SUMS)
    async with served(tmp_path, monkeypatch, machine, ADDING) as engine:
        sums: dict[int, list[int]] = {7: [], 8: []}

        async def add(sequence: int, number: int, *, start: bool = False, end: bool = False) -> None:
            request = Request(
                {"IN": np.array([[number]], np.int32)},
                sequence_id=sequence,
                sequence_start=start,
                sequence_end=end,
            )
            response = await engine.infer(engine.deployments.find("sums"), request)
            sums[sequence].append(int(response.outputs["OUT"].item()))

        for number in (1, 2, 3):
            async with trio.open_nursery() as nursery:
                for sequence in sums:
                    nursery.start_soon(partial(add, sequence, number * sequence, start=number == 1, end=number == 3))
        assert sums == {7: [7, 21, 42], 8: [8, 24, 48]}
        await add(7, 5, start=True)
        assert sums[7][-1] == 5  # counted from the beginning


HEAD = 'platform: "tensorrt_plan"\nmax_batch_size: 8\n'
X, Y = 'name: "X" data_type: TYPE_FP32', 'name: "Y" data_type: TYPE_FP32'
FULL = "dims: [ 4 ]"


@pytest.mark.parametrize(
    "config",
    [
        f"{HEAD}input [ {{ {X} }} ] output [ {{ {Y} }} ]",
        f"{HEAD}input [ {{ {X} {FULL} }} ] output [ {{ {Y} }} ]",
        f"{HEAD}input [ {{ {X} }} ] output [ {{ {Y} {FULL} }} ]",
        f'{HEAD}input [ {{ name: "X" {FULL} }} ] output [ {{ {Y} {FULL} }} ]',
        f'{HEAD}input [ {{ name: "X" }} ] output [ {{ name: "Y" }} ]',
        f"{HEAD}input [ {{ {X} }} ]",
        f"{HEAD}output [ {{ {Y} }} ]",
        'platform: "tensorrt_plan"',
    ],
)
async def test_what_the_configuration_leaves_out_of_a_tensor_is_completed_from_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (tmp_path / "first/1").mkdir(parents=True)
    (tmp_path / "first/1/model.plan").write_bytes(b"plan")
    (tmp_path / "first/config.pbtxt").write_text(config)
    async with served(tmp_path, monkeypatch, FakeMachine(), DOUBLE) as engine:
        deployment = engine.deployments.find("first")
        for side in ("input", "output"):
            (tensor,) = deployment.config.json[side]
            assert (tensor["data_type"], tensor["dims"]) == ("TYPE_FP32", [4])
        assert deployment.config.max_batch_size == 8
        response = await engine.infer(deployment, Request(inputs={"X": np.ones((2, 4), np.float32)}))
        assert response.outputs["Y"].tolist() == [[2.0] * 4] * 2
        del response
