"""Disks without room for logs, traces and output: a server goes on, and reports each of them in one line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import STOP_S_MAX
from tests.support.forked import serving

FULL = Path("/dev/full")
CONFIG = """
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "execution" value { string_value: "thread" } }
"""
# Raises, which is logged with its traceback, for negative numbers.
CODE = """
        if given("IN")[0, 0] < 0:
            raise ValueError("no negative numbers")
        return answer(OUT=given("IN"))
"""
BODY = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}]}

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture
def models(tmp_path: Path, add_model: Callable[..., Path], make_python: Any) -> Path:
    add_model(tmp_path / "models", "m", CONFIG, make_python(CODE))
    return tmp_path / "models"


@pytest.mark.fault("R7", "W10")
def test_a_log_file_on_a_full_disk_costs_one_line_and_requests_are_served(
    models: Path, tmp_path: Path, wire_to: Any
) -> None:
    log = tmp_path / "log"
    log.symlink_to(FULL)
    with serving(models, "--log-file", str(log)) as served:
        wire = wire_to(served)
        for _ in range(5):
            assert wire.infer("m", [[-1.0]]).status == 500
            assert wire.infer("m", [[2.0]]).data == [2.0]
        said = f"log file '{log}' cannot be written: No space left on device; log records are lost until it can be"
        assert served.log == f"flowserve: {said}\n"
        log.unlink()  # the operator makes room
        assert wire.infer("m", [[-1.0]]).status == 500
        assert "no negative numbers" in log.read_text()
        assert f"log records were lost: log file '{log}' could not be written\n" in log.read_text()
        assert served.stop() == 0
        assert served.log == f"flowserve: {said}\n"


@pytest.mark.fault("R7", "W10")
def test_a_server_whose_output_and_log_cannot_be_written_serves(models: Path, tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    command = [sys.executable, "-m", "flowserve", "run", str(models), "--allow-grpc", "false"]
    with FULL.open("w") as full:
        process = subprocess.Popen([*command, "--http-address", f"unix:{socket}"], stdout=full, stderr=full)
    with process, httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=30) as client:
        try:
            while not socket.exists() or client.get("http://h/v2/health/ready").status_code != 200:
                assert process.poll() is None
                time.sleep(0.02)
            for number, status in ((-1, 500), (1, 200), (-1, 500), (1, 200)):
                body = {"inputs": [{**BODY["inputs"][0], "data": [number]}]}
                assert client.post("http://h/v2/models/m/infer", json=body).status_code == status
            process.terminate()
            assert process.wait(STOP_S_MAX) == 0
        finally:
            process.kill()


@pytest.fixture
def file_limit() -> Callable[[int, int], None]:
    """Limits the size of the files that a process writes: beyond it, writing fails as on a full disk."""

    def limit(pid: int, nbytes: int) -> None:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))

    if not hasattr(resource, "prlimit"):
        pytest.skip("needs prlimit")
    return limit


@pytest.mark.fault("R7", "W10")
def test_a_trace_file_on_a_full_disk_costs_one_line_and_is_whole_again_when_there_is_room(
    models: Path, tmp_path: Path, wire_to: Any, file_limit: Callable[[int, int], None]
) -> None:
    file = tmp_path / "trace.json"
    settings = [f"triton,file={file}", "level=TIMESTAMPS", "rate=1"]
    with serving(models, *[word for one in settings for word in ("--trace-config", one)]) as served:
        wire = wire_to(served)
        file_limit(served.pid, 20_000)
        while "cannot be written" not in served.log:
            assert wire.infer("m", [[2.0]]).data == [2.0]
        for _ in range(50):
            assert wire.infer("m", [[2.0]]).data == [2.0]
        assert file.stat().st_size <= 20_000
        _, line = served.log.splitlines()  # the first line names the server
        assert line.endswith(f"trace file '{file}' cannot be written: File too large; traces are lost until it can be")
        file_limit(served.pid, resource.RLIM_INFINITY)
        before = file.stat().st_size
        wire.until(lambda: wire.infer("m", [[2.0]]).data == [2.0] and file.stat().st_size > before, "it goes on")
        assert served.stop() == 0
    assert len(json.loads(file.read_text())) > 10


@pytest.mark.fault("W10")
def test_the_settings_over_http_and_grpc_write_no_more_than_the_operator_allows(
    models: Path, tmp_path: Path, wire_to: Any
) -> None:
    file = tmp_path / "trace.json"
    options = [f"triton,file={file}", "triton,api-max-bytes=30000"]
    grpc = ("--allow-grpc", "true", "--grpc-port", "0")
    with serving(models, *grpc, *[word for one in options for word in ("--trace-config", one)]) as served:
        wire = wire_to(served)
        on = json.dumps({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "10"}).encode()
        settings = "/v2/models/m/trace/setting"
        answer = wire.post(settings, on)
        rounds = 0
        while answer.status == 200:
            for _ in range(12):
                assert wire.infer("m", [[2.0]]).data == [2.0]
            rounds += 1
            assert rounds < 100, "the limit is never reached"
            answer = wire.post(settings, on)
        assert (answer.status, "--trace-config triton,api-max-bytes=N" in answer.error) == (400, True)
        with triton.InferenceServerClient(served.grpc_address) as client:
            with pytest.raises(InferenceServerException, match="api-max-bytes=N"):
                client.update_trace_settings("m", {"trace_level": ["TIMESTAMPS"]})
        assert served.log.count("api-max-bytes") == 1
        for _ in range(20):
            assert wire.infer("m", [[2.0]]).data == [2.0]
        assert wire.post(settings, b'{"trace_level": ["OFF"]}').status == 200
        assert served.stop() == 0
    sizes = [os.stat(one).st_size for one in tmp_path.glob("trace.json*")]
    assert rounds > 1
    assert 5_000 < sum(sizes) <= 30_000
