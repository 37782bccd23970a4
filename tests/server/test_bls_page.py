"""docs/bls.md is correct: its files are a repository, and its requests get the documented responses and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving

PAGE = Path(__file__).resolve().parents[2] / "docs/bls.md"
BLOCKS = re.findall(
    r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
REQUESTS = [(command, printed) for (kind, _, command), (_, _, printed) in pairwise(BLOCKS) if kind == "sh"]

# Not on the page: two models that call each other, each with one instance.
CALLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT")
        return pb_utils.InferenceRequest(model_name="{}", inputs=[text], requested_output_names=["ANSWER"]).exec()
"""


@pytest.fixture(scope="module", params=["thread", *(["process"] if SUPPORTED else [])])
def served_page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("page")
    config = next(text for _, path, text in BLOCKS if path == "reply/config.pbtxt")
    files = [(path, text) for _, path, text in BLOCKS if path]
    for name, other in (("a", "b"), ("b", "a")):
        files += [(f"{name}/config.pbtxt", config), (f"{name}/1/model.py", CALLS.format(other))]
    for path, text in files:
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    with serving(repository, "--python-execution", request.param) as served:
        yield served


@pytest.mark.parametrize(("command", "printed"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_gets_the_documented_response(
    served_page: Served, command: str, printed: str, by_shell: Callable[[str, Served], str]
) -> None:
    assert json.loads(by_shell(command, served_page)) == json.loads(printed)


def test_a_cycle_of_calls_is_refused_with_the_documented_error(served_page: Served) -> None:
    tensor = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["x"]}
    url = f"http://{served_page.address}/v2/models/a/infer"
    answer = httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)
    said = next(text for kind, _, text in BLOCKS if kind == "text")
    assert (answer.status_code, answer.json()["error"]) == (503, said.strip())
    assert len(REQUESTS) == 2
