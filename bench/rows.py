"""Graphs with conditions and items, beside the same work without them: a cascade, and a detector with crops.

The models sleep, so that the figures show batching and overhead, and not arithmetic. Decides the models, the ways to do
the same work, and the requests, whose responses are all checked. Callers: `python -m bench --work cascade,crops,items`.

| way | what |
|---|---|
| `when`, `each` | the graph with the fields of docs/rows.md |
| `always` | the cascade without its condition: the large model runs for every row |
| `exec` | a model.py that calls the others (BLS): one call for all crops of a request. 1 instance (the default), or 4 |
| `single` | as `each`, with a classifier that takes one crop at a time |
"""

from __future__ import annotations

import json
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.load import Measured
from bench.requests import infer_request
from bench.servers import FLOWSERVE, Server, flowserve_command, run_load, serving
from bench.tables import Spread, cell, markdown_table
from bench.works import Array

ROW_WORKS: Final = {
    "cascade": "a small model of 1 ms a batch, then for a fifth of the rows one of 8 ms and 0.1 ms a row",
    "crops": "a detector of 1 ms a batch, 0 to 16 crops (6 in the mean), a classifier of 2 ms and 0.1 ms a row",
    "items": "requests of one item, alone and beside a client whose requests have 10,000, four parts of them at a time",
}
_ITEMS: Final = 10_000
_CONNECTIONS: Final = 32
_CROPS: Final = 16
_WARMUP_S: Final = 1.0

_MODEL: Final = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [{t.name(): t.as_numpy() for t in request.inputs()} for request in requests]
        rows = sum(len(next(iter(one.values()))) for one in tensors)
        time.sleep(SECONDS)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in compute(**one).items()])
            for one in tensors
        ]


def call(name, outputs, **inputs):
    given = [pb_utils.Tensor(key, array) for key, array in inputs.items()]
    response = pb_utils.InferenceRequest(model_name=name, requested_output_names=outputs, inputs=given).exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return [pb_utils.get_output_tensor_by_name(response, output).as_numpy() for output in outputs]


def compute(X):
"""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model.py that reads X. `seconds`: an expression of `rows`; `compute`: the body of its function."""

    outputs: str
    compute: str
    seconds: str = "0"
    dims: str = "4"
    rows: int = 32
    instances: int = 1

    def write(self, home: Path) -> None:
        (home / "1").mkdir(parents=True)
        body = "".join(f"    {line}\n" for line in self.compute.splitlines())
        (home / "1/model.py").write_text(_MODEL.replace("SECONDS", self.seconds) + body)
        (home / "config.pbtxt").write_text(
            f'backend: "python" max_batch_size: {self.rows} dynamic_batching {{ }}\n'
            f"instance_group {{ count: {self.instances} }}\n"
            f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {self.dims} ] }}\n{_outputs(self.outputs)}'
        )


def _outputs(text: str) -> str:
    """ "Y FP32 1; SURE BOOL 1" as entries of a configuration."""
    entries = (one.split(maxsplit=2) for one in text.split("; "))
    return "\n".join(
        f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}' for name, kind, dims in entries
    )


_SMALL_SAYS: Final = "return {'Y': X[:, :1], 'SURE': X[:, 1:2] == 0, 'NEXT': X}"
_LARGE_SAYS: Final = "return {'Y': X[:, :1] * 2}"
_CROPS_OF: Final = (
    "numbers = np.arange(16, dtype=np.float32)[None, :, None] + X[:, :1, None]\n"
    "return {'CROPS': np.repeat(numbers, 4, axis=2), 'COUNT': X[:, 1:2].astype(np.int32)}"
)
_CROPS_BY_CALLS: Final = (
    "crops, count = call('detect', ['CROPS', 'COUNT'], X=X)\n"
    "kept = crops[0, : int(count[0, 0])]\n"
    "return {'Y': call('classify', ['Y'], X=kept)[0][None] if len(kept) else np.zeros((1, 0, 1), np.float32)}"
)
_LABEL: Final = "return {'Y': X[:, :1] * 2}"
_MODELS: Final = {
    "small": _Model("Y FP32 1; SURE BOOL 1; NEXT FP32 4", _SMALL_SAYS, "0.001"),
    "large": _Model("Y FP32 1", _LARGE_SAYS, "0.008 + 0.0001 * rows"),
    "quick": _Model("Y FP32 1; SURE BOOL 1; NEXT FP32 4", _SMALL_SAYS),
    "never": _Model("Y FP32 1", _LARGE_SAYS),
    "detect": _Model("CROPS FP32 16, 4; COUNT INT32 1", _CROPS_OF, "0.001"),
    "classify": _Model("Y FP32 1", _LABEL, "0.002 + 0.0001 * rows"),
    "label": _Model("Y FP32 1", _LABEL, "0.0005"),
    "classify_one": _Model("Y FP32 1", _LABEL, "0.0021", rows=1),
    "cascade_exec": _Model(
        "Y FP32 1",
        "y, sure = call('small', ['Y', 'SURE'], X=X)\nreturn {'Y': y if sure.all() else call('large', ['Y'], X=X)[0]}",
        rows=1,
    ),
    "crops_exec": _Model("Y FP32 -1, 1", _CROPS_BY_CALLS, rows=1),
    "crops_exec_4": _Model("Y FP32 -1, 1", _CROPS_BY_CALLS, rows=1, instances=4),
}


def _step(model: str, reads: str, *writes: str, more: str = "") -> str:
    maps = "".join(f' output_map {{ key: "{one.split("=")[0]}" value: "{one.split("=")[1]}" }}' for one in writes)
    return (
        f'step {{ model_name: "{model}" model_version: -1 {more} input_map {{ key: "X" value: "{reads}" }}{maps} }}\n'
    )


_UNSURE: Final = 'when { tensor: "sure" not: true }'
_EACH: Final = 'each { tensor: "crops" count: "count" }'
_GRAPHS: Final = {
    "cascade": ("1", _step("small", "X", "Y=Y", "SURE=sure") + _step("large", "X", "Y=Y", more=_UNSURE)),
    "cascade_always": ("1", _step("small", "X", "NEXT=next") + _step("large", "next", "Y=Y")),
    "branch": ("1", _step("quick", "X", "Y=Y", "SURE=sure") + _step("never", "X", "Y=Y", more=_UNSURE)),
    "no_branch": ("1", _step("quick", "X", "Y=Y")),
    "crops": (
        "-1, 1",
        _step("detect", "X", "CROPS=crops", "COUNT=count") + _step("classify", "crops", "Y=Y", more=_EACH),
    ),
    "crops_single": (
        "-1, 1",
        _step("detect", "X", "CROPS=crops", "COUNT=count") + _step("classify_one", "crops", "Y=Y", more=_EACH),
    ),
    "found": ("1", _step("detect", "X", "COUNT=Y")),
    "items": ("-1, 1", _step("label", "X", "Y=Y", more=f'each {{ tensor: "X" at_most: {_ITEMS} }}')),
}
_INPUTS_OF: Final = {"items": "-1, 4"}  # of the graphs whose input has other dims than [4]


def _write_repository(folder: Path) -> None:
    for name, model in _MODELS.items():
        model.write(folder / name)
    for name, (dims, steps) in _GRAPHS.items():
        (folder / name / "1").mkdir(parents=True)
        kind = "INT32" if name == "found" else "FP32"
        (folder / name / "config.pbtxt").write_text(
            'platform: "ensemble" max_batch_size: 32\n'
            f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {_INPUTS_OF.get(name, "4")} ] }}\n'
            f'output {{ name: "Y" data_type: TYPE_{kind} dims: [ {dims} ] }}\n'
            f"ensemble_scheduling {{\n{'max_inflight_requests: 4' if name == 'items' else ''}\n{steps}}}\n"
        )


Answer = Callable[[Array], Array]
_Inputs = Callable[[np.random.Generator, int], Array]


def _cascade_inputs(generator: np.random.Generator, count: int) -> Array:
    """Inputs of the cascade, of which a fifth need the large model."""
    rows = generator.integers(-1000, 1000, (count, 4)).astype(np.float32)
    rows[:, 1] = np.arange(count) % 5 == 0
    return rows


def _sure_inputs(generator: np.random.Generator, count: int) -> Array:
    rows = _cascade_inputs(generator, count)
    rows[:, 1] = 0
    return rows


def _crop_inputs(generator: np.random.Generator, count: int) -> Array:
    """0 to 16 crops, 6 in the mean."""
    rows = generator.integers(-1000, 1000, (count, 4)).astype(np.float32)
    rows[:, 1] = np.clip(np.round(generator.gamma(2.2, 2.75, count)), 0, _CROPS)
    return rows


def _empty_inputs(generator: np.random.Generator, count: int) -> Array:
    rows = _crop_inputs(generator, count)
    rows[:, 1] = 0
    return rows


def _labels(row: Array) -> Array:
    found: Array = ((np.arange(row[1]) + row[0]) * 2).astype(np.float32)
    return found


def _one_item(generator: np.random.Generator, count: int) -> Array:
    return generator.integers(-1000, 1000, (count, 1, 4)).astype(np.float32)


def _many_items(generator: np.random.Generator, count: int) -> Array:
    return generator.integers(-1000, 1000, (2, _ITEMS, 4)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Way:
    """One deployment under one load. `about`: its line in the table; `batches_of`: a model whose batches it shows;
    `beside`: inputs that one more client sends meanwhile, which are not measured.
    """

    about: str
    deployment: str
    inputs: _Inputs
    answer: Answer
    connections: int = _CONNECTIONS
    batches_of: str = ""
    beside: _Inputs | None = None


_CASCADE: Final = (
    _Way("`when`", "cascade", _cascade_inputs, lambda x: x[:1] * (2 if x[1] else 1), batches_of="large"),
    _Way("`always`", "cascade_always", _cascade_inputs, lambda x: x[:1] * 2, batches_of="large"),
    _Way("`exec`", "cascade_exec", _cascade_inputs, lambda x: x[:1] * (2 if x[1] else 1), batches_of="large"),
    _Way("a branch that is not taken", "branch", _sure_inputs, lambda x: x[:1]),
    _Way("the same graph without the branch", "no_branch", _sure_inputs, lambda x: x[:1]),
)
_CROPS_WAYS: Final = (
    _Way("`each`", "crops", _crop_inputs, _labels, batches_of="classify"),
    _Way("`exec`", "crops_exec", _crop_inputs, _labels, batches_of="classify"),
    _Way("`exec`, 4 instances", "crops_exec_4", _crop_inputs, _labels, batches_of="classify"),
    _Way("`single`", "crops_single", _crop_inputs, _labels, batches_of="classify_one"),
    _Way("`each`, no crop, 1 connection", "crops", _empty_inputs, _labels, connections=1),
    _Way("the detector alone, 1 connection", "found", _empty_inputs, lambda x: np.zeros(0, np.float32), connections=1),
)
_ITEM_WAYS: Final = (
    _Way("alone", "items", _one_item, lambda x: x[:, :1] * 2, connections=16, batches_of="label"),
    _Way(
        "beside 10,000 items",
        "items",
        _one_item,
        lambda x: x[:, :1] * 2,
        connections=16,
        batches_of="label",
        beside=_many_items,
    ),
)
_WAYS: Final = {"cascade": _CASCADE, "crops": _CROPS_WAYS, "items": _ITEM_WAYS}


def measure_rows(works: Sequence[str], rounds: int, seconds: float, say: Callable[[str], None]) -> str:
    """The tables of these works. The ways take turns in each round. Raises BenchFailed."""
    parts = []
    with tempfile.TemporaryDirectory(prefix="bench-rows-") as name:
        folder = Path(name)
        _write_repository(folder / "models")
        for work in works:
            ways = _WAYS[work]
            for way in ways:
                _write_requests(way, folder / work / str(ways.index(way)))
            command = flowserve_command(folder / "models", "process")
            found: dict[str, list[tuple[Measured, float]]] = {way.about: [] for way in ways}
            with serving(FLOWSERVE, command, folder / f"{work}.log", environment={}) as server:
                for number in range(rounds):
                    say(f"{work}: round {number + 1} of {rounds}")
                    for i, way in enumerate(ways):
                        found[way.about].append(_run(way, folder / work / str(i), server, seconds))
            parts.append(
                f"### {work}\n\n{ROW_WORKS[work].capitalize()}; {rounds} round{'s' * (rounds > 1)}.\n\n{_table(found)}"
            )
    return "\n\n".join(parts)


def _run(way: _Way, requests: Path, server: Server, seconds: float) -> tuple[Measured, float]:
    """A load, and the mean batch of the model that the way shows."""
    others: threading.Thread | None = None
    if way.beside is not None:
        length = _WARMUP_S + seconds + 1.0
        others = threading.Thread(
            target=run_load, args=(requests.with_name(f"{requests.name}-beside"), server, 1, 0.0, length)
        )
        others.start()
    run_load(requests, server, way.connections, 0.0, _WARMUP_S, cycle=True)
    before = _counts(server, way.batches_of)
    measured = run_load(requests, server, way.connections, 0.0, seconds, cycle=True)
    if others is not None:
        others.join()
    after = _counts(server, way.batches_of)
    batches = after[1] - before[1]
    return measured, (after[0] - before[0]) / batches if batches else 0.0


def _counts(server: Server, model: str) -> tuple[int, int]:
    """The inferences and executions of a model so far."""
    if not model:
        return 0, 0
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v2/models/{model}/stats", timeout=30) as response:
        stats = json.load(response)["model_stats"][0]
    return stats["inference_count"], stats["execution_count"]


def _write_requests(way: _Way, folder: Path, inputs: _Inputs | None = None) -> None:
    if inputs is None and way.beside is not None:
        _write_requests(way, folder.with_name(f"{folder.name}-beside"), way.beside)
    folder.mkdir(parents=True)
    for i, row in enumerate((inputs or way.inputs)(np.random.default_rng(5), 20 * way.connections)):
        (folder / f"{i}.request").write_bytes(infer_request(way.deployment, row[None]))
        (folder / f"{i}.answer").write_bytes(np.ravel(way.answer(row)).astype("<f4").tobytes())


def _table(found: dict[str, list[tuple[Measured, float]]]) -> str:
    lines = []
    for about, runs in found.items():
        measured = [one for one, _ in runs]
        rates = Spread.of([one.requests / one.seconds for one in measured])
        cpu = Spread.of([one.server_cpu_s / one.requests * 1e6 for one in measured])
        p50, p99 = Spread.of([one.p50_ms for one in measured]), Spread.of([one.p99_ms for one in measured])
        batch = Spread.of([rows for _, rows in runs])
        lines.append([about, cell(rates), cell(cpu), cell(p50), cell(p99), cell(batch) if batch.high else ""])
    return markdown_table(["way", "requests/s", "CPU us/request", "p50 ms", "p99 ms", "mean batch"], lines)
