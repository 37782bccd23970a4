"""Requests of graphs with spaces, step by step."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from flowserve.config.convert import to_config
from flowserve.config.parse import parse
from flowserve.memory import rows
from flowserve.scheduling.frames.borders import RegionFrame
from tests.support.spaces_world import World

# The third step waits for a tensor of the second one, but does not run for rows for which the first one is certain.
CASCADE = """
name: "cascade" platform: "ensemble" max_batch_size: 3
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling {
  step {
    model_name: "kind" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "SURE" value: "sure" }
  }
  step {
    model_name: "double" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "slow" }
  }
  step {
    model_name: "add" model_version: -1 when { tensor: "sure" not: true }
    input_map [ { key: "A" value: "X" }, { key: "B" value: "slow" } ] output_map { key: "Y" value: "better" }
  }
  step {
    model_name: "single" model_version: -1 when { tensor: "sure" not: true }
    input_map { key: "X" value: "better" } output_map { key: "Y" value: "result" }
  }
  step {
    model_name: "single" model_version: -1 when { tensor: "sure" }
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "result" }
  }
  step {
    model_name: "minus" model_version: -1
    input_map { key: "X" value: "result" } output_map { key: "Y" value: "OUT" }
  }
}
"""


def begin_all(*requests: list[float]) -> tuple[World, list[RegionFrame]]:
    parsed = parse(CASCADE, "cascade")
    world = World(to_config(parsed.message, parsed.source), Random(0))
    frames = [world.submit(np.array([row], np.float32)) for row in requests]
    schedule(world)
    return world, [frame for frame in frames if isinstance(frame, RegionFrame)]


def begin(row: list[float]) -> tuple[World, RegionFrame]:
    world, (frame,) = begin_all(row)
    return world, frame


def schedule(world: World) -> None:
    decisions = world.scheduler.schedule(world.now_ns)
    if decisions is not None:
        world.running += decisions.batches


def running(world: World) -> list[str]:
    return sorted(batch.tickets[0].node.model.name for batch in world.running)


def under_way(frame: RegionFrame) -> list[str]:
    return [node.name for node in frame.steps_under_way()]


def end(world: World, model: str) -> None:
    """Complete the batch of a model, and start the next ones."""
    (batch,) = [one for one in world.running if one.tickets[0].node.model.name == model]
    world.running.remove(batch)
    world.complete(batch)
    schedule(world)


def test_a_request_does_not_wait_for_what_only_skipped_steps_read() -> None:
    world, frame = begin([0, 0])  # the model "kind" is certain
    assert running(world) == ["double", "kind"]
    assert under_way(frame) == ["kind", "double"]
    assert not any(frame.is_over(n) for n in range(6))
    end(world, "kind")
    assert running(world) == ["double", "single"]
    assert under_way(frame) == ["double", "single#2"]
    end(world, "single")
    assert running(world) == ["double", "minus"]
    assert under_way(frame) == ["double", "minus"]
    assert [*map(frame.plan.nodes.index, frame.steps_under_way())] == [n for n in range(6) if not frame.is_over(n)]
    assert [world.graph.nodes[n].name for n in frame.skipped] == ["add", "single"]
    end(world, "minus")
    assert not frame.record.done  # its step "double" is still under way
    end(world, "double")
    assert frame.record.done
    assert frame.record.error is None
    # The last output has no reader, and is not held.
    assert [slot for slot, tensor in enumerate(frame.tensors) if tensor is not None] == [*frame.plan.output_slots]


def test_steps_whose_rows_are_taken_wait_for_all_that_they_read() -> None:
    world, frame = begin([1, 0])
    end(world, "kind")
    assert running(world) == ["double"]
    end(world, "double")
    assert running(world) == ["add"]
    end(world, "add")
    end(world, "single")
    end(world, "minus")
    assert frame.record.done
    assert frame.record.error is None


def test_one_comparison_tests_all_members_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    world, frames = begin_all([0, 0], [1, 0], [0, 0])
    compared: list[Any] = []
    passing = rows._passing

    def note(test: Any, numbers: Any) -> Any:
        compared.append((str(test), numbers.tolist()))
        return passing(test, numbers)

    monkeypatch.setattr(rows, "_passing", note)
    end(world, "kind")
    sure = [True, False, True]
    assert sorted(compared) == [("not sure", sure), ("sure", sure)]
    names = [node.name for node in world.graph.nodes]
    assert [[names[n] for n in frame.skipped] for frame in frames] == [
        ["add", "single"],
        ["single#2"],
        ["add", "single"],
    ]
    # A tensor that is only tested has no slot.
    (slot,) = frames[0].plan.nodes[names.index("kind")].outputs[1:2]
    assert all(frame.tensors[slot] is None for frame in frames)
    while world.go_on():
        pass
    assert [frame.record.done and frame.record.error for frame in frames] == [None] * 3
