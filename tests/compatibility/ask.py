"""Send one request to one server, over HTTP or gRPC, and record the answer.

Decides what of an answer is recorded, the same for all protocols, and how long a request may take. Does not know which
server it is.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.compatibility.requests import Array, Protocol, Question
from tests.compatibility.servers import Addresses

ANSWER_S_MAX = 10.0
JSON_TYPES = {"BOOL": bool, "BYTES": object, "FP32": np.float32, "FP64": np.float64}
NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    data_type: str
    array: Array


@dataclass(slots=True)
class Response:
    """One response: its outputs, and the other fields of it."""

    outputs: list[Output] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """`status` is that of HTTP, or the name of gRPC's; several responses if the model is decoupled."""

    status: str
    error: str = ""
    responses: list[Response] = field(default_factory=list)

    @property
    def is_success(self) -> bool:
        return self.status in ("200", "OK")


class Client:
    """Asks one server. Close it at the end."""

    def __init__(self, addresses: Addresses) -> None:
        self._http = httpx.Client(base_url=addresses.http, timeout=ANSWER_S_MAX, verify=False)
        self._grpc_address = addresses.grpc

    def close(self) -> None:
        self._http.close()

    def is_live(self) -> bool:
        try:
            return self._http.get("/v2/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a GET."""
        reply = self._http.get(path)
        return reply.status_code, _json(reply.content)

    def index(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._http.post("/v2/repository/index").json()
        return found

    def ask(self, question: Question) -> Answer:
        try:
            match question.protocol:
                case Protocol.JSON:
                    return self._ask_json(question)
                case Protocol.BINARY:
                    return self._ask_binary(question)
                case Protocol.GENERATE | Protocol.GENERATE_STREAM:
                    return self._ask_generate(question)
                case Protocol.GRPC | Protocol.STREAM:
                    return self._ask_grpc(question)
        except httpx.TransportError as error:
            return Answer(NO_ANSWER, type(error).__name__)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return Answer("unreadable", repr(error))

    def _ask_json(self, question: Question) -> Answer:
        inputs = [
            {"name": one.name, "datatype": one.data_type, "shape": list(one.array.shape), "data": _listed(one.array)}
            for one in question.tensors
        ]
        body: dict[str, Any] = {"id": "q", "inputs": inputs}
        if question.parameters:
            body["parameters"] = dict(question.parameters)
        if question.classes:
            body["outputs"] = [{"name": one, "parameters": {"classification": 2}} for one in question.classes]
        reply = self._http.post(f"/v2/models/{question.model}/infer", json=body)
        if reply.status_code != 200:
            return _refused(reply)
        told = _json(reply.content)
        outputs = []
        for one in told.pop("outputs", ()):
            dtype = JSON_TYPES.get(one["datatype"], one["datatype"].lower())
            outputs.append(Output(one["name"], one["datatype"], np.array(one["data"], dtype).reshape(one["shape"])))
        return Answer("200", responses=[Response(outputs, told)])

    def _ask_binary(self, question: Question) -> Answer:
        inputs = []
        for one in question.tensors:
            tensor = tritonclient.http.InferInput(one.name, list(one.array.shape), one.data_type)
            inputs.append(tensor.set_data_from_numpy(one.array))
        body, length = tritonclient.http.InferenceServerClient.generate_request_body(
            inputs, request_id="q", **question.parameters
        )
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        reply = self._http.post(f"/v2/models/{question.model}/infer", content=bytes(body), headers=headers)
        if reply.status_code != 200:
            return _refused(reply)
        sent = reply.headers.get("Inference-Header-Content-Length")
        result = tritonclient.http.InferResult.from_response_body(reply.content, header_length=sent and int(sent))
        told = dict(result.get_response())
        outputs = [
            Output(one["name"], one["datatype"], _reshaped(result.as_numpy(one["name"]), one["shape"]))
            for one in told.pop("outputs", ())
        ]
        return Answer("200", responses=[Response(outputs, told)])

    def _ask_generate(self, question: Question) -> Answer:
        kind = "generate_stream" if question.protocol is Protocol.GENERATE_STREAM else "generate"
        body = {one.name: _listed(one.array)[0] for one in question.tensors} | dict(question.parameters)
        reply = self._http.post(f"/v2/models/{question.model}/{kind}", json=body)
        if reply.status_code != 200:
            return _refused(reply)
        if kind == "generate":
            return Answer("200", responses=[Response(fields=reply.json())])
        events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
        return Answer("200", responses=[Response(fields=_json(one.encode())) for one in events])

    def _ask_grpc(self, question: Question) -> Answer:
        client = tritonclient.grpc.InferenceServerClient(self._grpc_address)
        inputs = []
        for one in question.tensors:
            tensor = tritonclient.grpc.InferInput(one.name, list(one.array.shape), one.data_type)
            inputs.append(tensor.set_data_from_numpy(one.array))
        try:
            if question.protocol is Protocol.GRPC:
                result = client.infer(
                    question.model, inputs, request_id="q", client_timeout=ANSWER_S_MAX, **question.parameters
                )
                return Answer("OK", responses=[_of_grpc(result)])
            return self._stream(client, question, inputs)
        except InferenceServerException as error:
            status = str(error.status() or "")
            if "DEADLINE_EXCEEDED" in status or ("UNAVAILABLE" in status and not self.is_live()):
                return Answer(NO_ANSWER, error.message())
            return Answer(status, error.message())
        finally:
            client.close()

    def _stream(self, client: Any, question: Question, inputs: list[Any]) -> Answer:
        arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=ANSWER_S_MAX)
        client.async_stream_infer(
            question.model, inputs, request_id="q", enable_empty_final_response=True, **question.parameters
        )
        answer = Answer("OK")
        try:
            while True:
                result, error = arrived.get(timeout=ANSWER_S_MAX + 1)
                if error is not None and "DEADLINE_EXCEEDED" in str(error.status()):
                    return Answer(NO_ANSWER, "no final response", answer.responses)
                if error is not None:
                    return Answer(str(error.status() or "error in the stream"), error.message(), answer.responses)
                answer.responses.append(_of_grpc(result))
                final = result.get_response().parameters.get("triton_final_response")
                if final is not None and final.bool_param:
                    return answer
        except queue.Empty:
            return Answer(NO_ANSWER, "no final response", answer.responses)
        finally:
            client.stop_stream(cancel_requests=True)


def _of_grpc(result: Any) -> Response:
    message = result.get_response()
    outputs = [
        Output(one.name, one.datatype, _reshaped(result.as_numpy(one.name), one.shape)) for one in message.outputs
    ]
    told = MessageToDict(message, preserving_proto_field_name=True)
    return Response(
        outputs, {key: value for key, value in told.items() if key not in ("outputs", "raw_output_contents")}
    )


def _reshaped(array: Array | None, shape: Iterable[int]) -> Array:
    """The client's array of an output; an empty one of its shape where the client has none."""
    return np.empty([0] + [int(n) for n in shape]) if array is None else array


def _refused(reply: httpx.Response) -> Answer:
    told = _json(reply.content)
    error = told.get("error", "") if isinstance(told, dict) else str(told)
    return Answer(str(reply.status_code), str(error))


def _json(content: bytes) -> Any:
    try:
        return json.loads(content.decode(errors="backslashreplace"))
    except ValueError:
        return content.decode(errors="replace")


def _listed(array: Array) -> list[Any]:
    flat = array.ravel().tolist()
    return [one.decode() if isinstance(one, bytes) else one for one in flat]
