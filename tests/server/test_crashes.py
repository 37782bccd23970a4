"""Models in processes crash, hang and misbehave without an effect on other models. Real servers throughout."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.temporary import MODELS
from flowserve.testing.serve import STOP_S_MAX, DidNotServe, Served
from tests.support.forked import serving
from tests.support.shared_memory import left_of, segments_of

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="models in processes need Linux")

WITHIN_S = 30.0  # a bound for a loaded machine, not the expected time

CONFIG = """
backend: "python"
input [ { name: "DO" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

# Executes its input. `initialize` waits while the file `gate` is there, and crashes while `crash` is.
MODEL = """
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path({folder!r})


class TritonPythonModel:
    def initialize(self, args):
        with open(FOLDER / "starts", "a") as file:
            file.write(args["model_name"] + "\\n")
        while (FOLDER / "gate").exists():
            time.sleep(0.01)
        if (FOLDER / "crash").exists():
            os._exit(7)

    def execute(self, requests):
        responses = []
        for request in requests:
            scope = dict(globals(), said="done")
            exec(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()[0].decode(), scope)
            said = np.array([scope["said"].encode()], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]))
        return responses

    def finalize(self):
        pathlib.Path(FOLDER / "finalized").touch()
        while (FOLDER / "never_finalize").exists():
            time.sleep(0.01)
"""

ENSEMBLE = """
platform: "ensemble"
input [ { name: "DO" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step { model_name: "bad" model_version: -1
  input_map { key: "DO" value: "DO" } output_map { key: "SAID" value: "SAID" } } }
"""


class Mischief:
    """A server of `good`, `bad` (whose requests make it misbehave) and `chain`, an ensemble around `bad`."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.folder = folder

    def ask(self, model: str, text: str, within_s: float = WITHIN_S) -> httpx.Response:
        body = {"inputs": [{"name": "DO", "shape": [1], "datatype": "BYTES", "data": [text]}]}
        url = f"{self.served.base_url}/v2/models/{model}/infer"
        return httpx.post(url, json=body, timeout=within_s, trust_env=False, verify=False)

    def said(self, model: str, text: str) -> str:
        answer = self.ask(model, text)
        assert answer.status_code == 200, answer.text
        said: str = answer.json()["outputs"][0]["data"][0]
        return said

    def pid(self, model: str = "bad") -> int:
        return int(self.said(model, "said = str(os.getpid())"))

    def status(self, path: str) -> int:
        return httpx.get(self.served.base_url + path, timeout=WITHIN_S, trust_env=False, verify=False).status_code

    def index(self) -> dict[str, dict[str, str]]:
        rows = httpx.post(
            self.served.base_url + "/v2/repository/index", timeout=WITHIN_S, trust_env=False, verify=False
        ).json()
        return {row["name"]: row for row in rows}

    def is_back(self) -> bool:
        return self.status("/v2/models/bad/ready") == 200

    def starts(self) -> int:
        return (self.folder / "starts").read_text().splitlines().count("bad")

    def file(self, name: str) -> Path:
        return self.folder / name


def write_repository(folder: Path, bad_parameters: str = "") -> Path:
    repository = folder / "models"
    for name, parameters in (("good", ""), ("bad", bad_parameters)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG + parameters)
        (version / "model.py").write_text(MODEL.replace("{folder!r}", repr(str(folder))))
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(ENSEMBLE)
    return repository


@contextmanager
def surviving(folder: Path) -> Iterator[Mischief]:
    with serving(write_repository(folder), "--python-execution", "process") as served:
        yield Mischief(served, folder)
        assert served.process.poll() is None, served.log


@pytest.fixture
def mischief(tmp_path: Path) -> Iterator[Mischief]:
    """A server of the test's own, which must survive it."""
    with surviving(tmp_path) as mischief:
        yield mischief


# Deaths in a row are followed by longer pauses, so few tests share a server.


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mischief]:
    with surviving(tmp_path_factory.mktemp("mischief")) as mischief:
        yield mischief


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mischief]:
    with surviving(tmp_path_factory.mktemp("mortal")) as mischief:
        yield mischief


def until(condition: Callable[[], Any], what: str) -> None:
    """Ask again until it holds; nothing tells us when another process has come that far."""
    patience = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < patience, f"never: {what}"
        time.sleep(0.01)


def of_sessions(sessions: set[int]) -> set[int]:
    """The living processes of these sessions: each instance has one of its own."""
    found = set()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) in sessions and state not in "ZX":
            found.add(int(entry))
    return found


# ---------------------------------------------------------------------------------------------------------- crashing


@pytest.mark.fault("R1")
def test_an_exception_in_execute_is_reported_to_the_client_and_logged_with_its_traceback(patient: Mischief) -> None:
    starts = patient.starts()
    answer = patient.ask("bad", "raise ValueError('not like this')")
    assert answer.status_code == 500
    assert "ValueError: not like this" in answer.json()["error"]
    assert "Traceback" not in answer.text
    until(lambda: "Traceback" in patient.served.log, "the log has the traceback")
    assert patient.starts() == starts  # the process did not end
    assert patient.said("bad", "pass") == "done"


@pytest.mark.fault("R2")
@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("os._exit(3)", "its process ended with exit status 3"),
        ("ctypes.string_at(0)", "its process was killed by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_death_fails_its_request_and_the_instance_is_restarted(mortal: Mischief, death: str, how: str) -> None:
    mortal.file("gate").touch()  # it does not start again while the file exists
    with ThreadPoolExecutor(8) as clients:
        began = time.monotonic()
        failed = clients.submit(mortal.ask, "bad", death).result()
        assert time.monotonic() - began < 1
        assert failed.status_code == 500
        assert failed.json() == {"error": f"model 'bad', instance 'bad_0': {how}"}
        waiting = [clients.submit(mortal.ask, "bad", "pass") for _ in range(3)]
        waiting.append(clients.submit(mortal.ask, "chain", "pass"))
        for path in ("/v2/models/bad/ready", "/v2/models/bad/versions/1/ready", "/v2/models/chain/ready"):
            assert mortal.status(path) == 400, path
        assert mortal.status("/v2/health/ready") == 400
        assert mortal.status("/v2/health/live") == 200
        assert mortal.status("/v2/models/good/ready") == 200
        for name in ("bad", "chain"):
            assert mortal.index()[name]["state"] == "UNAVAILABLE"
            assert mortal.index()[name]["reason"].startswith(f"model 'bad', instance 'bad_0': {how}")
        assert [mortal.said("good", "pass") for _ in range(20)] == ["done"] * 20
        mortal.file("gate").unlink()
        freed = time.monotonic()
        # The next start was soon: requests that arrived meanwhile waited for it.
        assert [each.result().status_code for each in waiting] == [200] * 4
    assert mortal.is_back()
    assert time.monotonic() - freed < 10
    assert mortal.status("/v2/health/ready") == 200
    assert mortal.index()["bad"]["state"] == "READY"
    assert how in mortal.served.log


@pytest.mark.fault("R3")
def test_the_error_of_a_killed_process_names_the_signal_and_the_ensemble(patient: Mischief) -> None:
    """The signal is that of the kernel's out-of-memory killer."""
    pid = patient.pid()
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(patient.ask, "chain", f"open({str(patient.file('runs'))!r}, 'w'); time.sleep(600)")
        until(patient.file("runs").exists, "the request runs")
        os.kill(pid, signal.SIGKILL)
        assert answer.result().status_code == 500
    text = "model 'bad', instance 'bad_0': its process was killed by signal 9 (SIGKILL)"
    assert answer.result().json()["error"].startswith(f"in ensemble 'chain', {text}")
    assert text in patient.served.log
    until(patient.is_back, "it is back")
    assert patient.pid() != pid


@pytest.mark.fault("R3")
def test_an_idle_instance_that_is_killed_is_restarted(patient: Mischief) -> None:
    pid, starts = patient.pid(), patient.starts()
    os.kill(pid, signal.SIGKILL)
    until(lambda: patient.starts() == starts + 1, "it is started again")
    assert patient.pid() != pid


@pytest.mark.fault("W9")
def test_an_instance_that_served_before_each_kill_is_back_within_seconds(mischief: Mischief) -> None:
    for killed in range(1, 7):
        os.kill(mischief.pid(), signal.SIGKILL)
        began = time.monotonic()
        until(lambda: mischief.starts() > killed, "it is started again")  # noqa: B023 - called in this round
        assert mischief.said("bad", "pass") == "done"
        assert time.monotonic() - began < 10
    delays_s = [float(one) for one in re.findall(r"it is started again after ([\d.]+) s", mischief.served.log)]
    assert len(delays_s) == 6
    assert max(delays_s) < 1, delays_s


@pytest.mark.fault("R4")
def test_a_model_in_a_crash_loop_is_restarted_rarely_and_unavailable_with_the_reason(mischief: Mischief) -> None:
    mischief.file("crash").touch()
    began = time.monotonic()
    assert mischief.ask("bad", "os._exit(3)").status_code == 500
    refused = httpx.Response(0)

    def is_refused() -> bool:
        nonlocal refused
        refused = mischief.ask("bad", "pass")  # waits if the next start is soon
        return refused.status_code == 503

    until(is_refused, "no request waits any more")
    error = refused.json()["error"]
    assert error.startswith("Request for unknown model: 'bad' version 1 is not at ready state: model 'bad'")
    assert "its process ended with exit status 7, 5 times in a row" in error
    assert mischief.status("/v2/models/bad/ready") == 400
    assert mischief.index()["bad"]["state"] == "UNAVAILABLE"
    assert mischief.ask("chain", "pass").status_code == 503
    assert mischief.said("good", "pass") == "done"
    # 0.1 + 0.2 + 0.4 + 0.8 seconds, each of them a start; one more after each doubled time that a slow machine takes.
    starts = mischief.starts()
    assert starts >= 5
    assert time.monotonic() - began > 0.1 * (2 ** (starts - 1) - 1)
    mischief.file("crash").unlink()
    until(mischief.is_back, "what has stopped crashing serves again")
    assert mischief.said("chain", "pass") == "done"


@pytest.mark.fault("R2")
def test_a_model_that_dies_during_load_is_reported_at_startup(tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    (tmp_path / "crash").touch()
    with pytest.raises(DidNotServe) as ended:
        with serving(repository, "--python-execution", "process"):
            pass
    assert ended.value.status == 1
    assert "model 'bad', instance 'bad_0': its process ended with exit status 7" in ended.value.log


# ----------------------------------------------------------------------------------------------------------- hanging


@pytest.mark.fault("R5")
def test_a_hang_is_ended_only_by_the_execution_timeout(tmp_path: Path) -> None:
    timeout = 'parameters { key: "execution_timeout" value { string_value: "0.7" } }'
    with serving(write_repository(tmp_path, timeout), "--python-execution", "process") as served:
        mischief = Mischief(served, tmp_path)
        assert mischief.said("bad", "time.sleep(0.1)") == "done"
        with ThreadPoolExecutor(1) as clients:
            began = time.monotonic()
            hangs = clients.submit(mischief.ask, "bad", "while True: pass")
            assert [mischief.said("good", "pass") for _ in range(10)] == ["done"] * 10
            answer = hangs.result()
            assert time.monotonic() - began > 0.6
        assert answer.status_code == 500
        text = "its process was killed, because an execution took longer than 0.7 s (parameter execution_timeout)"
        assert answer.json() == {"error": f"model 'bad', instance 'bad_0': {text}"}
        until(mischief.is_back, "it is back")
        assert mischief.said("bad", "pass") == "done"
        assert mischief.said("good", "time.sleep(1)") == "done"
        assert served.stop() == 0


@pytest.mark.fault("R5")
def test_a_warm_up_that_hangs_is_ended_by_the_execution_timeout_too(tmp_path: Path) -> None:
    (tmp_path / "models" / "bad" / "warmup").mkdir(parents=True)
    hang = b"while True: pass"
    (tmp_path / "models" / "bad" / "warmup" / "hang").write_bytes(len(hang).to_bytes(4, "little") + hang)
    options = """
parameters { key: "execution_timeout" value { string_value: "0.5" } }
model_warmup [ { name: "hangs" batch_size: 1
  inputs { key: "DO" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "hang" } } } ]
"""
    with pytest.raises(DidNotServe) as ended, serving(write_repository(tmp_path, options)):
        pass
    text = "its process was killed, because an execution took longer than 0.5 s (parameter execution_timeout)"
    assert f"failed to run warmup sample 'hangs': model 'bad', instance 'bad_0': {text}" in ended.value.log


@pytest.mark.fault("R5")
def test_a_hang_does_not_keep_the_server_past_its_exit_timeout(tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    with serving(repository, "--python-execution", "process", "--exit-timeout-secs", "1") as served:
        mischief = Mischief(served, tmp_path)
        sessions = {mischief.pid("bad"), mischief.pid("good")}
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(mischief.ask, "bad", f"open({str(tmp_path / 'runs')!r}, 'w'); time.sleep(600)")
            until((tmp_path / "runs").exists, "the request runs")
            assert served.stop(within_s=10) == 1
            assert answer.result().status_code == 503
        assert "--exit-timeout-secs): bad_0" in served.log
        until(lambda: not of_sessions(sessions), "its processes are gone")


@pytest.mark.fault("R5")
def test_a_model_that_never_finalizes_is_ended_and_named(tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    with serving(repository, "--python-execution", "process", "--exit-timeout-secs", "1") as served:
        mischief = Mischief(served, tmp_path)
        sessions = {mischief.pid("bad"), mischief.pid("good")}
        mischief.file("never_finalize").touch()
        assert served.stop(within_s=10) == 1
        assert "not closed within the exit timeout (--exit-timeout-secs): bad_0, good_0" in served.log
        until(lambda: not of_sessions(sessions), "its processes are gone")


@pytest.mark.fault("X7")
def test_a_signal_while_a_model_hangs_in_initialize_ends_the_server(tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    (tmp_path / "gate").touch()

    command = [sys.executable, "-m", "flowserve", "run", str(repository), "--http-port", "0"]
    with subprocess.Popen([*command, "--python-execution", "process"], stdout=subprocess.DEVNULL) as process:
        try:
            until((tmp_path / "starts").exists, "a model loads")
            process.terminate()
            assert process.wait(STOP_S_MAX / 2) == 0
        finally:
            process.kill()


def test_a_stopping_server_finalizes_its_models(tmp_path: Path) -> None:
    with serving(write_repository(tmp_path), "--python-execution", "process") as served:
        mischief = Mischief(served, tmp_path)
        sessions = {mischief.pid("bad"), mischief.pid("good")}
        assert served.stop() == 0
        assert mischief.file("finalized").exists()
        assert not of_sessions(sessions)


# -------------------------------------------------------------------------------------------------------- containment


@pytest.mark.fault("R6")
def test_endless_output_of_a_model_neither_blocks_the_server_nor_fills_its_memory(patient: Mischief) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{patient.served.pid}/statm").read_text().split()[1]) * 4096

    assert patient.said("bad", "print('a line\\x1b[31m')") == "done"
    until(lambda: r"flowserve.model.bad] a line\x1b[31m" in patient.served.log, "it is in the log, and harmless")
    before = resident()
    with ThreadPoolExecutor(1) as clients:
        printing = clients.submit(patient.said, "bad", "sys.stdout.write('x' * 50_000_000 + 'y\\n' * 25_000_000)")
        while not printing.done():
            assert patient.said("good", "pass") == "done"
        assert printing.result() == "done"
    assert resident() - before < 16 << 20
    patient.said("bad", "time.sleep(1.1); print('afterwards')")
    until(lambda: "afterwards" in patient.served.log, "the log goes on")
    assert "lines are missing here: more than 1000 a second were printed" in patient.served.log
    assert len(patient.served.log) < 1_000_000


@pytest.mark.fault("R6")
def test_changes_of_a_model_to_its_process_do_not_affect_others(patient: Mischief) -> None:
    """Another model's working directory, environment, modules and descriptors are unchanged."""
    before = patient.said("good", "said = os.getcwd() + str(len(os.listdir('/proc/self/fd')))")
    for text in (
        "os.chdir('/')",
        "os.environ['SPOILT'] = 'yes'",
        "sys.modules['json'] = None",
        "np.spoilt = True",
        "sys.stdout = None",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ):
        assert patient.said("bad", text) == "done"
    after = patient.said("good", "said = os.getcwd() + str(len(os.listdir('/proc/self/fd')))")
    assert after == before
    text = "import json; said = repr([os.environ.get('SPOILT'), hasattr(np, 'spoilt'), json.loads('1')])"
    assert patient.said("good", text) == "[None, False, 1]"


@pytest.mark.fault("R6")
def test_a_model_that_closes_every_descriptor_ends_only_its_process(patient: Mischief) -> None:
    answer = patient.ask("bad", "os.closerange(0, 1000)")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("model 'bad', instance 'bad_0': its process ")
    until(patient.is_back, "it is back")
    assert patient.said("bad", "pass") == "done"
    assert patient.said("good", "pass") == "done"


@pytest.mark.fault("R6")
def test_a_model_that_forks_in_the_middle_of_a_request_is_answered_once(patient: Mischief) -> None:
    starts = patient.starts()
    # Both processes continue into the serving loop; the forked one has no connection to the server.
    assert patient.said("bad", "said = 'child' if os.fork() == 0 else 'parent'") == "parent"
    assert patient.said("bad", "pass") == "done"
    assert patient.starts() == starts


@pytest.mark.fault("R6")
def test_processes_started_by_a_model_end_with_it(patient: Mischief) -> None:
    helper = int(patient.said("bad", "said = str(subprocess.Popen(['sleep', '600']).pid)"))
    session = patient.pid()
    assert helper in of_sessions({session})
    patient.ask("bad", "os._exit(0)")
    until(lambda: not of_sessions({session}), "the helper is gone")


@pytest.mark.fault("X8")
def test_a_killed_server_leaves_no_processes_and_the_next_one_starts(tmp_path: Path) -> None:
    repository, places = write_repository(tmp_path), tmp_path / "places"
    places.mkdir()
    options = ["--python-execution", "process", "--model-control-mode", "explicit", "--load-model", "*"]
    environment = {"TMPDIR": str(places)}
    with serving(repository, *options, environment=environment) as served:
        mischief = Mischief(served, tmp_path)
        sessions = {mischief.pid("bad"), mischief.pid("good")}
        mischief.said("bad", "subprocess.Popen(['sleep', '600'])")
        file = base64.b64encode((repository / "good/1/model.py").read_bytes()).decode()
        config = httpx.get(f"{served.base_url}/v2/models/good/config", trust_env=False, verify=False).text
        sent = {"parameters": {"config": config, "file:1/model.py": file}}
        url = f"{served.base_url}/v2/repository/models/good/load"
        assert httpx.post(url, json=sent, timeout=WITHIN_S, trust_env=False, verify=False).status_code == 200
        (left,) = places.glob(f"{MODELS}*")
        segments = segments_of([served.pid, *of_sessions(sessions)])
        assert served.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not of_sessions(sessions), "its processes are gone")
    assert left_of(segments) == []
    with serving(repository, *options, environment=environment) as again:
        until(lambda: not left.exists(), "its temporary folder is gone")
        assert Mischief(again, tmp_path).said("chain", "pass") == "done"
        assert again.stop() == 0
