"""Bytes of messages become requests: keeping repeated parts of messages changes no result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc.decode import MessageReader, ReceivedMessage, decode_request, split
from flowserve.grpc.encode import MessageEncoder, encode_response
from flowserve.grpc.service_pb2 import ModelInferRequest
from flowserve.memory import raw
from flowserve.runtime.workers.parameters import STATELESS
from flowserve.values import Response

KINDS = {"FP32": 4, "INT64": 8, "BOOL": 1, "BYTES": 0, "nonsense": 1}
NAMES = st.sampled_from(["A", "B", "ü"])


@st.composite
def messages(draw: st.DrawFn) -> ModelInferRequest:
    made = ModelInferRequest(model_name=draw(NAMES), model_version=draw(st.sampled_from(["", "3"])))
    made.id = draw(st.sampled_from(["", "", "mine"]))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from([*KINDS]))
        shape = draw(st.lists(st.integers(-1, 3), max_size=2))
        tensor = made.inputs.add(name=draw(NAMES), datatype=kind, shape=shape)
        count = int(np.prod(shape)) if shape else 1
        if draw(st.integers(0, 9)) == 0:
            tensor.contents.fp32_contents.extend([0.5] * max(count, 0))
        elif draw(st.integers(0, 9)) == 0:
            tensor.parameters["shared_memory_region"].string_param = "r"
            tensor.parameters["shared_memory_byte_size"].int64_param = 4
        elif kind == "BYTES":
            made.raw_input_contents.append(raw.encode_bytes(np.array([b"x"] * max(count, 0), object)))
        else:
            size = max(count, 0) * KINDS[kind] + draw(st.sampled_from([0, 0, 0, 1]))
            made.raw_input_contents.append(draw(st.binary(min_size=size, max_size=size)))
    for _ in range(draw(st.integers(0, 2))):
        made.outputs.add(name=draw(NAMES))
    if draw(st.booleans()):
        made.parameters[draw(st.sampled_from(["priority", "mine", "triton_x"]))].int64_param = draw(st.integers(-1, 2))
    return made


def contents(read: ReceivedMessage | Invalid) -> Any:
    """All observable contents of a message."""
    if isinstance(read, Invalid):
        return str(read)
    request = read.request
    if read.error is not None:
        return read.target, request.id, str(read.error)
    inputs = {name: (one.dtype, one.shape, one.tolist()) for name, one in request.inputs.items()}
    others = [getattr(request, name) for name in request.__slots__ if name not in ("inputs", "stamp")]
    return read.target, inputs, others, read.late, read.classes, read.portions, read.wants_final


def decoded_by_protobuf(data: bytes) -> Any:
    try:
        message = ModelInferRequest.FromString(data)
    except DecodeError:
        return contents(MessageReader()(b"\xff"))
    try:
        return contents(decode_request(message))
    except FlowserveError as error:
        return (message.model_name, message.model_version), message.id, str(error)


@given(st.lists(messages(), min_size=1, max_size=4))
def test_repeated_messages_decode_as_by_protobuf(made: list[ModelInferRequest]) -> None:
    reader = MessageReader()
    for message in [*made, *made]:
        data = message.SerializeToString()
        assert repr(contents(reader(data))) == repr(decoded_by_protobuf(data))  # NaN does not equal itself


@given(messages(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3), st.integers(0, 400))
def test_damaged_messages_decode_as_by_protobuf(
    message: ModelInferRequest, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(message.SerializeToString())
    reader = MessageReader()
    reader(bytes(data))
    for place, value in changes:
        if place < len(data):
            data[place] = value
    broken = bytes(data[:length])
    assert repr(contents(reader(broken))) == repr(decoded_by_protobuf(broken))


def test_tensors_are_views_of_the_message() -> None:
    made = ModelInferRequest(model_name="m")
    made.inputs.add(name="A", datatype="UINT8", shape=[5000])
    made.raw_input_contents.append(bytes(5000))
    data = made.SerializeToString()
    reader = MessageReader()
    for _ in range(2):
        read = reader(data)
        assert isinstance(read, ReceivedMessage)
        array = read.request.inputs["A"]
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))
        assert not array.flags.writeable


def test_a_tensor_of_the_wrong_size_after_a_kept_part_is_refused() -> None:
    made = ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
    made.inputs.add(name="A", datatype="UINT8", shape=[4])
    reader = MessageReader()
    assert isinstance(reader(made.SerializeToString()), ReceivedMessage)
    made.raw_input_contents[0] = bytes(3)
    read = reader(made.SerializeToString())
    assert isinstance(read, ReceivedMessage)
    assert "input byte size mismatch" in str(read.error)
    assert contents(read) == decoded_by_protobuf(made.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a" + b"\xff" * 100_000,  # a size of 700,000 bits
        b"\x3a\x00" * 100_000,  # more tensors than the limit
        b"\x3a",
        b"\x3a\x05abc",
        b"",
    ],
)
def test_messages_with_another_layout_are_left_to_protobuf(data: bytes) -> None:
    assert split(data) is None
    assert isinstance(MessageReader()(data), Invalid | ReceivedMessage)


def test_responses_are_encoded_equally_with_and_without_kept_parts() -> None:
    encoder = MessageEncoder()
    arrays = [np.arange(n, dtype=kind) for n in (0, 3, 2000) for kind in (np.float32, np.int64)]
    for _ in range(2):
        for version in (1, 2):
            for array in arrays:
                for more in ({}, {"id": "i"}, {"parameters": STATELESS}, {"parameters": {"a": 1}}):
                    for is_final in (None, True, False):
                        answer = Response("m", version, {"OUT": array}, **more)
                        parts = encoder.encode(answer, {}, is_final=is_final)
                        assert parts is not None
                        assert b"".join(parts) == b"".join(encode_response(answer, is_final=is_final))
