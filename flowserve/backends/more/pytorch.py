"""Backend `pytorch`: TorchScript (`model.pt`), exported programs and AOTInductor packages (`model.pt2`).

Decides which tensor of a configuration is which argument or result: by the name of an argument of `forward`, by the key
of a result that is a dictionary, or by position (`INPUT__0`), as on Triton. TorchScript and AOTInductor declare neither
data types nor shapes, so these are the configuration's. A file of TorchScript may contain code, a package of
AOTInductor is a shared library, and both have thread pools for their process: so they are opened in worker processes
only, unless a model says otherwise.

The only module that imports torch. It does not know batches or requests. Callers: the registry.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flowserve.backends.library.backend import PROCESS, LibraryBackend
from flowserve.backends.library.interface import ModelSource, waiting_without_spinning
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import DTYPES, Port, Signature
from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.values import Array, DType, TensorSpec

_AOT: Final = "/data/aotinductor/"  # a folder in a package of AOTInductor
_POSITION: Final = re.compile(r".*__([0-9]{1,9})")
_NUMBERS: Final = "tensor of numbers"
_BFLOAT16: Final = DType.BF16.numpy


class Torch:
    """The library behind the backend."""

    name = "pytorch"
    title = "PyTorch"
    requirement = "flowserve[pytorch]"
    default_filename = "model.pt"
    default_execution = PROCESS
    strings_are_text = False
    instances = 1
    ignored: Mapping[str, str] = MappingProxyType(
        {
            "ENABLE_WEIGHT_SHARING": "each instance has a process of its own",
            "ENABLE_CACHE_CLEANING": "it is for GPUs",
            "ENABLE_JIT_EXECUTOR": "it is PyTorch's default",
            "ENABLE_JIT_PROFILING": "it is PyTorch's default",
            "ENABLE_TENSOR_FUSER": "it is PyTorch's default",
        }
    )

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        names = ["model.pt", "model.pt2"]
        return names[::-1] if config.platform == "torch_aoti" else names

    def modules(self, path: Path) -> Sequence[str]:
        return ["torch"]

    def shares(self, source: ModelSource) -> int:
        return 1

    def signature(self, source: ModelSource) -> Signature:
        return OpenModule(source).signature

    def open(self, source: ModelSource) -> OpenModule:
        return OpenModule(source, is_to_run=True)

    def explain(self, error: Exception) -> str:
        """The last line of a traceback of TorchScript, the first line of other errors."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        is_traceback = len(lines) > 1 and "TorchScript" in lines[0]
        return (lines[-1 if is_traceback else 0] if lines else type(error).__name__)[:500]


class OpenModule:
    """One file, ready to run. `is_to_run`: the numbers of threads are set, which PyTorch has once per process."""

    def __init__(self, source: ModelSource, *, is_to_run: bool = False) -> None:
        with waiting_without_spinning():
            import torch

        self._torch = torch
        if is_to_run:
            _set_threads(torch, source)
        if source.path.suffix != ".pt2":
            file: _File = _TorchScript(torch, source)
        elif any(_AOT in name for name in zipfile.ZipFile(source.path).namelist()):
            file = _Package(source)
        else:
            file = _Exported(torch, source)
        self._file = file
        self._is_inference = source.flag("INFERENCE_MODE", True)
        self._call = self._unoptimised if source.flag("DISABLE_OPTIMIZED_EXECUTION", False) else file.call
        self._given, self._made = _Names(source, "input", file.inputs), _Names(source, "output", file.outputs)
        self.signature = Signature(tuple(self._given.ports), tuple(self._made.ports))

    def session(self) -> Execute:
        torch, call = self._torch, self._call
        mode = torch.inference_mode if self._is_inference else torch.no_grad
        names_in = [name for name, _ in sorted(self._given.places.items(), key=lambda item: str(item[1]).zfill(9))]
        results = self._made.places

        def run(names: list[str], feed: Feed) -> Sequence[Any]:
            arguments = [None if name not in feed else _tensor(torch, feed[name]) for name in names_in]
            with mode():
                made = call(arguments)
            return [_array(torch, _picked(made, results[name])) for name in names]

        return run

    def _unoptimised(self, arguments: list[Any]) -> Any:
        with self._torch.jit.optimized_execution(False):
            return self._file.call(arguments)


def make_backend() -> LibraryBackend:
    return LibraryBackend(Torch())


# ---------------------------------------------------------------------------------------------- kinds of files


class _Tensor:
    """An argument or result. `name` is its own name, "" for none. `dtype` and `shape` None: the file does not declare
    them.
    """

    def __init__(
        self,
        name: str = "",
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        *,
        is_optional: bool = False,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.is_optional = is_optional


class _File:
    """`inputs` in the order of `call`'s argument, which has None for one that is not given. `outputs`: those that the
    file declares, None if their number is known after a run only. `call` returns a tensor, a sequence or a dictionary.
    """

    inputs: list[_Tensor]
    outputs: list[_Tensor] | None
    call: Callable[[list[Any]], Any]


class _TorchScript(_File):
    def __init__(self, torch: Any, source: ModelSource) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions warn that the format is old
            self._module = torch.jit.load(str(source.path), map_location="cpu").eval()
        schema = self._module.forward.schema
        arguments = schema.arguments[1:]
        self._names = [argument.name for argument in arguments]
        self.inputs = [_Tensor(one.name, is_optional=one.has_default_value()) for one in arguments]
        kinds = [str(one.type) for one in schema.returns]
        inner = re.fullmatch(r"Tuple\[(.*)\]", kinds[0]) if len(kinds) == 1 else None
        if kinds == ["Tensor"]:
            self.outputs = [_Tensor()]
        elif inner is not None and set(inner[1].split(", ")) == {"Tensor"}:
            self.outputs = [_Tensor() for _ in inner[1].split(", ")]
        else:
            self.outputs = None
        if not (source.config.inputs and source.config.outputs):
            takes = ", ".join(self._names)
            text = (
                f"model '{source.config.name}': {source.file} does not declare data types and shapes, so that the "
                f"configuration has to name all inputs and outputs: forward takes {takes} and returns {kinds[0]}"
            )
            hint = 'input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ], for example'
            raise Problems([Problem(text, source.config.source.place(""), hint=hint)])

    def call(self, arguments: list[Any]) -> Any:
        given = {name: one for name, one in zip(self._names, arguments, strict=True) if one is not None}
        return self._module(*arguments) if len(given) == len(arguments) else self._module(**given)


class _Exported(_File):
    def __init__(self, torch: Any, source: ModelSource) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(str(source.path))
            self._module = program.module()
            self._spec = program.call_spec.in_spec
            self._unflatten = torch.utils._pytree.tree_unflatten
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature = program.graph_signature
        self.inputs = [_declared(name, values.get(name)) for name in signature.user_inputs]
        self.outputs = [_declared("", values.get(name)) for name in signature.user_outputs]

    def call(self, arguments: list[Any]) -> Any:
        given, named = self._unflatten(arguments, self._spec)
        return self._module(*given, **named)


class _Package(_File):
    def __init__(self, source: ModelSource) -> None:
        from torch import _inductor

        self._loader = _inductor.aoti_load_package(str(source.path)).loader
        taken, made = self._loader.get_call_spec()
        self.inputs = [_Tensor() for _ in range(taken.count('"type": null'))]
        self.outputs = [_Tensor() for _ in range(made.count('"type": null'))]
        if not (source.config.inputs and source.config.outputs):
            text = (
                f"model '{source.config.name}': {source.file} does not declare data types and shapes, so that the "
                f"configuration has to name all inputs and outputs: it takes {len(self.inputs)} and returns "
                f"{len(self.outputs)} tensors"
            )
            raise Problems([Problem(text, source.config.source.place(""), hint="by position: INPUT__0, OUTPUT__0")])

    def call(self, arguments: list[Any]) -> Any:
        return self._loader.boxed_run(arguments)


def _declared(name: str, value: Any) -> _Tensor:
    """A tensor of an exported program: `value` has its shape, with symbols for dimensions that vary."""
    shape = tuple(dim if type(dim) is int else -1 for dim in value.shape)
    return _Tensor(name, str(value.dtype).removeprefix("torch."), shape)


# ---------------------------------------------------------------------------------------------- names and tensors


class _Names:
    """Maps the configuration's tensors to the file's. `places`: the position, or the key, of each name."""

    def __init__(self, source: ModelSource, side: str, tensors: list[_Tensor] | None) -> None:
        config = source.config
        specs = config.inputs if side == "input" else config.outputs
        made: dict[str, tuple[DType, tuple[int, ...]]] = {}
        for each in config.batch_inputs if side == "input" else ():
            made |= dict.fromkeys(each.targets, (each.dtype, (-1, -1) if each.kind == "BATCH_ITEM_SHAPE" else (-1,)))
        by_name = {spec.name: (spec.dtype, _echoed(config, spec)) for spec in specs} | made
        self.places: dict[str, int | str] = {}
        self.ports: list[Port] = []
        if tensors is None:  # known after a run only: any position, or a key
            for name, (dtype, shape) in by_name.items():
                found = _POSITION.fullmatch(name)
                self.places[name] = int(found[1]) if found else name
                self.ports.append(_port(name, _Tensor(), dtype, shape))
            return
        by_position = {int(found[1]): name for name in by_name if (found := _POSITION.fullmatch(name))}
        own = {one.name for one in tensors} & by_name.keys()
        for i, one in enumerate(tensors):
            positional = by_position.get(i, "")
            name = one.name if one.name in own else positional if positional not in own else ""
            name = name or one.name or f"{side.upper()}__{i}"
            self.places[name] = i
            dtype_and_shape = by_name.get(name, (None, ()))
            self.ports.append(_port(name, one, *dtype_and_shape))
        self.ports.sort(key=lambda port: port.is_optional)


def _echoed(config: ModelConfig, spec: TensorSpec) -> tuple[int, ...]:
    """The shape in the configuration, as a file would declare it."""
    if spec.ragged:
        return (-1,)
    dims = spec.dims if spec.reshape is None else spec.reshape
    return (-1, *dims) if config.max_batch_size else dims


def _port(name: str, tensor: _Tensor, dtype: DType | None, shape: tuple[int, ...]) -> Port:
    if tensor.dtype is not None and tensor.shape is not None:
        return Port(name, DTYPES.get(tensor.dtype), tensor.shape, tensor.is_optional, tensor.dtype)
    return Port(name, None if dtype is DType.BYTES else dtype, shape, tensor.is_optional, _NUMBERS)


def _tensor(torch: Any, array: Array) -> Any:
    if not array.flags.writeable:
        array = array.copy()  # PyTorch has no read-only tensors
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(torch: Any, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"it returned {type(tensor).__name__} where a tensor was expected")
    if tensor.requires_grad:  # a parameter itself
        tensor = tensor.detach()
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def _picked(made: Any, place: int | str) -> Any:
    """One result. Raises LookupError with the available ones."""
    if isinstance(place, str):
        if isinstance(made, Mapping) and place in made:
            return made[place]
        there = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise LookupError(f"it returned no '{place}', but {there}")
    flat = (
        list(made.values()) if isinstance(made, Mapping) else list(made) if isinstance(made, tuple | list) else [made]
    )
    if place >= len(flat):
        raise LookupError(f"it returned {len(flat)} tensors, and number {place} was requested")
    return flat[place]


def _set_threads(torch: Any, source: ModelSource) -> None:
    torch.set_num_threads(source.integer("INTRA_OP_THREAD_COUNT", 0) or source.threads)
    between = source.integer("INTER_OP_THREAD_COUNT", 0) or 1
    if torch.get_num_interop_threads() != between:
        try:
            torch.set_num_interop_threads(between)
        except RuntimeError:  # another model of this process runs already, on a thread of the server
            return
