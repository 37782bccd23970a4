"""Label files: one label per line, also for outputs of ensembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Problems
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.repository.layout import ModelFolder, scan
from flowserve.repository.read import ReadModel, examine, output_labels
from flowserve.values import DType, TensorSpec
from tests.support.ensembles import tensors

CONFIG = """
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 label_filename: "labels/animals.txt" }
"""


def says(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    return Completion(inputs=tensors({"X": "FP32[4]"}), outputs=tensors({"Y": "FP32[4]"}), max_batch_size=0)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], ReadModel]:
    """Read a model "m" whose label file has these bytes."""

    def read(content: bytes) -> ReadModel:
        home = tmp_path / "models" / "m"
        (home / "1").mkdir(parents=True)
        (home / "1" / "model.onnx").touch()
        (home / "labels").mkdir()
        (home / "labels" / "animals.txt").write_bytes(content)
        (home / "config.pbtxt").write_text(CONFIG)
        (folder,) = scan(tmp_path / "models")
        return examine(folder, {"onnxruntime": "model.onnx"}, says).valid()

    return read


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"cat\ndog\n", ("cat", "dog")),
        ("cat\u2028or kitten\n\x0cdog\x85\n\n".encode(), ("cat\u2028or kitten", "\x0cdog\x85", "")),
        (b"cat\r\ndog: small\r\n\r\nb\xc3\xa4r", ("cat", "dog: small", "", "bär")),
        (b"", ()),
    ],
)
def test_a_label_file_has_one_label_per_line(
    read: Callable[[bytes], ReadModel], content: bytes, labels: tuple[str, ...]
) -> None:
    assert read(content).labels == {"Y": labels}


def test_a_label_file_that_is_no_text_is_a_mistake_with_its_place(read: Callable[[bytes], ReadModel]) -> None:
    with pytest.raises(Problems) as refused:
        read(b"\xff\xfe")
    (problem,) = refused.value.problems
    assert str(problem) == (
        "m/config.pbtxt:3:49: label file 'labels/animals.txt' of output 'Y' cannot be read: it is not UTF-8 text"
    )


def test_an_ensembles_output_has_its_producers_labels_unless_it_has_its_own() -> None:
    x, y, z = (TensorSpec(name, DType.FP32, (4,)) for name in "XYZ")
    node = Node(0, "m", ModelKey("m", 1), (x,), (y, z), 0)
    edges = (
        Edge("a", GRAPH, 0, 0, 0),
        Edge("p", 0, 0, GRAPH, 0),
        Edge("q", 0, 1, GRAPH, 1),
        Edge("r", GRAPH, 0, GRAPH, 2),
    )
    outputs = tuple(TensorSpec(name, DType.FP32, (4,)) for name in ("P", "Q", "R"))
    graph = Graph("e", 1, (x,), outputs, 0, (node,), edges, is_ensemble=True)
    known: dict[str, dict[str, tuple[str, ...]]] = {"e": {"Q": ("own",)}, "m": {"Y": ("cat", "dog"), "Z": ("other",)}}
    assert output_labels(graph, known.__getitem__) == {"P": ("cat", "dog"), "Q": ("own",)}
