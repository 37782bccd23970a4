"""Property tests of spaces: the scheduler runs random graphs with `when` and `each` on random requests, and each row
has the result of an interpreter that runs it alone (tests/support/spaces_world.py).
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowserve.errors import Unavailable
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array
from tests.support.spaces_world import Interpreter, World, drawn, padded

seeds = st.integers(0, 2**48)
# The long profile runs 100,000 graphs, in about twenty minutes.
profile = settings.get_profile(settings.get_current_profile_name())
many = settings(max_examples=50 * profile.max_examples if profile.max_examples >= 2_000 else profile.max_examples)


def requests(rng: Random, world: World) -> list[tuple[Array, Frame]]:
    """Requests of random rows, submitted between the steps of the scheduler."""
    made = []
    for _ in range(rng.randrange(1, 6)):
        rows = rng.randrange(1, max(world.config.max_batch_size, 1) + 1)
        array = np.array([[rng.randrange(-5, 6) / 2 for _ in range(2)] for _ in range(rows)], np.float32)
        made.append((array, world.submit(array)))
        for _ in range(rng.randrange(4)):
            world.go_on()
    return made


def check_answer(world: World, array: Array, frame: Frame) -> None:
    """Check that each row of every output equals the result of the row alone."""
    assert frame.record.error is None
    rows = [Interpreter(world.wiring, world.made, row) for row in array]
    outputs = world.outputs(frame)
    for name, found in outputs.items():
        filled = next((fill.tensor for fill in world.wiring.fills if fill.present == name), None)
        fill = world.made.fills.get(name)
        right = [row.value(name, 0, ()) if filled is None else row.present(filled) for row in rows]
        if found is None:
            assert right == [None] * len(right), name
            continue
        for one, value in zip(found, right, strict=True):
            np.testing.assert_allclose(one, padded(value, one.shape, 0.0 if fill is None else fill.value), err_msg=name)
    for node in world.graph.nodes:  # a row runs once in each step whose tests it passes, and padding never does
        index = next(step.index for step in world.wiring.steps if world.wiring.place(step.written.path) == node.place)
        ran = sum(len(row.contexts(world.made.of_step[index])) for row in rows)
        assert world.rows_run[id(frame), node.index] == ran, node.name


def check_nothing_is_held(world: World, frame: Frame) -> None:
    assert not world.running
    assert all(len(queue.batcher) == 0 for queue in world.queues)
    if isinstance(frame, RegionFrame):
        assert not frame.parted
        assert not frame.stream.live


@many
@given(seed=seeds)
@example(seed=3_542_551_013)  # a step whose outputs only decide which rows other steps run for, in a space of its own
def test_each_row_has_the_answer_that_it_has_alone(seed: int) -> None:
    rng = Random(seed)
    config = drawn(rng)
    if config is None:
        return
    world = World(config, rng, keeps_order=seed % 4 == 0)
    frames = requests(rng, world)
    while world.go_on():
        pass
    for array, frame in frames:
        assert frame.record.done
        check_answer(world, array, frame)
        check_nothing_is_held(world, frame)


@given(seed=seeds)
def test_a_request_alone_is_not_refused_by_a_queue_that_its_items_fill(seed: int) -> None:
    rng = Random(seed)
    config = drawn(rng)
    if config is None:
        return
    world = World(config, rng, has_limits=True)
    is_alone = rng.random() < 0.5
    frames: list[tuple[Array, Frame]] = []
    for _ in range(rng.randrange(1, 6)):
        rows = rng.randrange(1, max(world.config.max_batch_size, 1) + 1)
        array = np.array([[rng.randrange(-5, 6) / 2 for _ in range(2)] for _ in range(rows)], np.float32)
        frames.append((array, world.submit(array)))
        while is_alone and world.go_on():
            pass
    while world.go_on():
        pass
    for array, frame in frames:
        assert frame.record.done
        check_nothing_is_held(world, frame)
        is_refused = isinstance(frame.record.error, Unavailable)
        if not is_refused:
            check_answer(world, array, frame)
        elif is_alone:  # only steps that run once for all rows, several of one model, may be refused
            assert len(world.graph.nodes) > len({node.model for node in world.graph.nodes})


@given(seed=seeds)
def test_a_failed_batch_fails_its_requests_and_a_cancelled_one_leaves_nothing(seed: int) -> None:
    rng = Random(seed)
    config = drawn(rng)
    if config is None:
        return
    world = World(config, rng, fails=0.1)
    frames = requests(rng, world)
    cancelled: set[Any] = set()
    while world.go_on():
        if rng.random() < 0.05:
            _, frame = rng.choice(frames)
            if not frame.record.done:
                world.scheduler.cancel(frame)
                cancelled.add(frame)
    assert Counter(world.finished).most_common(1)[0][1] == 1 if world.finished else True
    for array, frame in frames:
        assert frame.record.done
        check_nothing_is_held(world, frame)
        if frame in cancelled:
            assert frame not in world.finished
        elif frame.record.error is not None:
            assert "it fell over" in str(frame.record.error)
        else:
            world.rows_run.clear()
            outputs = world.outputs(frame)
            rows = [Interpreter(world.wiring, world.made, row) for row in array]
            for name, found in outputs.items():
                if found is not None and name in world.made.homes and not world.made.fills:
                    for one, row in zip(found, rows, strict=True):
                        np.testing.assert_allclose(one, padded(row.value(name, 0, ()), one.shape, 0.0), err_msg=name)
