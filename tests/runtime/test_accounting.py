"""Statistics of batches, responses and refusals, on a real engine."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import FlowserveError, Invalid, ModelFailed, Unavailable
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.values import Array, Request
from tests.support.engine import add_chain, add_function

ROW_BYTES = 16  # four FP32
HOUR_NS = 3_600_000_000_000


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    async with open_engine(EngineOptions()) as engine:
        await wait_all_tasks_blocked()
        yield engine


def double(array: Array) -> Array:
    return array * 2


def nothing_below_zero(array: Array) -> Array:
    if (array < 0).any():
        raise ModelFailed("below zero")
    return array


async def ask(
    engine: Engine, name: str, value: float = 1.0, width: int = 4, rows: int = 1, stamp: int | None = None
) -> None:
    number = engine.next_stamp() if stamp is None else stamp  # trio starts tasks in random order; stamps decide
    request = Request({"IN": np.full((rows, width), value, np.float32)}, stamp=number)
    await engine.infer(engine.deployments.find(name), request)


async def together(engine: Engine, *calls: Callable[[], Any]) -> None:
    """All calls in one loop iteration; errors are ignored."""

    async def survive(call: Callable[[], Any]) -> None:
        with suppress(FlowserveError):
            await call()

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(survive, call)


def nodes(engine: Engine, name: str) -> dict[str, Any]:
    return {node["name"]: node for node in engine.deployments.graph_statistics(name)[0]["nodes"]}


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
async def test_a_chain_counts_batches_of_sixteen_at_every_node_and_no_copies(
    inline: bool,
) -> None:
    async with running() as engine:
        for model in "abc":
            add_function(engine, model, [double], inline=inline)
        add_chain(engine, "chain", ["a", "b", "c"])
        await together(engine, *[lambda i=i: ask(engine, "chain", i) for i in range(16)])
        found = nodes(engine, "chain")
        assert [(node["batch_count"], node["batch_rows"]) for node in found.values()] == [(1, 16)] * 3
        assert found["a"]["inputs"] == [
            {
                "producer": "",
                "tensor": "IN",
                "handed_on_bytes": 0,
                "copied_bytes": 16 * ROW_BYTES,  # each request has a block of its own
                "regathered_bytes": 0,
            }
        ]
        for node, producer, tensor in (("b", "a", "tensor_1"), ("c", "b", "tensor_2")):
            assert found[node]["inputs"] == [
                {
                    "producer": producer,
                    "tensor": tensor,
                    "handed_on_bytes": 16 * ROW_BYTES,
                    "copied_bytes": 0,
                    "regathered_bytes": 0,
                }
            ]


async def test_the_counts_of_a_batch_of_two_graphs_are_divided_by_rows() -> None:
    async with running() as engine:
        add_function(engine, "a", [double])
        add_function(engine, "b", [double])
        add_chain(engine, "chain", ["a", "b"])
        calls = [lambda: ask(engine, "chain", rows=3), lambda: ask(engine, "chain", rows=2), lambda: ask(engine, "a")]
        await together(engine, *calls)
        in_chain, alone = nodes(engine, "chain")["a"], nodes(engine, "a")["a"]
        assert (
            (in_chain["batch_count"], in_chain["batch_rows"]) == (alone["batch_count"], alone["batch_rows"]) == (1, 6)
        )
        assert in_chain["inputs"][0]["copied_bytes"] == 5 * ROW_BYTES
        assert alone["inputs"][0]["copied_bytes"] == ROW_BYTES


async def test_inputs_with_varying_shapes_are_counted_by_their_actual_bytes() -> None:
    async with running() as engine:
        add_function(engine, "a", [double], dims=(-1,))
        add_function(engine, "b", [double], dims=(-1,))
        add_chain(engine, "chain", ["a", "b"])
        await together(engine, lambda: ask(engine, "chain", width=5), lambda: ask(engine, "chain", width=9))
        assert nodes(engine, "chain")["b"]["inputs"][0]["handed_on_bytes"] == (5 + 9) * 4


async def test_inputs_with_varying_shapes_of_two_graphs_are_counted_by_their_actual_bytes() -> None:
    async with running() as engine:
        for model in "ab":
            add_function(engine, model, [double], dims=(-1,))
        for chain in ("one", "two"):
            add_chain(engine, chain, ["a", "b"])
        await together(engine, lambda: ask(engine, "one", width=5, rows=2), lambda: ask(engine, "two", width=5))
        found = [nodes(engine, chain)["b"] for chain in ("one", "two")]
    assert [node["batch_rows"] for node in found] == [3, 3]  # they shared its batch
    assert [node["inputs"][0]["handed_on_bytes"] for node in found] == [2 * 5 * 4, 5 * 4]


async def test_a_gap_of_a_cancelled_request_is_copied_once_and_counted_as_regathered() -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait(array: Array) -> Array:
        entered.set()
        assert gate.wait(10)
        return array * 2

    async with running() as engine:
        add_function(engine, "a", [wait], inline=False)
        add_function(engine, "b", [double])
        add_chain(engine, "chain", ["a", "b"])
        cancelled = trio.CancelScope()

        async def leave() -> None:
            with cancelled:
                await ask(engine, "chain", stamp=3)

        async with trio.open_nursery() as nursery:
            calls = [leave if i == 3 else partial(ask, engine, "chain", stamp=i) for i in range(8)]
            nursery.start_soon(together, engine, *calls)
            await trio.to_thread.run_sync(entered.wait, 10)
            cancelled.cancel()
            await wait_all_tasks_blocked()
            gate.set()
        edge = nodes(engine, "chain")["b"]["inputs"][0]
        assert (edge["copied_bytes"], edge["regathered_bytes"], edge["handed_on_bytes"]) == (112, 112, 0)
        assert reasons(engine, "chain") == {"CANCELED": 1}


async def test_parts_of_several_batches_are_copied_and_not_counted_as_regathered() -> None:
    async with running() as engine:
        batcher = Queue(BatchPolicy(16, (4,), HOUR_NS))  # b waits for four rows
        add_function(engine, "a", [double], max_batch_size=2)
        add_function(engine, "b", [double], batcher=batcher)
        add_chain(engine, "chain", ["a", "b"])
        await together(engine, *[lambda i=i: ask(engine, "chain", i) for i in range(4)])
        found = nodes(engine, "chain")
        assert (found["a"]["batch_count"], found["b"]["batch_count"]) == (2, 1)
        edge = found["b"]["inputs"][0]
        assert (edge["copied_bytes"], edge["regathered_bytes"]) == (4 * ROW_BYTES, 0)


def reasons(engine: Engine, name: str) -> dict[str, int]:
    row = engine.deployments.statistics(name)[0]
    counted: dict[str, int] = engine.deployments.graph_statistics(name)[0]["failures"]
    assert row["inference_stats"]["fail"]["count"] == sum(counted.values())
    return {reason: count for reason, count in counted.items() if count}


async def test_every_failure_is_counted_once_with_its_reason(autojump_clock: trio.testing.MockClock) -> None:
    async with running() as engine:
        add_function(engine, "picky", [nothing_below_zero])
        batcher = Queue(BatchPolicy.simple(8, max_queue_delay_ns=HOUR_NS))
        add_function(engine, "slow", [double], batcher=batcher)
        with pytest.raises(Invalid):
            await ask(engine, "picky", width=5)
        with pytest.raises(ModelFailed):
            await ask(engine, "picky", -1.0)
        with trio.move_on_after(1):
            await ask(engine, "slow")
        assert reasons(engine, "picky") == {"OTHER": 1, "BACKEND": 1}
        assert reasons(engine, "slow") == {"CANCELED": 1}
        await engine.drain(trio.current_time())
        with pytest.raises(Unavailable):
            await ask(engine, "picky")
        assert reasons(engine, "picky") == {"OTHER": 1, "BACKEND": 1, "REJECTED": 1}


@pytest.mark.parametrize(
    ("value", "is_pure", "keeps_order", "failed", "rows"),
    [(1.0, False, False, 0, 4), (-1.0, False, False, 3, 0), (-1.0, True, False, 3, 0), (1.0, False, True, 0, 5)],
    ids=["it answers", "it raises", "it raises, by halves too", "its answer is held"],
)
async def test_a_request_cancelled_in_a_running_batch_is_counted_once(
    value: float, is_pure: bool, keeps_order: bool, failed: int, rows: int
) -> None:
    """`held`: an earlier request keeps the instance busy until the end."""
    entered, gate, first = threading.Event(), threading.Event(), threading.Event()

    def wait(array: Array) -> Array:
        entered.set()
        assert gate.wait(10)
        return nothing_below_zero(array)

    def wait_longer(array: Array) -> Array:
        assert first.wait(10)
        return array

    async with running() as engine:
        functions = [wait_longer, wait] if keeps_order else [wait]
        add_function(engine, "m", functions, inline=False, is_pure=is_pure, keeps_order=keeps_order)
        cancelled = trio.CancelScope()

        async def leave() -> None:
            with cancelled:
                await ask(engine, "m", value, stamp=12)

        async with trio.open_nursery() as nursery:
            if keeps_order:
                nursery.start_soon(ask, engine, "m", value, 4, 1, 1)
                await wait_all_tasks_blocked()
            calls = [leave if i == 12 else partial(ask, engine, "m", value, stamp=i) for i in range(10, 14)]
            nursery.start_soon(together, engine, *calls)
            await trio.to_thread.run_sync(entered.wait, 10)
            if keeps_order:
                gate.set()
                while not engine.deployments.statistics("m")[0]["execution_count"]:  # noqa: ASYNC110 - no event to wait for
                    await trio.sleep(0.001)
            cancelled.cancel()
            await wait_all_tasks_blocked()
            gate.set()
            first.set()
        there = 1 if keeps_order else 0
        statistics = engine.deployments.statistics("m")[0]["inference_stats"]
        assert reasons(engine, "m").get("BACKEND", 0) == failed
        assert reasons(engine, "m").get("CANCELED", 0) == 1 - there
        assert statistics["success"]["count"] + failed + (1 - there) == 4 + there, "each once"
        assert engine.deployments.statistics("m")[0]["inference_count"] == rows


async def test_histograms_and_batch_sizes_agree_with_the_counters() -> None:
    async with running() as engine:
        add_function(engine, "a", [double], max_batch_size=8)
        add_chain(engine, "chain", ["a"])
        await together(engine, *[lambda i=i: ask(engine, "chain", i) for i in range(12)])
        model, chain = (engine.deployments.find(name).statistics for name in ("a", "chain"))
        for one in (model, chain):
            one.add_up()
            for histogram in (one.request_duration, one.queue_duration, one.compute_duration):
                assert sum(histogram.counts) == one.success_count == 12
            assert sum(one.batch_rows().counts) == one.execution_count
        assert {rows: size.count for rows, size in model.batches.items()} == {8: 1, 4: 1}
        assert {rows: size.count for rows, size in chain.batches.items()} == {1: 12}


@pytest.mark.parametrize("is_pure", [True, False], ids=["pure", "model.py"])
async def test_a_failing_request_fails_alone_in_a_pure_model_and_with_its_batch_otherwise(is_pure: bool) -> None:
    async with running() as engine:
        add_function(engine, "m", [nothing_below_zero], is_pure=is_pure)
        await together(engine, *[lambda i=i: ask(engine, "m", -1.0 if i == 5 else 1.0, stamp=i) for i in range(8)])
        assert reasons(engine, "m") == {"BACKEND": 1 if is_pure else 8}
        assert engine.deployments.statistics("m")[0]["inference_stats"]["success"]["count"] == (7 if is_pure else 0)
