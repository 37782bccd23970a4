"""Commands with "module:graph", a graph written in Python."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from flowserve.cli.main import main
from flowserve.testing.serve import serving

MODULE = """
from flowserve import Graph, model

factor = 3

def make():
    @model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=4)
    def times(x):
        return x * factor
    return times

graph = Graph("times_three")
made = make()(graph.input("X", "FP32[2]"))
graph.output("Y", made)
broken = Graph("broken")
broken.output("LOST")

@model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=2)
def plus(x):
    return x + factor

slow = Graph("slow")
slow.output("Y", plus(make()(slow.input("X", "FP32[2]"))))
"""


DECLARES = """\
from flowserve import model

@model({"X": "FP32[2]", "Y": "FP32[2]"}, {"Z": "FP32[2]"})
def f(x):
    return x
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the current folder, a new one for each test."""
    name = f"steps_of_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "raises.py").write_text("\nx = 1 / 0")
    (tmp_path / "parses.py").write_text("import json\n\njson.loads('{')")
    (tmp_path / "unfinished.py").write_text("x = 1\ny = (")
    (tmp_path / "number_of_steps.py").write_text("graph = 3")
    (tmp_path / "imports.py").write_text("import no_such_package")
    (tmp_path / "declares.py").write_text(DECLARES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_graph_of_a_module_is_checked_and_drawn(home: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["check", f"{home}:graph"]) == 0
    assert b"ensemble times_three, version 1, batches up to 4" in capsysbinary.readouterr().out
    assert main(["graph", f"{home}:graph", "--format", "mermaid"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"flowchart LR")


@pytest.mark.parametrize("command", ["check --json", "graph --format json"])
def test_output_of_a_module_is_not_in_the_result(
    command: str, home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"loud_{home}_{command.partition(' ')[0]}"
    (tmp_path / f"{name}.py").write_text(f'print("loud"){MODULE}')
    assert main([*command.split(), f"{name}:graph"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "loud\n"
    assert json.loads(printed.out)["schema"].startswith("flowserve.")


def test_performance_advice_names_the_line_of_python(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{home}:slow"]) == 0
    assert capsys.readouterr().err == (
        f"{home}.py:18:2: warning: ensemble 'slow': batches fall apart at model 'plus':"
        " model 'times' before it makes batches of up to 4 rows, and it takes 2 rows at most [A2]\n"
        "    raise its max_batch_size to 4, or lower that of 'times' to 2\n"
    )
    assert main(["graph", f"{home}:slow", "--format", "json"]) == 0
    assert f'"place": "{home}.py:23:' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("{home}:broken", "{home}.py:15:10: error: must specify 'step' for ensemble 'broken' [M83]"),
        ("{home}:grap", "module '{home}' has no graph 'grap' (did you mean \"graph\"?)"),
        ("{home}:factor", "module '{home}' has no graph 'factor' (it has graph, broken, slow)"),
        (
            "no_such:graph",
            "there is no folder 'no_such:graph', and no module 'no_such' to import (modules are searched",
        ),
        ("declare:graph", "no module 'declare' to import (did you mean 'declares'?)"),
        ("number_of_steps:graph", "no graph 'graph' ('graph' is of type int; flowserve.Graph makes a graph)"),
        ("declares:graph", "declares.py:3:2: error: function 'f' does not take 2 arrays: it is f(x) [B3]"),
        ("raises:graph", "raises.py:2:5: error: module 'raises' cannot be imported: ZeroDivisionError: division"),
        ("parses:graph", "parses.py:3:1: error: module 'parses' cannot be imported: JSONDecodeError: Expecting"),
        ("unfinished:graph", "unfinished.py:2:5: error: module 'unfinished' cannot be imported: SyntaxError: '(' was"),
        ("imports:graph", "imports.py:1:1: error: module 'imports' cannot be imported: ModuleNotFoundError: No module"),
        ("imports:graph", f"    install it in the Python environment at {sys.prefix}, or write it beside the module\n"),
        ("raises", "'raises' is a module, and no folder of models; name a graph in it: 'raises:NAME'"),
        ("sub/m.py:graph", "is named as its module is imported: 'm:graph', in the folder 'sub'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check", "graph"])
def test_a_target_that_is_no_graph_is_reported_and_not_served(
    command: str, word: str, said: str, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, word.format(home=home)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said.format(home=home) in printed.err


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        (
            "graph",
            "s3://bucket/models",
            "'s3://bucket/models' is no folder here; `flowserve check` and `flowserve run`",
        ),
        ("check", "s3://bucket/models", "s3:// needs s3fs: pip install 'flowserve[s3]'"),
        ("run", "s3://bucket/models", "s3:// needs s3fs: pip install 'flowserve[s3]'"),
    ],
)
@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed: tests/stores reads from S3")
def test_a_url_of_a_store_says_what_it_needs(
    command: str, word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, word]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("{home}:graph", "'{home}:graph' is a graph in Python, and stands alone: only folders can be named together"),
        ("{home}:grap", "module '{home}' has no graph 'grap' (did you mean \"graph\"?)"),
        ("no_such:graph", "there is no folder 'no_such:graph', and no module 'no_such' to import"),
    ],
)
def test_a_graph_combined_with_a_folder_is_refused_or_its_own_error_reported(
    command: str, word: str, said: str, home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path), word.format(home=home)]) == 1
    assert said.format(home=home) in capsys.readouterr().err


def test_a_folder_of_that_name_takes_precedence(home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"{home}:graph").mkdir()
    assert main(["check", f"{home}:graph"]) == 0
    assert "no problems in 0 deployments" in capsys.readouterr().out


@pytest.mark.server
def test_a_graph_of_a_module_is_served_with_functions_that_no_file_could_import(home: str) -> None:
    body = '{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
    with serving(Path(f"{home}:graph")) as served:
        asked = httpx.post(f"http://{served.address}/v2/models/times_three/infer", content=body, verify=False)
    assert asked.json()["outputs"][0]["data"] == [3.0, 6.0]
