"""onnxruntime's sessions: how they are set up, what they say of their files, how they are run with numpy arrays.

Decided here: the settings that a model's parameters and the operator's come to, and that a session which came up
without the providers it was to run on is none. A GPU is never asked for to find out whether there is one: onnxruntime
says what it was built with, and falls back without a word.

The only file that knows onnxruntime.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from flowserve.backends.base import ModelFiles
from flowserve.backends.files import relative
from flowserve.backends.onnx_providers import CPU, CPU_ONLY, Provider, why_not_on_gpu
from flowserve.backends.onnx_signature import Port, Signature
from flowserve.backends.onnx_values import cleaned
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problem, Problems
from flowserve.values import Array, DType

log = logging.getLogger("flowserve.load")

Feed = dict[str, Array]
Execute = Callable[[list[str], Feed], list[Any]]

# ONNX's own numbers (TensorProto.DataType) for the one type that numpy cannot carry.
_ONNX_BFLOAT16: Final = 16
_BFLOAT16: Final = DType.BF16.numpy
# Triton's optimization.graph.level: 0, or nothing said, is everything.
_LEVELS: Final = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}


def open_session(
    config: ModelConfig,
    path: Path,
    files: ModelFiles,
    settings: Callable[[], Any],
    providers: Sequence[Provider] = CPU_ONLY,
) -> Any:
    """A session that the first of the providers runs. Raises Invalid where it cannot."""
    options = settings()
    # onnxruntime also prints what it raises; the text reaches the user once, through us.
    options.log_severity_level = 4
    where = f"failed to load '{config.name}' version {files.version}: {relative(path, files)}"
    if any(name != CPU for name, _ in providers):
        _find_cuda_libraries()
    try:
        session = ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        if not os.access(path, os.R_OK):  # for which onnxruntime has a number
            raise Invalid(f"{where} cannot be read by the user that flowserve runs as") from error
        text = cleaned(str(error)).replace(f"{files.repository}/", "")
        reason = f"{text}{_what_to_do(text, path)}"
        raise Invalid(f"{where} is not an ONNX model that onnxruntime {ort.__version__} can run: {reason}") from error
    missing = [name for name, _ in providers if name not in session.get_providers()]
    if missing:  # onnxruntime runs it on what is left, and says so on nobody's log but its own
        raise Invalid(why_not_on_gpu(where, missing, ort.__version__, ort.get_available_providers()))
    return session


def _what_to_do(text: str, path: Path) -> str:
    """About a refusal that onnxruntime leaves its reader alone with, "" for the others."""
    if "Protobuf parsing failed" in text:
        with path.open("rb") as file:
            begins = file.read(20)
        if begins == b"version https://git-":
            return " It is a pointer of Git LFS: `git lfs pull` fetches the file itself"
        size = path.stat().st_size
        return f" It is another kind of file, or not the whole of one: {size} bytes, which begin with {begins!r}"
    newest = re.search(r"max supported IR version: ([0-9]+)", text)
    if newest is None:
        return ""
    return f"; write the file with onnx.helper.make_model(..., ir_version={newest[1]}), or install a newer onnxruntime"


@cache
def _find_cuda_libraries() -> None:
    """Load NVIDIA's libraries where they come from wheels, which the loader does not search."""
    said = io.StringIO()
    with redirect_stdout(said):  # it prints what it does not find; nobody reads a server's standard output
        ort.preload_dlls()
    for line in said.getvalue().splitlines():
        log.warning("onnxruntime: %s", line)


def to_be_asked_only() -> Any:
    """For a session that is asked for its names and never run."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return settings


def run_without_waiting(graph: int) -> Any:
    """For runs that return when their work is on the device's stream. `graph`: the number of the captured graph that
    they are, -1 for none.
    """
    options = ort.RunOptions()
    # Said in any case: newer versions ask for it at each run, and an entry that is not there costs them an exception.
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def settings(config: ModelConfig, options: Mapping[str, str]) -> Any:
    """A session's settings. The cores are shared out between the runs that may happen at once, unless the model's
    parameters say more.
    """
    made = ort.SessionOptions()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(options.get("runs_at_once", "1")))
    # Triton's 0 means "you choose", as does saying nothing.
    made.intra_op_num_threads = _parameter(config, options, "intra_op_thread_count", 0) or share
    made.inter_op_num_threads = _parameter(config, options, "inter_op_thread_count", 0) or 1
    parallel = _parameter(config, options, "execution_mode", 0) == 1
    made.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    made.enable_cpu_mem_arena = bool(_parameter(config, options, "enable_mem_arena", 1))
    # A memory pattern is kept for every shape seen, for ever: with shapes that vary beyond the batch that is a leak.
    varies = any(spec.is_variable for spec in config.inputs)
    made.enable_mem_pattern = bool(_parameter(config, options, "enable_mem_pattern", 0 if varies else 1))
    made.graph_optimization_level = _LEVELS.get(_graph_level(config), _LEVELS[0])
    # Threads that spin between runs take the cores that the other models and the server need.
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return made


def _parameter(config: ModelConfig, options: Mapping[str, str], name: str, default: int) -> int:
    """What the model's parameters say, else the operator for all models, else `default`."""
    text = config.parameters.get(name)
    if text is None:
        return int(options.get(name, default))
    try:
        return int(text)
    except ValueError:
        message = f"parameter '{name}' of model '{config.name}' must be a whole number, found '{text}'"
        raise Problems([Problem(message, config.source.place(f"parameters[{name}]"))]) from None


def _graph_level(config: ModelConfig) -> int:
    optimization = config.json.get("optimization") or {}
    return int((optimization.get("graph") or {}).get("level", 0))


def signature_of(session: Any) -> Signature:
    """What the file says about itself."""
    inputs = [_port(node, is_optional=node.type.startswith("optional(")) for node in session.get_inputs()]
    defaults = [_port(node, is_optional=True) for node in session.get_overridable_initializers()]
    ordered = sorted([*inputs, *defaults], key=lambda port: port.is_optional)
    return Signature(tuple(ordered), tuple(_port(node, is_optional=False) for node in session.get_outputs()))


def _port(node: Any, *, is_optional: bool) -> Port:
    # A dimension that varies is None or the name the exporter gave it.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return Port(node.name, node.type, shape, is_optional)


def host_value(array: Array) -> Any:
    """What an output is bound to so that it is written into the memory of `array`, which holds nothing but that."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def executor(session: Any, config: ModelConfig) -> Execute:
    """How the model's session is run: it gets the names of the outputs to make, and the inputs.

    Numpy arrays are measured to cost a seventh of building OrtValues in Python, so these serve only the models that
    need them: those with a BF16 tensor, which onnxruntime does not take from numpy.
    """
    answers = any(spec.dtype is DType.BF16 for spec in config.outputs)
    if answers or any(spec.dtype is DType.BF16 for spec in config.inputs):
        return _CarryingBfloat16(session, answers=answers)
    execute: Execute = session.run
    return execute


class _CarryingBfloat16:
    """Runs a session that has BF16 tensors: they go in and out as OrtValues."""

    def __init__(self, session: Any, *, answers: bool) -> None:
        self._session = session
        self._answers = answers  # whether BF16 is among the outputs, not only among the inputs

    def __call__(self, names: list[str], feed: Feed) -> list[Any]:
        values = {name: self._value(array) if array.dtype == _BFLOAT16 else array for name, array in feed.items()}
        if not self._answers:
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
        # The value's memory goes with it, so its bytes are copied out while it lives.
        ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
        return array
