"""Loading of a model folder's configuration: guessed backend, defaults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.config.load import Draft, finish, read_draft
from flowserve.config.types import Completion, DynamicBatching, InstanceGroup, VersionPolicy
from flowserve.errors import Problems
from flowserve.values import DType, TensorSpec

Read = Callable[..., Draft]

TENSORS = """
input { name: "X" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" }
"""


@pytest.mark.parametrize(
    ("text", "files", "backend", "platform", "filename"),
    [
        (None, ("1/model.onnx",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (None, ("1/model.onnx/weights",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (None, ("1/model.py",), "python", "", "model.py"),
        (None, ("1/model.py", "1/model.onnx"), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (None, ("2/model.py", "10/model.onnx"), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (None, ("01/notes", "1/model.onnx"), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (None, ("1/model.plan",), "tensorrt", "tensorrt_plan", "model.plan"),
        (None, ("1/model.savedmodel/x",), "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
        (None, ("1/model.graphdef",), "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ('platform: "tensorflow_graphdef"', (), "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        (None, ("1/model.pt2",), "pytorch", "pytorch_libtorch", "model.pt"),
        (None, ("1/model.xml",), "openvino", "", "model.xml"),
        (None, ("warmup/model.py",), "", "", ""),
        (None, (), "", "", ""),
        ('backend: "python"', (), "python", "", "model.py"),
        ('backend: "mine"', ("1/model.onnx",), "mine", "", ""),
        ('platform: "onnxruntime_onnx"', (), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('platform: "pytorch_libtorch"', (), "pytorch", "pytorch_libtorch", "model.pt"),
        ('default_model_filename: "net.onnx"', (), "onnxruntime", "onnxruntime_onnx", "net.onnx"),
        ('platform: "ensemble"', ("1/model.py",), "", "ensemble", ""),
        ("ensemble_scheduling { }", ("1/model.py",), "", "", ""),
    ],
)
def test_the_backend_is_guessed_from_files(
    draft: Read, text: str | None, files: tuple[str, ...], backend: str, platform: str, filename: str
) -> None:
    read = draft(text, *files)
    assert read.preliminary.backend == backend
    assert read.preliminary.platform == platform
    assert read.preliminary.default_model_filename == filename


def test_a_name_with_a_dot_names_its_backend(draft: Read) -> None:
    assert draft(None, name="model.identity").preliminary.backend == "identity"


def test_a_third_party_backend_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.gguf").write_bytes(b"")
    assert read_draft(tmp_path / "m", tmp_path, {"llama": "model.gguf"}).preliminary.backend == "llama"


def test_a_draft_shows_incomplete_fields(draft: Read) -> None:
    read = draft('max_batch_size: 4 input { name: "X" } input { name: "Z" data_type: TYPE_BF16 }', "1/model.py")
    assert read.preliminary.inputs == (TensorSpec("Z", DType.BF16, ()),)
    assert read.preliminary.max_batch_size == 4
    assert [tensor["name"] for tensor in read.preliminary.json["input"]] == ["X", "Z"]


@pytest.mark.fault("C1")
def test_a_configuration_that_does_not_parse_raises_with_its_place(draft: Read) -> None:
    with pytest.raises(Problems, match=r"^m/config\.pbtxt:2:3: extensions"):
        draft('name: "m"\n  [[')


@pytest.mark.fault("C10")
def test_a_configuration_that_is_a_loop_of_links_raises(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").symlink_to("config.pbtxt")
    with pytest.raises(Problems, match=r"^m/config\.pbtxt: cannot be read: Too many levels of symbolic links"):
        read_draft(tmp_path / "m", tmp_path, {})


def test_a_configuration_that_is_a_pipe_raises_without_blocking(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m/config.pbtxt")
    with pytest.raises(Problems, match=r"^m/config\.pbtxt: cannot be read: it is a pipe or a device and not a file"):
        read_draft(tmp_path / "m", tmp_path, {})


def test_the_place_of_a_missing_configuration_is_the_folder(draft: Read) -> None:
    with pytest.raises(Problems, match=r"^m: Invalid model name: Could not determine backend"):
        finish(draft(None), None)


def test_defaults_are_filled_in_and_shown(draft: Read) -> None:
    config = finish(draft(f"max_batch_size: 8 dynamic_batching {{ }} {TENSORS}", "1/model.py", "labels.txt"), None)
    assert config.version_policy == VersionPolicy(latest=1)
    assert config.dynamic_batching == DynamicBatching(preferred_batch_sizes=(8,))
    assert config.instance_groups == (InstanceGroup("m"),)
    assert config.inputs == (TensorSpec("X", DType.BYTES, (1,), optional=True),)
    assert config.outputs == (TensorSpec("Y", DType.FP32, (-1,), labels="labels.txt"),)
    assert config.json["name"] == "m"
    assert config.json["version_policy"] == {"latest": {"num_versions": 1}}
    assert config.json["optimization"]["input_pinned_memory"] == {"enable": True}
    assert config.json["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config.json["instance_group"][0]["name"] == "m"


@pytest.mark.fault("C11")
def test_unnamed_groups_are_numbered_and_missing_counts_are_the_backends_default(draft: Read) -> None:
    text = 'instance_group [ { count: 0 }, { name: "mine" count: 3 kind: KIND_CPU }, { count: -1 gpus: 0 } ]' + TENSORS
    config = finish(draft(text, "1/model.py", "labels.txt"), Completion(instance_count=2))
    assert [(group.name, group.count, group.kind) for group in config.instance_groups] == [
        ("m_0", 2, "KIND_CPU"),
        ("mine", 3, "KIND_CPU"),
        ("m_2", 2, "KIND_CPU"),
    ]
    shown = [(group["count"], group["kind"], group["gpus"]) for group in config.json["instance_group"]]
    assert shown == [(2, "KIND_CPU", []), (3, "KIND_CPU", []), (2, "KIND_CPU", [])]


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("version_policy { latest { num_versions: 2 } }", VersionPolicy(latest=2)),
        ("version_policy { all { } }", VersionPolicy(latest=0, all=True)),
        ("version_policy: { specific: { versions: [ 1, 3 ] } }", VersionPolicy(latest=0, specific=(1, 3))),
        ("version_policy { }", VersionPolicy(latest=1)),
    ],
)
def test_each_version_policy_is_read(draft: Read, written: str, policy: VersionPolicy) -> None:
    assert finish(draft(written + TENSORS, "1/model.py", "labels.txt"), None).version_policy == policy


def test_parameters_are_strings(draft: Read) -> None:
    text = 'parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { } } ]'
    assert finish(draft(text + TENSORS, "1/model.py", "labels.txt"), None).parameters == {"a": "1", "b": ""}


def test_an_ensemble_keeps_its_steps_in_order_with_their_places(draft: Read) -> None:
    text = """platform: "ensemble"
    input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
    ensemble_scheduling { step [
      { model_name: "a" model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "t" } },
      { model_name: "b" model_version: 3 input_map { key: "X" value: "t" } output_map { key: "Y" value: "B" } }
    ] }"""
    config = finish(draft(text), None)
    assert config.ensemble is not None
    first, second = config.ensemble.steps
    assert (first.model, first.version, first.input_map, first.output_map) == ("a", -1, {"X": "A"}, {"Y": "t"})
    assert (second.model, second.version) == ("b", 3)
    assert str(config.source.place(f"{second.path}.input_map[X]")) == "m/config.pbtxt:6:54"
    assert config.instance_groups == ()
    assert "optimization" not in config.json
    assert config.json["model_transaction_policy"] == {"decoupled": False}


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(draft: Read) -> None:
    text = """name: "other"
parameters { key: "execution" value { string_value: "ray" } } platform: "onnxruntime_onnx"
max_batch_size: -1
model_repository_agents { agents { name: "checksum" } }
output { name: "Y" data_type: TYPE_FP32 dims: [ 0 ] }
"""
    with pytest.raises(Problems) as caught:
        finish(draft(text), None)
    assert [(problem.rule, problem.place and problem.place.line) for problem in caught.value.problems] == [
        ("M2", 1),
        ("N21", 2),
        ("M8", 3),
        ("N19", 4),
        ("M23", 5),
    ]


def test_finishing_twice_gives_the_same(draft: Read) -> None:
    read = draft("max_batch_size: 8 dynamic_batching { }" + TENSORS, "1/model.py", "labels.txt")
    assert finish(read, None) == finish(read, None)
