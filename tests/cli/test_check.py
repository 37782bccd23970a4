"""`flowserve check` on real folders: output and exit status."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from flowserve.cli.check import check
from flowserve.cli.main import main

Checked = tuple[int, str, str]


def write_identity(path: Path) -> None:
    """An ONNX file that returns X [batch, 4] as Y."""
    shape: list[str | int | None] = ["batch", 4]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["X"], ["Y"])],
        "identity",
        [onnx.helper.make_tensor_value_info("X", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, shape)],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, path)


ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step {
    model_name: "same"
    model_version: -1
    input_map { key: "X" value: "x" }
    output_map { key: "Y" value: "y" }
  }
}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The model "same" without a configuration, and the ensemble "pipe" around it."""
    write_identity(tmp_path / "models" / "same" / "1" / "model.onnx")
    (tmp_path / "models" / "pipe" / "1").mkdir(parents=True)
    (tmp_path / "models" / "pipe" / "config.pbtxt").write_text(ENSEMBLE)
    return tmp_path / "models"


@pytest.fixture
def checked(repository: Path) -> Callable[..., Checked]:
    def run(*more: Path, color: bool = False) -> Checked:
        out, err = io.StringIO(), io.StringIO()
        status = check([repository, *more], out, err, color)
        return status, out.getvalue(), err.getvalue()

    return run


def edit(repository: Path, old: str, new: str) -> None:
    path = repository / "pipe" / "config.pbtxt"
    path.write_text(path.read_text().replace(old, new))


def test_a_good_repository_is_printed_as_its_graphs(checked: Callable[..., Checked]) -> None:
    status, out, err = checked()
    assert (status, err) == (0, "")
    assert "ensemble pipe, version 1, batches up to 4\n" in out
    assert "model same, version 1, batches up to 4\n" in out
    assert "  1. same: model same/1, onnxruntime, dynamic batches up to 4, 2 instances on CPU\n" in out
    assert out.endswith("no problems in 2 deployments\n")


def test_every_problem_of_every_model_is_printed_with_its_place(
    checked: Callable[..., Checked], repository: Path
) -> None:
    edit(repository, '"X" value', '"Z" value')
    edit(repository, "max_batch_size: 4", "max_batch_size: 5")
    other = repository / "other"
    write_identity(other / "1" / "model.onnx")
    (other / "config.pbtxt").write_text("max_batch_size: -1\n")
    status, out, err = checked()
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert any(line.startswith("other/config.pbtxt:1:1: error: ") for line in lines)
    assert any(line.startswith("pipe/config.pbtxt:2:1: error: ensemble pipe allows maximum") for line in lines)
    assert any(line.startswith("pipe/config.pbtxt:9:") and line.endswith(" [G5]") for line in lines)
    assert any("input X in model same is not mapped" in line and line.endswith(" [G7]") for line in lines)
    assert lines[-1].endswith("1 of 3 deployments is valid")


def test_one_deployments_folder_is_checked_with_its_models(repository: Path) -> None:
    def of(name: str) -> Checked:
        out, err = io.StringIO(), io.StringIO()
        return check([repository / name], out, err, color=False), out.getvalue(), err.getvalue()

    (repository / "other/1").mkdir(parents=True)
    status, out, err = of("pipe")
    assert (status, err) == (0, "")
    assert out.endswith("no problems in 1 deployment\n")
    assert of("other")[0] == 1
    (repository / "same" / "config.pbtxt").write_text("max_batch_size: -1\n")
    assert of("pipe")[2].startswith(
        "pipe/config.pbtxt:7:5: error: ensemble 'pipe' depends on 'same' which is not valid"
    )


@pytest.mark.fault("C1")
def test_an_unparsable_configuration_is_one_problem_among_others(
    checked: Callable[..., Checked], repository: Path
) -> None:
    (repository / "same" / "config.pbtxt").write_bytes(bytes(range(256)) * 40)
    status, _, err = checked()
    assert status == 1
    assert re.search(r"^same/config\.pbtxt:\d+:\d+: error: ", err, re.MULTILINE)
    lines = err.splitlines()
    (above,) = [i for i, line in enumerate(lines) if line.startswith("same/config.pbtxt:")]
    (below,) = [i for i, line in enumerate(lines) if "error: ensemble 'pipe' depends on 'same' (above)" in line]
    assert above < below


def test_a_backend_that_is_not_installed_is_the_only_problem_of_its_model(
    checked: Callable[..., Checked], repository: Path
) -> None:
    (repository / "same" / "config.pbtxt").write_text('backend: "dali"\nmax_batch_size: -1\n')
    status, _, err = checked()
    assert status == 1
    assert [line for line in err.splitlines() if line.startswith("same")] == [
        "same/config.pbtxt:1:1: error: model 'same': dali is not supported yet [N22]"
    ]


@pytest.mark.fault("C12")
def test_a_truncated_model_file_is_named(checked: Callable[..., Checked], repository: Path) -> None:
    path = repository / "same" / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:20])
    status, _, err = checked()
    assert status == 1
    assert "same" in err.splitlines()[0]


def test_a_name_in_two_repositories_is_a_problem(checked: Callable[..., Checked], tmp_path: Path) -> None:
    write_identity(tmp_path / "more" / "same" / "1" / "model.onnx")
    status, _, err = checked(tmp_path / "more")
    assert status == 1
    assert "model 'same' appears in two or more repositories" in err


def test_repositories_that_are_served_together_are_checked_together(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps").mkdir()
    (repository / "same").rename(tmp_path / "steps" / "same")
    assert main(["check", str(repository)]) == 1
    assert "models that are not available or ambiguous: same [G2]" in capsys.readouterr().err
    assert main(["check", str(repository), "--json", str(tmp_path / "steps")]) == 0
    assert json.loads(capsys.readouterr().out)["right"] == ["pipe", "same"]


def test_a_missing_repository_is_a_problem(checked: Callable[..., Checked], tmp_path: Path) -> None:
    status, _, err = checked(tmp_path / "nowhere")
    assert status == 1
    assert "does not exist" in err


def test_warnings_do_not_fail_a_check(checked: Callable[..., Checked], repository: Path) -> None:
    (repository / "same" / "old").mkdir()
    status, _, err = checked()
    assert status == 0
    assert err == "same/old: warning: not a version (a positive number without leading zeros); ignored [R7]\n"
    (repository / "same" / "config.pbtxt").write_text("max_batch_size: -1\n")
    assert checked()[2].startswith("same/old: warning: ")


def test_colors_are_printed_only_on_request(checked: Callable[..., Checked], repository: Path) -> None:
    edit(repository, '"same"', '"some"')
    assert "\x1b" not in checked()[2]
    assert "\x1b[31merror:\x1b[0m" in checked(color=True)[2]


@pytest.mark.parametrize(
    ("environment", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_gets_colors_unless_they_are_disabled(
    environment: dict[str, str], is_coloured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert main(["check", str(tmp_path / "nowhere")]) == 1
    assert ("\x1b[31merror:" in terminal.getvalue()) is is_coloured


def test_control_characters_of_a_name_do_not_reach_the_terminal(
    checked: Callable[..., Checked], repository: Path
) -> None:
    edit(repository, '"same"', r'"sa\033[2Jme"')
    _, _, err = checked()
    assert "\x1b" not in err
    assert r"sa\x1b[2Jme" in err


def test_the_exit_status_is_that_of_the_check(repository: Path) -> None:
    assert main(["check", str(repository)]) == 0
    edit(repository, '"same"', '"some"')
    command = [sys.executable, "-m", "flowserve", "check", str(repository)]
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1
    assert 'did you mean "same"?' in bad.stderr


def test_a_missing_backend_is_found_without_a_server(repository: Path, checked: Callable[..., Checked]) -> None:
    (repository / "same" / "config.pbtxt").write_text(
        'backend: "pyton" max_batch_size: 4\n'
        'input { name: "X" data_type: TYPE_FP32 dims: 4 } output { name: "Y" data_type: TYPE_FP32 dims: 4 }\n'
    )
    status, _, err = checked()
    assert status == 1
    assert "same/config.pbtxt:1:1: error: unable to find backend library for backend 'pyton': flowserve has" in err
    assert 'did you mean "python"?' in err


def test_a_named_configuration_is_used_by_models_that_have_it(repository: Path) -> None:
    def says(config_name: str) -> Checked:
        out, err = io.StringIO(), io.StringIO()
        return check([repository], out, err, color=False, config_name=config_name), out.getvalue(), err.getvalue()

    (folder,) = [path.parents[1] for path in repository.glob("*/1/model.onnx")]
    (folder / "configs").mkdir()
    (folder / "configs/small.pbtxt").write_text("max_batch_size: -1\n")
    assert says("")[0] == says("other")[0] == 0
    status, _, err = says("small")
    assert status == 1
    assert f"{folder.name}/configs/small.pbtxt:1:" in err


def test_a_model_whose_own_code_crashes_during_completion_does_not_end_the_command(
    checked: Callable[..., Checked], repository: Path
) -> None:
    (repository / "dies/1").mkdir(parents=True)
    (repository / "dies/1/model.py").write_text(
        "import os\n\nclass TritonPythonModel:\n"
        "    @staticmethod\n    def auto_complete_config(config):\n        os.abort()\n"
    )
    status, _, err = checked()
    assert status == 1
    assert "model 'dies'" in err
    assert "SIGABRT" in err


def test_a_model_file_that_contradicts_a_complete_configuration_is_found_without_loading_it(
    checked: Callable[..., Checked], repository: Path
) -> None:
    (repository / "same" / "config.pbtxt").write_text(
        'max_batch_size: 4\ninput { name: "XX" data_type: TYPE_FP32 dims: 4 }\n'
        'output { name: "Y" data_type: TYPE_INT32 dims: 4 }\n'
    )
    status, _, err = checked()
    assert status == 1
    assert "same/config.pbtxt:2:9: error: unexpected inference input 'XX', allowed inputs are: X [M90]" in err
    assert "same/config.pbtxt:3:20: error: model 'same', tensor 'Y': the model expects data type TYPE_FP32" in err


MODEL_PY = """\
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
model_warmup { name: "one" batch_size: 1 inputs { key: "X"
  value { data_type: TYPE_FP32 dims: 4 input_data_file: "x" } } }
version_policy { all { } }
"""


def test_every_version_and_every_file_beside_it_is_checked_without_running_code(
    checked: Callable[..., Checked], repository: Path
) -> None:
    for path, text in {
        "config.pbtxt": MODEL_PY,
        "warmup/x": "short",
        "1/model.py": "def broken(:\n",
        "2/model.py": "class TritonPythonModel: execute = print\nraise RuntimeError",
        "3/model.py": "class TritonPythonMode: ...",
        "4/model.py": "\nclass TritonPythonModel:\n    def exceute(self, requests): ...",
        "5/model.py": "from base import Base\nclass TritonPythonModel(Base): ...",
    }.items():
        (repository / "own" / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / "own" / path).write_text(text)
    status, _, err = checked()
    assert status == 1
    assert "own/config.pbtxt:4:1: error: warmup sample 'one' of model 'own': input 'X' needs 16 bytes" in err
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"own/1/model.py:1:12: error: model 'own' is not valid Python {version}: invalid syntax [M92]\n" in err
    assert "own/3/model.py:1:1: error: model 'own' has no class TritonPythonModel [M92]\n" in err
    assert "    call class TritonPythonMode TritonPythonModel\n" in err
    assert "own/4/model.py:2:1: error: model 'own': class TritonPythonModel has no method execute [M92]\n" in err
    assert "\n4 problems" in err


def test_a_missing_version_and_an_unreadable_file_are_reported_once(
    checked: Callable[..., Checked], repository: Path
) -> None:
    (repository / "own/1/model.py").mkdir(parents=True)
    (repository / "own/config.pbtxt").write_text(MODEL_PY.replace("model_warmup", "#").replace("value {", "#"))
    (repository / "same/config.pbtxt").write_text("version_policy { specific { versions: 7 } }")
    _, _, err = checked()
    assert [line for line in err.splitlines() if line.startswith(("own", "same"))] == [
        "own/1/model.py: error: model 'own' cannot be read: Is a directory [M92]",
        "same: error: at least one version must be available under the version policy of model 'same' [R1]",
    ]


def test_an_unusable_model_file_is_reported_in_json(repository: Path) -> None:
    """With and without completion; an exception of the model's own code is reported with its line."""
    whole = (
        'backend: "onnxruntime"\nmax_batch_size: 4\n'
        'input { name: "X" data_type: TYPE_FP32 dims: 4 }\noutput { name: "Y" data_type: TYPE_FP32 dims: 4 }\n'
    )
    asked = "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        1 / 0\n"
    for path, text in {
        "cut/1/model.onnx": "no model",
        "whole/1/model.onnx": "no model",
        "whole/config.pbtxt": whole,
        "absent/config.pbtxt": whole,
        "absent/1/other.onnx": "",
        "raises/1/model.py": asked,
    }.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    out = io.StringIO()
    assert check([repository], out, io.StringIO(), color=False, as_json=True) == 1
    told = [(one["rule"], one["file"], one["line"]) for one in json.loads(out.getvalue())["problems"]]
    assert told == [
        ("M92", "absent/1/model.onnx", None),
        ("M92", "cut/1/model.onnx", None),
        ("M92", "raises/1/model.py", 4),
        ("M92", "whole/1/model.onnx", None),
    ]


def rules(err: str) -> list[str]:
    """The broken rules with their places."""
    return [
        f"{line.split(': ')[0]} {line[line.rindex('[') + 1 : -1]}" for line in err.splitlines() if line.endswith("]")
    ]


def test_all_mistakes_are_reported_at_once(checked: Callable[..., Checked], repository: Path) -> None:
    """An invalid model is compared with its file too, and an invalid ensemble with its models; so is an ensemble
    without a version folder.
    """
    (repository / "same" / "config.pbtxt").write_text(
        'max_batch_size: 4\ninput { name: "XX" data_type: TYPE_FP32 dims: 4 }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: 4 }\ninstance_group { count: 5000 }\n'
    )
    write_identity(repository / "good/1/model.onnx")
    edit(repository, '"same"', '"good"')
    edit(repository, '"X" value', '"Z" value')
    edit(repository, "max_batch_size: 4", "max_batch_size: 4\noptimization { }\ndynamic_batchin { }")
    (repository / "pipe/1").rmdir()
    _, _, err = checked()
    assert rules(err) == [
        "pipe R16",
        "pipe/config.pbtxt:3:1 M81",
        "pipe/config.pbtxt:11:5 G7",
        "pipe/config.pbtxt:11:17 G5",
        "same/config.pbtxt:2:1 M90",
        "same/config.pbtxt:2:9 M90",
        "same/config.pbtxt:4:18 M10",
    ]
    assert 'pipe/config.pbtxt:4:1: error: Message type "inference.ModelConfig" has no field named "dyn' in err


def test_consequences_of_a_mistake_are_not_reported(checked: Callable[..., Checked], repository: Path) -> None:
    """If a batch size or a tensor is invalid, checks that depend on it are skipped, here and in ensembles."""
    write_identity(repository / "good/1/model.onnx")
    for name, text in {
        "same": 'max_batch_size: -1\ninput { name: "X" data_type: TYPE_FP32 dims: 4 }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: 4 }\ndynamic_batching { preferred_batch_size: [ 9 ] }\n',
        "good": "max_batch_sise: 64\ndynamic_batching { preferred_batch_size: [ 64 ] }\n"
        "instance_group { count: 5000 }\n",
    }.items():
        (repository / name / "config.pbtxt").write_text(text)
    edit(repository, "dims: 4 }\noutput", "dim: 4 }\noutput")
    (repository / "own/1").mkdir(parents=True)
    (repository / "own/1/model.py").write_text("class TritonPythonModel: execute = print")
    (repository / "own/config.pbtxt").write_text(MODEL_PY)
    _, _, err = checked()
    assert rules(err) == ["good/config.pbtxt:3:18 M10", "own/config.pbtxt:5:40 M56", "same/config.pbtxt:1:1 M8"]
    assert "cannot be read" not in err
    assert [line.split(": error")[0] for line in err.splitlines() if "has no field" in line] == [
        "good/config.pbtxt:1:1",
        "pipe/config.pbtxt:3:40",
    ]


def test_json_output_is_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "same" / "old").mkdir()
    edit(repository, '"X" value', '"Z" value')
    assert main(["check", str(repository), "--json"]) == 1
    printed = capsys.readouterr()
    assert (printed.err, printed.out.count("\n")) == ("", 1)
    document = json.loads(printed.out)
    problems = document.pop("problems")
    assert document == {"schema": "flowserve.check/1", "right": ["same"], "wrong": ["pipe"]}
    assert problems[0] == {
        "severity": "warning",
        "rule": "R7",
        "deployment": "same",
        "file": "same/old",
        "line": None,
        "column": None,
        "message": "not a version (a positive number without leading zeros); ignored",
        "suggestion": None,
    }
    (unknown,) = [one for one in problems if one["rule"] == "G5"]
    assert (unknown["severity"], unknown["deployment"], unknown["file"]) == ("error", "pipe", "pipe/config.pbtxt")
    assert (unknown["line"], unknown["column"]) == (9, 17)
    edit(repository, '"Z" value', '"X" value')
    assert main(["check", str(repository), "--json"]) == 0
    assert [one["rule"] for one in json.loads(capsys.readouterr().out)["problems"]] == ["R7"]
    assert main(["check", str(repository / "nowhere"), "--json"]) == 1
    (missing,) = json.loads(capsys.readouterr().out)["problems"]
    assert (missing["severity"], missing["file"]) == ("error", None)


def test_ctrl_c_ends_a_check_that_waits_for_a_models_code(repository: Path, tmp_path: Path) -> None:
    (repository / "waits/1").mkdir(parents=True)
    (repository / "waits/1/model.py").write_text(
        "import pathlib, time\n\nclass TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
        f"        pathlib.Path({str(tmp_path / 'began')!r}).touch()\n        time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "flowserve", "check", str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as checking:
        while checking.poll() is None and not (tmp_path / "began").exists():
            time.sleep(0.01)
        checking.send_signal(signal.SIGINT)
        assert checking.communicate(timeout=60) == ("", "")
    assert checking.returncode == 130


@pytest.mark.parametrize("module", ["argparse", "numpy"])
def test_ctrl_c_during_imports_ends_the_process_silently(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "flowserve", "check", str(tmp_path)]
    checking = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (checking.returncode, checking.stdout, checking.stderr) == (130, "", "")


def test_a_folder_without_models_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().err.startswith("warning: there is no model here [R11]\n    a repository is a folder of")
    assert main(["graph", str(tmp_path)]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def test_a_circular_link_is_no_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for command in ("check", "graph"):
        assert main([command, str(tmp_path / "loop")]) == 1
        assert "cannot be read: Too many levels of symbolic links" in capsys.readouterr().err


def test_unencodable_characters_are_escaped_and_a_full_disk_is_reported(tmp_path: Path) -> None:
    write_identity(tmp_path / "größe" / "1" / "model.onnx")
    command = [sys.executable, "-m", "flowserve", "check", str(tmp_path)]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=True, env=ascii_only)
    assert b"model gr\\xf6\\xdfe, version 1" in done.stdout
    with Path("/dev/full").open("wb") as full:
        lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = (lost.returncode, lost.stderr)
    assert said == (1, "flowserve: the output cannot be written: No space left on device\n")


def test_what_is_given_twice_is_warned_about_with_both_places(
    repository: Path, tmp_path: Path, checked: Callable[..., Checked]
) -> None:
    path = repository / "pipe" / "config.pbtxt"
    twice = 'input_map { key: "X" value: "z" }\n    input_map { key: "X" value: "x" }'
    text = ENSEMBLE.replace('input_map { key: "X" value: "x" }', twice)
    path.write_text(text + 'output { name: "y" data_type: TYPE_FP32 dims: 3 }\n')
    status, _, warnings = checked()
    assert status == 0
    assert warnings.splitlines() == [
        'pipe/config.pbtxt:10:17: warning: key "X" is given twice in "input_map"; the last one counts [R17]',
        "    the one before is at pipe/config.pbtxt:9:17",
        "pipe/config.pbtxt:14:1: warning: output 'y' is listed more than once; the first one counts [R17]",
        "    it is at pipe/config.pbtxt:4:1",
    ]
    labels = 'labels { key: "a" value: "1" }\nlabels { key: "a" value: "2" }'
    (tmp_path / "placement").write_text(f'place {{ model: "same" {labels} }}')
    out, err = io.StringIO(), io.StringIO()
    assert check([repository], out, err, color=False, placement=tmp_path / "placement") == 0
    assert 'placement:2:10: warning: key "a" is given twice in "labels"; the last one counts [R17]' in err.getvalue()


PLAN = """platform: "tensorrt_plan"
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


@pytest.mark.parametrize(
    ("more", "there", "found"),
    [
        ("", [], "model.plan does not exist; folder plan/1 is empty; put the file there"),
        ("", ["model.engine"], "model.plan does not exist; "),
        (
            "",
            ["../model.plan"],
            "model.plan does not exist; it is one folder too high: move plan/model.plan into plan/1/",
        ),
        ('default_model_filename: "a.plan"', [], "a.plan does not exist; folder plan/1 is empty; put the file there"),
        ("", ["model.plan"], ""),
    ],
)
def test_a_tensorrt_model_without_its_plan_is_reported(
    repository: Path, checked: Callable[..., Checked], more: str, there: list[str], found: str
) -> None:
    version = repository / "plan" / "1"
    version.mkdir(parents=True)
    (repository / "plan" / "config.pbtxt").write_text(PLAN + more)
    for name in there:
        (version / name).write_bytes(b"plan")
    status, _, errors = checked()
    assert status == (1 if found else 0)
    if found:
        named = found.partition(" ")[0]
        line = errors.splitlines()[0]
        assert line.startswith(f"plan/1/{named}: error: failed to load 'plan' version 1: file plan/1/{found}")


WRITTEN = """\
backend: "onnxruntime"
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, "failed to open text file for read same/config.pbtxt: No such file or directory"),
        ('backend: "onnxruntime"\n', "configuration expects 0 inputs, model provides 1"),
        (WRITTEN, "the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 1"),
        (
            WRITTEN.replace("TYPE_FP32", "TYPE_INT32", 1) + "max_batch_size: 2",
            "tensor 'X': the model expects data type TYPE_FP32",
        ),
        (WRITTEN.replace(" data_type: TYPE_FP32", "", 1) + "max_batch_size: 2", "must specify 'data_type'"),
        (WRITTEN.replace(" dims: 4", "", 1) + "max_batch_size: 2", "must specify 'dims'"),
        (WRITTEN + "max_batch_size: 2", ""),
    ],
)
def test_the_file_of_a_model_completes_nothing_if_configurations_are_not_completed(
    repository: Path, capsys: pytest.CaptureFixture[str], config: str | None, found: str
) -> None:
    (repository / "pipe" / "config.pbtxt").write_text(ENSEMBLE.replace("max_batch_size: 4", "max_batch_size: 2"))
    if config is not None:
        (repository / "same" / "config.pbtxt").write_text(config)
    for option in ("--disable-auto-complete-config", "--strict-model-config=true"):
        assert main(["check", str(repository), option]) == (1 if found else 0)
        printed = capsys.readouterr()
        assert found in printed.err
        assert found or "model same, version 1, batches up to 2" in printed.out
        assert found or "dynamic batches" not in printed.out
