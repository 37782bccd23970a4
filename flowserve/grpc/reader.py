"""The bytes of a `ModelInferRequest` become a request: tensors are not copied, and the rest is mostly not read.

Decided here: where in the bytes raw tensors lie, and that what stands before them is decoded once where it repeats:
clients ask for the same tensors again and again, and only what these hold is new. Messages that are laid out otherwise
(tensors in typed fields, fields in an unusual order) go the whole way through protobuf. What a message may say is
decode.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from flowserve.errors import Invalid
from flowserve.grpc.decode import Asked, decode
from flowserve.grpc.service_pb2 import ModelInferRequest
from flowserve.memory import raw
from flowserve.values import BY_WIRE, Array, DType, Request

KEPT_MAX: Final = 256
_HEAD_BYTES_MAX: Final = 4096
_BLOCKS_MAX: Final = 1024
_SHIFT_MAX: Final = 56  # of a size's bytes, seven bits each
_HAS_LENGTH: Final = 2  # protobuf's wire type of strings, bytes and messages
_RAW: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _HAS_LENGTH
UNREADABLE: Final = f"the request is not a {ModelInferRequest.DESCRIPTOR.full_name} message"


@dataclass(slots=True)
class Incoming:
    """What came: for which model and version, and what is asked, or why that cannot be."""

    target: tuple[str, str]
    asked: Asked
    wrong: Invalid | None = None

    def right(self) -> Asked:
        """What is asked. Raises Invalid."""
        if self.wrong is not None:
            raise self.wrong
        return self.asked


@dataclass(frozen=True, slots=True)
class _Kept:
    """What stood before raw tensors of these names, types, shapes and counts."""

    target: tuple[str, str]
    asked: Asked
    inputs: tuple[tuple[str, DType, tuple[int, ...], int], ...]


class Reader:
    """Reads messages, and keeps what repeats between them."""

    def __init__(self) -> None:
        self._kept: dict[bytes, _Kept] = {}

    def __call__(self, data: bytes) -> Incoming | Invalid:
        """The request; the error where the bytes are no such message at all."""
        parts = split(data)
        if parts is None:
            return self._decoded(data, None)
        head, blocks = parts
        kept = self._kept.get(head)
        if kept is None or len(kept.inputs) != len(blocks):
            return self._decoded(head, blocks)
        return _again(kept, blocks)

    def _decoded(self, head: bytes, blocks: list[memoryview] | None) -> Incoming | Invalid:
        try:
            message = ModelInferRequest.FromString(head)
        except DecodeError:
            return Invalid(UNREADABLE)
        target = message.model_name, message.model_version
        try:
            asked = decode(message, blocks)
        except Invalid as wrong:
            return Incoming(target, Asked(Request({}, id=message.id)), wrong.with_traceback(None))
        if blocks and len(head) <= _HEAD_BYTES_MAX and not (message.id or asked.shared or asked.portions):
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[head] = _Kept(target, _without_tensors(asked), tuple(_inputs(message)))
        return Incoming(target, asked)


def split(data: bytes) -> tuple[bytes, list[memoryview]] | None:
    """What stands before the raw tensors, and these, as views; None where something else stands behind or among them,
    or where there are none.
    """
    place, end, head_end = 0, len(data), 0
    blocks: list[memoryview] = []
    whole = memoryview(data)
    try:
        while place < end:
            tag, start = data[place], place
            if tag & 7 != _HAS_LENGTH or tag > 127 or (blocks and tag != _RAW) or len(blocks) > _BLOCKS_MAX:
                return None
            size = data[place + 1]
            place += 2
            if size > 127:
                size &= 127
                shift = 7
                while (more := data[place]) > 127:
                    if shift > _SHIFT_MAX:
                        return None
                    size |= (more & 127) << shift
                    shift += 7
                    place += 1
                size |= more << shift
                place += 1
            if tag == _RAW:
                if not blocks:
                    head_end = start
                blocks.append(whole[place : place + size])
            place += size
    except IndexError:
        return None
    return (data[:head_end], blocks) if blocks and place == end else None


def _again(kept: _Kept, blocks: list[memoryview]) -> Incoming:
    model, said = kept.target[0], kept.asked.request
    inputs: dict[str, Array] = {}
    request = Request(
        inputs,
        said.outputs,
        "",
        said.priority,
        said.timeout_us,
        said.sequence_id,
        said.sequence_start,
        said.sequence_end,
        said.parameters,
    )
    asked = Asked(request, classes=kept.asked.classes, wants_final=kept.asked.wants_final)
    try:
        for (name, dtype, shape, count), block in zip(kept.inputs, blocks, strict=True):
            raw.check_size(name, model, dtype, count, len(block))
            inputs[name] = raw.decode(block, name, model, dtype, shape, count)
    except Invalid as wrong:
        return Incoming(kept.target, asked, wrong.with_traceback(None))
    return Incoming(kept.target, asked)


def _without_tensors(asked: Asked) -> Asked:
    said = asked.request
    request = Request(
        {},
        said.outputs,
        priority=said.priority,
        timeout_us=said.timeout_us,
        sequence_id=said.sequence_id,
        sequence_start=said.sequence_start,
        sequence_end=said.sequence_end,
        parameters=said.parameters,
    )
    return Asked(request, classes=asked.classes, wants_final=asked.wants_final)


def _inputs(message: ModelInferRequest) -> list[tuple[str, DType, tuple[int, ...], int]]:
    found = []
    for tensor in message.inputs:
        dtype, shape = BY_WIRE[tensor.datatype], tuple(tensor.shape)
        found.append((tensor.name, dtype, shape, raw.element_count(tensor.name, shape, dtype)))
    return found
