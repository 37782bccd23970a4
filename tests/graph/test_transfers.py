"""Transfers along a graph's edges, derived from the configurations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.config.types import InstanceGroup, ModelConfig, SequenceBatching
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.transfers import MemoryPlaces, Transfer, memory_places, transfers
from flowserve.graph.types import GRAPH, Graph
from flowserve.values import ANY_GPU, HOST_MEMORY, DType, gpu_memory
from tests.support.ensembles import Drawn, available, ensemble, ensembles, model

HOST, GPU0, GPU1 = frozenset({HOST_MEMORY}), frozenset({gpu_memory(0)}), frozenset({gpu_memory(1)})


def _on(config: ModelConfig, kind: str = "KIND_GPU", *gpus: int) -> ModelConfig:
    return replace(config, instance_groups=(InstanceGroup(config.name, kind, gpus=gpus),))


def _chain() -> Graph:
    """prepare -> find -> read; the response also contains an output of find."""
    parts = [model(name, {"IN": "FP32[3,2]"}, {"OUT": "FP32[3,2]"}) for name in ("prepare", "find", "read")]
    steps = [
        ("prepare", {"IN": "raw"}, {"OUT": "a"}),
        ("find", {"IN": "a"}, {"OUT": "b"}),
        ("read", {"IN": "b"}, {"OUT": "c"}),
    ]
    config = ensemble("pipeline", {"raw": "FP32[3,2]"}, {"b": "FP32[3,2]", "c": "FP32[3,2]"}, steps)
    return compile_ensemble(config, 1, available(*parts))


def _by_tensor(graph: Graph, places: list[MemoryPlaces]) -> dict[tuple[str, int], str]:
    return {
        (edge.tensor, edge.consumer): transfer.kind
        for edge, transfer in zip(graph.edges, transfers(graph, places), strict=True)
    }


def test_a_chain_on_one_gpu_has_one_upload_and_one_download() -> None:
    assert _by_tensor(_chain(), [GPU0, GPU0, GPU0]) == {
        ("raw", 0): "copy",
        ("a", 1): "view",
        ("b", 2): "view",
        ("b", GRAPH): "copy",
        ("c", GRAPH): "copy",
    }


def test_on_the_host_every_edge_is_a_view() -> None:
    assert set(_by_tensor(_chain(), [HOST, HOST, HOST]).values()) == {"view"}


def test_a_tensor_with_two_readers_in_one_place_is_copied_once() -> None:
    kinds = _by_tensor(_chain(), [HOST, GPU0, HOST])
    assert kinds["a", 1] == "copy"
    assert sorted([kinds["b", 2], kinds["b", GRAPH]]) == ["copy", "shared"]


def test_another_gpu_is_another_memory() -> None:
    assert _by_tensor(_chain(), [GPU0, GPU1, GPU1])["a", 1] == "copy"


def test_instances_on_the_same_gpus_share_memory() -> None:
    both = GPU0 | GPU1
    assert _by_tensor(_chain(), [both, both, both])["a", 1] == "view"
    assert _by_tensor(_chain(), [both, GPU1, GPU1])["a", 1] == "depends"
    assert _by_tensor(_chain(), [frozenset({ANY_GPU}), GPU1, HOST | GPU1])["a", 1] == "depends"
    assert _by_tensor(_chain(), [HOST | GPU1, HOST | GPU1, HOST])["a", 1] == "depends"


def test_transfer_sizes_are_known_for_fixed_shapes() -> None:
    first = transfers(_chain(), [GPU0, GPU0, GPU0])[0]
    assert first == Transfer("copy", (HOST_MEMORY,), (gpu_memory(0),), 24)
    open_ended = model("m", {"IN": "FP32[-1]"}, {"OUT": "BYTES[1]"})
    config = ensemble("e", {"x": "FP32[-1]"}, {"y": "BYTES[1]"}, [("m", {"IN": "x"}, {"OUT": "y"})])
    graph = compile_ensemble(config, 1, available(open_ended))
    assert [one.row_bytes for one in transfers(graph, [GPU0])] == [None, None]
    assert transfers(graph, [GPU0])[1].kind == "view"  # BYTES are never on a device


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), HOST),
        (_on(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"})), frozenset({ANY_GPU})),
        (_on(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), "KIND_GPU", 0, 1), GPU0 | GPU1),
        (_on(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), "KIND_CPU"), HOST),
        (_on(model("m", {"X": "BYTES[1]"}, {"Y": "FP32[1]"}), "KIND_GPU", 0), HOST),
        (_on(replace(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), parameters={"execution": "process"})), HOST),
        (_on(replace(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), backend="python")), HOST),
        (_on(replace(model("m", {"X": "FP32[1]"}, {"Y": "FP32[1]"}), sequence=SequenceBatching(1, False))), HOST),
    ],
)
def test_the_memory_of_a_models_tensors_follows_from_its_configuration(
    config: ModelConfig, places: MemoryPlaces
) -> None:
    assert memory_places(config) == places


@settings(max_examples=30)
@given(ensembles(), st.data())
def test_property_each_tensor_is_copied_at_most_once_per_place_and_only_if_needed(
    drawn: Drawn, data: st.DataObject
) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    places = [data.draw(st.sampled_from([HOST, GPU0, GPU1])) for _ in graph.nodes]
    found = transfers(graph, places)
    crossings = [
        (edge.producer, edge.output, transfer.to)
        for edge, transfer in zip(graph.edges, found, strict=True)
        if transfer.kind == "copy"
    ]
    assert len(crossings) == len(set(crossings))
    for edge, transfer in zip(graph.edges, found, strict=True):
        ends: Mapping[int, MemoryPlaces] = {GRAPH: HOST} | dict(enumerate(places))
        is_text = graph.written(edge).dtype is DType.BYTES
        assert (transfer.kind == "view") == (is_text or ends[edge.producer] == ends[edge.consumer])
        if transfer.kind == "shared":
            assert (edge.producer, edge.output, transfer.to) in crossings
