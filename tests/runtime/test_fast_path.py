"""Requests that come alone to one model on the loop: answered on the spot, and nobody could tell but by the clock."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from trio.testing import wait_all_tasks_blocked

from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.runtime.engine import Engine
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.opening import open_engine
from flowserve.runtime.pump import LONE_TURNS
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.testing.engine import add_chain, add_function
from flowserve.values import Array, Request


def double(array: Array) -> Array:
    return array * 2


def nothing_below_zero(array: Array) -> Array:
    if (array < -1).any():
        sys.exit("far below zero")
    if (array < 0).any():
        raise ModelFailed("below zero")
    return array


def request(engine: Engine, value: float = 1.0, rows: int = 1, width: int = 4) -> Request:
    return Request({"IN": np.full((rows, width), value, np.float32)}, stamp=engine.next_stamp(), id="r")


async def alone(engine: Engine, name: str, count: int = LONE_TURNS + 8) -> None:
    """So many requests, one by one, after which the next is taken to be alone."""
    for _ in range(count):
        await engine.infer(engine.find(name), request(engine))
        await wait_all_tasks_blocked()


def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes the common way from now on."""
    flows: list[Any] = []
    submit = engine.dispatcher.submit

    def noted(flow: Any) -> None:
        flows.append(flow)
        submit(flow)

    monkeypatch.setattr(engine.dispatcher, "submit", noted)
    return flows


async def test_a_request_alone_is_answered_on_the_spot_and_counted_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_engine(EngineOptions()) as engine:
        instance = add_function(engine, "double", [double], is_pure=True)[0]
        add_function(engine, "other", [double], is_pure=False)
        for name in ("double", "other"):
            await alone(engine, name)
        flows = submitted(engine, monkeypatch)
        ways: list[int] = []
        for name in ("double", "other"):
            for rows in (1, 3, 2):
                answer = await engine.infer(engine.find(name), request(engine, 2.0, rows))
                assert (answer.model, answer.id) == (name, "r")
                assert answer.outputs["OUT"].tolist() == [[4.0] * 4] * rows
                await wait_all_tasks_blocked()
            ways.append(len(flows))
        assert ways[0] <= 1, "they went the common way"  # one in sixteen does, to see whether others come too
        assert ways[1] - ways[0] == 3, "a model that may not be run twice went the short way"
        one, other = (engine.statistics(name)[0] for name in ("double", "other"))
        assert instance.batches[-3:] == [[1], [3], [2]]
        del one["flowserve"]["nodes"][0]["name"], other["flowserve"]["nodes"][0]["name"]
        for field in ("inference_count", "execution_count", "flowserve"):
            assert one[field] == other[field], field
        assert [(size["batch_size"], size["compute_infer"]["count"]) for size in one["batch_stats"]] == [
            (1, LONE_TURNS + 9),
            (2, 1),
            (3, 1),
        ]
        took = one["inference_stats"]
        assert took["success"]["count"] == LONE_TURNS + 11
        assert took["success"]["ns"] >= took["compute_infer"]["ns"] > 0


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"value": -1.0}, ModelFailed, "^below zero"),
        ({"value": -2.0}, ModelFailed, "far below zero"),
        ({"width": 5}, Invalid, "unexpected shape for input 'IN'"),
        ({"rows": 17}, Invalid, "batch-size must be <= 16"),
    ],
    ids=["failed", "exited", "shape", "rows"],
)
async def test_what_is_wrong_is_told_and_counted_once(
    asked: dict[str, Any], error: type[FlowserveError], text: str
) -> None:
    async with open_engine(EngineOptions()) as engine:
        add_function(engine, "picky", [nothing_below_zero], is_pure=True)
        await alone(engine, "picky")
        with pytest.raises(error, match=text):
            await engine.infer(engine.find("picky"), request(engine, **asked))
        counted = engine.statistics("picky")[0]["inference_stats"]
        assert (counted["success"]["count"], counted["fail"]["count"]) == (LONE_TURNS + 8, 1)
        assert engine.find("picky").statistics.last_error
        await alone(engine, "picky", 1)


@pytest.mark.parametrize("kind", ["ensemble", "delay", "order", "limiter", "impure", "thread"])
async def test_who_has_more_to_heed_goes_the_common_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(rate_limit=()) if kind == "limiter" else EngineOptions()
    batcher = DynamicBatcher(BatchPolicy.simple(16, max_queue_delay_ns=1000)) if kind == "delay" else None
    async with open_engine(options) as engine:
        add_function(
            engine,
            "m",
            [double],
            is_pure=kind != "impure",
            batcher=batcher,
            keeps_order=kind == "order",
            inline=kind != "thread",
        )
        add_chain(engine, "chain", ["m"])
        name = "chain" if kind == "ensemble" else "m"
        await alone(engine, name)
        flows = submitted(engine, monkeypatch)
        await alone(engine, name, 8)
        assert len(flows) == 8
