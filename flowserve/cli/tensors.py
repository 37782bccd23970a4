"""Tensors in request and response bodies, for the commands that talk to a server, and in output files.

Decides the encoding, and the format of each kind of file. Does not know how a user writes an input (`inputs`). Callers:
`infer`, `bench`, `load`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.errors import FlowserveError, Invalid
from flowserve.memory import bytes_codec
from flowserve.runtime.protocol.request_parameters import KNOWN_PARAMETERS
from flowserve.values import BY_WIRE, Array, DType, Parameter

Parameters = Mapping[str, Parameter]
NO_PARAMETERS: Final[Parameters] = {}
HEADER_LENGTH: Final = "inference-header-content-length"


class InferBody:
    """A request body with binary tensors, encoded once for any parameters; it requests binary outputs. `outputs` ():
    all outputs.
    """

    def __init__(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> None:
        described, blobs = [], []
        for name, array in inputs.items():
            dtype = dtype_of(array)
            blobs.append(bytes_codec.encode(array) if dtype is DType.BYTES else np.ascontiguousarray(array).tobytes())
            sizes = {"binary_data_size": len(blobs[-1])}
            described.append({"name": name, "datatype": dtype.wire, "shape": [*array.shape], "parameters": sizes})
        self._header: dict[str, Any] = {"inputs": described}
        if outputs:
            self._header["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
        self._blob = b"".join(blobs)

    def of(self, parameters: Parameters = NO_PARAMETERS) -> tuple[bytes, dict[str, str]]:
        """The body and its headers."""
        header = {**self._header, "parameters": {"binary_data_output": True, **parameters}}
        text = json.dumps(header).encode()
        return text + self._blob, {"Inference-Header-Content-Length": str(len(text))}


def read_answer(headers: Mapping[str, str], content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The response's JSON, and its arrays by name. Raises FlowserveError for a malformed response."""
    try:
        length = int(headers.get(HEADER_LENGTH, len(content)))
        header = json.loads(content[:length])
        arrays, start = {}, length
        for tensor in header["outputs"]:
            dtype, shape, name = BY_WIRE[tensor["datatype"]], tensor["shape"], tensor["name"]
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is None:
                arrays[name] = _from_lists(tensor["data"], dtype).reshape(shape)
                continue
            blob = content[start : start + size]
            start += size
            if dtype is DType.BYTES:
                flat = bytes_codec.decode(blob, int(np.prod(shape)), name=name, model=header["model_name"])
            else:
                flat = np.frombuffer(blob, dtype.numpy)
            arrays[name] = flat.reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise FlowserveError(f"this is no answer of a KServe v2 server: {error}") from error
    return header, arrays


def flat_body(
    inputs: Mapping[str, Array], metadata: Mapping[str, Any], parameters: Parameters = NO_PARAMETERS
) -> bytes:
    """The body of a generate_stream request: plain JSON, each input flat, with the shape implied by its dims. Raises
    Invalid for an input or parameter that it cannot carry.
    """
    for name in sorted(parameters.keys() & KNOWN_PARAMETERS):
        raise Invalid(
            f"{name}: a model that answers many times is asked over generate_stream, where this is a parameter as any"
            " other and means nothing; a gRPC client can say it"
        )
    dims = {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"]}
    body: dict[str, Any] = {"parameters": dict(parameters)} if parameters else {}
    for name, array in inputs.items():
        if _shape_of(dims[name], array.size) != array.shape:
            raise Invalid(
                f"--input {name}: a model that answers many times is asked in JSON without shapes, where {array.size}"
                f" elements of {json.dumps(dims[name])} cannot be {json.dumps([*array.shape])}"
            )
        try:
            flat = [one.decode() for one in array.ravel()] if array.dtype == object else array.ravel().tolist()
        except UnicodeDecodeError:
            raise Invalid(
                f"--input {name}: a model that answers many times is asked in JSON, which holds text"
            ) from None
        body[name] = flat
    return json.dumps(body).encode()


def read_flat_answer(
    event: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """One response of a stream: its fields besides tensors, and those of `tensors` (metadata by name) that it contains.
    Raises FlowserveError for a malformed response.
    """
    arrays = {}
    try:
        for name, tensor in tensors.items():
            if name in event:
                flat = _from_lists(event[name], BY_WIRE[tensor["datatype"]]).reshape(-1)
                arrays[name] = flat.reshape(_shape_of(tensor["shape"], flat.size) or flat.shape)
        return {key: event[key] for key in ("id", "model_name", "model_version") if key in event}, arrays
    except (KeyError, TypeError, ValueError) as error:
        raise FlowserveError(f"this is no answer of a generate extension: {error}") from error


def _shape_of(dims: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The shape implied by an element count: the last varying dimension takes the rest, other varying ones are 1. None
    if the count does not fit.
    """
    shape = [max(dim, 1) for dim in dims]
    varying = [axis for axis, dim in enumerate(dims) if dim == -1]
    if varying:
        shape[varying[-1]] = count // max(math.prod(shape), 1)
    return tuple(shape) if math.prod(shape) == count else None


def write_output(array: Array, path: Path) -> None:
    """Write a .npy or .json file; any other file gets the bytes of a single BYTES element. Blocks. Raises Invalid."""
    is_bytes = array.dtype == object
    try:
        if path.suffix == ".npy":
            np.save(path, array.astype(bytes) if is_bytes else array, allow_pickle=False)
        elif path.suffix == ".json":
            path.write_text(json.dumps(plain(array)) + "\n", encoding="utf-8")
        elif is_bytes and array.size == 1:
            path.write_bytes(array.item())
        else:
            raise Invalid(
                f"--output {path}: a {path.suffix or 'plain'} file holds one BYTES element; .npy holds any tensor"
            )
    except OSError as error:
        raise Invalid(f"--output {path}: it cannot be written: {error.strerror}") from None


def plain(array: Array) -> Any:
    """The array as JSON values."""
    if array.dtype == object:
        flat = [one.decode(errors="replace") for one in array.ravel().tolist()]
        return np.array([*flat, None], np.object_)[:-1].reshape(array.shape).tolist()
    return array.astype(np.float32).tolist() if array.dtype == DType.BF16.numpy else array.tolist()


def dtype_of(array: Array) -> DType:
    return next(dtype for dtype in DType if dtype.numpy == array.dtype)


def _from_lists(value: Any, dtype: DType) -> Array:
    """Raises ValueError."""
    return strings(value) if dtype is DType.BYTES else np.array(value, dtype.numpy)


def strings(value: Any) -> Array:
    """A BYTES tensor from JSON: strings, in lists of any depth."""
    array = np.array(value, np.object_)
    flat = [bytes_codec.to_bytes(one) for one in array.ravel().tolist()]
    return np.array([*flat, None], np.object_)[:-1].reshape(array.shape)
