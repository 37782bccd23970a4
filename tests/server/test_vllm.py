"""A repository of Triton's vLLM backend over HTTP, with a fake of vLLM: streams, continuous batching, ends."""

from __future__ import annotations

import base64
import http.client
import io
import json
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import DidNotServe, Served
from tests.support.fake_vllm import package
from tests.support.forked import serving

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="engines run in processes, which are for Linux")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
# Laid out as the samples of Triton's backend.
CONFIG = """
name: "llm"
backend: "vllm"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""


def picture() -> str:
    """A file of 2 x 1 pixels in base64."""
    file = io.BytesIO()
    Image.new("RGB", (2, 1)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PICTURE = picture()
SHORT = 'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]'
SEATS = 4
Write = Callable[..., Path]


connections: list[http.client.HTTPConnection] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while connections:
        connections.pop().close()


@dataclass
class Server:
    served: Served
    log: Path

    def post(self, verb: str, *, model: str = "llm", **asked: Any) -> http.client.HTTPResponse:
        return self.begin(verb, model=model, **asked).getresponse()

    def begin(self, verb: str, *, model: str = "llm", **asked: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.served.address, timeout=60)
        connections.append(connection)
        connection.request("POST", f"/v2/models/{model}/{verb}", json.dumps(asked))
        return connection

    def generate(self, text: str, **asked: Any) -> Any:
        response = self.post("generate", text_input=text, **{"stream": False, **asked})
        answer = json.loads(response.read())
        return answer if response.status == 200 else (response.status, answer["error"])

    def text(self, text: str, **asked: Any) -> Any:
        answer = self.generate(text, **asked)
        return answer["text_output"] if isinstance(answer, dict) else answer

    def stream(self, text: str, **asked: Any) -> Iterator[Any]:
        response = self.post("generate_stream", text_input=text, stream=True, **asked)
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def told(self, event: str) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def wait_for(self, what: Callable[[], Any], seconds: float = 20.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, f"it did not happen: {self.served.log}"
            time.sleep(0.01)
        return found

    def metric(self, name: str) -> float:
        address = self.served.address
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = re.search(rf'^{name}\{{model="llm",version="1"\}} (.*)$', text, re.MULTILINE)
        assert found, text
        return float(found[1])


@pytest.fixture
def start(tmp_path: Path, add_model: Write) -> Iterator[Callable[..., Server]]:
    """`start(config, step_ms=...)`: a server of one model, with an engine of SEATS seats."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def begin(
            config: str = CONFIG, *, step_ms: int = 2, files: Any = None, options: Sequence[str] = (), **arguments: Any
        ) -> Server:
            log = tmp_path / "engine.log"
            told = {"log": str(log), "step_ms": step_ms}
            written = {"model": "facebook/opt-125m", "disable_log_requests": True, "enforce_eager": True}
            written |= {"max_num_seqs": SEATS, "additional_config": told, **arguments}
            repository = tmp_path / "models"
            add_model(repository, "llm", config, {"1/model.json": json.dumps(written), **(files or {})})
            path = f"{package(tmp_path / 'site')}:{ROOT}"
            return Server(stack.enter_context(serving(repository, *options, environment={"PYTHONPATH": path})), log)

        yield begin


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


def test_texts_streams_and_parameters_are_those_of_tritons_backend(start: Callable[..., Server]) -> None:
    server = start(SHORT)
    four = {"max_tokens": 4}
    assert server.text("one two", parameters=four) == "one two ONE TWO ONE TWO"
    assert server.text("one two", **four, exclude_input_in_output=True) == " ONE TWO ONE TWO"
    pieces = [event["text_output"] for event in server.stream("one two", parameters=four)]
    assert "".join(pieces) == " ONE TWO ONE TWO"
    assert len(pieces) > 1
    assert server.text("a", sampling_parameters='{"max_tokens": "2", "temperature": "0.25", "stop": "3"}') == "a A A"
    assert [(one["temperature"], one["stop"]) for one in server.told("add")][-1] == (0.25, "3")
    asked = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    answer = server.generate("a b c", n=2, **four, **{f"return_{name}": True for name in asked})
    assert answer["text_output"] == ["a b c A B C A"] * 2
    assert {name: answer[name] for name in asked} == {
        "finish_reason": ["length"] * 2,
        "cumulative_logprob": [-2.0] * 2,
        "logprobs": ["null"] * 2,
        "num_input_tokens": 3,
        "num_output_tokens": [4, 4],
    }
    assert {*server.generate("a")} == {"model_name", "model_version", "text_output"}
    guided = json.dumps({"max_tokens": 1, "guided_decoding": {"choice": ["A", "B"], "backend": "xgrammar"}})
    assert server.text("a", sampling_parameters=guided) == "a A"
    assert server.told("add")[-1]["choice"] == ["A", "B"]
    assert server.text("a", max_tokens=1, image=[PICTURE, PICTURE]) == "a A"
    assert server.told("add")[-1]["images"] == [[2, 1], [2, 1]]
    counts = [event["num_output_tokens"] for event in server.stream("a", max_tokens=5, return_num_output_tokens=True)]
    assert sum(counts) == 5
    halves = [event["text_output"] for event in server.stream("a", max_tokens=3, n=2)]
    assert ["".join(parts) for parts in zip(*halves, strict=True)] == [" A A A"] * 2


# Public repositories declare the backend's own tensors with other dims than it does.
OTHER_DIMS = """
backend: "vllm"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ -1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1, -1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""


def test_the_tensors_of_the_backend_may_have_other_dims(start: Callable[..., Server]) -> None:
    server = start(OTHER_DIMS)
    assert server.text("one two", max_tokens=1) == "one two ONE"
    assert "".join(one["text_output"] for one in server.stream("one two", max_tokens=2)) == " ONE TWO"
    assert server.text("a", sampling_parameters='{"max_tokens": 2}') == "a A A"
    answer = server.generate("a", max_tokens=1, n=2, return_num_output_tokens=True)  # more than the outputs' dims
    assert (answer["text_output"], answer["num_output_tokens"]) == (["a A", "a A"], [1, 1])
    assert "output 'text_output': the configuration promises shape [1], the model answered [2]" in server.served.log
    for name, given in (("text_input", {"text_input": []}), ("stream", {"text_input": "a", "stream": []})):
        response = server.post("generate", **given)
        error = json.loads(response.read())["error"]
        assert (response.status, error) == (400, f"inference input '{name}' must hold one element, and is empty")
    connection = http.client.HTTPConnection(server.served.address, timeout=60)
    connections.append(connection)
    connection.request("GET", "/v2/models/llm")
    inputs = json.loads(connection.getresponse().read())["inputs"]
    shapes = {one["name"]: one["shape"] for one in inputs}
    assert (shapes["text_input"], shapes["sampling_parameters"], shapes["image"]) == ([-1], [1, -1], [-1])


def test_an_invalid_request_is_refused_with_its_reason(start: Callable[..., Server]) -> None:
    server = start(SHORT)
    for asked, text in (
        (
            {"stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not",
        ),
        ({"temprature": 1}, "has 'temprature', which vLLM does not know: did you mean \"temperature\"?"),
        ({"temperature": -1}, "cannot be used: temperature must be non-negative, got -1."),
        ({"sampling_parameters": "{"}, "input 'sampling_parameters' for model 'llm' is not JSON"),
        ({"sampling_parameters": "[]"}, "input 'sampling_parameters' for model 'llm' must be a JSON object"),
        ({"sampling_parameters": '{"max_tokens": "many"}'}, "sampling parameter 'many' must be a number"),
        ({"lora_name": "x"}, "LoRA x is not supported, model 'llm' has none"),
        ({"image": ["nothing"]}, "inference input 'image' must hold image files in base64"),
        ({"sampling_parameters": '{"structured_outputs": {"x": 1}}'}, "cannot be used: "),
        ({"text_input": "refuse"}, "Error generating stream: The decoder prompt is longer"),
    ):
        response = server.post("generate", **cast("dict[str, Any]", {"text_input": "a", "stream": False, **asked}))
        assert response.status == 400, asked
        assert text in json.loads(response.read())["error"]
    assert server.text("a", max_tokens=1) == "a A"


def test_requests_wait_in_the_servers_queue_and_enter_as_others_end(server: Server) -> None:
    with ThreadPoolExecutor(32) as pool:
        long = pool.submit(server.text, "long", sampling_parameters='{"max_tokens": 1500}')
        server.wait_for(lambda: server.told("begin"))
        others = [pool.submit(server.text, f"w{n}", sampling_parameters='{"max_tokens": 150}') for n in range(20)]
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") >= 8)
        assert [one.result() for one in others] == [f"w{n}" + f" W{n}" * 150 for n in range(20)]
        assert not long.done()
        assert long.result() == "long" + " LONG" * 1500
    begun = server.told("begin")
    assert len(begun) == 21
    assert max(one["running"] for one in begun) == SEATS  # they join between steps and do not wait for the long one
    assert max(one["running"] + one["waiting"] for one in server.told("add")) == SEATS  # each had a seat


def test_a_request_with_several_sequences_takes_as_many_seats(server: Server) -> None:
    with ThreadPoolExecutor(32) as pool:
        three = '{"max_tokens": 30, "n": 3}'
        asked = [pool.submit(server.text, f"w{n}", sampling_parameters=three) for n in range(4)]
        more = pool.submit(server.text, "all", sampling_parameters='{"max_tokens": 3, "n": 9}')  # more than there are
        assert [one.result() for one in asked] == [[f"w{n}" + f" W{n}" * 30] * 3 for n in range(4)]
        assert more.result() == ["all" + " ALL" * 3] * 9
    assert max(one["running"] for one in server.told("begin")) == 1
    assert max(one["waiting"] for one in server.told("add")) == 1  # itself


def test_a_client_that_leaves_ends_its_sequence_at_once_even_without_a_token(server: Server) -> None:
    gone = server.begin("generate_stream", text_input="silent", stream=True)
    server.wait_for(lambda: server.told("begin"))
    gone.close()
    server.wait_for(lambda: server.told("abort"))
    assert server.text("a", sampling_parameters='{"max_tokens": 1}') == "a A"


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(server: Server) -> None:
    def begin(text: str) -> http.client.HTTPConnection:
        return server.begin("generate_stream", text_input=text, stream=True)

    holding = [begin("silent") for _ in range(SEATS)]
    server.wait_for(lambda: len(server.told("begin")) == SEATS)
    queued = begin("queued")
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    queued.close()
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 0)
    for connection in holding:
        connection.close()
    server.wait_for(lambda: len(server.told("abort")) == SEATS)
    assert server.text("a", sampling_parameters='{"max_tokens": 1}') == "a A"
    assert [one["words"] for one in server.told("add")] == ["silent"] * SEATS + ["a"]


def test_a_slow_reader_keeps_no_seat_and_gets_everything(server: Server) -> None:
    words = "x" * 20_000
    slow = server.begin("generate_stream", text_input=words, stream=True, sampling_parameters='{"max_tokens": 1000}')
    server.wait_for(lambda: len(server.told("end")) == 1)  # while the client has read nothing
    response = slow.getresponse()
    lines = [line for line in response if line.startswith(b"data: ")]
    text = "".join(json.loads(line[6:])["text_output"] for line in lines)
    assert text == f" {words.upper()}" * 1000
    assert len(lines) < 1000  # text produced meanwhile was sent together


def test_a_request_that_fails_in_the_engine_fails_alone(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.text, "a", sampling_parameters='{"max_tokens": 50}')
        got = [*server.stream("break")]
        assert "".join(one.get("text_output", "") for one in got) == " BREAK BREAK"
        assert got[-1] == {"error": "Error generating stream: the kernel failed"}
        assert other.result() == "a" + " A" * 50


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("die", "Error generating stream: vLLM has ended: EngineDeadError"),
        ("exit", "exit status 7"),
    ],
)
def test_a_broken_engine_fails_its_requests_and_is_replaced(server: Server, how: str, text: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.text, "silent")
        server.wait_for(lambda: server.told("begin"))
        got = [*server.stream(how)]
        assert text in got[-1]["error"]
        status, error = other.result()
        assert status == 500
        assert text in error
    assert server.wait_for(lambda: server.text("a", sampling_parameters='{"max_tokens": 1}') == "a A")
    assert len({one["pid"] for one in server.told("start")}) == 2


def test_an_unloaded_model_ends_its_engine_after_its_requests(start: Callable[..., Server]) -> None:
    server = start()
    stream = server.stream("a", sampling_parameters='{"max_tokens": 100}')
    next(stream)
    server.served.process.terminate()
    assert [*stream][-1].keys() == {"model_name", "model_version", "text_output"}
    assert server.served.process.wait(30) == 0
    assert [one["running"] for one in server.told("shutdown")] == [0]


def test_adapters_and_chosen_gpus_reach_the_engine(start: Callable[..., Server]) -> None:
    config = SHORT + ' parameters { key: "GPU_DEVICE_IDS" value { string_value: "3" } }'
    server = start(config, files={"1/multi_lora.json": '{"alpaca": "/loras/alpaca"}'}, enable_lora="true")
    assert server.text("a", lora_name="alpaca", max_tokens=1) == "a A"
    assert [one["lora"] for one in server.told("add")] == ["/loras/alpaca"]
    assert [one["gpus"] for one in server.told("start")] == ["3"]
    assert "model 'llm' has alpaca" in server.text("a", lora_name="other")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_num_seq": 4}, "llm/1/model.json: failed to load"),
        ({"model": "missing"}, "model 'llm': vLLM cannot start: OSError: missing is not a local folder"),
    ],
)
def test_an_engine_that_cannot_start_is_an_error_of_its_model(
    start: Callable[..., Server], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(DidNotServe) as caught:
        start(**arguments)
    assert text in caught.value.log


QUEUE = """
backend: "vllm"
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  priority_queue_policy { key: 2 value { max_queue_size: 2 } }
  priority_queue_policy { key: 3 value { default_timeout_microseconds: 20000 } }
}
"""


def test_the_queue_has_priorities_a_size_and_timeouts(start: Callable[..., Server]) -> None:
    server = start(QUEUE, options=("--allow-grpc=true", "--grpc-port=0"))
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(server.served.grpc_address)
    client.start_stream(lambda result, error: answers.put((result, error)))

    def ask(text: str, tokens: int, priority: int = 0) -> None:
        given = [triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("sampling_parameters", [1], "BYTES")]
        given[0].set_data_from_numpy(np.array([text], object))
        given[1].set_data_from_numpy(np.array([json.dumps({"max_tokens": tokens})], object))
        client.async_stream_infer("llm", given, request_id=text, priority=priority)

    for n in range(SEATS):
        ask(f"w{n}", 150)
        server.wait_for(lambda n=n: len(server.told("begin")) == n + 1)  # type: ignore[misc]
    for n, text in enumerate(("late0", "late1")):
        ask(text, 1)
        server.wait_for(lambda n=n: server.metric("nv_inference_pending_request_count") == n + 1)  # type: ignore[misc]
    ask("too many", 1)
    ask("timed", 1, priority=3)
    ask("urgent", 1, priority=1)
    got = [answers.get(timeout=30) for _ in range(SEATS + 5)]
    client.stop_stream()
    client.close()
    refused = sorted(error.message() for _, error in got if error)
    assert len(refused) == 2
    assert "Exceeds maximum queue size" in refused[0]
    assert "Request timeout expired" in refused[1]
    assert [one["words"] for one in server.told("add")][SEATS:] == ["urgent", "late0", "late1"]


@pytest.mark.parametrize(("is_streaming", "sequences"), [(False, 1), (True, 1), (True, 2)])
def test_the_last_response_carries_the_final_flag(
    start: Callable[..., Server], is_streaming: bool, sequences: int
) -> None:
    """As from Triton's backend: no empty response follows it."""
    server = start(options=("--allow-grpc=true", "--grpc-port=0"))
    finals: list[bool] = []
    with triton.InferenceServerClient(server.served.grpc_address) as client:
        given = [triton.InferInput(name, [1], "BYTES") for name in ("text_input", "sampling_parameters")]
        given.append(triton.InferInput("stream", [1], "BOOL"))
        given[0].set_data_from_numpy(np.array(["a b"], object))
        given[1].set_data_from_numpy(np.array([json.dumps({"max_tokens": 9, "n": sequences})], object))
        given[2].set_data_from_numpy(np.array([is_streaming]))

        def take(result: Any, error: Any) -> None:
            assert error is None, error
            assert result.as_numpy("text_output") is not None
            finals.append(result.get_response().parameters["triton_final_response"].bool_param)

        client.start_stream(take)
        client.async_stream_infer("llm", given, enable_empty_final_response=True)
        client.stop_stream()
    assert finals == [False] * (len(finals) - 1) + [True]
    assert (len(finals) > 1) == is_streaming


GRAPH = """
platform: "ensemble"
input { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "STREAM" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "PIECE" data_type: TYPE_STRING dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "llm" model_version: -1
    input_map { key: "text_input" value: "PROMPT" } input_map { key: "stream" value: "STREAM" }
    output_map { key: "text_output" value: "text" }
  }
  step {
    model_name: "quiet" model_version: -1
    input_map { key: "IN" value: "text" } output_map { key: "OUT" value: "PIECE" }
  }
}
"""
QUIET = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        lower = [one.decode().lower().encode() for one in text]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", __import__("numpy").array(lower, object))])
"""
QUIET_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""


def test_in_a_graph_each_piece_goes_to_the_next_step(
    start: Callable[..., Server], add_model: Write, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    add_model(repository, "quiet", QUIET_CONFIG, {"1/model.py": QUIET})
    add_model(repository, "chain", GRAPH, {"1/.gitkeep": ""})
    server = start()
    response = server.post("generate_stream", model="chain", PROMPT="Hello World", STREAM=True)
    pieces = [json.loads(line[6:])["PIECE"] for line in response if line.startswith(b"data: ")]
    assert "".join(pieces) == " hello world" * 8
    assert len(pieces) > 1


def test_the_page_is_correct(tmp_path: Path, by_shell: Callable[[str, Served], str]) -> None:
    repository = tmp_path / "models"
    for _, path, text in BLOCKS:
        if path:
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(text)
    path = f"{package(tmp_path / 'site')}:{ROOT}"
    with serving(repository, environment={"PYTHONPATH": path}) as served:
        asked = [(command, printed) for (kind, _, command), (_, _, printed) in pairwise(BLOCKS) if kind == "sh"]
        assert len(asked) == 2
        for command, printed in asked:
            got = by_shell(command, served)
            assert got == printed or json.loads(got) == json.loads(printed)
