"""A running server's log as JSON: an object per line, and the trace of the request that a line is about."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import DidNotServe, Served
from tests.server.conftest import write_model
from tests.support.forked import serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the age of its generated code
    import tritonclient.grpc as triton_grpc

ELSEWHERE = ["thread", *(["process"] if SUPPORTED else [])]
PLACES = ["inline", *ELSEWHERE]
TENSORS = """
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]"""
CONFIG = f"""backend: "python" max_batch_size: 8 {TENSORS}
parameters {{ key: "execution" value: {{ string_value: "%s" }} }}"""
RAISES = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("first\\nsecond\\u2028third \\x1b[2K")
"""
ANSWERS_AND_RAISES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        raise ValueError("afterwards")
"""
ANSWERS_SOME_AND_RAISES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if request.request_id() != "left":
                request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        raise ValueError("afterwards")
"""
COROUTINE = ANSWERS_AND_RAISES.replace("def execute", "async def execute")
RETURNS = """
class TritonPythonModel:
    %s execute(self, requests):
        return ["nothing"]
"""
INVALID = ANSWERS_AND_RAISES.replace('[pb_utils.Tensor("Y", x)]', "[3]").replace('raise ValueError("afterwards")', "")
SENDS_AGAIN = "request.get_response_sender().send(response)"
DECOUPLED = "model_transaction_policy { decoupled: true }"
BATCH_OF_3 = "dynamic_batching { preferred_batch_size: [3] max_queue_delay_microseconds: 60000000 }"
CALLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="raises_thread", inputs=request.inputs(), requested_output_names=["Y"]
            )
            answer = call.exec()
        return [pb_utils.InferenceResponse(error=answer.error()) for _ in requests]
"""
ENSEMBLE = f"""platform: "ensemble" max_batch_size: 8 {TENSORS}
ensemble_scheduling {{ step {{
  model_name: "raises_thread" model_version: -1 input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }}
}} }}"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{SPAN}-01"
BODY = {"id": "r1", "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged")
    for place in PLACES:
        write_model(folder, f"raises_{place}", CONFIG % place, {"1/model.py": RAISES})
        write_model(folder, f"raises_in_batches_{place}", f"{CONFIG % place} {BATCH_OF_3}", {"1/model.py": RAISES})
    for place in ELSEWHERE:
        late = f"answers_and_raises_{place}"
        write_model(folder, late, f"{CONFIG % place} {DECOUPLED}", {"1/model.py": ANSWERS_AND_RAISES})
        answers_and_returns = ANSWERS_AND_RAISES.replace('raise ValueError("afterwards")', 'return ["nothing"]')
        late = f"answers_and_returns_{place}"
        write_model(folder, late, f"{CONFIG % place} {DECOUPLED}", {"1/model.py": answers_and_returns})
        write_model(folder, f"invalid_{place}", f"{CONFIG % place} {DECOUPLED}", {"1/model.py": INVALID})
        closed = ANSWERS_AND_RAISES.replace('raise ValueError("afterwards")', SENDS_AGAIN)
        write_model(folder, f"closed_{place}", f"{CONFIG % place} {DECOUPLED}", {"1/model.py": closed})
        for kind, execute in (("returns", "def"), ("returns_later", "async def")):
            write_model(folder, f"{kind}_{place}", f"{CONFIG % place} {DECOUPLED}", {"1/model.py": RETURNS % execute})
    write_model(folder, "coroutine", f"{CONFIG % ELSEWHERE[-1]} {DECOUPLED}", {"1/model.py": COROUTINE})
    for place in PLACES:
        some = f"answers_some_{place}"
        write_model(folder, some, f"{CONFIG % place} {BATCH_OF_3}", {"1/model.py": ANSWERS_SOME_AND_RAISES})
    write_model(folder, "calls", CONFIG % "thread", {"1/model.py": CALLS})
    write_model(folder, "graph", ENSEMBLE)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    with serving(repository, "--log-format", "json", "--allow-grpc", "true", "--grpc-port", "0") as one:
        yield one


@pytest.fixture
def logged(served: Served) -> Callable[[], list[dict[str, Any]]]:
    """The records since the test began. Every line of the log is an object."""
    before = len(served.log.splitlines())
    return lambda: _records(served.log)[before:]


def _records(log: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in log.splitlines()]
    for record in records:
        assert TIME.fullmatch(record["time"])
        assert record["level"] in ("INFO", "WARNING", "ERROR")
        assert record["logger"].startswith("flowserve.")
        assert isinstance(record["message"], str)
    return records


def _failed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["message"].startswith("a request to ")]


def _infer(served: Served, model: str, **headers: str) -> httpx.Response:
    headers |= {"accept-encoding": "identity"}
    return httpx.post(f"{served.base_url}/v2/models/{model}/infer", json=BODY, headers=headers, verify=False)


def _generate(served: Served, model: str) -> httpx.Response:
    url = f"{served.base_url}/v2/models/{model}/generate"
    return httpx.post(url, json={"X": 1.0, "id": "r1"}, headers={"traceparent": CONTEXT}, verify=False)


def _until(logged: Callable[[], list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """The records, once there are so many."""
    deadline = time.monotonic() + 30
    while len(records := logged()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return records


@pytest.mark.server
@pytest.mark.parametrize("model", [*(f"raises_{place}" for place in PLACES), "graph", "calls"])
def test_a_failed_request_is_one_line_with_its_trace_and_its_traceback(
    model: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _infer(served, model, traceparent=CONTEXT).status_code == 500
    failed = logged()
    assert failed == _failed(failed)
    (traceback,) = [one["exception"] for one in failed if "exception" in one]
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ValueError: first\nsecond\u2028third \x1b[2K")
    # A call that a model makes belongs to the trace of the request that the model runs.
    assert [one["model"] for one in failed] == (["raises_thread", "calls"] if model == "calls" else [model])
    for one in failed:
        assert one["level"] == "ERROR"
        assert (one["trace_id"], one["span_id"]) == (TRACE, SPAN)
    assert failed[-1]["request_id"] == "r1"


@pytest.mark.server
@pytest.mark.parametrize("place", PLACES)
def test_requests_that_fail_together_have_a_line_each_and_the_first_has_the_traceback(
    place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    sent = [f"{number:032x}" for number in range(1, 4)]
    with ThreadPoolExecutor(3) as pool:
        model = f"raises_in_batches_{place}"
        for response in pool.map(lambda trace: _infer(served, model, traceparent=f"00-{trace}-{SPAN}-01"), sent):
            assert response.status_code == 500
    records = logged()
    assert sorted(record["trace_id"] for record in records) == sent
    assert ["exception" in record for record in records] == [True, False, False]


@pytest.mark.server
@pytest.mark.parametrize("place", ELSEWHERE)
def test_an_exception_after_the_last_response_is_one_line_with_the_trace(
    place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _generate(served, f"answers_and_raises_{place}").status_code == 200
    (record,) = _until(logged, 1)
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)
    assert record["instance"].startswith("answers_and_raises")
    assert record["exception"].endswith("ValueError: afterwards")


@pytest.mark.server
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_after_some_responses_of_a_batch_is_in_the_lines_of_the_others(
    left: int, place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    def infer(number: int) -> int:
        body = {**BODY, "id": "left" if number < left else "answered"}
        url = f"{served.base_url}/v2/models/answers_some_{place}/infer"
        headers = {"traceparent": f"00-{number + 1:032x}-{SPAN}-01"}
        return httpx.post(url, json=body, headers=headers, verify=False).status_code

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(infer, range(3))] == [500] * left + [200] * (3 - left)
    records = _until(logged, 1)
    if left:
        assert sorted(record["trace_id"] for record in records) == [f"{number + 1:032x}" for number in range(left)]
        assert [record["request_id"] for record in records] == ["left"] * left
    else:
        assert sorted(one["trace_id"] for one in records[0]["traces"]) == [f"{number + 1:032x}" for number in range(3)]
    assert len(records) == max(left, 1)
    assert ["exception" in record for record in records] == [True] + [False] * (len(records) - 1)
    assert records[0]["exception"].endswith("ValueError: afterwards")


@pytest.mark.server
@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("kind", ["returns", "returns_later"])
def test_a_decoupled_model_that_returns_something_has_one_line_for_each_request(
    kind: str, place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _generate(served, f"{kind}_{place}").status_code == 500
    (record,) = logged()
    assert (record["trace_id"], record["span_id"], record["request_id"]) == (TRACE, SPAN, "r1")
    assert "must return None" in record["message"]
    assert "exception" not in record


@pytest.mark.server
@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_decoupled_model_that_returns_something_after_its_responses_has_one_line(
    place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _generate(served, f"answers_and_returns_{place}").status_code == 200
    (record,) = _until(logged, 1)
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)
    assert "must return None" in record["message"]


@pytest.mark.server
@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [("invalid", 500, "answered int where pb_utils.Tensor was expected"), ("closed", 200, "sender has been closed")],
)
def test_a_wrong_response_through_a_sender_is_one_line_with_the_trace(
    kind: str, status: int, text: str, place: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _generate(served, f"{kind}_{place}").status_code == status
    (record,) = _until(logged, 1)
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)
    assert text in record["message"]


@pytest.mark.server
@pytest.mark.skipif(not SUPPORTED, reason="worker processes need Linux")
def test_an_exception_of_a_coroutine_after_the_last_response_is_one_line(
    served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _generate(served, "coroutine").status_code == 200
    (record,) = _until(logged, 1)
    assert record["logger"] == "flowserve.model.coroutine"
    assert "afterwards" in record["message"]
    assert "Traceback" in record["message"]


@pytest.mark.server
@pytest.mark.parametrize("context", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_a_request_without_a_valid_trace_context_has_no_ids(
    context: str, served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    assert _infer(served, "raises_thread", **({"traceparent": context} if context else {})).status_code == 500
    (record,) = _failed(logged())
    assert record["request_id"] == "r1"
    assert not {"trace_id", "span_id", "traces"} & {*record}


@pytest.mark.server
def test_a_compressed_request_is_logged_with_its_trace(
    served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    headers = {"traceparent": CONTEXT, "content-encoding": "gzip"}
    url = f"{served.base_url}/v2/models/raises_thread/infer"
    assert httpx.post(url, content=body, headers=headers, verify=False).status_code == 500
    (record,) = _failed(logged())
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)


@pytest.mark.server
def test_a_failure_over_grpc_has_the_trace_of_its_request(
    served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    tensor = triton_grpc.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        with pytest.raises(triton_grpc.InferenceServerException):
            client.infer("raises_thread", [tensor], headers={"traceparent": CONTEXT})
    (record,) = _failed(logged())
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)


@pytest.mark.server
def test_a_failure_of_the_generate_extension_has_the_trace_of_its_request(
    served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    url = f"{served.base_url}/v2/models/raises_thread/generate"
    response = httpx.post(url, json={"X": 1.0}, headers={"traceparent": CONTEXT}, verify=False)
    assert response.status_code == 500
    (record,) = _failed(logged())
    assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)


@pytest.mark.server
def test_the_log_of_concurrent_requests_has_each_trace_once(
    served: Served, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    sent = [f"{number:032x}" for number in range(1, 17)]
    with ThreadPoolExecutor(8) as pool:
        for response in pool.map(lambda trace: _infer(served, "graph", traceparent=f"00-{trace}-{SPAN}-01"), sent):
            assert response.status_code == 500
    found = [record["trace_id"] for record in _failed(logged())]
    assert sorted(found) == sent


@pytest.mark.server
def test_the_format_can_be_changed_while_the_server_runs(repository: Path) -> None:
    with serving(repository) as served:
        before = served.log
        assert not before.startswith("{")
        changed = httpx.post(f"{served.base_url}/v2/logging", json={"log_format": "json"}, verify=False)
        assert changed.json()["log_format"] == "json"
        _infer(served, "raises_thread", traceparent=CONTEXT)
        (record,) = _failed(_records(served.log[len(before) :]))
        assert record["trace_id"] == TRACE


@pytest.mark.server
def test_a_start_that_fails_writes_a_line_for_each_problem(tmp_path: Path) -> None:
    write_model(tmp_path, "first", 'backend: "python" max_batch_sise: 1 inpt {}')
    write_model(tmp_path, "second", 'backend: "pyton"')
    with pytest.raises(DidNotServe) as ended, serving(tmp_path, "--log-format=json"):
        pass
    problems = [record for record in _records(ended.value.log) if record["level"] == "ERROR"]
    about = [record.get("model", "") for record in problems]
    assert about.count("first") == 2
    assert about.count("second") == 1
    assert [record["message"] for record in problems if "model" not in record] == [
        "2 of 2 models failed to load",
        "not serving; --exit-on-error false serves the models that did load",
    ]


class Collector(BaseHTTPRequestHandler):
    """Takes what is exported to it."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.server
def test_a_line_about_a_request_that_is_exported_as_spans_has_the_ids_of_its_own_span(repository: Path) -> None:
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    settings = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1"]
    settings.append(f"opentelemetry,url=http://127.0.0.1:{collector.server_port}/v1/traces")
    try:
        with serving(repository, "--log-format=json", *(f"--trace-config={one}" for one in settings)) as served:
            _infer(served, "raises_thread")
            _infer(served, "raises_thread", traceparent=CONTEXT)
            own, callers = _failed(_records(served.log))
            assert served.stop() == 0
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    sent = [ExportTraceServiceRequest.FromString(body) for body in Collector.bodies]
    spans = [
        (span.trace_id.hex(), span.span_id.hex())
        for one in sent
        for resource in one.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if span.name == "InferRequest"
    ]
    assert (own["trace_id"], own["span_id"]) in spans
    assert (callers["trace_id"], callers["span_id"]) in spans
    assert callers["trace_id"] == TRACE
    assert callers["span_id"] != SPAN  # the caller's span; the request is below it
