"""A `Response` becomes a body: JSON, followed by binary tensors if the client requested some.

Decides the order and shape of the JSON, and that tensors are passed on as their own buffers, not joined. Numbers are
written shortest-exact; non-finite numbers are written as the bare NaN, Infinity and -Infinity that Python's and
Triton's readers accept. Decides also which responses take too long for the event loop, and how those are written in
pieces on a thread. Of HTTP, only the headers that describe a body are known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from flowserve.errors import Invalid
from flowserve.http.api.request_json import AnswerForm
from flowserve.http.server.response import HeaderTuple
from flowserve.memory import raw
from flowserve.memory.raw import INLINE_ELEMENTS_MAX, INLINE_OUTPUT_BYTES_MAX
from flowserve.runtime.protocol import ElementLimits
from flowserve.runtime.threads import Pause
from flowserve.runtime.workers.parameters import STATELESS
from flowserve.values import Array, DType, Parameter, Response

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY
_KEPT_MAX: Final = 256
_PIECE_ELEMENTS: Final = 1 << 13
_PIECE_BYTES: Final = 1 << 18  # of BYTES elements, on average

JSON_HEADERS: Final[HeaderTuple] = ((b"content-type", b"application/json"),)
HEADER_LENGTH: Final = b"inference-header-content-length"
_BINARY: Final = (b"content-type", b"application/octet-stream")


class Encoder:
    """Responses to bodies. Keeps the JSON of binary responses by its content: responses mostly differ in their tensors
    only.
    """

    def __init__(self, limits: ElementLimits | None = None) -> None:
        self._limits = limits or ElementLimits()
        self._kept: dict[tuple[Any, ...], tuple[bytes, HeaderTuple]] = {}

    def encode(self, response: Response, form: AnswerForm) -> tuple[list[Any], HeaderTuple] | None:
        """The body as buffers, and the headers that describe it; None if this takes long, which is work for
        `encode_large` on a thread.

        Raises `Invalid` if the tensor cannot be sent in the requested form, `Internal` if the model's output is not a
        valid tensor.
        """
        if response.parameters and response.parameters is not STATELESS:
            return self._encode(response, form)
        key: list[Any] = [response.model, response.version, response.id, response.parameters is STATELESS]
        blocks: list[Any] = []
        listed, default = form.listed, form.default_is_binary
        for name, array in response.outputs.items():
            if array.dtype.hasobject or not listed.get(name, default):
                return self._encode(response, form)
            key += (name, array.dtype, array.shape)
            blocks.append(array.tobytes() if array.nbytes <= raw.COPIED_BYTES_MAX else raw.block(array))
        kept = self._kept.get(tuple(key))
        if kept is None:
            (text, *_), headers = _encode(response, form)
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            if not response.id and blocks:  # ids are new every time
                self._kept[tuple(key)] = text, headers
        else:
            text, headers = kept
        return [text, *blocks], headers

    def _encode(self, response: Response, form: AnswerForm) -> tuple[list[Any], HeaderTuple] | None:
        """As `encode`, for a response that is not all binary numbers."""
        elements = nbytes = 0
        for array in response.outputs.values():
            elements += array.size
            if array.dtype.hasobject and elements <= INLINE_ELEMENTS_MAX:
                nbytes += raw.bytes_in(array)
        if (elements > INLINE_ELEMENTS_MAX or form.windows) and self._takes_long(response, form):
            return None
        return None if nbytes > INLINE_OUTPUT_BYTES_MAX else _encode(response, form)

    def _takes_long(self, response: Response, form: AnswerForm) -> bool:
        """Whether to encode it on a thread, by the number of elements and what is stored in the client's memory. Raises
        `Invalid` for more elements than are sent as JSON.
        """
        strings = in_json = stored = 0
        for name, array in response.outputs.items():
            if name in form.windows:
                stored += array.nbytes
            elif not form.listed.get(name, form.default_is_binary):
                in_json += array.size
            if array.dtype.hasobject:
                strings += array.size
        check_json_elements(in_json, response.model, self._limits.json_elements)
        return max(strings, in_json) > INLINE_ELEMENTS_MAX or stored > INLINE_OUTPUT_BYTES_MAX


def _encode(response: Response, form: AnswerForm) -> tuple[list[Any], HeaderTuple]:
    document, blocks = _document(response, form, json_data)
    text = orjson.dumps(document, option=_NUMPY)
    if not blocks:
        return [text], JSON_HEADERS
    return [text, *blocks], (_BINARY, (HEADER_LENGTH, b"%d" % len(text)))


def check_json_elements(count: int, model: str, limit: int) -> None:
    """Raises `Invalid` if outputs have too many elements for JSON."""
    if count > limit:
        raise Invalid(
            f"the outputs of model '{model}' have {count} elements, at most {limit} are sent as JSON here "
            '(--http-max-json-elements); ask for them with an inference request (…/infer) and "parameters": '
            '{"binary_data": true}'
        )


def encode_large(response: Response, form: AnswerForm, pause: Pause) -> tuple[list[Any], HeaderTuple]:
    """As `Encoder.encode`, in steps: `pause` is called between them. JSON data is in pieces."""

    def in_pieces(name: str, array: Array, dtype: DType) -> list[bytes]:
        return json_pieces(name, array, dtype, pause)

    document, blocks = _document(response, form, in_pieces, pause)
    outputs = document.pop("outputs")
    parts = [orjson.dumps(document, option=_NUMPY)[:-1], b',"outputs":[']
    for output in outputs:
        data = output.pop("data", None)
        parts += [b"," if len(parts) > 2 else b"", orjson.dumps(output)]
        if data is not None:
            parts[-1] = parts[-1][:-1] + b',"data":['
            parts += [*data, b"]}"]
    parts.append(b"]}")
    if not blocks:
        return parts, JSON_HEADERS
    return [*parts, *blocks], (_BINARY, (HEADER_LENGTH, b"%d" % sum(map(len, parts))))


def json_pieces(name: str, array: Array, dtype: DType, pause: Pause) -> list[bytes]:
    """The JSON of flat `data` without its brackets, in pieces. Raises as `json_data` does."""
    flat = array.reshape(-1)  # does not decode `EncodedBytes`: each piece is decoded alone
    step = _PIECE_ELEMENTS
    if dtype is DType.BYTES:
        step = min(max(_PIECE_BYTES * flat.size // (raw.bytes_in(flat) or 1), 1), _PIECE_ELEMENTS)
    pieces: list[bytes] = []
    for start in range(0, flat.size, step):
        data = json_data(name, flat[start : start + step], dtype)
        piece = orjson.dumps(data, option=_NUMPY)
        pieces.append(piece[1:-1] if start == 0 else b"," + piece[1:-1])
        pause()
    return pieces


def _document(
    response: Response,
    form: AnswerForm,
    data_of: Callable[[str, Array, DType], Any],
    pause: Pause | None = None,
) -> tuple[dict[str, Any], list[Any]]:
    """The response's JSON, "outputs" last, and the binary data that follows it. `data_of` writes the data in the
    JSON. `pause`: on a thread.
    """
    outputs: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for name, array in response.outputs.items():
        dtype = raw.datatype_of(array, name, response.model)
        entry: dict[str, Any] = {"name": name, "datatype": dtype.wire, "shape": array.shape}
        if name in form.windows:
            form.windows[name].store(name, raw.encode(array, dtype, pause))
        elif form.listed.get(name, form.default_is_binary):
            block = raw.encode(array, dtype, pause)
            entry["parameters"] = {"binary_data_size": len(block)}
            blocks.append(block)
        else:
            entry["data"] = data_of(name, array, dtype)
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model
    document["model_version"] = str(response.version)
    if response.parameters:
        document["parameters"] = json_parameters(response.parameters)
    document["outputs"] = outputs
    return document, blocks


def json_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """What orjson writes as parameters."""
    said: dict[str, Any] = {}
    for name, value in parameters.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        said[name] = value if is_finite else orjson.Fragment(_bare_tokens(np.array([value]))[0])
    return said


def json_data(name: str, array: Array, dtype: DType) -> Any:
    """What orjson writes as the flat `data`."""
    if dtype is DType.BYTES:
        try:
            return [one.decode() if isinstance(one, bytes) else str(one) for one in array.ravel().tolist()]
        except UnicodeDecodeError:
            raise Invalid(
                f"output '{name}' holds bytes that are not UTF-8 and cannot be sent as JSON; ask for it with "
                '"parameters": {"binary_data": true}'
            ) from None
    if dtype in (DType.FP16, DType.BF16):
        raise Invalid(
            f"sending {dtype} data via JSON is not supported. Please use the binary data format for output {name}"
        )
    flat = array.ravel()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        between = orjson.dumps(flat, option=_NUMPY).split(b"null")  # which orjson writes for non-finite numbers
        tokens = _bare_tokens(flat[~np.isfinite(flat)])
        return orjson.Fragment(b"".join(chain.from_iterable(zip(between, [*tokens, b""], strict=True))))
    return flat


def _bare_tokens(strange: Array) -> list[bytes]:
    tokens: list[bytes] = np.where(np.isnan(strange), b"NaN", np.where(strange > 0, b"Infinity", b"-Infinity")).tolist()
    return tokens
