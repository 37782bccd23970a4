"""A `Response` becomes a body: JSON, followed by binary tensors if the client requested some.

Decides the order and shape of the JSON, and that tensors are passed on as their own buffers, not joined.
Numbers are written shortest-exact; non-finite numbers are written as the bare NaN, Infinity and -Infinity that
Python's and Triton's readers accept. This file knows of HTTP only the headers that describe a body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from flowserve.errors import Invalid
from flowserve.http.api.request_json import AnswerForm
from flowserve.http.server.connection import HeaderTuple
from flowserve.memory import raw
from flowserve.runtime.workers.parameters import STATELESS
from flowserve.values import Array, DType, Parameter, Response

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY
_KEPT_MAX: Final = 256

JSON_HEADERS: Final[HeaderTuple] = ((b"content-type", b"application/json"),)
HEADER_LENGTH: Final = b"inference-header-content-length"
_BINARY: Final = (b"content-type", b"application/octet-stream")


class Encoder:
    """Responses to bodies. Keeps the JSON of binary responses by its content: responses mostly differ in their tensors
    only.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[bytes, HeaderTuple]] = {}

    def encode(self, response: Response, form: AnswerForm) -> tuple[list[Any], HeaderTuple]:
        """The body as buffers, and the headers that describe it.

        Raises `Invalid` if the tensor cannot be sent in the requested form, `Internal` if the model's output is not a
        valid tensor.
        """
        if response.parameters and response.parameters is not STATELESS:
            return _encode(response, form)
        key: list[Any] = [response.model, response.version, response.id, response.parameters is STATELESS]
        blocks: list[Any] = []
        listed, default = form.listed, form.default_is_binary
        for name, array in response.outputs.items():
            if array.dtype.hasobject or not listed.get(name, default):
                return _encode(response, form)
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


def _encode(response: Response, form: AnswerForm) -> tuple[list[Any], HeaderTuple]:
    outputs: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for name, array in response.outputs.items():
        dtype = raw.datatype_of(array, name, response.model)
        entry: dict[str, Any] = {"name": name, "datatype": dtype.wire, "shape": array.shape}
        if name in form.windows:
            form.windows[name].store(name, raw.encode(array, dtype))
        elif form.listed.get(name, form.default_is_binary):
            block = raw.encode(array, dtype)
            entry["parameters"] = {"binary_data_size": len(block)}
            blocks.append(block)
        else:
            entry["data"] = json_data(name, array, dtype)
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model
    document["model_version"] = str(response.version)
    if response.parameters:
        document["parameters"] = json_parameters(response.parameters)
    document["outputs"] = outputs
    text = orjson.dumps(document, option=_NUMPY)
    if not blocks:
        return [text], JSON_HEADERS
    return [text, *blocks], (_BINARY, (HEADER_LENGTH, b"%d" % len(text)))


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
