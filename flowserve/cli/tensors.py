"""Tensors of the commands that send requests: on the command line (`NAME=VALUE`, `NAME=@FILE`), in bodies of requests
and responses, and in output files; and generated inputs for measurements.

Decides the meaning of a value or file for the tensor that the model expects (data type and dims come from the server's
metadata), and of a request parameter; the encoding in bodies, and the format of each kind of file. No value is
converted to a different one silently; a missing batch dimension is added. Callers: `infer`, `bench`, `load`.
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
from flowserve.memory import raw
from flowserve.runtime.protocol import KNOWN_PARAMETERS
from flowserve.values import BY_WIRE, Array, DType, Parameter, implied_shape

Parameters = Mapping[str, Parameter]
NO_PARAMETERS: Final[Parameters] = {}
HEADER_LENGTH: Final = "inference-header-content-length"
SHOWN: Final = 60  # characters of a value that a message repeats
# The names of numpy's kinds of arrays in messages.
_KINDS: Final = {"f": "numbers with fractions", "c": "complex numbers", "U": "text", "S": "text", "b": "true and false"}
_NO_NUMBERS: Final = "what is no number, or has more than 64 bits"
_WHOLE: Final = "iu"


# ---------------------------------------------------------------------------------------------- command line


def read_inputs(words: Sequence[str], metadata: Mapping[str, Any]) -> dict[str, Array]:
    """Every `NAME=VALUE` as an array of the model's type and shape. Blocks. Raises Invalid."""
    wanted = {tensor["name"]: tensor for tensor in metadata["inputs"]}
    inputs: dict[str, Array] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise Invalid(f"--input {word!r}: expected NAME=VALUE or NAME=@FILE")
        if name not in wanted:
            hint = did_you_mean(name, wanted) or f"it has {', '.join(wanted)}"
            raise Invalid(f"--input: the model has no input '{name}' ({hint})")
        if name in inputs:
            raise Invalid(f"--input {name}: it is given twice")
        dtype = BY_WIRE[wanted[name]["datatype"]]
        array, rank = _read(name, value, dtype), len(wanted[name]["shape"])
        inputs[name] = array.reshape([1] * (rank - array.ndim) + [*array.shape])
    missing = [name for name, tensor in wanted.items() if name not in inputs and not tensor.get("optional")]
    if missing:
        raise Invalid(f"--input {missing[0]}=... is missing; the model wants {_described(metadata['inputs'])}")
    return inputs


def generated_inputs(metadata: Mapping[str, Any]) -> dict[str, Array]:
    """Valid inputs for measurements: small numbers, varying dims are 1, optional inputs are left out. Reproducible."""
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


def _read(name: str, value: str, dtype: DType) -> Array:
    if value.startswith("@"):
        return _from_file(name, Path(value[1:]), dtype)
    try:
        return _from_json(json.loads(value, parse_float=_number), dtype)
    except ValueError as error:
        if dtype is DType.BYTES and value[:1] not in ("[", '"'):
            return strings(value)  # text without quotes
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
        raise Invalid(f"--input {name}: {shown!r} is no JSON for a tensor of {dtype}: {error}") from None


def _from_file(name: str, path: Path, dtype: DType) -> Array:
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            return strings(array.tolist()) if dtype is DType.BYTES else _cast(array, dtype)
        if path.suffix == ".json":
            return _from_json(json.loads(path.read_text(encoding="utf-8"), parse_float=_number), dtype)
        if dtype is DType.BYTES:
            return np.array([path.read_bytes()], np.object_).reshape(())
        return _cast(_picture(name, path), dtype)
    except OSError as error:
        raise Invalid(f"--input {name}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Invalid(f"--input {name}: {path} is no tensor of {dtype}: {error}") from None


def _picture(name: str, path: Path) -> Array:
    """UINT8 [height, width, 3]."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise Unsupported(f"--input {name}: reading {path} needs Pillow: pip install 'flowserve[pictures]'") from None
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise Invalid(f"--input {name}: {path} is neither .npy, .json nor a picture") from None


def _from_json(value: Any, dtype: DType) -> Array:
    """Raises ValueError."""
    if dtype is DType.BYTES:
        return strings(value)
    try:
        array = np.array(value)
    except ValueError:
        raise ValueError("its lists are of different lengths") from None
    return _cast(array, dtype)


def _cast(array: Array, dtype: DType) -> Array:
    """The same values in the model's type. Raises ValueError if a value would change."""
    wanted = np.dtype(dtype.numpy)
    kind = array.dtype.kind
    if array.dtype == wanted or not array.size:
        return array.astype(wanted, copy=False)
    if kind not in (_WHOLE if wanted.kind in "iub" else f"f{_WHOLE}"):
        raise ValueError(f"it holds {_KINDS.get(kind, _NO_NUMBERS)}")
    if wanted.kind in "iub":
        bounds = (0, 1) if dtype is DType.BOOL else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        least, most = int(array.min()), int(array.max())
        if least < bounds[0] or most > bounds[1]:
            raise ValueError(f"it holds {least if least < bounds[0] else most}, and the least and most are {bounds}")
    with np.errstate(over="ignore"):  # overflow is checked below
        cast = array.astype(wanted)
    if (lost := np.isinf(cast) & np.isfinite(array)).any():
        raise ValueError(f"it holds {array[lost].flat[0]}, which is too large for it")
    return cast


def _number(text: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError if it overflows to infinity."""
    if math.isinf(number := float(text)):
        raise ValueError(f"it holds {text}, which is too large")
    return number


def _described(tensors: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{one['name']} {one['datatype']}{json.dumps(one['shape'])}{' (optional)' if one.get('optional') else ''}"
        for one in tensors
    )


# ---------------------------------------------------------------------------------------------- bodies


class InferBody:
    """A request body with binary tensors, encoded once for any parameters; it requests binary outputs. `outputs` ():
    all outputs.
    """

    def __init__(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> None:
        described, blobs = [], []
        for name, array in inputs.items():
            dtype = dtype_of(array)
            blobs.append(raw.encode_bytes(array) if dtype is DType.BYTES else np.ascontiguousarray(array).tobytes())
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
                flat = raw.decode_bytes(blob, int(np.prod(shape)), name=name, model=header["model_name"])
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
        if implied_shape(dims[name], array.size) != array.shape:
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
                arrays[name] = flat.reshape(implied_shape(tensor["shape"], flat.size) or flat.shape)
        return {key: event[key] for key in ("id", "model_name", "model_version") if key in event}, arrays
    except (KeyError, TypeError, ValueError) as error:
        raise FlowserveError(f"this is no answer of a generate extension: {error}") from error


# ---------------------------------------------------------------------------------------------- files and JSON


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
    flat = [raw.to_bytes(one) for one in array.ravel().tolist()]
    return np.array([*flat, None], np.object_)[:-1].reshape(array.shape)
