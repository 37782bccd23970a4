"""Tensors as the command line writes them: `NAME=VALUE`, `NAME=@FILE`; as bodies of requests; and answers as text.

Decided here: what a value or a file means, given the tensor that the model wants. The server's metadata says data type
and dims; a batch dimension that is left out is added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError, Invalid, Unsupported
from flowserve.memory import bytes_codec
from flowserve.values import BY_WIRE, Array, DType

HEADER_LENGTH: Final = "inference-header-content-length"
TENSOR_FILES: Final = (".npy", ".json")


def read_inputs(words: Sequence[str], metadata: Mapping[str, Any]) -> dict[str, Array]:
    """Every `NAME=VALUE` as the array that the model wants. Blocks. Raises Invalid."""
    wanted = {tensor["name"]: tensor for tensor in metadata["inputs"]}
    inputs: dict[str, Array] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise Invalid(f"--input {word!r}: expected NAME=VALUE or NAME=@FILE")
        if name not in wanted:
            hint = did_you_mean(name, wanted) or f"it has {', '.join(wanted)}"
            raise Invalid(f"--input: the model has no input '{name}' ({hint})")
        dtype = BY_WIRE[wanted[name]["datatype"]]
        inputs[name] = _fitted(_read(name, value, dtype), wanted[name]["shape"])
    missing = [name for name, tensor in wanted.items() if name not in inputs and not tensor.get("optional")]
    if missing:
        raise Invalid(f"--input {missing[0]}=... is missing; the model wants {_described(metadata['inputs'])}")
    return inputs


def made_up(metadata: Mapping[str, Any]) -> dict[str, Array]:
    """Inputs that fit, for whoever only measures: small numbers, dims that vary are 1, optional ones left out. The same
    each time.
    """
    generator = np.random.default_rng(1)
    inputs: dict[str, Array] = {}
    for tensor in metadata["inputs"]:
        if tensor.get("optional"):
            continue
        shape, dtype = [max(dim, 1) for dim in tensor["shape"]], BY_WIRE[tensor["datatype"]]
        if dtype is DType.BYTES:
            inputs[tensor["name"]] = np.full(shape, b"flowserve", np.object_)
        else:
            inputs[tensor["name"]] = generator.integers(0, 2, shape).astype(dtype.numpy)
    return inputs


def infer_body(inputs: Mapping[str, Array], outputs: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """The body and headers of a request, tensors binary both ways. `outputs` (): all of them."""
    described, blobs = [], []
    for name, array in inputs.items():
        dtype = dtype_of(array)
        blobs.append(bytes_codec.encode(array) if dtype is DType.BYTES else np.ascontiguousarray(array).tobytes())
        sizes = {"binary_data_size": len(blobs[-1])}
        described.append({"name": name, "datatype": dtype.wire, "shape": [*array.shape], "parameters": sizes})
    header: dict[str, Any] = {"inputs": described, "parameters": {"binary_data_output": True}}
    if outputs:
        header["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    text = json.dumps(header).encode()
    return b"".join([text, *blobs]), {"Inference-Header-Content-Length": str(len(text))}


def read_answer(headers: Mapping[str, str], content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The answer's JSON, and its arrays by name. Raises FlowserveError for what is no such answer."""
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


def flat_body(inputs: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """The body of a request for many answers: plain JSON, each input flat, in the shape that its dims say. Raises
    Invalid for what it cannot carry.
    """
    dims = {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"]}
    body = {}
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
    """One of many answers: what it says besides its tensors, and those of `tensors` (by name, as the metadata describes
    them) that it has. Raises FlowserveError for what is no such answer.
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
    """The shape of so many elements where nothing else is said: the last dimension that varies takes the rest, others
    that vary are 1. None where that does not come out.
    """
    shape = [max(dim, 1) for dim in dims]
    varying = [axis for axis, dim in enumerate(dims) if dim == -1]
    if varying:
        shape[varying[-1]] = count // max(math.prod(shape), 1)
    return tuple(shape) if math.prod(shape) == count else None


def write_output(array: Array, path: Path) -> None:
    """Into a .npy or .json file; into any other, the bytes of the one BYTES element. Blocks. Raises Invalid."""
    if path.suffix == ".npy":
        np.save(path, array, allow_pickle=False) if array.dtype != object else np.save(path, array.astype(bytes))
    elif path.suffix == ".json":
        path.write_text(json.dumps(plain(array)) + "\n", encoding="utf-8")
    elif array.dtype == object and array.size == 1:
        path.write_bytes(array.item())
    else:
        raise Invalid(
            f"--output {path}: a {path.suffix or 'plain'} file holds one BYTES element; .npy holds any tensor"
        )


def plain(array: Array) -> Any:
    """What JSON can hold."""
    if array.dtype == object:
        flat = [one.decode(errors="replace") for one in array.ravel().tolist()]
        return np.array([*flat, None], np.object_)[:-1].reshape(array.shape).tolist()
    return array.astype(np.float32).tolist() if array.dtype == DType.BF16.numpy else array.tolist()


def dtype_of(array: Array) -> DType:
    return next(dtype for dtype in DType if dtype.numpy == array.dtype)


def _read(name: str, value: str, dtype: DType) -> Array:
    if value.startswith("@"):
        return _from_file(name, Path(value[1:]), dtype)
    try:
        return _from_lists(json.loads(value), dtype)
    except ValueError as error:
        if dtype is DType.BYTES and value[:1] not in ("[", '"'):
            return _from_lists(value, dtype)  # a text that needs no quotes
        raise Invalid(f"--input {name}: {value!r} is no JSON for a {dtype} tensor: {error}") from None


def _from_file(name: str, path: Path, dtype: DType) -> Array:
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            return _from_lists(array.tolist(), dtype) if dtype is DType.BYTES else _as(array, dtype, name)
        if path.suffix == ".json":
            return _from_lists(json.loads(path.read_text(encoding="utf-8")), dtype)
        if dtype is DType.BYTES:
            return np.array([path.read_bytes()], np.object_).reshape(())
    except OSError as error:
        raise Invalid(f"--input {name}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Invalid(f"--input {name}: {path} is no {dtype} tensor: {error}") from None
    return _as(_picture(name, path), dtype, name)


def _picture(name: str, path: Path) -> Array:
    """UINT8 [height, width, 3]."""
    try:
        from PIL import Image
    except ImportError:
        raise Unsupported(f"--input {name}: reading {path} needs Pillow: pip install 'flowserve[pictures]'") from None
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise Invalid(f"--input {name}: {path} is neither .npy, .json nor a picture: {error}") from None


def _as(array: Array, dtype: DType, name: str) -> Array:
    if array.dtype != dtype.numpy and not np.can_cast(array.dtype, dtype.numpy, "same_kind"):
        raise Invalid(f"--input {name}: the file holds {array.dtype} and the model wants {dtype}")
    return array.astype(dtype.numpy, copy=False)


def _from_lists(value: Any, dtype: DType) -> Array:
    """Raises ValueError."""
    if dtype is not DType.BYTES:
        return np.array(value, dtype.numpy)
    array = np.array(value, np.object_)
    flat = [bytes_codec.to_bytes(one) for one in array.ravel().tolist()]
    return np.array([*flat, None], np.object_)[:-1].reshape(array.shape)


def _fitted(array: Array, shape: Sequence[int]) -> Array:
    """With the dimensions of size 1 in front that were not written."""
    return array.reshape([1] * (len(shape) - array.ndim) + [*array.shape]) if array.ndim < len(shape) else array


def _described(tensors: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['name']} {one['datatype']}{json.dumps(one['shape'])}".replace(" [", "[") for one in tensors)
