"""Outputs of any shape, also where a model has a batch dimension and the first one is not the number of rows: over HTTP
and gRPC, through BLS, the response cache and classification, and from step to step of an ensemble.

All expectations but those marked hold for Triton too. Each model returns the array that its input numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

PLACES = ("process", "thread", "inline")  # Triton ignores the option
OPTIONS = ("--cache-config=local,size=1000000", "--allow-grpc=true")
# What the models return, by the number that their input has.
RETURNED: dict[str, Any] = {
    "scalar": np.array(3.5, np.float32),
    "one": np.ones(1, np.float32),
    "none": np.zeros(0, np.float32),
    "five": np.arange(5, dtype=np.float32),
    "square": np.arange(4, dtype=np.float32).reshape(2, 2),
    "row": np.arange(3, dtype=np.float32).reshape(1, 3),
    "column": np.arange(2, dtype=np.float32).reshape(2, 1),
    "table": np.arange(6, dtype=np.float32).reshape(2, 3),
    "deep": np.arange(3, dtype=np.float32).reshape(1, 1, 3),
    "half": np.arange(5, dtype=np.float16),
    "strings": np.array([b"a", b"bc", b""], dtype=object),
    "no_strings": np.array([], dtype=object),
}
NUMBERS = {name: number for number, name in enumerate(RETURNED)}
SHAPES: dict[str, list[int]] = {name: [*array.shape] for name, array in RETURNED.items()}
MODULE = f"""
def initialize(self, args):
    array, float32, float16 = np.array, np.float32, np.float16
    self.returned = [
        array(3.5, float32), np.ones(1, float32), np.zeros(0, float32), np.arange(5, dtype=float32),
        np.arange(4, dtype=float32).reshape(2, 2), np.arange(3, dtype=float32).reshape(1, 3),
        np.arange(2, dtype=float32).reshape(2, 1), np.arange(6, dtype=float32).reshape(2, 3),
        np.arange(3, dtype=float32).reshape(1, 1, 3), np.arange(5, dtype=float16),
        array([b"a", b"bc", b""], dtype=object), array([], dtype=object),
    ]
    assert len(self.returned) == {len(RETURNED)}

def picked(self, request):
    return self.returned[int(given(request, "X").flat[0])]

"""
EXECUTE = """
def execute(self, requests):
    return [respond(Y=self.picked(request)) for request in requests]
"""
TWO_OUTPUTS = """
def execute(self, requests):
    return [respond(Y=self.picked(request), Z=given(request, "X")) for request in requests]
"""
DECOUPLED = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        sender.send(respond(Y=self.picked(request)))
        sender.send(respond(Y=self.returned[5]))
        sender.send(flags=FINAL)
"""
CALLS = """
def execute(self, requests):
    responses = []
    for request in requests:
        x = pb_utils.get_input_tensor_by_name(request, "X")
        found = pb_utils.InferenceRequest(model_name="plain", requested_output_names=["Y"], inputs=[x]).exec()
        responses.append(pb_utils.InferenceResponse(found.output_tensors(), error=found.error()))
    return responses
"""
ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
ADD = """
def execute(self, requests):
    return [respond(Y=given(request, "X") + given(request, "Z")) for request in requests]
"""
BATCHES = "max_batch_size: 4"
X = spec("X", "FP32", "1")
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 100000 }"


def write_models(repository: Path) -> None:
    def model(name: str, outputs: Sequence[str], *more: str, body: str = EXECUTE, inputs: Sequence[str] = (X,)) -> None:
        write_model(repository, name, python_config([*inputs], [*outputs], *more), MODULE + body)

    wide = spec("Y", "FP32", "-1")
    model("plain", [spec("Y", "FP32", "1")], BATCHES)
    model("wide", [wide], BATCHES)
    model("text", [spec("Y", "STRING", "-1")], BATCHES)
    model("pair", [spec("Y", "FP32", "1, 3")], BATCHES)
    model("together", [wide], BATCHES, DELAYED)
    model("cached", [wide], BATCHES, "response_cache { enable: true }")
    model("no_dims", [spec("Y", "FP32", "1", "reshape { shape: [ ] }")], BATCHES)
    model("flat", [spec("Y", "FP32", "1, 3", "reshape { shape: [ 3 ] }")], BATCHES)
    model("open", [spec("Y", "FP32", "-1, 1", "reshape { shape: [ -1 ] }")], BATCHES)
    model("flat_unbatched", [spec("Y", "FP32", "1, 3", "reshape { shape: [ 3 ] }")])
    model("two", [wide, spec("Z", "FP32", "1")], BATCHES, body=TWO_OUTPUTS)
    model("streams", [wide], BATCHES, "model_transaction_policy { decoupled: true }", body=DECOUPLED)
    model("calls", [spec("Y", "FP32", "1")], BATCHES, body=CALLS)
    model("vector", [wide], body=ECHO, inputs=[spec("X", "FP32", "-1")])
    model("vector_of_text", [spec("Y", "STRING", "-1")], body=ECHO, inputs=[spec("X", "STRING", "-1")])
    model("matrix", [spec("Y", "FP32", "1, 3")], body=ECHO, inputs=[spec("X", "FP32", "1, 3")])
    model("rows", [wide], BATCHES, body=ECHO, inputs=[spec("X", "FP32", "-1")])
    model("add", [wide], BATCHES, body=ADD, inputs=[spec("X", "FP32", "-1"), spec("Z", "FP32", "1")])

    def ensemble(name: str, rows: int, dims: str, *steps: tuple[str, str], dtype: str = "FP32") -> None:
        body = ", ".join(f'{{ model_name: "{step}" model_version: -1 {maps} }}' for step, maps in steps)
        head = f'platform: "ensemble"\nmax_batch_size: {rows}\ninput [ {X} ]\noutput [ {spec("Y", dtype, dims)} ]\n'
        write_model(repository, name, f"{head}ensemble_scheduling {{ step [ {body} ] }}\n")

    def reads(tensor: str, written: str = "Y") -> str:
        return f'input_map {{ key: "X" value: "{tensor}" }} output_map {{ key: "Y" value: "{written}" }}'

    ensemble("then_vector", 0, "-1", ("wide", reads("X", "a")), ("vector", reads("a")))
    ensemble("then_vector_of_text", 0, "-1", ("text", reads("X", "a")), ("vector_of_text", reads("a")), dtype="STRING")
    ensemble("batch_then_vector", 4, "-1", ("wide", reads("X", "a")), ("vector", reads("a")))
    ensemble("then_matrix", 0, "1, 3", ("pair", reads("X", "a")), ("matrix", reads("a")))
    ensemble("then_rows", 4, "-1", ("wide", reads("X", "a")), ("rows", reads("a")))
    ensemble("then_rows_again", 4, "-1", ("wide", reads("X", "a")), ("rows", reads("a", "b")), ("rows", reads("b")))
    ensemble("only_rows", 4, "-1", ("wide", reads("X")))
    ensemble("without_batch", 0, "-1", ("wide", reads("X")))
    both = 'input_map { key: "X" value: "a" } input_map { key: "Z" value: "X" } output_map { key: "Y" value: "Y" }'
    ensemble("then_add", 4, "-1", ("wide", reads("X", "a")), ("add", both))
    streams = ("streams", reads("X", "a"))
    for name, step in (("stream_then_vector", "vector"), ("stream_then_rows", "rows")):
        ensemble(name, 0 if step == "vector" else 4, "-1", streams, (step, reads("a")))


def write_conditions(repository: Path) -> None:
    """Ensembles with steps for some rows, which Triton does not have: the step "plain" makes the tensor that is tested,
    or the rows that are merged with others.
    """
    both = f'platform: "ensemble"\n{BATCHES}\ninput [ {X} ]\noutput [ {spec("Y", "FP32", "1")} ]\n'
    tested = 'when { tensor: "a" above: 0 } input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    made = 'when { tensor: "X" above: 0 } input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    first = (
        '{ model_name: "plain" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "a" } }'
    )
    for name, steps in (
        ("tests_rows", f'{first}, {{ model_name: "rows" model_version: -1 {tested} }}'),
        ("merges_rows", f'{{ model_name: "plain" model_version: -1 {made} }}'),
    ):
        fill = 'fill { tensor: "Y" value: -1 }'
        write_model(repository, name, f"{both}ensemble_scheduling {{ step [ {steps} ] {fill} }}\n")


class Server(NamedTuple):
    base_url: str
    grpc: str
    place: str


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, on_triton: bool) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "models"
    write_models(folder)
    if not on_triton:
        write_conditions(folder)
    return folder


@pytest.fixture(scope="module", params=PLACES)
def server(
    request: pytest.FixtureRequest, on_triton: bool, triton_like: Callable[..., str], repository: Path
) -> Server:
    place = request.param
    port = free_port()
    options = [*OPTIONS, f"--grpc-port={port}"]
    if on_triton and place != "process":
        pytest.skip("Triton has one way to execute Python models")
    if not on_triton:
        options.append(f"--python-execution={place}")
    return Server(triton_like(repository, *options), f"127.0.0.1:{port}", place)


def over_json(server: Server, model: str, case: str, rows: int = 1, classes: int = 0) -> tuple[int, Any]:
    """Status, and (data type, shape, data) of output Y, or the error."""
    batched = not model.startswith(("then_v", "then_m", "without", "flat_un"))
    shape = [rows, 1] if batched else [1]
    tensor = {"name": "X", "datatype": "FP32", "shape": shape, "data": [NUMBERS[case]] * rows}
    body: dict[str, Any] = {"inputs": [tensor]}
    if classes:
        body["outputs"] = [{"name": "Y", "parameters": {"classification": classes}}]
    answer = httpx.post(f"{server.base_url}/v2/models/{model}/infer", json=body, timeout=30, verify=False)
    found = answer.json()
    if "error" in found:
        return answer.status_code, found["error"]
    (output,) = [one for one in found["outputs"] if one["name"] == "Y"]
    return answer.status_code, (output["datatype"], output["shape"], output["data"])


def data_of(case: str) -> list[Any]:
    values: list[Any] = RETURNED[case].ravel().tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def dtype_of(case: str) -> str:
    return {"half": "FP16", "strings": "BYTES", "no_strings": "BYTES"}.get(case, "FP32")


AS_JSON = [case for case in RETURNED if case != "half"]  # FP16 has no JSON form


@pytest.mark.server
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", AS_JSON)
def test_any_shape_is_returned(server: Server, case: str, rows: int) -> None:
    assert over_json(server, "plain", case, rows) == (200, (dtype_of(case), SHAPES[case], data_of(case)))


@pytest.mark.server
@pytest.mark.parametrize("case", AS_JSON)
def test_any_shape_is_returned_by_the_step_of_an_ensemble(server: Server, case: str, on_triton: bool) -> None:
    model = "text" if dtype_of(case) == "BYTES" else "only_rows"
    if on_triton and case == "scalar":
        pytest.skip("Triton ends")
    assert over_json(server, model, case) == (200, (dtype_of(case), SHAPES[case], data_of(case)))


@pytest.mark.server
@pytest.mark.parametrize("case", [*RETURNED])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_any_shape_reaches_tritons_clients(server: Server, case: str, protocol: str) -> None:
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    client = module.InferenceServerClient(
        server.base_url.removeprefix("http://") if protocol == "http" else server.grpc
    )
    tensor = module.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), NUMBERS[case], np.float32))
    found = client.infer("plain", [tensor])
    client.close()
    output = found.get_output("Y")
    shape = [*output["shape"]] if protocol == "http" else [*output.shape]
    assert shape == SHAPES[case]
    array = found.as_numpy("Y")
    assert array.dtype == RETURNED[case].dtype
    assert array.tolist() == RETURNED[case].tolist()


@pytest.mark.server
@pytest.mark.parametrize("case", AS_JSON)
def test_any_shape_is_returned_to_another_model(server: Server, case: str) -> None:
    if server.place == "inline":
        pytest.skip("a model on the event loop cannot wait for another model")
    assert over_json(server, "calls", case) == (200, (dtype_of(case), SHAPES[case], data_of(case)))


@pytest.mark.server
@pytest.mark.parametrize("case", AS_JSON)
def test_a_cached_response_has_the_shape_of_the_first(server: Server, case: str) -> None:
    expected = (200, (dtype_of(case), SHAPES[case], data_of(case)))
    assert [over_json(server, "cached", case) for _ in range(2)] == [expected] * 2
    statistics = httpx.get(f"{server.base_url}/v2/models/cached/stats", verify=False).json()["model_stats"][0]
    assert statistics["inference_stats"]["cache_hit"]["count"] > 0


@pytest.mark.server
def test_each_request_of_a_batch_has_the_shape_of_its_own_response(server: Server) -> None:
    cases = ["scalar", "row", "five", "column"]
    start = threading.Barrier(len(cases))

    def ask(case: str) -> Any:
        start.wait()
        return over_json(server, "together", case)

    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(ask, cases))
    assert found == [(200, ("FP32", SHAPES[case], data_of(case))) for case in cases]


# By model and case: the shape of the response, or None for a failure.
RESHAPED: list[tuple[str, str, list[int] | None]] = [
    ("no_dims", "scalar", [1]),
    ("no_dims", "one", [1, 1]),
    ("no_dims", "none", [0, 1]),
    ("no_dims", "five", [5, 1]),
    ("no_dims", "square", None),
    ("no_dims", "column", [2, 1]),
    ("no_dims", "row", None),
    ("no_dims", "strings", [3, 1]),
    ("flat", "row", [1, 1, 3]),
    ("flat", "deep", [1, 1, 3]),
    ("flat", "table", [2, 1, 3]),
    ("flat", "none", [0, 1, 3]),
    ("flat", "scalar", None),
    ("flat", "five", None),
    ("flat", "strings", None),
    ("open", "row", [1, 3, 1]),
    ("open", "column", [2, 1, 1]),
    ("open", "table", [2, 3, 1]),
    ("open", "deep", None),
    ("open", "five", None),
    ("flat_unbatched", "row", [1, 3]),
    ("flat_unbatched", "deep", [1, 3]),
    ("flat_unbatched", "strings", [1, 3]),
    ("flat_unbatched", "five", None),
    ("flat_unbatched", "table", None),
    ("flat_unbatched", "scalar", None),
]


@pytest.mark.server
@pytest.mark.parametrize(("model", "case", "shape"), RESHAPED)
def test_dims_replace_all_but_the_first_dimension_of_a_reshaped_output(
    server: Server, model: str, case: str, shape: list[int] | None, on_triton: bool
) -> None:
    status, found = over_json(server, model, case)
    if shape is not None:
        assert (status, found) == (200, (dtype_of(case), shape, data_of(case)))
    else:
        assert status == 500
        texts = ["output", "Y"] if on_triton else [f"model '{model}', output 'Y'", "the model answered"]
        assert [text for text in texts if text not in found] == []


# By ensemble, case and rows: the shape of the response, or None where the next step cannot read the output.
STEPS: list[tuple[str, str, int, list[int] | None]] = [
    ("then_vector", "five", 1, [5]),
    ("then_vector", "none", 1, [0]),
    ("then_vector", "one", 1, [1]),
    ("then_vector", "row", 1, [3]),
    ("then_vector", "square", 1, None),
    ("then_vector", "column", 1, None),
    ("then_vector", "deep", 1, None),
    ("then_vector_of_text", "strings", 1, [3]),
    ("then_vector_of_text", "no_strings", 1, [0]),
    ("batch_then_vector", "five", 1, [1, 5]),
    ("batch_then_vector", "five", 2, [1, 5]),
    ("batch_then_vector", "one", 2, [1, 1]),
    ("batch_then_vector", "row", 1, [1, 3]),
    ("batch_then_vector", "row", 2, None),
    ("then_matrix", "row", 1, [1, 3]),
    ("then_matrix", "deep", 1, [1, 3]),
    ("then_matrix", "five", 1, None),
    ("then_matrix", "one", 1, None),
    ("then_matrix", "table", 1, None),
    ("then_rows", "row", 1, [1, 3]),
    ("then_rows", "column", 1, [2, 1]),
    ("then_rows", "table", 1, [2, 3]),
    ("then_rows", "row", 2, [1, 3]),
    ("then_rows", "square", 2, [2, 2]),
    ("then_rows", "five", 1, None),
    ("then_rows", "none", 1, None),
    ("then_rows", "one", 2, None),
    ("then_rows", "deep", 1, None),
    ("then_rows_again", "column", 1, [2, 1]),
    ("then_rows_again", "square", 2, [2, 2]),
    ("then_add", "row", 1, [1, 3]),
    ("then_add", "square", 2, [2, 2]),
    ("then_add", "column", 1, None),
    ("then_add", "row", 2, None),
    ("only_rows", "five", 2, [5]),
    ("only_rows", "table", 1, [2, 3]),
    ("without_batch", "five", 1, [5]),
    ("without_batch", "one", 1, [1]),
    ("without_batch", "row", 1, [3]),
    ("without_batch", "deep", 1, [1, 3]),
    ("without_batch", "square", 1, None),
    ("without_batch", "column", 1, None),
]


@pytest.mark.server
@pytest.mark.parametrize(("model", "case", "rows", "shape"), STEPS)
def test_the_next_step_reads_what_the_model_returned(
    server: Server, model: str, case: str, rows: int, shape: list[int] | None, on_triton: bool
) -> None:
    for _ in range(2):  # the second request is on a route, where there is one
        status, found = over_json(server, model, case, rows)
        if shape is not None:
            assert status == 200, found
            assert found[:2] == (dtype_of(case), shape)
            if model != "then_add":
                assert found[2] == data_of(case)
        elif on_triton:  # its status is that of a client's mistake where a step refuses the output
            assert status in (400, 500)
        else:
            producer = "pair" if model == "then_matrix" else "wide"
            assert status == 500
            assert f"model '{producer}' " in found
            assert str(SHAPES[case]).replace(" ", "") in found.replace(" ", "")


@pytest.mark.server
@pytest.mark.parametrize("model", ["then_vector", "batch_then_vector", "then_rows", "then_add"])
def test_a_number_without_dimensions_has_no_rows_for_the_next_step(server: Server, model: str, on_triton: bool) -> None:
    if on_triton:
        pytest.skip("Triton ends")
    status, error = over_json(server, model, "scalar")
    assert status == 500
    assert (
        "model 'wide' returned output 'Y' as FP32 of shape [], its configuration promises FP32 of shape [-1,-1]"
        in error
    )
    assert f"in ensemble '{model}', unexpected shape for input 'X' for model" in error


@pytest.mark.server
@pytest.mark.parametrize("model", ["tests_rows", "merges_rows"])
@pytest.mark.parametrize("case", ["five", "column", "scalar", "table"])
def test_steps_for_some_rows_need_a_row_for_each_of_the_request(
    server: Server, model: str, case: str, on_triton: bool
) -> None:
    if on_triton:
        pytest.skip("Triton has no steps for some rows")
    if (model, case) == ("merges_rows", "scalar"):
        case = "square"  # the number of "scalar" is 0, which takes no row
    status, error = over_json(server, model, case)
    assert status == 500
    assert f"model 'plain' returned output 'Y' as FP32 of shape {str(SHAPES[case]).replace(' ', '')}" in error
    assert "a tensor of 1 rows is needed" in error


# By model and case: the shapes of the responses. The second one is that of "row".
STREAMS: list[tuple[str, str, list[list[int]]]] = [
    ("streams", "five", [[5], [1, 3]]),
    ("streams", "column", [[2, 1], [1, 3]]),
    ("streams", "scalar", [[], [1, 3]]),
    ("streams", "strings", [[3], [1, 3]]),
    ("stream_then_vector", "five", [[5], [3]]),
    ("stream_then_vector", "row", [[3], [3]]),
    ("stream_then_rows", "column", [[2, 1], [1, 3]]),
    ("stream_then_rows", "row", [[1, 3], [1, 3]]),
]


@pytest.mark.server
@pytest.mark.parametrize(("model", "case", "shapes"), STREAMS)
def test_each_response_of_a_decoupled_model_has_its_own_shape(
    server: Server, model: str, case: str, shapes: list[list[int]]
) -> None:
    if server.place == "inline":
        pytest.skip("a decoupled model does not run on the event loop")
    assert stream(server, model, case) == shapes


@pytest.mark.server
@pytest.mark.parametrize("model", ["stream_then_vector", "stream_then_rows"])
def test_a_response_that_the_next_step_cannot_read_ends_the_request(
    server: Server, model: str, on_triton: bool
) -> None:
    if server.place == "inline":
        pytest.skip("a decoupled model does not run on the event loop")
    found = stream(server, model, "deep")
    assert isinstance(found[-1], str)
    assert "unexpected shape for input 'X' for model" in found[-1]
    if not on_triton:
        assert "model 'streams' returned output 'Y' as FP32 of shape [1,1,3]" in found[-1]


def stream(server: Server, model: str, case: str) -> list[list[int] | str]:
    """The shapes of output Y in the responses, and the texts of errors."""
    answers: list[list[int] | str] = []
    over = threading.Event()

    def answered(result: Any, error: Any) -> None:
        if error is not None:
            answers.append(str(error))
            over.set()
            return
        response = result.get_response()
        answers.extend([*output.shape] for output in response.outputs)
        if response.parameters["triton_final_response"].bool_param:
            over.set()

    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    shape = [1] if model == "stream_then_vector" else [1, 1]
    tensor = tritonclient.grpc.InferInput("X", shape, "FP32")
    tensor.set_data_from_numpy(np.full(shape, NUMBERS[case], np.float32))
    client.start_stream(answered)
    client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
    assert over.wait(30)
    client.stop_stream()
    client.close()
    return answers


@pytest.mark.server
@pytest.mark.parametrize(
    ("case", "ranked"),
    [
        ("scalar", ([1], ["3.500000:0"])),
        ("one", ([1, 1], ["1.000000:0"])),
        ("five", ([5, 1], [f"{value}.000000:0" for value in range(5)])),
        ("row", ([1, 2], ["2.000000:2", "1.000000:1"])),
        ("deep", ([1, 2], ["2.000000:2", "1.000000:1"])),
        ("table", ([2, 2], ["2.000000:2", "1.000000:1", "5.000000:2", "4.000000:1"])),
    ],
)
def test_classes_are_those_of_each_row(server: Server, case: str, ranked: tuple[list[int], list[str]]) -> None:
    assert over_json(server, "wide", case, classes=2) == (200, ("BYTES", *ranked))
