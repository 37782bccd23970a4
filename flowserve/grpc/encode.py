"""`Response`s and errors to the bytes of messages, and errors to gRPC statuses.

Decides that outputs are sent raw, in the response's order; how the last response in a stream is marked; and the status
of each kind of failure. Outputs are copied once, into the message: protobuf writes all other fields, and the outputs
follow in protobuf's wire format. The details of a status stay below the size of trailers that clients accept (8 KiB,
with three bytes for each character that is not printable ASCII). Callers: `server`, `inference`, `stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from grpc import StatusCode

from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FlowserveError,
    Forbidden,
    Internal,
    Invalid,
    ModelUnknown,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
)
from flowserve.grpc.service_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse
from flowserve.memory import raw
from flowserve.memory.client_memory import RegionWindow
from flowserve.runtime.threads import INLINE_BYTES_MAX, Pause
from flowserve.runtime.workers.parameters import STATELESS
from flowserve.values import Parameter, Response

STATUS: Final[Mapping[str, StatusCode]] = {
    "invalid": StatusCode.INVALID_ARGUMENT,
    "already_exists": StatusCode.ALREADY_EXISTS,
    "too_large": StatusCode.RESOURCE_EXHAUSTED,
    "forbidden": StatusCode.PERMISSION_DENIED,
    "not_found": StatusCode.NOT_FOUND,
    "unavailable": StatusCode.UNAVAILABLE,
    "deadline_exceeded": StatusCode.DEADLINE_EXCEEDED,
    "unsupported": StatusCode.UNIMPLEMENTED,
    "cancelled": StatusCode.CANCELLED,
    "internal": StatusCode.INTERNAL,
    "unknown": StatusCode.UNKNOWN,
}
# The classes of errors by their status, for errors of other servers.
ERRORS: Final[Mapping[StatusCode, type[FlowserveError]]] = {
    STATUS[one.kind]: one
    for one in (
        Invalid,
        AlreadyExists,
        TooLarge,
        Forbidden,
        NotFound,
        Unavailable,
        DeadlineExceeded,
        Unsupported,
        Cancelled,
        Internal,
        ModelUnknown,
    )
}
_DETAILS_BYTES_MAX: Final = 6000
FINAL: Final = "triton_final_response"
_INT64_MAX: Final = 2**63 - 1
_KEPT_MAX: Final = 256
_NO_WINDOWS: Final[Mapping[str, RegionWindow]] = {}

# A message in pieces. Each memoryview is of bytes.
Parts = list[bytes | memoryview]


def _varint(number: int) -> bytes:
    """Seven bits per byte, lowest first; the highest bit is set if more bytes follow."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


# The tags of fields with a length.
_RAW: Final = _varint(ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2)
_RESPONSE: Final = _varint(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2)


def encode_response(
    response: Response,
    windows: Mapping[str, RegionWindow] = _NO_WINDOWS,
    pause: Pause | None = None,
    *,
    is_final: bool | None = None,
) -> Parts:
    """`windows`: the outputs' places in the client's shared memory. `pause`: on a thread. `is_final`: in a stream,
    whether the response is the request's last.

    Raises `Internal` if the model returned an array that is not a tensor, `Invalid` if a window is too small.
    """
    message = ModelInferResponse(model_name=response.model, model_version=str(response.version), id=response.id)
    blocks: Parts = []
    for name, array in response.outputs.items():
        dtype = raw.datatype_of(array, name, response.model)
        message.outputs.add(name=name, datatype=dtype.wire, shape=array.shape)
        data = raw.encode(array, dtype, pause)
        if name in windows:
            windows[name].store(name, data)
        else:
            blocks += (_RAW, _varint(len(data)), data)
    for key, value in response.parameters.items():
        _set(message.parameters[key], value)
    if is_final is not None:
        message.parameters[FINAL].bool_param = is_final
    return [message.SerializeToString(), *blocks]


class MessageEncoder:
    """Encodes responses, and keeps the part before their outputs: most responses of a model differ in the outputs
    only.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], bytes | memoryview] = {}

    def encode(self, response: Response, windows: Mapping[str, RegionWindow], *, is_final: bool | None) -> Parts | None:
        """As `encode_response`; None if this takes long, which is work for `encode_response` on a thread."""
        for array in response.outputs.values():
            if array.dtype.hasobject and raw.is_long(array):
                return None
        stateless = response.parameters is STATELESS
        if response.id or windows or (response.parameters and not stateless):  # ids differ each time
            if windows and sum(array.nbytes for array in response.outputs.values()) > INLINE_BYTES_MAX:
                return None
            return encode_response(response, windows, is_final=is_final)
        key: list[Any] = [response.model, response.version, stateless, is_final]
        blocks: Parts = []
        for name, array in response.outputs.items():
            if array.dtype.hasobject:
                return encode_response(response, windows, is_final=is_final)
            data = raw.block(array)
            key += (name, array.dtype, array.shape)
            blocks += (_RAW, _varint(len(data)), data)
        kept = self._kept.get(tuple(key))
        if kept is None:
            kept, *blocks = encode_response(response, windows, is_final=is_final)
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            self._kept[tuple(key)] = kept
        return [kept, *blocks]


def empty_final_response(model: str, request_id: str) -> Parts:
    """A response without outputs that marks the end of a request's responses. As on Triton, it names no version, unlike
    any response of a model.
    """
    message = ModelInferResponse(model_name=model, id=request_id)
    message.parameters[FINAL].bool_param = True
    return [message.SerializeToString()]


def stream_message(response: Parts) -> bytes:
    """One response as a `ModelStreamInferResponse`."""
    return b"".join((_RESPONSE, _varint(sum(map(len, response))), *response))


def stream_error(error: FlowserveError, request_id: str) -> bytes:
    """The final response to a failed request. The stream continues."""
    message = ModelStreamInferResponse(error_message=_text_of(error))
    message.infer_response.id = request_id
    message.infer_response.parameters[FINAL].bool_param = True
    return message.SerializeToString()


def details_of(error: FlowserveError) -> str:
    """The error's text for a status, shortened if necessary."""
    text = _text_of(error)
    room = _DETAILS_BYTES_MAX
    for index, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if room < 0:
            return f"{text[:index]} ..."
    return text


def _text_of(error: FlowserveError) -> str:
    """The error as valid Unicode: it may contain a name that is not."""
    return str(error).encode("utf-8", "backslashreplace").decode()


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
