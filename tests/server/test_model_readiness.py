"""The method `is_ready` of a Python model, as the servers call it since the version after the one that the tests in
tests/triton run on: over HTTP and gRPC, in each place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from flowserve.testing.serve import Served
from tests.support.forked import serving
from tests.support.triton_models import python_config, spec, write_model

X, Y = spec("X", "FP32", "-1"), spec("Y", "FP32", "-1")
EXECUTE = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]

"""
SLEEPS = """
def execute(self, requests):
    time.sleep(1)
    return [respond(Y=given(request, "X")) for request in requests]

"""
# What `is_ready` does, and whether the model is ready.
BODIES = {
    "says_yes": ("return True", True),
    "says_no": ("return False", False),
    "raises": ("raise RuntimeError('no luck')", False),
    "says_a_word": ("return 'ready'", False),
    "says_nothing": ("pass", False),
    "exits": ("raise SystemExit(3)", False),
    "asks": ("return pb_utils.is_model_ready('says_yes') and not pb_utils.is_model_ready('nothing')", True),
}
# Code whose texts or attributes fail, and the reason in the response. All but the last are ready once they executed.
ODD = {
    "has_no_repr": (
        (
            "def is_ready(self):\n    class Odd:\n        def __repr__(self): raise RuntimeError('no repr')\n"
            "    return next(self.answers, Odd())\n"
        ),
        "its is_ready raised RuntimeError: no repr",
    ),
    "has_no_text": (
        (
            "def is_ready(self):\n    class Odd(Exception):\n        def __str__(self): raise RuntimeError('no text')\n"
            "    for answer in self.answers:\n        return answer\n    raise Odd\n"
        ),
        "its is_ready raised Odd: <EMPTY MESSAGE>",
    ),
    "is_no_unicode": (
        "def is_ready(self):\n    for answer in self.answers:\n        return answer\n    raise KeyError('\\udcff')\n",
        "its is_ready raised KeyError: '\\udcff'",
    ),
    "is_long": (
        "def is_ready(self):\n    return next(self.answers, 'x' * 1_000_000)\n",
        "its is_ready returned '" + "x" * 477 + ", which is neither True nor False",
    ),
    "is_a_property": (
        "@property\ndef is_ready(self):\n    raise RuntimeError('no luck')\n",
        "its is_ready raised RuntimeError: no luck",
    ),
}
ANSWERS = "def initialize(self, args):\n    self.answers = iter([])\n\n"
BECOMES_READY = """
def execute(self, requests):
    self.answers = iter([True])
    return [respond(Y=given(request, "X")) for request in requests]

"""
FORKS = """
def is_ready(self):
    import os
    return os.fork() > 0
"""
COROUTINE = "async def is_ready(self):\n    import asyncio\n    await asyncio.sleep(0.05)\n    return VALUE\n"
SLOW = "def is_ready(self):\n    time.sleep(7)\n    return True\n"
COUNTS = """
def initialize(self, args):
    self.calls = 0

def execute(self, requests):
    return [respond(Y=np.array([self.calls], np.float32)) for request in requests]

def is_ready(self):
    self.calls += 1
    time.sleep(0.5)
    return True
"""
ENSEMBLE = """platform: "ensemble" input [ {X} ] output [ {Y} ]
ensemble_scheduling {{ step [ {{ model_name: "{model}" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }} ] }}"""
PLACES = ("process", "thread", "inline")
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture(scope="module", params=PLACES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = python_config([X], [Y])
    for name, (body, _) in BODIES.items():
        write_model(folder, name, config, f"{EXECUTE}def is_ready(self):\n    {body}\n")
    write_model(folder, "awaits_yes", config, EXECUTE + COROUTINE.replace("VALUE", "True"))
    write_model(folder, "awaits_no", config, EXECUTE + COROUTINE.replace("VALUE", "False"))
    for name, (body, _) in ODD.items():
        write_model(folder, name, config, ANSWERS + BECOMES_READY + body)
    write_model(folder, "slow", config, EXECUTE + SLOW)
    write_model(folder, "counts", config, COUNTS)
    busy = config + 'parameters { key: "execution" value { string_value: "thread" } }' * (request.param == "inline")
    write_model(folder, "busy", busy, SLEEPS + "def is_ready(self):\n    return True\n")
    write_model(folder, "has_none", config, EXECUTE)
    for name in ("says_yes", "says_no"):
        (folder / f"around_{name}" / "1").mkdir(parents=True)
        (folder / f"around_{name}" / "config.pbtxt").write_text(ENSEMBLE.format(X=X, Y=Y, model=name))
    with serving(folder, "--python-execution", request.param, "--allow-grpc", "true", "--grpc-port", "0") as server:
        yield server


def is_ready(served: Served, protocol: str, model: str) -> bool:
    if protocol == "http":
        status = httpx.get(f"{served.base_url}/v2/models/{model}/ready", timeout=60, verify=False).status_code
        assert status in (200, 400)
        return status == 200
    with tritonclient.grpc.InferenceServerClient(served.grpc_address) as client:
        return bool(client.is_model_ready(model))


def infer(served: Served, model: str) -> float:
    tensor = {"name": "X", "shape": [1], "datatype": "FP32", "data": [1.0]}
    url = f"{served.base_url}/v2/models/{model}/infer"
    reply = httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)
    assert reply.status_code == 200, reply.text
    return float(np.array(reply.json()["outputs"][0]["data"])[0])


@PROTOCOLS
@pytest.mark.parametrize("model", BODIES)
def test_the_method_decides_whether_the_model_is_ready(served: Served, protocol: str, model: str) -> None:
    for _ in range(2):
        assert is_ready(served, protocol, model) is BODIES[model][1]
    assert infer(served, model) == 1, "requests are served in any case"


@PROTOCOLS
def test_the_method_may_be_a_coroutine(served: Served, protocol: str) -> None:
    assert is_ready(served, protocol, "awaits_yes")
    assert not is_ready(served, protocol, "awaits_no")


@PROTOCOLS
def test_an_ensemble_is_ready_if_its_models_are(served: Served, protocol: str) -> None:
    assert is_ready(served, protocol, "around_says_yes")
    assert not is_ready(served, protocol, "around_says_no")
    assert is_ready(served, protocol, "has_none")


def test_the_reason_is_in_the_response(served: Served) -> None:
    texts = {"says_no": "its is_ready returned False", "raises": "its is_ready raised RuntimeError: no luck"}
    for model, text in texts.items():
        reply = httpx.get(f"{served.base_url}/v2/models/{model}/ready", verify=False)
        assert reply.json() == {"error": f"Model version not ready: {text}"}


@pytest.mark.parametrize("model", ODD)
def test_code_whose_texts_fail_is_asked_again(served: Served, model: str) -> None:
    for _ in range(2):
        reply = httpx.get(f"{served.base_url}/v2/models/{model}/ready", verify=False)
        assert reply.json() == {"error": f"Model version not ready: {ODD[model][1]}"}
    assert not is_ready(served, "grpc", model)
    assert infer(served, model) == 1
    if model != "is_a_property":
        assert is_ready(served, "http", model)


def test_the_server_is_ready_whatever_its_models_say(served: Served) -> None:
    assert httpx.get(f"{served.base_url}/v2/health/ready", verify=False).status_code == 200


def test_a_method_that_takes_long_is_not_ready_and_delays_nothing_else(served: Served) -> None:
    with ThreadPoolExecutor() as threads:
        began = time.monotonic()
        slow = [threads.submit(is_ready, served, protocol, "slow") for protocol in ("http", "grpc")]
        time.sleep(0.5)
        for _ in range(5):
            assert is_ready(served, "http", "says_yes")
            assert infer(served, "slow") == 1
        assert time.monotonic() - began < 4
        assert [one.result() for one in slow] == [False, False]
        assert 4.5 < time.monotonic() - began < 6.8


def test_a_model_answers_while_it_executes(served: Served) -> None:
    running = threading.Thread(target=infer, args=(served, "busy"))
    running.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert is_ready(served, "http", "busy")
    assert time.monotonic() - began < 0.6
    running.join()


def test_requests_at_the_same_time_share_one_call_of_the_method(served: Served) -> None:
    before = infer(served, "counts")
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(is_ready, served, "http" if i % 2 else "grpc", "counts") for i in range(8)]
        assert [one.result() for one in asked] == [True] * 8
    assert infer(served, "counts") - before < 4


def test_a_restarted_process_is_asked_again(served: Served, tmp_path: Path) -> None:
    """The socket of the process that has ended is not used."""
    folder = tmp_path / "models"
    body = EXECUTE.replace("return [", "import os\n    if given(requests[0], 'X')[0] > 1: os._exit(3)\n    return [")
    write_model(folder, "ends", python_config([X], [Y]), body + "def is_ready(self):\n    return True\n")
    with serving(folder, "--grpc-port", "0", "--allow-grpc", "true") as server:
        assert is_ready(server, "http", "ends")
        tensor = {"name": "X", "shape": [1], "datatype": "FP32", "data": [2.0]}
        url = f"{server.base_url}/v2/models/ends/infer"
        assert httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False).status_code == 500
        deadline = time.monotonic() + 30
        while not is_ready(server, "http", "ends"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert infer(server, "ends") == 1


def test_a_method_that_forks_answers_in_the_process_of_the_model_only(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_model(folder, "forks", python_config([X], [Y]), EXECUTE + FORKS)
    with serving(folder, "--grpc-port", "0", "--allow-grpc", "true") as server:
        assert [is_ready(server, "http", "forks") for _ in range(6)] == [True] * 6
