"""The response cache of ensembles and their steps, as Triton counts it: a repository in a folder, and requests over
HTTP to a base URL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.triton_models import write_source

CACHE_BYTES = 1 << 20
OPTIONS = (f"--cache-config=local,size={CACHE_BYTES}",)
CACHE = "response_cache { enable: true }\n"
TENSORS = """
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
STEPS = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "FIRST" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "a" } },
  { model_name: "LAST" model_version: -1 input_map { key: "IN" value: "a" } output_map { key: "OUT" value: "OUT" } }
] }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one + 1)]) for one in given]
"""


def write_repository(folder: Path) -> None:
    python = 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n' + TENSORS
    for name, more in (("plain", ""), ("cached", CACHE), ("last", "")):
        write_source(folder, name, python + more, MODEL)
    for name, first, more in (
        ("only_ensemble", "plain", CACHE),
        ("only_step", "cached", ""),
        ("both", "cached", CACHE),
    ):
        write_source(folder, name, STEPS.replace("FIRST", first).replace("LAST", "last") + TENSORS + more)


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> str:
    folder = tmp_path_factory.mktemp("cache")
    write_repository(folder)
    return triton_like(folder, *OPTIONS)


def ask(base_url: str, model: str, row: list[float]) -> None:
    tensor = {"name": "IN", "shape": [1, len(row)], "datatype": "FP32", "data": row}
    found = httpx.post(f"{base_url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=60, verify=False)
    assert found.status_code == 200, found.text
    assert found.json()["outputs"][0]["data"] == [number + 2 for number in row]


def counted(base_url: str, *models: str) -> dict[str, tuple[int, int, int]]:
    """Hits, misses and executions, by model."""
    found = {}
    for model in models:
        (row,) = httpx.get(f"{base_url}/v2/models/{model}/stats", timeout=60, verify=False).json()["model_stats"]
        hits, misses = (row["inference_stats"][what]["count"] for what in ("cache_hit", "cache_miss"))
        found[model] = hits, misses, row["execution_count"]
    return found


def grown(base_url: str, before: dict[str, tuple[int, int, int]]) -> dict[str, list[int]]:
    after = counted(base_url, *before)
    return {model: [now - then for now, then in zip(after[model], before[model], strict=True)] for model in before}


def test_the_cache_of_an_ensemble_answers_without_any_step(base_url: str) -> None:
    before = counted(base_url, "only_ensemble", "plain", "last")
    for _ in range(2):
        ask(base_url, "only_ensemble", [1.0, 2.0])
    found = grown(base_url, before)
    assert (found["only_ensemble"][:2], found["plain"], found["last"]) == ([1, 1], [0, 0, 1], [0, 0, 1])


def test_the_cache_of_a_step_answers_the_step(base_url: str) -> None:
    before = counted(base_url, "only_step", "cached", "last")
    for _ in range(2):
        ask(base_url, "only_step", [3.0, 4.0])
    found = grown(base_url, before)
    assert (found["only_step"][:2], found["cached"], found["last"]) == ([0, 0], [1, 1, 1], [0, 0, 2])


def test_with_both_only_the_ensemble_has_a_hit(base_url: str) -> None:
    before = counted(base_url, "both", "cached", "last")
    for _ in range(2):
        ask(base_url, "both", [5.0, 6.0])
    found = grown(base_url, before)
    assert (found["both"][:2], found["cached"], found["last"]) == ([1, 1], [0, 1, 1], [0, 0, 1])


def test_responses_larger_than_the_cache_are_misses_and_no_errors(base_url: str) -> None:
    row = [0.5] * (CACHE_BYTES // 4 + 1)
    before = counted(base_url, "only_step", "cached")
    for _ in range(2):
        ask(base_url, "only_step", row)
    assert grown(base_url, before)["cached"] == [0, 2, 2]
