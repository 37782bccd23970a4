"""Instances as operators see them: their number, their warm-up, and their waits for resources."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import DidNotServe, Served
from tests.support.forked import serving

ONE = """
backend: "python"
max_batch_size: {limit}
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }} ]
{more}
"""

# A model that records its events, one file for each, and waits where the test requests it.
MODEL = """
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.diary = pathlib.Path(args["model_repository"], "diary")
        self.diary.mkdir(exist_ok=True)
        self.runs = 0
        self.write("open", "")

    def write(self, what, text):
        (self.diary / f"{self.name}.{what}").write_text(text)

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        numbers = [float(array.ravel()[0]) for array in given]
        self.runs += 1
        self.write(f"run{self.runs}", repr(numbers))
        for number in numbers:
            if number < 0:
                raise ValueError("less than nothing")
            if number >= 100:
                self.write(f"begins {number:g}", "")
                while not (self.diary / f"end {number:g}").exists():
                    time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in given]
"""

WARMUP = """
dynamic_batching { }
instance_group [ { count: 2 } ]
model_warmup [
  {
    name: "zeros" batch_size: 3 count: 2
    inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
  },
  { name: "random" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] random_data: true } } },
  { name: "skipped" inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } },
  { name: "file" batch_size: 2 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "five" } } }
]
"""
ASKS = 'instance_group [ {{ count: {count} rate_limiter {{ resources [ {{ name: "licence" count: {copies} }} ] }} }} ]'


def write_model(repository: Path, name: str, more: str = "", limit: int = 4) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(ONE.format(limit=limit, more=more))
    (folder / "1" / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_arithmetic: Callable[..., bytes]) -> Path:
    repository = tmp_path_factory.mktemp("instances")
    write_model(repository, "three", "instance_group [ { count: 3 } ]")
    write_model(repository, "watched", 'instance_group [ { name: "serves" }, { name: "spare" passive: true } ]')
    warm = write_model(repository, "warm", WARMUP)
    (warm / "warmup").mkdir()
    (warm / "warmup" / "five").write_bytes(struct.pack("<ff", 5, 6))  # the rest of a longer file is not read
    write_model(repository, "first", ASKS.format(count=2, copies=1))
    write_model(repository, "second", ASKS.format(count=1, copies=1))
    (repository / "onnx" / "1").mkdir(parents=True)
    (repository / "onnx" / "1" / "model.onnx").write_bytes(make_arithmetic("Add", 1))
    return repository


@pytest.fixture(scope="module")
def limited(folder: Path) -> Iterator[Served]:
    with serving(folder, "--rate-limit", "execution_count") as served:
        yield served


@pytest.fixture(scope="module")
def ask(limited: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(limited)


class Diary:
    """The events that the instances of one model recorded."""

    def __init__(self, repository: Path, model: str) -> None:
        self._folder = repository / model / "diary"

    def events(self, what: str) -> list[str]:
        return sorted(path.name for path in self._folder.glob(f"*.{what}*"))

    def runs(self, instance: str) -> list[list[float]]:
        """The numbers of each batch of an instance, in order."""
        files = sorted(self._folder.glob(f"{instance}.run*"), key=lambda path: int(path.suffix.removeprefix(".run")))
        return [json.loads(path.read_text()) for path in files]

    def let_end(self, number: int) -> None:
        (self._folder / f"end {number}").touch()


def test_the_fourth_request_waits_for_the_first_of_three_instances(ask: Any, folder: Path) -> None:
    diary = Diary(folder, "three")
    with ThreadPoolExecutor(1) as thread:
        requests = [ask.infer_request("three", [[number]]) for number in (101, 102, 103, 104)]
        answers = thread.submit(ask.together, requests)
        ask.until(lambda: len(diary.events("begins")) == 3, "three run at once")
        ask.until(lambda: ask.waiting("three") == 1, "the fourth waits")
        began = {int(event.split()[-1]) for event in diary.events("begins")}
        (fourth,) = {101, 102, 103, 104} - began
        diary.let_end(min(began))
        ask.until(lambda: len(diary.events("begins")) == 4, "the fourth runs in the place of the first to end")
        assert ask.waiting("three") == 0
        for number in (*began, fourth):
            diary.let_end(number)
        assert [answer.status for answer in answers.result()] == [200] * 4


def test_sequential_requests_are_distributed_over_the_instances(ask: Any, folder: Path) -> None:
    diary = Diary(folder, "three")
    names = [f"three_0_{number}" for number in range(3)]
    before = [len(diary.runs(name)) for name in names]
    for number in range(9):
        assert ask.infer("three", [[number]]).data == [number]
    assert [len(diary.runs(name)) - seen for name, seen in zip(names, before, strict=True)] == [3, 3, 3]


def test_the_configuration_shows_the_number_of_instances(ask: Any) -> None:
    (group,) = ask.get("/v2/models/onnx/config").json["instance_group"]
    assert (group["name"], group["count"], group["kind"]) == ("onnx", 2, "KIND_CPU")
    (group,) = ask.get("/v2/models/warm/config").json["instance_group"]
    assert (group["name"], group["count"], group["kind"]) == ("warm_0", 2, "KIND_CPU")


def test_a_passive_instance_is_initialised_and_gets_no_work(ask: Any, folder: Path) -> None:
    for number in range(6):
        assert ask.infer("watched", [[number]]).data == [number]
    diary = Diary(folder, "watched")
    assert diary.events("open") == ["serves_0.open", "spare_0.open"]
    assert len(diary.runs("serves_0")) == 6
    assert diary.runs("spare_0") == []


def test_every_instance_is_warmed_up_before_the_model_is_ready_without_statistics(ask: Any, folder: Path) -> None:
    diary = Diary(folder, "warm")
    for instance in ("warm_0_0", "warm_0_1"):
        zeros, again, random, file = diary.runs(instance)
        assert zeros == again == [0, 0, 0]
        assert len(random) == 1
        assert 0 <= random[0] < 1
        assert file == [5, 5]
    row = ask.statistics("warm")
    assert row["inference_count"] == row["execution_count"] == row["inference_stats"]["success"]["count"] == 0
    assert row["batch_stats"] == []


def test_a_warmup_that_fails_fails_its_model(tmp_path: Path) -> None:
    expected = {
        "short": "input 'IN' needs 4 bytes, and file 'short/warmup/data' has 3",
        "none": "warmup file 'data' of input 'IN' does not exist for none (put it into none/warmup/)",
        "minus": "failed to run warmup sample 's': Failed to process the request(s) for model",
    }
    sample = 'inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "data" } }'
    for name, content in {"short": b"123", "none": None, "minus": struct.pack("<f", -1)}.items():
        model = write_model(tmp_path, name, f'model_warmup {{ name: "s" batch_size: 1 {sample} }}')
        (model / "warmup").mkdir()
        if content is not None:
            (model / "warmup" / "data").write_bytes(content)
    with pytest.raises(DidNotServe) as ended, serving(tmp_path):
        pass
    assert ended.value.status == 1
    for name, said in expected.items():
        assert any(name in line and said in line for line in ended.value.log.splitlines()), ended.value.log


def test_models_that_share_a_resource_run_one_after_the_other(ask: Any, folder: Path) -> None:
    diaries = {number: Diary(folder, "first" if number < 203 else "second") for number in (201, 202, 203)}

    def begun() -> set[int]:
        return {number for number, diary in diaries.items() if diary.events(f"begins {number}")}

    with ThreadPoolExecutor(1) as thread:
        requests = [ask.infer_request("first" if number < 203 else "second", [[number]]) for number in diaries]
        answers = thread.submit(ask.together, requests)
        ended: set[int] = set()
        while len(ended) < 3:
            ask.until(lambda: len(begun() - ended) == 1, "one runs")
            ask.until(lambda: ask.waiting("first") + ask.waiting("second") == 2 - len(ended), "the others wait")
            (runs,) = begun() - ended
            ended.add(runs)
            diaries[runs].let_end(runs)
        assert [answer.status for answer in answers.result()] == [200] * 3


@pytest.mark.fault("R9")
def test_a_model_that_could_never_run_is_refused_at_its_line(tmp_path: Path, wire_to: Callable[[Served], Any]) -> None:
    write_model(tmp_path, "greedy", ASKS.format(count=1, copies=3))
    write_model(tmp_path, "modest", ASKS.format(count=1, copies=2))
    limits = ("--rate-limit", "execution_count", "--rate-limit-resource", "licence:2")
    with pytest.raises(DidNotServe) as ended, serving(tmp_path, *limits):
        pass
    assert ended.value.status == 1
    assert "1 of 2 models failed to load" in ended.value.log
    assert (
        'greedy/config.pbtxt:6:29: Resource count for "licence" is limited to 2 which will prevent scheduling of one or'
        " more model instances, the minimum required count is 3 (start with --rate-limit-resource=licence:3, or ask for"
        " less)"
    ) in ended.value.log
    with serving(tmp_path, *limits, "--exit-on-error", "false") as served:
        assert wire_to(served).infer("modest", [[1]]).status == 200
        assert wire_to(served).infer("greedy", [[1]]).status == 503
        assert wire_to(served).get("/v2/health/ready").status != 200
    with serving(tmp_path, *limits[2:]) as served:  # without the limiter nothing is limited
        assert wire_to(served).infer("greedy", [[1]]).status == 200
        assert "--rate-limit-resource has no effect without --rate-limit execution_count" in served.log
