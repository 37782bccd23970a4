"""ModelInferRequest messages become requests: the valid values of each field, and the errors for invalid ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from flowserve.errors import Invalid, ModelFailed
from flowserve.grpc.decode import decode_request
from flowserve.grpc.encode import details_of, encode_response
from flowserve.grpc.service_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from flowserve.memory import raw
from flowserve.memory.client_memory import Portion
from flowserve.values import DType, Response

CONTENTS: dict[str, tuple[str, Any]] = {
    "BOOL": ("bool_contents", [True, False, True]),
    **{kind: ("int_contents", [-1, 2, 3]) for kind in ("INT8", "INT16", "INT32")},
    "INT64": ("int64_contents", [-(2**63), 0, 2**63 - 1]),
    **{kind: ("uint_contents", [0, 2, 255]) for kind in ("UINT8", "UINT16", "UINT32")},
    "UINT64": ("uint64_contents", [0, 1, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, -1.0, 3.0]),
    "FP64": ("fp64_contents", [0.1, -1.0, 1e300]),
    "BYTES": ("bytes_contents", [b"", b"a\0b", "ü".encode()]),
}


def message(datatype: str = "FP32", shape: tuple[int, ...] = (2,), raw: bytes | None = b"\0" * 8) -> ModelInferRequest:
    made = ModelInferRequest(model_name="m")
    made.inputs.add(name="IN", datatype=datatype, shape=shape)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def refusal(made: ModelInferRequest) -> str:
    with pytest.raises(Invalid) as refused:
        decode_request(made)
    return str(refused.value)


@pytest.mark.parametrize("kind", CONTENTS)
def test_typed_contents_become_an_array(kind: str) -> None:
    field, values = CONTENTS[kind]
    made = message(kind, (3,), None)
    contents: dict[str, Any] = {field: values}
    made.inputs[0].contents.CopyFrom(InferTensorContents(**contents))
    array = decode_request(made).request.inputs["IN"]
    assert array.dtype == DType[kind].numpy
    assert array.tolist() == values


def test_raw_contents_are_views_of_the_message_and_keep_their_order() -> None:
    made = message(raw=np.array([1, 2], np.float32).tobytes())
    made.inputs.add(name="TEXT", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(raw.encode_bytes(np.array([b"x"], object)))
    inputs = decode_request(made).request.inputs
    assert [*inputs] == ["IN", "TEXT"]
    assert inputs["IN"].tolist() == [1, 2]
    assert not inputs["IN"].flags.writeable
    assert inputs["TEXT"].tolist() == [b"x"]


def test_an_empty_tensor_needs_no_contents() -> None:
    assert decode_request(message(shape=(0, 3), raw=None)).request.inputs["IN"].shape == (0, 3)


def test_contents_that_do_not_fit_the_shape_are_refused() -> None:
    assert refusal(message(raw=b"\0" * 7)) == "input byte size mismatch for input 'IN' for model 'm'. Expected 8, got 7"
    assert "got 1 for 2" in refusal(_second(message()))
    assert "element count" in refusal(message(shape=(2**62, 4)))
    assert "no dimension is negative" in refusal(message(shape=(-1,)))
    short = message("INT64", raw=None)
    short.inputs[0].contents.int64_contents.append(1)
    assert refusal(short).startswith("unexpected number of elements 1 in 'int64_contents' of input 'IN'")


def _second(made: ModelInferRequest) -> ModelInferRequest:
    made.inputs.add(name="IN2", datatype="FP32", shape=[2])
    return made


def test_contents_and_raw_contents_do_not_mix() -> None:
    made = message()
    made.inputs[0].contents.fp32_contents.extend([1, 2])
    assert refusal(made).startswith("contents field must not be specified when using raw_input_contents for 'IN'")


def test_contents_of_another_type_are_refused() -> None:
    made = message("INT32", raw=None)
    made.inputs[0].contents.fp32_contents.extend([1, 2])
    assert "so 'int_contents' has it, not 'fp32_contents'" in refusal(made)
    made = message("FP16", raw=None)
    made.inputs[0].contents.fp32_contents.extend([1, 2])
    assert "must be in raw_input_contents" in refusal(made)
    made = message("INT8", (1,), None)
    made.inputs[0].contents.int_contents.append(300)
    assert "outside INT8" in refusal(made)


def test_names_and_types_are_checked() -> None:
    assert refusal(message("FP31")).startswith("invalid datatype 'FP31' for input 'IN'")
    made = message()
    made.inputs.add(name="IN", datatype="FP32", shape=[2])
    assert refusal(made) == "input 'IN' already exists in request"
    made = message()
    made.outputs.add(name="OUT")
    made.outputs.add(name="OUT")
    assert refusal(made) == "output 'OUT' already exists in request"


def test_parameters_have_the_same_meaning_as_over_http() -> None:
    made = message()
    for key, kind, value in [
        ("sequence_id", "string_param", "s"),
        ("sequence_start", "bool_param", True),
        ("sequence_end", "bool_param", True),
        ("priority", "uint64_param", 3),
        ("timeout", "int64_param", 4),
        ("mine", "double_param", 0.5),
        ("triton_enable_empty_final_response", "bool_param", True),
    ]:
        setattr(made.parameters[key], kind, value)
    decoded = decode_request(made)
    request = decoded.request
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == ("s", True, True)
    assert (request.priority, request.timeout_us, request.parameters) == (3, 4, {"mine": 0.5})
    assert decoded.wants_final
    made.parameters["sequence_id"].uint64_param = 2**64 - 1
    assert decode_request(made).request.sequence_id == 2**64 - 1


@pytest.mark.parametrize(
    ("key", "kind", "value", "text"),
    [
        ("priority", "string_param", "1", "invalid value type for 'priority' parameter, expected int64_param"),
        ("timeout", "int64_param", -1, "invalid value type for 'timeout' parameter, expected int64_param"),
        ("sequence_start", "int64_param", 1, "invalid value type for 'sequence_start' parameter, expected bool_param"),
        ("triton_x", "int64_param", 1, "parameter keys starting with 'triton_' are reserved for Triton usage"),
    ],
)
def test_parameters_of_another_type_are_refused(key: str, kind: str, value: object, text: str) -> None:
    made = message()
    setattr(made.parameters[key], kind, value)
    assert refusal(made).startswith(text)


def test_a_parameter_without_a_value_is_refused() -> None:
    made = message()
    made.parameters["mine"].SetInParent()
    assert "has no value" in refusal(made)


def test_shared_memory_inputs_are_left_for_later() -> None:
    made = message(raw=None)
    made.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert "'shared_memory_byte_size' must be specified" in refusal(made)
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    ((_, portion),) = decode_request(made).late
    assert portion == Portion("r", 0, 8)
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 9
    assert "input byte size mismatch" in refusal(made)


def test_an_output_without_a_datatype_is_an_error_of_the_model() -> None:
    with pytest.raises(Exception, match="which no datatype is"):
        encode_response(Response("m", 1, {"OUT": np.zeros(1, np.complex64)}))


def test_response_parameters_keep_their_types() -> None:
    given: dict[str, str | int | float | bool] = {"a": True, "b": 2**64 - 1, "c": -1, "d": 0.5, "e": "x"}
    reply = ModelInferResponse.FromString(b"".join(encode_response(Response("m", 1, {}, parameters=given)))).parameters
    assert {key: getattr(value, value.WhichOneof("parameter_choice") or "") for key, value in reply.items()} == given
    assert reply["a"].HasField("bool_param")


@pytest.mark.parametrize("size", [0, 1, 31, 32, 4096, 300_000])
def test_protobuf_reads_outputs_of_any_size(size: int) -> None:
    arrays = {"A": np.arange(size, dtype=np.float32), "B": np.array([b"x" * size], object)}
    reply = ModelInferResponse.FromString(b"".join(encode_response(Response("m", 3, arrays, id="i"))))
    assert (reply.model_name, reply.model_version, reply.id) == ("m", "3", "i")
    assert [(one.name, one.datatype, [*one.shape]) for one in reply.outputs] == [
        ("A", "FP32", [size]),
        ("B", "BYTES", [1]),
    ]
    assert [*reply.raw_output_contents] == [arrays["A"].tobytes(), raw.encode_bytes(arrays["B"])]


def test_status_details_stay_below_the_clients_limit() -> None:
    assert details_of(Invalid("short, with ü")) == "short, with ü"
    for character in ("x", "ü", "\n", "%", "\udcff"):
        cut = details_of(ModelFailed(character * 20_000))
        assert len(cut.encode()) < 8000
        assert cut.endswith(" ...")


@pytest.mark.fault("J10", "W4")
def test_1024_inputs_and_outputs_are_accepted_and_more_are_refused_at_once() -> None:
    made = message()
    for number in range(1024):
        made.outputs.add(name=f"OUT{number}")
    shared = ModelInferRequest(model_name="m")
    for number in range(1024):
        tensor = shared.inputs.add(name=f"IN{number}", datatype="FP32", shape=[1])
        tensor.parameters["shared_memory_region"].string_param = "region"
        tensor.parameters["shared_memory_byte_size"].int64_param = 4
    assert len(decode_request(made).request.outputs or ()) == 1024
    assert len(decode_request(shared).late) == 1024
    made.outputs[1000].name = "OUT7"
    shared.inputs[1000].name = "IN7"
    assert refusal(made) == "output 'OUT7' already exists in request"
    assert refusal(shared) == "input 'IN7' already exists in request"
    for number in range(20_000):
        made.outputs.add(name=f"MORE{number}")
        shared.inputs.add(name=f"MORE{number}", datatype="FP32", shape=[1])
    began = time.thread_time()
    assert refusal(made) == "the request for model 'm' has more than 1024 outputs, which is the most that is accepted"
    assert refusal(shared) == "the request for model 'm' has more than 1024 inputs, which is the most that is accepted"
    assert time.thread_time() - began < 0.1


@pytest.mark.fault("S8")
def test_too_many_dimensions_are_refused_quickly() -> None:
    made = message(shape=(2**62,) * 60_000 + (0,))
    began = time.thread_time()
    assert refusal(made) == "the shape of input 'IN' cannot be used: it has 60001 dimensions, and 64 are the most"
    assert time.thread_time() - began < 1
    assert decode_request(message(shape=(1,) * 64, raw=bytes(4))).request.inputs["IN"].ndim == 64
    assert "cannot be used" in refusal(message(shape=(1,) * 65, raw=bytes(4)))
