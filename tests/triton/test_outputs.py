"""Outputs of a `model.py` reach clients and later steps as the model returned them, wherever the model runs.

All expectations but those marked hold for Triton too.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from flowserve.testing.serve import Served
from tests.support.forked import serving

PLACES = ("process", "thread", "inline")  # Triton ignores the parameter
HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils


def tensor(name, array):
    return pb_utils.Tensor(name, array)


class TritonPythonModel:
"""
ANSWER = """
def execute(self, requests):
    responses = []
    for request in requests:
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        responses.append(pb_utils.InferenceResponse({outputs}))
    return responses
"""
SENDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        sender.send(
            pb_utils.InferenceResponse([tensor("Y", np.ones(1, np.float32))]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
    raise RuntimeError("raised afterwards")
"""
STREAMS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for value in (3, 0):
            outputs = [tensor("Z", np.ones(1, np.float32)), tensor("Y", np.arange(value))]
            sender.send(pb_utils.InferenceResponse(outputs if value else outputs[::-1]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COMPLETES = """
@staticmethod
def auto_complete_config(auto_complete_model_config):
    auto_complete_model_config.set_max_batch_size(16)
    return auto_complete_model_config
"""
X, Y = ("X", "FP32", "-1"), ("Y", "FP32", "4")
ABC = [(name, "FP32", "1") for name in "ABC"]


class Model(NamedTuple):
    """`outputs`: the expression of the response's outputs; or `code`: the methods of the class."""

    outputs: str = "[tensor('Y', x)]"
    code: str = ""
    declared: Sequence[tuple[str, str, str]] = (Y,)
    inputs: Sequence[tuple[str, str, str]] = (X,)
    rows: int = 0


MODELS: Mapping[str, Model] = {
    "dtype": Model("[tensor('Y', np.arange(3, dtype=np.int64))]"),
    "strings": Model("[tensor('Y', np.array(['a', 'bc'], dtype=object))]"),
    "scalar": Model("[tensor('Y', np.array(3.5, np.float32))]"),
    "nothing": Model("[tensor('Y', np.array([]))]"),
    "nothing_of_rows": Model("[tensor('Y', np.array([]))]", rows=8),
    "no_rows": Model("[tensor('Y', np.array([], np.float32))]", rows=8),
    "narrow": Model("[tensor('Y', x[:, :2].astype(np.int32))]", rows=8),
    "mixed": Model("[tensor('Y', x if x[0, 0] else x.astype(np.float64))]", rows=8),
    "missing": Model("[tensor('Y', x)]", declared=[Y, ("Z", "FP32", "-1")]),
    "order": Model("[tensor(name, np.ones(1, np.float32)) for name in 'CAB']", declared=ABC),
    "tuple": Model(code=ANSWER.format(outputs="[tensor('Y', x)]").replace("return responses", "return (*responses,)")),
    "too_few": Model(code="def execute(self, requests):\n    return []"),
    "sends_and_raises": Model(code=SENDS, declared=[("Y", "FP32", "1")]),
    "streams": Model(code=STREAMS, declared=[Y, ("Z", "FP32", "1")]),
    "takes_four": Model(inputs=[("X", "FP32", "4")]),
    "takes_any": Model(declared=[("Y", "FP32", "-1")]),
    "takes_integers": Model(inputs=[("X", "INT64", "-1")], declared=[("Y", "INT64", "-1")]),
    "cut": Model("[tensor('Y', x[:, :2])]", rows=8),
    "row_takes_four": Model(rows=8, inputs=[("X", "FP32", "4")]),
    "row_takes_any": Model(rows=8, declared=[("Y", "FP32", "-1")]),
}
# Of models, the first reads X and each next one reads the output of the one before.
ENSEMBLES: Mapping[str, tuple[int, str, Sequence[tuple[str, str]]]] = {
    "e_refused_type": (0, "-1", [("dtype", "Y"), ("takes_any", "Y")]),
    "e_taken_out": (0, "-1", [("dtype", "Y")]),
    "e_refused_shape": (0, "4", [("any_four", "Y"), ("takes_four", "Y")]),
    "e_taken_shape": (0, "-1", [("any_four", "Y"), ("takes_any", "Y")]),
    "e_streams": (0, "-1", [("streams", "Y"), ("takes_any", "Y")]),
    "e_missing": (0, "-1", [("missing", "Z"), ("takes_any", "Y")]),
    "r_refused": (8, "4", [("cut", "Y"), ("row_takes_four", "Y")]),
    "r_no_rows": (8, "-1", [("no_rows", "Y"), ("row_takes_any", "Y")]),
    "r_taken": (8, "-1", [("cut", "Y"), ("row_takes_any", "Y")]),
}


def write_models(repository: Path) -> None:
    """Each model for each place, and the ensembles of each place."""
    models = {**MODELS, "any_four": Model()}  # configured as four values, returns as many as it gets
    for place in PLACES:
        for name, model in models.items():
            code = model.code or ANSWER.format(outputs=model.outputs)
            where = "thread" if (name, place) == ("streams", "inline") else place  # it may not run inline
            config = f'backend: "python"\nparameters {{ key: "execution" value {{ string_value: "{where}" }} }}\n'
            config += "dynamic_batching { max_queue_delay_microseconds: 20000 }\n" if name == "mixed" else ""
            config += "model_transaction_policy { decoupled: true }\n" if name == "streams" else ""
            config += "dynamic_batching { }\n" if model.rows and name != "mixed" else ""
            _write(repository, f"{name}_{place}", config, model, code)
        for name, (rows, dims, steps) in ENSEMBLES.items():
            config = 'platform: "ensemble"\nensemble_scheduling { step [\n'
            read, written = "X", ""
            wired = []
            for i, (step, output) in enumerate(steps):
                written = "Y" if i == len(steps) - 1 else f"between{i}"
                maps = f'input_map {{ key: "X" value: "{read}" }} output_map {{ key: "{output}" value: "{written}" }}'
                wired.append(f'{{ model_name: "{step}_{place}" model_version: -1 {maps} }}')
                read = written
            _write(
                repository,
                f"{name}_{place}",
                config + ",\n".join(wired) + "\n] }\n",
                Model(declared=[("Y", "FP32", dims)], rows=rows),
                "",
            )
    _write(
        repository,
        "completes",
        'backend: "python"\n',
        Model(rows=2),
        COMPLETES + ANSWER.format(outputs=Model().outputs),
    )


def _write(repository: Path, name: str, config: str, model: Model, code: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    text = f'name: "{name}"\nmax_batch_size: {model.rows}\n{config}'
    for side, tensors in (("input", model.inputs), ("output", model.declared)):
        for tensor, dtype, dims in tensors:
            text += f'{side} [ {{ name: "{tensor}" data_type: TYPE_{dtype} dims: [ {dims} ] }} ]\n'
    (repository / name / "config.pbtxt").write_text(text)
    if code:
        (repository / name / "1" / "model.py").write_text(HEAD + indent(code, "    "))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, on_triton: bool) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "models"
    write_models(folder)
    if not on_triton:  # it has no cache without an option
        code = ANSWER.format(outputs="[tensor('B', np.arange(2)), tensor('A', x)]")
        config = 'backend: "python"\nresponse_cache { enable: true }\n'
        _write(folder, "cached", config, Model(declared=[("A", "FP32", "-1"), ("B", "FP32", "4")]), code)
    return folder


@pytest.fixture(scope="module")
def base_url(on_triton: bool, triton_like: Callable[..., str], repository: Path, request: pytest.FixtureRequest) -> str:
    if on_triton:
        return triton_like(repository)
    served: Served = request.getfixturevalue("own")  # one server for all tests
    return served.base_url


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(base_url: str, model: str, x: Any = (1, 2, 3, 4), outputs: Sequence[str] = ()) -> tuple[int, Any]:
    """Status, and the outputs as (name, datatype, shape, data) or the error."""
    array = np.array(x, np.float32)
    given = {"name": "X", "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
    body = {"inputs": [given], **({"outputs": [{"name": name} for name in outputs]} if outputs else {})}
    answer = httpx.post(f"{base_url}/v2/models/{model}/infer", json=body, timeout=30, verify=False)
    found = answer.json()
    if "error" in found:
        return answer.status_code, found["error"]
    return answer.status_code, [(o["name"], o["datatype"], o["shape"], o["data"]) for o in found["outputs"]]


@pytest.mark.server
@pytest.mark.parametrize(
    ("model", "x", "returned"),
    [
        ("dtype", [1], ("INT64", [3], [0, 1, 2])),
        ("strings", [1], ("BYTES", [2], ["a", "bc"])),
        ("scalar", [1], ("FP32", [], [3.5])),
        ("nothing", [1], ("FP64", [0], [])),
        ("nothing_of_rows", [[1], [2]], ("FP64", [0], [])),
        ("narrow", [[1, 2, 3], [4, 5, 6]], ("INT32", [2, 2], [1, 2, 4, 5])),
        ("e_taken_out", [1], ("INT64", [3], [0, 1, 2])),
        ("e_taken_shape", [1, 2, 3], ("FP32", [3], [1, 2, 3])),
        ("r_taken", [[1, 2, 3]], ("FP32", [1, 2], [1, 2])),
    ],
)
def test_an_output_is_returned_as_the_model_made_it(
    base_url: str, place: str, model: str, x: Any, returned: tuple[Any, ...]
) -> None:
    for _ in range(2):  # the second runs on a route, where there is one
        assert ask(base_url, f"{model}_{place}", x) == (200, [("Y", *returned)])


@pytest.mark.server
@pytest.mark.parametrize(
    ("model", "x", "texts"),
    [
        ("e_refused_type", [1], ("inference input 'X' data-type is 'INT64', but model 'takes_any", "expects 'FP32'")),
        ("e_refused_shape", [1, 2], ("unexpected shape for input 'X' for model 'takes_four", "Expected [4], got [2]")),
        (
            "r_refused",
            [[1, 2, 3]],
            ("unexpected shape for input 'X' for model 'row_takes", "Expected [-1,4], got [1,2]"),
        ),
        ("e_missing", [1], ("expected 1 inputs but got 0 inputs", "missing required input(s) ['X']. Please provide")),
    ],
)
def test_a_step_that_cannot_use_an_output_refuses_the_request(
    base_url: str, place: str, model: str, x: Any, texts: Sequence[str], on_triton: bool
) -> None:
    # Without an input the step has no request, as on Triton. Another output than configured is the model's failure.
    expected = 400 if on_triton or model == "e_missing" else 500
    for _ in range(2):
        status, error = ask(base_url, f"{model}_{place}", x)
        assert status == expected
        assert error.startswith(f"in ensemble '{model}_{place}', ")
        assert [text for text in texts if text not in error] == []


@pytest.mark.server
def test_the_error_of_a_step_names_the_model_that_returned_something_else(
    base_url: str, place: str, on_triton: bool
) -> None:
    if on_triton:
        pytest.skip("the producer is named by flowserve")
    status, error = ask(base_url, f"r_no_rows_{place}", [[1, 2]])
    assert status == 500
    returned = f"model 'no_rows_{place}' returned output 'Y' as FP32 of shape [0]"
    assert "got [0]" in error
    assert f"({returned}, its configuration promises FP32 of shape [-1,4])" in error


@pytest.mark.server
def test_a_missing_output_is_missing_from_the_response(base_url: str, place: str) -> None:
    made = ("Y", "FP32", [4], [1, 2, 3, 4])
    assert ask(base_url, f"missing_{place}") == (200, [made])
    assert ask(base_url, f"missing_{place}", outputs=["Z", "Y"]) == (200, [made])
    assert ask(base_url, f"missing_{place}", outputs=["Z"]) == (200, [])


@pytest.mark.server
@pytest.mark.parametrize(("outputs", "order"), [((), "CAB"), (("B", "C", "A"), "CAB"), (("B", "C"), "CB"), ("A", "A")])
def test_outputs_have_the_models_order_whatever_is_requested(
    base_url: str, place: str, outputs: Sequence[str], order: str
) -> None:
    status, found = ask(base_url, f"order_{place}", outputs=outputs)
    assert (status, [name for name, *_ in found]) == (200, [*order])


@pytest.mark.server
def test_only_a_list_of_one_response_for_each_request_is_accepted(base_url: str, place: str) -> None:
    status, error = ask(base_url, f"tuple_{place}")
    assert status == 500
    assert "Expected a list in the execute return, found type '<class 'tuple'>'." in error
    status, error = ask(base_url, f"too_few_{place}")
    assert status == 500
    assert "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0" in error


@pytest.mark.server
def test_a_response_that_was_sent_before_the_model_raised_counts(base_url: str, place: str, on_triton: bool) -> None:
    if on_triton and place != "process":
        pytest.skip("Triton's stub process ends after it, and some later requests wait for ever")
    assert ask(base_url, f"sends_and_raises_{place}") == (200, [("Y", "FP32", [1], [1])])


@pytest.mark.server
def test_members_of_a_batch_may_have_different_types(base_url: str, place: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda value: ask(base_url, f"mixed_{place}", [[value] * 2]), range(4)))
    assert found == [(200, [("Y", "FP64" if value == 0 else "FP32", [1, 2], [value, value])]) for value in range(4)]


@pytest.mark.server
def test_a_model_may_raise_the_batch_size_of_its_file(base_url: str) -> None:
    assert ask(base_url, "completes", np.ones((10, 4))) == (200, [("Y", "FP32", [10, 4], [1] * 40)])


# --------------------------------------------------------------------------------------------------- flowserve's own


@pytest.fixture(scope="module")
def own(on_triton: bool, repository: Path) -> Iterator[Served]:
    if on_triton:
        pytest.skip("checks flowserve's log and metrics")
    options = "--allow-grpc", "true", "--grpc-port", "0", "--cache-config", "local,size=1000000"
    with serving(repository, *options) as served:
        yield served


@pytest.fixture(scope="module")
def strict(on_triton: bool, repository: Path) -> Iterator[Served]:
    if on_triton:
        pytest.skip("an option of flowserve")
    with serving(repository, "--strict-outputs", "true") as served:
        yield served


def missing_outputs(served: Served, model: str) -> int:
    metrics = httpx.get(f"{served.base_url}/metrics", verify=False).text
    name = f'flowserve_missing_outputs_total{{model="{model}",version="1"}} '
    (value,) = [line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name)]
    return int(value)


@pytest.mark.server
def test_each_difference_is_logged_once_and_missing_outputs_are_counted(own: Served, place: str) -> None:
    before = missing_outputs(own, f"missing_{place}")
    for _ in range(3):
        ask(own.base_url, f"dtype_{place}")
        ask(own.base_url, f"missing_{place}")
    assert (
        own.log.count(f"model 'dtype_{place}', output 'Y': the configuration promises FP32, the model answered int64")
        == 1
    )
    assert own.log.count(f"model 'missing_{place}' left out output 'Z', which its configuration has") == 1
    assert missing_outputs(own, f"missing_{place}") - before == 3
    assert missing_outputs(own, f"dtype_{place}") == 0


@pytest.mark.server
def test_each_500_is_logged_with_its_cause(own: Served, place: str) -> None:
    ask(own.base_url, f"too_few_{place}")
    assert f"a request to 'too_few_{place}' failed: Failed to process the request(s) for model instance" in own.log
    text = f"model instance 'sends_and_raises_{place}_0', message: RuntimeError: raised afterwards (model "
    before = own.log.count(text)
    ask(own.base_url, f"sends_and_raises_{place}")
    assert own.log.count(text) == before + 1


@pytest.mark.server
def test_grpc_returns_outputs_as_http_does(own: Served, place: str) -> None:
    client = tritonclient.grpc.InferenceServerClient(own.grpc_address)
    given = tritonclient.grpc.InferInput("X", [4], "FP32")
    given.set_data_from_numpy(np.arange(4, dtype=np.float32))
    found = client.infer(f"dtype_{place}", [given])
    assert found.as_numpy("Y").dtype == np.int64
    order = client.infer(f"order_{place}", [given]).get_response()
    assert [output.name for output in order.outputs] == ["C", "A", "B"]
    with pytest.raises(tritonclient.grpc.InferenceServerException, match="data-type is 'INT64'") as refused:
        client.infer(f"e_refused_type_{place}", [given])
    assert refused.value.status() == "StatusCode.INTERNAL"
    client.close()


@pytest.mark.server
def test_responses_of_a_decoupled_model_are_passed_on_too(own: Served, place: str) -> None:
    found, refused = (stream(own, f"{name}_{place}") for name in ("streams", "e_streams"))
    assert [[(o.name, o.datatype, [*o.shape]) for o in one.get_response().outputs] for one, _ in found] == [
        [("Z", "FP32", [1]), ("Y", "INT64", [3])],
        [("Y", "INT64", [0]), ("Z", "FP32", [1])],
    ]
    ((_, error),) = refused
    assert f"inference input 'X' data-type is 'INT64', but model 'takes_any_{place}' expects 'FP32'" in str(error)


def stream(served: Served, model: str) -> list[tuple[Any, Any]]:
    """The responses and errors of one request."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    given = tritonclient.grpc.InferInput("X", [1], "FP32")
    given.set_data_from_numpy(np.ones(1, np.float32))
    client = tritonclient.grpc.InferenceServerClient(served.grpc_address)
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, [given], enable_empty_final_response=True)
    found: list[tuple[Any, Any]] = []
    while True:
        result, error = answers.get(timeout=20)
        is_empty = error is None and not result.get_response().outputs
        if not is_empty:
            found.append((result, error))
        if error is not None or is_empty:
            client.stop_stream()
            client.close()
            return found


@pytest.mark.server
def test_a_cached_response_has_the_types_and_the_order_of_the_first(own: Served) -> None:
    made = [("B", "INT64", [2], [0, 1]), ("A", "FP32", [1], [5])]
    assert [ask(own.base_url, "cached", [5]) for _ in range(2)] == [(200, made)] * 2
    statistics = httpx.get(f"{own.base_url}/v2/models/cached/stats", verify=False).json()["model_stats"][0]
    assert statistics["inference_stats"]["cache_hit"]["count"] == 1


@pytest.mark.server
def test_strict_outputs_refuse_what_differs_and_name_the_step(strict: Served, place: str) -> None:
    for model in ("dtype", "strings", "scalar", "nothing"):
        status, error = ask(strict.base_url, f"{model}_{place}")
        assert status == 500
        assert error.startswith(f"model '{model}_{place}', output 'Y': the configuration promises ")
    status, error = ask(strict.base_url, f"e_missing_{place}")
    assert status == 500
    assert (
        f"model 'missing_{place}' returned no output 'Z', which its configuration has (step 'missing_{place}'" in error
    )
    assert ask(strict.base_url, f"missing_{place}", outputs=["Y"])[0] == 200
