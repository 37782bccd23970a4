"""No request delays others because of its size: attacks on one server, while another process requests /v2/health/live
and watches the server's memory. `--attack-megabytes 60` has the full size.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from flowserve.testing.serve import Served
from tests.support.forked import serving

SILENCE_MS_MAX = 200
ATTEMPTS = 5  # the machine may be busy for a moment; a stall of the server occurs each time
SPARE_MB = 40  # what a first request of its kind allocates, whatever its size
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", {result})]) for x in arrays]
"""
CONFIG = """
backend: "python"
max_batch_size: {batch}
input {{ name: "X" data_type: TYPE_{dtype} dims: [ {dims} ] }}
output {{ name: "Y" data_type: TYPE_{out} dims: [ -1 ] }}
"""
STRINGS = 'np.resize(np.array([b"", b"abc"], np.object_), int(x[0]))'
MODELS = {
    "first": ("FP32", "FP32", "-1", 0, "x.ravel()[:1].copy()"),
    "narrow": ("FP32", "FP32", "4", 8, "x.copy()"),
    "count": ("STRING", "INT32", "-1", 0, "np.array([x.size], np.int32)"),
    "steps": ("INT32", "FP32", "-1", 0, "np.linspace(0, 1, int(x[0]), dtype=np.float32)"),
    "strings": ("INT32", "STRING", "-1", 0, STRINGS),
    "strings_thread": ("INT32", "STRING", "-1", 0, STRINGS),
    "back": ("STRING", "STRING", "-1", 0, "x[::-1].copy()"),
    "back_thread": ("STRING", "STRING", "-1", 0, "x[::-1].copy()"),
}
# From a process to another one, and to the server's process.
ENSEMBLES = {
    "to_process": ("strings", "back"),
    "to_thread": ("strings", "back_thread"),
    "from_thread": ("strings_thread", "back"),
}
ENSEMBLE = """
platform: "ensemble"
input {{ name: "X" data_type: TYPE_INT32 dims: [ -1 ] }}
output {{ name: "Y" data_type: TYPE_STRING dims: [ -1 ] }}
ensemble_scheduling {{
  step {{
    model_name: "{0}" model_version: -1
    input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "S" }}
  }}
  step {{
    model_name: "{1}" model_version: -1
    input_map {{ key: "X" value: "S" }} output_map {{ key: "Y" value: "Y" }}
  }}
}}
"""
# Prints the longest wait for a response in ms, without the time for which another program had the processor, and the
# most memory in KiB that the server had.
WATCH = """
import os, select, socket, sys, time
port, pid = int(sys.argv[1]), sys.argv[2]

def delayed_ms():
    delayed = 0
    for process in (pid, "self"):
        for thread in os.listdir(f"/proc/{process}/task"):
            try:
                with open(f"/proc/{process}/task/{thread}/schedstat") as numbers:
                    delayed += int(numbers.read().split()[1])
            except OSError:
                pass  # it has ended, or this kernel does not count
    return delayed / 1e6

live = socket.create_connection(("127.0.0.1", port))
longest, most = 0.0, 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.003)[0]:
    began, delayed = time.perf_counter(), delayed_ms()
    live.sendall(b"GET /v2/health/live HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    assert live.recv(4096).startswith(b"HTTP/1.1 200")
    took_ms = (time.perf_counter() - began) * 1000
    if took_ms > 100:
        took_ms -= max(delayed_ms() - delayed, 0)
    longest = max(longest, took_ms)
    with open(f"/proc/{pid}/status") as status:
        most = max(most, *(int(line.split()[1]) for line in status if line.startswith("VmRSS")))
print(longest, most)
"""


def write_model(repository: Path, name: str) -> None:
    dtype, out, dims, batch, result = MODELS[name]
    (repository / name / "1").mkdir(parents=True)
    text = CONFIG.format(dtype=dtype, out=out, dims=dims, batch=batch)
    if name.endswith("_thread"):
        text += 'parameters { key: "execution" value: { string_value: "thread" } }'
    (repository / name / "config.pbtxt").write_text(text)
    (repository / name / "1" / "model.py").write_text(MODEL.format(result=result))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("stalls")
    for name in MODELS:
        write_model(repository, name)
    for name, steps in ENSEMBLES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(*steps))
    with serving(repository, "--allow-grpc=true", "--grpc-port=0", "--allow-client-shm=true") as served:
        yield served


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> int:
    """Of a body, in bytes."""
    megabytes: int = request.config.getoption("--attack-megabytes")
    return megabytes * 1_000_000


@dataclass
class Outcome:
    status: int
    body: bytes
    silence_ms: float
    grown_mb: float


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def watched(server: Served, act: Callable[[], tuple[int, bytes]]) -> Outcome:
    """The result of `act`, the longest wait of another client meanwhile, and the memory that the server used for it."""
    before = memory_mb(server.pid)
    command = [sys.executable, "-c", WATCH, str(server.port), str(server.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "ready\n"
        status, body = act()
        said, _ = watch.communicate("\n", timeout=60)
    longest, most = said.split()
    return Outcome(status, body, float(longest), int(most) / 1024 - before)


def attacked(server: Served, act: Callable[[], tuple[int, bytes]], body_bytes: int) -> Outcome:
    """The outcome of an attack, which must not delay others and takes at most four times `body_bytes` of memory."""
    for attempt in range(ATTEMPTS):
        outcome = watched(server, act)
        assert outcome.grown_mb <= 4 * body_bytes / 1_000_000 + SPARE_MB
        if outcome.silence_ms < SILENCE_MS_MAX:
            print(f"/v2/health/live took {outcome.silence_ms:.0f} ms at most")
            break
        assert attempt < ATTEMPTS - 1, f"/v2/health/live took {outcome.silence_ms:.0f} ms"
    return outcome


def post(server: Served, path: str, body: bytes, *headers: str) -> tuple[int, bytes]:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close", *headers]
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode())
        with suppress(OSError):  # a refusal may come before the whole body
            client.sendall(body)
        received = bytearray()
        while piece := client.recv(1 << 20):
            received += piece
    head_text, _, answer = bytes(received).partition(b"\r\n\r\n")
    return int(head_text.split()[1]), answer


def infer(model: str) -> str:
    return f"/v2/models/{model}/infer"


def request(datatype: str, count: int, data: bytes) -> bytes:
    return b'{"inputs":[{"name":"X","datatype":"%b","shape":[%d],"data":%b}]}' % (datatype.encode(), count, data)


@pytest.mark.fault("W2")
@pytest.mark.parametrize("is_whole", [True, False], ids=["the data of an input", "the whole body"])
def test_a_small_body_that_unpacks_to_millions_of_lists(server: Served, size: int, is_whole: bool) -> None:
    lists = b"[" + b"[]," * (size // 3) + b"[]]"
    packed = gzip.compress(request("FP32", 1, lists) if is_whole else lists, 6)
    outcome = attacked(server, lambda: post(server, infer("first"), packed, "Content-Encoding: gzip"), size)
    assert outcome.status in (400, 413)


@pytest.mark.fault("W2")
@pytest.mark.parametrize("path", ["/v2/logging", "/v2/models/first/generate", "/v2/repository/models/first/load"])
def test_millions_of_lists_for_other_endpoints(server: Served, size: int, path: str) -> None:
    body = b'{"X":[' + b"[]," * (size // 3) + b"[]]}"
    assert attacked(server, lambda: post(server, path, body), size).status == 413


@pytest.mark.fault("W2")
def test_numbers_as_json_are_accepted(server: Served, size: int) -> None:
    numbers = np.random.default_rng(0).random(size // 19).astype(np.float32)
    body = request("FP32", len(numbers), json.dumps(numbers.tolist()).encode())
    outcome = attacked(server, lambda: post(server, infer("first"), body), len(body))
    assert outcome.status == 200
    assert json.loads(outcome.body)["outputs"][0]["data"] == [pytest.approx(float(numbers[0]), rel=1e-6)]


@pytest.mark.fault("W2")
def test_numbers_in_lists_of_their_own_are_accepted(server: Served, size: int) -> None:
    count = size // 8
    body = request("FP32", count, b"[" + b",".join([b"[[0.5]]"] * count) + b"]")
    assert attacked(server, lambda: post(server, infer("first"), body), len(body)).status == 200


@pytest.mark.fault("W2")
def test_millions_of_empty_strings_as_json(server: Served, size: int) -> None:
    body = request("BYTES", size // 3, b"[" + b",".join([b'""'] * (size // 3)) + b"]")
    assert attacked(server, lambda: post(server, infer("count"), body), size).status == 413


@pytest.mark.fault("W2")
def test_millions_of_empty_binary_strings(server: Served, size: int) -> None:
    count = size // 4
    entry = {"name": "X", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [entry]}).encode()
    header = f"Inference-Header-Content-Length: {len(head)}"
    outcome = attacked(server, lambda: post(server, infer("count"), head + bytes(4 * count), header), size)
    assert outcome.status == 413
    assert b"--max-bytes-elements" in outcome.body


@pytest.mark.fault("W2")
def test_as_many_strings_as_are_accepted(server: Served, size: int) -> None:
    texts = json.dumps(["a" * (size // 65_536 - 3)] * 65_536).encode()
    outcome = attacked(server, lambda: post(server, infer("count"), request("BYTES", 65_536, texts)), size)
    assert outcome.status == 200
    assert json.loads(outcome.body)["outputs"][0]["data"] == [65_536]


@pytest.mark.fault("W2")
def test_a_large_output_as_json(server: Served, size: int) -> None:
    count = min(size, 1 << 24)
    body = request("INT32", 1, b"[%d]" % count)
    outcome = attacked(server, lambda: post(server, infer("steps"), body), 12 * count)
    assert outcome.status == 200
    assert outcome.body.count(b",") > count
    assert outcome.body[-4:] == b"]}]}"
    assert b"--http-max-json-elements" in post(server, infer("steps"), request("INT32", 1, b"[16777217]"))[1]


def strings_by_http(server: Served, model: str, count: int, *, is_binary: bool) -> tuple[int, bytes]:
    entry = {"name": "X", "datatype": "INT32", "shape": [1], "data": [count]}
    body = {"inputs": [entry], "parameters": {"binary_data_output": is_binary}}
    return post(server, infer(model), json.dumps(body).encode())


def strings_by_grpc(server: Served, model: str, count: int, *, is_stream: bool) -> tuple[int, bytes]:
    request = ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<i", count)])
    request.inputs.add(name="X", datatype="INT32", shape=[1])
    with grpc.insecure_channel(server.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        if is_stream:
            (answer,) = stub.ModelStreamInfer(iter([request]), timeout=300)
            assert not answer.error_message
            return 200, answer.infer_response.raw_output_contents[0]
        return 200, stub.ModelInfer(request, timeout=300).raw_output_contents[0]


@pytest.mark.fault("W2")
@pytest.mark.parametrize(
    ("way", "model"),
    [
        ("binary", "strings"),
        ("json", "to_thread"),
        ("grpc", "from_thread"),
        ("stream", "to_process"),
        ("stream", "strings_thread"),
    ],
)
def test_an_output_of_very_many_strings(server: Served, way: str, model: str) -> None:
    count = 1_400_000  # with fewer, work on the event loop would not be detected
    pair = [b"", b"abc"] if model.startswith("strings") else [b"abc", b""]

    def act() -> tuple[int, bytes]:
        if way in ("binary", "json"):
            return strings_by_http(server, model, count, is_binary=way == "binary")
        return strings_by_grpc(server, model, count, is_stream=way == "stream")

    outcome = attacked(server, act, 100 * count)
    assert outcome.status == 200
    if way == "json":
        written = b",".join([b'"%b"' % one for one in pair] * (count // 2))
        assert outcome.body.endswith(b'"data":[%b]}]}' % written)
    else:
        wire = b"".join(struct.pack("<I", len(one)) + one for one in pair) * (count // 2)
        assert outcome.body.endswith(wire)


@pytest.mark.fault("W2")
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_large_strings_for_a_process(server: Served, size: int, way: str) -> None:
    count = 65_536
    wire = (struct.pack("<I", size // count) + b"a" * (size // count)) * count
    entry = {"name": "X", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": len(wire)}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()

    def by_http() -> tuple[int, bytes]:
        return post(server, infer("back"), head + wire, f"Inference-Header-Content-Length: {len(head)}")

    def by_grpc() -> tuple[int, bytes]:
        request = ModelInferRequest(model_name="back", raw_input_contents=[wire])
        request.inputs.add(name="X", datatype="BYTES", shape=[count])
        with grpc.insecure_channel(server.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel:
            answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=300)
        return 200, answer.raw_output_contents[0]

    outcome = attacked(server, by_http if way == "http" else by_grpc, 2 * len(wire))  # the response is as long
    assert outcome.status == 200
    assert outcome.body.endswith(wire)


# ---------------------------------------------------------------------------------------------- shared memory


def region_path() -> Path:
    return Path(f"/dev/shm/flowserve-test-{os.getpid()}")


@pytest.fixture
def region(server: Served, size: int) -> Iterator[int]:
    """The size of a registered region named `large`, full of FP32 1.0."""
    nbytes = size * 16
    path = region_path()
    try:
        with path.open("wb") as file:
            piece = np.ones(1 << 20, np.float32).tobytes()
            for start in range(0, nbytes, len(piece)):
                file.write(piece[: nbytes - start])
        place = json.dumps({"key": path.name, "offset": 0, "byte_size": nbytes}).encode()
        assert post(server, "/v2/systemsharedmemory/region/large/register", place)[0] == 200
        yield nbytes
    finally:
        post(server, "/v2/systemsharedmemory/region/large/unregister", b"")
        path.unlink(missing_ok=True)


def portion(shape: list[int], nbytes: int) -> bytes:
    place = {"shared_memory_region": "large", "shared_memory_byte_size": nbytes}
    return json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": shape, "parameters": place}]}).encode()


@pytest.mark.fault("W6")
def test_a_large_portion_of_shared_memory_is_read(server: Served, region: int) -> None:
    body = portion([region // 4], region)
    outcome = attacked(server, lambda: post(server, infer("first"), body), region)
    assert outcome.status == 200
    assert json.loads(outcome.body)["outputs"][0]["data"] == [1]


@pytest.mark.fault("W6")
def test_a_portion_that_the_model_cannot_take_is_refused_before_it_is_read(server: Served, region: int) -> None:
    body = portion([region // 16, 4], region)
    os.truncate(region_path(), 0)  # reading it would be another error
    outcome = attacked(server, lambda: post(server, infer("narrow"), body), 0)
    assert outcome.status == 400
    assert b"batch-size must be <= 8" in outcome.body


@pytest.mark.fault("W6")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_large_output_is_written_to_shared_memory(server: Served, region: int, protocol: str) -> None:
    count = region // 4

    def by_http() -> tuple[int, bytes]:
        place = {"shared_memory_region": "large", "shared_memory_byte_size": region}
        entry = {"name": "X", "datatype": "INT32", "shape": [1], "data": [count]}
        body = {"inputs": [entry], "outputs": [{"name": "Y", "parameters": place}]}
        return post(server, infer("steps"), json.dumps(body).encode())

    def by_grpc() -> tuple[int, bytes]:
        tensor = triton_grpc.InferInput("X", [1], "INT32")
        tensor.set_data_from_numpy(np.array([count], np.int32))
        output = triton_grpc.InferRequestedOutput("Y")
        output.set_shared_memory("large", region)
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            client.infer("steps", [tensor], outputs=[output], client_timeout=300)
        return 200, b""

    outcome = attacked(server, by_http if protocol == "http" else by_grpc, region)
    assert outcome.status == 200
    found = np.fromfile(region_path(), np.float32)
    assert (found[0], found[-1], len(found)) == (0, 1, count)


@pytest.mark.fault("W6")
def test_portions_are_treated_alike_over_grpc(server: Served, region: int) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:

        def call(model: str, shape: list[int]) -> tuple[int, bytes]:
            tensor = triton_grpc.InferInput("X", shape, "FP32")
            tensor.set_shared_memory("large", region)
            try:
                found = client.infer(model, [tensor], client_timeout=300)
            except triton_grpc.InferenceServerException as error:
                return 400, str(error).encode()
            array = found.as_numpy("Y")
            assert array is not None
            return 200, array.tobytes()

        outcome = attacked(server, lambda: call("first", [region // 4]), region)
        assert (outcome.status, outcome.body) == (200, np.ones(1, np.float32).tobytes())
        outcome = attacked(server, lambda: call("narrow", [region // 16, 4]), 0)
        assert b"batch-size must be <= 8" in outcome.body


def unread(ports: set[str]) -> int:
    """The bytes on a connection between two local ports, in hexadecimal, that the kernel still holds."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues = line.split()[:5]
        if {local.partition(":")[2], remote.partition(":")[2]} == ports:
            total += sum(int(one, 16) for one in queues.split(":"))
    return total


@pytest.mark.fault("W2", "X1")
def test_a_large_body_that_has_arrived_is_answered_during_a_drain(tmp_path: Path) -> None:
    write_model(tmp_path, "first")
    count = 600_000
    data = ",".join(["1.25"] * count)
    body = f'{{"inputs":[{{"name":"X","datatype":"FP32","shape":[{count}],"data":[{data}]}}]}}'.encode()
    with serving(tmp_path) as served, socket.create_connection(("127.0.0.1", served.port)) as client:
        head = f"POST /v2/models/first/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        ports = {f"{client.getsockname()[1]:04X}", f"{served.port:04X}"}
        give_up = time.monotonic() + 30
        while unread(ports):  # until the server has read the body
            assert time.monotonic() < give_up
            time.sleep(0.001)
        os.kill(served.pid, signal.SIGTERM)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
