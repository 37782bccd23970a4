"""Models and ensembles in a short notation, for tests that need a configuration but no file.

Decides the short notation (`"FP32[3,-1]"` is a tensor, `{"IN": "raw"}` a mapping) and how random well-formed ensembles
are drawn. Source maps are generated, with one line per step and port, so that tests can check the location of a
problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from flowserve.config.types import Ensemble, EnsembleStep, ModelConfig, SourceMap
from flowserve.errors import Place
from flowserve.graph.builder import parse_tensor
from flowserve.values import TensorSpec

Step = tuple[str, Mapping[str, str], Mapping[str, str]]


def tensors(texts: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    return tuple(parse_tensor(name, text) for name, text in texts.items())


def model(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str], max_batch_size: int = 8) -> ModelConfig:
    """A plain model of the backend "test"."""
    return ModelConfig(
        name=name,
        backend="test",
        platform="",
        max_batch_size=max_batch_size,
        inputs=tensors(inputs),
        outputs=tensors(outputs),
        source=SourceMap(f"{name}/config.pbtxt"),
    )


def ensemble(
    name: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    steps: Sequence[Step],
    max_batch_size: int = 8,
    versions: Mapping[int, int] | None = None,
) -> ModelConfig:
    """An ensemble of (model, input_map, output_map) steps; `versions[i]` is the i-th step's model_version, else -1."""
    written = tuple(
        EnsembleStep(model, (versions or {}).get(i, -1), input_map, output_map, f"ensemble_scheduling.step[{i}]")
        for i, (model, input_map, output_map) in enumerate(steps)
    )
    return ModelConfig(
        name=name,
        backend="",
        platform="ensemble",
        max_batch_size=max_batch_size,
        inputs=tensors(inputs),
        outputs=tensors(outputs),
        source=_source_map(name, len(inputs), len(outputs), written),
        ensemble=Ensemble(written),
    )


def _source_map(name: str, inputs: int, outputs: int, steps: Sequence[EnsembleStep]) -> SourceMap:
    paths = ["max_batch_size", *(f"input[{i}]" for i in range(inputs)), *(f"output[{i}]" for i in range(outputs))]
    paths.append("ensemble_scheduling")
    for step in steps:
        paths += [step.path, f"{step.path}.model_name", f"{step.path}.model_version"]
        paths += [f"{step.path}.input_map[{port}]" for port in step.input_map]
        paths += [f"{step.path}.output_map[{port}]" for port in step.output_map]
    file = f"{name}/config.pbtxt"
    return SourceMap(file, {path: Place(file, line, 1) for line, path in enumerate(paths, 1)})


def available(*configs: ModelConfig) -> dict[str, dict[int, ModelConfig]]:
    """Every configuration as version 1 of its name."""
    return {config.name: {1: config} for config in configs}


@dataclass(frozen=True)
class Drawn:
    """A random well-formed ensemble, its models, and the tensors it was drawn from.

    `reads[m]` are the tensors read by step `m`'s model, in port order; `writes[m]` those it writes. Tensor names are
    "t0", "t1", ...
    """

    config: ModelConfig
    available: dict[str, dict[int, ModelConfig]]
    reads: dict[str, list[str]]
    writes: dict[str, list[str]]


@st.composite
def ensembles(draw: st.DrawFn, max_steps: int = 7) -> Drawn:
    """Random DAGs of 1 to `max_steps` models.

    Fan-out, joins, one tensor read twice by a step, steps in any order in the file.
    """
    kinds = st.tuples(st.sampled_from(["FP32", "INT64", "BYTES"]), st.sampled_from(["[3]", "[-1]", "[2,-1]"]))
    kind: dict[str, str] = {}
    reads: dict[str, list[str]] = {}
    writes: dict[str, list[str]] = {}

    def new_tensor() -> str:
        name = f"t{len(kind)}"
        kind[name] = "".join(draw(kinds))
        return name

    roots = [new_tensor() for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, max_steps))):
        known = list(kind)
        reads[f"m{number}"] = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        writes[f"m{number}"] = [new_tensor() for _ in range(draw(st.integers(1, 2)))]
    read = {name for names in reads.values() for name in names}
    outputs = [name for names in writes.values() for name in names if name not in read or draw(st.booleans())]
    models = [
        model(
            name,
            {f"I{i}": kind[t] for i, t in enumerate(reads[name])},
            {f"O{j}": kind[t] for j, t in enumerate(writes[name])},
        )
        for name in reads
    ]
    steps = [
        (name, {f"I{i}": t for i, t in enumerate(reads[name])}, {f"O{j}": t for j, t in enumerate(writes[name])})
        for name in draw(st.permutations(list(reads)))
    ]
    inputs = {name: kind[name] for name in roots if name in read}
    config = ensemble("drawn", inputs, {name: kind[name] for name in outputs}, steps)
    return Drawn(config, available(*models), reads, writes)
