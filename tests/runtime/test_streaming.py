"""Decoupled models, and graphs around them, in a running engine: on threads and in processes."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from flowserve.errors import FlowserveError, Internal, Unsupported
from flowserve.observe.trace import INFLIGHT, SEND, Trace, by_reason
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.stream import UNREAD_MAX
from flowserve.values import Request
from tests.support.processes import no_more_descriptors

# Sends IN responses IN, IN+1, ...; parameters select special behaviour.
REPEAT = """
import json, os, resource, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def log(text):
    with open("{log}", "a") as file:
        file.write(text + "\\n")


class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters())
            if how.get("thread"):
                self.threads.append(threading.Thread(target=self.answer, args=(request, how)))
                self.threads[-1].start()
            elif how.get("returns"):
                return [pb_utils.InferenceResponse([])]
            elif how.get("forgets"):
                pass
            else:
                self.answer(request, how)

    def answer(self, request, how):
        (count,) = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)
        if how.get("late"):
            time.sleep(0.05)
        sender = request.get_response_sender()
        for n in range(count):
            if sender.is_cancelled():
                log("cancelled")
                break
            if n == how.get("fails_at", -1):
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")), FINAL)
                return
            if n == how.get("trips_at", -1):
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("tripped")))
                log(f"after an error: {sender.is_cancelled()}")
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[0]], np.int32))]))
                break
            if n == how.get("dies_at", -1):
                time.sleep(0.1)
                os._exit(3)
            if n == how.get("raises_at", -1):
                raise ValueError("out of numbers")
            if how.get("no_files"):
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            else:
                log(f"sends {n}")
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[count + n]], np.int32))])
            if how.get("with_last") and n == count - 1:
                sender.send(answer, flags=FINAL)
                return
            sender.send(answer)
        if how.get("drops"):
            return
        sender.send(flags=FINAL)
        if how.get("too_late"):
            try:
                sender.send(flags=FINAL)
            except pb_utils.TritonModelException as error:
                log(str(error))
"""
PORTS = (
    'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }\n'
)
DECOUPLED = 'backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }\n' + PORTS
SQUARE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(SECONDS)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() ** 2)]
            )
            for request in requests
        ]
"""
STEP = """step {{
    model_name: "{}" model_version: -1
    input_map {{ key: "IN" value: "{}" }} output_map {{ key: "OUT" value: "{}" }}
}}"""


def ensemble(*steps: tuple[str, str, str], limit: int = 0, shared: bool = False) -> str:
    scope = 'parameters { key: "max_inflight_scope" value { string_value: "shared" } }' if shared else ""
    ports = PORTS if steps[-1][2] == "OUT" else ""
    return f"""platform: "ensemble" max_batch_size: 1 {scope} {ports}
        ensemble_scheduling {{ max_inflight_requests: {limit} {" ".join(STEP.format(*step) for step in steps)} }}"""


def write(repository: Path, name: str, config: str, code: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write(folder, "repeat", DECOUPLED, REPEAT.replace("{log}", str(tmp_path / "log")))
    write(folder, "square", 'backend: "python" max_batch_size: 8\n' + PORTS, SQUARE.replace("SECONDS", "0"))
    write(folder, "slow", 'backend: "python" max_batch_size: 8\n' + PORTS, SQUARE.replace("SECONDS", "0.005"))
    write(folder, "repeat_square", ensemble(("repeat", "IN", "mid"), ("square", "mid", "OUT")))
    for limit in (1, 4):
        write(folder, f"limited_{limit}", ensemble(("repeat", "IN", "mid"), ("slow", "mid", "OUT"), limit=limit))
    return folder


@pytest.fixture(params=["thread", "process"])
def execution(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def served(repository: Path, execution: str) -> AsyncIterator[Engine]:
    with trio.fail_after(60):
        async with (
            open_engine(EngineOptions(python_execution=execution)) as engine,
            open_control(engine, [repository], ControlOptions("none")) as control,
        ):
            assert await control.start(lambda event: None) == {}
            yield engine


def ask(count: int, **how: Any) -> Request:
    return Request({"IN": np.array([[count]], np.int32)}, parameters=how)


async def answers(engine: Engine, name: str, request: Request) -> list[int]:
    return [
        int(response.outputs["OUT"].item()) async for response in engine.stream(engine.deployments.find(name), request)
    ]


async def test_a_step_sends_no_response_one_or_many(repository: Path, execution: str) -> None:
    hows: list[dict[str, Any]] = [{}, {"thread": True, "late": True}, {"with_last": True}]
    async with served(repository, execution) as engine:
        for name, how, count in product(("repeat", "repeat_square"), hows, (0, 1, 40)):
            power = 2 if name == "repeat_square" else 1
            if count or not how.get("with_last"):
                got = await answers(engine, name, ask(count, **how))
                assert got == [(count + n) ** power for n in range(count)], (name, how, count)
        assert engine.scheduler.in_flight == 0


@pytest.mark.parametrize("name", ["repeat", "repeat_square", "limited_1", "limited_4"])
async def test_the_response_that_ends_a_stream_is_marked(repository: Path, execution: str, name: str) -> None:
    async with served(repository, execution) as engine:
        deployment = engine.deployments.find(name)
        for count in (1, 20):
            async with engine.stream(deployment, ask(count, with_last=True)) as responses:
                assert [one.is_final async for one in responses] == [False] * (count - 1) + [True]
        assert engine.scheduler.in_flight == 0
        (row,) = engine.deployments.statistics("repeat")
        assert row["inference_stats"]["success"]["count"] == 2
        assert [place["success"]["count"] for place in row["response_stats"].values()] == [2] + [1] * 19
        assert not any(place["empty_response"]["count"] for place in row["response_stats"].values())
        async with engine.stream(deployment, ask(0)) as responses:
            assert [one async for one in responses] == []
        (row,) = engine.deployments.statistics("repeat")
        assert row["response_stats"]["0"]["empty_response"]["count"] == 1


async def test_the_statistics_of_a_stream_include_the_steps_that_its_responses_started(
    repository: Path, execution: str
) -> None:
    async with served(repository, execution) as engine:
        await answers(engine, "limited_4", ask(6))
        computed = {
            name: engine.deployments.statistics(name)[0]["inference_stats"]["compute_infer"]["ns"]
            for name in ("repeat", "slow", "limited_4")
        }
    assert computed["limited_4"] == computed["repeat"] + computed["slow"]


async def test_unused_steps_of_a_nested_ensemble_are_not_run(repository: Path, execution: str) -> None:
    many = ensemble(("square", "IN", "OUT"), ("repeat", "IN", "mid"), ("square", "mid", "MANY"))
    more = 'output { name: "MANY" data_type: TYPE_INT32 dims: [ 1 ] }'
    write(repository, "once_and_many", f"{many} {PORTS} {more}")
    write(repository, "once", ensemble(("once_and_many", "IN", "OUT")))
    async with served(repository, execution) as engine:
        assert await answers(engine, "once", ask(3)) == [9]
        assert await answers(engine, "once_and_many", ask(3)) == [9, 9, 9]
        with pytest.raises(Unsupported, match="decoupled transaction policy: 'once'"):  # as configured
            await engine.infer(engine.deployments.find("once"), ask(3))
        assert engine.scheduler.in_flight == 0


async def test_an_internal_error_for_a_response_fails_only_its_stream(
    repository: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(repository, execution) as engine:
        streams = engine.scheduler.streams
        answer = streams.answer

        def slip(*_: object, **__: object) -> None:
            monkeypatch.setattr(streams, "answer", answer)
            raise RuntimeError("a slip")

        monkeypatch.setattr(streams, "answer", slip)
        with pytest.raises(FlowserveError, match="RuntimeError: a slip"):
            await answers(engine, "repeat", ask(3))
        assert await answers(engine, "repeat", ask(3)) == [3, 4, 5]
        assert engine.scheduler.in_flight == 0


async def test_a_response_without_descriptors_fails_only_its_stream(repository: Path) -> None:
    async with served(repository, "process") as engine:
        assert await answers(engine, "repeat", ask(0)) == []
        with no_more_descriptors(), pytest.raises(Internal, match=r"'repeat' answered cannot be read: .*RLIMIT_NOFILE"):
            await answers(engine, "repeat", ask(3))
        assert await answers(engine, "repeat", ask(3)) == [3, 4, 5]
        assert engine.scheduler.in_flight == 0


async def test_an_error_follows_the_responses_sent_before_it_and_is_the_last(repository: Path, execution: str) -> None:
    async with served(repository, execution) as engine:
        for how, text in (({"fails_at": 3}, "no more"), ({"raises_at": 3}, "out of numbers")):
            some = engine.stream(engine.deployments.find("repeat"), ask(5, **how))
            assert [(await anext(some)).outputs["OUT"].item() for _ in range(3)] == [5, 6, 7]
            with pytest.raises(FlowserveError, match=text):
                await anext(some)
        with pytest.raises(FlowserveError, match=r"^in ensemble 'repeat_square', no more"):
            await answers(engine, "repeat_square", ask(5, fails_at=3))
        assert await answers(engine, "repeat", ask(2)) == [2, 3]


SPEAKS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(3):
                said = [{"n": n, "text": "x" * 40_000}, {"sequence_id": 7, "sequence_end": True}, {}][n]
                out = pb_utils.Tensor("OUT", np.array([[n]], np.int32))
                sender.send(pb_utils.InferenceResponse([out], parameters=said))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HEARS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = request.correlation_id() * 10 + request.flags()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[told]], np.int32))])
"""


async def test_response_parameters_reach_the_client_and_sequence_parameters_reach_later_steps(
    repository: Path, execution: str
) -> None:
    write(repository, "speaks", DECOUPLED, SPEAKS)
    write(repository, "hears", 'backend: "python" max_batch_size: 4\n' + PORTS, HEARS)
    write(repository, "chain", ensemble(("speaks", "IN", "mid"), ("hears", "mid", "OUT")))
    async with served(repository, execution) as engine:
        said = [dict(one.parameters) async for one in engine.stream(engine.deployments.find("speaks"), ask(1))]
        assert said == [{"n": 0, "text": "x" * 40_000}, {"sequence_id": 7, "sequence_end": True}, {}]
        got = [one async for one in engine.stream(engine.deployments.find("chain"), ask(1))]
        assert [int(one.outputs["OUT"].item()) for one in got] == [0, 72, 0], "the id, and END"
        stateless = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        assert [dict(one.parameters) for one in got] == [
            stateless,
            {"sequence_id": 7, "sequence_start": False, "sequence_end": True},
            stateless,
        ]


async def test_a_deadline_in_the_middle_of_a_stream_names_the_running_steps(repository: Path, execution: str) -> None:
    timed = ensemble(("repeat", "IN", "mid"), ("slow", "mid", "OUT"), limit=2)
    parameter = 'parameters { key: "deadline_ms" value { string_value: "150" } }'
    write(repository, "timed", timed.replace('platform: "ensemble"', f'platform: "ensemble" {parameter}'))
    async with served(repository, execution) as engine:
        some = engine.stream(engine.deployments.find("timed"), ask(100_000, thread=True))
        got = 0
        with pytest.raises(
            FlowserveError, match=r"its deadline passed after 1\d\d ms, it was in step 'repeat', 'slow'"
        ):
            async for _ in some:
                got += 1
        assert got > 3


async def test_a_stream_cancelled_at_its_last_response_is_counted_once(
    repository: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(repository, execution) as engine:
        repeat = engine.deployments.find("repeat")
        frame = engine.submit(repeat, ask(2), repeat.make_stream)
        over = ResponseStreams.over

        def over_and_left(streaming: ResponseStreams, *arguments: Any, **facts: Any) -> None:
            over(streaming, *arguments, **facts)
            engine.withdraw(frame)

        monkeypatch.setattr(ResponseStreams, "over", over_and_left)
        with trio.fail_after(10):
            while not frame.record.done:  # noqa: ASYNC110 - no event to wait for
                await trio.sleep(0.005)
        (row,) = engine.deployments.statistics("repeat")
        assert row["inference_stats"]["success"]["count"] == 1
        assert row["inference_stats"]["fail"]["count"] == 0


async def test_failures_of_decoupled_steps_name_their_location(repository: Path, execution: str) -> None:
    async with served(repository, execution) as engine:
        with pytest.raises(FlowserveError) as raised:
            await answers(engine, "repeat_square", ask(5, fails_at=3))
        assert str(raised.value) == (
            "in ensemble 'repeat_square', no more (step 'repeat' at repeat_square/config.pbtxt:3:56, "
            "instance repeat_0, inputs IN [1,1])"
        )
        with pytest.raises(FlowserveError) as raised:
            await answers(engine, "repeat_square", ask(5, raises_at=1))
        assert "(step 'repeat' at repeat_square/config.pbtxt:3:56, instance repeat_0, inputs IN [1,1])" in str(
            raised.value
        )
        (row,) = engine.deployments.statistics("repeat")
        counts = {place: {what: one["count"] for what, one in row["response_stats"][place].items()} for place in "0123"}
        good = {"compute_infer": 2, "compute_output": 2, "success": 2, "fail": 0, "empty_response": 0, "cancel": 0}
        assert counts["0"] == good
        assert counts["1"] == {**good, "success": 1, "fail": 1}
        assert counts["3"] == {**good, "compute_infer": 1, "compute_output": 1, "success": 0, "fail": 1}
        before, _ = engine.deployments.find("repeat_square").statistics.until_first_response()
        assert sum(engine.deployments.find("repeat").statistics.until_first_response()[0].counts) == 2
        count = sum(before.counts)
        assert await answers(engine, "repeat_square", ask(3)) == [9, 16, 25]
        histogram, total_ns = engine.deployments.find("repeat_square").statistics.until_first_response()
        assert sum(histogram.counts) == count + 1
        assert total_ns > 0
        async with engine.stream(engine.deployments.find("repeat"), ask(50, thread=True)) as some:
            await anext(some)
        # The statistics count the cancellation when the model's sender is told of it, in the next step.
        await trio.testing.wait_all_tasks_blocked(0.01)
        (row,) = engine.deployments.statistics("repeat")
        assert sum(place["cancel"]["count"] for place in row["response_stats"].values()) == 1


async def test_a_final_flag_after_an_error_is_harmless(repository: Path, execution: str, tmp_path: Path) -> None:
    """Models written for Triton send the flag after an error too."""
    async with served(repository, execution) as engine:
        with pytest.raises(FlowserveError) as raised:
            await answers(engine, "repeat", ask(5, trips_at=1, too_late=True))
        assert str(raised.value) == "tripped"
        assert await answers(engine, "repeat", ask(1)) == [1]
    assert (tmp_path / "log").read_text().splitlines()[:3] == [
        "sends 0",
        "after an error: True",
        "Unable to send response. Response sender has been closed.",
    ]


@pytest.mark.fault("P9")
async def test_responses_after_the_final_flag_are_refused_and_a_dropped_sender_fails_its_request(
    repository: Path, execution: str, tmp_path: Path
) -> None:
    async with served(repository, execution) as engine:
        assert await answers(engine, "repeat", ask(1, too_late=True)) == [1]
        with pytest.raises(FlowserveError, match="let go of a response sender without sending"):
            await answers(engine, "repeat", ask(1, drops=True))
        with pytest.raises(FlowserveError, match="let go of a request without asking for its response sender"):
            await answers(engine, "repeat", ask(1, forgets=True))
        with pytest.raises(
            FlowserveError, match="'repeat_0' is using the decoupled mode and the execute function must "
        ):
            await answers(engine, "repeat", ask(1, returns=True))
        assert await answers(engine, "repeat", ask(1)) == [1]
    assert "Unable to send response. Response sender has been closed." in (tmp_path / "log").read_text()


@pytest.mark.fault("P6")
async def test_a_slow_reader_blocks_only_its_own_stream(repository: Path, execution: str, tmp_path: Path) -> None:
    async with served(repository, execution) as engine:
        async with engine.stream(engine.deployments.find("repeat"), ask(200, thread=True)) as slow:
            assert (await anext(slow)).outputs["OUT"].item() == 200
            assert await answers(engine, "repeat", ask(100)) == [*range(100, 200)]
            await trio.sleep(0.05)
            sent = (tmp_path / "log").read_text().count("sends")
            assert 100 < sent <= 100 + UNREAD_MAX + 2  # one was taken, one is blocked in send()
            assert [response.outputs["OUT"].item() async for response in slow] == [*range(201, 400)]


@pytest.mark.fault("P5")
async def test_a_cancellation_is_visible_to_the_model(repository: Path, execution: str, tmp_path: Path) -> None:
    async with served(repository, execution) as engine:
        for name in ("repeat", "limited_1"):
            (tmp_path / "log").write_text("")
            async with engine.stream(engine.deployments.find(name), ask(1000)) as some:
                await anext(some)
            while "cancelled" not in (tmp_path / "log").read_text():  # noqa: ASYNC110  (a file has no event)
                await trio.sleep(0.001)
            assert (tmp_path / "log").read_text().count("sends") <= UNREAD_MAX + 4
            assert await answers(engine, "repeat", ask(1)) == [1]
            assert engine.scheduler.in_flight == 0


@pytest.mark.parametrize("with_last", [False, True])  # the final flag, with the last response
async def test_unread_responses_of_a_cancelled_stream_are_released(
    repository: Path, execution: str, with_last: bool
) -> None:
    async with served(repository, execution) as engine:
        gc.collect()
        gc.disable()  # reference cycles would wait for the garbage collector, and unloading for them
        try:
            for count in (1, 3, 1000):  # all responses read; all sent; not all sent
                request = ask(count, with_last=with_last)
                async with engine.stream(engine.deployments.find("repeat"), request) as some:
                    await anext(some)
                    await trio.sleep(0.1)
            del some, request
            await trio.sleep(0.1)
            assert [one for one in gc.get_objects() if isinstance(one, RegionFrame)] == []
        finally:
            gc.enable()


@pytest.mark.fault("P7", "P8")
async def test_with_a_limit_send_blocks_and_slots_are_returned(
    repository: Path, execution: str, tmp_path: Path
) -> None:
    async with served(repository, execution) as engine:
        for limit in (1, 4):
            for _ in range(16):
                async with engine.stream(engine.deployments.find(f"limited_{limit}"), ask(100)) as some:
                    await anext(some)
            assert await answers(engine, f"limited_{limit}", ask(30)) == [(30 + n) ** 2 for n in range(30)]
            traffic = engine.deployments.find(f"limited_{limit}").traffic
            assert [node.most_inflight for node in traffic] == [0, limit]


@pytest.mark.fault("P10")
async def test_sixteen_streams_run_at_the_same_time(repository: Path, execution: str) -> None:
    got: dict[tuple[str, int], list[int]] = {}

    async def one(name: str, number: int) -> None:
        got[name, number] = await answers(engine, name, ask(8, thread=number % 2 == 0))

    names = ("limited_1", "limited_4", "repeat_square")
    async with served(repository, execution) as engine:
        for name in names:
            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(one, name, number)
    assert got == {(name, number): [(8 + n) ** 2 for n in range(8)] for name in names for number in range(16)}


@pytest.mark.fault("P3")
async def test_infer_refuses_decoupled_models(repository: Path) -> None:
    async with served(repository, "thread") as engine:
        for name in ("repeat", "repeat_square"):
            with pytest.raises(Unsupported, match="decoupled transaction policy"):
                await engine.infer(engine.deployments.find(name), ask(1))
            assert engine.deployments.find(name).config.json["model_transaction_policy"] == {"decoupled": True}
        (response,) = [one async for one in engine.stream(engine.deployments.find("square"), ask(3))]
        assert response.outputs["OUT"].item() == 9


@pytest.mark.fault("P11")
async def test_unloading_waits_for_open_streams(repository: Path, execution: str) -> None:
    with trio.fail_after(60):
        async with (
            open_engine(EngineOptions(python_execution=execution)) as engine,
            open_control(engine, [repository], ControlOptions("explicit", ("repeat",))) as control,
            trio.open_nursery() as nursery,
        ):
            assert await control.start(lambda event: None) == {}
            async with engine.stream(engine.deployments.find("repeat"), ask(40, thread=True)) as some:
                await anext(some)
                nursery.start_soon(control.unload, "repeat")
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert engine.deployments.index(ready_only=True) == []
                assert len([response async for response in some]) == 39
            del some
            assert engine.scheduler.in_flight == 0


async def test_a_process_that_ends_in_the_middle_of_a_stream_fails_it(repository: Path) -> None:
    async with served(repository, "process") as engine:
        some = engine.stream(engine.deployments.find("repeat"), ask(9, dies_at=2, thread=True))
        assert [(await anext(some)).outputs["OUT"].item() for _ in range(2)] == [9, 10]
        with pytest.raises(FlowserveError, match="repeat_0"):
            await anext(some)
        assert engine.scheduler.in_flight == 0


@pytest.mark.parametrize("count", [2, 1])  # 1: it carries the final flag
async def test_a_response_without_memory_is_an_error_and_not_an_omitted_output(repository: Path, count: int) -> None:
    async with served(repository, "process") as engine:
        with pytest.raises(FlowserveError, match=r"shared memory of .* cannot be had: Too many open files"):
            await answers(engine, "repeat", ask(count, no_files=True, with_last=True))
        with pytest.raises(FlowserveError, match="let go of a response sender without sending"):
            await answers(engine, "repeat", ask(count, no_files=True, with_last=True, thread=True))
        assert engine.scheduler.in_flight == 0


async def test_a_decoupled_model_configured_inline_runs_on_a_thread(repository: Path) -> None:
    async with served(repository, "inline") as engine:
        assert await answers(engine, "repeat_square", ask(20)) == [(20 + n) ** 2 for n in range(20)]


async def test_a_shared_limit_holds_for_all_requests_together(repository: Path, execution: str) -> None:
    write(repository, "shared", ensemble(("square", "IN", "mid"), ("repeat", "mid", "OUT"), limit=1, shared=True))
    got: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        got[number] = await answers(engine, "shared", ask(2, thread=True))

    async with served(repository, execution) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
        assert [node.most_inflight for node in engine.deployments.find("shared").traffic] == [1, 1]
    assert got == {number: [4, 5, 6, 7] for number in range(8)}


async def test_a_trace_shows_backpressure_waits_and_response_counts(repository: Path) -> None:
    async with served(repository, "thread") as engine:
        told: list[Trace] = []
        watch = engine.tracing.watch(told.append)
        async with engine.stream(engine.deployments.find("limited_1"), ask(4), watch) as stream:
            assert [int(answer.outputs["OUT"].item()) async for answer in stream] == [16, 25, 36, 49]
        (trace,) = told
        repeat, *slow = trace.steps
        assert (repeat.node.name, repeat.answers) == ("repeat", 4)
        assert {one.node.name for one in slow} == {"slow"}
        assert len(slow) == 4
        # One step of `slow` at a time: meanwhile the model is blocked in send(), for 5 ms each time.
        assert sum(pause.ns for pause in repeat.pauses) > 9_000_000
        assert {pause.reason for pause in repeat.pauses} == {SEND}
        assert repeat.ended_ns >= slow[-1].ready_ns
        for one in slow:
            assert repeat.queued_ns <= one.ready_ns <= one.queued_ns <= one.ended_ns <= trace.ended_ns
        assert not engine.tracing.is_live
        assert engine.streams.observer is None


async def test_a_trace_shows_the_wait_of_a_ready_step_for_a_slot(repository: Path) -> None:
    write(repository, "shared", ensemble(("slow", "IN", "OUT"), limit=1, shared=True))
    async with served(repository, "thread") as engine:
        told: list[Trace] = []

        async def one() -> None:
            async with engine.stream(
                engine.deployments.find("shared"), ask(3), engine.tracing.watch(told.append)
            ) as stream:
                assert [int(answer.outputs["OUT"].item()) async for answer in stream] == [9]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        waited = [by_reason(trace.steps[0].waits).get(INFLIGHT, 0) for trace in told]
        assert waited[0] == 0
        assert waited[1] > 4_000_000
