"""A `ModelInferRequest` becomes a `Request`.

Decided here: every field of the message, what each may hold, and what a client reads who got one wrong, in Triton's
words where it has some. Raw tensors are views of the message's bytes. Whether names, types and shapes suit the model
is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.grpc.service_pb2 import InferParameter, ModelInferRequest
from flowserve.memory import raw
from flowserve.memory.client_memory import Portion
from flowserve.runtime.request_parameters import KNOWN_PARAMETERS, RESERVED_PREFIX, reserved
from flowserve.values import BY_WIRE, Array, DType, Parameter, Request

_INT64_MAX: Final = 2**63 - 1
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_CONTENTS: Final[Mapping[DType, str]] = {
    DType.BOOL: "bool_contents",
    **dict.fromkeys((DType.INT8, DType.INT16, DType.INT32), "int_contents"),
    DType.INT64: "int64_contents",
    **dict.fromkeys((DType.UINT8, DType.UINT16, DType.UINT32), "uint_contents"),
    DType.UINT64: "uint64_contents",
    DType.FP32: "fp32_contents",
    DType.FP64: "fp64_contents",
    DType.BYTES: "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input that lies in the client's memory."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    count: int
    portion: Portion


@dataclass(slots=True)
class Asked:
    """A request, and how it wants its answer: `classes` and `portions` are those of outputs. `shared` are inputs that
    `request` does not have yet. `wants_final`: it is told when there are no more answers by one that is empty.
    """

    request: Request
    shared: list[SharedInput] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    portions: dict[str, Portion] = field(default_factory=dict)
    wants_final: bool = False


def decode(message: ModelInferRequest, blocks: Sequence[raw.Buffer] | None = None) -> Asked:
    """`blocks` are the raw tensors where the message has been parted from them. Raises `Invalid`, naming the field."""
    asked = Asked(Request({}, id=message.id))
    if message.parameters:
        _parameters(message, asked)
    _inputs(message, asked, message.raw_input_contents if blocks is None else blocks)
    if message.outputs:
        _outputs(message, asked)
    return asked


def parameter(value: InferParameter, where: str) -> Parameter:
    """What a parameter holds. Raises `Invalid` where that is nothing."""
    choice = value.WhichOneof("parameter_choice")
    if choice is None:
        raise Invalid(f"the parameter {where} has no value")
    found: Parameter = getattr(value, choice)
    return found


# ---------------------------------------------------------------------------------------------- inputs


def _inputs(message: ModelInferRequest, asked: Asked, given_raw: Sequence[raw.Buffer]) -> None:
    model = message.model_name
    blocks = iter(given_raw)
    is_raw = bool(given_raw)
    given = asked.request.inputs
    placed = 0
    for tensor in message.inputs:
        name = tensor.name
        dtype = BY_WIRE.get(tensor.datatype)
        if dtype is None:
            raise Invalid(f"invalid datatype '{tensor.datatype}' for input '{name}'; use one of {', '.join(BY_WIRE)}")
        shape = tuple(tensor.shape)
        if shape and min(shape) < 0:
            raise Invalid(f"input '{name}' for model '{model}' has shape {list(shape)}: no dimension is negative")
        count = raw.element_count(name, shape, dtype)
        if name in given:
            raise Invalid(f"input '{name}' already exists in request")
        has_contents = tensor.HasField("contents")
        portion = _portion(tensor.parameters, f"of input '{name}'") if tensor.parameters else None
        if portion is not None:
            if has_contents:
                raise Invalid(
                    f"unexpected 'contents' or 'raw_input_contents' for input '{name}' for model '{model}': it lies in "
                    "shared memory"
                )
            raw.check_size(name, model, dtype, count, portion.size)
            asked.shared.append(SharedInput(name, dtype, shape, count, portion))
            given[name] = _LATER  # keeps its place in the order
        elif is_raw:
            if has_contents:
                raise Invalid(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for model "
                    f"'{model}'"
                )
            block = next(blocks, None)
            placed += 1
            if block is None:
                break
            raw.check_size(name, model, dtype, count, len(block))
            given[name] = raw.decode(block, name, model, dtype, shape, count)
        else:
            given[name] = _typed(tensor, dtype, shape, count, model)
    if is_raw and placed != len(given_raw):
        raise Invalid(
            f"expected one raw_input_contents for each input of model '{model}' that is not in shared memory, got "
            f"{len(given_raw)} for {len(message.inputs) - len(asked.shared)}"
        )


_LATER: Final[Array] = np.empty(0)


def _typed(
    tensor: ModelInferRequest.InferInputTensor, dtype: DType, shape: tuple[int, ...], count: int, model: str
) -> Array:
    """The array that `contents` holds."""
    name = tensor.name
    wanted = _CONTENTS.get(dtype)
    if wanted is None:
        raise Invalid(f"input '{name}' for model '{model}' is {dtype}, which must be in raw_input_contents")
    for found, _ in tensor.contents.ListFields():
        if found.name != wanted:
            raise Invalid(f"input '{name}' for model '{model}' is {dtype}, so '{wanted}' has it, not '{found.name}'")
    values = getattr(tensor.contents, wanted)
    if len(values) != count:
        raise Invalid(
            f"unexpected number of elements {len(values)} in '{wanted}' of input '{name}' for model '{model}', "
            f"expecting {count}"
        )
    if dtype is DType.BYTES:
        flat: Array = np.empty(count, np.object_)
        flat[:] = list(values)
    else:
        try:
            flat = np.array(list(values), dtype.numpy)  # of a list: numbers that do not fit raise
        except OverflowError:
            raise Invalid(f"input '{name}' for model '{model}' holds a number outside {dtype}") from None
    return raw.shaped(flat, name, shape)


def _portion(parameters: Mapping[str, InferParameter], where: str) -> Portion | None:
    if "shared_memory_region" not in parameters:
        return None
    region = parameter(parameters["shared_memory_region"], f"'shared_memory_region' {where}")
    if not isinstance(region, str):
        raise _wrong("shared_memory_region", "string", where)
    if "shared_memory_byte_size" not in parameters:
        raise Invalid(f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' {where}")
    return Portion(
        region,
        _number(parameters, "shared_memory_offset", where),
        _number(parameters, "shared_memory_byte_size", where),
    )


# ---------------------------------------------------------------------------------------------- outputs, parameters


def _outputs(message: ModelInferRequest, asked: Asked) -> None:
    asked.request.outputs = tuple(output.name for output in message.outputs)
    listed: set[str] = set()
    for output in message.outputs:
        name, where = output.name, f"of output '{output.name}'"
        if name in listed:
            raise Invalid(f"output '{name}' already exists in request")
        listed.add(name)
        if not output.parameters:
            continue
        portion = _portion(output.parameters, where)
        count = _number(output.parameters, "classification", where)
        if portion is not None:
            if count:
                raise Invalid(f"'classification' cannot be set for an output that goes to shared memory ({where})")
            asked.portions[name] = portion
        elif count:
            asked.classes[name] = count


def _parameters(message: ModelInferRequest, asked: Asked) -> None:
    request, given = asked.request, message.parameters
    where = f"of the request for model '{message.model_name}'"
    request.priority = _number(given, "priority", where)
    request.timeout_us = _number(given, "timeout", where)
    request.sequence_start = _flag(given, "sequence_start", where)
    request.sequence_end = _flag(given, "sequence_end", where)
    asked.wants_final = _flag(given, EMPTY_FINAL, where)
    if "sequence_id" in given and given["sequence_id"].HasField("string_param"):
        request.sequence_id = given["sequence_id"].string_param
    else:
        request.sequence_id = _number(given, "sequence_id", where)
    custom: dict[str, Parameter] = {}
    for key, value in given.items():
        if key in KNOWN_PARAMETERS or key == EMPTY_FINAL:
            continue
        if key.startswith(RESERVED_PREFIX):
            raise reserved(key)
        custom[key] = parameter(value, f"'{key}' {where}")
    request.parameters = custom


def _number(parameters: Mapping[str, InferParameter], key: str, where: str) -> int:
    """0 where it is missing."""
    if key not in parameters:  # asking for it would put it there
        return 0
    value: Any = parameter(parameters[key], f"'{key}' {where}")
    if type(value) is not int or value < 0:
        raise _wrong(key, "int64_param or uint64_param, 0 or more", where)
    return value


def _flag(parameters: Mapping[str, InferParameter], key: str, where: str) -> bool:
    if key not in parameters:
        return False
    value = parameter(parameters[key], f"'{key}' {where}")
    if type(value) is not bool:
        raise _wrong(key, "bool_param", where)
    return value


def _wrong(key: str, wanted: str, where: str) -> Invalid:
    return Invalid(f"invalid value type for '{key}' parameter, expected {wanted} ({where})")
