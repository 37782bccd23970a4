"""A `Response` becomes a `ModelInferResponse`.

Decided here: that outputs travel raw, in the order of the response, and how a stream's answers say that they are the
last. Called on grpcio's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flowserve.errors import FlowserveError
from flowserve.grpc.service_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse
from flowserve.grpc.status import text_of
from flowserve.memory import raw
from flowserve.memory.client_memory import Window
from flowserve.values import Parameter, Response

FINAL: Final = "triton_final_response"
_INT64_MAX: Final = 2**63 - 1
_NO_WINDOWS: Final[Mapping[str, Window]] = {}


def encode(response: Response, windows: Mapping[str, Window] = _NO_WINDOWS) -> ModelInferResponse:
    """`windows`: where in the client's memory outputs go.

    Raises `Internal` where the model made what no tensor can be, `Invalid` where a window is too small.
    """
    message = ModelInferResponse(model_name=response.model, model_version=str(response.version), id=response.id)
    for name, array in response.outputs.items():
        dtype = raw.datatype_of(array, name, response.model)
        message.outputs.add(name=name, datatype=dtype.wire, shape=array.shape)
        data = raw.encode(array, dtype)
        if name in windows:
            windows[name].store(name, data)
        else:
            message.raw_output_contents.append(bytes(data))
    for key, value in response.parameters.items():
        _set(message.parameters[key], value)
    return message


def stream_answer(message: ModelInferResponse, *, is_final: bool) -> ModelStreamInferResponse:
    """One answer of a stream."""
    message.parameters[FINAL].bool_param = is_final
    return ModelStreamInferResponse(infer_response=message)


def stream_error(error: FlowserveError, request_id: str) -> ModelStreamInferResponse:
    """The last answer to a request that failed. The stream goes on."""
    answer = stream_answer(ModelInferResponse(id=request_id), is_final=True)
    answer.error_message = text_of(error)
    return answer


def _set(parameter: InferParameter, value: Parameter) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value > _INT64_MAX:
        parameter.uint64_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value
