"""ModelStreamInfer: order, many answers, what marks the last, errors that end nothing, clients who leave."""

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


def told(answer: ModelStreamInferResponse) -> tuple[str, list[float], bool]:
    response = answer.infer_response
    values = np.frombuffer(b"".join(response.raw_output_contents), np.float32).tolist()
    return response.id, values, response.parameters[FINAL].bool_param


def test_answers_of_models_that_answer_once_come_in_the_order_of_their_requests(stream: Open) -> None:
    requests = [request("sleeps", [0.3], "slow"), *(request("echo", [n], str(n)) for n in range(20))]
    answers = [told(answer) for answer in stream(*requests)]
    assert answers[0] == ("slow", [np.float32(0.3)], True)
    assert answers[1:] == [(str(n), [n], True) for n in range(20)]


def test_many_answers_come_as_they_are_made_and_nothing_marks_their_end_unless_asked(stream: Open) -> None:
    answers = [told(answer) for answer in stream(request("repeats", [3], "a"))]
    assert answers == [("a", [n], False) for n in range(3)]


def test_the_end_of_many_answers_is_an_empty_one_where_it_is_asked_for(stream: Open) -> None:
    wanted = {"triton_enable_empty_final_response": True}
    answers = list(stream(request("repeats", [2], "a", **wanted), request("repeats", [0], "b", **wanted)))
    of_a = [told(answer) for answer in answers if answer.infer_response.id == "a"]
    assert of_a == [("a", [0], False), ("a", [1], False), ("a", [], True)]
    (last,) = [answer for answer in answers if answer.infer_response.id == "b"]
    assert told(last) == ("b", [], True)
    assert (last.infer_response.model_name, last.infer_response.model_version) == ("repeats", "1")


def test_the_statistics_count_answers_by_their_place(stream: Open, client: triton.InferenceServerClient) -> None:
    def counts(place: str) -> tuple[int, int]:
        (row,) = client.get_inference_statistics("repeats").model_stats
        found = row.response_stats[place]
        return found.success.count, found.empty_response.count

    before = counts("0"), counts("2")
    [*stream(request("repeats", [2]))]
    after = counts("0"), counts("2")
    assert [(now[0] - then[0], now[1] - then[1]) for now, then in zip(after, before, strict=True)] == [(1, 0), (0, 1)]


def test_more_answers_than_may_be_under_way_all_come(stream: Open) -> None:
    assert [told(answer)[1] for answer in stream(request("repeats", [200]))] == [[n] for n in range(200)]


def test_an_error_is_an_answer_and_the_stream_goes_on(stream: Open) -> None:
    broken = request("echo", [1], "broken")
    broken.inputs[0].datatype = "FP31"
    answers = list(
        stream(
            request("nobody", [1], "who"),
            broken,
            request("repeats", [2, 1], "many"),
            request("fails", [1]),
            request("echo", [5], "ok"),
        )
    )
    errors = {answer.infer_response.id: answer for answer in answers if answer.error_message}
    assert errors["who"].error_message.startswith("Request for unknown model: 'nobody' is not found")
    assert errors["broken"].error_message.startswith("invalid datatype 'FP31'")
    assert "enough" in errors["many"].error_message
    assert "no, thank you" in errors[""].error_message
    assert all(told(answer)[2] for answer in errors.values())
    right = [told(answer) for answer in answers if not answer.error_message]
    assert [one for one in right if one[0] == "many"] == [("many", [0], False), ("many", [1], False)]
    assert ("ok", [5], True) in right


def test_a_client_that_wants_it_gets_errors_as_the_streams_status(stream: Open) -> None:
    answers = stream(request("echo", [1]), request("nobody", [1]), metadata=[("triton_grpc_error", "true")])
    assert told(next(answers))[1] == [1]
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert ended.value.code() == grpc.StatusCode.NOT_FOUND
    assert ended.value.details().startswith("Request for unknown model: 'nobody'")


def test_what_is_no_message_ends_the_stream_and_is_the_clients_fault(stream: Open, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        list(stream(b"\xff\xff"))
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as ended:
        infer(b"\xff\xff", timeout=60)
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not a inference.ModelInferRequest message" in ended.value.details()


def test_tritons_client_streams(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    given = triton.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([2], np.float32))
    client.async_stream_infer("repeats", [given], request_id="r", enable_empty_final_response=True)
    client.async_stream_infer("nobody", [given])
    got = [answers.get(timeout=30) for _ in range(4)]
    assert [str(error) for _, error in got if error is not None] == ["Request for unknown model: 'nobody' is not found"]
    results = [result.get_response() for result, error in got if error is None]
    assert [response.parameters[FINAL].bool_param for response in results] == [False, False, True]
    client.stop_stream()
