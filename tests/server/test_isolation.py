"""One bad client beside good ones, on a real server: the README's pipeline, functions over every protocol, and
`Invalid` raised in a model's own environment.
"""

from __future__ import annotations

import re
import sys
import threading
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving

GOOD_CLIENTS = 8
REQUESTS = 40  # of each good client
DRAWING = "00021100 01788300 03804900 04802930 13910930 00940930 00498810 00023100"


@pytest.fixture(scope="module")
def pipeline(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the README's pipeline.py and what it reads."""
    folder = tmp_path_factory.mktemp("pipeline")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = [text for _, text in blocks if text.startswith("# pipeline.py")]
    (folder / "pipeline.py").write_text(program)
    (folder / "graphs").symlink_to(root / "graphs")
    return folder


def counts(served: Served, model: str) -> tuple[int, int]:
    """The requests of a deployment that succeeded, and that failed."""
    reply = httpx.get(f"{served.base_url}/v2/models/{model}/stats", timeout=30, verify=False)
    counted = reply.json()["model_stats"][0]["inference_stats"]
    return counted["success"]["count"], counted["fail"]["count"]


@pytest.mark.parametrize("source", ["pipeline:graph", "saved"])
def test_a_client_that_sends_only_bad_requests_fails_no_other_of_the_readmes_pipeline(
    pipeline: Path, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(pipeline)
    monkeypatch.setenv("PYTHONPATH", f"{pipeline}:{sys.path[0]}:{Path(__file__).parents[2]}")
    if source == "saved":
        monkeypatch.syspath_prepend(str(pipeline))
        import pipeline as program  # type: ignore[import-not-found]

        program.graph.save(tmp_path / "models")
        monkeypatch.delitem(sys.modules, "pipeline")
    with serving(Path(source) if source != "saved" else tmp_path / "models") as served:
        url = f"{served.base_url}/v2/models/describe_digit/infer"
        is_over = threading.Event()

        def ask(client: httpx.Client, drawing: str) -> httpx.Response:
            tensor = {"name": "DRAWING", "datatype": "BYTES", "shape": [1, 1], "data": [drawing]}
            return client.post(url, json={"inputs": [tensor]})

        def good(_: int) -> list[str]:
            with httpx.Client(timeout=60, verify=False) as client:
                replies = [ask(client, DRAWING) for _ in range(REQUESTS)]
            return [one.json()["outputs"][0]["data"][0] if one.status_code == 200 else one.text for one in replies]

        def bad() -> list[httpx.Response]:
            replies = []
            with httpx.Client(timeout=60, verify=False) as client:
                while not is_over.is_set():
                    replies.append(ask(client, "000"))
            return replies

        with ThreadPoolExecutor(GOOD_CLIENTS + 1) as pool:
            failing = pool.submit(bad)
            answers = [answer for answers in pool.map(good, range(GOOD_CLIENTS)) for answer in answers]
            is_over.set()
            refused = failing.result()
        assert answers == ["a 0, 100% sure, 22% of it ink"] * GOOD_CLIENTS * REQUESTS
        assert len(refused) > 5
        for reply in refused:
            assert reply.status_code == 500
            assert "model 'pixels' failed: ValueError: cannot reshape array of size 3 into shape (8,8)" in reply.text
        for model in ("describe_digit", "pixels"):
            assert counts(served, model) == (len(answers), len(refused))
        assert counts(served, "describe") == (len(answers), 0)


FUNCTIONS = """
import numpy as np
from flowserve import Graph, Invalid, model

SIDES = {"X": "FP32[1]"}, {"Y": "FP32[1]"}
WHOLE = {"max_batch_size": 8, "max_queue_delay_us": 100_000}


def positive(array):
    if (array < 0).any():
        raise Invalid(f"below zero: {array.tolist()}")
    return array + 1


@model(*SIDES, **WHOLE)
def on_thread(array):
    return positive(array)


@model(*SIDES, **WHOLE, execution="inline")
def inline(array):
    return positive(array)


both = Graph("both")
both.output("Y", inline(on_thread(both.input("X", "FP32[1]"))))
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "refusing.py").write_text(FUNCTIONS)
    search = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    with serving(Path("refusing:both"), "--allow-grpc", "true", "--grpc-port", "0", environment=search) as served:
        yield served


TEXTS = {
    "both": "in ensemble 'both', below zero: [[-3.0]] (step 'on_thread'",
    "on_thread": "below zero: [[-3.0]]",
    "inline": "below zero: [[-3.0]]",
}


@pytest.mark.parametrize("model", TEXTS)
def test_invalid_raised_by_a_function_is_a_400_over_every_protocol(functions: Served, model: str) -> None:
    url = f"{functions.base_url}/v2/models/{model}"
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [-3]}
    refused = httpx.post(f"{url}/infer", json={"inputs": [tensor]}, timeout=60, verify=False)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(TEXTS[model])
    for way in ("generate", "generate_stream"):
        refused = httpx.post(f"{url}/{way}", json={"X": -3}, timeout=60, verify=False)
        assert refused.status_code == 400
        assert TEXTS[model] in refused.text
    given = grpc_client.InferInput("X", [1, 1], "FP32").set_data_from_numpy(np.array([[-3]], np.float32))
    with grpc_client.InferenceServerClient(functions.grpc_address) as client:
        with pytest.raises(grpc_client.InferenceServerException) as failed:
            client.infer(model, [given])
    assert failed.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert failed.value.message().startswith(TEXTS[model])
    assert "Traceback" not in functions.log
    assert "below zero" not in functions.log


def test_no_trace_of_a_good_request_has_the_text_of_a_bad_one_in_its_first_batch(functions: Served) -> None:
    def ask(value: float) -> httpx.Response:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        url, timing = f"{functions.base_url}/v2/models/on_thread/infer", {"Flowserve-Timing": "1"}
        return httpx.post(url, json={"inputs": [tensor]}, headers=timing, timeout=60, verify=False)

    with ThreadPoolExecutor(8) as pool:
        bad, *good = pool.map(ask, [-3.0, *[1.0] * 7])
    assert "below zero: [[-3.0]]" in bad.headers["Server-Timing"]
    assert [one.status_code for one in good] == [200] * 7
    timings = [one.headers["Server-Timing"] for one in good]
    assert not any("below zero" in one for one in timings)
    assert any("Invalid in a batch of " in one for one in timings)


@pytest.mark.skipif(not SUPPORTED, reason="models in processes need Linux")
def test_invalid_raised_in_a_models_own_environment_is_a_400(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    packages = environment / f"lib/python3.{sys.version_info[1]}/site-packages"
    installed = Path(np.__file__).parent
    for one in ("numpy", "numpy.libs"):
        if (installed.parent / one).exists():
            (packages / one).symlink_to(installed.parent / one)
    folder = tmp_path / "models/m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 500000 }\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
        f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }}\n'
    )
    (folder / "1/model.py").write_text("""
import importlib.util
from flowserve import Invalid

assert importlib.util.find_spec("trio") is None, "not its own environment"


class TritonPythonModel:
    def execute(self, requests):
        raise Invalid(f"no {requests[0].inputs()[0].as_numpy().tolist()}")
""")
    with serving(tmp_path / "models") as served:

        def ask(value: float) -> httpx.Response:
            tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}
            url = f"{served.base_url}/v2/models/m/infer"
            return httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)

        refused = ask(7)
        assert (refused.status_code, refused.json()) == (400, {"error": "no [[7.0]]"})
        assert "Traceback" not in served.log
        with ThreadPoolExecutor(4) as pool:
            shared = [*pool.map(ask, [8, 8, 8, 8])]
        assert {one.status_code for one in shared} == {500}
        assert not any("8.0" in one.text for one in shared)
        assert "flowserve.errors.Invalid: no [[8.0]]" in served.log
