"""The backend vllm without a server: completion, what is refused before an engine starts, and the GPUs of an engine."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve import Engine
from flowserve.backends import registry
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.more.continuous.backend import _ONE_BY_ONE
from flowserve.backends.more.continuous.instance import Seats
from flowserve.backends.more.vllm import Vllm, arguments_of, gpus_of
from flowserve.config.types import InstanceGroup
from flowserve.errors import Problems, Unsupported
from flowserve.values import DType
from tests.support.backends import Repository, config_of, spec

ARGUMENTS = json.dumps({"model": "m", "tensor_parallel_size": 2})


def source_of(repository: Repository, text: str = ARGUMENTS, **parameters: str) -> ModelSource:
    repository.write("m", "1/model.json", text)
    config = config_of("vllm", inputs=[*Vllm.inputs], outputs=[*Vllm.outputs], decoupled=True, parameters=parameters)
    files = repository.files()
    return ModelSource(config, files, files.version_folder / "model.json", 1, {})


def verify(repository: Repository, **fields: Any) -> None:
    backend: Any = registry.find("vllm")
    backend.verify(config_of("vllm", **{"decoupled": True, **fields}), repository.files())


def test_every_model_has_the_tensors_of_tritons_backend(repository: Repository) -> None:
    found = registry.find("vllm").complete(config_of("vllm"), repository.files())
    assert (found.max_batch_size, found.decoupled) == (0, True)
    assert found.inputs is not None
    assert found.outputs is not None
    assert [one.name for one in found.inputs if not one.optional] == ["text_input"]
    assert (found.outputs[0].name, found.outputs[0].dims) == ("text_output", (-1,))


def test_a_tensor_of_the_configuration_keeps_its_dims(repository: Repository) -> None:
    own = spec("text_input", (-1,), dtype=DType.BYTES)
    found = registry.find("vllm").complete(config_of("vllm", inputs=[own]), repository.files())
    assert found.inputs is not None
    assert {one.name: one.dims for one in found.inputs}["text_input"] == (-1,)
    assert {one.name: one.dims for one in found.inputs}["sampling_parameters"] == (1,)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_vllm_is_one_sentence_with_the_command(repository: Repository) -> None:
    source_of(repository)
    with pytest.raises(Unsupported) as caught:
        verify(repository)
    assert str(caught.value) == (
        f"model.json needs vllm, which is not installed: {sys.executable} -m pip install 'flowserve[vllm]'"
    )
    assert str(caught.value.place) == "m/1/model.json"


def test_disagreements_are_reported_together(repository: Repository) -> None:
    source_of(repository)
    wrong = {"inputs": [spec("prompt"), spec("stream", dtype=DType.INT32)], "max_batch_size": 4, "decoupled": False}
    with pytest.raises(Problems) as caught:
        verify(repository, **wrong)
    told = [problem.message for problem in caught.value.problems]
    assert told == [
        f"model 'm' of backend 'vllm' is not decoupled: {_ONE_BY_ONE}",
        "model 'm' of backend 'vllm' has max_batch_size 4",
        f"unexpected inference input 'prompt', allowed inputs are: {', '.join(one.name for one in Vllm.inputs)}",
        "input 'stream' of model 'm' has data type TYPE_INT32",
    ]


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ('{"model":\n  1,}', "model.json: it is not JSON: ", "m/1/model.json:2"),
        ('["m"]', "model.json: it is not an object: ", "m/1/model.json:1:1"),
        ('{"enable_lora": true}', "multi_lora.json: it cannot be read: ", "m/1/multi_lora.json:1:1"),
    ],
)
def test_an_invalid_file_is_named_with_its_place(repository: Repository, text: str, message: str, place: str) -> None:
    source_of(repository, text)
    with pytest.raises(Problems, match=f"failed to load 'm' version 1: {message}") as caught:
        verify(repository)
    assert str(caught.value.problems[0].place).startswith(place)


def test_a_missing_file_is_named(repository: Repository) -> None:
    repository.write("m", "1/other.json", "{}")
    with pytest.raises(
        Problems, match=r"file m/1/model\.json does not exist; m/1/other\.json is not read; did you mean model\.json"
    ):
        verify(repository)


@pytest.mark.parametrize(
    ("group", "gpus", "found"),
    [
        (InstanceGroup("m", "KIND_MODEL"), "", ""),
        (InstanceGroup("m", "KIND_MODEL"), "1, 3", "1,3"),
        (InstanceGroup("m", "KIND_MODEL"), "1", "names 1 GPUs, and the engine needs 2"),
        (InstanceGroup("m", "KIND_MODEL"), "1,1", "must be different numbers of GPUs"),
        (InstanceGroup("m", "KIND_MODEL"), "1,-2", "must be different numbers of GPUs"),
        (InstanceGroup("m", "KIND_GPU", 1, (1,)), "", "its engine needs 2 GPUs"),
    ],
)
def test_the_gpus_of_an_engine(repository: Repository, group: InstanceGroup, gpus: str, found: str) -> None:
    source = source_of(repository, GPU_DEVICE_IDS=gpus)
    if " " not in found:
        assert gpus_of(source, group, arguments_of(source)) == found
        return
    with pytest.raises(Problems, match=found):
        gpus_of(source, group, arguments_of(source))


def test_an_engine_of_one_gpu_may_be_placed_by_its_group(repository: Repository) -> None:
    source = source_of(repository, '{"model": "m"}')
    assert gpus_of(source, InstanceGroup("m", "KIND_GPU", 1, (5,)), arguments_of(source)) == "5"


def test_seats_that_nobody_wants_any_more_are_not_taken() -> None:
    seats = Seats(2)
    assert seats.take(2, lambda: True)
    assert not seats.take(1, lambda: False)
    seats.give(2)
    assert seats.take(2, lambda: True)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_real_engine_answers(tmp_path: Path) -> None:
    """Needs a GPU, vllm, and the weights of a small model, which vLLM fetches if it may."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    (tmp_path / "llm" / "1").mkdir(parents=True)
    arguments = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.3, "enforce_eager": True}
    (tmp_path / "llm" / "1" / "model.json").write_text(json.dumps(arguments))
    (tmp_path / "llm" / "config.pbtxt").write_text('backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]')
    parameters = json.dumps({"temperature": 0, "max_tokens": 8})
    asked = {
        "text_input": np.array(["The capital of France is"], object),
        "sampling_parameters": np.array([parameters], object),
    }
    with Engine(str(tmp_path)) as engine:
        (whole,) = engine.stream("llm", asked)
        pieces = [*engine.stream("llm", {**asked, "stream": np.array([True])})]
    text = b"".join(piece["text_output"][0] for piece in pieces)
    assert whole["text_output"][0] == b"The capital of France is" + text
    assert len(pieces) > 1
