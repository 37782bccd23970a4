"""ModelStreamInfer: order of responses, decoupled models, final responses, errors."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from flowserve.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from flowserve.testing.serve import Served

pytestmark = pytest.mark.server

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
FINAL = "triton_final_response"


def request(model: str, values: list[float], request_id: str = "", **parameters: bool) -> ModelInferRequest:
    made = ModelInferRequest(model_name=model, id=request_id)
    array = np.array([values] if model == "echo" else values, np.float32)
    made.inputs.add(name="IN", datatype="FP32", shape=array.shape)
    made.raw_input_contents.append(array.tobytes())
    for key, value in parameters.items():
        made.parameters[key].bool_param = value
    return made


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc_address) as made:
        yield made


Open = Callable[..., Any]


@pytest.fixture
def stream(channel: grpc.Channel) -> Open:
    call = channel.stream_stream(
        STREAM, request_serializer=lambda message: message, response_deserializer=ModelStreamInferResponse.FromString
    )

    def ask(*requests: ModelInferRequest | bytes, **named: Any) -> Any:
        return call(iter([r if isinstance(r, bytes) else r.SerializeToString() for r in requests]), timeout=60, **named)

    return ask


def contents(answer: ModelStreamInferResponse) -> tuple[str, list[float], bool]:
    response = answer.infer_response
    values = np.frombuffer(b"".join(response.raw_output_contents), np.float32).tolist()
    return response.id, values, response.parameters[FINAL].bool_param


def test_single_responses_are_sent_in_request_order(stream: Open) -> None:
    requests = [request("sleeps", [0.3], "slow"), *(request("echo", [n], str(n)) for n in range(20))]
    answers = [contents(answer) for answer in stream(*requests)]
    assert answers[0] == ("slow", [np.float32(0.3)], True)
    assert answers[1:] == [(str(n), [n], True) for n in range(20)]


def test_decoupled_responses_are_sent_as_produced_without_an_end_marker_by_default(stream: Open) -> None:
    answers = [contents(answer) for answer in stream(request("repeats", [3], "a"))]
    assert answers == [("a", [n], False) for n in range(3)]


def test_an_empty_final_response_is_sent_on_request(stream: Open) -> None:
    wanted = {"triton_enable_empty_final_response": True}
    answers = list(stream(request("repeats", [2], "a", **wanted), request("repeats", [0], "b", **wanted)))
    of_a = [contents(answer) for answer in answers if answer.infer_response.id == "a"]
    assert of_a == [("a", [0], False), ("a", [1], False), ("a", [], True)]
    (last,) = [answer for answer in answers if answer.infer_response.id == "b"]
    assert contents(last) == ("b", [], True)
    assert (last.infer_response.model_name, last.infer_response.model_version) == ("repeats", "")


def test_statistics_count_responses_by_position(stream: Open, client: triton.InferenceServerClient) -> None:
    def counts(place: str) -> tuple[int, int]:
        (row,) = client.get_inference_statistics("repeats").model_stats
        found = row.response_stats[place]
        return found.success.count, found.empty_response.count

    before = counts("0"), counts("2")
    [*stream(request("repeats", [2]))]
    after = counts("0"), counts("2")
    assert [(now[0] - then[0], now[1] - then[1]) for now, then in zip(after, before, strict=True)] == [(1, 0), (0, 1)]


def test_more_responses_than_the_unsent_limit_all_arrive(stream: Open) -> None:
    assert [contents(answer)[1] for answer in stream(request("repeats", [200]))] == [[n] for n in range(200)]


def test_a_failed_request_gets_an_error_response_and_the_stream_continues(stream: Open) -> None:
    broken = request("echo", [1], "broken")
    broken.inputs[0].datatype = "FP31"
    answers = list(
        stream(
            request("absent", [1], "absent"),
            broken,
            request("repeats", [2, 1], "many"),
            request("fails", [1]),
            request("echo", [5], "ok"),
        )
    )
    errors = {answer.infer_response.id: answer for answer in answers if answer.error_message}
    assert errors["absent"].error_message.startswith("Request for unknown model: 'absent' is not found")
    assert errors["broken"].error_message.startswith("invalid datatype 'FP31'")
    assert "enough" in errors["many"].error_message
    assert "no, thank you" in errors[""].error_message
    assert all(contents(answer)[2] for answer in errors.values())
    right = [contents(answer) for answer in answers if not answer.error_message]
    assert [one for one in right if one[0] == "many"] == [("many", [0], False), ("many", [1], False)]
    assert ("ok", [5], True) in right


def test_the_error_header_makes_the_first_error_the_streams_status(stream: Open) -> None:
    answers = stream(request("echo", [1]), request("absent", [1]), metadata=[("triton_grpc_error", "true")])
    assert contents(next(answers))[1] == [1]
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert ended.value.code() == grpc.StatusCode.NOT_FOUND
    assert ended.value.details().startswith("Request for unknown model: 'absent'")


def test_unreadable_bytes_end_the_stream_with_invalid_argument(stream: Open, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        list(stream(b"\xff\xff"))
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as ended:
        infer(b"\xff\xff", timeout=60)
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not a inference.ModelInferRequest message" in ended.value.details()


def test_tritons_client_can_stream(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    given = triton.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([2], np.float32))
    client.async_stream_infer("repeats", [given], request_id="r", enable_empty_final_response=True)
    client.async_stream_infer("absent", [given])
    got = [answers.get(timeout=30) for _ in range(4)]
    assert [str(error) for _, error in got if error is not None] == ["Request for unknown model: 'absent' is not found"]
    results = [result.get_response() for result, error in got if error is None]
    assert [response.parameters[FINAL].bool_param for response in results] == [False, False, True]
    client.stop_stream()
