"""Whole servers from a seed. `Sim` checks every invariant after every step; the test names a seed that fails."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.support.sim import Sim
from tests.support.strategies import draw_routed_world

BLOCK = 25  # seeds per test: few enough to find one quickly, many enough not to drown the report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        seeds = metafunc.config.getoption("--sim-seeds", default=300)
        metafunc.parametrize("first_seed", range(0, seeds, BLOCK))


def test_property_every_request_is_answered_once_and_correctly_and_every_resource_is_returned(
    first_seed: int, request: pytest.FixtureRequest
) -> None:
    end = min(first_seed + BLOCK, request.config.getoption("--sim-seeds", default=300))
    for seed in range(first_seed, end):
        try:
            Sim(seed).run()
        except AssertionError as broken:
            broken.add_note(f"Sim({seed}).run() shows it again")
            raise


def test_one_seed_gives_one_history() -> None:
    for seed in range(20):
        assert Sim(seed).run().log == Sim(seed).run().log


def test_the_simulated_servers_cover_all_kinds_of_events() -> None:
    """The properties are tested only if every kind of fault occurs and batches form."""
    seen: Counter[object] = Counter()
    together = routed = 0
    for seed in range(150):
        sim = Sim(seed).run()
        routed += len(sim.routed)
        for _, what, *rest in sim.log:
            seen[what if what != "is answered" else (what, rest[1])] += 1
            together = max(together, len(rest) - 2) if what == "runs" else together
    for event in (
        "arrives",
        "leaves",
        "runs",
        "raises",
        "finds no room",
        "expires",
        "is late while it runs",
        "is known",
        "waits for an equal step",
        ("is answered", "NoneType"),
        ("is answered", "DeadlineExceeded"),
        ("is answered", "ModelFailed"),
        ("is answered", "Invalid"),
    ):
        assert seen[event] > 20, event
    assert together == 8
    assert routed > 5, "few batches take a route"


def test_the_simulation_covers_every_end_of_a_route() -> None:
    """The properties of routes are tested only if each end of a route occurs."""
    seen: Counter[object] = Counter()
    members: Counter[int] = Counter()
    events = (
        "takes a route",
        "passes its route",
        "returns early",
        "raises on its route",
        "is recalled",
        "dies",
        "the server ends",
    )
    for seed in range(1000):
        sim = Sim(seed, draw_routed_world(Random(seed))).run()
        seen.update(what for _, what, *_ in sim.log)
        members.update(sim.routed)
        together = sum(n for count, n in members.items() if count > 1)
        if together > 20 and all(seen[event] > 10 for event in events):
            return
    pytest.fail(f"not seen often enough in 1000 seeds: {seen}, {members}")
