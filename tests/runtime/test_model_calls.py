"""Python models that call other models, in each execution place: responses, failures, and cycles of calls."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.backends.base import BlsCall
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.memory.segment import Segment
from flowserve.runtime.admission import cache
from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.model_calls.calls import PendingCall
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.values import Request
from tests.support.calling import MODEL, NO_PARAMETERS, Served, reasons
from tests.support.engine import add_chain
from tests.support.processes import no_more_descriptors

PLACES = ["thread", *(["process"] if SUPPORTED else [])]


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.005)


@pytest.fixture(params=PLACES)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    async with open_engine(EngineOptions(cache_bytes=1 << 20)) as engine:
        yield Served(engine, tmp_path, request.param)
        assert not engine.calls
        assert not engine.scheduler.calls


TWICE = "return given * 2"
CALL = "return value(request({!r}, given).exec()) + 1"


async def test_a_model_may_return_the_response_of_a_call(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add("caller", CALL.format("twice"))
    assert await served.ask("caller", 1, 2) == [3, 5]
    assert await served.ask("caller", 4) == [9]
    assert served.counted("twice") == (2, 0)


async def test_names_in_a_call_may_be_bytes_from_a_string_tensor(served: Served) -> None:
    await served.add("twice", TWICE)
    call = (
        "name, output = np.array([b'twice', b'OUT'], dtype=object)\n"
        "tensor = pb_utils.Tensor('IN', given)\n"
        "asked = pb_utils.InferenceRequest(model_name=name, requested_output_names=[output], inputs=[tensor])\n"
        "return value(asked.exec()) + pb_utils.is_model_ready(name)"
    )
    await served.add("caller", call)
    assert await served.ask("caller", 1) == [3]


async def test_a_called_model_may_call_another_model(served: Served) -> None:
    await served.add("a", TWICE)
    await served.add("b", CALL.format("a"))
    await served.add("c", CALL.format("b"))
    assert await served.ask("c", 1) == [4]


async def test_model_in_an_ensemble_calls_another_ensemble(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add("plus", "return given + 1")
    add_chain(served.engine, "inner", ["twice", "plus"])
    await served.add("caller", CALL.format("inner"))
    add_chain(served.engine, "outer", ["caller", "twice"])
    assert await served.ask("outer", 1) == [8]


async def test_an_ensemble_whose_requests_share_slots_can_be_called(served: Served) -> None:
    for name, what in (("twice", TWICE), ("plus", "return given + 1")):
        await served.add(name, what)
    add_chain(served.engine, "inner", ["twice", "plus"], shared_limit=1)
    await served.add("caller", CALL.format("inner"))
    assert [await served.ask("caller", 1), await served.ask("inner", 1)] == [[4], [3]]


async def test_a_model_may_make_several_calls_at_the_same_time(served: Served) -> None:
    await served.add("twice", TWICE, instances=2)
    await served.add(
        "caller",
        "answers = await asyncio.gather(*[request('twice', given + i).async_exec() for i in range(20)])\n"
        "return sum(value(answer) for answer in answers)",
    )
    assert await served.ask("caller", 1, 2) == [
        sum(2 * (1 + i) for i in range(20)),
        sum(2 * (2 + i) for i in range(20)),
    ]
    assert served.counted("twice") == (20, 0)


async def test_a_large_tensor_of_a_call_is_unaffected_by_later_writes_to_its_array(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add(
        "caller",
        "pending = request('twice', given).async_exec()\n"
        "given[:] = 77\n"
        "made = value(await pending)\n"
        "made += 1\n"
        "self.kept.append(made)\n"
        "again = value(await request('twice', made).async_exec())\n"
        "assert (self.kept[0] == self.kept[-1]).all()\n"
        "return again",
    )
    big = np.arange(500_000, dtype=np.float32)[None]
    big.flags.writeable = False
    for _ in range(4):
        assert (await served.ask_big("caller", big) == (big * 2 + 1) * 2).all()


# ------------------------------------------------------------------------------------------------------------ failures


async def fails(served: Served, name: str, match: str, value: float = 1) -> None:
    with pytest.raises(FlowserveError, match=match):
        await served.ask(name, value)


async def test_a_failed_call_is_a_response_with_an_error(served: Served) -> None:
    await served.add("bad", "raise RuntimeError('no luck')")
    for name, called in (("a", "bad"), ("b", "nobody"), ("c", "")):
        await served.add(name, CALL.format(called))
    await served.add("version", "return value(request('bad', given, model_version=7).exec())")
    await served.add("shape", "return value(request('bad', given[0]).exec())")
    await fails(served, "a", "1 no luck")
    refused = (
        "2 Model {0} - Error when running inference: .* Model '{0}' is not ready. Request for unknown model: '{0}'"
    )
    await fails(served, "b", refused.format("nobody"))
    await fails(served, "c", refused.format(""))
    await fails(served, "version", "2 Model bad - .* Request for unknown model: 'bad' version 7 is not found")
    await fails(served, "shape", "3 .*unexpected shape for input 'IN'")
    assert served.counted("bad") == (0, 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("inputs=[pb_utils.Tensor(5, given)]", r"__init__\(\): incompatible constructor arguments"),
        ("inputs=[], requested_output_names=['OUT', None]", "requested_output_names wants a text, got NoneType None"),
    ],
)
async def test_a_tensor_name_that_is_no_string_fails_only_its_request(served: Served, given: str, why: str) -> None:
    """The name must not count as a protocol error of the process, nor raise outside of the model."""
    await served.add("callee", "return given")
    body = f"if given[0, 0]:\n    pb_utils.InferenceRequest(model_name='callee', {given}).exec()\nreturn given"
    await served.add("caller", body)
    await fails(served, "caller", f".*{why}")
    assert await served.ask("caller", 0) == [0]


@pytest.mark.parametrize("lacks", ["memory", "descriptor"])
async def test_response_without_shared_memory_fails_only_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        await served.add("caller", "return value(request('twice', np.tile(given, (1, 500_000))).exec())[:, :1]")
        assert (await served.ask_big("twice", np.ones((1, 500_000), np.float32)))[0, 0] == 2
        arena = served.workers["caller"][0].arena
        lease = arena.lease

        def lacking(nbytes: int) -> Any:
            if nbytes < 1_000_000:
                return lease(nbytes)
            if lacks == "memory":
                raise MemoryError("so many bytes")
            found = lease(nbytes)
            patch.setattr(Segment, "open_for_reading", no_descriptor)
            return found

        def no_descriptor(segment: Segment) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(arena, "lease", lacking)
            why = "so many bytes" if lacks == "memory" else "Too many open files"
            await fails(served, "caller", f"the answer of model 'twice' cannot be handed on: .*{why}")
        assert await served.ask("caller", 3) == [6]
        assert not engine.calls


@pytest.mark.parametrize("slips", ["begin", "answer", "ask"])
async def test_internal_error_in_a_call_fails_only_that_call(
    served: Served, monkeypatch: pytest.MonkeyPatch, slips: str
) -> None:
    await served.add("twice", TWICE)
    await served.add("caller", CALL.format("twice"))
    await served.add("asker", "return given + pb_utils.is_model_ready('twice')")
    engine = served.engine
    where, name = {
        "begin": (engine, "call"),
        "answer": (engine, "response_from"),
        "ask": (engine.deployments, "outage"),
    }[slips]
    does = getattr(where, name)
    calls = iter(range(100))

    def slip(*arguments: Any, **more: Any) -> Any:
        if slips == "answer" and next(calls):  # the first is the call's own
            return does(*arguments, **more)
        monkeypatch.setattr(where, name, does)
        raise RuntimeError("a slip")

    monkeypatch.setattr(where, name, slip)
    asked = "asker" if slips == "ask" else "caller"
    with trio.fail_after(20):
        await fails(served, asked, "failed: RuntimeError: a slip")
        assert await served.ask(asked, 1) == [2 if slips == "ask" else 3]


@pytest.mark.parametrize("lost", ["the socket", "memory"])
async def test_a_process_is_ended_with_the_reason_if_the_server_has_no_descriptor_for_its_calls(
    tmp_path: Path, lost: str
) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        call = "wide = np.tile(given, (1, 500_000 if given[0, 0] > 5 else 1))\n"
        call += "return value(request('twice', wide).exec())[:, :1] if given[0, 0] > 1 else given"
        await served.add("caller", call)
        assert await served.ask("twice", 1) == [2]
        assert await served.ask("caller", 1 if lost == "the socket" else 2) == [1 if lost == "the socket" else 4]
        with no_more_descriptors(), pytest.raises(InstanceDied, match="the server has as many files open as it may"):
            await served.ask("caller", 2 if lost == "the socket" else 6)
        with trio.fail_after(20):
            assert await served.ask("caller", 6) == [12]


async def test_a_model_with_one_instance_that_calls_itself_gets_an_error(served: Served) -> None:
    await served.add("a", "return value(request('a', given - 1).exec()) if given[0, 0] > 0 else given")
    await fails(
        served, "a", "4 Model a - Error when running inference: model 'a' -> 'a': this call can never be answered"
    )
    assert await served.ask("a", 0) == [0]
    assert reasons(served, "a") == {"REJECTED": 1, "BACKEND": 1}, "the call, and the caller that says so"


async def test_a_model_with_several_instances_may_call_itself_as_often(served: Served) -> None:
    await served.add("a", "return value(request('a', given - 1).exec()) + 1 if given[0, 0] > 0 else given", instances=3)
    assert await served.ask("a", 2) == [2]
    await fails(served, "a", "4 Model a - Error when running inference: model 'a' -> 'a'", 3)


async def test_a_call_refused_for_its_size_is_a_failure_of_the_called_model(served: Served) -> None:
    await served.add("small", TWICE, parameters={"max_request_bytes": "4"})
    await served.add("caller", "return value(request('small', np.zeros((1, 2), np.float32)).exec())")
    await fails(served, "caller", ".* a request of 8 bytes can never be let in: max_request_bytes of 'small' is 4")
    assert reasons(served, "small") == {"REJECTED": 1}
    assert await served.ask("small", 1) == [2]


async def test_a_cycle_of_calls_is_refused_with_the_names_of_its_models(served: Served) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        await served.add(name, f"return value(request('{other}', given - 1).exec()) if given[0, 0] > 0 else given")
    assert await served.ask("a", 1) == [0]
    await fails(
        served,
        "a",
        "4 Model a - Error when running inference: model 'a' -> 'b' -> 'a': this call can never be answered",
        2,
    )


async def test_models_that_call_each_other_under_load_never_hang(served: Served) -> None:
    """Some calls are refused; all requests are answered, and none is in flight at the end."""
    body = (
        "left = int(given[0, 0])\n"
        "if not left: return given\n"
        "rng = np.random.default_rng(left)\n"
        "names = [str(name) for name in rng.choice(['a', 'b', 'c'], 2)]\n"
        "asked = [request(name, given[:1] // 10).async_exec() for name in names]\n"
        "for answer in await asyncio.gather(*asked):\n"
        "    if answer.has_error() and 'can never be answered' not in answer.error().message():\n"
        "        raise RuntimeError(answer.error().message())\n"
        "return given"
    )
    for name, instances in (("a", 1), ("b", 2), ("c", 2)):
        await served.add(name, body, instances=instances)
    random = np.random.default_rng(7)
    answered: list[float] = []

    async def ask(name: str, number: int) -> None:
        answered.extend(await served.ask(name, number))

    async with trio.open_nursery() as nursery:
        for number in random.integers(1, 9999, 120):
            nursery.start_soon(ask, str(random.choice(["a", "b", "c"])), int(number))
    assert len(answered) == 120
    assert not served.engine.scheduler.in_flight


async def test_calls_of_a_cancelled_request_are_cancelled(served: Served) -> None:
    await served.add("slow", served.gated)
    await served.add("caller", CALL.format("slow"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.ask, "slow", 1)
        await until(lambda: served.is_busy("slow"))
        nursery.start_soon(served.ask, "caller", 2)
        await until(lambda: bool(served.engine.calls))
        nursery.cancel_scope.cancel()
    served.open_gate()
    await until(lambda: not served.is_busy("slow") and not served.is_busy("caller"))
    assert served.counted("slow")[0] <= 1, "the queued call never ran"
    assert await served.ask("caller", 3) == [4]


async def test_a_call_that_exceeds_its_timeout_fails(served: Served) -> None:
    await served.add("slow", served.gated, may_time_out=True)
    await served.add("caller", "return value(request('slow', given, timeout=50_000).exec())")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.ask, "slow", 1)
        await until(lambda: served.is_busy("slow"))
        await fails(served, "caller", "4 Request timeout expired: it waited .* in the queue of model 'slow'")
        served.open_gate()


async def test_the_deadline_of_a_request_cancels_its_calls(served: Served) -> None:
    await served.add("slow", served.gated)
    await served.add("caller", CALL.format("slow"), parameters={"deadline_ms": "100"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.ask, "slow", 1)
        await until(lambda: served.is_busy("slow"))
        with pytest.raises(FlowserveError, match="Request timeout expired: its deadline passed"):
            await served.ask("caller", 2)
        assert served.is_busy("slow")
        assert not served.engine.calls, "its call is withdrawn, and does not wait for the one before it"
        served.open_gate()
        await until(lambda: not served.is_busy("caller"))
    assert served.counted("slow")[0] == 1


async def test_a_call_whose_deadline_passes_with_its_callers_fails_once(served: Served) -> None:
    await served.add("slow", served.gated, parameters={"deadline_ms": "100"})
    await served.add("caller", CALL.format("slow"), parameters={"deadline_ms": "100"})

    async def ask() -> None:
        with pytest.raises(FlowserveError, match="Request timeout expired: its deadline passed"):
            await served.ask("caller", 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: served.is_busy("slow"))
        time.sleep(0.15)  # noqa: ASYNC251 - the loop runs again after both deadlines
    served.open_gate()
    assert served.engine.scheduler.in_flight == 0
    await until(lambda: not served.is_busy("slow"))
    await until(lambda: not served.is_busy("caller"))
    assert served.counted("slow") == (0, 1)


@pytest.mark.parametrize(
    ("remembers", "parameters"),
    [(True, NO_PARAMETERS), (False, {"max_request_bytes": "5"})],
    ids=["remembered", "refused"],
)
async def test_a_call_answered_or_refused_by_admission_control_is_no_longer_traced(
    served: Served, remembers: bool, parameters: Mapping[str, str]
) -> None:
    await served.add("twice", TWICE, remembers=remembers, parameters=parameters)
    await served.add("caller", CALL.format("twice"))
    tracing = served.engine.tracing
    deployment = served.engine.deployments.find("caller")
    for _ in range(2):
        watch = tracing.watch()
        request = Request({"IN": np.ones((1, 2), np.float32)}, stamp=served.engine.next_stamp())
        with suppress(FlowserveError):
            await served.engine.infer(deployment, request, watch.make(deployment.make_frame))
        watch.close()
        assert watch.trace is not None
        assert len(watch.trace.steps[0].execution.calls) == 1
        assert not tracing.is_live


async def test_response_is_sent_if_the_cache_has_no_memory_for_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.add("twice", TWICE, remembers=True)

    def full(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(cache, "cached_copy", full)
    with trio.fail_after(10):
        assert await served.ask("twice", 1) == [2]
        assert await served.ask("twice", 1) == [2]


async def test_a_call_is_answered_from_the_response_cache(served: Served) -> None:
    await served.add("twice", TWICE, remembers=True)
    await served.add("caller", CALL.format("twice"))
    assert [await served.ask("caller", 1), await served.ask("twice", 1), await served.ask("caller", 1)] == [
        [3],
        [2],
        [3],
    ]
    (row,) = served.engine.deployments.statistics("twice")
    assert row["execution_count"] == 1
    assert row["inference_stats"]["cache_hit"]["count"] == 2


async def test_calls_of_an_unloaded_model_fail_until_it_is_loaded_again(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add("caller", CALL.format("twice"))
    served.engine.deployments.withdraw_name("twice", "unloaded")
    await fails(
        served, "caller", "4 Model twice - .* Request for unknown model: 'twice' is not at ready state: unloaded"
    )
    await served.add("twice", TWICE)
    assert await served.ask("caller", 1) == [3]


@pytest.mark.fault("L6")
async def test_an_unloaded_model_completes_its_pending_calls(served: Served) -> None:
    await served.add("slow", served.gated + " * 2")
    await served.add("caller", CALL.format("slow"))
    answers: list[list[float]] = []

    async def ask() -> None:
        answers.append(await served.ask("caller", 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: served.is_busy("slow"))
        served.engine.deployments.withdraw_name("slow", "unloaded")
        served.open_gate()
    assert answers == [[3]]


async def test_threads_of_a_model_may_make_calls_only_in_a_worker_process(served: Served) -> None:
    body = (
        "found = []\n"
        "def call():\n"
        "    try: found.append(value(request('twice', given).exec()))\n"
        "    except pb_utils.TritonModelException as error: found.append(error)\n"
        "threads = [threading.Thread(target=call) for _ in range(5)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "if isinstance(found[0], Exception): raise RuntimeError(str(found[0]))\n"
        "return sum(found)"
    )
    await served.add("twice", TWICE, instances=2)
    await served.add("caller", body)
    if served.place == "thread":
        await fails(served, "caller", "cannot be called here: other models are called from execute")
    else:
        assert await served.ask("caller", 1) == [10]


async def test_a_call_of_a_model_on_the_event_loop_is_refused(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add("caller", CALL.format("twice"), place="inline")
    await fails(served, "caller", "while it runs on the event loop")


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_calls_of_an_ended_process_are_cancelled(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("slow", served.gated)
        await served.add(
            "caller",
            "pending = [request('slow', given).async_exec() for _ in range(9)]\nawait asyncio.sleep(0.1)\nos._exit(3)",
        )
        with pytest.raises(InstanceDied):
            await served.ask("caller", 1)
        served.open_gate()
        await until(lambda: not served.is_busy("slow"))
        assert served.counted("slow")[0] <= 4
        assert not engine.scheduler.in_flight
        assert not engine.calls


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_responses_that_exceed_the_socket_buffer_wait_for_a_busy_caller(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE, instances=2)
        await served.add(
            "caller",
            "pending = [request('twice', given + i).async_exec() for i in range(600)]\n"
            "time.sleep(0.5)\n"
            "return sum(value(answer) for answer in await asyncio.gather(*pending)) / 600",
        )
        assert await served.ask("caller", *range(400)) == [2 * n + 599 for n in range(400)]


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_thousands_of_calls_that_are_given_up_leave_the_next_call_its_response(tmp_path: Path) -> None:
    """The response frees the memory of their inputs, more blocks than fit into one message."""
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("slow", served.gated)
        await served.add("twice", TWICE)
        await served.add(
            "caller",
            "pending = [asyncio.ensure_future(request('slow', given).async_exec()) for _ in range(3000)]\n"
            "await asyncio.sleep(0)\n"
            "for one in pending: one.cancel()\n"
            "await asyncio.gather(*pending, return_exceptions=True)\n"
            "return value(await request('twice', given).async_exec())",
        )
        assert await served.ask("caller", 4) == [8]
        served.open_gate()


@pytest.mark.fault("R10")
@pytest.mark.parametrize("place", PLACES)
async def test_a_model_that_holds_a_resource_may_make_calls_while_a_prior_model_waits_for_it(
    tmp_path: Path, place: str
) -> None:
    """The called model needs no resource; the waiting model, of better priority, needs the resource of the caller."""
    async with open_engine(EngineOptions(rate_limit=())) as engine:
        served = Served(engine, tmp_path, place)
        await served.add("free", "time.sleep(0.05)\nreturn given", needs=[Needs({}, 10)])
        await served.add("holder", CALL.format("free"), needs=[Needs({("R", 0): 1}, 5)])
        await served.add("first", TWICE, needs=[Needs({("R", 0): 1}, 1)])
        answers: list[list[float]] = []

        async def ask(name: str) -> None:
            answers.append(await served.ask(name, 1))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask, "holder")
                nursery.start_soon(ask, "first")
        assert answers.count([2]) == 10
        assert engine.limiter is not None
        assert not engine.limiter.held()


# ------------------------------------------------------------------------------------------------------ many responses


COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = request.inputs()[0].as_numpy()
            for number in range(int(given[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 0 + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_the_responses_of_a_called_decoupled_model_arrive_in_order(served: Served) -> None:
    """The called model does not wait until its caller takes the responses. The last one is empty."""
    await served.add("count", "", text=COUNTS, decoupled=True)
    await served.add(
        "reader",
        "found = [number(answer) for answer in request('count', given).exec(decoupled=True)]\n"
        "return np.array([found], np.float32)",
    )
    await served.add(
        "awaiting",
        "answers = await request('count', given).async_exec(decoupled=True)\n"
        "found = [number(answer) async for answer in answers]\n"
        "return np.array([found], np.float32)",
    )
    await served.add(
        "gathering",
        "asked = [request('count', given).async_exec(decoupled=True) for _ in range(2)]\n"
        "found = [number(one) for answers in await asyncio.gather(*asked) for one in answers]\n"
        "return np.array([found], np.float32)",
    )
    await served.add(
        "cancelling",
        "answers = request('count', given).exec(decoupled=True)\n"
        "found = [value(next(answers))[0, 0]]\n"
        "answers.cancel()\n"
        "last = [*answers][-1]\n"
        "is_over = last.error().code() == pb_utils.TritonError.CANCELLED if last.has_error() else number(last) == -1\n"
        "return np.array([[*found, is_over, len([*answers])]], np.float32)",
    )
    await served.add(
        "impatient",
        "for answer in request('count', given).exec(decoupled=True):\n"
        "    if value(request('count', given[:, :1] * 0 + 1).exec(decoupled=True).__next__())[0, 0] == 0: break\n"
        "return given",
    )
    await served.add("one", "return value(request('count', given).exec())")
    assert await served.ask("reader", 40) == [*range(40), -1]
    assert await served.ask("awaiting", 40) == [*range(40), -1]
    assert await served.ask("gathering", 40) == [*range(40), -1, *range(40), -1]
    assert await served.ask("cancelling", 40) == [0, 1, 0]
    assert await served.ask("impatient", 40) == [40]
    await fails(
        served,
        "one",
        "5 Model count - Error when .*: Model count is using the decoupled.* Please use 'decoupled=True'",
    )
    await served.add("wrong", "return value(request('count', given.astype('float64')).exec())")
    await fails(served, "wrong", "3 .*data-type is 'FP64', but model 'count' expects 'FP32'")


# Sends 0, then waits until it is cancelled, and says so in a file. With 1 its only response is the final one.
UNTIL_CANCELLED = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = request.inputs()[0].as_numpy()
            if given[0, 0] == 1:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)], parameters={"n": 7, "s": "x"}),
                            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 0)]))
            while not sender.is_cancelled():
                time.sleep(0.002)
            with open(PATH, "a") as file:
                file.write("cancelled ")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CANCELS = """
found = []
{a}for answer in answers:
    found.append(int(answer.error().code()) if answer.has_error() else number(answer))
    {then}
return np.array([found], np.float32)
"""


async def test_a_cancelled_call_ends_with_an_error_and_the_called_model_is_told(served: Served, tmp_path: Path) -> None:
    told = tmp_path / "told"
    await served.add("waits", "", text=UNTIL_CANCELLED.replace("PATH", repr(str(told))), decoupled=True)
    calls, awaits = (
        "request('waits', given).exec(decoupled=True)",
        "await request('waits', given).async_exec(decoupled=True)",
    )
    cancels = CANCELS.format(a="", then="answers.cancel()")
    await served.add("blocking", f"answers = {calls}\n{cancels}")
    await served.add("awaiting", f"answers = {awaits}\n{CANCELS.format(a='async ', then='answers.cancel()')}")
    later = "threading.Timer(0.1, answers.cancel).start()"
    await served.add("elsewhere", f"answers = {calls}\n{later}\n{CANCELS.format(a='', then='pass')}")
    cancelled = 7  # TritonError.CANCELLED
    assert await served.ask("blocking", 0) == [0, cancelled]
    assert await served.ask("awaiting", 0) == [0, cancelled]
    assert await served.ask("elsewhere", 0) == [0, cancelled]
    await until(lambda: told.exists() and told.read_text() == "cancelled " * 3)
    # The final flag follows the response: a cancellation between them ends with an error.
    assert await served.ask("blocking", 1) in ([1], [1, cancelled])


SAID = {"text": "ü", "number": -5, "share": 0.5, "sure": True}
SAYS = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        outputs = [[pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())] for request in requests]
        return [pb_utils.InferenceResponse(one, parameters={SAID}) for one in outputs]
"""


async def test_the_parameters_of_a_response_reach_the_model_that_called(served: Served, tmp_path: Path) -> None:
    await served.add("waits", "", text=UNTIL_CANCELLED.replace("PATH", repr(str(tmp_path / "told"))), decoupled=True)
    await served.add("says", "", text=SAYS)
    check = f"assert json.loads(answer.parameters()) == {SAID}, answer.parameters()\nreturn value(answer)"
    await served.add("calls", f"import json\nanswer = request('says', given).exec()\n{check}")
    await served.add("awaits", f"import json\nanswer = await request('says', given).async_exec()\n{check}")
    await served.add(
        "reads",
        "import json\nanswers = request('waits', given).exec(decoupled=True)\n"
        "return np.array([[json.loads(answer.parameters())['n'] for answer in answers]], np.float32)",
    )
    assert [await served.ask("calls", 3), await served.ask("awaits", 4), await served.ask("reads", 1)] == [
        [3],
        [4],
        [7],
    ]


FORKS = """
def work(given):
    return [value(request("twice", np.array(given, np.float32)).exec()).tolist(), pb_utils.is_model_ready("twice")]

class TritonPythonModel"""
FORKING = """
import multiprocessing
begun = request("twice", given).exec(decoupled=True)
waiting = iter(begun)
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(work, [(given + i).tolist() for i in range(6)])
assert found == [[(2 * (given + i)).tolist(), True] for i in range(6)], found
return value(next(waiting)) + value(request("twice", given).exec())
"""
WAITS_THERE = """
begun = request("twice", given).exec(decoupled=True)
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    try:
        next(begun)
        error = "none"
    except pb_utils.TritonModelException as raised:
        error = str(raised)
    os.write(writing, error.encode())
    os._exit(0)
os.waitpid(pid, 0)
said = os.read(reading, 1000).decode()
assert "cannot wait for a call in a process that it has forked" in said, said
return value(next(begun))
"""


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_forked_processes_call_models_beside_a_call_of_their_parent(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        body = "\n".join(" " * 8 + line for line in FORKING.splitlines())
        text = MODEL.format(body=body, a="", a_await="").replace("class TritonPythonModel", FORKS[1:])
        await served.add("forks", "", text=text)
        assert await served.ask("forks", 3) == [12]
        assert await served.ask("forks", 4) == [16], "in the same process"
        assert served.counted("twice") == (16, 0)


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_forked_process_cannot_take_the_responses_of_its_parents_call(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        await served.add("forks", WAITS_THERE)
        assert await served.ask("forks", 3) == [6]


async def test_a_call_may_be_cancelled_while_its_response_is_delivered(served: Served) -> None:
    """As if the caller's process was killed: the failed write of the response is the first sign of that."""
    await served.add("count", "", text=COUNTS, decoupled=True)
    calls = served.engine.calls
    told: list[object] = []

    def answered(answer: object) -> None:
        told.append(answer)
        calls.leave(pending)

    request = Request({"IN": np.array([[3]], np.float32)}, stamp=served.engine.next_stamp())
    pending = PendingCall(None, BlsCall("count", "", request, is_stream=True), answered)
    calls.begin(pending)
    await until(lambda: bool(told) and not served.is_busy("count"))
    assert not calls
    await served.add("reader", "return value(next(iter(request('count', given).exec(decoupled=True))))")
    assert await served.ask("reader", 2) == [0]
    assert len([answer for answer in told if answer is not None]) == len(told) <= 3


CALLS_LATER = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = request.inputs()[0].as_numpy()
            work = threading.Thread(target=self.answer, args=(request.get_response_sender(), array))
            work.start()
            self.kept = work

    def answer(self, sender, array):
        call = pb_utils.InferenceRequest(
            model_name="twice", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)])
        for _ in range(3):
            response = call.exec()
            sender.send(pb_utils.InferenceResponse(response.output_tensors()))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.kept.join()
"""


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_decoupled_model_calls_from_a_thread_after_execute_has_returned(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        await served.add("later", "", text=CALLS_LATER, decoupled=True)
        for _ in range(3):
            request = Request({"IN": np.ones((1, 2), np.float32)}, stamp=engine.next_stamp())
            with trio.fail_after(60):
                answers = [
                    answer.outputs["OUT"] async for answer in engine.stream(engine.deployments.find("later"), request)
                ]
            assert [answer.tolist() for answer in answers] == [[[2, 2]]] * 3


async def test_an_invalid_request_of_a_model_is_an_exception_there(served: Served) -> None:
    await served.add("twice", TWICE)
    mistakes = {
        "request('twice', given, timeout=-1)": "timeout and priority of a request are 0 or more",
        "request('twice', given, parameters={'x': [1]})": "parameters of a request are a JSON object of strings",
        "request('twice', given.astype(complex))": "has data type complex128, which no model takes",
        "pb_utils.InferenceRequest(model_name='twice', inputs=[pb_utils.Tensor('IN', given)] * 2)": "an input twice",
        "pb_utils.InferenceRequest(model_name='twice', inputs=[None])": r"are Tensors, got NoneType \(a tensor was",
        "pb_utils.InferenceRequest(model_name='twice', inputs=[given])": "'twice' are Tensors, got ndarray",
        "pb_utils.InferenceRequest(model_name=['twice'])": r"model_name wants a text, got list \['twice'\]",
        "pb_utils.InferenceRequest(model_name='twice', requested_output_names='OUT')": "a list of names, got 'OUT'",
    }
    for number, (made, text) in enumerate(mistakes.items()):
        await served.add(f"caller_{number}", f"return value({made}.exec())")
        await fails(served, f"caller_{number}", text)


async def test_the_options_of_a_call_reach_the_called_model(served: Served) -> None:
    facts = (
        "import json\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        said = [(r.request_id(), r.correlation_id(), r.flags(), r.priority(), json.loads(r.parameters()),\n"
        "                 r.requested_output_names()) for r in requests]\n"
        "        error = pb_utils.TritonError(repr(said), pb_utils.TritonError.INVALID_ARG)\n"
        "        return [pb_utils.InferenceResponse(error=error)]\n"
    )
    await served.add("facts", "", text=facts)
    await served.add(
        "caller",
        "return value(request('facts', given, request_id='x', correlation_id=7, flags=3, priority=2,"
        " parameters={'a': 1.5, 'b': 'c'}).exec())",
    )
    await fails(served, "caller", r"3 \[\('x', 7, 3, 2, {'a': 1.5, 'b': 'c'}, \['OUT'\]\)\]")


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_process_that_sends_an_invalid_message_about_its_calls_is_ended(tmp_path: Path) -> None:
    lies = (
        "b'x'",
        "pack(CALL, [1, 0, 99, 0, 8, 0], [])",
        "pack(CALL, [9, 0, 99, 0, 8, 0], ['m', '', [], None, '', 0, 0, 0, False, False, {}])",
        "pack(CALL, [9, 0, 1 << 60, 1, 1 << 60, 1 << 60], ['m', '', [], None, '', 0, 0, 0, False, False, {'a': []}])",
        "pack(READ, [12345])",
        "pack(DROP, [12345])",
        "pack(SERVER_REQUEST, [9, 0, 99, 0, 8, 0], ['is ready', ['twice', ''], []])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 0], ['is ready', ['twice', '']])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 0], [7, ['twice', ''], []])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 0], ['load', ['twice', ''], ['file:1/model.py']])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 0], ['metric value', [12345, {}], []])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 1, 12, 0, 8, 1, 1], ['metric', [12345, {}, None], ['cells']])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 1, 6, 0, 8, 1, 8], ['metric', [family, {}, None], ['cells']])",
        "pack(SERVER_REQUEST, [9, 0, seg, 0, 8, 1, 12, 0, 8, 2, 1, 1], ['metric', [family, {}, None], ['cells']])",
        "pack(77, [1])",
    )
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        for number, said in enumerate(lies):
            await served.add(
                f"liar_{number}",
                "from flowserve.backends.worker.messages import SERVER_REQUEST, CALL, DROP, READ, pack\n"
                "from flowserve.backends.python.pb_utils.context import active\n"
                "value(request('twice', given).exec())\n"
                "caller = active.context.caller\n"
                "seg = caller._arena.segments[0].number\n"
                "own = pb_utils.MetricFamily('m', '', pb_utils.COUNTER)\n"
                "family = own._number\n"
                f"caller._socket.send({said})\n"
                "time.sleep(30)\n"
                "return given",
            )
            with pytest.raises(InstanceDied, match="its process sent an invalid message"):
                await served.ask(f"liar_{number}", 1)
            assert await served.ask("twice", 1) == [2]
            assert engine.calls.server_requests.metrics.text() == b""


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_an_invalid_server_request_of_a_process_is_refused_and_the_process_lives(tmp_path: Path) -> None:
    wrong = {
        "['load', [1, 2], []]": "has arguments of other types",
        "['dance', [], []]": "unknown question 'dance'",
        "['is ready', ['m', '1' * 5000], []]": "failed to get model version",
        "['open family', ['nv_x', '', 'counter'], []]": "are the server's own",
        "['metric', [family, {'a': 1}, None], ['cells']]": "the label 'a' of a metric is a text",
        "['metric', [family, {}, [10 ** 400]], ['cells']]": "a counter has no buckets",
    }
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        for number, (about, text) in enumerate(wrong.items()):
            await served.add(
                f"asker_{number}",
                "from flowserve.backends.python.pb_utils.context import active\n"
                "own = pb_utils.MetricFamily('m', '', pb_utils.COUNTER)\n"
                "family = own._number\n"
                f"about = {about}\n"
                "try:\n"
                "    active.context.caller._ask(about, [np.zeros(1)] if about[2] else [])\n"
                "except Exception as error:\n"
                "    raise RuntimeError(str(error))\n"
                "return given",
            )
            await fails(served, f"asker_{number}", text)
            await fails(served, f"asker_{number}", text)


WATCHES = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        self.seen = 0.0

    def execute(self, requests):
        last = [float(request.inputs()[0].as_numpy()[0, 0]) for request in requests]
        if last == [0.0]:
            still = [request.is_cancelled() for request in self.kept]
            found = np.array([[self.seen, float(any(still))]], np.float32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)])]
        self.kept = requests
        deadline = time.monotonic() + last[0]
        while time.monotonic() < deadline:
            if requests[0].is_cancelled():
                self.seen += 1
                break
            time.sleep(0.01)
        error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""


async def test_a_cancellation_is_visible_to_the_model_during_execute(served: Served) -> None:
    await served.add("watches", "", text=WATCHES)
    await fails(served, "watches", "cancelled", 0.05)
    assert await served.ask("watches", 0) == [0, 0]
    with trio.move_on_after(0.1):
        await served.ask("watches", 30)
    assert await served.ask("watches", 0) == [1, 0]


MEETS = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.came = asyncio.Event()

    async def execute(self, requests):
        for request in requests:
            given = request.inputs()[0].as_numpy()
            sender = request.get_response_sender()
            if given[0, 0] == 3:
                raise ValueError("no luck")
            if given[0, 0] == 4:
                return []
            if given[0, 0] == 1:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)]))
                await self.came.wait()
            self.came.set()
            twice = pb_utils.InferenceRequest(
                model_name="twice", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", given)])
            answer = await twice.async_exec()
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_coroutines_of_a_decoupled_model_run_at_the_same_time(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add("twice", TWICE)
        await served.add("meets", "", text=MEETS, decoupled=True)
        found: dict[int, list[float]] = {}

        async def ask(value: int) -> None:
            request = Request({"IN": np.array([[value]], np.float32)}, stamp=engine.next_stamp())
            async with engine.stream(engine.deployments.find("meets"), request) as answers:
                found[value] = []
                async for answer in answers:
                    found[value].append(answer.outputs["OUT"].item())

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 1)
                await until(lambda: bool(found.get(1)))  # it now waits for the next
                nursery.start_soon(ask, 2)
            assert found == {1: [1.0, 2.0], 2: [4.0]}
            with pytest.raises(FlowserveError, match="no luck"):
                await ask(3)
            with pytest.raises(FlowserveError, match="the decoupled mode and the execute function must return None"):
                await ask(4)
            await ask(5)
        assert found[5] == [10.0]


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_fork_of_a_worker_process_does_not_drop_its_metrics(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add(
            "forks",
            "family = pb_utils.MetricFamily('m', '', pb_utils.COUNTER)\n"
            "metric = family.Metric()\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    del family\n"
            "    os._exit(0)\n"
            "os.waitpid(pid, 0)\n"
            "metric.increment(given[0, 0])\n"
            "return np.array([[metric.value()]], np.float32)",
        )
        assert await served.ask("forks", 3) == [3]
        assert await served.ask("forks", 4) == [4]


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_fork_of_a_worker_process_counts_in_its_metrics_and_in_its_own(tmp_path: Path) -> None:
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add(
            "forks",
            "family = self.kept[0] if self.kept else pb_utils.MetricFamily('m', '', pb_utils.COUNTER)\n"
            "self.kept[:] = [family]\n"
            "family.Metric(labels={'of': 'both'}).increment(1)\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    own = pb_utils.MetricFamily('own', '', pb_utils.COUNTER)\n"
            "    own.Metric().increment(5)\n"
            "    family.Metric(labels={'of': 'both'}).increment(10)\n"
            "    new = family.Metric(labels={'of': 'fork'})\n"
            "    new.increment(100)\n"
            "    os._exit(0 if new.value() >= 100 and own.Metric().value() == 5 else 1)\n"
            "assert os.waitpid(pid, 0)[1] == 0\n"
            "return np.array([[family.Metric(labels={'of': 'both'}).value()]], np.float32)",
        )
        assert await served.ask("forks", 3) == [11]
        assert await served.ask("forks", 4) == [22]
        shown = engine.calls.server_requests.metrics.text().decode()
        assert 'm{of="both"} 22' in shown
        assert "own" not in shown, "it ended with its process"


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_fork_of_a_worker_process_makes_metrics_although_a_thread_makes_some(tmp_path: Path) -> None:
    """The thread, which does not exist in the fork, nearly always holds the family's lock."""
    async with open_engine(EngineOptions()) as engine:
        served = Served(engine, tmp_path, "process")
        await served.add(
            "forks",
            "import signal, threading\n"
            "family = pb_utils.MetricFamily('m', '', pb_utils.COUNTER)\n"
            "ends = threading.Event()\n"
            "def make():\n"
            "    number = 0\n"
            "    while not ends.is_set():\n"
            "        number += 1\n"
            "        family.Metric(labels={'n': str(number)}).increment(1)\n"
            "thread = threading.Thread(target=make)\n"
            "thread.start()\n"
            "statuses = []\n"
            "for _ in range(20):\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            "        signal.alarm(10)\n"
            "        family.Metric(labels={'of': 'fork'}).increment(1)\n"
            "        os._exit(0)\n"
            "    statuses.append(os.waitpid(pid, 0)[1])\n"
            "    if statuses[-1]: break\n"
            "ends.set()\n"
            "thread.join()\n"
            "return np.array([[max(statuses)]], np.float32)",
        )
        assert await served.ask("forks", 3) == [0]


async def test_a_call_that_is_not_awaited_is_executed_nevertheless(served: Served) -> None:
    await served.add("slow", served.gated)
    await served.add("caller", "request('slow', given).async_exec().close()\nawait asyncio.sleep(0)\nreturn given")
    assert await served.ask("caller", 1) == [1]
    with trio.move_on_after(0.05):
        await served.ask("slow", 2)  # withdrawn
    served.open_gate()
    await until(lambda: not served.engine.calls)
    assert served.counted("slow")[0] >= 1
    assert await served.ask("caller", 1) == [1]
    await until(lambda: not served.engine.calls)


async def test_an_accepted_request_may_make_calls_while_the_server_drains(served: Served) -> None:
    await served.add("twice", TWICE)
    await served.add("caller", "time.sleep(0.3)\n" + CALL.format("twice"))
    answers: list[list[float]] = []

    async def ask() -> None:
        answers.append(await served.ask("caller", 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: served.is_busy("caller"))
        assert await served.engine.drain(trio.current_time() + 30) == []
    assert answers == [[3]]


async def test_requests_that_wait_for_calls_fail_when_the_server_ends(tmp_path: Path) -> None:
    """No request waits for a call that is not executed any more."""
    failed: list[str] = []
    async with trio.open_nursery() as nursery:
        async with open_engine(EngineOptions(), exit_timeout_s=20) as engine:
            served = Served(engine, tmp_path, PLACES[-1])
            await served.add("slow", "time.sleep(0.3)\nreturn given")
            await served.add(
                "caller", "value(request('slow', given).exec())\nreturn value(request('slow', given).exec())"
            )

            async def ask() -> None:
                try:
                    await served.ask("caller", 1)
                except FlowserveError as error:
                    failed.append(str(error))

            nursery.start_soon(ask)
            await until(lambda: served.is_busy("slow"))
            began = trio.current_time()
        assert trio.current_time() - began < 15
    assert len(failed) == 1
