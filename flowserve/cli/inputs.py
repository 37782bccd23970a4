"""Inputs on the command line: `NAME=VALUE`, `NAME=@FILE`; and generated inputs for measurements.

Decides the meaning of a value or file for the tensor that the model expects (data type and dims come from the server's
metadata), and of a request parameter. No value is converted to a different one silently; a missing batch dimension is
added. Callers: `infer`, `bench`, `sweep`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.cli.tensors import strings
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid, Unsupported
from flowserve.values import BY_WIRE, Array, DType, Parameter

SHOWN: Final = 60  # characters of a value that a message repeats
# The names of numpy's kinds of arrays in messages.
_KINDS: Final = {"f": "numbers with fractions", "c": "complex numbers", "U": "text", "S": "text", "b": "true and false"}
_NO_NUMBERS: Final = "what is no number, or has more than 64 bits"
_WHOLE: Final = "iu"


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
        inputs[name] = _fitted(_read(name, value, dtype), wanted[name]["shape"])
    missing = [name for name, tensor in wanted.items() if name not in inputs and not tensor.get("optional")]
    if missing:
        raise Invalid(f"--input {missing[0]}=... is missing; the model wants {_described(metadata['inputs'])}")
    return inputs


def request_parameter(word: str) -> tuple[str, Parameter]:
    """`NAME=VALUE`: a JSON number, true or false; anything else is text, bare or as a JSON string. Raises Invalid."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise Invalid(f"expected NAME=VALUE, got {word!r}")
    try:
        found = json.loads(value)
    except ValueError:
        return name, value
    is_one = isinstance(found, str | bool | int) or (isinstance(found, float) and math.isfinite(found))
    return name, found if is_one else value


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


def _fitted(array: Array, shape: Sequence[int]) -> Array:
    """The array with missing leading dimensions of size 1 added."""
    return array.reshape([1] * (len(shape) - array.ndim) + [*array.shape]) if array.ndim < len(shape) else array


def _described(tensors: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{one['name']} {one['datatype']}{json.dumps(one['shape'])}{' (optional)' if one.get('optional') else ''}"
        for one in tensors
    )
