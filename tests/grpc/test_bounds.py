"""Limits of messages: HTTP's, checked before protobuf makes objects, and while grpcio decompresses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Invalid, TooLarge
from flowserve.grpc.bounds import CHECKED_BYTES_MIN, FIELDS_MAX, TYPED_ELEMENTS_MAX, MessageBounds
from flowserve.grpc.decode import MessageReader, ReceivedMessage
from flowserve.grpc.service_pb2 import ModelInferRequest, RepositoryModelLoadRequest
from flowserve.memory import raw
from flowserve.runtime.protocol import ITEMS_MAX
from flowserve.testing.serve import Served

INFER = "/inference.GRPCInferenceService/ModelInfer"
MEBIBYTE = 1 << 20
STRINGS_MAX = 5000
BOUNDS = MessageBounds(ModelInferRequest.DESCRIPTOR, STRINGS_MAX)


def request(model: str = "echo") -> ModelInferRequest:
    made = ModelInferRequest(model_name=model, raw_input_contents=[bytes(4)])
    made.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    return made


def with_many(what: str, count: int) -> ModelInferRequest:
    made = request()
    for number in range(count):
        if what == "parameters":
            made.parameters[str(number)].int64_param = number
        elif what == "inputs":
            made.inputs.add(name=str(number), datatype="FP32", shape=[1])
        elif what == "outputs":
            made.outputs.add(name=str(number))
        else:
            made.inputs[0].parameters[str(number)].int64_param = number
    return made


def sent(channel: grpc.Channel, data: bytes, compression: Any = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(INFER)(data, timeout=60, compression=compression)
    error: Any = raised.value
    return error.code(), error.details()


def peak_bytes(served: Served) -> int:
    (line,) = [
        line for line in Path(f"/proc/{served.pid}/status").read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(line.split()[1]) * 1024


@pytest.mark.fault("W4")
def test_a_compressed_message_is_refused_while_it_is_expanded(served: Served) -> None:
    expanded = 160 * MEBIBYTE
    before = peak_bytes(served)
    with grpc.insecure_channel(served.grpc_address) as channel:
        code, text = sent(channel, bytes(expanded), grpc.Compression.Gzip)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in text
    assert peak_bytes(served) - before < 110 * MEBIBYTE


@pytest.mark.fault("W4")
def test_a_message_over_64_mib_is_refused_by_default(served: Served) -> None:
    with grpc.insecure_channel(served.grpc_address) as channel:
        code, _ = sent(channel, bytes(64 * MEBIBYTE + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.fault("W4")
@pytest.mark.parametrize("what", ["inputs", "outputs", "parameters", "parameters of an input"])
def test_more_than_1024_entries_are_refused_before_objects_are_made(served: Served, what: str) -> None:
    with grpc.insecure_channel(served.grpc_address) as channel:
        for count in (2000, 30_000):
            code, text = sent(channel, with_many(what, count).SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"more than {ITEMS_MAX} {what.split()[0]}" in text


@pytest.mark.fault("W4")
def test_more_bytes_elements_than_allowed_are_refused_before_they_are_made() -> None:
    reader = MessageReader(bytes_elements=STRINGS_MAX)

    def read(count: int, shape: int, *, is_typed: bool = False) -> ReceivedMessage | Invalid:
        made = ModelInferRequest(model_name="text")
        made.inputs.add(name="IN", datatype="BYTES", shape=[shape])
        if is_typed:
            made.inputs[0].contents.bytes_contents.extend([b""] * count)
        else:
            made.raw_input_contents.append(bytes(4 * count))
        return reader(made.SerializeToString())

    for is_typed in (False, True):
        allowed = read(STRINGS_MAX, STRINGS_MAX, is_typed=is_typed)
        assert isinstance(allowed, ReceivedMessage)
        assert allowed.request.inputs["IN"].size == STRINGS_MAX
        for count in (STRINGS_MAX + 1, 4_000_000):
            began = time.process_time()
            refused = read(count, count, is_typed=is_typed)
            made_s = time.process_time() - began
            error = refused if isinstance(refused, Invalid) else refused.error
            assert isinstance(error, TooLarge)
            assert str(STRINGS_MAX) in str(error)
            if not is_typed:  # making the message takes longer than refusing it
                assert made_s < 0.2
    too_few = read(10, STRINGS_MAX)
    assert isinstance(too_few, ReceivedMessage)
    assert "got 10 at most" in str(too_few.error)


@pytest.mark.fault("W4")
@pytest.mark.parametrize(
    "field", ["fp32_contents", "fp64_contents", "int_contents", "int64_contents", "uint64_contents", "bool_contents"]
)
def test_more_numbers_in_typed_contents_than_allowed_are_refused(field: str) -> None:
    made = ModelInferRequest(model_name="echo")
    for count in (TYPED_ELEMENTS_MAX // 2, TYPED_ELEMENTS_MAX // 2):
        getattr(made.inputs.add(name="IN").contents, field).extend([1] * count)
    BOUNDS.check(made.SerializeToString())
    getattr(made.inputs[0].contents, field).extend([1] * (FIELDS_MAX + 1))
    with pytest.raises(TooLarge, match="raw_input_contents has no such limit"):
        BOUNDS.check(made.SerializeToString())


@pytest.mark.fault("W2")
def test_large_bytes_inputs_are_left_to_a_thread() -> None:
    encoded = raw.encode_bytes(np.array([b"x" * 300] * 50_000, np.object_))
    made = ModelInferRequest(model_name="echo", raw_input_contents=[encoded, bytes(4)])
    made.inputs.add(name="IN", datatype="BYTES", shape=[50_000])
    made.inputs.add(name="ONE", datatype="BYTES", shape=[1])
    reader = MessageReader()
    for _ in range(2):  # the second time, the part before the raw tensors is cached
        received = reader(made.SerializeToString())
        assert isinstance(received, ReceivedMessage)
        ((layout, data),) = received.late
        assert (layout[0], layout[3]) == ("IN", 50_000)
        assert data == encoded
        assert received.request.inputs["ONE"].tolist() == [b""]


@pytest.mark.fault("W4")
def test_the_dims_of_a_shape_are_no_numbers_in_typed_contents() -> None:
    def read(count: int) -> ReceivedMessage | Invalid:
        made = ModelInferRequest(model_name="echo")
        made.inputs.add(name="IN", datatype="FP32", shape=[1, count]).contents.fp32_contents.extend([1.0] * count)
        return MessageReader()(made.SerializeToString())

    allowed, refused = read(TYPED_ELEMENTS_MAX), read(TYPED_ELEMENTS_MAX + 1)
    assert isinstance(allowed, ReceivedMessage)
    assert allowed.request.inputs["IN"].shape == (1, TYPED_ELEMENTS_MAX)
    assert isinstance(refused, ReceivedMessage)
    assert isinstance(refused.error, TooLarge)


@pytest.mark.fault("W4")
@pytest.mark.parametrize("part", [b"\x2a\x00", b"\x22\x00", b"\x32\x00", b"\x0a\x00", b"\x90\x03\x01", b"\x3a\x00"])
def test_a_message_of_millions_of_parts_is_refused_at_once(part: bytes) -> None:
    """Empty inputs, parameters, outputs; names that replace each other; unknown numbers; empty raw tensors."""
    data = part * 4_000_000
    began = time.process_time()
    with pytest.raises(Invalid):
        BOUNDS.check(data)
    refused = MessageReader()(data)
    assert isinstance(refused, Invalid)
    assert time.process_time() - began < 0.5


def test_calls_other_than_inference_are_bounded_too() -> None:
    made = RepositoryModelLoadRequest(model_name="m")
    for number in range(ITEMS_MAX):
        made.parameters[str(number)].string_param = "x" * 20
    bounds = MessageBounds(RepositoryModelLoadRequest.DESCRIPTOR)
    bounds.check(made.SerializeToString())
    made.parameters["more"].string_param = "x"
    with pytest.raises(Invalid, match=f"more than {ITEMS_MAX} parameters"):
        bounds.check(made.SerializeToString())


@given(st.binary(max_size=300))
def test_malformed_bytes_are_left_to_protobuf(data: bytes) -> None:
    BOUNDS.check(bytes(CHECKED_BYTES_MIN) + data)  # raises nothing: so few parts of any kind are allowed


def test_a_large_message_of_few_parts_is_accepted() -> None:
    made = request()
    made.raw_input_contents[0] = bytes(MEBIBYTE)
    BOUNDS.check(made.SerializeToString())
    assert FIELDS_MAX > 10 * ITEMS_MAX
