"""Execution providers of a session on a GPU, and their options: onnxruntime's CUDA provider, or TensorRT through it.

Decides how a configuration's `optimization` block and parameters translate to onnxruntime's options, which runs are
captured as CUDA graphs, and the error where a provider is missing. The keys are Triton's. Options that name the device
or its stream are refused: the server sets them, since tensors lie on that device and are ordered by that stream. Pure:
it imports no library and reads no file.

Callers: backend.py and session.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems

Provider = tuple[str, Mapping[str, str]]

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
CPU_ONLY: Final[Sequence[Provider]] = ((CPU, {}),)

# Keys of a "tensorrt" accelerator that have another name in onnxruntime. "precision_mode" becomes a flag.
_TENSORRT_RENAMED: Final = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PRECISIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "True"},
    "INT8": {"trt_int8_enable": "True"},
}
_TENSORRT_AS_THEY_ARE: Final = frozenset(
    f"trt_{key}"
    for key in [
        "max_partition_iterations",
        "min_subgraph_size",
        "dla_enable",
        "dla_core",
        "engine_cache_enable",
        "engine_cache_path",
        "engine_cache_prefix",
        "dump_subgraphs",
        "force_sequential_engine_build",
        "context_memory_sharing_enable",
        "layer_norm_fp32_fallback",
        "timing_cache_enable",
        "timing_cache_path",
        "force_timing_cache",
        "detailed_build_log",
        "build_heuristics_enable",
        "sparsity_enable",
        "builder_optimization_level",
        "auxiliary_streams",
        "tactic_sources",
        "extra_plugin_lib_paths",
        "profile_min_shapes",
        "profile_max_shapes",
        "profile_opt_shapes",
        "dump_ep_context_model",
        "ep_context_file_path",
        "ep_context_embed_mode",
    ]
)
# How the algorithm of a convolution is searched, each time the shape of its input changes. onnxruntime's default tries
# all algorithms, which is too slow for batches that vary in size (docs/gpu.md has the figures).
_SEARCH: Final = "cudnn_conv_algo_search"
# Model parameters of Triton from before the "cuda" accelerator, with the meaning of their numbers.
_OLD_PARAMETERS: Final[Mapping[str, Mapping[str, str]]] = {
    _SEARCH: {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}
_OURS: Final = frozenset({"device_id", "user_compute_stream", "has_user_compute_stream"})
# A captured graph reads and writes the addresses it was captured with: only device.py can provide them.
_GRAPHS: Final = frozenset({"enable_cuda_graph", "trt_cuda_graph_enable"})
_FLAGS: Final = {"true": "True", "false": "False"}


def gpu_providers(config: ModelConfig, gpu: int, stream: int = 0) -> list[Provider]:
    """The providers of a session on that GPU, the preferred one first. The last, the CPU's, runs the single nodes that
    no other can. `stream` is the address of the stream to compute on, 0 to let the session choose.

    Raises Problems, with their positions in the configuration.
    """
    problems: list[Problem] = []
    place = {"device_id": str(gpu)}
    if stream:
        place |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    tensorrt: dict[str, str] | None = None
    cuda = dict(_old_parameters(config, problems))
    for i, accelerator in enumerate(accelerators(config)):
        path = f"optimization.execution_accelerators.gpu_execution_accelerator[{i}]"
        name, parameters = accelerator.get("name", ""), accelerator.get("parameters") or {}
        if name == "tensorrt":
            tensorrt = dict(_tensorrt(config, path, parameters, problems))
        elif name == "cuda":
            cuda |= _cuda(config, path, parameters, problems)
        else:
            text = f"unknown execution accelerator '{name}' is requested"
            problems.append(_problem(config, path, text, did_you_mean(name, ["tensorrt", "cuda"]) or ""))
    if graph_sizes(config, problems):
        if tensorrt is None:
            cuda["enable_cuda_graph"] = "1"
        else:
            text = "CUDA graphs are captured by onnxruntime's CUDA provider, not by TensorRT's"
            problems.append(_problem(config, "optimization.cuda", text, "leave one of them out"))
    if problems:
        raise Problems(problems)
    if _shapes_vary(config):
        cuda.setdefault(_SEARCH, "HEURISTIC")
    first = [] if tensorrt is None else [(TENSORRT, {**tensorrt, **place})]
    return [*first, (CUDA, {**cuda, **place}), (CPU, {})]


def graph_sizes(config: ModelConfig, problems: list[Problem] | None = None) -> frozenset[int]:
    """The batch sizes whose runs are captured as CUDA graphs: those that `optimization.cuda` specifies, else the
    largest; 1 for a model without batching. Empty if the configuration does not enable graphs. Errors are appended to
    `problems`.
    """
    cuda = (config.json.get("optimization") or {}).get("cuda") or {}
    if not cuda.get("graphs"):
        return frozenset()
    varying = [spec for spec in (*config.inputs, *config.outputs) if spec.is_variable]
    if varying and problems is not None:
        text = f"CUDA graphs need fixed shapes, and '{varying[0].name}' has dims {list(varying[0].dims)}"
        problems.append(_problem(config, "optimization.cuda", text))
    if not config.max_batch_size:
        return frozenset({1})
    sizes = {int(spec.get("batch_size") or 0) for spec in cuda.get("graph_spec") or ()} - {0}
    wrong = [size for size in sorted(sizes) if size > config.max_batch_size]
    if wrong and problems is not None:
        text = f"a CUDA graph for batches of {wrong[0]}, but max_batch_size is {config.max_batch_size}"
        problems.append(_problem(config, "optimization.cuda.graph_spec", text))
    return frozenset(sizes or {config.max_batch_size})


def _shapes_vary(config: ModelConfig) -> bool:
    return config.max_batch_size > 1 or any(spec.is_variable for spec in config.inputs)


def why_not_on_gpu(where: str, missing: Sequence[str], version: str, available: Sequence[str]) -> str:
    """The error for a session that came up without the providers it was to run on."""
    text = f"{where} cannot run on the GPU: onnxruntime {version} started without {' and '.join(missing)}"
    if not {*missing} <= {*available}:
        return f"{text}, which this build of it does not have; install onnxruntime-gpu, and no onnxruntime beside it"
    wanted = "TensorRT 10's libraries" if TENSORRT in missing else "CUDA 12's and cuDNN 9's libraries"
    return (
        f"{text}, which it could not load; {wanted} have to be found by the loader (pip install 'flowserve[gpu]' "
        "brings CUDA's), or write kind: KIND_CPU, or start with --gpu=off"
    )


def accelerators(config: ModelConfig) -> Sequence[Mapping[str, Any]]:
    """The execution accelerators that a configuration names for GPUs."""
    optimization = config.json.get("optimization") or {}
    found = (optimization.get("execution_accelerators") or {}).get("gpu_execution_accelerator")
    return found or ()


def _old_parameters(config: ModelConfig, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for key, words in _OLD_PARAMETERS.items():
        value = config.parameters.get(key)
        if value is None:
            continue
        if words and value not in words:
            text = f"parameter '{key}' is '{value}'; it may be {', '.join(words)}"
            problems.append(_problem(config, f"parameters[{key}]", text))
            continue
        yield key, words.get(value, value)


def _tensorrt(
    config: ModelConfig, path: str, parameters: Mapping[str, str], problems: list[Problem]
) -> Iterator[tuple[str, str]]:
    known = {*_TENSORRT_RENAMED, *_TENSORRT_AS_THEY_ARE, "precision_mode"}
    for key, value in parameters.items():
        place = f"{path}.parameters[{key}]"
        if key == "precision_mode":
            if value not in _PRECISIONS:
                text = f"unsupported precision mode '{value}' is requested"
                problems.append(_problem(config, place, text, f"it may be {', '.join(_PRECISIONS)}"))
            yield from _PRECISIONS.get(value, {}).items()
        elif key in known:
            yield _TENSORRT_RENAMED.get(key, key), _FLAGS.get(value.lower(), value)
        else:
            problems.append(_refused(config, place, key, "TensorRT", known))


def _cuda(config: ModelConfig, path: str, parameters: Mapping[str, str], problems: list[Problem]) -> dict[str, str]:
    options = {}
    for key, value in parameters.items():
        if key in _OURS or key in _GRAPHS:
            problems.append(_refused(config, f"{path}.parameters[{key}]", key, "CUDA", ()))
        else:  # onnxruntime refuses unknown keys when the session is made
            options[key] = _OLD_PARAMETERS.get(key, {}).get(value, value)
    return options


def _refused(config: ModelConfig, place: str, key: str, accelerator: str, known: Sequence[str] | set[str]) -> Problem:
    if key in _OURS:
        return _problem(config, place, f"'{key}' is the server's to say: an instance's device is its group's")
    if key in _GRAPHS:
        hint = "write optimization { cuda { graphs: true } }, which is for CUDA's provider"
        return _problem(config, place, f"'{key}' needs tensors at fixed addresses", hint)
    text = f"unknown parameter '{key}' is provided for {accelerator} Execution Accelerator"
    return _problem(config, place, text, did_you_mean(key, [*known]) or "")


def _problem(config: ModelConfig, path: str, text: str, hint: str = "") -> Problem:
    return Problem(f"model '{config.name}': {text}", config.source.place(path), hint=hint)
