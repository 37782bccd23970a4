"""Graphs whose steps run for some rows or for each item, on a server with Python models in processes."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http

from flowserve.testing.serve import Served
from tests.support.forked import serving

pytestmark = pytest.mark.server

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            made = self.compute(**tensors)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()]))
        return answers

"""
DETECT = """\
    def compute(self, IMAGE):
        count = int(IMAGE[:, 0].max())
        crops = np.arange(len(IMAGE) * count * 3, dtype=np.float32).reshape(len(IMAGE), count, 3)
        kinds = np.tile((np.arange(count) % 3)[None, :, None], (len(IMAGE), 1, 1)).astype(np.int32)
        return {"CROPS": crops, "KIND": kinds, "COUNT": IMAGE[:, :1].astype(np.int32), "ANY": IMAGE[:, :1] > 0}
"""
NAME = """\
    def compute(self, X):
        if (X > 250).any():
            raise ValueError("too bright")
        return {"LABEL": (X.sum(axis=1, keepdims=True) + 100).astype(np.int32)}
"""
CALL = """\
    def compute(self, IMAGE):
        request = pb_utils.InferenceRequest(
            model_name="people", requested_output_names=["LABELS"], inputs=[pb_utils.Tensor("IMAGE", IMAGE)]
        )
        answer = request.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        labels = pb_utils.get_output_tensor_by_name(answer, "LABELS").as_numpy()
        return {"LABELS": labels}
"""


def tensors(side: str, **specs: str) -> str:
    return "\n".join(
        f'{side} {{ name: "{name}" data_type: TYPE_{spec.split("[")[0]} dims: [{spec.split("[")[1]} }}'
        for name, spec in specs.items()
    )


def write(home: Path, config: str, program: str = "") -> None:
    (home / "1").mkdir(parents=True)
    (home / "config.pbtxt").write_text(config)
    if program:
        (home / "1/model.py").write_text(MODEL + program)


FIND = """
  step { model_name: "detect" model_version: -1 input_map { key: "IMAGE" value: "IMAGE" }
         output_map { key: "CROPS" value: "crops" } output_map { key: "KIND" value: "kind" }
         output_map { key: "COUNT" value: "count" } }"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("rows")
    batching = 'backend: "python" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }\n'
    found = tensors("output", CROPS="FP32[-1, 3]", KIND="INT32[-1, 1]", COUNT="INT32[1]", ANY="BOOL[1]")
    write(home / "detect", batching + tensors("input", IMAGE="FP32[4]") + found, DETECT)
    write(home / "name", batching + tensors("input", X="FP32[3]") + tensors("output", LABEL="INT32[1]"), NAME)
    labels = tensors("output", LABELS="INT32[-1, 1]")
    write(home / "caller", batching + tensors("input", IMAGE="FP32[4]") + labels, CALL)
    graph = 'platform: "ensemble" max_batch_size: 8\n' + tensors("input", IMAGE="FP32[4]")
    each = 'each { tensor: [ "crops", "kind" ] count: "count" at_most: 100 }'
    name = 'step { model_name: "name" model_version: -1 input_map { key: "X" value: "crops" }'
    write(
        home / "people",
        f"""{graph} {tensors("output", LABELS="INT32[-1, 1]", known="BOOL[-1, 1]")}
ensemble_scheduling {{ {FIND}
  {name} output_map {{ key: "LABEL" value: "LABELS" }} {each} when {{ tensor: "kind" equals: [ 0, 2 ] }} }}
  fill {{ tensor: "LABELS" value: -1 present: "known" }} }}""",
    )
    write(
        home / "early",
        f"""{graph.replace("max_batch_size: 8", "max_batch_size: 1")}
{tensors("output", COUNT="INT32[1]", LABEL="INT32[1]")}
ensemble_scheduling {{
  step {{ model_name: "detect" model_version: -1 input_map {{ key: "IMAGE" value: "IMAGE" }}
         output_map {{ key: "COUNT" value: "COUNT" }} output_map {{ key: "ANY" value: "any" }} }}
  step {{ model_name: "name" model_version: -1 when {{ tensor: "any" }} name: "first"
         input_map {{ key: "X" value: "three" }} output_map {{ key: "LABEL" value: "LABEL" }} }}
  step {{ model_name: "cut" model_version: -1 when {{ tensor: "any" }}
         input_map {{ key: "IMAGE" value: "IMAGE" }} output_map {{ key: "X" value: "three" }} }} }}""",
    )
    cut = "    def compute(self, IMAGE):\n        return {'X': IMAGE[:, :3]}\n"
    write(home / "cut", batching + tensors("input", IMAGE="FP32[4]") + tensors("output", X="FP32[3]"), cut)
    return home


def test_equal_items_that_a_full_queue_holds_back_are_looked_up_again(repository: Path, tmp_path: Path) -> None:
    for name in ("detect", "people"):
        (tmp_path / name).symlink_to(repository / name)
    config = (repository / "name/config.pbtxt").read_text().replace("max_batch_size: 8", "max_batch_size: 1")
    bounded = "dynamic_batching { default_queue_policy { max_queue_size: 3 }"
    config = config.replace("dynamic_batching {", bounded) + "response_cache { enable: true }"
    write(tmp_path / "name", config, NAME)
    with serving(tmp_path, "--cache-config", "local,size=1000000") as one, ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda number: infer(one, "people", image(20 + number % 3)), range(24))]
    for number, answer in enumerate(found):
        if answer.get("status") == 503:  # the queue was full of other requests' items
            continue
        assert answer["LABELS"] == labels_of(20 + number % 3), answer
    assert sum("LABELS" in answer for answer in found) > 4


def test_each_part_of_a_step_has_a_cached_response_of_its_own(repository: Path, tmp_path: Path) -> None:
    for name in ("detect", "people"):
        (tmp_path / name).symlink_to(repository / name)
    config = (repository / "name/config.pbtxt").read_text().replace("max_batch_size: 8", "max_batch_size: 3")
    write(tmp_path / "name", config + "response_cache { enable: true }", NAME)
    with serving(tmp_path, "--cache-config", "local,size=1000000") as one:
        for _ in range(2):  # the second time from the cache
            assert infer(one, "people", image(20))["LABELS"] == labels_of(20)


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    with serving(repository, "--allow-grpc", "true", "--grpc-port", "0") as one:
        yield one


def infer(served: Served, model: str, rows: Any, **more: Any) -> dict[str, Any]:
    """The outputs over HTTP in JSON, by name; {"error": ...} for a refusal."""
    array = np.asarray(rows, np.float32)
    body = {"inputs": [{"name": "IMAGE", "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}]}
    request = urllib.request.Request(
        f"http://{served.address}/v2/models/{model}/infer", json.dumps(body | more).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]).tolist() for one in answer["outputs"]}


def labels_of(count: int) -> list[list[list[int]]]:
    """What "people" answers for that many crops of one image: their sums; a crop of the second kind has none."""
    return [[[100 + 9 * i + 3 if i % 3 != 1 else -1] for i in range(count)]]


def image(count: int, number: float = 0.0) -> list[list[float]]:
    return [[count, number, 0, 0]]


def test_items_are_labelled_gathered_and_filled(served: Served) -> None:
    assert infer(served, "people", image(4)) == {
        "LABELS": [[[103], [-1], [121], [130]]],
        "known": [[[True], [False], [True], [True]]],
    }
    assert infer(served, "people", image(0)) == {"LABELS": [[]], "known": [[]]}


def test_rows_of_one_request_have_their_own_items(served: Served) -> None:
    found = infer(served, "people", [[3, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert found["known"] == [
        [[True], [False], [True]],
        [[False], [False], [False]],
        [[True], [False], [False]],
    ]
    assert np.shape(found["LABELS"]) == (3, 3, 1)


def test_clients_of_triton_get_the_same_over_both_protocols(served: Served) -> None:
    given = triton_http.InferInput("IMAGE", [1, 4], "FP32")
    given.set_data_from_numpy(np.array(image(4), np.float32))
    with triton_http.InferenceServerClient(served.address) as client:
        by_http = client.infer("people", [given]).as_numpy("LABELS")
        config = client.get_model_config("people")["ensemble_scheduling"]["step"][1]
        assert config["each"] == {"tensor": ["crops", "kind"], "count": "count", "at_most": 100}
    asked = triton_grpc.InferInput("IMAGE", [1, 4], "FP32")
    asked.set_data_from_numpy(np.array(image(4), np.float32))
    with triton_grpc.InferenceServerClient(served.grpc_address) as other:
        by_grpc = other.infer("people", [asked]).as_numpy("LABELS")
    assert by_http.tolist() == by_grpc.tolist() == [[[103], [-1], [121], [130]]]


def test_an_output_of_a_branch_that_was_not_taken_is_left_out(served: Served) -> None:
    assert infer(served, "early", image(2, 5)) == {"COUNT": [[2]], "LABEL": [[107]]}
    assert infer(served, "early", image(0)) == {"COUNT": [[0]]}
    assert "left out output" not in served.log


def test_too_many_items_and_a_failed_item_are_refused_with_the_place(served: Served) -> None:
    many = infer(served, "people", image(101))
    assert many["status"] == 400
    assert (
        "the request has 101 items, at most 100 are accepted (`each crops, kind` at people/config.pbtxt:"
        in (many["error"])
    )
    failed = infer(served, "people", image(100))
    assert failed["status"] == 500
    assert "ValueError: too bright" in failed["error"]
    assert re.search(r"\(step 'name', items \d+ to \d+ of 100 at people/config.pbtxt:\d+", failed["error"])
    assert infer(served, "people", image(1))["known"] == [[[True]]]


def test_a_model_calls_a_graph_with_items(served: Served) -> None:
    assert infer(served, "caller", image(4)) == {"LABELS": [[[103], [-1], [121], [130]]]}
    failed = infer(served, "caller", image(101))
    assert "the request has 101 items" in failed["error"]


def test_only_what_a_requested_output_needs_runs(served: Served) -> None:
    before = statistics(served, "name")
    assert infer(served, "early", image(3, 1), outputs=[{"name": "COUNT"}]) == {"COUNT": [[3]]}
    assert statistics(served, "name") == before


def statistics(served: Served, model: str) -> int:
    with urllib.request.urlopen(f"http://{served.address}/v2/models/{model}/stats", timeout=30) as response:
        count: int = json.load(response)["model_stats"][0]["inference_count"]
        return count


def test_items_of_many_clients_share_batches_and_no_answer_is_mixed_up(served: Served) -> None:
    wrong: list[Any] = []
    before = statistics(served, "name"), executions(served, "name")

    def client(number: int) -> None:
        for turn in range(10):
            count = (number * 7 + turn) % 12
            found = infer(served, "people", image(count))
            labels = [[103 + 9 * i if i % 3 != 1 else -1] for i in range(count)]
            if found.get("LABELS") != [labels]:
                wrong.append((count, found))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    rows = statistics(served, "name") - before[0]
    assert rows / (executions(served, "name") - before[1]) > 2


def executions(served: Served, model: str) -> int:
    with urllib.request.urlopen(f"http://{served.address}/v2/models/{model}/stats", timeout=30) as response:
        count: int = json.load(response)["model_stats"][0]["execution_count"]
        return count


def test_what_is_skipped_and_taken_is_counted(served: Served) -> None:
    infer(served, "early", image(0))
    infer(served, "people", image(3))
    with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert re.search(r'flowserve_node_skipped_total{graph="early",node="first",version="1"} [1-9]', text)
    assert re.search(
        r'flowserve_space_rows_total{graph="people",space="when kind = 0 or 2",taken="true",version="1"} [1-9]', text
    )
    assert re.search(
        r'flowserve_space_items_bucket{graph="people",le="4",space="each crops, kind",version="1"} \d', text
    )
    request = urllib.request.Request(
        f"http://{served.address}/v2/models/early/infer",
        json.dumps({"inputs": [{"name": "IMAGE", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}).encode(),
        {"flowserve-timing": "1"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert 'first.skipped;desc="no row passed any"' in response.headers["Server-Timing"]
