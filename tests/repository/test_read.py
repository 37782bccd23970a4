"""Reading one model folder: configuration, completion, versions, and all mistakes at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.backends import registry
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Invalid, Place, Problems
from flowserve.repository.layout import ModelFolder, scan
from flowserve.repository.read import ReadModel, examine
from flowserve.runtime.loading.reading import verify
from tests.support.ensembles import tensors

FILES = {"onnxruntime": "model.onnx"}
INPUT = 'input { name: "X" data_type: TYPE_FP32 dims: 4 }'
OUTPUT = 'output { name: "Y" data_type: TYPE_FP32 dims: 4 }'
ENSEMBLE = f"""
platform: "ensemble"
{INPUT}
{OUTPUT}
ensemble_scheduling {{ step {{ model_name: "m" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }} }}
"""


def says(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    return Completion(inputs=tensors({"X": "FP32[4]"}), outputs=tensors({"Y": "FP32[4]"}), max_batch_size=0)


def is_broken(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    raise Invalid(f"{folder.name}/{version}/model.onnx is truncated")


def raises(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    raise ZeroDivisionError("another project's code")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., ModelFolder]:
    """Create the folder of a model "m": its configuration, and an empty model.onnx in each version."""

    def create(config: str | None, *versions: str, files: bool = True) -> ModelFolder:
        home = tmp_path / "models" / "m"
        home.mkdir(parents=True)
        if config is not None:
            (home / "config.pbtxt").write_text(config)
        for version in versions:
            (home / version).mkdir()
            if files:
                (home / version / "model.onnx").touch()
        (found,) = scan(tmp_path / "models")
        return found

    return create


Make = Callable[..., ModelFolder]


def refused(folder: ModelFolder, complete: Callable[[ModelConfig, ModelFolder, int], Completion] = says) -> Problems:
    with pytest.raises(Problems) as caught:
        examine(folder, FILES, complete).valid()
    return caught.value


def test_a_folder_without_configuration_is_completed_from_its_model(folder: Make) -> None:
    read = examine(folder(None, "1"), FILES, says).valid()
    assert isinstance(read, ReadModel)
    assert read.config.backend == "onnxruntime"
    assert [spec.name for spec in (*read.config.inputs, *read.config.outputs)] == ["X", "Y"]
    assert read.versions == (1,)


def test_completion_uses_the_newest_served_version(folder: Make) -> None:
    asked = []

    def note(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
        asked.append(version)
        return says(config, folder, version)

    read = examine(folder("version_policy { specific { versions: [1, 9] } }", "1", "9", "10"), FILES, note).valid()
    assert asked == [9]
    assert read.versions == (1, 9)


def test_an_ensemble_needs_no_completion_and_an_empty_version_folder(folder: Make) -> None:
    read = examine(folder(ENSEMBLE, "1", files=False), FILES, raises).valid()
    assert read.config.is_ensemble
    assert read.versions == (1,)


def test_an_ensemble_without_a_version_folder_is_version_1_with_a_warning(folder: Make) -> None:
    read = examine(folder(ENSEMBLE), FILES, raises).valid()
    assert read.versions == (1,)
    (warning,) = read.warnings
    assert warning.rule == "R16"
    assert "mkdir m/1" in warning.hint


def test_a_syntax_error_has_its_place(folder: Make) -> None:
    (problem,) = refused(folder("max_batch_size: many", "1")).problems
    assert str(problem.place) == "m/config.pbtxt:1:17"


@pytest.mark.fault("C12")
def test_an_unreadable_model_file_is_the_only_problem(folder: Make) -> None:
    problems = refused(folder(None, "1"), is_broken).problems
    assert [problem.message for problem in problems] == ["m/1/model.onnx is truncated"]


def test_a_broken_model_file_does_not_hide_mistakes_of_the_configuration(folder: Make) -> None:
    text = str(refused(folder(f"max_batch_size: -3\n{INPUT}\n{OUTPUT}", "1"), is_broken))
    assert "m/1/model.onnx is truncated" in text
    assert "m/config.pbtxt:1:1" in text


def test_a_missing_version_does_not_hide_mistakes_of_the_configuration(folder: Make) -> None:
    text = str(refused(folder(f'backend: "onnxruntime"\nmax_batch_size: -3\n{INPUT}\n{OUTPUT}')))
    assert "at least one version must be available under the version policy of model 'm'" in text
    assert "m/config.pbtxt:2:1" in text


def test_a_backend_that_raises_any_exception_is_named(folder: Make) -> None:
    text = str(refused(folder(None, "1"), raises))
    assert "backend 'onnxruntime' failed to read it: ZeroDivisionError: another project's code" in text


def test_missing_versions_of_a_policy_are_a_warning(folder: Make) -> None:
    read = examine(folder("version_policy { specific { versions: [1, 7] } }", "1"), FILES, says).valid()
    (warning,) = read.warnings
    assert str(warning) == "m/config.pbtxt:1:1: version 7 of its version policy is not there; served without it [R8]"


def test_a_misspelt_parameter_is_a_warning(folder: Make) -> None:
    keys = ("executoin", "Max_Requests", "execution", "my_own", "execute_model_at", "requests")
    text = "\n".join(f'parameters {{ key: "{key}" value {{ string_value: "inline" }} }}' for key in keys)
    second, first = examine(folder(text, "1"), FILES, says).valid().warnings
    assert str(first) == (
        "m/config.pbtxt:1:14: parameter 'executoin' is left to the model; the server does not read it"
        ' (did you mean "execution"?) [R13]'
    )
    assert (second.place and second.place.line, second.hint) == (2, 'did you mean "max_requests"?')


def test_an_environment_of_a_python_model_inside_the_server_is_a_warning(folder: Make) -> None:
    execution = 'parameters { key: "execution" value { string_value: "thread" } }'
    text = f"""backend: "python"\n{INPUT}\n{OUTPUT}\nparameters {{
  key: "EXECUTION_ENV_PATH" value {{ string_value: "/env.tar.gz" }} }}
{execution}"""
    home = folder(text, "1", files=False)
    (home.path / "1" / "model.py").touch()
    (warning,) = examine(home, FILES | {"python": "model.py"}, says).valid().warnings
    assert str(warning) == (
        "m/config.pbtxt:5:3: EXECUTION_ENV_PATH is not used: model 'm' runs in the server's own Python environment "
        '(by execution "thread"; only "process" can have another. Else install there what the model imports) [R9]'
    )
    (home.path / "config.pbtxt").write_text(text.replace(execution, ""))
    assert examine(home, FILES | {"python": "model.py"}, says).valid().warnings == ()
    (home.path / "1" / "model.onnx").touch()
    (home.path / "config.pbtxt").write_text(text.replace("python", "onnxruntime"))
    assert examine(home, FILES, says).valid().warnings == ()


def test_batching_settings_without_effect_are_a_warning(folder: Make) -> None:
    policies = "priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    text = f"""backend: "python" {INPUT} {OUTPUT}
parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value {{ string_value: "/strategy.so" }} }}
dynamic_batching {{ {policies} }}"""
    home = folder(text, "1", files=False)
    (home.path / "1" / "model.py").touch()
    strategy, policy = examine(home, FILES | {"python": "model.py"}, says).valid().warnings
    assert str(strategy).startswith("m/config.pbtxt:2:14: TRITON_BATCH_STRATEGY_PATH is not used: the server decides ")
    assert str(policy) == (
        "m/config.pbtxt:3:20: priority_queue_policy is not used: without priority_levels there is no level that it "
        "could be for (default_queue_policy is for all requests) [R15]"
    )
    levels = text.replace(policies, f"priority_levels: 1 default_priority_level: 1 {policies}")
    (home.path / "config.pbtxt").write_text(levels)
    assert examine(home, FILES | {"python": "model.py"}, says).valid().warnings == (strategy,)
    for place in (".", "1", "warmup"):
        (home.path / place).mkdir(exist_ok=True)
        (home.path / place / "batchstrategy.so").touch()
    *libraries, _ = examine(home, FILES | {"python": "model.py"}, says).valid().warnings
    assert [str(one).split(" (")[0] for one in libraries] == [
        f"{path}: batchstrategy.so is not used: the server decides itself which requests are batched together"
        for path in ("m/batchstrategy.so", "m/1/batchstrategy.so")
    ]


def test_every_ignored_field_is_a_warning_at_its_place(folder: Make) -> None:
    hints = 'optimization { eager_batching: true } instance_group { host_policy: "p" }'
    home = folder(f'{INPUT} {OUTPUT}\n{hints} metric_tags {{ key: "a" value: "b" }}', "1")
    assert [*map(str, examine(home, FILES, says).valid().warnings)] == [
        "m/config.pbtxt:2:16: optimization.eager_batching is read and ignored [R15]",
        "m/config.pbtxt:2:75: metric_tags is read and ignored [R15]",
        "m/config.pbtxt:2:56: instance_group[0].host_policy is read and ignored [R15]",
    ]


def test_batch_tensors_without_a_batch_are_a_warning(folder: Make) -> None:
    """A model.py gets requests, and an ensemble has no batches: Triton loads both."""
    made = 'batch_input { target_name: "COUNT" data_type: TYPE_FP32 source_input: "X" }'
    made += ' batch_output { target_name: "Y" source_input: "X" }'
    home = folder(f'backend: "python" {INPUT} {OUTPUT}\n{made}', "1", files=False)
    (home.path / "1" / "model.py").touch()
    assert [str(one) for one in examine(home, FILES | {"python": "model.py"}, says).valid().warnings] == [
        f"m/config.pbtxt:2:{column}: {field} is not used: a model.py gets the requests of a batch one by one "
        "(execute() sees each request's own tensors, and their shapes) [R15]"
        for column, field in ((1, "batch_input"), (77, "batch_output"))
    ]


def test_ignored_fields_at_their_default_are_no_warning(folder: Make) -> None:
    home = folder(f"{INPUT} {OUTPUT}", "1")
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": ["4"]}
    written_out = {
        "input": [tensor],
        "output": [{**tensor, "name": "Y"}],
        "instance_group": [{"host_policy": "", "secondary_devices": []}],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "eager_batching": False,
        },
        "cc_model_filenames": {},
        "runtime": "",
    }
    said = {"metric_tags": {"a": "b"}, "optimization": {"output_pinned_memory": {"enable": False}}}
    for config, told in ((written_out, []), (written_out | said, ["optimization.output_pinned_memory", "metric_tags"])):
        warnings = examine(home, FILES, says, config_json=json.dumps(config)).valid().warnings
        assert [one.message for one in warnings] == [f"{field} is read and ignored" for field in told]


@pytest.mark.fault("C14")
def test_a_configuration_changed_during_completion_is_used_as_it_was(folder: Make) -> None:
    home = folder(f"max_batch_size: 4\n{INPUT}\n{OUTPUT}", "1")

    def change(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
        (folder.path / "config.pbtxt").write_text("max_batch_size: 8 and then nonsense")
        return Completion()

    assert examine(home, FILES, change).valid().config.max_batch_size == 4


@pytest.mark.parametrize(("own", "shown"), [(None, "m/config.pbtxt"), (Place("m/1/model.py", 7, 1), "m/1/model.py")])
def test_an_error_of_the_backend_keeps_its_own_place(
    folder: Make, monkeypatch: pytest.MonkeyPatch, own: Place | None, shown: str
) -> None:
    def find(name: str) -> object:
        error = Invalid("no such thing")
        error.place = own
        raise error

    read = examine(folder(f"{INPUT} {OUTPUT}", "1"), FILES, says).read
    assert read is not None
    monkeypatch.setattr(registry, "find", find)
    with pytest.raises(Problems) as caught:
        verify(read)
    (problem,) = caught.value.problems
    assert problem.message == "no such thing"
    assert problem.place is not None
    assert problem.place.file == shown
