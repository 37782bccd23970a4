"""Property tests of decoupled steps in graphs with `when` and `each`: each row has the responses that an interpreter
computes for it alone (tests/support/space_streams.py).
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.errors import ModelFailed, Unavailable
from flowserve.graph.compile import compile_ensemble
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array
from tests.support.ensembles import available
from tests.support.space_streams import (
    WITH_STREAM,
    StreamInterpreter,
    StreamWorld,
    expected,
    is_streamed,
)
from tests.support.spaces_world import drawn, padded

seeds = st.integers(0, 2**48)
profile = settings.get_profile(settings.get_current_profile_name())
# Most of the time goes into drawing graphs: about one in three has a decoupled step.
many = settings(max_examples=100_000 if profile.max_examples >= 2_000 else 60)


def draw(rng: Random, **options: Any) -> StreamWorld | None:
    """A graph with one decoupled step that leads to its response; None if the draw has none."""
    config = drawn(rng, models=WITH_STREAM)
    if config is None or config.ensemble is None:
        return None
    if sum(step.model == "stream" for step in config.ensemble.steps) != 1:
        return None
    if not compile_ensemble(config, 1, available(*WITH_STREAM)).spaces:
        return None
    world = StreamWorld(config, rng, **options)
    return world if is_streamed(world) else None


def request(rng: Random, world: StreamWorld) -> tuple[Array, Frame]:
    rows = rng.randrange(1, max(world.config.max_batch_size, 1) + 1)
    array = np.array([[rng.randrange(-5, 6) / 2 for _ in range(2)] for _ in range(rows)], np.float32)
    return array, world.submit(array)


def is_response(world: StreamWorld, outputs: dict[str, Array | None], rows: list[StreamInterpreter]) -> bool:
    """Whether each row of every output equals the result of its row alone."""
    for name, found in outputs.items():
        filled = next((fill.tensor for fill in world.wiring.fills if fill.present == name), None)
        fill = world.made.fills.get(name)
        right = [row.value(name, 0, ()) if filled is None else row.present(filled) for row in rows]
        if found is None:
            if right != [None] * len(right):
                return False
            continue
        if len(found) != len(right):
            return False
        for one, value in zip(found, right, strict=True):
            shaped = padded(value, one.shape, 0.0 if fill is None else fill.value)
            if not np.allclose(one, shaped, equal_nan=True):
                return False
    return True


def check_answers(world: StreamWorld, array: Array, frame: Frame) -> None:
    """Check that the responses are those of the rows, those of each row in order."""
    streams = expected(world, array)
    for outputs in world.answers[frame]:
        for stream in streams:
            if stream and is_response(world, outputs, stream[0]):
                del stream[0]
                break
        else:
            raise AssertionError(f"no row has the response {outputs} next")
    assert not any(streams), "a response is missing"


def check_nothing_is_held(world: StreamWorld, frame: Frame) -> None:
    assert isinstance(frame, RegionFrame)
    assert not frame.parted
    assert not frame.stream.live
    assert not any(frame.stream.slots.promised)
    if (frame.record.error is None and not world.cancelled) or world.shared is not None:
        assert not any(frame.stream.slots.taken)
    assert not world.running
    assert all(len(queue.batcher) == 0 for queue in world.queues)


@many
@given(seed=seeds)
def test_each_row_has_the_responses_that_it_has_alone(seed: int) -> None:
    rng = Random(seed)
    world = draw(rng, is_shared=seed % 4 == 0)
    if world is None:
        return
    frames = []
    for _ in range(rng.randrange(1, 4)):
        frames.append(request(rng, world))
        for _ in range(rng.randrange(6)):
            world.go_on()
    while world.go_on():
        pass
    for array, frame in frames:
        assert frame.record.done
        assert frame.record.error is None
        check_answers(world, array, frame)
        check_nothing_is_held(world, frame)


@many
@given(seed=seeds)
def test_failures_full_queues_and_cancellations_leave_nothing(seed: int) -> None:
    rng = Random(seed)
    world = draw(rng, is_shared=seed % 4 == 0, has_limits=rng.random() < 0.5, fails=rng.choice((0, 0.1)))
    if world is None:
        return
    frames = [request(rng, world) for _ in range(rng.randrange(1, 5))]
    while world.go_on():
        if rng.random() < 0.03:
            _, frame = rng.choice(frames)
            if not frame.record.done:
                world.scheduler.cancel(frame)
                world.cancelled.add(frame)
    for array, frame in frames:
        assert frame.record.done
        check_nothing_is_held(world, frame)
        if frame in world.cancelled:
            assert frame not in world.finished
        elif frame.record.error is None:
            check_answers(world, array, frame)
        else:
            assert isinstance(frame.record.error, ModelFailed | Unavailable), frame.record.error
