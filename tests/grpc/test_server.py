"""The gRPC server: limits, cancelled calls, ports, shutdown, and servers without gRPC."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import DidNotServe, Served
from tests.support.forked import serving

pytestmark = pytest.mark.server


def sleep_for(seconds: float) -> list[triton.InferInput]:
    made = triton.InferInput("IN", [1], "FP32")
    made.set_data_from_numpy(np.array([seconds], np.float32))
    return [made]


def metrics(served: Served) -> list[str]:
    with urllib.request.urlopen(f"{served.base_url}/metrics", timeout=60) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return lines


def canceled(served: Served, model: str) -> float:
    for line in metrics(served):
        if line.startswith("nv_inference_request_failure") and f'model="{model}"' in line and "CANCELED" in line:
            return float(line.split()[-1])
    raise AssertionError("no such counter")


def until(condition: Any) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.01)  # no event reports the progress of another process
    raise AssertionError("never")


def test_a_cancelled_call_withdraws_its_request(served: Served, client: triton.InferenceServerClient) -> None:
    before = canceled(served, "sleeps")
    calls = [client.async_infer("sleeps", sleep_for(1.0), lambda result, error: None) for _ in range(2)]
    until(lambda: _pending(served, "sleeps") == 1)
    for call in calls:
        call.cancel()
    until(lambda: canceled(served, "sleeps") == before + 2)


def test_a_deadline_of_the_client_withdraws_its_request(served: Served, client: triton.InferenceServerClient) -> None:
    before = canceled(served, "sleeps")
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        client.infer("sleeps", sleep_for(1.0), client_timeout=0.2)
    until(lambda: canceled(served, "sleeps") == before + 1)


def test_a_cancelled_stream_withdraws_all_its_requests(served: Served, client: triton.InferenceServerClient) -> None:
    before = canceled(served, "sleeps"), canceled(served, "repeats")
    client.start_stream(lambda result, error: None)
    for _ in range(3):
        client.async_stream_infer("sleeps", sleep_for(0.4))
    client.async_stream_infer("repeats", sleep_for(1e9))
    until(lambda: _pending(served, "sleeps") == 2)
    client.stop_stream(cancel_requests=True)
    until(lambda: (canceled(served, "sleeps"), canceled(served, "repeats")) == (before[0] + 3, before[1] + 1))


def test_a_cancelled_or_failed_stream_keeps_no_model_loaded(
    served: Served, client: triton.InferenceServerClient
) -> None:
    """References to the model end with the stream, not with the next garbage collection."""
    client.start_stream(lambda result, error: None)
    for _ in range(3):
        client.async_stream_infer("sleeps", sleep_for(0.2))
    client.async_stream_infer("repeats", sleep_for(1e9))
    until(lambda: _pending(served, "sleeps") == 2)
    client.stop_stream(cancel_requests=True)
    client.start_stream(lambda result, error: None, headers={"triton_grpc_error": "true"})
    client.async_stream_infer("fails", sleep_for(1))
    client.stop_stream()
    for model in ("sleeps", "repeats", "fails"):
        client.unload_model(model, client_timeout=10)
        client.load_model(model)


def _refusal(client: triton.InferenceServerClient) -> str:
    """The status of a small call, "" for none."""
    try:
        client.is_model_ready("sleeps")
    except InferenceServerException as error:
        return str(error.status())
    return ""


def _pending(served: Served, model: str) -> float:
    for line in metrics(served):
        if line.startswith(f'nv_inference_pending_request_count{{model="{model}"'):
            return float(line.split()[-1])
    return 0.0


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """A repository with the model "sleeps" only."""
    made = tmp_path / "models"
    made.mkdir()
    (made / "sleeps").symlink_to(repository / "sleeps", target_is_directory=True)
    return made


@pytest.mark.fault("H11", "H12")
def test_messages_larger_than_the_limit_are_refused(folder: Path, options: tuple[str, ...]) -> None:
    more = (
        "--grpc-max-message-size",
        "1000",
        "--grpc-max-calls",
        "1",
        "--grpc-keepalive-time",
        "1000",
        "--grpc-max-connection-age",
        "3600000",
    )
    with serving(folder, *options, *more) as served, triton.InferenceServerClient(served.grpc_address) as client:
        assert client.is_model_ready("sleeps")
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("sleeps", sleep_for(0))
        until(lambda: _refusal(client) == "StatusCode.RESOURCE_EXHAUSTED")
        client.stop_stream()
        until(lambda: not _refusal(client))
        large = triton.InferInput("IN", [1000], "FP32")
        large.set_data_from_numpy(np.zeros(1000, np.float32))
        with pytest.raises(InferenceServerException, match="larger than max") as refused:
            client.infer("sleeps", [large])
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        with pytest.raises(InferenceServerException, match=r"(?i)decompressed message larger than max"):
            client.infer("sleeps", [large], compression_algorithm="gzip")


def test_on_shutdown_requests_in_progress_finish_and_streams_end(folder: Path, options: tuple[str, ...]) -> None:
    with serving(folder, *options) as served, triton.InferenceServerClient(served.grpc_address) as client:
        answers: list[Any] = []
        done = threading.Event()

        def on_result(result: Any, error: Any) -> None:
            answers.append((result, error))
            done.set()

        ended: list[Any] = []
        with triton.InferenceServerClient(served.grpc_address) as streaming:
            streaming.start_stream(lambda result, error: ended.append((result, error)))
            streaming.async_stream_infer("sleeps", sleep_for(1.5))
            client.async_infer("sleeps", sleep_for(0.1), on_result)
            until(lambda: _pending(served, "sleeps") == 1)
            served.process.send_signal(signal.SIGTERM)
            with triton.InferenceServerClient(served.grpc_address) as probe:
                until(lambda: not probe.is_server_ready())
                assert probe.is_server_live()
            assert served.process.wait(30) == 0
            assert done.wait(30)
            until(lambda: len(ended) == 2)
        (result, error) = answers[0]
        assert error is None
        assert result.as_numpy("OUT").tolist() == [np.float32(0.1)]
        assert ended[0][1] is None
        assert "Server is stopping" in str(ended[1][1])
        assert "Traceback" not in served.log


def test_every_address_of_a_name_is_served_on_one_port(folder: Path, options: tuple[str, ...]) -> None:
    with serving(folder, *options, "--grpc-address", "localhost") as served:
        port = served.grpc_address.rpartition(":")[2]
        addresses = {
            str(place[0]) for _, _, _, _, place in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
        }
        for address in addresses:
            target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            with triton.InferenceServerClient(target) as client:
                assert client.is_server_live()


def test_a_unix_socket_is_served(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    where = f"unix:{tmp_path}/grpc"
    with serving(folder, *options, "--grpc-address", where) as served:
        assert served.grpc_address == where
        with triton.InferenceServerClient(where) as client:
            assert client.is_server_live()


def test_an_explicit_port_must_be_free(folder: Path, options: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DidNotServe) as ended, serving(folder, *options, "--grpc-port", str(port)):
            pass
    assert f"cannot listen on 127.0.0.1 port {port}: address already in use" in ended.value.log
    assert "choose another --grpc-port" in ended.value.log


def port_8001_taken() -> socket.socket:
    """Listens there, unless another process does so for long."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            return socket.create_server(("127.0.0.1", 8001))
        except OSError:  # perhaps of another test, which ends soon
            time.sleep(0.1)
    return socket.socket()


def test_if_the_default_port_is_taken_grpc_is_off_and_log_and_output_report_it(folder: Path) -> None:
    with port_8001_taken(), serving(folder, "--allow-grpc", "true", "--python-execution", "thread") as served:
        (line,) = [one for one in served.log.splitlines() if "gRPC is not served" in one]
        assert line.startswith("W")
        assert "gRPC is not served: cannot listen on 127.0.0.1 port 8001: address already in use; stop the" in line
        assert "or choose another --grpc-port (0 picks a free one). Clients of port 8001 do not reach" in line
        assert "gRPC is not served: port 8001 is not available, the log says why" in served.lines
        assert metrics(served)


def test_without_grpcio_only_http_is_served_and_the_log_has_a_hint(folder: Path, tmp_path: Path) -> None:
    # As in an interpreter without grpcio.
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["grpc"] = None\n')
    environment = {"PYTHONPATH": str(tmp_path)}
    with serving(folder, "--allow-grpc", "true", environment=environment) as served:
        assert "gRPC is not served: grpcio is not installed; `pip install 'flowserve[grpc]'` brings it" in served.log
    asked = ("--allow-grpc", "true", "--grpc-port", "0")
    with pytest.raises(DidNotServe) as ended, serving(folder, *asked, environment=environment):
        pass
    assert "flowserve: grpcio is not installed" in ended.value.log


def test_an_unknown_call_is_unimplemented(served: Served) -> None:
    with grpc.insecure_channel(served.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"", timeout=60)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
