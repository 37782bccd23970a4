"""Calls of other models by processes that a Python model has forked: each gets the responses to its own calls.

All expectations but those marked hold for Triton too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.triton_models import python_config, spec, write_model, write_source

X, Y = spec("X", "FP32", "-1"), spec("Y", "FP32", "-1")
CPU = "instance_group [ { kind: KIND_CPU } ]"
DOUBLES = """
def execute(self, requests):
    return [respond(Y=given(request, "X") * 2) for request in requests]
"""
WAITS = """
def execute(self, requests):
    time.sleep(0.5)
    return [respond(Y=given(request, "X")) for request in requests]
"""
STREAMS = """
def execute(self, requests):
    for request in requests:
        x = given(request, "X")
        sender = request.get_response_sender()
        for number in range(3):
            sender.send(respond(Y=x + number))
        sender.send(flags=FINAL)
"""
FORKS = """
import asyncio
import json
import multiprocessing
import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def request(model, first, size):
    tensor = pb_utils.Tensor("X", np.arange(first, first + size, dtype=np.float32))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["Y"], inputs=[tensor])


def array(response):
    if response.has_error():
        raise RuntimeError(response.error().message())
    return response.output_tensors()[0].as_numpy()


async def both(first, size):
    answers = await asyncio.gather(*[request("doubles", first + i, size).async_exec() for i in (0, 1)])
    return [array(answer) for answer in answers]


def calls(how, first, size):
    "Calls with values of their own. Returns whether the answers are theirs."
    sent = np.arange(first, first + size, dtype=np.float32)
    if how == "exec":
        return (array(request("doubles", first, size).exec()) == sent * 2).all()
    if how == "async_exec":
        one, other = asyncio.run(both(first, size))
        return (one == sent * 2).all() and (other == (sent + 1) * 2).all()
    responses = [one for one in request("streams", first, size).exec(decoupled=True) if one.output_tensors()]
    return len(responses) == 3 and all((array(one) == sent + i).all() for i, one in enumerate(responses))


def many(how, number, size, rounds=10):
    "How many calls have another answer than their own."
    return sum(not calls(how, 1000 * number + i, size) for i in range(rounds))


def forked(count, work):
    "The results of `work(n)` in as many forked processes, which run at the same time as `work(0)` here."
    pipes = []
    for n in range(1, count + 1):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                text = json.dumps(work(n))
            except BaseException as error:
                text = json.dumps(repr(error))
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        pipes.append((pid, reading))
    found = [work(0)]
    for pid, reading in pipes:
        os.waitpid(pid, 0)
        found.append(json.loads(os.read(reading, 10000)))
        os.close(reading)
    return found


def nested(n):
    return forked(1, lambda m: many("exec", 10 * n + m, 8)) if n else 0


def killed_in_a_call():
    "A forked process dies while it waits for an answer; another and this one go on."
    pid = os.fork()
    if not pid:
        request("waits", 7, 1).exec()
        os._exit(0)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return forked(1, lambda n: many("exec", n, 8))


def ends_while_another_waits():
    "One forked process dies; the call of another, which began before, gets its answer."
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, json.dumps(array(request("waits", 7, 1).exec()).tolist()).encode())
        os._exit(0)
    ends = os.fork()
    if not ends:
        request("doubles", 1, 1).exec()
        os._exit(0)
    os.waitpid(ends, 0)
    os.waitpid(pid, 0)
    return json.loads(os.read(reading, 1000))


def in_pool(n):
    return many("exec", n, 8)


class TritonPythonModel:
    def initialize(self, args):
        if POOL:
            self.pool = multiprocessing.get_context("fork").Pool(2)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
        text = json.dumps(eval(code)).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], np.object_))])

    def finalize(self):
        if POOL:
            self.pool.terminate()
"""
TEXT = python_config([spec("CODE", "STRING", "1")], [spec("TEXT", "STRING", "1")], CPU)
NO_STREAMS = "a thread of Triton's process receives the responses of a stream, and a fork has no such thread: it hangs"
SMALL, LARGE = 8, 100_000  # an answer of a few bytes, and one that is handed on in shared memory


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> str:
    repository = tmp_path_factory.mktemp("forks")
    one = python_config([X], [Y], CPU)
    write_model(repository, "doubles", one, DOUBLES)
    write_model(repository, "waits", python_config([X], [Y], "instance_group [ { kind: KIND_CPU count: 2 } ]"), WAITS)
    write_model(repository, "streams", one + "model_transaction_policy { decoupled: true }", STREAMS)
    write_source(repository, "forks", TEXT, FORKS.replace("POOL", "False"))
    write_source(repository, "has_pool", TEXT, FORKS.replace("POOL", "True"))
    return triton_like(repository)


def ask(base_url: str, code: str, model: str = "forks") -> Any:
    """The value of an expression in the model."""
    tensor = {"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [code]}
    reply = httpx.post(f"{base_url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=60, verify=False)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", ["exec", "async_exec", "decoupled"])
def test_a_forked_process_gets_the_answers_to_its_calls(base_url: str, how: str, size: int, on_triton: bool) -> None:
    if on_triton and how == "decoupled":
        pytest.skip(NO_STREAMS)
    assert ask(base_url, f"forked(1, lambda n: many('{how}', n, {size}) if n else 0)") == [0, 0]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", ["exec", "async_exec", "decoupled"])
def test_forked_processes_and_their_parent_call_at_the_same_time(
    base_url: str, how: str, size: int, on_triton: bool
) -> None:
    if on_triton and how == "decoupled":
        pytest.skip(NO_STREAMS)
    assert ask(base_url, f"forked(4, lambda n: many('{how}', n, {size}))") == [0] * 5


def test_different_kinds_of_calls_at_the_same_time(base_url: str, on_triton: bool) -> None:
    kinds = ["exec", "async_exec", "exec" if on_triton else "decoupled"]  # NO_STREAMS
    assert ask(base_url, f"forked(5, lambda n: many({kinds}[n % 3], n, {LARGE} if n % 2 else {SMALL}))") == [0] * 6


def test_a_process_forked_by_a_forked_process_calls_models(base_url: str) -> None:
    assert ask(base_url, "forked(2, nested)") == [0, [0, 0], [0, 0]]


def test_a_pool_of_processes_calls_models(base_url: str, on_triton: bool) -> None:
    if on_triton:
        pytest.skip("it hangs in a process of Triton that has forked before")
    pool = "multiprocessing.get_context('fork').Pool(3)"
    assert ask(base_url, f"[pool := {pool}, pool.map(in_pool, range(6)), pool.terminate()][1]") == [0] * 6


def test_a_pool_made_in_initialize_calls_models_in_each_execution(base_url: str, on_triton: bool) -> None:
    if on_triton:
        pytest.skip("Triton refuses calls in processes that were forked outside of `execute`")
    for _ in range(3):
        assert ask(base_url, "self.pool.map(in_pool, range(6))", "has_pool") == [0] * 6


def test_a_forked_process_that_dies_loses_only_its_own_calls(base_url: str) -> None:
    """Last, because it may leave a lock of Triton's locked."""
    assert ask(base_url, "killed_in_a_call()") == [0, 0]
    assert ask(base_url, "ends_while_another_waits()") == [7.0]
    assert ask(base_url, "many('exec', 1, 8)") == 0
