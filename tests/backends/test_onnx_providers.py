"""Translation of a configuration's optimization block to onnxruntime's providers and options."""

from __future__ import annotations

from typing import Any

import pytest

from flowserve.backends.onnx.session import CPU, CUDA, TENSORRT, gpu_providers, graph_sizes, why_not_on_gpu
from flowserve.config.types import ModelConfig
from flowserve.errors import Problems
from tests.support.backends import config_of, spec


def _config(accelerators: list[dict[str, Any]] | None = None, **parameters: str) -> ModelConfig:
    json = {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": accelerators or []}}}
    return config_of("onnxruntime", inputs=[spec("x")], outputs=[spec("y")], json=json, parameters=parameters)


def test_the_default_is_cuda_on_the_gpu_and_stream_with_the_cpu_as_fallback() -> None:
    place = {"device_id": "1", "has_user_compute_stream": "1", "user_compute_stream": "4711"}
    assert gpu_providers(_config(), 1, 4711) == [(CUDA, place), (CPU, {})]
    assert gpu_providers(_config(), 0) == [(CUDA, {"device_id": "0"}), (CPU, {})]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"max_batch_size": 8}, "HEURISTIC"),
        ({"max_batch_size": 8, "parameters": {"cudnn_conv_algo_search": "0"}}, "EXHAUSTIVE"),
        ({"max_batch_size": 1}, None),
        ({"inputs": [spec("x", (-1, 4))]}, "HEURISTIC"),
        ({}, None),
    ],
)
def test_convolution_search_is_heuristic_if_batch_sizes_vary(fields: dict[str, Any], found: str | None) -> None:
    config = config_of("onnxruntime", **{"inputs": [spec("x")], "outputs": [spec("y")], **fields})
    (_, options), _ = gpu_providers(config, 0)
    assert options.get("cudnn_conv_algo_search") == found


def test_tensorrt_is_first_with_tritons_keys_translated() -> None:
    parameters = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "trt_engine_cache_enable": "true",
        "trt_builder_optimization_level": "3",
    }
    (name, options), (second, _), _ = gpu_providers(_config([{"name": "tensorrt", "parameters": parameters}]), 0, 7)
    assert (name, second) == (TENSORRT, CUDA)
    assert options == {
        "trt_fp16_enable": "True",
        "trt_max_workspace_size": "1073741824",
        "trt_engine_cache_enable": "True",
        "trt_builder_optimization_level": "3",
        "device_id": "0",
        "has_user_compute_stream": "1",
        "user_compute_stream": "7",
    }


def test_cuda_options_come_from_the_accelerator_and_the_old_parameters() -> None:
    accelerator = {"name": "cuda", "parameters": {"use_tf32": "0", "cudnn_conv_algo_search": "2"}}
    config = _config([accelerator], cudnn_conv_algo_search="1", arena_extend_strategy="1", gpu_mem_limit="4096")
    assert gpu_providers(config, 0)[0] == (
        CUDA,
        {
            "cudnn_conv_algo_search": "DEFAULT",
            "arena_extend_strategy": "kSameAsRequested",
            "gpu_mem_limit": "4096",
            "use_tf32": "0",
            "device_id": "0",
        },
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (_config([{"name": "tensorrtt"}]), "unknown execution accelerator 'tensorrtt' is requested (did you mean"),
        (
            _config([{"name": "tensorrt", "parameters": {"precision_mode": "FP8"}}]),
            "unsupported precision mode 'FP8' is requested (it may be FP32, FP16, INT8)",
        ),
        (
            _config([{"name": "tensorrt", "parameters": {"trt_engine_cache_enabled": "1"}}]),
            "unknown parameter 'trt_engine_cache_enabled' is provided for TensorRT Execution Accelerator (did you mean",
        ),
        (
            _config([{"name": "cuda", "parameters": {"device_id": "3"}}]),
            "'device_id' is the server's to say: an instance's device is its group's",
        ),
        (
            _config([{"name": "cuda", "parameters": {"enable_cuda_graph": "1"}}]),
            "'enable_cuda_graph' needs tensors at fixed addresses (write optimization { cuda { graphs: true } }",
        ),
        (
            _config([{"name": "tensorrt", "parameters": {"trt_cuda_graph_enable": "1"}}]),
            "'trt_cuda_graph_enable' needs tensors at fixed addresses",
        ),
        (_config(cudnn_conv_algo_search="3"), "parameter 'cudnn_conv_algo_search' is '3'; it may be 0, 1, 2"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(config: ModelConfig, text: str) -> None:
    with pytest.raises(Problems) as caught:
        gpu_providers(config, 0)
    assert text in str(caught.value)


def _graphs(max_batch_size: int = 8, dims: int = 4, **cuda: Any) -> ModelConfig:
    json = {"optimization": {"cuda": {"graphs": True, **cuda}}}
    inputs, outputs = [spec("x", (dims,))], [spec("y", (dims,))]
    return config_of("onnxruntime", max_batch_size=max_batch_size, json=json, inputs=inputs, outputs=outputs)


def test_cuda_graphs_are_captured_for_the_specified_sizes_or_the_largest() -> None:
    assert graph_sizes(_config()) == frozenset()
    assert graph_sizes(_graphs()) == {8}
    assert graph_sizes(_graphs(0)) == {1}
    assert graph_sizes(_graphs(graph_spec=[{"batch_size": 2}, {"batch_size": 8}])) == {2, 8}
    assert gpu_providers(_graphs(), 0)[0][1]["enable_cuda_graph"] == "1"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (_graphs(dims=-1), "CUDA graphs need fixed shapes, and 'x' has dims [-1]"),
        (_graphs(graph_spec=[{"batch_size": 9}]), "a CUDA graph for batches of 9, but max_batch_size is 8"),
    ],
)
def test_a_graph_that_cannot_be_captured_is_refused(config: ModelConfig, text: str) -> None:
    with pytest.raises(Problems) as caught:
        gpu_providers(config, 0)
    assert text in str(caught.value)


def test_all_errors_are_reported_together() -> None:
    config = _config([{"name": "gpu_io"}, {"name": "cuda", "parameters": {"device_id": "3"}}], gpu_mem_limit="1")
    with pytest.raises(Problems) as caught:
        gpu_providers(config, 0)
    assert len(caught.value.problems) == 2


def test_a_missing_provider_is_reported_with_a_hint() -> None:
    built_in = [TENSORRT, CUDA, CPU]
    assert "CUDA 12's and cuDNN 9's libraries have to be found" in why_not_on_gpu("m", [CUDA], "1.26.0", built_in)
    assert "TensorRT 10's libraries" in why_not_on_gpu("m", [TENSORRT], "1.26.0", built_in)
    text = why_not_on_gpu("m", [CUDA], "1.26.0", [CPU])
    assert "install onnxruntime-gpu instead, and no onnxruntime beside it, or write kind: KIND_CPU" in text
