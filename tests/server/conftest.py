"""Fixtures of tests of the whole server: one repository of many small models, one server of it, and two clients.

The models are written as users write them: `model.py` files for Triton's Python backend, ONNX files, and
`config.pbtxt` texts. `wire` is a client that controls the time of each send; `client` is Triton's own.
"""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served
from flowserve.values import BY_WIRE, DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value

ANSWER_S_MAX = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder talks to a real server process."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def by_shell() -> Callable[[str, Served], str]:
    """A function that runs a page's command against this server and returns its output."""
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("needs bash and curl")

    def run(command: str, served: Served) -> str:
        command = command.replace("localhost:8000", served.address)
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# ------------------------------------------------------------------------------------------------------ repositories


def write_model(repository: Path, name: str, config: str, files: Mapping[str, str | bytes] | None = None) -> Path:
    """A model's folder: `config` is its config.pbtxt, "" for none; `files` go by their path in the folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    if config:
        (folder / "config.pbtxt").write_text(config)
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.fixture(scope="session")
def add_model() -> Callable[..., Path]:
    """`write_model`, for tests with a repository of their own."""
    return write_model


PYTHON = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def given(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        def answer(**outputs):
            return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

        def refuse(text):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))

        {body}
"""

VECTOR = "data_type: TYPE_FP32 dims: [ 4 ]"
GATHER_16 = "dynamic_batching { preferred_batch_size: [ 16 ] max_queue_delay_microseconds: 1000000 }"


def python_file(body: str) -> dict[str, str | bytes]:
    """A model.py whose `answer(request)` is `body`; it may use `given`, `answer` and `refuse`."""
    return {"1/model.py": PYTHON.replace("{body}", body.strip())}


def arithmetic_file(kind: str, constant: float) -> bytes:
    """An ONNX file: OUT = IN (kind) constant, over batches of 4 numbers."""
    return onnx_model(
        [onnx_node(kind, ["IN", "constant"], ["OUT"])],
        [onnx_value("IN", DType.FP32, ["N", 4])],
        [onnx_value("OUT", DType.FP32, ["N", 4])],
        [onnx.helper.make_tensor("constant", onnx.TensorProto.FLOAT, [], [constant])],
    )


def one_in_one_out(scheduling: str = "", spec: str = VECTOR, max_batch_size: int = 16) -> str:
    return f"""
max_batch_size: {max_batch_size}
input [ {{ name: "IN" {spec} }} ]
output [ {{ name: "OUT" {spec} }} ]
{scheduling}
"""


def ensemble_text(
    inputs: Sequence[str],
    outputs: Sequence[str],
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]],
    max_batch_size: int = 16,
    spec: str = VECTOR,
) -> str:
    """An ensemble's config.pbtxt; steps are (model, input_map, output_map)."""

    def tensors(kind: str, names: Sequence[str]) -> str:
        return "\n".join(f'{kind} {{ name: "{name}" {spec} }}' for name in names)

    def maps(kind: str, mapping: Mapping[str, str]) -> str:
        return "\n".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in mapping.items())

    def step(model: str, taken: Mapping[str, str], made: Mapping[str, str]) -> str:
        mapped = f"{maps('input_map', taken)}\n{maps('output_map', made)}"
        return f'step {{ model_name: "{model}" model_version: -1\n{mapped} }}'

    lines = "\n".join(step(*each) for each in steps)
    return f"""
platform: "ensemble"
max_batch_size: {max_batch_size}
{tensors("input", inputs)}
{tensors("output", outputs)}
ensemble_scheduling {{
{lines}
}}
"""


@pytest.fixture(scope="session")
def make_ensemble() -> Callable[..., str]:
    return ensemble_text


@pytest.fixture(scope="session")
def make_python() -> Callable[..., dict[str, str | bytes]]:
    return python_file


@pytest.fixture(scope="session")
def make_arithmetic() -> Callable[..., bytes]:
    return arithmetic_file


TWO_IN_TWO_OUT = """
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

JOIN = """
max_batch_size: 16
dynamic_batching { }
input [ { name: "LEFT" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "RIGHT" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

TELLS = """
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "ID" data_type: TYPE_STRING dims: [ 1 ] }, { name: "PARAMETERS" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

TELL = """
        told = [np.array([text.encode()], np.object_) for text in (request.request_id(), request.parameters())]
        return answer(ID=told[0], PARAMETERS=told[1])
"""

GRUMPY = """
        numbers = given("IN")
        if (numbers < 0).any():
            return refuse("negative numbers are not for me")
        if (numbers > 1000).any():
            raise ValueError("too much for me")
        return answer(OUT=numbers)
"""


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many models in one folder, named after their behaviour."""
    folder = tmp_path_factory.mktemp("many")
    for dtype in BY_WIRE.values():
        spec = f"data_type: {dtype.config_name} dims: [ -1 ]"
        write_model(
            folder,
            f"py_{dtype.wire}",
            one_in_one_out(spec=spec, max_batch_size=8),
            python_file('return answer(OUT=given("IN"))'),
        )
        file = onnx_identity(dtype, ("N", "M"))
        write_model(folder, f"onnx_{dtype.wire}", "", {"1/model.onnx": file})

    sums = 'return answer(OUTPUT0=given("INPUT0") + given("INPUT1"), OUTPUT1=given("INPUT0") - given("INPUT1"))'
    write_model(folder, "addsub", TWO_IN_TWO_OUT, python_file(sums))
    versions = {f"{number}/model.onnx": arithmetic_file("Add", number) for number in (1, 2, 3)}
    write_model(folder, "versioned", one_in_one_out("version_policy { specific { versions: [ 1, 3 ] } }"), versions)

    write_model(folder, "gather", one_in_one_out(GATHER_16), {"1/model.onnx": arithmetic_file("Mul", 2)})
    write_model(folder, "plus_one", one_in_one_out("dynamic_batching { }"), {"1/model.onnx": arithmetic_file("Add", 1)})
    write_model(
        folder, "times_three", one_in_one_out("dynamic_batching { }"), {"1/model.onnx": arithmetic_file("Mul", 3)}
    )
    write_model(folder, "join", JOIN, python_file('return answer(SUM=given("LEFT") + given("RIGHT"))'))
    write_model(folder, "grumpy", one_in_one_out("dynamic_batching { }"), python_file(GRUMPY))
    io = {"IN": "IN"}
    chain = [
        ("gather", io, {"OUT": "a"}),
        ("plus_one", {"IN": "a"}, {"OUT": "b"}),
        ("times_three", {"IN": "b"}, {"OUT": "OUT"}),
    ]
    write_model(folder, "chain", ensemble_text(["IN"], ["OUT"], chain))
    diamond = [
        ("gather", io, {"OUT": "a"}),
        ("plus_one", {"IN": "a"}, {"OUT": "b"}),
        ("times_three", {"IN": "a"}, {"OUT": "c"}),
        ("join", {"LEFT": "b", "RIGHT": "c"}, {"SUM": "OUT"}),
    ]
    write_model(folder, "diamond", ensemble_text(["IN"], ["OUT"], diamond))
    fork = [("plus_one", io, {"OUT": "PLUS"}), ("times_three", io, {"OUT": "TIMES"})]
    write_model(folder, "fork", ensemble_text(["IN"], ["PLUS", "TIMES"], fork))
    nested = [
        ("fork", io, {"PLUS": "p", "TIMES": "t"}),
        ("join", {"LEFT": "p", "RIGHT": "t"}, {"SUM": "s"}),
        ("plus_one", {"IN": "s"}, {"OUT": "OUT"}),
    ]
    write_model(folder, "nested", ensemble_text(["IN"], ["OUT"], nested))
    fragile = [("plus_one", io, {"OUT": "a"}), ("grumpy", {"IN": "a"}, {"OUT": "OUT"})]
    write_model(folder, "fragile", ensemble_text(["IN"], ["OUT"], fragile))

    write_model(folder, "tells", TELLS, python_file(TELL))
    prefers = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: %d }"
    echo = python_file('return answer(OUT=given("IN"))')
    write_model(folder, "prefers_four", one_in_one_out(prefers % 2_000_000), echo)
    write_model(
        folder, "waits_a_little", one_in_one_out("dynamic_batching { max_queue_delay_microseconds: 300000 }"), echo
    )
    any_width = one_in_one_out(
        "dynamic_batching { max_queue_delay_microseconds: 300000 }", "data_type: TYPE_FP32 dims: [ -1 ]"
    )
    write_model(folder, "any_width", any_width, echo)
    write_model(folder, "no_batcher", one_in_one_out(), echo)
    sleeps = 'time.sleep(float(given("IN").max())); return answer(OUT=given("IN"))'
    write_model(folder, "sleeps", one_in_one_out(), python_file(sleeps))
    return folder


@pytest.fixture(scope="session")
def served(repository: Path) -> Iterator[Served]:
    """One server of `repository` for this whole folder. Tests leave it idle."""
    with serving(repository) as running:
        yield running
        assert running.process.poll() is None, f"the server died with status {running.process.poll()}:\n{running.log}"


# ------------------------------------------------------------------------------------------------------------ clients


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.address, concurrency=32, network_timeout=ANSWER_S_MAX) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds` from the moment the last byte of its request was sent."""

    status: int
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> list[Any]:
        """The values of the only output."""
        assert self.status == 200, self.body
        (output,) = self.json["outputs"]
        values: list[Any] = output["data"]
        return values

    @property
    def error(self) -> str:
        text: str = self.json["error"]
        return text


class Wire:
    """A client that controls the time of requests: those sent together arrive within about a millisecond."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=ANSWER_S_MAX)

    @staticmethod
    def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def infer_request(self, model: str, rows: Sequence[Sequence[float]], datatype: str = "FP32", **more: Any) -> bytes:
        """A JSON request with the one input IN."""
        flat = [number for row in rows for number in row]
        tensor = {"name": "IN", "shape": [len(rows), len(rows[0])], "datatype": datatype, "data": flat}
        return self.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor], **more}).encode())

    def infer(self, model: str, rows: Sequence[Sequence[float]], **more: Any) -> Answer:
        return self.together([self.infer_request(model, rows, **more)])[0]

    def get(self, path: str) -> Answer:
        return self.together([self.request("GET", path)])[0]

    def post(self, path: str, body: bytes = b"", *headers: str) -> Answer:
        return self.together([self.request("POST", path, body, *headers)])[0]

    def together(self, requests: Sequence[bytes]) -> list[Answer]:
        """Send each request on a connection of its own; the last bytes of all are sent together, in order."""
        sockets = [self.connect() for _ in requests]
        try:
            for each, request in zip(sockets, requests, strict=True):
                each.sendall(request[:-1])
            began = time.monotonic()
            for each, request in zip(sockets, requests, strict=True):
                each.sendall(request[-1:])
            return self._read_all(sockets, began)
        finally:
            for each in sockets:
                each.close()

    @staticmethod
    def _read_all(sockets: Sequence[socket.socket], began: float) -> list[Answer]:
        """Read until the server closes each connection, so that a second response would be seen."""
        received = {each: bytearray() for each in sockets}
        seconds: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector:
            for each in sockets:
                selector.register(each, selectors.EVENT_READ)
            while len(seconds) < len(sockets):
                ready = selector.select(ANSWER_S_MAX)
                assert ready, f"no answer on {len(sockets) - len(seconds)} connections"
                for key, _ in ready:
                    ready_socket = key.fileobj
                    assert isinstance(ready_socket, socket.socket)
                    piece = ready_socket.recv(1 << 20)
                    received[ready_socket] += piece
                    if not piece:
                        selector.unregister(ready_socket)
                        seconds[ready_socket] = time.monotonic() - began
        return [_answer(bytes(received[each]), seconds[each]) for each in sockets]

    def waiting(self, model: str) -> int:
        """The number of requests that wait for `model`, from the metrics."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(f'nv_inference_pending_request_count{{model="{model}"'):
                return int(float(line.split()[-1]))
        raise AssertionError(f"no pending count of '{model}'")

    def statistics(self, model: str) -> dict[str, Any]:
        """The row of the model's statistics; it must have one version."""
        (row,) = self.get(f"/v2/models/{model}/stats").json["model_stats"]
        found: dict[str, Any] = row
        return found

    def graph_statistics(self, model: str) -> dict[str, Any]:
        """The same of flowserve's own statistics."""
        (row,) = self.get(f"/flowserve/models/{model}/stats").json["graph_stats"]
        found: dict[str, Any] = row
        return found

    def batches(self, model: str) -> dict[int, int]:
        """Rows of a batch -> how many such batches ran."""
        return {row["batch_size"]: row["compute_infer"]["count"] for row in self.statistics(model)["batch_stats"]}

    def batches_during(self, models: Sequence[str], action: Callable[[], Any]) -> tuple[Any, dict[str, dict[int, int]]]:
        """What `action` returns, and the batches each model ran meanwhile."""
        before = {model: self.batches(model) for model in models}
        result = action()
        after = {model: self.batches(model) for model in models}
        changed = {
            model: {size: runs - before[model].get(size, 0) for size, runs in after[model].items()} for model in models
        }
        return result, {model: {size: runs for size, runs in sizes.items() if runs} for model, sizes in changed.items()}

    @staticmethod
    def until(condition: Callable[[], bool], what: str) -> None:
        """Poll until the condition holds; another process sends no notification."""
        for _ in range(2000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError(f"never: {what}")


def _answer(received: bytes, seconds: float) -> Answer:
    head, found, body = received.partition(b"\r\n\r\n")
    assert found, f"no whole answer: {received[:200]!r}"
    lines = head.split(b"\r\n")
    lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
    assert lengths == [len(body)], f"an answer of {lengths} bytes, {len(body)} came: {received[:400]!r}"
    return Answer(int(lines[0].split()[1]), body, seconds)


@pytest.fixture(scope="session")
def wire(served: Served) -> Wire:
    return Wire(served.port)


@pytest.fixture(scope="session")
def wire_to() -> Callable[[Served], Wire]:
    """A `Wire` to a server of the test's own."""
    return lambda served: Wire(served.port)
