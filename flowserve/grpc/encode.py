"""A `Response` becomes a `ModelInferResponse`, as the bytes that travel.

Decided here: that outputs travel raw, in the order of the response, and how a stream's answers say that they are the
last. Outputs are copied once, into the message: protobuf writes everything but them, and they are laid behind it, where
its readers take them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowserve.errors import FlowserveError
from flowserve.grpc.service_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse
from flowserve.grpc.status import text_of
from flowserve.memory import raw
from flowserve.memory.client_memory import Window
from flowserve.runtime.parameters import STATELESS
from flowserve.values import Parameter, Response

FINAL: Final = "triton_final_response"
_INT64_MAX: Final = 2**63 - 1
_KEPT_MAX: Final = 256
_NO_WINDOWS: Final[Mapping[str, Window]] = {}

# A message in pieces. Each memoryview is of bytes.
Parts = list[bytes | memoryview]


def encode(response: Response, windows: Mapping[str, Window] = _NO_WINDOWS, *, is_final: bool | None = None) -> Parts:
    """`windows`: where in the client's memory outputs go. `is_final`: of a stream's answers, whether it is the last.

    Raises `Internal` where the model made what no tensor can be, `Invalid` where a window is too small.
    """
    message = ModelInferResponse(model_name=response.model, model_version=str(response.version), id=response.id)
    blocks: Parts = []
    for name, array in response.outputs.items():
        dtype = raw.datatype_of(array, name, response.model)
        message.outputs.add(name=name, datatype=dtype.wire, shape=array.shape)
        data = raw.encode(array, dtype)
        if name in windows:
            windows[name].store(name, data)
        else:
            blocks += (_RAW, _varint(len(data)), data)
    for key, value in response.parameters.items():
        _set(message.parameters[key], value)
    if is_final is not None:
        message.parameters[FINAL].bool_param = is_final
    return [message.SerializeToString(), *blocks]


class Encoder:
    """Responses to messages. Keeps what stands before the tensors by what it says: answers mostly differ in these."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], bytes | memoryview] = {}

    def encode(self, response: Response, windows: Mapping[str, Window], *, is_final: bool | None) -> Parts:
        """As `encode`."""
        stateless = response.parameters is STATELESS
        if response.id or windows or (response.parameters and not stateless):  # ids are new every time
            return encode(response, windows, is_final=is_final)
        key: list[Any] = [response.model, response.version, stateless, is_final]
        blocks: Parts = []
        for name, array in response.outputs.items():
            if array.dtype.hasobject:
                return encode(response, windows, is_final=is_final)
            data = raw.block(array)
            key += (name, array.dtype, array.shape)
            blocks += (_RAW, _varint(len(data)), data)
        kept = self._kept.get(tuple(key))
        if kept is None:
            kept, *blocks = encode(response, windows, is_final=is_final)
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            self._kept[tuple(key)] = kept
        return [kept, *blocks]


def nothing_more(model: str, version: str, request_id: str) -> Parts:
    """The answer that only says that there are no more."""
    message = ModelInferResponse(model_name=model, model_version=version, id=request_id)
    message.parameters[FINAL].bool_param = True
    return [message.SerializeToString()]


def in_stream(answer: Parts) -> bytes:
    """One answer as a `ModelStreamInferResponse`."""
    return b"".join((_ANSWER, _varint(sum(map(len, answer))), *answer))


def stream_error(error: FlowserveError, request_id: str) -> bytes:
    """The last answer to a request that failed. The stream goes on."""
    answer = ModelStreamInferResponse(error_message=text_of(error))
    answer.infer_response.id = request_id
    answer.infer_response.parameters[FINAL].bool_param = True
    return answer.SerializeToString()


def _tag(number: int) -> bytes:
    """What stands in front of a field that has a length."""
    return _varint(number << 3 | 2)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


_RAW: Final = _tag(ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER)
_ANSWER: Final = _tag(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER)


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
