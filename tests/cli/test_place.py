"""`flowserve place`: the measured figures, the proposal, the expected results, and the errors."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.cli.check import check
from flowserve.cli.deployment import described_inputs, find_deployment
from flowserve.cli.elsewhere.expected import expect
from flowserve.cli.elsewhere.proposal import LinkTimes, Proposal, file_text, propose
from flowserve.cli.elsewhere.step_figures import BatchTime, GraphFigures, MeasuredGraph, StepFigures, measure_graph
from flowserve.cli.load import Measured
from flowserve.cli.main import main
from flowserve.cli.tensors import generated_inputs
from flowserve.elsewhere.partition.costs import MachineKind
from flowserve.elsewhere.placement import parse_placement
from flowserve.errors import Problems

PREPARE = """\
backend: "python"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "TWICE" data_type: TYPE_STRING dims: 1 }
"""
HEAVY = """\
backend: "python"
max_batch_size: 8
input { name: "TWICE" data_type: TYPE_STRING dims: 1 }
output { name: "LENGTH" data_type: TYPE_FP32 dims: 1 }
"""
SCORE = """\
platform: "ensemble"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: %s }
output { name: "LENGTH" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step {
    model_name: "prepare"
    model_version: -1
    input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "TWICE" value: "twice" }
  }
  step {
    model_name: "heavy"
    model_version: -1
    input_map { key: "TWICE" value: "twice" }
    output_map { key: "LENGTH" value: "LENGTH" }
  }
}
"""
CODE = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "%s").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("%s", %s)]))
        return responses
"""
LINK = LinkTimes(0.0004, 1e9)
SERVER = MachineKind("server", 1, 2)
CPUS = MachineKind("cpu", 4, 2)
GPUS = MachineKind("gpu", 1, 2, 1)


def write_repository(home: Path, *, heavy: str = HEAVY, dims: str = "1", prepare: str = PREPARE) -> Path:
    codes = {
        "prepare": CODE % ("TEXT", "TWICE", "value + value"),
        "heavy": CODE % ("TWICE", "LENGTH", "np.vectorize(len)(value).astype(np.float32)"),
    }
    for name, text in {"prepare": prepare, "heavy": heavy, "score": SCORE % dims}.items():
        (home / name / "1").mkdir(parents=True)
        (home / name / "config.pbtxt").write_text(text)
        if name in codes:
            (home / name / "1" / "model.py").write_text(codes[name])
    return home


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "models")


def subject_of(repository: Path) -> MeasuredGraph:
    reading, graph = find_deployment(repository, "score")
    return MeasuredGraph(repository, graph, reading.configs, generated_inputs(described_inputs(graph)))


def figures_of(prepare_s: float, heavy_s: float, *, calls: bool = False) -> GraphFigures:
    """One row and one batch of each model for a request; a thousand bytes in and out of each."""
    one = StepFigures(1.0, 1.0, BatchTime(0, 0), BatchTime(0, 0), 1.0, 1, calls=False)
    times = {"prepare": BatchTime(0.0, prepare_s), "heavy": BatchTime(0.0, heavy_s)}
    models = {name: replace(one, here=time, compute=time) for name, time in times.items()}
    models["heavy"] = replace(models["heavy"], calls=calls)
    nbytes = {(0, 0): 1000.0, (1, 0): 1000.0}
    return GraphFigures(1, models, nbytes, nbytes, {}, Measured(8, 50.0, 1.0, 1.0, 1.0, 0))


def proposed(repository: Path, figures: GraphFigures, rate: float, *others: MachineKind, cores: int = 2) -> Proposal:
    return propose(subject_of(repository), figures, (replace(SERVER, cores=cores), *others), LINK, rate)


# ---------------------------------------------------------------------------------------------- measured figures


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 8), st.integers(1, 8))
def test_the_time_of_a_batch_is_the_line_through_what_was_measured(
    fixed: float, row: float, few: int, more: int
) -> None:
    line = BatchTime(fixed, row)
    found = BatchTime.fitted({rows: [line.of(rows)] for rows in (few, few + more)})
    assert (found.fixed_s, found.row_s) == (pytest.approx(fixed, abs=1e-9), pytest.approx(row, abs=1e-9))


@given(st.dictionaries(st.integers(1, 9), st.lists(st.floats(0, 1), min_size=1), min_size=1))
def test_no_part_of_a_batch_takes_less_than_no_time(seconds: Mapping[int, list[float]]) -> None:
    found = BatchTime.fitted(seconds)
    assert found.fixed_s >= 0
    assert found.row_s >= 0


@pytest.mark.slow
def test_rows_batches_and_bytes_are_those_of_a_request(repository: Path) -> None:
    subject = subject_of(repository)
    figures = measure_graph(subject, 0.05, 2)
    assert figures.input_bytes == {(0, 0): len("flowserve"), (1, 0): 2 * len("flowserve")}
    assert figures.output_bytes == {(0, 0): 2 * len("flowserve"), (1, 0): 4}
    assert {(one.rows, one.batches, one.calls) for one in figures.models.values()} == {(1, 1, False)}
    assert all(one.here.of(1) > one.compute.of(1) > 0 for one in figures.models.values())
    assert figures.measured.failed == 0


# ---------------------------------------------------------------------------------------------- proposals


def test_the_heavy_model_leaves_a_server_that_has_too_few_cores(repository: Path) -> None:
    found = proposed(repository, figures_of(0.0001, 0.02), 100, CPUS)
    prepare, heavy = found.models
    assert (prepare.where, prepare.hops, prepare.crossing_bytes) == ("server", 0, 0)
    assert (heavy.where, heavy.instances, heavy.hops, heavy.crossing_bytes) == ("cpu", 3, 1, 2000)
    assert heavy.takes.of(1) == pytest.approx(0.0004 + 0.02 + 2000 / 1e9)
    assert "2.01 cores, and 1.40 may be busy" in heavy.why
    assert not found.overloads


def test_an_instance_elsewhere_has_two_batches_if_the_way_takes_as_long_as_the_batch(repository: Path) -> None:
    link = LinkTimes(0.02, 1e9)
    found = propose(subject_of(repository), figures_of(0.0001, 0.02), (SERVER, CPUS), link, 100).models[1]
    assert (found.instances, found.at_once) == (3, 6)
    slow = LinkTimes(0.06, 1e9)
    found = propose(subject_of(repository), figures_of(0.0001, 0.04), (SERVER, CPUS), slow, 100).models[1]
    assert (found.instances, found.at_once) == (8, 16)  # (40 + 60) / 2 ms, 100 times, to seven tenths


def test_a_model_that_stays_has_the_instances_of_its_configuration(repository: Path) -> None:
    stays = proposed(repository, figures_of(0.0001, 0.02), 60, CPUS).models[1]
    assert (stays.where, stays.has, stays.instances) == ("server", 1, 2)


def test_a_proposal_is_a_valid_file(repository: Path, tmp_path: Path) -> None:
    found = proposed(repository, figures_of(0.0001, 0.02), 100, CPUS, GPUS)
    text = file_text(found, "Proposed.", (SERVER, CPUS, GPUS))
    place = parse_placement(text, "cluster.pbtxt").places["heavy"]
    assert (place.count, place.resources, place.labels) == (3, {"CPU": 1}, {"kind": "cpu"})
    (tmp_path / "cluster.pbtxt").write_text(text)
    err = io.StringIO()
    assert check([repository], io.StringIO(), err, color=False, placement=tmp_path / "cluster.pbtxt") == 0, err


def test_a_file_without_places_is_valid_too(repository: Path) -> None:
    found = proposed(repository, figures_of(0.0001, 0.0001), 1, CPUS)
    text = file_text(found, "Proposed.", (SERVER, CPUS))
    assert parse_placement(text, "cluster.pbtxt").places == {}
    assert "No model is placed" in text


def test_a_model_that_cannot_be_placed_stays_and_the_reason_is_told(repository: Path, tmp_path: Path) -> None:
    calls = proposed(repository, figures_of(0.0001, 0.02, calls=True), 100, CPUS)
    assert calls.models[1].where == "server"
    assert "calls other models" in calls.models[1].why
    assert calls.models[0].why == "the server would be as busy with sending its tensors away"
    assert calls.overloads == ("the server would need 2.01 cores, and 1.40 may be busy",)
    sequences = HEAVY + "sequence_batching {}\n"
    stays = proposed(write_repository(tmp_path / "more", heavy=sequences), figures_of(0.0001, 0.02), 100, CPUS).models[
        1
    ]
    assert (stays.where, "sequences" in stays.why) == ("server", True)
    rate = 'instance_group { rate_limiter { resources { name: "R" count: 1 } } }\n'
    repository = write_repository(tmp_path / "rate", heavy=HEAVY + rate)
    stays = proposed(repository, figures_of(0.0001, 0.02), 100, CPUS).models[1]
    assert (stays.where, "resources of the rate limiter" in stays.why) == ("server", True)


def test_a_model_for_a_gpu_goes_where_one_is(tmp_path: Path) -> None:
    heavy = HEAVY + "instance_group { kind: KIND_GPU }\n"
    repository = write_repository(tmp_path / "models", heavy=heavy)
    found = proposed(repository, figures_of(0.0001, 0.0001), 1, CPUS, GPUS)
    assert found.models[1].where == "gpu"
    places = parse_placement(file_text(found, "Proposed.", (SERVER, CPUS, GPUS)), "cluster.pbtxt").places
    assert places["heavy"].resources == {"GPU": 1}
    with pytest.raises(Problems) as refused:
        proposed(repository, figures_of(0.0001, 0.0001), 1, CPUS)
    assert str(refused.value).startswith("heavy/config.pbtxt:5:")
    assert "model 'heavy' needs a GPU" in str(refused.value)


def test_an_overload_that_no_placement_avoids_is_stated(repository: Path) -> None:
    found = proposed(repository, figures_of(0.0001, 0.02), 1000, CPUS)
    assert found.overloads == ("machines 'cpu' have room for 8 instances, and 29 are needed",)


def test_neighbours_on_one_machine_are_named_with_what_one_step_would_save(repository: Path) -> None:
    found = proposed(repository, figures_of(0.02, 0.02), 100, CPUS, cores=1)
    (group,) = found.groups
    assert group.models == ("prepare", "heavy")
    assert group.saves_s == pytest.approx(0.0004 + 2 * 1000 / 1e9)  # one exchange, and the tensor between them
    text = file_text(found, "Proposed.", (SERVER, CPUS))
    assert "# neighbours on one machine: prepare, heavy (as a segment, 0.40 ms less of a request)" in text
    assert [*parse_placement(text, "cluster.pbtxt").places] == ["prepare", "heavy"]  # they would share an interpreter


def test_neighbours_that_share_no_interpreter_are_a_segment(repository: Path) -> None:
    subject = subject_of(repository)
    configs = {**subject.configs, "heavy": replace(subject.configs["heavy"], backend="onnxruntime")}
    figures = figures_of(0.02, 0.05)
    kinds = (replace(SERVER, cores=1), replace(CPUS, count=6), GPUS)
    found = propose(replace(subject, configs=configs), figures, kinds, LINK, 100)
    needed = {one.model: one.instances for one in found.models}
    text = file_text(found, "Proposed.", kinds)
    places = parse_placement(text, "cluster.pbtxt").places
    assert {one.segment for one in places.values()} == {"prepare-heavy"}
    for one in places.values():
        assert one.count == max(needed.values())
        assert one.count * one.resources["CPU"] >= sum(needed.values())
        assert one.labels == {"kind": "cpu"}
    one_core = tuple(replace(kind, cores=1) for kind in kinds[:1]) + tuple(
        replace(kind, cores=1, count=24) for kind in kinds[1:]
    )
    found = propose(replace(subject, configs=configs), figures, one_core, LINK, 100)
    assert not found.groups[0].is_segment  # its processes would need two cores


def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_measured(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in (tmp_path / "missing" / "cluster.pbtxt", tmp_path):
        assert (
            main(["place", str(repository), "score", "--machines", "cpu*1", "--seconds", "3600", "-o", str(out)]) == 1
        )
        assert f"--out: '{out}' cannot be written" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- expected results


def expected_rate(repository: Path, placed: Mapping[str, int], cores: int, rate: float = 0.0) -> tuple[float, bool]:
    figures = figures_of(0.0, 0.02)
    takes = {name: one.here for name, one in figures.models.items()}
    found = expect(subject_of(repository), figures, takes, placed, cores, 8, rate)
    return found.requests_per_s, found.is_behind


def test_instances_on_other_machines_multiply_what_is_expected(repository: Path) -> None:
    assert expected_rate(repository, {}, 2) == (pytest.approx(50, rel=0.01), False)
    assert expected_rate(repository, {"heavy": 3}, 2) == (pytest.approx(150, rel=0.02), False)


def test_instances_in_the_server_share_its_cores(tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "models", heavy=HEAVY + "instance_group { count: 4 }\n")
    assert [round(expected_rate(repository, {}, cores)[0]) for cores in (1, 2, 4)] == [50, 100, 200]


def test_a_rate_above_what_is_served_is_expected_to_fall_behind(repository: Path) -> None:
    assert expected_rate(repository, {}, 2, rate=100) == (pytest.approx(50, rel=0.05), True)
    assert expected_rate(repository, {"heavy": 3}, 2, rate=100) == (pytest.approx(100, rel=0.1), False)


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_measures_proposes_and_writes_a_file_that_check_accepts(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.pbtxt"
    given = ["--machines", "cpu*4", "--cores", "2", "--rate", "100", "--seconds", "0.05", "--concurrency", "2"]
    given += ["--takes", "heavy=20", "--takes", "prepare=0.1"]
    assert main(["place", str(repository), "score", *given, "--json", "--out", str(file)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(one["model"], one["where"], one["instances"]) for one in printed["models"]] == [
        ("prepare", "server", 1),
        ("heavy", "cpu", 3),
    ]
    expected = {label: one["requests_per_s"] for label, one in printed["results"].items()}
    assert expected["expected here, 100 per second"] < 60
    assert expected["expected with the file, 100 per second"] == pytest.approx(100, rel=0.1)
    assert file.read_text() == printed["placement"]
    assert main(["check", "-q", str(repository), "--placement", str(file)]) == 0
    capsys.readouterr()
    assert main(["place", str(repository), "score", *given]) == 0
    shown = capsys.readouterr().out
    assert 'place { model: "heavy" count: 3 resources { key: "CPU" value: 1 } }' in shown
    assert "grows" in shown


def test_mistakes_are_told_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varying = {"prepare": PREPARE.replace("TYPE_STRING dims: 1 }\noutput", "TYPE_STRING dims: -1 }\noutput")}
    repository = str(write_repository(tmp_path / "models", dims="-1", **varying))
    machines = ["--machines", "cpu*1"]
    for arguments, said in {
        ("score", *machines): "score/config.pbtxt:3:45: error: the dims of input 'TEXT' vary",
        ("scor", *machines): "no deployment 'scor' in",
        ("score", *machines, "--input", "TXT=a"): "the model has no input 'TXT'",
        ("score", *machines, "--takes", "heav=1"): "--takes: 'score' has no model 'heav' (did you mean \"heavy\"?)",
    }.items():
        assert main(["place", repository, *arguments]) == 1
        assert said in capsys.readouterr().err
    for arguments, said in {
        ("--machines", "cpu*2,gpu"): "part 2 of 'cpu*2,gpu', 'gpu'",
        ("--machines", "cpu*2,cpu*1"): "'cpu' is there twice: part 2",
        ("--machines", "cpu*0"): "expected cpu*COUNT or gpu*COUNT",
        (*machines, "--takes", "heavy"): "expected MODEL=MS",
        (*machines, "--link-each-us", "-1"): "expected a number above 0",
        (): "the following arguments are required: --machines",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["place", repository, "score", *arguments])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
