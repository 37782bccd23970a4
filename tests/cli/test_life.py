"""Start and end of server processes, as an operator sees them. End-to-end tests with real processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from flowserve.testing.serve import START_S_MAX, DidNotServe, Served, serving

pytestmark = pytest.mark.server

Serve = Callable[..., Served]

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""

MODEL = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        pathlib.Path({started!r}).touch()
        {execute}
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in arrays]
"""

BODY = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1.5]}]}


def write_model(repository: Path, name: str, *, initialize: str = "pass", execute: str = "pass") -> Path:
    """A Python model that echoes X as Y. Returns the file it creates when it starts to execute."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    started = repository.parent / f"{name}.started"
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL.format(initialize=initialize, execute=execute, started=str(started)))
    return started


def wait_for(file: Path) -> str:
    """The body of an `execute` that returns when the test creates `file`."""
    return f"while not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)"


def infer(served: Served, name: str, within_s: float = 30) -> httpx.Response:
    return httpx.post(
        f"{served.base_url}/v2/models/{name}/infer", json=BODY, timeout=within_s, trust_env=False, verify=False
    )


def get(served: Served, path: str) -> httpx.Response:
    return httpx.get(served.base_url + path, timeout=10, trust_env=False, verify=False)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; there is no notification from another process."""
    patience = time.monotonic() + 30
    while time.monotonic() < patience:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"never: {what}")


# ---------------------------------------------------------------------------------------------------------- starting


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without models, on port zero, for tests that do not change it."""
    with serving(tmp_path_factory.mktemp("empty"), "--http-port", "0") as served:
        yield served


def test_a_start_prints_loading_models_deployments_and_the_url(tmp_path: Path, serve: Serve) -> None:
    write_model(tmp_path, "echo")
    served = serve(tmp_path)
    assert "loading echo" in served.lines
    assert any(re.fullmatch(r"ready   echo in \d+\.\d\d s", line) for line in served.lines)
    row = next(line for line in served.lines if "/v2/models/echo/infer" in line)
    assert row.split() == ["echo", "1", "python", "-", "/v2/models/echo/infer"]
    assert infer(served, "echo").json()["outputs"][0]["data"] == [1.5]
    assert served.stop() == 0


@pytest.mark.fault("K2")
def test_a_repository_that_is_missing_is_named(tmp_path: Path, serve: Serve) -> None:
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path / "nowhere")
    assert ended.value.status == 1
    assert ended.value.log.startswith("flowserve: model repository '")
    assert ended.value.log.endswith("nowhere' does not exist (give the folder that holds the models' folders)\n")


@pytest.mark.fault("K2")
def test_a_mistyped_repository_gets_the_similar_name(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path / "modles")
    assert ended.value.log.endswith('modles\' does not exist (did you mean "models"?)\n')


@pytest.mark.fault("K2")
def test_a_repository_that_is_a_file_is_named(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path / "file")
    assert ended.value.status == 1
    assert ended.value.log.endswith("file' is a file; give the folder that holds the models' folders\n")


@pytest.mark.fault("K3")
def test_an_empty_repository_is_served_and_ready(empty: Served) -> None:
    assert get(empty, "/v2/health/ready").status_code == 200
    index = httpx.post(empty.base_url + "/v2/repository/index", timeout=10, trust_env=False, verify=False)
    assert index.json() == []
    assert "there is no model here: a repository is a folder of models' folders" in empty.log


@pytest.mark.fault("K4")
def test_a_port_in_use_ends_the_start_before_anything_is_loaded(tmp_path: Path, empty: Served) -> None:
    started = tmp_path / "initialized"
    write_model(tmp_path / "models", "echo", initialize=f"pathlib.Path({str(started)!r}).touch()")
    command = [sys.executable, "-m", "flowserve", "run", str(tmp_path / "models"), "--http-port", str(empty.port)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=START_S_MAX, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith(f"flowserve: cannot listen on 127.0.0.1 port {empty.port}: address already in use;")
    assert "--http-port" in second.stderr
    assert not started.exists()
    assert get(empty, "/v2/health/live").status_code == 200


@pytest.mark.fault("K5")
def test_port_zero_picks_a_port_and_the_last_line_names_it(empty: Served) -> None:
    assert re.fullmatch(r"listening on http://127\.0\.0\.1:[1-9]\d*", empty.lines[-1])
    assert get(empty, "/v2/health/live").status_code == 200


@pytest.mark.fault("K6")
def test_a_port_that_is_not_permitted_is_named(tmp_path: Path, serve: Serve) -> None:
    first_free = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if os.geteuid() == 0 or not first_free.exists() or int(first_free.read_text()) <= 80:
        pytest.skip("port 80 is permitted to this user")
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path, "--http-port", "80")
    assert ended.value.status == 1
    assert "cannot listen on 127.0.0.1 port 80: permission denied; ports below 1024" in ended.value.log


@pytest.mark.fault("K6")
def test_an_unreadable_model_is_unavailable_with_the_reason(tmp_path: Path, serve: Serve) -> None:
    if os.geteuid() == 0:
        pytest.skip("the administrator may read everything")
    write_model(tmp_path, "echo")
    (tmp_path / "echo" / "config.pbtxt").chmod(0)
    served = serve(tmp_path, "--exit-on-error", "false", "--strict-readiness", "false")
    assert "echo/config.pbtxt" in served.log
    assert "ermission denied" in served.log


def test_an_address_of_another_machine_is_refused_with_a_hint(tmp_path: Path, serve: Serve) -> None:
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path, "--http-address", "192.0.2.1")
    assert ended.value.status == 1
    assert "try --http-address 127.0.0.1" in ended.value.log


def test_a_model_that_fails_to_load_ends_the_start_and_is_explained(tmp_path: Path, serve: Serve) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", initialize="raise RuntimeError('no weights today')")
    with pytest.raises(DidNotServe) as ended:
        serve(tmp_path)
    assert ended.value.status == 1
    assert "flowserve: 1 of 2 models failed to load:\n  bad\n" in ended.value.log
    assert "no weights today" in ended.value.log
    assert "--exit-on-error false serves the models that did load" in ended.value.log


def test_models_that_load_are_served_with_exit_on_error_false(tmp_path: Path, serve: Serve) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", initialize="raise RuntimeError('no weights today')")
    served = serve(tmp_path, "--exit-on-error", "false")
    assert infer(served, "good").status_code == 200
    assert get(served, "/v2/health/ready").status_code != 200
    assert any("bad" in line and "not available" in line for line in served.lines)


def test_strict_readiness_can_be_disabled(tmp_path: Path, serve: Serve) -> None:
    write_model(tmp_path, "bad", initialize="raise RuntimeError('no weights today')")
    served = serve(tmp_path, "--exit-on-error=0", "--strict-readiness=0")
    assert get(served, "/v2/health/ready").status_code == 200


def test_a_low_descriptor_limit_is_raised_to_the_hard_limit(tmp_path: Path, serve: Serve) -> None:
    """Each model in a process needs some; the usual 1024 are little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # inherited
    try:
        served = serve(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed, _ = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
    assert allowed == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))


# ------------------------------------------------------------------------------------------------------------ ending


@pytest.fixture
def hang_ups_count() -> Iterator[None]:
    """A server inherits that SIGHUP is ignored, as the tests do if they run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups_count")
@pytest.mark.fault("X1", "X2", "W10")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_running_requests_finish_and_new_ones_are_refused(tmp_path: Path, serve: Serve, number: signal.Signals) -> None:
    done = tmp_path / "done"
    started = write_model(tmp_path / "models", "slow", execute=wait_for(done))
    served = serve(tmp_path / "models")
    with ThreadPoolExecutor(5) as clients:
        answers = [clients.submit(infer, served, "slow") for _ in range(5)]
        wait_until(started.exists, "the first request runs")
        wait_until(lambda: _pending(served, "slow") == 4, "four wait")
        served.process.send_signal(number)
        wait_until(lambda: _is_stopping(served), "readiness says so")
        health = get(served, "/v2/health/live")
        assert (health.status_code, health.headers["connection"]) == (200, "close")
        refused = infer(served, "slow")
        assert (refused.status_code, refused.json()["error"][:18]) == (503, "Server is stopping")
        done.touch()
        assert [answer.result().status_code for answer in answers] == [200] * 5
    assert served.process.wait(10) == 0


@pytest.mark.fault("X2")
def test_a_request_on_an_open_connection_is_refused_while_draining(tmp_path: Path, serve: Serve) -> None:
    done = tmp_path / "done"
    started = write_model(tmp_path / "models", "slow", execute=wait_for(done))
    served = serve(tmp_path / "models")
    with ThreadPoolExecutor(1) as clients, socket.create_connection(("127.0.0.1", served.port), timeout=10) as half:
        answer = clients.submit(infer, served, "slow")
        wait_until(started.exists, "the request runs")
        half.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n")  # neither idle nor complete
        wait_until(lambda: get(served, "/v2/health/ready").status_code == 200, "the half request has arrived")
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _is_stopping(served), "the signal has arrived")
        half.sendall(b"\r\n")
        assert not half.recv(65536).startswith(b"HTTP/1.1 200")
        done.touch()
        assert answer.result().status_code == 200
    assert served.process.wait(10) == 0


@pytest.mark.fault("X3")
def test_idle_connections_are_closed_at_once_and_do_not_delay_the_exit(tmp_path: Path, serve: Serve) -> None:
    served = serve(tmp_path)
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as idle:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        assert served.stop(within_s=3) == 0
        assert idle.recv(65536) == b""


@pytest.mark.fault("X5")
def test_a_hanging_model_does_not_outlast_the_exit_timeout_and_is_named(tmp_path: Path, serve: Serve) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models", "--exit-timeout-secs", "1")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(infer, served, "stuck")
        wait_until(started.exists, "the request runs")
        assert served.stop(within_s=3) == 1
        assert "stopping: 1 requests under way, 0 sequences open; computing: stuck_0" in served.log
        assert "not finished within the exit timeout (--exit-timeout-secs): stuck_0" in served.log
        assert answer.result().status_code == 503
        assert "the server is stopping" in answer.result().json()["error"]


@pytest.mark.fault("W10")
@pytest.mark.parametrize("timeout_s", ["0", "1"])
def test_requests_of_a_hanging_model_get_503_at_the_exit_timeout(tmp_path: Path, serve: Serve, timeout_s: str) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models", "--exit-timeout-secs", timeout_s, "--python-execution", "process")
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(infer, served, "stuck")]
        wait_until(started.exists, "the first request runs")
        answers += [clients.submit(infer, served, "stuck") for _ in range(2)]
        pending = 'nv_inference_pending_request_count{model="stuck",version="1"} 2'
        wait_until(lambda: pending in get(served, "/metrics").text, "the others wait")
        assert served.stop(within_s=5) == 1
        for answer in answers:
            assert answer.result().status_code == 503
            assert "stopping" in answer.result().json()["error"]


@pytest.mark.fault("X5")
def test_a_hanging_model_is_named_if_its_client_disconnects_during_the_drain(tmp_path: Path, serve: Serve) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models", "--exit-timeout-secs", "3")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(infer, served, "stuck", 1.5)  # longer than the grace period after the exit timeout
        wait_until(started.exists, "the request runs")
        assert served.stop(within_s=10) == 1
        assert isinstance(answer.exception(), httpx.ReadTimeout)
    assert "not closed within the exit timeout (--exit-timeout-secs): stuck_0" in served.log


@pytest.mark.fault("X5")
def test_a_model_that_blocks_the_event_loop_does_not_outlast_the_exit_timeout(tmp_path: Path, serve: Serve) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models", "--exit-timeout-secs", "1", "--python-execution", "inline")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(infer, served, "stuck")
        wait_until(started.exists, "the request runs")
        assert served.stop(within_s=3) == 1
        assert "stuck/1/model.py" in served.log
        assert isinstance(answer.exception(), httpx.HTTPError)


@pytest.mark.fault("X5")
def test_a_request_still_waiting_for_a_batch_at_the_end_is_answered(tmp_path: Path, serve: Serve) -> None:
    write_model(tmp_path / "models", "waits")
    batching = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 600000000 }"
    config = tmp_path / "models/waits/config.pbtxt"
    config.write_text(CONFIG.replace("max_batch_size: 0", batching))
    served = serve(tmp_path / "models", "--exit-timeout-secs", "1")
    body = {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}]}
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(
            httpx.post, f"{served.base_url}/v2/models/waits/infer", json=body, trust_env=False, verify=False
        )
        pending = 'nv_inference_pending_request_count{model="waits",version="1"} 1'
        wait_until(lambda: pending in get(served, "/metrics").text, "the request waits")
        assert served.stop(within_s=3) == 1
        assert "--exit-timeout-secs): requests that wait in queues" in served.log
        assert answer.result().status_code == 503
        assert answer.result().json()["error"].startswith("Server is stopping")


@pytest.mark.fault("X6")
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, serve: Serve) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(infer, served, "stuck")
        wait_until(started.exists, "the request runs")
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _is_stopping(served), "the first signal has arrived")
        assert served.stop(within_s=1) == 128 + signal.SIGTERM
        assert isinstance(answer.exception(), httpx.HTTPError)


@pytest.mark.usefixtures("hang_ups_count")
@pytest.mark.fault("W10")
def test_hang_ups_of_all_processes_drain_the_server(tmp_path: Path, serve: Serve) -> None:
    """A closed terminal may send SIGHUP twice, and a service manager to every process."""
    done = tmp_path / "done"
    started = write_model(tmp_path / "models", "slow", execute=wait_for(done))
    served = serve(tmp_path / "models")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(infer, served, "slow")
        wait_until(started.exists, "the request runs")
        for _ in range(2):
            for pid in _processes(served.pid):
                os.kill(pid, signal.SIGHUP)
            wait_until(lambda: _is_stopping(served), "the signal has arrived")
        done.touch()
        assert answer.result().status_code == 200
    assert served.process.wait(10) == 0


def _processes(pid: int) -> list[int]:
    """A process and all that its threads started, as far as the system lists them."""
    children = [child for one in Path(f"/proc/{pid}/task").glob("*/children") for child in one.read_text().split()]
    return [pid, *(one for child in children for one in _processes(int(child)))]


@pytest.mark.fault("W10")
def test_a_server_started_with_nohup_ignores_a_closed_terminal(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "echo")
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a process inherits it
    try:
        with serving(tmp_path / "models") as served:
            served.process.send_signal(signal.SIGHUP)
            assert infer(served, "echo").status_code == 200
            assert get(served, "/v2/health/ready").status_code == 200
            assert served.stop() == 0
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_model_busy_for_disconnected_callers_is_named_when_the_server_stops(tmp_path: Path, serve: Serve) -> None:
    started = write_model(tmp_path / "models", "stuck", execute="time.sleep(600)")
    served = serve(tmp_path / "models")
    with pytest.raises(httpx.ReadTimeout):
        infer(served, "stuck", within_s=0.5)
    assert started.exists()
    gone = 'nv_inference_request_failure{model="stuck",reason="CANCELED",version="1"} 1'
    wait_until(lambda: gone in get(served, "/metrics").text, "it is noticed that the caller left")
    served.process.send_signal(signal.SIGTERM)
    told = "stopping: 0 requests under way, 0 sequences open; computing for callers who have left: stuck_0"
    wait_until(lambda: told in served.log, "the server logs the busy instances")
    assert served.stop(within_s=1) == 128 + signal.SIGTERM


@pytest.mark.fault("X7")
def test_a_signal_while_loading_ends_the_process(tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    write_model(tmp_path / "models", "slow", initialize=f"pathlib.Path({str(loading)!r}).touch(); time.sleep(600)")
    command = [sys.executable, "-m", "flowserve", "run", str(tmp_path / "models"), "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(loading.exists, "the model loads")
            process.terminate()
            assert process.wait(5) == 0
        finally:
            process.kill()


def _pending(served: Served, name: str) -> int:
    found = re.search(
        rf'nv_inference_pending_request_count{{model="{name}",version="1"}} (\d+)', get(served, "/metrics").text
    )
    return int(found[1]) if found else -1


def _is_stopping(served: Served) -> bool:
    """Uses its own connection: health checks of a draining server are answered."""
    return get(served, "/v2/health/ready").status_code == 400
