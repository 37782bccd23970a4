"""Traces as an operator and a client of Triton see them: options, settings over HTTP and gRPC, and the file."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.http as triton
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from flowserve.cli.option_values import TRACE_SETTINGS
from flowserve.observe import trace
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import DidNotServe, Served
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the age of its generated code
    import tritonclient.grpc as triton_grpc

MODEL = 'backend: "onnxruntime" max_batch_size: 8 dynamic_batching {}'
ENSEMBLE = """platform: "ensemble" max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }] output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
ensemble_scheduling { step [
  { model_name: "same" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "middle" } },
  { model_name: "same" model_version: -1 input_map { key: "x" value: "middle" } output_map { key: "y" value: "y" } }
] }"""
CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.Tensor("x", pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy())]
        answer = pb_utils.InferenceRequest(model_name="same", inputs=inputs, requested_output_names=["y"]).exec()
        return [pb_utils.InferenceResponse(answer.output_tensors()) for _ in requests]
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 2)]) for array in given]
"""
DOUBLE_CONFIG = """backend: "python" max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }] output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
parameters { key: "execution" value: { string_value: "thread" } }"""
CALLER_CONFIG = """backend: "python" max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }] output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
parameters { key: "execution" value: { string_value: "thread" } }"""
SLOTS_CONFIG = """backend: "python" max_batch_size: 2 sequence_batching { direct {} }
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }] output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
parameters { key: "execution" value: { string_value: "thread" } }"""
# It responds with the trace context that it gets.
TOLD = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        told = [str(request.trace().get_context()).encode() for request in requests]
        inputs = [pb_utils.Tensor("x", np.ones((1, 4), np.float32))]
        call = dict(model_name="same", inputs=inputs, requested_output_names=["y"], trace=requests[0].trace())
        if pb_utils.InferenceRequest(**call).trace().get_context() != requests[0].trace().get_context():
            raise pb_utils.TritonModelException("a request forgot its trace")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([[one]], object))]) for one in told]
"""
TOLD_CONFIG = """backend: "python" max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }] output [{ name: "TOLD" data_type: TYPE_STRING dims: [1] }]
parameters { key: "execution" value: { string_value: "%s" } }"""
PLACES = ["thread", "inline", *(["process"] if SUPPORTED else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracing")
    for path, text in {
        "same/config.pbtxt": MODEL,
        "twice/config.pbtxt": ENSEMBLE,
        "caller/config.pbtxt": CALLER_CONFIG,
        "caller/1/model.py": CALLER,
        "double/config.pbtxt": DOUBLE_CONFIG,
        "double/1/model.py": DOUBLE,
        "slots/config.pbtxt": SLOTS_CONFIG,
        "slots/1/model.py": DOUBLE.replace('"IN"', '"x"').replace('"OUT"', '"y"'),
        **{f"told_{place}/config.pbtxt": TOLD_CONFIG % place for place in PLACES},
        **{f"told_{place}/1/model.py": TOLD for place in PLACES},
    }.items():
        (folder / "models" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "models" / path).write_text(text)
    (folder / "models/same/1").mkdir()
    (folder / "models/same/1/model.onnx").write_bytes(onnx_identity())
    (folder / "models/twice/1").mkdir()
    return folder


@pytest.fixture(scope="module")
def traced(folder: Path) -> Iterator[Served]:
    """A server that traces nothing until its settings change."""
    file = f"triton,file={folder / 'trace.json'}"
    grpc = ("--allow-grpc", "true", "--grpc-port", "0")
    with serving(folder / "models", *grpc, "--trace-config", file, "--trace-config", "rate=1") as served:
        yield served


def infer(served: Served, model: str, request_id: str = "") -> None:
    with triton.InferenceServerClient(served.address) as client:
        given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
        client.infer(model, [given], request_id=request_id)


def infer_by_grpc(served: Served, model: str) -> None:
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        given = triton_grpc.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
        client.infer(model, [given])


def traces(path: Path) -> list[Any]:
    """Each trace with its head, its timestamps by name and its tensors, as a summary tool puts them together."""
    found: dict[int, Any] = {}
    for one in json.loads(path.read_text()):
        trace = found.setdefault(one["id"], {"timestamps": {}, "tensors": []})
        stamps = {stamp["name"]: stamp["ns"] for stamp in one.pop("timestamps", ())}
        trace["timestamps"] |= stamps
        if "tensor" in one:
            trace["tensors"].append((one["activity"], one["tensor"]))
        else:
            trace.update(one)
    return [found[number] for number in sorted(found)]


def test_trace_settings_select_requests_and_a_used_up_count_writes_the_file(traced: Served, folder: Path) -> None:
    with triton.InferenceServerClient(traced.address) as client:
        before = client.get_trace_settings()
        assert before["trace_level"] == ["OFF"]
        assert before["trace_file"] == str(folder / "trace.json")
        infer(traced, "twice")
        asked = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_count": "1"}
        assert client.update_trace_settings("twice", asked) == {**before, **asked}
        infer(traced, "same")
        infer(traced, "twice", "r1")
        infer(traced, "twice", "r2")
        assert client.get_trace_settings("twice")["trace_count"] == "0"
        assert client.update_trace_settings("twice", dict.fromkeys(asked)) == before
    whole, *steps = traces(_written(folder / "trace.json.0"))
    assert (whole["model_name"], whole["request_id"]) == ("twice", "r1")
    assert [(step["model_name"], step["parent_id"]) for step in steps] == [("same", whole["id"])] * 2
    for step in steps:
        told = step["timestamps"]
        in_order = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"]
        moments = [told[name] for name in (*in_order, "COMPUTE_END", "REQUEST_END")]
        assert moments == sorted(moments)
        activities = [(activity, tensor["name"], tensor["data"]) for activity, tensor in step["tensors"]]
        ones = "1.0,1.0,1.0,1.0"
        assert activities == [("TENSOR_QUEUE_INPUT", "x", ones), ("TENSOR_BACKEND_OUTPUT", "y", ones)]
    in_order = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    moments = [whole["timestamps"][name] for name in in_order]
    assert moments == sorted(moments)


def test_grpc_requests_and_bls_calls_are_traced(traced: Served, folder: Path) -> None:
    with triton_grpc.InferenceServerClient(traced.grpc_address) as client:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "log_frequency": "2"})
        infer_by_grpc(traced, "caller")
        infer(traced, "same")
        assert client.get_trace_settings().settings["trace_level"].value == ["TIMESTAMPS"]
        client.update_trace_settings(settings={"trace_level": None, "log_frequency": None})
    outer, inner, plain = traces(_written(folder / "trace.json.1"))
    assert "GRPC_WAITREAD_START" in outer["timestamps"]
    assert "GRPC_SEND_END" in outer["timestamps"]
    assert [outer["model_name"], inner["model_name"], plain["model_name"]] == ["caller", "same", "same"]
    assert inner["parent_id"] == outer["id"]
    assert "parent_id" not in plain


def test_a_traced_request_also_returns_its_timing(traced: Served, folder: Path) -> None:
    with triton.InferenceServerClient(traced.address) as client:
        client.update_trace_settings("same", {"trace_level": ["TIMESTAMPS"], "trace_count": "1"})
        given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
        told = client.infer("same", [given], headers={"Flowserve-Timing": "1"}).get_response()
        client.update_trace_settings("same", {"trace_level": None, "trace_count": None})
    assert told["model_name"] == "same"
    assert [trace["model_name"] for trace in traces(_written(folder / "trace.json.2"))] == ["same"]


def test_an_unwritable_trace_file_is_reported_before_any_load(folder: Path) -> None:
    path = folder / "nowhere/trace.json"
    options = ("--trace-config", f"triton,file={path}", "--trace-config", "level=TIMESTAMPS")
    with pytest.raises(DidNotServe) as ended, serving(folder / "models", *options):
        pass
    assert ended.value.log.startswith(f"flowserve: trace file '{path}' cannot be written: there is no folder")


def _written(path: Path) -> Path:
    """The file's contents; a thread writes it shortly after the request."""
    for _ in range(500):
        if path.exists() and path.read_bytes().endswith(b"]"):
            return path
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


class Collector(BaseHTTPRequestHandler):
    """A collector of spans, which keeps the bodies that it receives."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Discards the standard log line."""


def stream_by_grpc(served: Served, model: str, context: str) -> None:
    """Two requests of one stream, whose caller traces it in `context`."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    given = triton_grpc.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error), headers={"traceparent": context})
        for _ in range(2):
            client.async_stream_infer(model, [given])
            assert answers.get(timeout=60) is None
        client.stop_stream()


def test_spans_reach_a_collector_below_their_callers_and_others_are_sampled(folder: Path) -> None:
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
    settings = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "opentelemetry,resource=service.name=mine"]
    settings.append(f"opentelemetry,url=http://127.0.0.1:{collector.server_port}/v1/traces")
    options = [word for setting in settings for word in ("--trace-config", setting)]
    try:
        with serving(folder / "models", *options, "--allow-grpc", "true", "--grpc-port", "0") as served:
            stream_by_grpc(served, "same", caller.replace("0af7", "0af9") + "1")
            with triton.InferenceServerClient(served.address) as client:
                given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
                for headers in ({"traceparent": f"{caller}1"}, {"traceparent": f"{caller}0"}, {}):
                    client.infer("twice", [given], headers=headers)
                joins = {"traceparent": f"{caller.replace('0af7', '0af8')}1"}
                told = {
                    place: [
                        client.infer(f"told_{place}", [given], headers=headers).as_numpy("TOLD")[0, 0].decode()
                        for headers in (joins, {})
                    ]
                    for place in PLACES
                }
            assert served.stop() == 0
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    sent = [ExportTraceServiceRequest.FromString(body) for body in Collector.bodies]
    spans = [span for one in sent for each in one.resource_spans for scope in each.scope_spans for span in scope.spans]
    below = {span.span_id.hex(): span.name for span in spans if span.trace_id.hex().startswith("0af8")}
    for context, nothing in told.values():
        _, trace, span, flags = json.loads(context)["traceparent"].split("-")
        assert (trace, below[span], flags) == (caller.split("-")[1].replace("0af7", "0af8"), "compute", "01")
        assert nothing == "None"
    spans = [span for span in spans if span.span_id.hex() not in below]
    streamed = [span for span in spans if span.trace_id.hex() == caller.split("-")[1].replace("0af7", "0af9")]
    wholes = [span.parent_span_id.hex() for span in streamed if span.name == "InferRequest"]
    assert wholes == [caller.split("-")[2]] * 2, "each request of the stream is below its caller"
    spans = [span for span in spans if span not in streamed]
    assert {span.trace_id.hex() for span in spans} == {caller.split("-")[1]}
    assert sorted(span.name for span in spans if span.name != "queue") == [
        "InferRequest",
        "compute",
        "compute",
        "same",
        "same",
        "twice",
    ]
    (whole,) = [span for span in spans if span.name == "InferRequest"]
    assert whole.parent_span_id.hex() == caller.split("-")[2]


def test_a_timeline_shows_the_events_of_its_recording(traced: Served) -> None:
    told: list[Any] = []

    def record() -> None:
        with urllib.request.urlopen(f"{traced.base_url}/v2/trace/timeline?seconds=0.5") as answer:
            told.append(json.load(answer))

    recording = threading.Thread(target=record)
    recording.start()
    while recording.is_alive():
        infer(traced, "twice")
    recording.join()
    events = told[0]["traceEvents"]
    requests = [one for one in events if one["ph"] == "X" and one["name"] == "twice"]
    assert len(requests) == told[0]["otherData"]["requests"] > 1
    batches = [one for one in events if one["ph"] == "X" and one["name"].startswith("batch") and one["pid"] != 1]
    assert len(batches) == 2 * len(requests)
    for text in ("0", "-1", "61", "nan", "x"):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{traced.base_url}/v2/trace/timeline?seconds={text}")


PAGE = Path(__file__).resolve().parents[2] / "docs/tracing.md"


def test_the_page_names_every_reason_and_every_setting() -> None:
    page = PAGE.read_text()
    reasons = [
        value for name, value in vars(trace).items() if name.isupper() and isinstance(value, str) and " " in value
    ]
    assert len(reasons) > 10
    assert [reason for reason in reasons if f"| {reason} |" not in page] == []
    settings = [name for names in TRACE_SETTINGS.values() for name in names]
    assert [name for name in settings if f"{name}=" not in page] == []


@pytest.mark.parametrize("command", re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_the_commands_of_the_page_work(traced: Served, tmp_path: Path, command: str) -> None:
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("needs bash and curl")
    command = command.replace("localhost:8000", traced.address).replace("seconds=2", "seconds=0.1")
    done = subprocess.run(
        ["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stdout
    if "grep" in command:
        assert re.match(r"(?i)server-timing: total;dur=[0-9.]+;start=0.000, ", done.stdout)
    if "timeline" in command:
        assert "traceEvents" in json.loads((tmp_path / "timeline.json").read_text())
    if "trace_rate" in command:
        assert json.loads(done.stdout)["trace_rate"] == "1"


def test_a_request_is_traced_with_its_tensors_where_the_slot_before_its_own_is_empty(traced: Served) -> None:
    asked = {"trace_level": ["TIMESTAMPS", "TENSORS"]}
    with triton.InferenceServerClient(traced.address, network_timeout=10) as client:
        client.update_trace_settings("slots", asked)
        for sequence, is_first in ((1, True), (2, True), (2, False), (1, False)):
            given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), sequence, np.float32))
            facts = {"sequence_id": sequence, "sequence_start": is_first, "sequence_end": not is_first}
            assert client.infer("slots", [given], **facts).as_numpy("y").tolist() == [[2 * sequence] * 4]
        client.update_trace_settings("slots", dict.fromkeys(asked))
    assert "Traceback" not in traced.log
