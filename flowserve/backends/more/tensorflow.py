"""Backend `tensorflow`: SavedModels and frozen graphs (GraphDef), with Triton's parameters.

Decides which signature of a SavedModel is served, how the tensors of a frozen graph are found by name, and the number
of threads. TensorFlow is large and has thread pools of its own, one set for each process: so it is imported in worker
processes only, unless a model says otherwise.

The only module that imports tensorflow. It does not know batches or requests. Callers: the registry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flowserve.backends.library.backend import PROCESS, LibraryBackend
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import DTYPES, Port, Signature
from flowserve.config.types import ModelConfig
from flowserve.values import Array, DType, TensorSpec

SAVED_MODEL: Final = "model.savedmodel"
GRAPH_DEF: Final = "model.graphdef"
SIGNATURE: Final = "TF_SIGNATURE_DEF"
TAG: Final = "TF_GRAPH_TAG"
_NUMBERS: Final = {np.dtype(kind) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")}
_ALIGNMENT: Final = 64  # the largest alignment that TensorFlow's kernels need
_DTYPES: Final = {**DTYPES, "string": DType.BYTES}


class TensorFlow:
    """The library behind the backend."""

    name = "tensorflow"
    title = "TensorFlow"
    requirement = "flowserve[tensorflow]"
    default_filename = SAVED_MODEL
    default_execution = PROCESS
    strings_are_text = False
    instances = 1
    ignored: Mapping[str, str] = MappingProxyType({})

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        is_graph = config.platform == "tensorflow_graphdef"
        return [GRAPH_DEF] if is_graph else [SAVED_MODEL, GRAPH_DEF]

    def modules(self, path: Path) -> Sequence[str]:
        return ["tensorflow"]

    def shares(self, source: ModelSource) -> int:
        """Runs of one function may be concurrent."""
        return source.integer("MAX_SESSION_SHARE_COUNT", 1, 1)

    def signature(self, source: ModelSource) -> Signature:
        return OpenGraph(source).signature

    def open(self, source: ModelSource) -> OpenGraph:
        return OpenGraph(source, is_to_run=True)

    def explain(self, error: Exception) -> str:
        """Its first line: the others are nodes and stacks."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if lines and lines[0] == "Graph execution error:":
            # The reason follows the nodes, and precedes a reference to the last of them.
            reasons = [line for line in lines[1:] if "[[{{node" not in line and "[Op:" not in line]
            lines = reasons[-1:] or lines
        return (lines[0] if lines else type(error).__name__)[:500]


class OpenGraph:
    """The function of one file: a signature of a SavedModel, or a frozen graph. `is_to_run`: the number of threads is
    set, which TensorFlow allows once in a process.
    """

    def __init__(self, source: ModelSource, *, is_to_run: bool = False) -> None:
        self._tf = _imported(source if is_to_run else None)
        _refuse_init_ops(source)
        if source.path.is_dir():
            self._function, self.signature = _of_saved_model(self._tf, source)
        else:
            self._function, self.signature = _of_graph_def(self._tf, source)

    def session(self) -> Execute:
        function, tf = self._function, self._tf
        strings = {port.name for port in self.signature.outputs if port.dtype is DType.BYTES}

        def run(names: list[str], feed: Feed) -> Sequence[Any]:
            made = function(**{name: _tensor(tf, array) for name, array in feed.items()})
            # Strings are copied, and a scalar one comes back as an object of its own; the other arrays are views.
            return [np.asarray(made[name].numpy() if name in strings else made[name]) for name in names]

        return run


def make_backend() -> LibraryBackend:
    return LibraryBackend(TensorFlow())


def _tensor(tf: Any, array: Array) -> Any:
    """An input. `tf.constant` takes 20 us for a copy; with DLPack the tensor uses the array's memory. TensorFlow's
    kernels need that aligned, and numpy exports neither read-only arrays nor strings.
    """
    if array.dtype not in _NUMBERS or not array.size:
        return tf.constant(array)
    if array.ctypes.data % _ALIGNMENT or not array.flags.writeable:
        memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        aligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        aligned[...] = array
        array = aligned
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _imported(source: ModelSource | None) -> Any:
    """The imported module, with the number of threads of `source` if that is given."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its notes about the machine do not belong in the log
    import tensorflow

    if source is not None:
        threading = tensorflow.config.threading
        intra = source.integer("TF_NUM_INTRA_THREADS", 0) or source.threads
        inter = source.integer("TF_NUM_INTER_THREADS", 0) or 1
        wanted = (intra, inter)
        there = (threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads())
        if there != wanted and not _is_initialised(tensorflow):
            threading.set_intra_op_parallelism_threads(intra)
            threading.set_inter_op_parallelism_threads(inter)
            tensorflow.config.set_visible_devices([], "GPU")  # an instance on the CPU reserves no memory of a GPU
    return tensorflow


def _is_initialised(tensorflow: Any) -> bool:
    """Whether this process has run TensorFlow before: then its numbers of threads are fixed."""
    from tensorflow.python.eager import context

    return bool(context.context()._initialized)


def _refuse_init_ops(source: ModelSource) -> None:
    if source.text("TF_INIT_OPS_FILE"):
        raise source.wrong(
            "TF_INIT_OPS_FILE", "is not supported", "export the model as a SavedModel, which has its initialisation"
        )


def _of_saved_model(tf: Any, source: ModelSource) -> tuple[Callable[..., Mapping[str, Any]], Signature]:
    tags = source.text(TAG)
    loaded = tf.saved_model.load(str(source.path), tags=[tags] if tags else None)
    wanted = source.text(SIGNATURE, "serving_default")
    if wanted not in loaded.signatures:
        there = ", ".join(sorted(loaded.signatures)) or "none: save it with signatures="
        raise source.wrong(
            SIGNATURE, f"is '{wanted}', which {source.file} does not have", f"its signatures are {there}"
        )
    function = loaded.signatures[wanted]
    _, inputs = function.structured_input_signature
    outputs = function.structured_outputs
    configured = {spec.name: spec for spec in (*source.config.inputs, *source.config.outputs)}
    return function, Signature(
        tuple(_port(name, spec, configured, source) for name, spec in inputs.items()),
        tuple(_port(name, spec, configured, source) for name, spec in outputs.items()),
    )


def _of_graph_def(tf: Any, source: ModelSource) -> tuple[Callable[..., Mapping[str, Any]], Signature]:
    """The program of a frozen graph. It declares no outputs: they are the nodes that the configuration names, else
    those that no other node reads. The inputs are its placeholders.
    """
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(source.path.read_bytes())
    nodes = {node.name: node for node in graph.node}
    read = {name.lstrip("^").partition(":")[0] for node in graph.node for name in node.input}
    inputs = [name for name, node in nodes.items() if node.op == "Placeholder"]
    outputs = [spec.name for spec in source.config.outputs if spec.name.partition(":")[0] in nodes]
    if not outputs:
        outputs = [name for name, node in nodes.items() if name not in read and node.op not in ("Placeholder", "NoOp")]
    wrapped = tf.compat.v1.wrap_function(lambda: tf.compat.v1.import_graph_def(graph, name=""), [])

    def tensor(name: str) -> Any:
        return wrapped.graph.as_graph_element(name if ":" in name else f"{name}:0")

    pruned = wrapped.prune([tensor(name) for name in inputs], {name: tensor(name) for name in outputs})

    def function(**feed: Any) -> Mapping[str, Any]:
        made: Mapping[str, Any] = pruned(*[feed[name] for name in inputs])
        return made

    configured = {spec.name: spec for spec in (*source.config.inputs, *source.config.outputs)}
    return function, Signature(
        tuple(_port(name, tensor(name), configured, source) for name in inputs),
        tuple(_port(name, tensor(name), configured, source) for name in outputs),
    )


def _port(name: str, spec: Any, configured: Mapping[str, TensorSpec], source: ModelSource) -> Port:
    """A tensor whose number of dimensions is unknown has those of the configuration."""
    kind = spec.dtype.name
    if spec.shape.rank is not None:
        return Port(name, _DTYPES.get(kind), tuple(-1 if dim is None else dim for dim in spec.shape), type=kind)
    written = configured.get(name)
    batch = (-1,) if source.config.max_batch_size else ()
    dims = () if written is None else written.dims if written.reshape is None else written.reshape
    return Port(name, _DTYPES.get(kind), (*batch, *dims), type=kind)
