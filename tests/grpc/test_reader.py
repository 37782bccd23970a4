"""Bytes become requests: what is kept between messages changes nothing that anybody can see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc.decode import decode
from flowserve.grpc.encode import Encoder, encode
from flowserve.grpc.reader import Incoming, Reader, split
from flowserve.grpc.service_pb2 import ModelInferRequest
from flowserve.memory import bytes_codec
from flowserve.runtime.parameters import STATELESS
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
            made.raw_input_contents.append(bytes_codec.encode(np.array([b"x"] * max(count, 0), object)))
        else:
            size = max(count, 0) * KINDS[kind] + draw(st.sampled_from([0, 0, 0, 1]))
            made.raw_input_contents.append(draw(st.binary(min_size=size, max_size=size)))
    for _ in range(draw(st.integers(0, 2))):
        made.outputs.add(name=draw(NAMES))
    if draw(st.booleans()):
        made.parameters[draw(st.sampled_from(["priority", "mine", "triton_x"]))].int64_param = draw(st.integers(-1, 2))
    return made


def told(read: Incoming | Invalid) -> Any:
    """Everything that somebody could see of a message."""
    if isinstance(read, Invalid):
        return str(read)
    if read.wrong is not None:
        return read.target, read.asked.request.id, str(read.wrong)
    asked, request = read.asked, read.asked.request
    inputs = {name: (one.dtype, one.shape, one.tolist()) for name, one in request.inputs.items()}
    others = [getattr(request, name) for name in request.__slots__ if name not in ("inputs", "stamp")]
    return read.target, inputs, others, asked.shared, asked.classes, asked.portions, asked.wants_final


def plainly(data: bytes) -> Any:
    try:
        message = ModelInferRequest.FromString(data)
    except DecodeError:
        return told(Reader()(b"\xff"))
    target = message.model_name, message.model_version
    try:
        return told(Incoming(target, decode(message)))
    except FlowserveError as error:
        return target, message.id, str(error)


@given(st.lists(messages(), min_size=1, max_size=4))
def test_a_message_means_what_it_means_however_often_one_like_it_came(made: list[ModelInferRequest]) -> None:
    reader = Reader()
    for message in [*made, *made]:
        data = message.SerializeToString()
        assert repr(told(reader(data))) == repr(plainly(data))  # NaN is not itself


@given(messages(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3), st.integers(0, 400))
def test_broken_messages_are_what_protobuf_says_they_are(
    message: ModelInferRequest, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(message.SerializeToString())
    reader = Reader()
    reader(bytes(data))
    for place, value in changes:
        if place < len(data):
            data[place] = value
    broken = bytes(data[:length])
    assert repr(told(reader(broken))) == repr(plainly(broken))


def test_tensors_are_views_of_the_message() -> None:
    made = ModelInferRequest(model_name="m")
    made.inputs.add(name="A", datatype="UINT8", shape=[5000])
    made.raw_input_contents.append(bytes(5000))
    data = made.SerializeToString()
    reader = Reader()
    for _ in range(2):
        read = reader(data)
        assert isinstance(read, Incoming)
        array = read.asked.request.inputs["A"]
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a" + b"\xff" * 100_000,  # a size of seventy thousand bits
        b"\x3a\x00" * 100_000,  # more tensors than anybody has
        b"\x3a",
        b"\x3a\x05abc",
        b"",
    ],
)
def test_what_is_laid_out_otherwise_is_left_to_protobuf(data: bytes) -> None:
    assert split(data) is None
    assert isinstance(Reader()(data), Invalid | Incoming)


def test_answers_are_the_same_whether_their_beginning_was_kept_or_not() -> None:
    encoder = Encoder()
    arrays = [np.arange(n, dtype=kind) for n in (0, 3, 2000) for kind in (np.float32, np.int64)]
    for _ in range(2):
        for version in (1, 2):
            for array in arrays:
                for more in ({}, {"id": "i"}, {"parameters": STATELESS}, {"parameters": {"a": 1}}):
                    for is_final in (None, True, False):
                        answer = Response("m", version, {"OUT": array}, **more)
                        assert b"".join(encoder.encode(answer, {}, is_final=is_final)) == b"".join(
                            encode(answer, is_final=is_final)
                        )
