"""Timeouts and deadlines that pass while a batch runs, as clients see them.

Models wait for a file that the test creates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving

TIMEOUT_US = 150_000
LATE = "Request timeout expired: its deadline passed after "
ANSWERS = 'parameters { key: "answer_at_timeout" value { string_value: "%s" } }\n'
IN_OUT = """
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Requests with a negative number keep the instance busy until the release file exists.
WAITS = """
import os, time
import triton_python_backend_utils as pb_utils


def number_of(request):
    number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    while number[0, 0] < 0 and not os.path.exists("FOLDER/release"):
        time.sleep(0.002)
    with open("FOLDER/ran", "a") as file:
        file.write(f"NAME {number[0, 0]:g}\\n")
    return number


def answered(number):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number)])


class TritonPythonModel:
    def execute(self, requests):
        return [answered(2 * number_of(request)) for request in requests]
"""
STREAMS = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(answered(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()))
            number_of(request)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLS = """
    def execute(self, requests):
        return [self.ask(request.inputs()) for request in requests]

    def ask(self, inputs):
        wanted = {"inputs": inputs, "requested_output_names": ["OUT"], "timeout": 150_000}
        call = pb_utils.InferenceRequest(model_name="runs", **wanted)
        error = call.exec().error()
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"code {int(error.code())}: {error.message()}"))
"""
SUMS = """
    def execute(self, requests):
        self.sum = getattr(self, "sum", 0) + number_of(requests[0])
        return [answered(self.sum)]
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 direct { } }"
PIPE = """
platform: "ensemble"
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step { model_name: "first" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "a" } }
  step { model_name: "second" model_version: -1 input_map { key: "IN" value: "a" } output_map { key: "OUT" value: "OUT" } }
}
"""  # noqa: E501


def write_models(add_model: Callable[..., Path], folder: Path, models: dict[str, tuple[str, str]]) -> Path:
    """Models by name: the end of the configuration, and the method `execute` ("" for the usual one)."""
    for name, (config, execute) in models.items():
        code = WAITS.replace("FOLDER", str(folder)).replace("NAME", name)
        if execute:
            code = code[: code.index("    def execute")] + execute.lstrip("\n")
        add_model(folder / "models", name, IN_OUT + config, {"1/model.py": code})
    return folder / "models"


class Late:
    """A server whose models wait, in `folder`."""

    def __init__(self, served: Served, wire: Any, folder: Path) -> None:
        self.served = served
        self.wire = wire
        self.folder = folder

    def ask(self, model: str, number: float, timeout_us: int = TIMEOUT_US, **more: Any) -> Any:
        return self.wire.infer(model, [[number]], parameters={"timeout": timeout_us, **more})

    def release(self) -> None:
        (self.folder / "release").touch()

    def ran(self) -> list[str]:
        """The model and the number of each request that ran to its end, in this order."""
        file = self.folder / "ran"
        return file.read_text().splitlines() if file.exists() else []

    def failures(self, model: str) -> dict[str, int]:
        failures = self.wire.graph_statistics(model)["failures"]
        return {reason: count for reason, count in failures.items() if count}

    def successes(self, model: str) -> int:
        return int(self.wire.statistics(model)["inference_stats"]["success"]["count"])


@pytest.fixture(scope="module", params=["thread", *(["process"] if SUPPORTED else [])])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    place: str, tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path], wire_to: Any
) -> Iterator[Late]:
    folder = tmp_path_factory.mktemp("late")
    decoupled = "model_transaction_policy { decoupled: true }"
    default = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 150000 } }"
    models = write_models(
        add_model,
        folder,
        {
            "runs": (ANSWERS % "true", ""),
            "default": (ANSWERS % "true" + default, ""),
            "unanswered": ("", ""),
            "first": ("", ""),
            "second": ("", ""),
            "streams": (ANSWERS % "true" + decoupled, STREAMS),
            "calls": ("", CALLS),
            "sums": (ANSWERS % "true" + SEQUENCES, SUMS),
        },
    )
    add_model(models, "pipe", PIPE + ANSWERS % "true")
    with serving(models, "--python-execution", place, "--allow-grpc", "true", "--grpc-port", "0") as served:
        yield Late(served, wire_to(served), folder)
        assert served.process.poll() is None, served.log
        assert "Traceback" not in served.log


@pytest.fixture
def late(server: Late) -> Iterator[Late]:
    (server.folder / "ran").unlink(missing_ok=True)
    yield server
    server.release()
    server.wire.until(lambda: server.ask("first", 1.0).status == server.ask("runs", 1.0).status == 200, "all is idle")
    (server.folder / "release").unlink()


def refusal(answer: Any) -> str:
    """The text of a refusal at the timeout."""
    assert answer.status == 504, answer.body
    waited_ms = int(answer.error.partition(LATE)[2].split()[0])
    assert TIMEOUT_US / 1000 <= waited_ms < 30_000
    return str(answer.error)


@pytest.mark.fault("W7")
def test_a_request_is_answered_at_its_timeout_while_it_runs_and_its_instance_stays_taken(late: Late) -> None:
    failed, succeeded = late.failures("runs"), late.successes("runs")
    assert refusal(late.ask("runs", -7.0)).startswith(LATE)
    assert late.ran() == []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(late.ask, "runs", 3.0, 0)
        late.wire.until(lambda: late.wire.waiting("runs") == 1, "the next request waits for the instance")
        late.release()
        assert following.result().data == [6.0]
    assert late.ran() == ["runs -7", "runs 3"], "its batch ran to the end, with its tensors"
    assert late.failures("runs") == {"REJECTED": failed.get("REJECTED", 0) + 1}
    assert late.successes("runs") == succeeded + 1


@pytest.mark.fault("W7")
def test_the_default_timeout_of_a_queue_is_answered_too(late: Late) -> None:
    refusal(late.wire.infer("default", [[-1.0]]))


@pytest.mark.fault("W7")
def test_without_the_option_a_timeout_limits_waiting_only(late: Late) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(late.ask, "unanswered", -1.0, 1000)
        refusal(late.ask("runs", -1.0))  # long after the timeout of the other request
        assert not answer.done()
        late.release()
        assert answer.result().data == [-2.0]


@pytest.mark.fault("W7")
def test_a_timeout_in_an_ensemble_covers_all_steps_and_drops_the_later_ones(late: Late) -> None:
    failed = late.failures("pipe").get("REJECTED", 0)
    text = refusal(late.ask("pipe", -1.0))
    assert text.startswith(f"in ensemble 'pipe', {LATE}")
    assert "it was in step 'first'" in text
    late.release()
    late.wire.until(lambda: "first -1" in late.ran(), "the step runs to its end")
    assert late.ask("pipe", 4.0, 60_000_000).data == [16.0]
    assert late.ran() == ["first -1", "first 4", "second 8"], "the second step of the late request does not run"
    assert late.failures("pipe") == {"REJECTED": failed + 1}
    assert late.failures("first") == late.failures("second") == {}


@pytest.mark.fault("W7")
def test_a_timeout_of_a_waiting_step_removes_it_from_its_queue(late: Late) -> None:
    refusal(late.ask("pipe", -1.0))  # `first` is busy
    text = refusal(late.ask("pipe", 5.0))
    assert "it was in step 'first'" in text
    assert late.wire.waiting("first") == 0
    assert late.failures("first")["CANCELED"] >= 1
    late.release()


@pytest.mark.fault("W7")
def test_a_call_of_a_model_fails_at_its_timeout(late: Late) -> None:
    answer = late.ask("calls", -1.0, 0)
    assert answer.status == 500
    assert answer.error.startswith(f"code 4: {LATE}")


@pytest.mark.fault("W7")
def test_a_late_request_of_a_sequence_keeps_its_slot_until_its_batch_is_complete(late: Late) -> None:
    refusal(late.ask("sums", -10.0, sequence_id=5, sequence_start=True))
    with ThreadPoolExecutor(2) as pool:
        following = pool.submit(late.ask, "sums", 3.0, 0, sequence_id=5, sequence_end=True)
        late.wire.until(lambda: late.wire.waiting("sums") == 1, "the next request of the sequence waits")
        late.release()
        assert following.result().data == [-7.0], "the late request ran before, in the same sequence"
    assert late.ran() == ["sums -10", "sums 3"]


def grpc_inputs(number: float) -> Sequence[triton.InferInput]:
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[number]], np.float32))
    return [tensor]


@pytest.mark.fault("W7")
def test_over_grpc_the_status_is_deadline_exceeded(late: Late) -> None:
    with triton.InferenceServerClient(late.served.grpc_address) as client:
        with pytest.raises(InferenceServerException, match=LATE) as raised:
            client.infer("runs", grpc_inputs(-1.0), timeout=TIMEOUT_US)
        assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"


@pytest.mark.fault("W7")
def test_a_stream_ends_with_an_error_at_its_timeout(late: Late) -> None:
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    failed = late.failures("streams").get("REJECTED", 0)
    with triton.InferenceServerClient(late.served.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("streams", grpc_inputs(-1.0), timeout=TIMEOUT_US)
        first, no_error = answers.get(timeout=30)
        assert no_error is None
        assert first.as_numpy("OUT").tolist() == [[-1.0]]
        nothing, error = answers.get(timeout=30)
        assert nothing is None
        assert LATE in str(error)
        assert late.ran() == []
        late.release()
        client.async_stream_infer("streams", grpc_inputs(1.0))
        assert answers.get(timeout=30)[0].as_numpy("OUT").tolist() == [[1.0]], "one error, and then the next request"
        client.stop_stream()
    assert late.failures("streams") == {"REJECTED": failed + 1}


@pytest.mark.fault("W7")
def test_the_server_option_is_for_all_models_that_do_not_say_otherwise(
    tmp_path: Path, add_model: Callable[..., Path], wire_to: Any
) -> None:
    models = write_models(add_model, tmp_path, {"plain": ("", ""), "other": (ANSWERS % "false", "")})
    with serving(models, "--answer-at-timeout", "true", "--python-execution", "thread") as served:
        late = Late(served, wire_to(served), tmp_path)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(late.ask, "other", -1.0, 1000)
            refusal(late.ask("plain", -1.0))
            assert not other.done()
            late.release()
            assert other.result().data == [-2.0]
