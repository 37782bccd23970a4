"""Options from the environment, mistyped commands, completion."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from flowserve.cli.main import main
from flowserve.testing.serve import serving
from flowserve.version import __version__

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""
MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    return tmp_path


@pytest.mark.server
def test_a_variable_is_the_default_of_an_option_of_a_server(repository: Path) -> None:
    environment = {"FLOWSERVE_ID": "from-the-environment", "FLOWSERVE_PYTHON_EXECUTION": "inline"}
    with serving(repository, environment=environment) as served:
        name = httpx.get(f"{served.base_url}/v2", verify=False).json()["name"]
    assert name == "from-the-environment"


def test_the_command_line_wins_and_flags_are_true_or_false(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWSERVE_JSON", "true")
    assert main(["check", str(repository)]) == 0
    assert json.loads(capsys.readouterr().out)["right"] == ["m"]
    monkeypatch.setenv("FLOWSERVE_JSON", "0")
    assert main(["check", str(repository)]) == 0
    assert not capsys.readouterr().out.startswith("{")

    monkeypatch.setenv("FLOWSERVE_FORMAT", "json")
    assert main(["graph", str(repository), "m", "--format", "mermaid"]) == 0
    assert capsys.readouterr().out.startswith("flowchart")
    assert main(["graph", str(repository), "m"]) == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FLOWSERVE_HTTP_PORT", "x", "FLOWSERVE_HTTP_PORT: expected a whole number from 0 to 65535, got 'x'"),
        ("FLOWSERVE_EXIT_ON_ERROR", "maybe", "FLOWSERVE_EXIT_ON_ERROR: expected true, false, 1 or 0, got 'maybe'"),
    ],
)
def test_an_invalid_value_is_a_usage_error_that_names_the_variable(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["run", "nowhere"])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_misspelt_variable_is_reported_and_those_of_kubernetes_and_of_the_installation_are_not(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWSERVE_HTTP_PROT", "1")
    for name in ("FLOWSERVE_SERVICE_HOST", "FLOWSERVE_PORT", "FLOWSERVE_PORT_8000_TCP_ADDR", "FLOWSERVE_SERVICE_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    monkeypatch.setenv("FLOWSERVE_ONNXRUNTIME", "cpu")
    assert main(["check", str(repository)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "flowserve: warning: FLOWSERVE_HTTP_PROT is no option's variable; did you mean FLOWSERVE_HTTP_PORT?"
    ]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("chek", "flowserve: there is no command 'chek'; did you mean check? (try 'flowserve --help')"),
        ("zzz", "flowserve: there is no command 'zzz' (try 'flowserve --help')"),
    ],
)
def test_a_mistyped_command_gets_a_hint(word: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{text}\n"


def test_the_version_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["-V"])
    assert capsys.readouterr().out == f"flowserve {__version__}\n"


@pytest.mark.parametrize("words", [["-q", "check"], ["check", "-q"], ["--quiet", "check"]])
def test_a_quiet_check_prints_problems_only(
    words: list[str], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(repository)]) == 0
    assert capsys.readouterr() == ("", "")
    (repository / "m/config.pbtxt").write_text(CONFIG + "max_batch_sise: 1\n")
    assert main([*words, str(repository)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "max_batch_sise" in printed.err
    assert " valid" not in printed.err


def test_a_new_repository_is_written_quietly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-q", "new", str(tmp_path / "hello")]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "hello/hello/config.pbtxt").is_file()


@pytest.mark.server
def test_a_quiet_server_prints_its_addresses_warnings_and_errors_only(repository: Path) -> None:
    with serving(repository, environment={"FLOWSERVE_QUIET": "1"}) as served:
        assert served.lines == [f"listening on {served.base_url}"]
        assert served.log == ""
    with serving(repository, "-q", "--rate-limit-resource", "R:1") as served:
        (warning,) = served.log.splitlines()
        assert "--rate-limit-resource has no effect" in warning


def test_the_script_of_a_shell_completes_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    ask = f"""
source {script}
COMP_WORDS=(flowserve run --http-po); COMP_CWORD=2; COMP_LINE="flowserve run --http-po"; COMP_POINT=${{#COMP_LINE}}
_shtab_flowserve
printf '%s\n' "${{COMPREPLY[@]}}"
"""
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
    assert "--http-port" in found.stdout, found
