"""docs/gpu.md is correct: its configurations are accepted, and its graph is drawn as shown."""

from __future__ import annotations

import re
from pathlib import Path

from flowserve.config.load import draft_of, finish
from flowserve.config.parse import parse
from flowserve.config.types import ASSUMED, Completion, ModelConfig
from flowserve.graph.compile import compile_ensemble
from flowserve.render.text import render_text
from tests.support.ensembles import available, tensors

FILES = {"onnxruntime": "model.onnx"}


def _read(text: str, name: str, folder: Path, completion: Completion | None = None) -> ModelConfig:
    return finish(draft_of(parse(text, f"{name}/config.pbtxt"), folder / name, FILES), completion, gpus=ASSUMED)


def test_the_examples_of_the_gpu_page_are_correct(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/gpu.md").read_text(encoding="utf-8")
    ensemble, model = re.findall(r"```pbtxt\n(.*?)```", page, re.DOTALL)
    assert _read(model, "m", tmp_path).instance_groups[0].gpus == (0,)
    drawn = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    parts = [
        _on_gpu("normalise", {"IN": "FP32[3,224,224]"}, {"OUT": "FP32[3,224,224]"}, tmp_path),
        _on_gpu("classify", {"IN": "FP32[3,224,224]"}, {"OUT": "FP32[10]"}, tmp_path),
    ]
    pipeline = _read(ensemble, "pipeline", tmp_path)
    graph = compile_ensemble(pipeline, 1, available(*parts))
    assert [render_text(graph, {config.name: config for config in (pipeline, *parts)})] == drawn


def _on_gpu(name: str, inputs: dict[str, str], outputs: dict[str, str], folder: Path) -> ModelConfig:
    text = 'backend: "onnxruntime" max_batch_size: 32 instance_group { kind: KIND_GPU gpus: [ 0 ] }'
    completion = Completion(inputs=tensors(inputs), outputs=tensors(outputs), gpu_instance_count=1)
    return _read(text, name, folder, completion)
