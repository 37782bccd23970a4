"""A bad request beside good ones in one batch of a model.py: who fails, with which status, and which text each gets.

Where Triton tells every client of a batch the text of the exception, flowserve does so only if the batch had one
request: the text may have values of another client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from flowserve.testing.serve import Served
from tests.support.forked import serving
from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

PLACES = ("process", "thread", "inline")  # Triton ignores the parameter
TOGETHER = 4
BAD = -77.0
BAD_AT = 1
X, Y = spec("X", "FP32", "1"), spec("Y", "FP32", "1")
BATCHED = (f"max_batch_size: {TOGETHER}", "dynamic_batching { max_queue_delay_microseconds: 800000 }")
FAILED = "Failed to process the request(s) for model "

# Answers its input plus one. `{bad}` is executed for a request with a negative value, whose number is `m`.
LOOP = """
def execute(self, requests):
    responses = []
    for m, request in enumerate(requests):
        array = given(request, "X")
        if array.min() < 0:
            {bad}
        responses.append(respond(Y=array + 1))
    return responses
"""
# Models that raise, and the name of the exception.
RAISING = {
    "value": ("raise ValueError(f'refused {array.tolist()}')", "ValueError"),
    "model": ("raise pb_utils.TritonModelException(f'refused {array.tolist()}')", "TritonModelException"),
    "exits": ("raise SystemExit(f'refused {array.tolist()}')", "SystemExit"),
    "numpy": ("np.zeros(3).reshape(int(-array.min()), 2)", "ValueError"),
}
ERRORS = {"INVALID_ARG": 400, "NOT_FOUND": 404, "UNAVAILABLE": 503, "INTERNAL": 500, "UNSUPPORTED": 501}
COROUTINE = LOOP.replace("def execute", "async def execute")
SENDS = """
def execute(self, requests):
    for request in requests:
        array = given(request, "X")
        if array.min() < 0:
            raise ValueError(f"refused {array.tolist()}")
        request.get_response_sender().send(respond(Y=array + 1), FINAL)
"""
CALLS = """
def execute(self, requests):
    responses = []
    for request in requests:
        tensor = pb_utils.Tensor("X", given(request, "X"))
        call = pb_utils.InferenceRequest(model_name="value_process", requested_output_names=["Y"], inputs=[tensor])
        found = call.exec()
        if found.has_error():
            responses.append(pb_utils.InferenceResponse(error=found.error()))
        else:
            responses.append(pb_utils.InferenceResponse(found.output_tensors()))
    return responses
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
ensemble_scheduling {{ step [
  {{
    model_name: "same_{place}" model_version: -1
    input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "same" }}
  }},
  {{
    model_name: "value_{place}" model_version: -1
    input_map {{ key: "X" value: "same" }} output_map {{ key: "Y" value: "Y" }}
  }}
] }}
"""
SAME = 'def execute(self, requests):\n    return [respond(Y=given(request, "X")) for request in requests]\n'


# The slots of other sequences are in the batch without a request.
SEQUENCES = """
sequence_batching {
  direct { }
  max_sequence_idle_microseconds: 60000000
  control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } ]
}
"""


def in_place(place: str) -> str:
    return f'parameters {{ key: "execution" value: {{ string_value: "{place}" }} }}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, on_triton: bool) -> Path:
    folder = tmp_path_factory.mktemp("isolation")
    places = PLACES[:1] if on_triton else PLACES

    def add(name: str, body: str, *more: str) -> None:
        for place in places:
            config = python_config([X], [Y], *BATCHED, in_place(place), *more)
            write_model(folder, f"{name}_{place}", config, body)

    for name, (bad, _) in RAISING.items():
        add(name, LOOP.format(bad=bad))
    for code in ERRORS:
        error = f"pb_utils.TritonError(f'refused {{array.tolist()}}', pb_utils.TritonError.{code})"
        bad = f"responses.append(pb_utils.InferenceResponse(error={error})); continue"
        add(code.lower(), LOOP.format(bad=bad))
    add("coroutine", COROUTINE.format(bad=RAISING["value"][0]))
    add("too_few", LOOP.format(bad="continue"))
    add("no_list", LOOP.format(bad="return (1, 2)"))
    add("sends", SENDS)
    add("same", SAME)
    for place in places:
        config = python_config([X], [Y], f"max_batch_size: {TOGETHER}", in_place(place), SEQUENCES)
        only_bad = LOOP.replace("array.min() < 0", f"array.min() == {BAD}")  # empty slots have any values on Triton
        write_model(folder, f"sequences_{place}", config, only_bad.format(bad=RAISING["value"][0]))
    for place in places:
        write_model(folder, f"ensemble_{place}", ENSEMBLE.format(place=place))
    for place in places[:2]:
        decoupled = "model_transaction_policy { decoupled: true }"
        config = python_config([X], [Y], *BATCHED, in_place(place), decoupled)
        write_model(folder, f"decoupled_{place}", config, SENDS)
        write_model(folder, f"calls_{place}", python_config([X], [Y], *BATCHED, in_place(place)), CALLS)
    return folder


@dataclass
class Answer:
    """`error` "" if it succeeded with `value`. `code`: the status, as of HTTP."""

    code: int
    value: float = 0.0
    error: str = ""


class Server:
    def __init__(self, url: str, port: int, pool: ThreadPoolExecutor) -> None:
        self._http = httpx.Client(base_url=f"{url}/v2/", timeout=60, verify=False)
        self._grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
        self._port = port
        self._pool = pool

    def close(self) -> None:
        self._http.close()
        self._grpc.close()

    def ask(self, protocol: str, model: str, value: float, **parameters: Any) -> Answer:
        if protocol == "http":
            tensor = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [value]}
            reply = self._http.post(f"models/{model}/infer", json={"inputs": [tensor], "parameters": parameters})
            told = reply.json()
            if "error" in told:
                return Answer(reply.status_code, error=told["error"])
            return Answer(reply.status_code, told["outputs"][0]["data"][0])
        try:
            found = self._grpc.infer(model, [given(value)], client_timeout=60, **parameters).as_numpy("Y")
        except tritonclient.grpc.InferenceServerException as error:
            return Answer(CODES[error.status()], error=error.message())
        return Answer(200, found[0, 0])

    def ask_together(self, protocol: str, model: str, values: Sequence[float]) -> list[Answer]:
        """In one batch, if there are TOGETHER: it is full."""
        return [*self._pool.map(lambda value: self.ask(protocol, model, value), values)]

    def stream_together(self, model: str, values: Sequence[float]) -> list[Answer]:
        """As `ask_together`, each on a stream of its own; the last response, or the error."""
        return [*self._pool.map(lambda value: self._stream(model, value), values)]

    def _stream(self, model: str, value: float) -> Answer:
        got: list[Answer] = []

        def take(result: Any, error: Any) -> None:
            got.append(Answer(500, error=error.message()) if error else Answer(200, result.as_numpy("Y")[0, 0]))

        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self._port}") as client:
            client.start_stream(take)
            client.async_stream_infer(model, [given(value)])
            client.stop_stream()
        return got[-1]


CODES = {
    "StatusCode.INVALID_ARGUMENT": 400,
    "StatusCode.NOT_FOUND": 404,
    "StatusCode.UNAVAILABLE": 503,
    "StatusCode.INTERNAL": 500,
    "StatusCode.UNIMPLEMENTED": 501,
}


def given(value: float) -> Any:
    tensor = tritonclient.grpc.InferInput("X", [1, 1], "FP32")
    return tensor.set_data_from_numpy(np.array([[value]], np.float32))


@pytest.fixture(scope="module")
def server(repository: Path, triton_like: Callable[..., str]) -> Iterator[Server]:
    port = free_port()
    options = "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={port}"
    with ThreadPoolExecutor(2 * TOGETHER) as pool:
        server = Server(triton_like(repository, *options), port, pool)
        yield server
        server.close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, on_triton: bool) -> str:
    if on_triton and request.param != "process":
        pytest.skip("Triton has no other place")
    place: str = request.param
    return place


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    protocol: str = request.param
    return protocol


VALUES = [BAD if n == BAD_AT else float(n) for n in range(TOGETHER)]
GOOD = [1.0, 2.0, 3.0, 4.0]


def good(answers: Sequence[Answer]) -> list[float | None]:
    return [None if answer.error else answer.value for answer in answers]


def shows_nothing(answers: Sequence[Answer], kind: str, on_triton: bool) -> None:
    """All failed as on Triton, and no text has the bad value or the message, except on Triton."""
    assert {answer.code for answer in answers} == {500}
    assert all(FAILED in answer.error for answer in answers)
    if not on_triton:
        text = f"message: {kind} in a batch of {TOGETHER} requests; its text is in the server's log"
        assert all(text in answer.error for answer in answers)
        assert not any("77" in answer.error or "refused" in answer.error for answer in answers)


@pytest.mark.parametrize("name", RAISING)
def test_a_batch_whose_execute_raises_fails_and_its_clients_get_no_values_of_each_other(
    server: Server, place: str, protocol: str, name: str, on_triton: bool
) -> None:
    shows_nothing(server.ask_together(protocol, f"{name}_{place}", VALUES), RAISING[name][1], on_triton)
    assert good(server.ask_together(protocol, f"{name}_{place}", range(TOGETHER))) == GOOD


@pytest.mark.parametrize("name", ["value", "model", "numpy", "coroutine", "sends"])
def test_the_only_request_of_a_batch_gets_the_text_of_its_exception(
    server: Server, place: str, protocol: str, name: str, on_triton: bool
) -> None:
    answer = server.ask(protocol, f"{name}_{place}", BAD)
    assert answer.code == 500
    assert answer.error.startswith(FAILED)
    said = "cannot reshape array of size 3 into shape (77,2)" if name == "numpy" else "refused [[-77.0]]"
    assert said in answer.error


@pytest.mark.parametrize("code", ERRORS)
def test_a_request_that_the_model_answers_with_an_error_fails_alone(
    server: Server, place: str, protocol: str, code: str
) -> None:
    answers = server.ask_together(protocol, f"{code.lower()}_{place}", VALUES)
    assert good(answers) == [None if n == BAD_AT else value for n, value in enumerate(GOOD)]
    assert answers[BAD_AT] == Answer(ERRORS[code], error="refused [[-77.0]]")


def test_a_batch_of_a_coroutine_that_raises_fails_without_values(
    server: Server, place: str, protocol: str, on_triton: bool
) -> None:
    shows_nothing(server.ask_together(protocol, f"coroutine_{place}", VALUES), "ValueError", on_triton)


def test_a_batch_with_too_few_responses_fails_with_the_numbers(server: Server, place: str, protocol: str) -> None:
    answers = server.ask_together(protocol, f"too_few_{place}", VALUES)
    assert {answer.code for answer in answers} == {500}
    text = "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
    text += "InferenceRequest(s) size is:4, and InferenceResponse(s) size is:3"
    assert all(text in answer.error for answer in answers)


def test_a_batch_whose_execute_returns_no_list_fails_with_the_type(server: Server, place: str, protocol: str) -> None:
    answers = server.ask_together(protocol, f"no_list_{place}", VALUES)
    assert {answer.code for answer in answers} == {500}
    text = "Expected a list in the execute return, found type '<class 'tuple'>'"
    assert all(answer.error.startswith(FAILED) and text in answer.error for answer in answers)


def test_a_later_step_of_an_ensemble_that_raises_fails_its_batch_without_values(
    server: Server, place: str, protocol: str, on_triton: bool
) -> None:
    answers = server.ask_together(protocol, f"ensemble_{place}", VALUES)
    assert all(answer.error.startswith(f"in ensemble 'ensemble_{place}', {FAILED}") for answer in answers)
    if on_triton:
        assert {answer.code for answer in answers} == {500}
    else:
        shows_nothing(answers, "ValueError", on_triton)


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_batch_of_a_decoupled_model_that_raises_fails_without_values(
    server: Server, place: str, on_triton: bool
) -> None:
    if on_triton and place != "process":
        pytest.skip("Triton has no other place")
    answers = server.stream_together(f"decoupled_{place}", [BAD] * TOGETHER)
    assert all(FAILED in answer.error for answer in answers)
    if not on_triton:
        shows_nothing(answers, "ValueError", on_triton)
    assert good(server.stream_together(f"decoupled_{place}", range(TOGETHER))) == GOOD


@pytest.mark.parametrize("place", PLACES[:2])
def test_the_error_of_a_called_model_goes_only_to_the_request_that_caused_it(
    server: Server, place: str, protocol: str, on_triton: bool
) -> None:
    """The calls of one batch follow one another, each a batch of its own."""
    if on_triton and place != "process":
        pytest.skip("Triton has no other place")
    answers = server.ask_together(protocol, f"calls_{place}", VALUES[:2])
    assert good(answers) == [1.0, None]
    assert answers[1].code == 500
    assert "refused [[-77.0]]" in answers[1].error


def test_the_only_request_beside_empty_slots_of_sequences_gets_its_text(
    server: Server, place: str, protocol: str
) -> None:
    model, first = f"sequences_{place}", 10 if protocol == "http" else 20
    for number in range(3):
        assert server.ask(protocol, model, 1.0, sequence_id=first + number, sequence_start=True).value == 2.0
    answer = server.ask(protocol, model, BAD, sequence_id=first + 2)
    assert (answer.code, "refused [[-77.0]]" in answer.error) == (500, True)
    for number in range(3):
        assert server.ask(protocol, model, 1.0, sequence_id=first + number, sequence_end=True).value == 2.0


# --------------------------------------------------------------------------------------------------- flowserve's own

INVALID = LOOP.format(bad="raise Invalid(f'refused {array.tolist()}')").replace(
    "def execute(self, requests):", "def execute(self, requests):\n    from flowserve import Invalid"
)
SENDS_INVALID = SENDS.replace("raise ValueError", "from flowserve import Invalid; raise Invalid")


@pytest.fixture(scope="module")
def own(on_triton: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Served]]:
    if on_triton:
        pytest.skip("a model of Triton has no flowserve.Invalid")
    folder = tmp_path_factory.mktemp("invalid")
    for place in PLACES:
        write_model(folder, f"invalid_{place}", python_config([X], [Y], *BATCHED, in_place(place)), INVALID)
    for place in PLACES[:2]:
        decoupled = "model_transaction_policy { decoupled: true }"
        config = python_config([X], [Y], *BATCHED, in_place(place), decoupled)
        write_model(folder, f"streams_{place}", config, SENDS_INVALID)
        write_model(folder, f"waits_{place}", config, SENDS_INVALID.replace("def exec", "async def exec"))
    with ThreadPoolExecutor(2 * TOGETHER) as pool:
        with serving(folder, "--allow-grpc", "true", "--grpc-port", "0", "--log-verbose", "1") as served:
            server = Server(served.base_url, int(served.grpc_address.rpartition(":")[2]), pool)
            yield server, served
            server.close()


def test_invalid_raised_by_a_model_refuses_its_request_with_its_text(
    own: tuple[Server, Served], place: str, protocol: str
) -> None:
    server, served = own
    before = len(served.log.splitlines())
    assert server.ask(protocol, f"invalid_{place}", BAD) == Answer(400, error="refused [[-77.0]]")
    logged = served.log.splitlines()[before:]
    assert not any("Traceback" in line or "failed" in line for line in logged), logged
    answers = server.ask_together(protocol, f"invalid_{place}", VALUES)
    shows_nothing(answers, "Invalid", on_triton=False)
    assert "flowserve.errors.Invalid: refused [[-77.0]]" in served.log


def test_generate_answers_invalid_with_400(own: tuple[Server, Served], place: str) -> None:
    for way in ("generate", "generate_stream"):
        url = f"{own[1].base_url}/v2/models/invalid_{place}/{way}"
        reply = httpx.post(url, json={"X": BAD}, timeout=60, verify=False)
        assert (reply.status_code, "refused [[-77.0]]" in reply.text) == (400, True)


@pytest.mark.parametrize("name", ["streams", "waits"])
@pytest.mark.parametrize("place", PLACES[:2])
def test_invalid_raised_by_a_decoupled_model_refuses_its_request(
    own: tuple[Server, Served], name: str, place: str
) -> None:
    server, _ = own
    (alone,) = server.stream_together(f"{name}_{place}", [BAD])
    assert alone.error == "refused [[-77.0]]"
    shows_nothing(server.stream_together(f"{name}_{place}", [BAD] * TOGETHER), "Invalid", on_triton=False)
