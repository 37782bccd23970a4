"""`flowserve run --cluster` and `flowserve check --placement`, as commands."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trio

from flowserve.cli.check import check
from flowserve.cli.main import main
from flowserve.testing.serve import Served
from tests.support.clusters import is_running, until, write_python


def checked(repository: Path, placement: Path) -> tuple[int, str]:
    """The exit status and what was printed about problems."""
    out, err = io.StringIO(), io.StringIO()
    status = check([repository], out, err, color=False, placement=placement)
    return status, err.getvalue()


def test_check_reports_the_problems_of_a_placement_file_with_their_places(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_python(repository, "double")
    write_python(repository, "other")
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text('place { model: "duoble" }')
    status, err = checked(repository, placement)
    assert status == 1
    assert err.splitlines() == [
        "cluster.pbtxt:1:9: error: model 'duoble' is not in the repository [P6]",
        '    did you mean "double"?',
        "1 problem in the placement file",
    ]
    placement.write_text('place { model: "double" }')
    assert checked(repository, placement) == (0, "")
    (repository / "double" / "config.pbtxt").write_text("max_batch_size: no")
    status, err = checked(repository, placement)
    assert status == 1
    assert "P6" not in err, "what is wrong with the model itself is enough"


def test_check_reports_a_segment_that_a_path_leaves_and_comes_back_to(root: Path, tmp_path: Path) -> None:
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text(
        'segment { name: "ends" count: 1\n  models: [ "read_text_arrange", "read_text_assemble" ] }\n'
        'segment { name: "rest" count: 1 models: [ "read_text_orient", "read_text_find", "digits" ] }'
    )
    status, err = checked(root / "graphs", placement)
    assert status == 1
    lines = [line for line in err.splitlines() if "warning" not in line]
    path = "read_text_arrange -> read_text_recognise -> read_text_assemble"
    assert lines == [
        "cluster.pbtxt:3:81: error: model 'digits' is not in the repository [P6]",
        '    did you mean "digit"?',
        f"cluster.pbtxt:2:34: error: a path of 'read_text' leaves segment 'ends' and comes back: {path} [P7]",
        "    name 'read_text_recognise' in it too, or divide it into two segments",
        "2 problems in the placement file",
    ]
    assert main(["graph", str(root / "graphs"), "read_text", "--placement", str(placement)]) == 1


@pytest.mark.server
def test_a_server_runs_models_on_machines_that_end_with_it(tmp_path: Path, serve: Callable[..., Served]) -> None:
    repository = tmp_path / "models"
    write_python(repository, "double")
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text('place { model: "double" count: 3 }')
    served = serve(repository, "--cluster", "local:2", "--placement", str(placement))
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    url = f"{served.base_url}/v2/models/double/infer"
    answers = [httpx.post(url, json=body, verify=False).raise_for_status().json() for _ in range(6)]
    assert all(answer["outputs"][0]["data"] == [2, 4] for answer in answers)
    processes = {answer["outputs"][1]["data"][0] for answer in answers}
    assert len(processes) == 3
    figures = httpx.get(f"{served.base_url}/metrics", verify=False).text
    assert "\nflowserve_cluster_reachable 1\n" in figures
    assert sum(map(int, re.findall(r'flowserve_link_batches_total{machine="local-\d"} (\d+)', figures))) == 6
    assert len(re.findall(r'flowserve_link_seconds_total{machine="local-\d"} 0\.\d+', figures)) == 2
    assert len(re.findall(r'flowserve_link_bytes{machine="local-\d"} 0', figures)) == 2
    assert served.stop() == 0
    assert not any(map(is_running, processes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "local:2"], "--cluster needs --placement FILE"),
        (["--placement", "FILE"], "--placement needs --cluster"),
        (["--cluster", "ray", "--placement", "FILE"], "cluster.pbtxt: the cluster has no address"),
        (
            ["--cluster", "local:1", "--placement", "FILE", "--workers", "2"],
            "--cluster and --workers do not go together",
        ),
        (["--cluster", "dask"], "expected ray or local:N, such as local:3, got 'dask'"),
        (
            ["--cluster", "local:1", "--placement", "FILE", "--cluster-tls", "/a,/b,/c"],
            "--cluster-tls /a,/b,/c: ",
        ),
        (["--cluster", "local:1", "--placement", "FILE", "--cluster-tls", "a"], "expected three files, CERT,KEY,CA"),
    ],
)
@pytest.mark.server
def test_options_that_do_not_belong_together_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    write_python(tmp_path / "models", "double")
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text('place { model: "double" }')
    words = [str(placement) if one == "FILE" else one for one in options]
    command = [
        sys.executable,
        "-m",
        "flowserve",
        "run",
        str(tmp_path / "models"),
        "--http-port",
        "0",
        "--allow-grpc=false",
    ]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert message in done.stderr


@pytest.mark.server
def test_a_server_without_a_cluster_imports_nothing_of_one(tmp_path: Path) -> None:
    program = (
        "import sys, flowserve.cli.run\n"
        "from flowserve.cli.main import main\n"
        "print(*[name for name in sys.modules if name.startswith(('ray', 'flowserve.elsewhere'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.server
def test_no_process_is_left_of_a_server_that_is_killed(tmp_path: Path, serve: Callable[..., Served]) -> None:
    repository = tmp_path / "models"
    write_python(repository, "double")
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text('place { model: "double" }')
    served = serve(repository, "--cluster", "local:1", "--placement", str(placement))
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    answer = httpx.post(f"{served.base_url}/v2/models/double/infer", json=body, verify=False).json()
    process = answer["outputs"][1]["data"][0]
    served.process.kill()
    served.process.wait()
    trio.run(until, lambda: not is_running(process))


def drawn(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["graph", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_picture_has_the_places_of_models_and_the_bytes_that_cross(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text(
        'place { model: "shapes_preprocess" }\n'
        'place { model: "shapes_segment" count: 3 resources { key: "GPU" value: 1 } labels { key: "zone" value: "a" } }'
    )
    words = (root / "graphs", "shapes", "--placement", placement)
    text = drawn(capsys, *words)
    assert "onnxruntime, dynamic batches up to 16, 3 instances on other machines: GPU 1, zone=a\n" in text
    crossing = re.findall(r"(\w+) +\S+ \S+ +<- .*\((.*)\)", text)
    assert crossing == [
        ("RAW_IMAGE", "bytes that vary cross"),
        ("FORMATTED_IMAGE", "12288 bytes a row cross"),
        ("FORMATTED_IMAGE", "12288 bytes a row cross twice"),
        ("SEGMENTATION", "1024 bytes a row cross"),
    ]
    svg = drawn(capsys, *words, "--format", "svg")
    assert ">bytes that vary cross<" in svg, "on the edge of an input, whose type is in its box"
    assert ">FP32 [3,32,32], 12288 bytes a row cross twice<" in svg, "what the reader gets for which the most crosses"
    mermaid = drawn(capsys, *words, "--format", "mermaid")
    assert re.findall(r'n(\d)\["\w+<.*:::(\w+)', mermaid) == [("0", "green"), ("1", "blue"), ("2", "purple")]
    nodes = json.loads(drawn(capsys, *words, "--format", "json"))["nodes"]
    assert [node.get("machines") for node in nodes] == ["other machines", None, "other machines: GPU 1, zone=a"]
    assert "cross" not in drawn(capsys, root / "graphs", "shapes")
    placement.write_text('place { model: "shapes" }')
    assert main(["graph", *map(str, words)]) == 1
    assert "place the models of its steps" in capsys.readouterr().err


def test_a_picture_has_a_segment_in_one_color_and_what_stays_inside_does_not_cross(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text(
        'segment { name: "two" models: [ "shapes_segment", "shapes_classify" ] count: 3 }\n'
        'place { model: "shapes_preprocess" }'
    )
    words = (root / "graphs", "shapes", "--placement", placement)
    text = drawn(capsys, *words)
    assert text.count("3 instances on other machines in segment two\n") == 2
    assert re.findall(r"(\w+) +\S+ \S+ +<- .*\((.*)\)", text) == [
        ("RAW_IMAGE", "bytes that vary cross"),
        ("FORMATTED_IMAGE", "12288 bytes a row cross twice"),
        ("FORMATTED_IMAGE", "12288 bytes a row cross twice"),
        ("CLASSIFICATION", "16 bytes a row cross"),
        ("SEGMENTATION", "1024 bytes a row cross"),
    ]
    mermaid = drawn(capsys, *words, "--format", "mermaid")
    assert len({color for _, color in re.findall(r'n(\d)\["\w+<.*:::(\w+)', mermaid)[1:]}) == 1
    nodes = json.loads(drawn(capsys, *words, "--format", "json"))["nodes"]
    assert sorted(node.get("segment", "") for node in nodes) == ["", "two", "two"]
