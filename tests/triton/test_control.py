"""Loading and unloading in mode explicit, as Triton answers it."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import httpx
import pytest

ECHO = """\
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if "fail" in json.loads(args["model_config"])["parameters"]:
            raise RuntimeError("told to fail")

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in given]
"""

BREAKS_WHILE_COMPLETED = f"""{ECHO}
    @staticmethod
    def auto_complete_config(config):
        raise RuntimeError("told to fail")
"""

CONFIG = """\
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""

JSON = {
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}

MODELS = {  # name: (versions, model.py, config.pbtxt)
    "echo": (("1",), ECHO, CONFIG),
    "two": (("1", "2"), ECHO, CONFIG + "version_policy { all {} }"),
    "fails": (("1",), ECHO, CONFIG + 'parameters { key: "fail" value { string_value: "1" } }'),
    "imports": (("1",), f"import no_such_module\n{ECHO}", CONFIG),
    "completes": (("1",), BREAKS_WHILE_COMPLETED, CONFIG),
}

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> str:
    repository = tmp_path_factory.mktemp("control")
    for name, (versions, code, config) in MODELS.items():
        for version in versions:
            (repository / name / version).mkdir(parents=True)
            (repository / name / version / "model.py").write_text(code)
        (repository / name / "config.pbtxt").write_text(config)
    return triton_like(repository, "--model-control-mode=explicit", "--load-model=echo")


def post(url: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(f"{url}/v2/repository/{path}", json=body or {}, timeout=60, verify=False)


def load(url: str, name: str, **parameters: Any) -> tuple[int, str]:
    reply = post(url, f"models/{name}/load", {"parameters": parameters})
    return reply.status_code, reply.json()["error"] if reply.content else ""


def rows(url: str, name: str) -> list[dict[str, str]]:
    """The index rows of a name, once it is neither being loaded nor unloaded: Triton's unload call does not wait."""
    for _ in range(500):
        found = [row for row in post(url, "index").json() if row["name"] == name]
        if not any(row.get("state") in ("LOADING", "UNLOADING") for row in found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{name} does not come to rest")


def test_a_model_that_was_never_loaded_is_listed_by_name_only(url: str) -> None:
    assert rows(url, "fails") == [{"name": "fails"}]
    assert rows(url, "nowhere") == []


def test_every_unloaded_version_is_listed_with_state_and_reason(url: str) -> None:
    assert load(url, "two") == (200, "")
    assert rows(url, "two") == [{"name": "two", "version": version, "state": "READY"} for version in ("1", "2")]
    assert post(url, "models/two/unload").status_code == 200
    assert rows(url, "two") == [
        {"name": "two", "version": version, "state": "UNAVAILABLE", "reason": "unloaded"} for version in ("1", "2")
    ]
    ready = post(url, "index", {"ready": True}).json()
    assert [row["name"] for row in ready] == ["echo"]


def test_the_unload_of_an_unknown_name_succeeds(url: str) -> None:
    assert post(url, "models/nowhere/unload").status_code == 200
    assert rows(url, "nowhere") == []


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ("{not json", True),
        (json.dumps({**JSON, "no_such_field": 1}), True),
        (json.dumps({**JSON, "max_batch_size": -1}), True),
        (json.dumps({**JSON, "max_batch_size": "many"}), True),
        (json.dumps({**JSON, "name": "other"}), True),
        (json.dumps({**JSON, "dynamic_batching": {"preferred_batch_size": [9]}}), True),
        (json.dumps({**JSON, "parameters": {"fail": {"string_value": "1"}}}), False),
    ],
    ids=["syntax", "field", "negative", "type", "name", "preferred", "initialize"],
)
def test_a_refused_override_failed_to_load_and_a_failed_initialize_is_a_load_that_failed(
    url: str, on_triton: bool, config: str, is_refused: bool
) -> None:
    status, text = load(url, "echo", config=config)
    begin = (
        "failed to load 'echo', failed to poll from model repository" if is_refused else "load failed for model 'echo'"
    )
    assert text.startswith(begin)
    assert status == (500 if on_triton and is_refused else 400)  # a client's mistake is never a 500 in flowserve
    assert rows(url, "echo")[0]["state"] == "READY"


@pytest.mark.parametrize("name", ["fails", "imports", "completes"])
def test_code_that_fails_while_it_is_loaded_is_a_load_that_failed(url: str, name: str) -> None:
    status, text = load(url, name)
    assert status == 400
    assert text.startswith(f"load failed for model '{name}': ")
    assert rows(url, name)[0]["state"] == "UNAVAILABLE"


@pytest.mark.parametrize("path", ["1/model.py", "/1/model.py", "//1/model.py"])
def test_a_file_of_a_load_call_may_begin_with_a_slash(url: str, path: str) -> None:
    name = f"brought{path.count('/')}"
    brought = {f"file:{path}": b64encode(ECHO.encode()).decode()}
    assert load(url, name, config=json.dumps(JSON), **brought) == (200, "")
    asked = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    reply = httpx.post(f"{url}/v2/models/{name}/infer", json=asked, verify=False)
    assert reply.json()["outputs"][0]["data"] == [1.0, 2.0]
    post(url, f"models/{name}/unload")


@pytest.mark.parametrize(
    ("parameters", "begin"),
    [
        ({"file:1/model.py": "eA=="}, "failed to load 'new', failed to poll from model repository"),
        (
            {"config": json.dumps(JSON), "file:../1/model.py": "eA=="},
            "failed to load 'new', failed to poll from model repository",
        ),
        ({"config": json.dumps(JSON)}, "failed to load 'new', failed to poll from model repository"),
        ({}, "failed to load 'new', failed to poll from model repository"),
        ({"colour": "red"}, "unexpected error on creating Triton parameter"),
    ],
    ids=["no-config", "outside", "no-files", "unknown", "parameter"],
)
def test_what_cannot_be_polled_is_refused_and_leaves_no_row(
    url: str, on_triton: bool, parameters: dict[str, str], begin: str
) -> None:
    status, text = load(url, "new", **parameters)
    assert text.startswith(begin)
    assert status == (500 if on_triton else 400)
    assert rows(url, "new") == []
