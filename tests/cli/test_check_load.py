"""`flowserve check --load`: every model is loaded as a server loads it, and all that fail are reported together."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.cli.main import main
from tests.support.onnx_files import onnx_identity

ECHO = """\
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("initialize", args["model_name"], flush=True)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(one, "X")]) for one in requests]
"""
HANGS = ECHO.replace('print("initialize"', 'time.sleep(1000) or print("initialize"')
HANGS_IN_AUTHOR = f"{ECHO}\n    @staticmethod\n    def auto_complete_config(config): time.sleep(1000)\n"
HANGS_IN_IMPORT = f"import time\ntime.sleep(1000)\n{ECHO}"
TENSORS = """\
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "X" data_type: TYPE_FP32 dims: 4 }
"""
CONFIG = f'backend: "python"\n{TENSORS}'

Checked = tuple[int, str, str]


def write(repository: Path, name: str, code: str = ECHO, config: str = CONFIG) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(config)


def write_ensemble(repository: Path, name: str, step: str) -> None:
    maps = 'input_map { key: "X" value: "X" } output_map { key: "X" value: "Y" }'
    tensors = TENSORS.replace('output { name: "X"', 'output { name: "Y"')
    (repository / name).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{tensors}\n'
        f'ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1 {maps} }} }}\n'
    )


@pytest.fixture
def checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Checked]:
    def run(*options: str) -> Checked:
        status = main(["check", "--load", str(tmp_path), *options])
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_repository_that_loads_is_printed_as_its_graphs(tmp_path: Path, checked: Callable[..., Checked]) -> None:
    write(tmp_path, "echo")
    (tmp_path / "same" / "1").mkdir(parents=True)
    (tmp_path / "same" / "1" / "model.onnx").write_bytes(onnx_identity())
    write_ensemble(tmp_path, "pipe", "echo")
    status, out, err = checked()
    assert status == 0
    assert "pipe: warning: no version folder" in err
    assert "ensemble pipe, version 1" in out
    assert out.endswith("no problems in 3 deployments\n")


def test_all_models_that_do_not_load_are_reported_with_their_places(
    tmp_path: Path, checked: Callable[..., Checked]
) -> None:
    write(tmp_path, "echo")
    write(tmp_path, "raises", ECHO.replace("print(", "raise ValueError('no') or print("))
    write(tmp_path, "tokenizer", ECHO.replace("print(", "open('/no/tokenizer.json') and print("))
    write(tmp_path, "imports", f"import no_such_module\n{ECHO}")
    write(tmp_path, "inline", ECHO.replace("print(", "1 / 0 or print("), CONFIG + execution("inline"))
    write(tmp_path, "text", ECHO, CONFIG + "nonsense: 1\n")
    write(tmp_path, "onnx", "", TENSORS)
    (tmp_path / "onnx/1/model.onnx").write_bytes(b"junk")
    (tmp_path / "onnx/1/model.py").unlink()
    write_ensemble(tmp_path, "pipe", "raises")
    status, out, err = checked()
    assert status == 1
    assert out == ""
    assert re.search(r"^raises/1/model.py:6:1: error: .*initialize failed: ValueError", err, re.MULTILINE)
    assert re.search(r"^tokenizer/1/model.py:6:1: error: .*No such file.*/no/tokenizer.json", err, re.MULTILINE)
    assert re.search(r"^imports/1/model.py:1:1: error: .*No module named 'no_such_module'", err, re.MULTILINE)
    assert re.search(r"^inline/1/model.py:6:1: error: .*ZeroDivisionError", err, re.MULTILINE)
    assert re.search(r"^text/config.pbtxt:5:1: error: .*nonsense", err, re.MULTILINE)
    assert re.search(r"^onnx/1/model.onnx: error: ", err, re.MULTILINE)
    assert re.search(
        r"^pipe/config.pbtxt:\d+:\d+: error: ensemble 'pipe' depends on 'raises' \(above\)", err, re.MULTILINE
    )
    assert err.endswith("7 problems; 1 of 8 deployments is valid\n")
    assert "Traceback" not in err


def execution(place: str) -> str:
    return f'parameters {{ key: "execution" value: {{ string_value: "{place}" }} }}\n'


def test_a_gpu_that_is_not_there_is_reported_at_its_group(
    tmp_path: Path, checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write(tmp_path, "echo", config=f"{CONFIG}instance_group {{ kind: KIND_GPU }}\n")
    status, _, err = checked()
    assert status == 1
    assert "echo/config.pbtxt:5:1: error: instance group echo_0 of model echo has kind KIND_GPU but no GPUs" in err


@pytest.mark.parametrize(
    ("code", "more"),
    [
        (HANGS, ""),
        (HANGS, execution("thread")),
        (HANGS_IN_AUTHOR, ""),
        (HANGS_IN_IMPORT, ""),
    ],
    ids=["initialize", "initialize_on_a_thread", "auto_complete_config", "import"],
)
def test_a_model_that_hangs_is_reported_in_time(
    tmp_path: Path, checked: Callable[..., Checked], code: str, more: str
) -> None:
    write(tmp_path, "hangs", code, CONFIG + more)
    write(tmp_path, "echo")
    write_ensemble(tmp_path, "pipe", "hangs")
    started = time.monotonic()
    status, out, err = checked("--load-timeout-secs", "1.5", "--json")
    assert time.monotonic() - started < 40
    assert status == 1
    assert "Traceback" not in err
    found = json.loads(out)  # what models print is not on standard output
    assert found["right"] == ["echo"]
    assert found["wrong"] == ["hangs", "pipe"]
    first, second = (one for one in found["problems"] if one["severity"] == "error")
    assert first["deployment"] == "hangs"
    assert "1.5 s (--load-timeout-secs)" in first["message"]
    assert second["message"] == "ensemble 'pipe' depends on 'hangs' (above)"


def test_models_that_are_loaded_in_turn_do_not_time_out(tmp_path: Path, checked: Callable[..., Checked]) -> None:
    for number in range(9):  # a few load at once
        write(tmp_path, f"slow{number}", ECHO.replace("print(", "time.sleep(1) or print("))
    assert checked("--load-timeout-secs", "2.5")[0] == 0


def test_one_deployment_is_loaded_with_its_steps_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "echo", ECHO.replace("print(", "raise ValueError('no') or print("))
    write(tmp_path, "other", ECHO.replace("print(", "raise KeyError('no') or print("))
    write_ensemble(tmp_path, "pipe", "echo")
    assert main(["check", "--load", str(tmp_path / "pipe")]) == 1
    err = capfd.readouterr().err
    assert "ValueError" in err
    assert "KeyError" not in err


def test_ctrl_c_ends_it_and_every_process(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    models = tmp_path / "models"
    write(
        models,
        "hangs",
        HANGS.replace(
            "time.sleep(1000)", f"(open({str(marker)!r}, 'w').write(str(__import__('os').getpid())), time.sleep(1000))"
        ),
    )
    command = [sys.executable, "-m", "flowserve", "check", "--load", str(models)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        too_late = time.monotonic() + 60
        while not (marker.exists() and marker.read_text()) and time.monotonic() < too_late:
            time.sleep(0.05)
        worker = Path("/proc") / marker.read_text()
        assert worker.exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        while worker.exists() and time.monotonic() < too_late:
            time.sleep(0.05)
        assert not worker.exists()
    finally:
        process.kill()
        output = process.communicate()[0]
    assert "Traceback" not in output


def test_a_model_in_the_servers_process_that_ends_it_is_reported_and_no_success(tmp_path: Path) -> None:
    leaves = ECHO.replace("import time", "import os, time").replace('print("initialize"', 'os._exit(0) or print("init"')
    forks = ECHO.replace("import time", "import os, time").replace(
        'print("initialize"', 'os.waitpid(os.fork() or os._exit(0), 0) and print("initialize"'
    )
    for name, code, place in (("leaves", leaves, "thread"), ("inline", leaves, "inline"), ("forks", forks, "thread")):
        write(tmp_path, name, code, f'{CONFIG}parameters {{ key: "execution" value {{ string_value: "{place}" }} }}\n')
    # Not with `main`, as the process of the tests would end.
    command = [sys.executable, "-m", "flowserve", "check", "--load", "--json", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    document = json.loads(ran.stdout)
    assert document["right"] == ["forks"]
    assert document["wrong"] == ["inline", "leaves"]
    assert all("SystemExit: os._exit(0)" in one["message"] for one in document["problems"])
