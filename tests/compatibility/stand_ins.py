"""Stand-ins for what a repository's copy lacks.

Decides what is missing (weights that git does not hold, libraries, empty version folders, GPUs) and what replaces it:
an ONNX file of the configured tensors, or a `model.py`. A model whose tensors the configuration does not name stays as
it is. Does not know the servers, except that one of them may lack a backend for ONNX files.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import onnx

from flowserve.config.model_config_pb2 import DataType, ModelConfig
from tests.compatibility.configs import (
    FILES,
    backend_of,
    fill_template,
    read_config,
    with_backend,
    without_gpus,
)
from tests.compatibility.model_sources import STAND_IN, onnx_runner
from tests.compatibility.onnx_files import ONNX_TYPES, OnnxTensor, write_onnx
from tests.compatibility.repositories import CONFIG, model_folders, version_folders

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
OF_THE_SERVER = {"triton_python_backend_utils", "c_python_backend_utils"}
BATCH_SIZE_OF_ONNX = 4  # what Triton's backend fills in for a file whose first dimensions vary


@dataclass(frozen=True, slots=True)
class StandIn:
    """`what` was put in the place of something of `model`, because of `why`."""

    model: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What a copy may use: GPUs, the backends whose models are kept, and the modules that can be imported."""

    has_gpu: bool = False
    kept_backends: frozenset[str] = frozenset({"python", "onnxruntime", "ensemble"})
    has_module: Callable[[str], bool] = lambda name: find_spec(name) is not None


def make_stand_ins(repository: Path, machine: Machine) -> list[StandIn]:
    """Complete the copy `repository` in place; what was replaced, in the models' order."""
    return [one for model in model_folders(repository) for one in _complete(model, machine)]


def run_onnx_in_python(repository: Path) -> list[str]:
    """Replace the ONNX models of a copy by Python models that run the same files; the models' names."""
    changed = []
    for model in model_folders(repository):
        config = read_config(model)
        if config is None or backend_of(config, model) != "onnxruntime":
            continue
        file = config.default_model_filename or FILES["onnxruntime"]
        versions = [folder for folder in version_folders(model) if (folder / file).is_file()]
        if not versions:
            continue
        path = model / CONFIG
        text = path.read_text() if path.is_file() else ""
        if not config.input or not config.output:
            text += _completion(versions[0] / file, config)
        path.write_text(with_backend(text, "python"))
        for folder in versions:
            (folder / "model.py").write_text(onnx_runner(file))
        changed.append(model.name)
    return changed


def _complete(model: Path, machine: Machine) -> Iterator[StandIn]:
    path = model / CONFIG
    if path.is_file():
        yield from _change_text(path, machine)
    config = read_config(model)
    if config is None:
        return
    backend = backend_of(config, model)
    if not version_folders(model):
        for number in config.version_policy.specific.versions or [1]:
            (model / str(number)).mkdir()
        yield StandIn(model.name, "empty version folder", "git keeps no empty folders")
    if backend in ("", "ensemble"):
        return
    why = _why_it_cannot_run(model, backend, config, machine)
    if not why or not config.output:
        return
    versions = version_folders(model)
    if backend == "onnxruntime" and why.startswith("no file") and not _is_ragged(config):
        file = config.default_model_filename or FILES[backend]
        try:
            for folder in versions:
                _write_onnx(folder / file, config)
        except KeyError:
            return
        yield StandIn(model.name, f"generated {file}", why)
        return
    path.write_text(with_backend(path.read_text(), "python"))
    for folder in versions:
        (folder / "model.py").write_text(STAND_IN)
    yield StandIn(model.name, "Python model", why)


def _change_text(path: Path, machine: Machine) -> Iterator[StandIn]:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    filled = fill_template(text)
    if filled != text:
        yield StandIn(path.parent.name, "values of the template", "config.pbtxt has ${…}")
    changed = filled if machine.has_gpu else without_gpus(filled)
    if changed != filled:
        yield StandIn(path.parent.name, "instances on the CPU", "no GPU")
    if changed != text:
        path.write_text(changed, encoding="utf-8", errors="surrogateescape")


def _why_it_cannot_run(model: Path, backend: str, config: ModelConfig, machine: Machine) -> str:
    """Empty if the model has its file, and a library that runs it."""
    if backend not in machine.kept_backends:
        return f"no backend {backend} for the comparison"
    file = config.default_model_filename or FILES.get(backend, "")
    for folder in version_folders(model):
        if file and _is_missing(folder / file):
            return f"no file {folder.name}/{file}"
    if backend == "python":
        missing = sorted({name for name in _imports(model) if not machine.has_module(name)})
        if missing:
            return f"no module {', '.join(missing)}"
    return ""


def _is_ragged(config: ModelConfig) -> bool:
    return bool(config.batch_input) or any(one.allow_ragged_batch for one in config.input)


def _is_missing(path: Path) -> bool:
    if path.is_dir():
        return not any(path.iterdir())
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    return not start or start == LFS_POINTER


def _imports(model: Path) -> Iterator[str]:
    """The packages that a Python model imports outside of `try`, except those of its own folders."""
    own = {path.stem for path in model.rglob("*.py")} | {path.name for path in model.rglob("*") if path.is_dir()}
    for path in model.glob("[0-9]*/**/*.py"):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for name in _imported(tree):
            if name not in own | OF_THE_SERVER and name not in sys.stdlib_module_names:
                yield name


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Try):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def _write_onnx(path: Path, config: ModelConfig) -> None:
    inputs = [
        OnnxTensor(
            one.name, DataType.Name(one.data_type), tuple(one.reshape.shape if one.HasField("reshape") else one.dims)
        )
        for one in config.input
    ]
    for control in config.sequence_batching.control_input:
        inputs += [OnnxTensor(control.name, _type_of_control(one), (1,)) for one in control.control[:1]]
    outputs = [
        OnnxTensor(
            one.name, DataType.Name(one.data_type), tuple(one.reshape.shape if one.HasField("reshape") else one.dims)
        )
        for one in config.output
    ]
    for state in config.sequence_batching.state:
        of_state = DataType.Name(state.data_type), tuple(state.dims)
        inputs.append(OnnxTensor(state.input_name, *of_state))
        if all(one.name != state.output_name for one in outputs):
            outputs.append(OnnxTensor(state.output_name, *of_state))
    write_onnx(path, inputs, outputs, config.max_batch_size > 0)


def _type_of_control(control: object) -> str:
    for field, data_type in (("int32", "INT32"), ("fp32", "FP32"), ("bool", "BOOL")):
        if getattr(control, f"{field}_false_true"):
            return f"TYPE_{data_type}"
    return DataType.Name(getattr(control, "data_type", DataType.TYPE_UINT64))


def _completion(file: Path, config: ModelConfig) -> str:
    """Fields that Triton's backend for ONNX adds to the configuration of this file."""
    names = {int(number): name for name, number in ONNX_TYPES.items()}
    graph = onnx.load(str(file), load_external_data=False).graph
    shapes = {
        one.name: [n.dim_value if n.HasField("dim_value") else -1 for n in one.type.tensor_type.shape.dim]
        for one in [*graph.input, *graph.output]
    }
    batches = all(shape and shape[0] == -1 for shape in shapes.values())
    text = ""
    if batches and not config.max_batch_size:
        text += f"\nmax_batch_size: {BATCH_SIZE_OF_ONNX}\n"
        if not config.WhichOneof("scheduling_choice"):
            text += "dynamic_batching { }\n"
    constants = {one.name for one in graph.initializer}
    for field, tensors in (("input", graph.input), ("output", graph.output)):
        if getattr(config, field):
            continue
        for one in tensors:
            if one.name not in constants:
                dims = shapes[one.name][1:] if batches else shapes[one.name]
                data_type = names[one.type.tensor_type.elem_type]
                text += f'{field} {{ name: "{one.name}" data_type: {data_type} dims: {dims} }}\n'
    return text
