"""onnxruntime sessions: settings, execution providers, inputs and outputs of their file, and runs with numpy arrays.

Decides the session settings that follow from a model's parameters and the operator's, the number of threads of a CPU
session, how a configuration's `optimization` block and parameters translate to options of onnxruntime's CUDA and
TensorRT providers (the keys are Triton's), which runs are captured as CUDA graphs, and that a session that opens
without its requested providers is an error. Options that name the device or its stream are refused: the server sets
them, because tensors are on that device and ordered by that stream. onnxruntime is not used to detect a GPU: it reports
the providers it was built with, and falls back silently.

Threads of a CPU session: a model whose runs are short gets one thread. Waking another thread costs tens of microseconds
on each side, more if its core is asleep, which a run of a hundred microseconds cannot save. Whether runs are short is
measured once, with zeros, when the file is opened: one batch of one row, and one of a few rows. A model that cannot be
measured (varying shapes, text, a large file) gets its share of the cores.

This is the only module that imports onnxruntime. It does not know batches or requests.

Callers: backend.py opens sessions; instance.py and device.py run them.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from flowserve.backends.base import ModelFiles
from flowserve.backends.cores import cores_allowed
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import Port, Signature
from flowserve.backends.onnx.errors import cleaned
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problem, Problems
from flowserve.values import Array, DType

Provider = tuple[str, Mapping[str, str]]

# The data type of each of onnxruntime's types.
_DTYPES: Final = {
    "tensor(bool)": DType.BOOL,
    "tensor(uint8)": DType.UINT8,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(int8)": DType.INT8,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(float16)": DType.FP16,
    "tensor(float)": DType.FP32,
    "tensor(double)": DType.FP64,
    "tensor(string)": DType.BYTES,
    "tensor(bfloat16)": DType.BF16,
}

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
# How the algorithm of a convolution is chosen, each time the shape of its input changes. onnxruntime's default tries
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
    """The providers of a session on that GPU, the preferred one first. The last one is the CPU's, for nodes that no
    other provider can run. `stream` is the address of the stream to compute on, 0 to let the session choose.

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
    if config.max_batch_size > 1 or any(spec.is_variable for spec in config.inputs):
        cuda.setdefault(_SEARCH, "HEURISTIC")
    first = [] if tensorrt is None else [(TENSORRT, {**tensorrt, **place})]
    return [*first, (CUDA, {**cuda, **place}), (CPU, {})]


def graph_sizes(config: ModelConfig, problems: list[Problem] | None = None) -> frozenset[int]:
    """The batch sizes whose runs are captured as CUDA graphs: those that `optimization.cuda` specifies, else the
    largest; 1 for a model without batching. Empty if the configuration does not enable graphs. Errors are appended to
    `problems`.
    """
    cuda = _optimization(config, "cuda")
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


def why_not_on_gpu(where: str, missing: Sequence[str], version: str, available: Sequence[str]) -> str:
    """The error for a session that opened without its requested providers."""
    text = f"{where} cannot run on the GPU: onnxruntime {version} started without {' and '.join(missing)}"
    if not {*missing} <= {*available}:
        return (
            f"{text}, which this build of it does not have; install onnxruntime-gpu instead, and no onnxruntime beside "
            "it, or write kind: KIND_CPU, or start with --gpu=off"
        )
    wanted = "TensorRT 10's libraries" if TENSORRT in missing else "CUDA 12's and cuDNN 9's libraries"
    return (
        f"{text}, which it could not load; {wanted} have to be found by the loader (pip install 'flowserve[gpu]' "
        "brings CUDA's), or write kind: KIND_CPU, or start with --gpu=off"
    )


def accelerators(config: ModelConfig) -> Sequence[Mapping[str, Any]]:
    """The execution accelerators that a configuration names for GPUs."""
    return _optimization(config, "execution_accelerators").get("gpu_execution_accelerator") or ()


def _optimization(config: ModelConfig, key: str) -> Mapping[str, Any]:
    return (config.json.get("optimization") or {}).get(key) or {}


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


log = logging.getLogger("flowserve.load")

# ONNX's own number (TensorProto.DataType) of the one type that numpy has no dtype for.
_ONNX_BFLOAT16: Final = 16
_BFLOAT16: Final = DType.BF16.numpy
# Triton's optimization.graph.level. 0 (the default) enables all optimisations.
_LEVELS: Final = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
THREADS: Final = "intra_op_thread_count"
# Runs of one row, and of several rows, up to these times get one thread: with 256 to 10 numbers per row, two threads
# took 1.1 to 1.2 times as long as one, up to 64 rows.
_ROW_NS: Final = 150_000
_ROWS_NS: Final = 300_000
_ROWS: Final = 8
_RUNS: Final = 5
# Larger files are not measured: opening them twice takes too long.
_MEASURED_BYTES_MAX: Final = 8 << 20


def open_session(
    config: ModelConfig,
    path: Path,
    files: ModelFiles,
    settings: Callable[[], Any],
    providers: Sequence[Provider] = CPU_ONLY,
) -> Any:
    """A session that runs on the first of the providers. Raises Invalid if it cannot."""
    options = settings()
    # onnxruntime also prints the errors that it raises; that is suppressed, so that users read them once.
    options.log_severity_level = 4
    where = f"failed to load '{config.name}' version {files.version}: {files.shown(path)}"
    if any(name != CPU for name, _ in providers):
        _find_cuda_libraries()
    try:
        session = ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        if not os.access(path, os.R_OK):  # onnxruntime's own message is a number
            raise Invalid(f"{where} cannot be read by the user that flowserve runs as") from error
        text = cleaned(str(error)).replace(f"{files.repository}/", "")
        reason = f"{text}{_what_to_do(text, path)}"
        raise Invalid(f"{where} is not an ONNX model that onnxruntime {ort.__version__} can run: {reason}") from error
    missing = [name for name, _ in providers if name not in session.get_providers()]
    if missing:  # onnxruntime falls back to the other providers, and reports that only in its own log
        raise Invalid(why_not_on_gpu(where, missing, ort.__version__, ort.get_available_providers()))
    return session


def _what_to_do(text: str, path: Path) -> str:
    """A hint for the errors of onnxruntime that need one, "" for the others."""
    if "Protobuf parsing failed" in text:
        with path.open("rb") as file:
            begins = file.read(20)
        if begins == b"version https://git-":
            return " It is a pointer of Git LFS: `git lfs pull` fetches the file itself"
        size = path.stat().st_size
        kind = "It is another kind of file, or not the whole of one"
        return f" {kind}: {size} bytes, which begin with {begins!r}; copy or export it again"
    newest = re.search(r"max supported IR version: ([0-9]+)", text)
    if newest is None:
        return ""
    return f"; write the file with onnx.helper.make_model(..., ir_version={newest[1]}), or install a newer onnxruntime"


@cache
def _find_cuda_libraries() -> None:
    """Load NVIDIA's libraries from their wheels, where the dynamic loader does not look."""
    printed = io.StringIO()
    with redirect_stdout(printed):  # it prints missing libraries, which belong in the log
        ort.preload_dlls()
    for line in printed.getvalue().splitlines():
        log.warning("onnxruntime: %s", line)


def metadata_settings() -> Any:
    """Settings of a session that is opened for its names, types and shapes, and never run."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return settings


def asynchronous_run_options(graph: int) -> Any:
    """Options of runs that return as soon as their work is on the device's stream. `graph`: the number of the captured
    CUDA graph, -1 for none.
    """
    options = ort.RunOptions()
    # Set in any case: newer versions read the entry at each run, and a missing one costs an exception.
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def settings(config: ModelConfig, options: Mapping[str, str]) -> Any:
    """A session's settings. Unless parameters set the number of threads, the cores are divided among the runs that may
    happen at the same time.
    """
    made = ort.SessionOptions()
    share = max(1, cores_allowed() // int(options.get("runs_at_once", "1")))
    # As on Triton, 0 means the default.
    made.intra_op_num_threads = _parameter(config, options, THREADS, 0) or share
    made.inter_op_num_threads = _parameter(config, options, "inter_op_thread_count", 0) or 1
    parallel = _parameter(config, options, "execution_mode", 0) == 1
    made.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    made.enable_cpu_mem_arena = bool(_parameter(config, options, "enable_mem_arena", 1))
    # onnxruntime keeps a memory pattern for every shape it has seen: a leak if more than the batch dimension varies.
    varies = any(spec.is_variable for spec in config.inputs)
    made.enable_mem_pattern = bool(_parameter(config, options, "enable_mem_pattern", 0 if varies else 1))
    made.graph_optimization_level = _LEVELS.get(int(_optimization(config, "graph").get("level", 0)), _LEVELS[0])
    # Threads that spin between runs would take cores from the other models and the server.
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return made


def _parameter(config: ModelConfig, options: Mapping[str, str], name: str, default: int) -> int:
    """The value in the model's parameters, else the operator's for all models, else `default`."""
    text = config.parameters.get(name)
    if text is None:
        return int(options.get(name, default))
    try:
        return int(text)
    except ValueError:
        message = f"parameter '{name}' of model '{config.name}' must be a whole number, found '{text}'"
        raise Problems([Problem(message, config.source.place(f"parameters[{name}]"))]) from None


def session_on_cpu(config: ModelConfig, path: Path, files: ModelFiles, options: Mapping[str, str]) -> Any:
    """A session on the CPU: with one thread if its runs are short and the number of threads is not set, else with the
    settings of `settings`. Raises as `open_session` does.
    """
    usual = settings(config, options)
    is_set = config.parameters.get(THREADS, options.get(THREADS, "0")) != "0"
    feeds = [] if is_set or usual.intra_op_num_threads < 2 else _trial_feeds(config)
    # Files beside it may be external weights.
    if feeds and sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file()) <= _MEASURED_BYTES_MAX:
        single = settings(config, options)
        single.intra_op_num_threads = 1
        session = open_session(config, path, files, lambda: single)
        if _is_short(session, feeds):
            return session
    return open_session(config, path, files, lambda: usual)


def _trial_feeds(config: ModelConfig) -> list[tuple[Feed, int]]:
    """Inputs to measure runs with, and the time in nanoseconds that each run may take. Empty if no inputs can be
    generated.
    """
    if any(spec.is_variable or spec.optional or spec.dtype in (DType.BYTES, DType.BF16) for spec in config.inputs):
        return []
    rows = [1, min(_ROWS, config.max_batch_size)] if config.max_batch_size else [0]
    return [
        ({spec.name: np.zeros((n, *spec.dims) if n else spec.dims, spec.dtype.numpy) for spec in config.inputs}, limit)
        for n, limit in zip(rows, (_ROW_NS, _ROWS_NS), strict=False)
    ]


def _is_short(session: Any, feeds: list[tuple[Feed, int]]) -> bool:
    try:
        return all(_best_ns(session, feed) <= limit_ns for feed, limit_ns in feeds)
    except Exception:  # an error of the model, or of zeros as its input, is reported by its first request
        return False


def _best_ns(session: Any, feed: Feed) -> int:
    """The time of the shortest of a few runs. A run that is far too long is the last."""
    best_ns = 1 << 62
    for _ in range(_RUNS):
        began_ns = perf_counter_ns()
        session.run(None, feed)
        best_ns = min(best_ns, perf_counter_ns() - began_ns)
        if best_ns > 100 * _ROW_NS:
            break
    return best_ns


def session_signature(session: Any) -> Signature:
    """The inputs and outputs of a session's file."""
    inputs = [_port(node, is_optional=node.type.startswith("optional(")) for node in session.get_inputs()]
    defaults = [_port(node, is_optional=True) for node in session.get_overridable_initializers()]
    ordered = sorted([*inputs, *defaults], key=lambda port: port.is_optional)
    return Signature(tuple(ordered), tuple(_port(node, is_optional=False) for node in session.get_outputs()))


def _port(node: Any, *, is_optional: bool) -> Port:
    # A dimension that varies is None or the name the exporter gave it.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    inner = node.type[len("optional(") : -1] if node.type.startswith("optional(") else node.type
    return Port(node.name, _DTYPES.get(inner), shape, is_optional, node.type)


def host_value(array: Array) -> Any:
    """An OrtValue over the memory of `array`, to bind an output to: the run writes it there."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def executor(session: Any, config: ModelConfig) -> Execute:
    """The function that runs the model's session: it takes the names of the outputs to compute, and the inputs by name.

    Passing numpy arrays costs a seventh of building OrtValues in Python (measured). So only models with BF16 tensors,
    which onnxruntime does not take as numpy arrays, use OrtValues.
    """
    in_outputs = any(spec.dtype is DType.BF16 for spec in config.outputs)
    if in_outputs or any(spec.dtype is DType.BF16 for spec in config.inputs):
        return _Bfloat16Session(session, in_outputs=in_outputs)
    execute: Execute = session.run
    return execute


class _Bfloat16Session:
    """Runs a session that has BF16 tensors, which go in and out as OrtValues."""

    def __init__(self, session: Any, *, in_outputs: bool) -> None:
        self._session = session
        self._in_outputs = in_outputs  # whether BF16 is among the outputs, not only among the inputs

    def __call__(self, names: list[str], feed: Feed) -> list[Any]:
        values = {name: self._value(array) if array.dtype == _BFLOAT16 else array for name, array in feed.items()}
        if not self._in_outputs:
            return list(self._session.run(names, values))
        for name, array in feed.items():
            if array.dtype != _BFLOAT16:
                values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        return [self._array(value) for value in self._session.run_with_ort_values(names, values)]

    @staticmethod
    def _value(array: Array) -> Any:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)

    @staticmethod
    def _array(value: Any) -> Any:
        if value.data_type() != "tensor(bfloat16)":
            return value.numpy()
        array = np.empty(value.shape(), _BFLOAT16)
        # The value owns its memory, so its bytes are copied while it is referenced.
        ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
        return array
