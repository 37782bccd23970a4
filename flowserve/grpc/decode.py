"""`ModelInferRequest` messages, as bytes, to `Request`s.

Decides every field of the message, its valid values, and the error texts, which are Triton's where it has them. Raw
tensors are views of the message's bytes. The part of a message before its raw tensors is decoded once and kept, because
clients repeat it; messages with another layout (typed contents, unusual field order) are decoded by protobuf alone.
Does not know whether names, types and shapes fit the model: the engine validates them. Callers: `server`, `service`,
`inference`, `stream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from flowserve.errors import FlowserveError, Invalid, Overloaded
from flowserve.grpc.bounds import TYPED_ELEMENTS_MAX, MessageBounds, too_many, too_many_numbers
from flowserve.grpc.service_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from flowserve.memory import raw
from flowserve.memory.client_memory import Portion
from flowserve.runtime.budget import COUNTED_BYTES_MIN, Budget, Reservation
from flowserve.runtime.protocol import ITEMS_MAX, KNOWN_PARAMETERS, RESERVED_PREFIX, reserved
from flowserve.runtime.threads import INLINE_BYTES_MAX
from flowserve.values import BY_WIRE, Array, BytesLike, DType, Parameter, Request

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
CONTENTS: Final[Mapping[DType, str]] = {
    DType.BOOL: "bool_contents",
    **dict.fromkeys((DType.INT8, DType.INT16, DType.INT32), "int_contents"),
    DType.INT64: "int64_contents",
    **dict.fromkeys((DType.UINT8, DType.UINT16, DType.UINT32), "uint_contents"),
    DType.UINT64: "uint64_contents",
    DType.FP32: "fp32_contents",
    DType.FP64: "fp64_contents",
    DType.BYTES: "bytes_contents",
}
_BYTES: Final = DType.BYTES  # attributes of an enumeration are slow
_READ_LATER: Final[Array] = np.empty(0)  # keeps an input's place in the order
_KEPT_MAX: Final = 256
_KEPT_BYTES_MAX: Final = 4096  # of one message's part before its raw tensors
_FIELDS_MAX: Final = 4 * ITEMS_MAX + 16  # of a message: inputs, outputs, parameters, raw tensors, and single ones
_SHIFT_MAX: Final = 56  # of a varint's bytes, seven bits each
_HAS_LENGTH: Final = 2  # protobuf's wire type of strings, bytes and messages
_RAW: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _HAS_LENGTH
RAW_OUTPUT: Final = ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _HAS_LENGTH

InputLayout = tuple[str, DType, tuple[int, ...], int]  # name, data type, shape, number of elements
# The part of a message before its raw tensors: the target, the request's fields after its inputs, the classes,
# whether an empty final response is wanted, and the inputs.
_Kept = tuple[tuple[str, str], tuple[Any, ...], dict[str, int], bool, tuple[InputLayout, ...]]
_REPEATED: Final = ("inputs", "outputs", "parameters")
_fields_of: Final = attrgetter(*(one.name for one in fields(Request) if one.name != "inputs"))


@dataclass(slots=True)
class ReceivedMessage:
    """A request for a `target` (model and version), and the form of its response: `classes` and `portions` are by
    output. `late` are inputs that are still to be read into `request`: those in the client's shared memory, and BYTES
    inputs of many bytes, with these. `wants_final`: the end of a decoupled response is marked by an empty response.
    `error`: why the message cannot be decoded, if so. `reservation`: of the server's budget, for a large message.
    `data`: its bytes, if it may be sent on to another server.
    """

    target: tuple[str, str]
    request: Request
    late: list[tuple[InputLayout, Portion | BytesLike]] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    portions: dict[str, Portion] = field(default_factory=dict)
    wants_final: bool = False
    error: FlowserveError | None = None
    reservation: Reservation | None = None
    data: bytes = b""


# ---------------------------------------------------------------------------------------------- bytes


class MessageReader:
    """Decodes messages, and keeps the parts that repeat. `bytes_elements`: the most elements of all BYTES inputs.
    `budget`: of all requests in the server.
    """

    def __init__(self, bytes_elements: int = raw.BYTES_ELEMENTS_MAX, budget: Budget | None = None) -> None:
        self._bytes_elements = bytes_elements
        self._budget = budget or Budget()
        self._bounds = MessageBounds(ModelInferRequest.DESCRIPTOR, bytes_elements)
        self._kept: dict[bytes, _Kept] = {}

    def __call__(self, data: bytes, *, is_counted: bool = False) -> ReceivedMessage | Invalid:
        """The message, or the error if the bytes are not a ModelInferRequest. `is_counted`: in the budget."""
        if len(data) > COUNTED_BYTES_MIN and not is_counted:
            return self._counted(data)
        parts = split(data)
        if parts is None:
            return self._decode(data, None)
        head, blocks = parts
        kept = self._kept.get(head)
        if kept is None or len(kept[-1]) != len(blocks):
            return self._decode(head, blocks)
        target, others, classes, wants_final, layouts = kept
        inputs: dict[str, Array] = {}
        received = ReceivedMessage(target, Request(inputs, *others), classes=classes, wants_final=wants_final)
        try:
            for (name, dtype, shape, count), block in zip(layouts, blocks, strict=True):
                raw.check_size(name, target[0], dtype, count, len(block))
                if dtype is _BYTES and len(block) > INLINE_BYTES_MAX:
                    received.late.append(((name, dtype, shape, count), block))
                    inputs[name] = _READ_LATER
                else:
                    inputs[name] = raw.decode(block, name, target[0], dtype, shape, count)
        except Invalid as error:
            received.error = error.with_traceback(None)
        return received

    def _counted(self, data: bytes) -> ReceivedMessage | Invalid:
        """The message, if the budget has room for it."""
        received = self(data, is_counted=True)
        if not isinstance(received, ReceivedMessage) or received.error is not None:
            return received
        received.reservation = Reservation(self._budget)
        try:
            received.reservation.grow(len(data))
        except Overloaded as error:
            # Without its tensors, which are views of the data.
            bare = Request({}, id=received.request.id)
            return ReceivedMessage(received.target, bare, error=error.with_traceback(None))
        return received

    def _decode(self, head: bytes, blocks: list[memoryview] | None) -> ReceivedMessage | Invalid:
        try:
            self._bounds.check(head)
            message = ModelInferRequest.FromString(head)
        except DecodeError:
            return unreadable(ModelInferRequest)
        except Invalid as error:
            return error.with_traceback(None)
        try:
            received = decode_request(message, blocks, self._bytes_elements)
        except Invalid as error:
            target = message.model_name, message.model_version
            return ReceivedMessage(target, Request({}, id=message.id), error=error.with_traceback(None))
        is_same = not (message.id or received.portions or any(isinstance(one, Portion) for _, one in received.late))
        if blocks and len(head) <= _KEPT_BYTES_MAX and is_same:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            layouts = tuple(_layout(tensor) for tensor in message.inputs)
            others = _fields_of(received.request)
            self._kept[head] = received.target, others, received.classes, received.wants_final, layouts
        return received


def with_blocks(head: bytes, blocks: Sequence[BytesLike]) -> bytes:
    """The inverse of `split` for a request: a message whose raw tensors are these, copied once."""
    pieces: list[BytesLike] = [head]
    for block in blocks:
        size = memoryview(block).nbytes
        mark = bytearray((_RAW,))
        while size > 127:
            mark.append(size & 127 | 128)
            size >>= 7
        mark.append(size)
        pieces += (mark, block)
    return b"".join(pieces)


def unreadable(kind: Any) -> Invalid:
    """The error for bytes that are not a message of this class."""
    return Invalid(f"the request is not a {kind.DESCRIPTOR.full_name} message")


def split(data: bytes, raw_tag: int = _RAW) -> tuple[bytes, list[memoryview]] | None:
    """The part of a message before its raw tensors, and the raw tensors as views; None if there are none, or if other
    fields follow or separate them. `raw_tag`: of the field that has them.
    """
    at, end, head_end = 0, len(data), 0
    blocks: list[memoryview] = []
    whole = memoryview(data)
    try:
        for _ in range(_FIELDS_MAX):
            if at >= end:
                break
            tag, start = data[at], at
            if tag & 7 != _HAS_LENGTH or tag > 127 or (blocks and tag != raw_tag):
                return None
            size = data[at + 1]
            at += 2
            if size > 127:
                size &= 127
                shift = 7
                while (more := data[at]) > 127:
                    if shift > _SHIFT_MAX:
                        return None
                    size |= (more & 127) << shift
                    shift += 7
                    at += 1
                size |= more << shift
                at += 1
            if tag == raw_tag:
                if not blocks:
                    head_end = start
                blocks.append(whole[at : at + size])
            at += size
    except IndexError:
        return None
    return (data[:head_end], blocks) if blocks and at == end else None


# ---------------------------------------------------------------------------------------------- message


def decode_request(
    message: ModelInferRequest,
    blocks: Sequence[BytesLike] | None = None,
    bytes_elements: int = raw.BYTES_ELEMENTS_MAX,
) -> ReceivedMessage:
    """`blocks` are the raw tensors if they were split off the message; `bytes_elements`: the most of all BYTES inputs.
    Raises `Invalid`, naming the field.
    """
    decoded = ReceivedMessage((message.model_name, message.model_version), Request({}, id=message.id))
    for name in _REPEATED:
        if len(getattr(message, name)) > ITEMS_MAX:
            raise too_many(name, f"the request for model '{message.model_name}'")
    if message.parameters:
        _parameters(message, decoded)
    _inputs(message, decoded, message.raw_input_contents if blocks is None else blocks, bytes_elements)
    if message.outputs:
        _outputs(message, decoded)
    return decoded


def _layout(tensor: ModelInferRequest.InferInputTensor) -> InputLayout:
    dtype, shape = BY_WIRE[tensor.datatype], tuple(tensor.shape)
    return tensor.name, dtype, shape, raw.element_count(tensor.name, shape, dtype)


def _inputs(
    message: ModelInferRequest, decoded: ReceivedMessage, given_raw: Sequence[BytesLike], bytes_elements: int
) -> None:
    """Read each input from its source: the client's shared memory, else the raw tensors if the message has any, else
    its own contents.
    """
    model, late, given = message.model_name, decoded.late, decoded.request.inputs
    blocks, has_raw = iter(given_raw), bool(given_raw)
    strings = numbers = 0
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
        if dtype is _BYTES:
            strings += count
            raw.check_bytes_elements((strings,), model, bytes_elements)
        layout = name, dtype, shape, count
        portion = _portion(tensor.parameters, f"of input '{name}'") if tensor.parameters else None
        if portion is not None:
            given[name] = _from_shared_memory(tensor, layout, portion, late, model)
        elif has_raw:
            array = _from_raw(tensor, layout, blocks, late, model)
            if array is None:
                raise _uneven(message, given_raw, late)
            given[name] = array
        else:
            if dtype is not _BYTES:
                numbers += count
                if numbers > TYPED_ELEMENTS_MAX:
                    raise too_many_numbers(f"the request for model '{model}'")
            given[name] = _from_contents(tensor, layout, model)
    if has_raw and next(blocks, None) is not None:
        raise _uneven(message, given_raw, late)


def _from_shared_memory(
    tensor: ModelInferRequest.InferInputTensor,
    layout: InputLayout,
    portion: Portion,
    late: list[tuple[InputLayout, Portion | BytesLike]],
    model: str,
) -> Array:
    name, dtype, _, count = layout
    if tensor.HasField("contents"):
        raise Invalid(
            f"unexpected 'contents' or 'raw_input_contents' for input '{name}' for model '{model}': it lies in "
            "shared memory"
        )
    raw.check_size(name, model, dtype, count, portion.size)
    late.append((layout, portion))
    return _READ_LATER


def _from_raw(
    tensor: ModelInferRequest.InferInputTensor,
    layout: InputLayout,
    blocks: Iterator[BytesLike],
    late: list[tuple[InputLayout, Portion | BytesLike]],
    model: str,
) -> Array | None:
    """The array in the next raw tensor, None if there is none."""
    name, dtype, shape, count = layout
    if tensor.HasField("contents"):
        raise Invalid(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
        )
    block = next(blocks, None)
    if block is None:
        return None
    raw.check_size(name, model, dtype, count, len(block))
    if dtype is _BYTES and len(block) > INLINE_BYTES_MAX:
        late.append((layout, block))
        return _READ_LATER
    return raw.decode(block, name, model, dtype, shape, count)


def _uneven(
    message: ModelInferRequest, given_raw: Sequence[BytesLike], late: Sequence[tuple[InputLayout, Portion | BytesLike]]
) -> Invalid:
    """The error for more or fewer raw tensors than inputs that need one."""
    needed = len(message.inputs) - sum(isinstance(source, Portion) for _, source in late)
    return Invalid(
        f"expected one raw_input_contents for each input of model '{message.model_name}' that is not in shared memory, "
        f"got {len(given_raw)} for {needed}"
    )


def _from_contents(tensor: ModelInferRequest.InferInputTensor, layout: InputLayout, model: str) -> Array:
    """The array in the input's own `contents`."""
    name, dtype, shape, count = layout
    wanted = CONTENTS.get(dtype)
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
    if dtype is _BYTES:
        flat: Array = np.empty(count, np.object_)
        flat[:] = list(values)
    else:
        try:
            flat = np.fromiter(values, dtype.numpy, count)  # which checks the range of its numbers
        except OverflowError:
            raise Invalid(f"input '{name}' for model '{model}' holds a number outside {dtype}") from None
    return raw.shaped(flat, name, shape)


def _outputs(message: ModelInferRequest, decoded: ReceivedMessage) -> None:
    decoded.request.outputs = tuple(output.name for output in message.outputs)
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
            decoded.portions[name] = portion
        elif count:
            decoded.classes[name] = count


def _portion(parameters: Mapping[str, InferParameter], where: str) -> Portion | None:
    if "shared_memory_region" not in parameters:
        return None
    region = _value(parameters["shared_memory_region"], f"'shared_memory_region' {where}")
    if not isinstance(region, str):
        raise _wrong("shared_memory_region", "string", where)
    if "shared_memory_byte_size" not in parameters:
        raise Invalid(f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' {where}")
    offset = _number(parameters, "shared_memory_offset", where)
    return Portion(region, offset, _number(parameters, "shared_memory_byte_size", where))


def _parameters(message: ModelInferRequest, decoded: ReceivedMessage) -> None:
    request, given = decoded.request, message.parameters
    where = f"of the request for model '{message.model_name}'"
    request.priority = _number(given, "priority", where)
    request.timeout_us = _number(given, "timeout", where)
    request.sequence_start = _flag(given, "sequence_start", where)
    request.sequence_end = _flag(given, "sequence_end", where)
    decoded.wants_final = _flag(given, EMPTY_FINAL, where)
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
        custom[key] = _value(value, f"'{key}' {where}")
    request.parameters = custom


def _value(parameter: InferParameter, where: str) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise Invalid(f"the parameter {where} has no value")
    found: Parameter = getattr(parameter, choice)
    return found


def _number(parameters: Mapping[str, InferParameter], key: str, where: str) -> int:
    """The number, 0 if it is missing."""
    if key not in parameters:  # reading a missing key would add it
        return 0
    value: Any = _value(parameters[key], f"'{key}' {where}")
    if type(value) is not int or value < 0:
        raise _wrong(key, "int64_param or uint64_param, 0 or more", where)
    return value


def _flag(parameters: Mapping[str, InferParameter], key: str, where: str) -> bool:
    if key not in parameters:
        return False
    value = _value(parameters[key], f"'{key}' {where}")
    if type(value) is not bool:
        raise _wrong(key, "bool_param", where)
    return value


def _wrong(key: str, wanted: str, where: str) -> Invalid:
    return Invalid(f"invalid value type for '{key}' parameter, expected {wanted} ({where})")
