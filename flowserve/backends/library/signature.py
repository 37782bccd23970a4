"""The inputs and outputs that a model file declares, and how they compare with a configuration.

Decides what a file fills in where its configuration leaves fields out (as Triton does: a file whose first dimensions
all vary is served in batches of up to four, with the dynamic batcher), and reports every disagreement between the two,
each with both sides. A ragged input has one dimension in the file, whatever its dims. A batch input is an input of the
file and not of the configuration, since the server computes it from the shapes of a batch. It reads no files and knows
no library: each backend makes the `Signature` of its own files.

Callers: backend.py here, and the onnx and tensorrt backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from flowserve.config.suggest import did_you_mean
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Invalid, Problem, Problems, Unsupported
from flowserve.values import DType, TensorSpec, fits, shape_text

# The remedy if max_batch_size is above 0 and the file has no batch dimension.
NO_BATCH_DIMENSION: Final = "set max_batch_size: 0, or export with a dynamic first axis"
# Data types by the names that numpy, TensorFlow and PyTorch share: "float32", "bfloat16". Each library has its own name
# for strings.
DTYPES: Final = {dtype.numpy.name: dtype for dtype in DType if dtype is not DType.BYTES}
DEFAULT_MAX_BATCH_SIZE: Final = 4  # Triton's backend option default-max-batch-size


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output as the file declares it. `dtype` is None if it is no tensor, or has a data type that the
    KServe protocol has no name for; `type` is then the file's own name of its type, for messages. `shape` includes the
    batch dimension and has -1 for a dimension that varies. `is_optional`: the file has a default for it, or runs
    without it.
    """

    name: str
    dtype: DType | None
    shape: tuple[int, ...]
    is_optional: bool = False
    type: str = ""

    @property
    def is_batchable(self) -> bool:
        return bool(self.shape) and self.shape[0] == -1


@dataclass(frozen=True, slots=True)
class Signature:
    """All inputs and outputs of a file. Optional inputs are last."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def is_batchable(self) -> bool:
        return all(port.is_batchable for port in (*self.inputs, *self.outputs) if not port.is_optional)


def completion(config: ModelConfig, signature: Signature, file: str) -> Completion:
    """The fields that the configuration lacks. Raises Problems if it sets max_batch_size and the file has no batch
    dimension.
    """
    signature = _seen_by_requests(config, signature)
    ports = (*signature.inputs, *signature.outputs)
    if config.max_batch_size > 0 and not signature.is_batchable:
        fixed = [f"'{port.name}' has shape {shape_text(port.shape)}" for port in ports if not port.is_batchable]
        message = (
            f"autofill failed for model '{config.name}': model does not support batching while non-zero max_batch_size "
            f"is specified: {', '.join(fixed)} in {file}"
        )
        raise Problems([Problem(message, config.source.place("max_batch_size"), hint=NO_BATCH_DIMENSION)])
    # If the user's dims include the first dimension of the file, it is no batch dimension.
    ranks = {port.name: len(port.shape) for port in ports}
    counts_batch_dim = any(ranks.get(spec.name) == len(spec.dims) for spec in (*config.inputs, *config.outputs))
    fills_batch = config.max_batch_size == 0 and signature.is_batchable and not counts_batch_dim
    batches = config.max_batch_size > 0 or fills_batch
    return Completion(
        inputs=tuple(_spec(config, port, file, batches=batches) for port in signature.inputs if not port.is_optional),
        outputs=tuple(_spec(config, port, file, batches=batches) for port in signature.outputs),
        max_batch_size=DEFAULT_MAX_BATCH_SIZE if fills_batch else None,
        dynamic_batching=fills_batch,
    )


def _seen_by_requests(config: ModelConfig, signature: Signature) -> Signature:
    """Without the inputs that the server makes, and the states that it keeps."""
    made = {target for each in config.batch_inputs for target in each.targets}
    kept: set[str] = set()
    if config.sequence is not None:
        made |= {control.name for control in config.sequence.controls}
        made |= {state.input for state in config.sequence.states}
        kept = {state.output for state in config.sequence.states} - {spec.name for spec in config.outputs}
    return Signature(
        tuple(port for port in signature.inputs if port.name not in made),
        tuple(port for port in signature.outputs if port.name not in kept),
    )


def with_flat_controls(config: ModelConfig, signature: Signature) -> ModelConfig:
    """The configuration with shape [] for sequence controls that the file declares with the batch dimension only: the
    model takes them as one value per row.
    """
    if config.sequence is None or not config.max_batch_size:
        return config
    flat = {port.name for port in signature.inputs if len(port.shape) == 1}
    flat &= {control.name for control in config.sequence.controls}
    return replace(
        config, inputs=tuple(replace(spec, reshape=()) if spec.name in flat else spec for spec in config.inputs)
    )


def file_disagreements(config: ModelConfig, signature: Signature, file: str) -> Iterator[Problem]:
    """Every disagreement between the configuration and the file."""
    required = [port for port in signature.inputs if not port.is_optional]
    yield from _unknown(config, "input", config.inputs, signature.inputs)
    yield from _unknown(config, "output", config.outputs, signature.outputs)
    yield from _batch_inputs(config, signature, file)
    given = {*(spec.name for spec in config.inputs), *(name for made in config.batch_inputs for name in made.targets)}
    missing = [port.name for port in required if port.name not in given]
    if missing:
        yield Problem(
            f"unable to load model '{config.name}', configuration expects {len(given)} inputs, model provides "
            f"{len(required)}: {file} needs {_names(required)}, the configuration lacks {', '.join(missing)}",
            config.source.place("input"),
        )
    without = [*_without_batch(config, "input", config.inputs, signature.inputs)]
    without += _without_batch(config, "output", config.outputs, signature.outputs)
    if without:  # one cause, whatever the number of tensors
        *_, place = without[0]
        names = ", ".join(f"'{name}'" for name, *_ in without)
        shapes = ", ".join(dict.fromkeys(shape_text(shape) for _, shape, _ in without))
        tensors = f"tensor{'s' if len(without) > 1 else ''} {names}"
        text = (
            f"model '{config.name}', {tensors}: for the model to support batching the shape should have at least 1 "
            f"dimension and the first dimension must be -1; but shape expected by the model is {shapes}"
        )
        yield Problem(text, config.source.place(place), hint=f"{NO_BATCH_DIMENSION}; shape as in {file}")
    yield from _mismatches(config, "input", config.inputs, signature.inputs, file)
    yield from _mismatches(config, "output", config.outputs, signature.outputs, file)


def _unknown(
    config: ModelConfig, kind: str, specs: tuple[TensorSpec, ...], ports: tuple[Port, ...]
) -> Iterator[Problem]:
    known = {port.name for port in ports}
    for index, spec in enumerate(specs):
        if spec.name not in known:
            yield Problem(
                f"unexpected inference {kind} '{spec.name}', allowed {kind}s are: {_names(ports)}",
                config.source.place(f"{kind}[{index}].name"),
                hint=did_you_mean(spec.name, known) or f"these are the {kind}s of the model file of '{config.name}'",
            )


def _without_batch(
    config: ModelConfig, kind: str, specs: tuple[TensorSpec, ...], ports: tuple[Port, ...]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The tensors whose first dimension in the file is no batch dimension, although the configuration batches: name,
    shape in the file, and field in the configuration.
    """
    by_name = {port.name: port for port in ports}
    flat = {target for made in config.batch_outputs for target in made.targets} if kind == "output" else ()
    for index, spec in enumerate(specs if config.max_batch_size > 0 else ()):
        port = by_name.get(spec.name)
        if port is not None and not (port.is_batchable or spec.ragged or spec.name in flat):
            yield spec.name, port.shape, f"{kind}[{index}].dims"


def _mismatches(
    config: ModelConfig, kind: str, specs: tuple[TensorSpec, ...], ports: tuple[Port, ...], file: str
) -> Iterator[Problem]:
    by_name = {port.name: port for port in ports}
    flat = {target for made in config.batch_outputs for target in made.targets}
    sources = {made.source for made in config.batch_inputs} | {made.source for made in config.batch_outputs}
    for index, spec in enumerate(specs):
        port = by_name.get(spec.name)
        if port is None:
            continue
        found = partial(_tensor_problem, config, spec.name, f"{kind}[{index}]")
        if port.dtype is None:
            yield found("", _unservable(port, file))
        elif port.dtype is not spec.dtype:
            yield found(
                ".data_type",
                f"the model expects data type {port.dtype.config_name} ({file}) but the model configuration specifies "
                f"{spec.dtype.config_name}",
                hint=f"write data_type: {port.dtype.config_name}",
            )
        mismatch = _shape_mismatch(config, spec, port)
        if mismatch and not (kind == "output" and spec.name in flat):
            yield found(".dims", mismatch, hint=_hint(config, spec, port, file))
        if kind == "output" or not spec.optional:
            continue
        if config.max_batch_size > 0:
            yield found(".optional", f"optional inputs require max_batch_size 0 with the {config.backend} backend")
        if not port.is_optional:
            text = f"the configuration makes it optional, but {file} has no default for it"
            yield found(".optional", text, hint="give it an initializer of the same name in the model")
        if spec.ragged or spec.name in sources:
            what = "ragged" if spec.ragged else "the source of a batch input or output"
            yield found(".optional", f"it is {what} and may not be optional")


def _tensor_problem(config: ModelConfig, name: str, path: str, field: str, text: str, hint: str = "") -> Problem:
    text = f"model '{config.name}', tensor '{name}': {text}"
    return Problem(text, config.source.place(path + field), hint=hint)


def _shape_mismatch(config: ModelConfig, spec: TensorSpec, port: Port) -> str:
    """Why the two shapes cannot be the same, "" if they can."""
    if spec.ragged:
        wanted = (
            "a ragged input is handed over as one list of elements, so that the model must declare it with shape [-1]"
        )
        return "" if port.shape == (-1,) else f"{wanted}; the shape expected by the model is {shape_text(port.shape)}"
    batches = config.max_batch_size > 0
    dims = spec.dims if spec.reshape is None else spec.reshape
    full = (-1, *dims) if batches else dims
    model = port.shape
    if not model and (not batches and dims == (1,)):
        return ""  # a scalar, or an unknown rank, which onnxruntime shows as []
    if batches and not port.is_batchable:
        return ""  # reported once for all tensors
    batching = (
        f" (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
        f"complete shape {shape_text(full)})"
    )
    if len(model) != len(full):
        return (
            f"the model expects {len(model)} dimensions (shape {shape_text(model)}) but the model configuration "
            f"specifies {len(full)} dimensions{batching if batches else f' (shape {shape_text(full)})'}"
        )
    if any(-1 not in (have, want) and have != want for have, want in zip(model, full, strict=True)):
        return (
            f"the model expects {len(model)} dimensions (shape {shape_text(model)}) but the model configuration "
            f"specifies shape {shape_text(full)}"
        )
    return ""


def _hint(config: ModelConfig, spec: TensorSpec, port: Port, file: str) -> str:
    """The hint for a mismatch: the file that declares the shape, and the fix if only the batch dimension is wrong."""
    whose = f"shape as in {file}"
    if spec.reshape is not None or not port.is_batchable:
        return whose
    if not config.max_batch_size and fits(spec.dims, port.shape[1:]):
        return f"{whose}; with `max_batch_size: 8`, or another number above 0, these dims stand for one row"
    if config.max_batch_size and len(port.shape) == len(spec.dims) == 1:
        return f"{whose}; a batch of single values has `dims: [ 1 ] reshape {{ shape: [ ] }}`"
    if config.max_batch_size and fits(spec.dims, port.shape):
        return f"{whose}; dims leave out the batch dimension, since max_batch_size > 0: {shape_text(port.shape[1:])}"
    return whose


def _batch_inputs(config: ModelConfig, signature: Signature, file: str) -> Iterator[Problem]:
    ports = {port.name: port for port in signature.inputs}
    ranks = {spec.name: len(spec.dims if spec.reshape is None else spec.reshape) for spec in config.inputs}
    first = 0 if config.max_batch_size > 0 else -1
    for index, made in enumerate(config.batch_inputs):
        items = ranks[made.source] + first
        shape = (-1, items) if made.kind == "BATCH_ITEM_SHAPE" else (-1,)
        for position, target in enumerate(made.targets):
            place = config.source.place(f"batch_input[{index}].target_name[{position}]")
            tensor = f"model '{config.name}', batch input '{target}'"
            port = ports.get(target)
            if port is None:
                hint = f"the inputs of {file} are: {_names(signature.inputs)}"
                yield Problem(f"{tensor}: the model has no input of this name", place, hint=hint)
            elif port.dtype is not made.dtype:
                yield Problem(
                    f"{tensor}: the model expects data type {port.dtype.config_name if port.dtype else port.type} "
                    f"({file}) but the model configuration specifies {made.dtype.config_name}",
                    config.source.place(f"batch_input[{index}].data_type"),
                )
            elif port.shape not in (shape, (-1,) * len(shape)):
                expected = shape_text(port.shape)
                text = f"{made.kind} has shape {shape_text(shape)}, the shape expected by the model is {expected}"
                yield Problem(f"{tensor}: {text}", place, hint=f"shape as in {file}")


def _spec(config: ModelConfig, port: Port, file: str, *, batches: bool) -> TensorSpec:
    if port.dtype is None:
        raise Unsupported(f"autofill failed for model '{config.name}': tensor '{port.name}' {_unservable(port, file)}")
    written = next((spec for spec in config.inputs if spec.ragged and spec.name == port.name), None)
    if written is not None:
        return replace(written, dtype=port.dtype)  # the file declares a flat list: only the user knows its dims
    dims = port.shape[1:] if batches else port.shape
    if not dims:
        # A configuration has no empty shape: dims [1], reshaped to [] for the model.
        return TensorSpec(port.name, port.dtype, (1,), reshape=() if batches else None)
    if 0 in dims:
        raise Invalid(
            f"autofill failed for model '{config.name}': tensor '{port.name}' of {file} has shape {shape_text(dims)}, "
            f"and a dimension must be at least 1, or -1 to vary"
        )
    return TensorSpec(port.name, port.dtype, dims)


def _unservable(port: Port, file: str) -> str:
    hint = "; export the model with plain tensors (for scikit-learn: zipmap=False)" if "map(" in port.type else ""
    return f"is a {port.type} in {file}, which cannot be served{hint}"


def _names(ports: tuple[Port, ...] | list[Port]) -> str:
    return ", ".join(port.name for port in ports)
