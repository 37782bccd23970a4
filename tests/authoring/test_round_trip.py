"""Property test: any graph is equal after save and load."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve import Graph, Tensor, model_folder
from flowserve.graph.builder import Part
from flowserve.runtime.loading.reading import read_repositories

FUNCTIONS = """
from flowserve import model

@model({"A": "FP32[4]"}, {"B": "FP32[4]"}, max_batch_size=8, max_queue_delay_us=100, instances=2)
def one(a):
    return a

@model({"A": "FP32[4]", "B": "FP32[4]"}, {"C": "FP32[4]", "D": "FP32[4]"}, max_batch_size=4, execution="auto")
def two(a, b):
    return a, b
"""
FOLDER = """
backend: "python" max_batch_size: 16  # a remark
input { name: "A" data_type: TYPE_FP32 dims: 4 } output { name: "B" data_type: TYPE_FP32 dims: 4 }
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], list[Part]]]:
    """Functions of an importable module, and a model in a folder."""
    home = tmp_path_factory.mktemp("parts")
    (home / "round_trip_functions.py").write_text(FUNCTIONS)
    (home / "folder" / "1").mkdir(parents=True)
    (home / "folder" / "config.pbtxt").write_text(FOLDER)
    (home / "folder" / "1" / "model.py").write_text("class TritonPythonModel: execute = print\n")
    sys.path.insert(0, str(home))
    import round_trip_functions as functions  # type: ignore[import-not-found]

    yield lambda: [functions.one, functions.two, model_folder(home / "folder")]
    sys.path.remove(str(home))


# Steps: the part, and the index of an unread tensor, counted from the last.
Plan = list[tuple[int, list[int]]]
PLANS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), min_size=2, max_size=2)), min_size=1, max_size=6
)


def build(name: str, plan: Plan, parts: list[Part], depth: int = 1) -> Graph:
    """A graph of parts and of a graph of parts. If no unread tensor is left, an input is added."""
    graph = Graph(name)
    usable = [*parts, build(f"{name}_inner", plan[:2], parts, depth - 1)] if depth else parts
    unread: list[Tensor] = []
    for which, reads in plan:
        part = usable[which % len(usable)]
        tensors = []
        for number, _ in enumerate(part.inputs):
            back = reads[number % 2]
            new = back >= len(unread)
            tensors.append(graph.input(f"IN{len(graph.inputs)}", "FP32[4]") if new else unread.pop(-1 - back))
        unread += list(part(*tensors))
    for number, tensor in enumerate(unread):
        graph.output(f"OUT{number}", tensor)
    return graph


@settings(max_examples=25)
@given(PLANS)
def test_a_saved_graph_is_loaded_as_the_graph_it_was(parts: Callable[[], list[Part]], plan: Plan) -> None:
    graph = build("drawn", plan, parts())
    home = Path(tempfile.mkdtemp())
    try:
        graph.save(home / "first")
        loaded = Graph.load(home / "first", "drawn")
        assert loaded == graph
        assert loaded.to_text() == graph.to_text()
        loaded.save(home / "second")
        assert Graph.load(home / "second", "drawn") == loaded
        reading = read_repositories([home / "first"])
        assert not reading.resolution.failed
    finally:
        shutil.rmtree(home)


def test_fields_unknown_to_the_python_api_are_kept(tmp_path: Path, parts: Callable[[], list[Part]]) -> None:
    graph = Graph("kept")
    graph.output("B", parts()[0](graph.input("A", "FP32[4]")))
    graph.save(tmp_path / "first")
    config = tmp_path / "first/kept/config.pbtxt"
    config.write_text(
        config.read_text()
        .replace("dims: 4\n}\nens", 'dims: 4\n  label_filename: "labels.txt"\n}\nens')
        .replace("dims: 4\n}\noutput", "dims: [ 2, 2 ]\n  reshape { shape: 4 }\n  allow_ragged_batch: true\n}\noutput")
        + 'version_policy { latest { num_versions: 2 } }\nparameters { key: "team" value { string_value: "sound" } }\n'
    )
    (tmp_path / "first/kept/labels.txt").write_text("a\nb\n")
    Graph.load(tmp_path / "first").save(tmp_path / "second")
    text = (tmp_path / "second/kept/config.pbtxt").read_text()
    assert 'label_filename: "labels.txt"' in text
    assert "num_versions: 2" in text
    assert "allow_ragged_batch: true" in text
    assert re.search(r"reshape {\s+shape: 4\s+}", text)
    assert 'key: "team"' in text
    assert (tmp_path / "second/kept/labels.txt").read_text() == "a\nb\n"
