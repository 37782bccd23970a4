"""Bad requests in batches of pure models: any set of them, in any batches, in plain models, chains and routes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowserve.graph.types import ModelKey
from flowserve.scheduling.queue import BatchPolicy
from flowserve.values import DType, TensorSpec
from tests.support.sim import Sim
from tests.support.strategies import FIXED, SimModel, SimRequest, World, chain_graph, plain_graph

ROWS_MAX = 8
RETRIES_MAX = 6  # of one bad request: two halves of each of the three sizes 4, 2 and 1
X, Y = TensorSpec("X", DType.FP32, (FIXED,)), TensorSpec("Y", DType.FP32, (FIXED,))


def model(number: int, duration_ns: int, *, is_pure: bool = True, is_routed: bool = False) -> SimModel:
    return SimModel(
        number,
        ModelKey(f"model{number}", 1),
        (X,),
        (Y,),
        ROWS_MAX,
        BatchPolicy.simple(ROWS_MAX),
        instances=1,
        is_pure=is_pure,
        shortest_ns=duration_ns,
        longest_ns=duration_ns,
        is_routed=is_routed,
    )


@st.composite
def worlds(draw: st.DrawFn, *, is_pure: bool) -> World:
    """A chain of one to three models, also asked directly, and requests of which any may be bad in any of them."""
    is_routed = draw(st.booleans())
    models = [
        model(n, draw(st.sampled_from([0, 20])), is_pure=is_pure, is_routed=is_routed)
        for n in range(draw(st.integers(1, 3)))
    ]
    keys = st.sampled_from([one.key for one in models])
    requests = [
        SimRequest(
            number,
            draw(st.integers(0, 1)),
            draw(st.sampled_from([0, 0, 5, 25])),
            draw(st.integers(1, 3)),
            (FIXED,),
            poison=frozenset({draw(keys)} if draw(st.integers(0, 3)) == 0 else ()),
        )
        for number in range(draw(st.integers(1, 24)))
    ]
    return World(tuple(models), (chain_graph("chain", models), plain_graph(models[0])), tuple(requests))


@given(world=worlds(is_pure=True), seed=st.integers(0, 1 << 16))
def test_property_each_bad_request_fails_alone_with_its_own_error_within_a_bounded_number_of_executions(
    world: World, seed: int
) -> None:
    sim = Sim(seed, world).run()  # it also checks that no request gets the error of another
    ends = {rest[0]: rest[1] for _, what, *rest in sim.log if what == "is answered"}
    for request in world.requests:
        right = ("NoneType",) if world.right_answer(request) is not None else ("ModelFailed", "Invalid")
        assert ends[request.number] in (*right, "InstanceDied")  # workers of a route may end
    seen: set[tuple[object, object]] = set()
    retries = 0
    for _, what, *rest in sim.log:
        if what in ("runs", "raises on its route"):
            name, numbers = rest[0], rest[2:] if what == "runs" else rest[1:]
            retries += all((name, number) in seen for number in numbers)
            seen.update((name, number) for number in numbers)
    assert retries <= RETRIES_MAX * sum(world.right_answer(request) is None for request in world.requests)


@given(world=worlds(is_pure=False), seed=st.integers(0, 1 << 16))
def test_property_a_batch_of_a_model_that_is_not_pure_runs_once_and_its_clients_get_no_error_of_others(
    world: World, seed: int
) -> None:
    sim = Sim(seed, world).run()
    runs = [(rest[0], number) for _, what, *rest in sim.log if what == "runs" for number in rest[2:]]
    assert len(runs) == len(set(runs))


def test_batches_of_these_worlds_are_whole_and_raise_on_routes_too() -> None:
    """Otherwise the properties hold without a retry."""
    raised: dict[str, list[int]] = {"raises": [], "raises on its route": []}
    for seed in range(40):
        models = [model(n, 20, is_routed=seed % 2 == 0) for n in range(2)]
        requests = [
            SimRequest(n, 0, 0, 1, (FIXED,), poison=frozenset({models[n % 2].key} if n in (1, 4, 6) else ()))
            for n in range(ROWS_MAX)
        ]
        sim = Sim(seed, World(tuple(models), (chain_graph("chain", models),), tuple(requests))).run()
        for _, what, *rest in sim.log:
            if what in raised:
                raised[what].append(len(rest) - 1)
    assert max(raised["raises"]) == max(raised["raises on its route"]) == ROWS_MAX
