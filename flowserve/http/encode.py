"""A `Response` becomes a body: JSON, followed by the binary tensors where the client asked for some.

Decided here: the order and shape of the JSON, and that tensors are handed on as the buffers they lie in, not joined.
Numbers are written shortest-exact; what is not finite is written as the bare NaN, Infinity and -Infinity that
Python's and Triton's readers take. This file knows of HTTP only the headers
that say what a body is.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from flowserve.errors import Internal, Invalid
from flowserve.http.infer_header import AnswerForm
from flowserve.memory import bytes_codec
from flowserve.memory.client_memory import Window
from flowserve.values import BY_NUMPY, Array, DType, Response

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY
_KEPT_MAX: Final = 256

Headers = tuple[tuple[bytes, bytes], ...]

JSON_HEADERS: Final[Headers] = ((b"content-type", b"application/json"),)
HEADER_LENGTH: Final = b"inference-header-content-length"
_BINARY: Final = (b"content-type", b"application/octet-stream")


class Encoder:
    """Responses to bodies. Keeps the JSON of binary answers by what it says: answers mostly differ in their tensors
    only.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[bytes, Headers]] = {}

    def encode(self, response: Response, form: AnswerForm) -> tuple[list[Any], Headers]:
        """The body as buffers, and the headers that describe it.

        Raises `Invalid` where the client asked for a form the tensor cannot take, `Internal` where the model made what
        no tensor can be.
        """
        key: list[Any] = [response.model, response.version, response.id]
        blocks: list[Any] = []
        for name, array in response.outputs.items():
            if array.dtype.hasobject or not form.is_binary(name) or response.parameters:
                return _encode(response, form)
            key += (name, array.dtype, array.shape)
            blocks.append(_block(array))
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


def _encode(response: Response, form: AnswerForm) -> tuple[list[Any], Headers]:
    outputs: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for name, array in response.outputs.items():
        dtype = BY_NUMPY.get(array.dtype)
        if dtype is None:
            raise Internal(
                f"model '{response.model}' made output '{name}' of numpy type {array.dtype}, which no datatype is"
            )
        entry: dict[str, Any] = {"name": name, "datatype": dtype.wire, "shape": array.shape}
        if name in form.windows:
            _write(name, bytes_codec.encode(array) if dtype is DType.BYTES else _block(array), form.windows[name])
        elif form.is_binary(name):
            block = bytes_codec.encode(array) if dtype is DType.BYTES else _block(array)
            entry["parameters"] = {"binary_data_size": len(block)}
            blocks.append(block)
        else:
            entry["data"] = _data(name, array, dtype)
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model
    document["model_version"] = str(response.version)
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    text = orjson.dumps(document, option=_NUMPY)
    if not blocks:
        return [text], JSON_HEADERS
    return [text, *blocks], (_BINARY, (HEADER_LENGTH, b"%d" % len(text)))


def _block(array: Array) -> bytes | memoryview:
    """The tensor's bytes, in place where they already lie in row-major order."""
    if array.nbytes <= _COPIED_BYTES_MAX:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(name: str, block: bytes | memoryview, window: Window) -> None:
    if len(block) > window.size:
        raise Invalid(
            f"shared memory size specified with the request for output '{name}' ({window.size} bytes) should be at "
            f"least {len(block)} bytes to hold the results"
        )
    window.write(block)


_COPIED_BYTES_MAX: Final = 4096  # a small copy costs less than a view of one


def _data(name: str, array: Array, dtype: DType) -> Any:
    """What orjson writes as the flat `data`."""
    if dtype is DType.BYTES:
        return _strings(name, array)
    if dtype in (DType.FP16, DType.BF16):
        raise Invalid(
            f"sending {dtype} data via JSON is not supported. Please use the binary data format for output {name}"
        )
    flat = array.ravel()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return _with_bare_tokens(flat)
    return flat


def _with_bare_tokens(flat: Array) -> orjson.Fragment:
    tokens = orjson.dumps(flat, option=_NUMPY)[1:-1].split(b",")  # orjson writes null for what is not finite
    for index in np.flatnonzero(~np.isfinite(flat)):
        value = flat[index]
        tokens[index] = b"NaN" if np.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
    return orjson.Fragment(b"[" + b",".join(tokens) + b"]")


def _strings(name: str, array: Array) -> list[str]:
    try:
        return [one.decode() if isinstance(one, bytes) else str(one) for one in array.ravel().tolist()]
    except UnicodeDecodeError:
        raise Invalid(
            f"output '{name}' holds bytes that are not UTF-8 and cannot be sent as JSON; ask for it with "
            '"parameters": {"binary_data": true}'
        ) from None
