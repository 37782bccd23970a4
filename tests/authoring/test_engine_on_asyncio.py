"""The embedded engine in programs on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from flowserve import Engine, Graph, model
from flowserve.errors import Invalid, NotFound, Unavailable
from tests.support.held import HeldModel

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


@model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8, execution="inline")
def double(x: Any) -> Any:
    return x * 2


@model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8, max_queue_delay_us=200_000, execution="inline")
def double_together(x: Any) -> Any:
    return x * 2


@model({"TO": "INT32[1]"}, {"NUMBER": "INT32[1]"}, decoupled=True)
def count(to: Any) -> Any:
    for number in range(to[0]):
        yield np.array([number], np.int32)


def one_step(part: Any, name: str, port_in: str = "X", port_out: str = "Y", tensor: str = "FP32[4]") -> Graph:
    graph = Graph(name)
    graph.output(port_out, part(graph.input(port_in, tensor)))
    return graph


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(limited())


def test_an_engine_that_is_open_cannot_be_opened_again_and_goes_on() -> None:
    engine = Engine(one_step(double, "g"))

    async def open_again() -> None:
        async with engine:
            pass

    async def opened_twice() -> None:
        async with engine as first:
            for open_it in (open_again, lambda: asyncio.to_thread(engine.__enter__)):
                with pytest.raises(Invalid, match=r"is open already: make a second flowserve\.Engine"):
                    await open_it()
            assert ((await first.infer("g", {"X": ROWS}))["Y"] == ROWS * 2).all()
        await open_again()  # it is closed

    run(opened_twice)


def test_completion_offers_the_documented_names_only() -> None:
    documented = {"graph_statistics", "index", "infer", "load", "statistics", "stream", "unload"}

    async def offered() -> set[str]:
        async with Engine(one_step(double, "g")) as engine:
            return {name for name in dir(engine) if not name.startswith("_")}

    assert asyncio.run(offered()) == trio.run(offered) == documented
    with Engine(one_step(double, "g")) as engine:
        assert {name for name in dir(engine) if not name.startswith("_")} == {*documented, "close"}


def test_infer_takes_and_returns_arrays_and_raises_the_engines_errors() -> None:
    async def work() -> None:
        async with Engine(one_step(double, "doubled")) as engine:
            np.testing.assert_array_equal((await engine.infer("doubled", {"X": ROWS}))["Y"], ROWS * 2)
            assert (await engine.infer("doubled", {"X": [[1, 2, 3, 4]]}))["Y"].tolist() == [[2, 4, 6, 8]]
            with pytest.raises(NotFound, match="nothing"):
                await engine.infer("nothing", {"X": ROWS})
            with pytest.raises(Invalid, match="expected"):
                await engine.infer("doubled", {"X": ROWS[:, :2]})
            assert [row["name"] for row in await engine.index()] == ["double", "doubled"]
            assert engine.statistics("doubled")[0]["inference_count"] == 3
            await engine.unload("doubled")
            with pytest.raises(Unavailable, match="unloaded"):
                await engine.infer("doubled", {"X": ROWS})
            await engine.load("doubled")
            await engine.infer("doubled", {"X": ROWS})
        with pytest.raises(Unavailable, match="closed"):
            await engine.infer("doubled", {"X": ROWS})
        with pytest.raises(Unavailable, match="closed"):
            await engine.index()
        with pytest.raises(Unavailable, match="closed"):
            engine.statistics("doubled")

    run(work)


def test_an_engine_may_be_opened_again_under_another_loop() -> None:
    engine = Engine(one_step(double, "doubled"))

    async def work() -> None:
        async with engine as opened:
            np.testing.assert_array_equal((await opened.infer("doubled", {"X": ROWS}))["Y"], ROWS * 2)

    run(work)
    trio.run(work)
    run(work)


def test_concurrent_requests_of_a_web_application_run_as_batches() -> None:
    async def ask(request: Request) -> JSONResponse:
        answer = await request.app.state.engine.infer("doubled", {"X": (await request.json())["x"]})
        return JSONResponse({"y": answer["Y"].tolist()})

    async def work() -> None:
        app = Starlette(routes=[Route("/double", ask, methods=["POST"])])
        async with (
            Engine(one_step(double_together, "doubled")) as app.state.engine,
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", verify=False) as client,
        ):
            bodies = [{"x": [[n, 0, 0, 1]]} for n in range(64)]
            answers = await asyncio.gather(*[client.post("/double", json=body) for body in bodies])
            assert [one.json() for one in answers] == [{"y": [[2 * n, 0, 0, 2]]} for n in range(64)]
            (statistics,) = app.state.engine.statistics("double_together")
            assert statistics["inference_count"] == 64
            assert statistics["execution_count"] < 32

    run(work)


def test_a_cancelled_caller_withdraws_its_request() -> None:
    held = HeldModel()

    async def work() -> None:
        async with Engine(one_step(held.part, "queued")) as engine:
            first = asyncio.create_task(engine.infer("queued", {"X": ROWS[:1]}))
            assert await asyncio.to_thread(held.entered.wait, 30)
            second = asyncio.create_task(engine.infer("queued", {"X": ROWS[:1]}))
            await asyncio.sleep(0)
            await engine.index()  # the engine has it: its thread has done what was posted before
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            third = asyncio.create_task(engine.infer("queued", {"X": ROWS[:1]}))
            await asyncio.sleep(0)
            third.cancel()  # it has perhaps not begun
            with pytest.raises(asyncio.CancelledError):
                await third
            await engine.index()  # the engine knows of it: else it might run before
            held.go_on.set()
            await first
            (statistics,) = engine.statistics("queued")
            assert statistics["inference_stats"]["success"]["count"] == 1
            assert 1 <= statistics["inference_stats"]["fail"]["count"] <= 2

    run(work)


def test_responses_of_a_stream_are_taken_one_by_one_and_leaving_withdraws_it() -> None:
    async def work() -> None:
        async with Engine(one_step(count, "counts", "TO", "NUMBER", "INT32[1]")) as engine:
            async with engine.stream("counts", {"TO": [3]}) as answers:
                assert [answer["NUMBER"].tolist() async for answer in answers] == [[0], [1], [2]]
            async with engine.stream("counts", {"TO": [1 << 30]}) as answers:
                async for _ in answers:
                    break
            alone = engine.stream("counts", {"TO": [1 << 30]})
            assert (await anext(alone))["NUMBER"].tolist() == [0]
            alone.leave()
            await engine.unload("counts", dependents=True)  # waits for running requests

    run(work)


def test_a_stream_whose_caller_is_cancelled_at_once_is_withdrawn() -> None:
    async def work() -> None:
        async with Engine(one_step(count, "counts", "TO", "NUMBER", "INT32[1]")) as engine:

            async def ask() -> None:
                async with engine.stream("counts", {"TO": [1 << 30]}):
                    await asyncio.sleep(60)

            for turns in range(3):
                task = asyncio.create_task(ask())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            await engine.unload("counts", dependents=True)  # waits for running requests

    run(work)


def test_a_failure_to_open_is_raised_and_a_second_engine_opens(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(NotFound):
            async with Engine(tmp_path / "nowhere"):
                raise AssertionError
        async with Engine(one_step(double, "doubled")) as one, Engine(one_step(double, "doubled")) as other:
            await asyncio.gather(one.infer("doubled", {"X": ROWS}), other.infer("doubled", {"X": ROWS}))

    run(work)


def test_requests_in_flight_fail_when_the_engine_closes() -> None:
    held = HeldModel()

    async def work() -> None:
        async with Engine(one_step(held.part, "queued"), exit_timeout_s=0.05) as engine:
            tasks = [asyncio.create_task(engine.infer("queued", {"X": ROWS[:1]})) for _ in range(3)]
            assert await asyncio.to_thread(held.entered.wait, 30)
        held.go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in results] == [Unavailable] * 3

    run(work)


STRINGS = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("Y", np.full((1, 100_000), b"sixteen letters.", object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""


def test_very_many_strings_from_a_process_are_arrays(tmp_path: Path) -> None:
    (tmp_path / "strings" / "1").mkdir(parents=True)
    (tmp_path / "strings" / "config.pbtxt").write_text(
        'backend: "python"\nmax_batch_size: 1\ninput { name: "X" data_type: TYPE_FP32 dims: 1 }\n'
        'output { name: "Y" data_type: TYPE_STRING dims: -1 }\n'
    )
    (tmp_path / "strings" / "1" / "model.py").write_text(STRINGS)

    async def work() -> None:
        async with Engine(tmp_path) as engine:
            answer = (await engine.infer("strings", {"X": [[1]]}))["Y"]
            assert isinstance(answer, np.ndarray)
            assert (answer == b"sixteen letters.").all()

    run(work)
    with Engine(tmp_path) as engine:
        answer = engine.infer("strings", {"X": [[1]]})["Y"]
        assert isinstance(answer, np.ndarray)
        assert answer.shape == (1, 100_000)
