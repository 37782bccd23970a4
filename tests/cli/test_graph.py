"""`flowserve graph`: selection of the deployment, output formats, errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowserve.cli.main import DIRECTIONS, PICTURES, main
from flowserve.render.formats import DRAWINGS, TEXTS
from flowserve.render.jsontext import graph_document
from flowserve.render.layout import DIRECTIONS as DIRECTIONS_THERE_ARE
from tests.support.pictures import READ_TEXT_CONFIGS, read_text_graph

MODEL = """\
backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "%s" model_version: -1
         input_map { key: "%s" value: "x" } output_map { key: "%s" value: "y" } }
}
"""
PYTHON = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"

Drawn = Callable[..., tuple[int, str, str]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The model `same`, the ensemble `inner` around it, and the ensemble `outer` around `inner`."""
    home = tmp_path / "models"
    texts = {"same": MODEL}
    texts |= {"inner": ENSEMBLE % ("same", "X", "Y"), "outer": ENSEMBLE % ("inner", "x", "y")}
    for name, text in texts.items():
        (home / name / "1").mkdir(parents=True)
        (home / name / "config.pbtxt").write_text(text)
    (home / "same" / "1" / "model.py").write_text(PYTHON)
    return home


@pytest.fixture
def drawn(repository: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Drawn:
    def run(*arguments: object) -> tuple[int, str, str]:
        status = main(["graph", *map(str, arguments)])
        printed = capsysbinary.readouterr()
        return status, printed.out.decode(), printed.err.decode()

    return run


def test_a_repository_is_drawn_as_the_text_of_all_its_graphs(drawn: Drawn, repository: Path) -> None:
    status, out, err = drawn(repository)
    assert (status, err) == (0, "")
    assert [line.split(",")[0] for line in out.splitlines() if line and line[0] != " "] == [
        "ensemble inner",
        "ensemble outer",
        "model same",
    ]
    assert "model same/1, python, dynamic batches up to 4, waits 100 us, 1 instance on CPU" in out


def test_a_model_is_named_after_its_repository_or_by_its_own_folder(drawn: Drawn, repository: Path) -> None:
    by_name = drawn(repository, "outer", "--format", "mermaid")
    assert by_name == drawn(repository / "outer", "--format", "mermaid")
    assert 'subgraph s0["ensemble inner"]' in by_name[1]


@pytest.mark.parametrize("suffix", ["txt", "dot", "gv", "mmd", "svg", "png", "html", "json"])
def test_the_file_name_selects_the_format(drawn: Drawn, repository: Path, suffix: str) -> None:
    file = repository / f"outer.{suffix}"
    if suffix == "png":
        pytest.importorskip("resvg_py", reason="needs resvg")
    assert drawn(repository, "outer", "-o", file) == (0, "", "")
    begins = {"txt": b"ensemble", "mmd": b"flowchart", "svg": b"<svg", "png": b"\x89PNG", "html": b"<!doctype html>"}
    assert file.read_bytes().startswith(begins.get(suffix, b"digraph" if suffix in ("dot", "gv") else b"{"))


def test_json_goes_to_standard_output_for_other_programs(repository: Path) -> None:
    command = [sys.executable, "-m", "flowserve", "graph", str(repository), "outer", "--format", "json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    document = json.loads(done.stdout)
    assert document["ensembles"] == [{"path": "inner", "name": "inner", "max_inflight_requests": 0}]
    assert document["nodes"][0]["place"] == "inner/config.pbtxt:6:3"


def test_an_undrawable_target_is_reported_in_one_line(drawn: Drawn, repository: Path) -> None:
    for arguments, said in {
        (repository, "--format", "svg"): "which deployment shall be drawn? Name one of: inner, outer, same",
        (repository, "uter"): "no deployment is called 'uter' (did you mean \"outer\"?)",
        (repository / "outer", "same"): "is the folder of deployment 'outer'; it does not hold 'same'",
        (repository, "-o", "outer.jpeg"): "'outer.jpeg' does not say which picture it should hold",
        (repository, "outer", "-o", repository / "no" / "g.svg"): "/no/g.svg' cannot be written: there is no folder '",
        (repository / "nowhere",): "does not exist",
    }.items():
        status, out, err = drawn(*arguments)
        assert (status, out) == (1, "")
        assert err.startswith("error: ")
        assert said in err
        assert err.count("\n") == 1


def test_a_mistake_in_another_deployment_does_not_prevent_drawing(drawn: Drawn, repository: Path) -> None:
    (repository / "outer" / "config.pbtxt").write_text("max_batch_size: -1")
    assert drawn(repository, "inner")[0] == 0
    for arguments in ((repository, "outer"), (repository,)):
        status, out, err = drawn(*arguments)
        assert (status, out) == (1, "")
        assert err.startswith("outer/config.pbtxt: error: ")


def test_a_drawing_has_the_asked_direction_and_folds_nested_ensembles(drawn: Drawn, root: Path) -> None:
    graph = str(root / "graphs/read_text")
    assert "rankdir=LR" in drawn(graph, "--format=dot", "--direction=LR")[1]
    assert "rankdir=TB" in drawn(graph, "--format=dot", "--direction=TB")[1]
    assert drawn(graph, "--format=text", "--direction=TB")[0] == 1


def test_the_command_offers_the_formats_there_are() -> None:
    assert sorted([*DRAWINGS, *TEXTS]) == sorted(PICTURES)
    assert sorted(DIRECTIONS_THERE_ARE) == sorted(DIRECTIONS)


def test_the_commands_of_the_page_about_pictures_draw(
    drawn: Drawn, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("resvg_py", reason="needs resvg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graphs").symlink_to(root / "graphs")
    commands = re.search(r"```sh\n(.*?)```", (root / "docs/pictures.md").read_text(), re.DOTALL)
    assert commands is not None
    for command in commands[1].splitlines():
        program, _, *arguments = shlex.split(command, comments=True)
        assert program == "flowserve"
        status, out, err = drawn(*arguments)
        assert (status, err) == (0, "")
        assert bool(out) == ("-o" not in arguments)
    assert sorted(path.name for path in tmp_path.glob("read_text.*")) == [
        "read_text.html",
        "read_text.png",
        "read_text.svg",
    ]


def test_the_page_about_pictures_has_every_field_of_the_json(root: Path) -> None:
    page = (root / "docs/pictures.md").read_text().partition("## The JSON")[2]
    described = {
        field for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for field in re.findall(r"`(\w+)`", row)
    }
    graph = read_text_graph()
    first = graph.nodes[0].model.name
    placed = {**READ_TEXT_CONFIGS, first: replace(READ_TEXT_CONFIGS[first], placed="CPU 2", segment="s")}
    document = graph_document(graph, placed)
    assert described == {*document, *document["nodes"][0]} - {"schema"}
