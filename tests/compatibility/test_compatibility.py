"""The comparison with Triton: repositories are found and completed, every kind of difference is seen, servers end.

The servers here are flowserve's; tests/triton/test_repositories.py runs the comparison with the real one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compatibility.__main__ import main
from tests.compatibility.ask import Answer, Output, Response
from tests.compatibility.compare import Result, compare
from tests.compatibility.configs import fill_template, with_backend, without_gpus
from tests.compatibility.differences import Difference, differences
from tests.compatibility.known import KNOWN, row_of
from tests.compatibility.observe import Model, Observed
from tests.compatibility.report import print_result
from tests.compatibility.repositories import find_repositories
from tests.compatibility.requests import Protocol, questions, sequence_parameters
from tests.compatibility.stand_ins import Machine
from tests.support.triton_models import python_config, spec, write_model

ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [
  { model_name: "weights" model_version: -1 input_map { key: "X" value: "IN" } output_map { key: "Y" value: "a" } },
  { model_name: "plan" model_version: -1 input_map { key: "X" value: "a" } output_map { key: "Y" value: "b" } },
  { model_name: "imports" model_version: -1 input_map { key: "X" value: "b" } output_map { key: "Y" value: "OUT" } }
] }
"""
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132735\n"


def tensors(name: str, *, inputs: str, outputs: str) -> str:
    """A configuration of the platform or backend `name`."""
    lines = [name, "max_batch_size: 4", f"input [ {spec('X', 'FP32', inputs)} ]"]
    return "\n".join(
        [*lines, f"output [ {spec('Y', 'FP32', outputs)} ]", "instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]\n"]
    )


@pytest.fixture
def incomplete(tmp_path: Path) -> Path:
    """A folder with one repository as git holds it: without weights, libraries and empty folders."""
    repository = tmp_path / "checked_out" / "deploy" / "models"
    write_model(repository, "weights", tensors('platform: "onnxruntime_onnx"', inputs="2", outputs="-1"))
    (repository / "weights" / "1" / "model.onnx").write_text(LFS)
    write_model(repository, "plan", tensors('platform: "tensorrt_plan"', inputs="-1", outputs="3"))
    (repository / "plan" / "1").rmdir()
    write_model(repository, "imports", tensors('backend: "python"', inputs="3", outputs="3"), "import no_such_library")
    (repository / "whole").mkdir()
    (repository / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    return tmp_path / "checked_out"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_repositories_are_found_at_any_depth_and_single_configurations_count(tmp_path: Path) -> None:
    for name in ("a/models/one/config.pbtxt", "b/two/1/model.onnx", "c/docs/readme.txt", "d/seed.pbtxt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert [one.name for one in find_repositories(tmp_path)] == ["a/models", "b", "d/seed.pbtxt"]


@pytest.mark.server
def test_a_repository_without_weights_and_libraries_is_served_with_stand_ins(incomplete: Path) -> None:
    before = files_of(incomplete)
    (repository,) = find_repositories(incomplete)
    result = compare(repository, Machine(), with_triton=False)
    assert (result.problems, result.failures) == ([], [])
    assert {(one.model, one.what) for one in result.stand_ins if one.what != "instances on the CPU"} == {
        ("weights", "generated model.onnx"),
        ("plan", "empty version folder"),
        ("plan", "Python model"),
        ("imports", "Python model"),
        ("whole", "empty version folder"),
    }
    assert result.models == ["imports", "plan", "weights", "whole"]
    assert result.answered == result.requests == 24
    assert files_of(incomplete) == before


@pytest.mark.server
def test_failures_are_reported_with_status_1_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITONSERVER", raising=False)
    one = [spec("X", "FP32", "1")], [spec("Y", "FP32", "1")]
    write_model(
        tmp_path / "models", "raises", python_config(*one), "def execute(self, requests): raise ValueError('no')"
    )
    status = main([str(tmp_path / "models"), "--out", str(tmp_path / "out.json")])
    assert status == 1
    assert "raises: HTTP JSON: 500 Failed to process" in capsys.readouterr().out
    (told,) = json.loads((tmp_path / "out.json").read_text())["repositories"]
    assert (told["answered"], told["requests"], len(told["failures"])) == (0, 4, 4)


def test_a_folder_without_repositories_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no model repository" in capsys.readouterr().err


@pytest.mark.server
def test_an_interrupt_ends_the_server_too(tmp_path: Path) -> None:
    one = [spec("X", "FP32", "1")], [spec("Y", "FP32", "1")]
    body = f"def execute(self, requests):\n    open({str(tmp_path / 'asked')!r}, 'w').close()\n    time.sleep(60)"
    write_model(tmp_path / "models", "slow", python_config(*one), body)
    command = [sys.executable, "-m", "tests.compatibility", str(tmp_path / "models")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        too_late = time.monotonic() + 60
        while not (tmp_path / "asked").exists() and time.monotonic() < too_late:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].endswith("interrupted\n")
        assert process.returncode == 130
    finally:
        process.kill()
    # The server held the copy of the repository, and no other process.
    servers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"flowserve\0run" in _read(path)]
    assert not any(str(process.pid) == _parent(path.parent) for path in servers)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parent(process: Path) -> str:
    return _read(process / "stat").decode().rpartition(")")[2].split()[1]


METADATA = {
    "name": "m",
    "inputs": [
        {"name": "X", "datatype": "FP32", "shape": [-1, -1, 3]},
        {"name": "T", "datatype": "BYTES", "shape": [-1, 1]},
    ],
}


def test_requests_have_one_and_two_rows_and_are_the_same_each_time() -> None:
    made = questions(METADATA, {"max_batch_size": 8})
    assert [one.name for one in made] == [
        f"{protocol}, {rows}" for rows in ("1 row", "2 rows") for protocol in ("HTTP JSON", "HTTP binary", "gRPC")
    ]
    assert [one.array.shape for one in made[-1].tensors] == [(2, 4, 3), (2, 1)]
    again = questions(METADATA, {"max_batch_size": 8})
    assert all(np.array_equal(a.array, b.array) for a, b in zip(made[-1].tensors, again[-1].tensors, strict=True))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_batch_size": 1}, {Protocol.JSON, Protocol.BINARY, Protocol.GRPC}),
        ({"model_transaction_policy": {"decoupled": True}}, {Protocol.JSON, Protocol.STREAM}),
    ],
)
def test_a_decoupled_model_is_asked_for_a_stream(config: dict[str, object], expected: set[Protocol]) -> None:
    assert {one.protocol for one in questions(METADATA, config)} == expected


def test_an_ensemble_of_a_model_with_sequences_is_asked_for_a_sequence() -> None:
    control = {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}]}
    configs: dict[str, dict[str, Any]] = {
        "keeps": {"sequence_batching": {"control_input": [control]}},
        "outer": {"ensemble_scheduling": {"step": [{"model_name": "plain"}, {"model_name": "keeps"}]}},
        "plain": {},
    }
    assert sequence_parameters("plain", configs) == {}
    assert sequence_parameters("outer", configs)["sequence_id"] == "seven"
    made = questions(METADATA, {"max_batch_size": 8}, sequence_parameters("outer", configs))
    assert {one.rows for one in made} == {1}


def answer(*values: float, status: str = "200", error: str = "", name: str = "Y") -> tuple[Answer, Answer]:
    output = Output(name, "FP32", np.array(values, np.float32))
    one = Answer(status, error, [] if error else [Response([output], {"model_name": "m"})])
    return one, deepcopy(one)


def observed(*, ready: bool = True, **facts: object) -> Observed:
    model = Model(
        ready, metadata={"name": "m"}, config={"platform": ""}, answers={"HTTP JSON": answer(1, 2)}, counts={}
    )
    for key, value in facts.items():
        setattr(model, key, value)
    state = {"name": "m", "version": "1", "state": "READY"} if ready else {"name": "m"}
    return Observed({"m": model}, [state])


def test_equal_servers_have_no_differences() -> None:
    assert differences(observed(), observed(answers={"HTTP JSON": answer(1.00001, 2)})) == []


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (observed(ready=False), "m: ready: flowserve ready, Triton not ready (no reason)"),
        (Observed(), "m: index: flowserve ready, Triton absent"),
        (observed(metadata={"name": "m", "versions": ["1"]}), "m: metadata.versions: flowserve absent, Triton ['1']"),
        (observed(config={"platform": "python"}), "m: config.platform: flowserve , Triton python"),
        (observed(counts={"inference_count": 2}), "m: statistics.inference_count: flowserve absent, Triton 2"),
        (
            observed(answers={"HTTP JSON": answer(1, 3)}),
            "m: HTTP JSON: Y: values: flowserve [1.0, 2.0], Triton [1.0, 3.0]",
        ),
        (
            observed(answers={"HTTP JSON": answer(1, 2, 3)}),
            "m: HTTP JSON: Y: shape: flowserve FP32 [2], Triton FP32 [3]",
        ),
        (
            observed(answers={"HTTP JSON": answer(1, 2, name="Z")}),
            "m: HTTP JSON: outputs: flowserve ['Y'], Triton ['Z']",
        ),
        (
            observed(answers={"HTTP JSON": answer(status="500", error="bad")}),
            "m: HTTP JSON: status: flowserve 200 , Triton 500 bad",
        ),
        (Observed(failure="no port"), "repository: start: flowserve started, Triton no port"),
    ],
)
def test_each_kind_of_difference_is_one_line(theirs: Observed, expected: str) -> None:
    assert [str(one) for one in differences(observed(), theirs)] == [expected]


def test_of_a_model_whose_answers_vary_only_shapes_are_compared() -> None:
    ours = observed(answers={"HTTP JSON": (answer(1, 2)[0], answer(3, 4)[0])})
    assert differences(ours, observed(answers={"HTTP JSON": answer(5, 6)})) == []
    assert len(differences(ours, observed(answers={"HTTP JSON": answer(5, 6, 7)}))) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "count"),
    [
        ("too long: 9 of 8", "[request id: q] too long", 0),
        (
            "for model instance 'm_0', message: no (m/1/model.py:3)",
            "for model 'm_0', message: no\n\nAt:\n  /a/model.py(3)",
            0,
        ),
        ("too short", "too long", 1),
        ("", "too long", 1),
    ],
)
def test_an_error_text_has_to_begin_with_that_of_triton(ours: str, theirs: str, count: int) -> None:
    of_both = [observed(answers={"HTTP JSON": answer(status="400", error=text)}) for text in (ours, theirs)]
    assert len(differences(of_both[0], of_both[1])) == count


@pytest.mark.parametrize("row", sorted({one.row for one in KNOWN}))
def test_every_documented_difference_is_a_row_of_the_page(root: Path, row: str) -> None:
    section = (root / "docs/from-triton.md").read_text().partition("## 3.")[2].partition("## 4.")[0]
    assert any(line.startswith(f"| {row}") for line in section.splitlines())


def test_a_difference_is_documented_only_if_both_sides_fit() -> None:
    assert row_of(Difference("m", "HTTP generate, 1 row: status", "500 bad", "400 bad"))
    assert not row_of(Difference("m", "HTTP generate, 1 row: status", "500 bad", "200 "))


@pytest.mark.parametrize(
    ("change", "text", "expected"),
    [
        (
            fill_template,
            'a: ${x} b: "${y}" decoupled: ${z} data_type: ${t}',
            'a: 4 b: "${y}" decoupled: false data_type: TYPE_FP32',
        ),
        (without_gpus, "kind: KIND_GPU, gpus: [ 0, 1 ]", "kind: KIND_CPU, "),
        (
            lambda text: with_backend(text, "python"),
            'platform: "tensorrt_plan"\nmax_batch_size: 4',
            'max_batch_size: 4\nbackend: "python"\n',
        ),
    ],
)
def test_single_fields_of_a_text_are_changed(change: Callable[[str], str], text: str, expected: str) -> None:
    assert change(text) == expected


def test_a_difference_of_several_requests_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Difference("m", f"{name}: Y: shape", "FP32 [1]", "FP32 [1,1]") for name in ("HTTP JSON, 1 row", "gRPC, 1 row")
    ]
    other = Difference("m", "ready", "ready", "not ready")
    print_result(Result("r", different=[*rows, other]), with_triton=True, verbose=False)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        "m: HTTP JSON, 1 row: Y: shape: flowserve FP32 [1], Triton FP32 [1,1] (2 requests)",
        "m: ready: flowserve ready, Triton not ready",
    ]


def test_golden_repositories_are_found(root: Path) -> None:
    found = find_repositories(root / "tests/golden/repositories")
    assert len(found) >= 20
    assert not any(one.configuration for one in found)
