"""Decoupled steps in graphs with `when` and `each`, and `each` over the items of a streamed response, on a server with
Python models in processes.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc

from flowserve.testing.serve import Served, serving

pytestmark = pytest.mark.server

COUNT = """\
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "N").as_numpy()
            sender = request.get_response_sender()
            for k in range(int(rows[0, 0])):
                if rows[0, 0] == 9:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("nine is too many")), FINAL)
                    return
                out = pb_utils.Tensor("OUT", rows * 10 + k)
                several = pb_utils.Tensor("SEVERAL", np.arange(k + 1, dtype=np.int32).reshape(1, k + 1, 1))
                sender.send(pb_utils.InferenceResponse([out, several]))
            sender.send(flags=FINAL)
"""
NEGATE = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", -pb_utils.get_input_tensor_by_name(request, "N").as_numpy())]
            )
            for request in requests
        ]
"""
NUMBER = (
    'input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
)
SEVERAL = 'output { name: "SEVERAL" data_type: TYPE_INT32 dims: [ -1, 1 ] }'
DECOUPLED = f'backend: "python" max_batch_size: 8 model_transaction_policy {{ decoupled: true }} {NUMBER} {SEVERAL}'
GRAPHS = {
    # A number above 0 is counted, each other one is negated.
    "branches": """platform: "ensemble" max_batch_size: 8
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "GIVEN" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "count" model_version: -1 when { tensor: "N" above: 0 }
         input_map { key: "N" value: "N" } output_map { key: "OUT" value: "OUT" } }
  step { model_name: "negate" model_version: -1 when { tensor: "N" otherwise: true }
         input_map { key: "N" value: "N" } output_map { key: "OUT" value: "OUT" } }
  step { model_name: "negate" model_version: -1
         input_map { key: "N" value: "N" } output_map { key: "OUT" value: "GIVEN" } } }""",
    # Each number of a list is counted.
    "items": """platform: "ensemble" max_batch_size: 8
input { name: "NUMBERS" data_type: TYPE_INT32 dims: [ -1, 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1, 1 ] }
ensemble_scheduling {
  step { model_name: "count" model_version: -1 each { tensor: [ "NUMBERS" ] }
         input_map { key: "N" value: "NUMBERS" } output_map { key: "OUT" value: "counted" } }
  step { model_name: "negate" model_version: -1
         input_map { key: "N" value: "counted" } output_map { key: "OUT" value: "OUT" } } }""",
    # The items of each response are negated and gathered.
    "responses": """platform: "ensemble" max_batch_size: 8
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ -1, 1 ] }
ensemble_scheduling {
  step { model_name: "count" model_version: -1
         input_map { key: "N" value: "N" } output_map { key: "SEVERAL" value: "several" } }
  step { model_name: "negate" model_version: -1 each { tensor: [ "several" ] }
         input_map { key: "N" value: "several" } output_map { key: "OUT" value: "OUT" } } }""",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("row_streams")
    files = {"count": DECOUPLED, "negate": f'backend: "python" max_batch_size: 8 {NUMBER}', **GRAPHS}
    for name, config in files.items():
        (home / name / "1").mkdir(parents=True)
        (home / name / "config.pbtxt").write_text(config)
    (home / "count/1/model.py").write_text(COUNT)
    (home / "negate/1/model.py").write_text(NEGATE)
    with serving(home, "--allow-grpc", "true", "--grpc-port", "0") as one:
        yield one


def stream(served: Served, model: str, name: str, array: Any) -> list[Any]:
    """The responses to one request; an error as its text."""
    given = np.array(array, np.int32)
    tensor = triton_grpc.InferInput(name, [*given.shape], "INT32")
    tensor.set_data_from_numpy(given)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    found: list[Any] = []
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=30)
            if error is not None:
                return [*found, str(error)]
            response = result.get_response()
            if response.outputs:
                found.append({one.name: result.as_numpy(one.name).tolist() for one in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                return found


def outputs(found: list[Any], name: str = "OUT") -> list[Any]:
    return [one[name] for one in found]


def test_each_row_of_a_branch_has_its_own_responses(served: Served) -> None:
    assert outputs(stream(served, "branches", "N", [[3]])) == [[[30]], [[31]], [[32]]]
    assert outputs(stream(served, "branches", "N", [[-4]])) == [[[4]]]
    found = stream(served, "branches", "N", [[2], [-5], [0], [1]])
    by_row: dict[int, list[int]] = {}
    for one in found:  # a response has one row, and the other outputs are of that row
        by_row.setdefault(-one["GIVEN"][0][0], []).append(one["OUT"][0][0])
    assert by_row == {2: [20, 21], -5: [5], 0: [0], 1: [10]}


def test_each_item_has_its_own_responses(served: Served) -> None:
    found = outputs(stream(served, "items", "NUMBERS", [[[2], [0], [3]]]))
    assert sorted(found) == sorted([[[[-20]]], [[[-21]]], [[[-30]]], [[[-31]]], [[[-32]]]])
    assert found.index([[[-20]]]) < found.index([[[-21]]])
    assert outputs(stream(served, "items", "NUMBERS", [[[0]]])) == []
    assert outputs(stream(served, "items", "NUMBERS", np.zeros((1, 0, 1)))) == [[[]]]  # no item: one response


def test_the_items_of_a_streamed_response_are_gathered(served: Served) -> None:
    assert outputs(stream(served, "responses", "N", [[3]])) == [[[[0]]], [[[0], [-1]]], [[[0], [-1], [-2]]]]


def test_an_error_of_one_item_names_it_and_ends_its_request_only(served: Served) -> None:
    found = stream(served, "items", "NUMBERS", [[[1], [9]]])
    assert "nine is too many" in found[-1]
    assert "step 'count', item 1 of 2" in found[-1]
    assert outputs(stream(served, "items", "NUMBERS", [[[1]]])) == [[[[-10]]]]
