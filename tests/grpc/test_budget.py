"""Large messages: they count against the budget that HTTP has, one that has arrived is answered during a drain, and a
client that leaves during a large response leaves no traceback.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from flowserve.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from flowserve.testing.serve import Served
from tests.grpc.conftest import ECHO, REPEATS, SLEEPS, one_in_one_out, write
from tests.support.forked import serving

pytestmark = pytest.mark.server

SERVICE = "/inference.GRPCInferenceService"
LIMIT = 40_000_000
ELEMENTS = 2_000_000
LARGE_REPEATS = REPEATS.replace("np.array([place], np.float32)", "np.full(1_000_000, place, np.float32)")
LEAVER = """
import sys, grpc
call = grpc.insecure_channel(sys.argv[1], [("grpc.max_receive_message_length", -1)]).stream_stream(sys.argv[2])
answers = call(iter([bytes.fromhex(sys.argv[3])]))
next(answers)
print("reads", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("grpc_budget")
    write(repository, "sleeps", SLEEPS, one_in_one_out())
    write(repository, "strings", ECHO, one_in_one_out(spec="data_type: TYPE_STRING dims: [ -1 ]"))
    write(repository, "repeats", LARGE_REPEATS, one_in_one_out("model_transaction_policy { decoupled: true }"))
    limits = ("--http-max-input-size", str(LIMIT // 2), "--http-max-total-input-size", str(LIMIT))
    with serving(repository, *options, *limits, "--max-bytes-elements", str(ELEMENTS)) as running:
        yield running


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc_address, [("grpc.max_receive_message_length", -1)]) as made:
        yield made


def message(model: str, datatype: str, data: bytes, count: int, request_id: str = "") -> bytes:
    made = ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[data])
    made.inputs.add(name="IN", datatype=datatype, shape=[count])
    return made.SerializeToString()


def numbers(seconds: float, count: int) -> bytes:
    """A message for `sleeps`."""
    return message("sleeps", "FP32", np.full(count, seconds, np.float32).tobytes(), count, "mine")


def held_bytes(served: Served) -> int:
    with urllib.request.urlopen(f"{served.base_url}/metrics") as answer:
        found = re.search(r"^flowserve_http_body_bytes (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.fault("W3")
def test_messages_and_bodies_share_one_budget(served: Served, channel: grpc.Channel) -> None:
    infer = channel.unary_unary(f"{SERVICE}/ModelInfer", response_deserializer=ModelInferResponse.FromString)
    stream = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", response_deserializer=ModelStreamInferResponse.FromString
    )
    first, second = numbers(1.5, LIMIT // 6), numbers(0, LIMIT // 6)
    running = infer.future(first, timeout=60)
    until(lambda: held_bytes(served) == len(first))
    with pytest.raises(grpc.RpcError, match="--http-max-total-input-size") as refused:
        infer(second, timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(urllib.error.HTTPError, match="503") as full:
        urllib.request.urlopen(f"{served.base_url}/v2/models/sleeps/infer", bytes(LIMIT // 2))
    assert b"--http-max-total-input-size" in full.value.read()
    full.value.close()
    for answer, is_refused in zip(stream(iter([second, numbers(0, 1)]), timeout=60), (True, False), strict=True):
        assert ("--http-max-total-input-size" in answer.error_message) == is_refused
        assert answer.infer_response.id == "mine"
    assert running.result().id == "mine"
    until(lambda: not held_bytes(served))
    (streamed,) = stream(iter([second]), timeout=60)
    assert not streamed.error_message
    until(lambda: not held_bytes(served))


@pytest.mark.fault("H11")
def test_a_client_that_leaves_during_a_large_response_leaves_no_traceback(served: Served) -> None:
    request = message("repeats", "FP32", np.array([200], np.float32).tobytes(), 1).hex()
    command = [sys.executable, "-c", LEAVER, served.grpc_address, f"{SERVICE}/ModelStreamInfer", request]
    for _ in range(3):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leaver:
            assert leaver.stdout is not None
            assert leaver.stdout.readline() == "reads\n"
            leaver.kill()
    until(lambda: '"repeats"' not in pending(served))
    assert "Traceback" not in served.log


def pending(served: Served) -> str:
    with urllib.request.urlopen(f"{served.base_url}/metrics") as answer:
        text: str = answer.read().decode()
    return "".join(
        line for line in text.splitlines() if line.startswith("nv_inference_pending") and not line.endswith(" 0")
    )


@pytest.mark.fault("X1")
def test_a_large_message_of_a_stream_that_has_arrived_is_answered_during_a_drain(
    served: Served, channel: grpc.Channel
) -> None:
    stream = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", response_deserializer=ModelStreamInferResponse.FromString
    )
    large = message("strings", "BYTES", bytes(4 * ELEMENTS), ELEMENTS)
    answers = stream(iter([large]), timeout=60)
    until(lambda: held_bytes(served) == len(large))  # a thread decodes it now
    served.process.send_signal(signal.SIGTERM)
    answer = next(answers)
    assert not answer.error_message
    assert answer.infer_response.raw_output_contents[0] == bytes(4 * ELEMENTS)
    assert served.process.wait(30) == 0
    assert "Traceback" not in served.log
