"""Graphs to draw: a small one with every feature, and generated ones of any size."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from flowserve import Graph as PythonGraph
from flowserve import model as python_model
from flowserve.config.types import (
    DynamicBatching,
    Ensemble,
    InstanceGroup,
    LimitedResource,
    ModelConfig,
    QueuePolicy,
    RateLimiter,
    SequenceBatching,
)
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.types import Graph, compile_model
from flowserve.render.labels import UNKNOWN
from tests.support.ensembles import Step, available, ensemble, model

SPEC = "FP32[3,224,224]"


def read_text_graph() -> Graph:
    """Branches, a nested ensemble, optional inputs of which one is ragged and one not given, an unused output."""
    decode = model("decode", {"BYTES": "BYTES[1]"}, {"PAGE": "UINT8[-1,-1]", "ANGLE": "FP32[1]"})
    find = model("find", {"PAGE": "UINT8[-1,-1]"}, {"GLYPHS": "FP32[16,1,28,28]", "BOXES": "INT32[16,4]"})
    read = model("read", {"X": "FP32[16,1,28,28]"}, {"SCORES": "FP32[16,62]", "FEATURES": "FP32[16,64]"}, 64)
    turn = model("turn", {"PAGE": "UINT8[-1,-1]", "ANGLE": "FP32[1]"}, {"UPRIGHT": "FP32[1]"})
    join = model(
        "join",
        {
            "SCORES": "FP32[16,62]",
            "BOXES": "INT32[16,4]",
            "UPRIGHT": "FP32[1]",
            "HINT": "BYTES[1]?",
            "WORDS": "INT64[*]?",
        },
        {"TEXT": "BYTES[1]", "SURE": "FP32[1]"},
    )
    find_and_read = ensemble(
        "find_and_read",
        {"page": "UINT8[-1,-1]"},
        {"scores": "FP32[16,62]", "boxes": "INT32[16,4]"},
        [
            ("find", {"PAGE": "page"}, {"GLYPHS": "glyphs", "BOXES": "boxes"}),
            ("read", {"X": "glyphs"}, {"SCORES": "scores"}),
        ],
    )
    config = ensemble(
        "read_text",
        {"image": "BYTES[1]", "words": "INT64[-1]?"},
        {"text": "BYTES[1]", "sure": "FP32[1]"},
        [
            ("decode", {"BYTES": "image"}, {"PAGE": "page", "ANGLE": "angle"}),
            ("find_and_read", {"page": "page"}, {"scores": "scores", "boxes": "boxes"}),
            ("turn", {"PAGE": "page", "ANGLE": "angle"}, {"UPRIGHT": "upright"}),
            (
                "join",
                {"SCORES": "scores", "BOXES": "boxes", "UPRIGHT": "upright", "WORDS": "words"},
                {"TEXT": "text", "SURE": "sure"},
            ),
        ],
    )
    return compile_ensemble(config, 1, available(decode, find, read, turn, join, find_and_read))


def people_graph() -> Graph:
    """Items, two conditions that write one tensor, a nested ensemble in one of them, and rows that pass neither."""

    @python_model({"IMAGE": "FP32[2]"}, {"CROPS": "FP32[-1,2]", "KIND": "INT32[-1,1]"}, max_batch_size=8)
    def find(images: Any) -> Any: ...

    @python_model({"X": "FP32[2]"}, {"LABEL": "INT32[1]"}, max_batch_size=4)
    def name_person(crops: Any) -> Any: ...

    @python_model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=4)
    def turn(crops: Any) -> Any: ...

    @python_model({"LABELS": "INT32[-1,1]"}, {"TOTAL": "INT32[1]"}, max_batch_size=8)
    def total(labels: Any) -> Any: ...

    turned = PythonGraph("turned", max_batch_size=4)
    turned.output("LABEL", name_person(turn(turned.input("X", "FP32[2]"))))
    graph = PythonGraph("people", max_batch_size=8)
    found = find(graph.input("IMAGE", "FP32[2]"))
    with graph.each(found.CROPS, found.KIND, at_most=10) as (crop, kind):
        with graph.when(kind == 0):
            person = name_person(crop)
        with graph.when(kind == 1):
            other = turned(crop)
        label = graph.merge(person, other, otherwise=-1)
    graph.output("LABELS", label)
    graph.output("TOTAL", total(label))
    return graph.reading().resolution.graphs["people"][1]


def _config(backend: str, *groups: InstanceGroup, **options: Any) -> ModelConfig:
    """A configuration for a picture. Its tensors are on the host, wherever its instances are."""
    on_host = {"execution": "process"}
    return replace(UNKNOWN, backend=backend, instance_groups=groups, parameters=on_host, **options)


READ_TEXT_CONFIGS = {
    "read_text": _config("", ensemble=Ensemble((), max_inflight_requests=8)),
    "find_and_read": _config("", ensemble=Ensemble((), max_inflight_requests=2)),
    "decode": _config("python", InstanceGroup("cpu"), decoupled=True),
    "find": _config(
        "onnxruntime",
        InstanceGroup("gpus", "KIND_GPU", 2, (0, 1)),
        InstanceGroup("cpu"),
        dynamic_batching=DynamicBatching(max_queue_delay_us=500),
    ),
    "read": _config(
        "onnxruntime",
        InstanceGroup("gpu", "KIND_GPU"),
        dynamic_batching=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=128)),
    ),
    "turn": _config(
        "python",
        InstanceGroup("cpu", count=4, rate_limiter=RateLimiter((LimitedResource("R1", 2),))),
        sequence=SequenceBatching(idle_us=1, is_direct=True),
    ),
}


def plain_graph() -> Graph:
    """One model, no batch dimension."""
    return compile_model(model("digits", {"X": "FP32[1,28,28]"}, {"SCORES": "FP32[10]"}, max_batch_size=0), 3)


def grown_graph(count: int, seed: int = 0) -> Graph:
    """`count` nodes that branch and join, most of them in ensembles of five, two deep. Seeded."""
    chance = random.Random(seed)
    left = count
    configs: list[ModelConfig] = []
    steps: list[Step] = []
    kinds = ["t0"]
    while left:
        name = f"part_{len(steps)}"
        reads = chance.sample(kinds[-6:], min(len(kinds), chance.randint(1, 3)))
        if left >= 6:
            configs += _part(name)
            made = [f"t{len(kinds)}", f"t{len(kinds) + 1}"]
            steps.append((name, {"a": reads[0]}, dict(zip("bc", made, strict=True))))
            kinds += made
            left -= 5
        else:
            ports = {f"I{number}": SPEC for number in range(len(reads))}
            configs.append(model(name, ports, {"O": SPEC}))
            steps.append((name, dict(zip(ports, reads, strict=True)), {"O": f"t{len(kinds)}"}))
            kinds.append(f"t{len(kinds)}")
            left -= 1
    read = {tensor for _, inputs, _ in steps for tensor in inputs.values()}
    outputs = {tensor: SPEC for tensor in kinds if tensor not in read}
    return compile_ensemble(ensemble("grown", {"t0": SPEC}, outputs, steps), 1, available(*configs))


def _part(name: str) -> list[ModelConfig]:
    """An ensemble of five nodes, two of them in an ensemble inside."""
    one = {"O": SPEC}
    models = [model(f"{name}_{letter}", {"I": SPEC}, one) for letter in "vwxy"]
    models.append(model(f"{name}_z", {"I": SPEC, "J": SPEC}, one))
    inner = ensemble(
        f"{name}_inner",
        {"p": SPEC},
        {"q": SPEC, "r": SPEC},
        [(f"{name}_w", {"I": "p"}, {"O": "q"}), (f"{name}_x", {"I": "q"}, {"O": "r"})],
    )
    outer = ensemble(
        name,
        {"a": SPEC},
        {"b": SPEC, "c": SPEC},
        [
            (f"{name}_v", {"I": "a"}, {"O": "p"}),
            (f"{name}_inner", {"p": "p"}, {"q": "q", "r": "r"}),
            (f"{name}_y", {"I": "p"}, {"O": "c"}),
            (f"{name}_z", {"I": "q", "J": "r"}, {"O": "b"}),
        ],
    )
    return [*models, inner, outer]
