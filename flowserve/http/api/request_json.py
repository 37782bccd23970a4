"""The JSON of an inference request, without its tensors' bytes.

Decides every field of the KServe v2 request and of its binary extension, its valid values, and the error text of an
invalid one. Element counts and byte sizes are computed in Python's integers, which do not wrap, before memory is
allocated. Messages begin with Triton's text where it has one. A header whose inputs are all binary holds no tensor data
and may be cached; headers are never changed.

This file does not know the model: the engine checks whether names, types and shapes fit it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.http.api.json_bodies import (
    array_of,
    bool_of,
    is_parameter,
    load_json,
    missing,
    object_of,
    string_of,
    uint_of,
    wrong_type,
)
from flowserve.http.api.large_json import LargeArray, collector_paused, outline
from flowserve.memory import raw
from flowserve.memory.client_memory import Portion, RegionWindow
from flowserve.runtime.protocol import BINARY_OUTPUT, KNOWN_PARAMETERS, RESERVED_PREFIX, ElementLimits, reserved
from flowserve.runtime.threads import Pause
from flowserve.values import BY_WIRE, BytesLike, DType, Parameter

_BESIDE_INPUTS: Final = frozenset({"id", "parameters", "outputs"})
_BEHIND_THE_JSON: Final = "unexpected content after document"  # in orjson's words
_LIMITS: Final = ElementLimits()
_DECODED: Final = frozenset({DType.BYTES, DType.BOOL})
_BINARY_HINT: Final = "where binary data follow the JSON, Inference-Header-Content-Length says how long the JSON is"
_QUOTES_HINT: Final = "JSON has double quotes, as json.dumps writes them"

# The first bytes of files that clients send without declaring their format.
_FILES: Final[Mapping[bytes, str]] = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a RIFF file (WAV or WebP)",
    b"OggS": "an Ogg file",
    b"ID3": "an MP3 file",
    b"%PDF": "a PDF file",
    b"\x1f\x8b": "gzip, and Content-Encoding does not say so",
}
_FILE_HINT: Final = (
    "send a file as a form (curl -F INPUT=@FILE), as the whole body with Inference-Header-Content-Length: 0, "
    'or in JSON as base64 (the input has "parameters": {"content_type": "base64"})'
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the outputs. `listed` are the outputs the client named; `default_is_binary` applies if it named none.
    `classes`: the number of largest values to return in place of an output. `windows`: the outputs' places in the
    client's memory, filled in per request: a cached header has none.
    """

    default_is_binary: bool = False
    listed: Mapping[str, bool] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, RegionWindow] = field(default_factory=dict)


ALL_BINARY: Final = AnswerForm(default_is_binary=True)


@dataclass(frozen=True, slots=True)
class InputHeader:
    """One input. Exactly one of `binary_size` (bytes in the binary part), `data` (JSON, flat or nested) and `portion`
    (of the client's memory) is not None. `is_base64`: the strings of `data` are base64 of the elements."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    count: int
    binary_size: int | None
    data: list[Any] | LargeArray | None
    portion: Portion | None = None
    is_base64: bool = False


@dataclass(frozen=True, slots=True)
class InferHeader:
    """The whole JSON, checked. `fields`: the arguments of `Request` after its inputs. `portions`: where in the client's
    memory outputs go. `extents`: where the inputs lie in the `nbytes` of the binary part, where all of them do as
    numbers; else (). `copied_bytes`: of the inputs that are decoded or copied, not viewed.
    """

    inputs: tuple[InputHeader, ...]
    fields: tuple[Any, ...]
    form: AnswerForm
    portions: Mapping[str, Portion]
    extents: tuple[raw.Extent, ...]
    nbytes: int
    copied_bytes: int


_EXPECTED: Final = (
    'expected {"inputs": [{"name": "NAME", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}]}; '
    'the path .../generate takes {"NAME": VALUE}'
)


def parse_header(text: BytesLike, model: str, limits: ElementLimits = _LIMITS) -> InferHeader:
    """The checked header. Raises `Invalid` naming the field, `TooLarge` for more elements than `limits`."""
    try:
        document = load_json(text)
    except Invalid as error:
        raise explained(error, text) from None
    if not isinstance(document, dict):
        raise Invalid(f"failed to parse the request JSON buffer: the request is not a JSON object; {_EXPECTED}")
    if "inputs" not in document and (others := document.keys() - _BESIDE_INPUTS):
        # A model may have no inputs, but this object has members of another kind: most likely a misspelt request.
        raise missing("inputs", f": it has {min(others)[:100]!r}; {_EXPECTED}")
    parameters = object_of(document, "parameters")
    outputs, form, portions = _outputs(document, bool_of(parameters, BINARY_OUTPUT))
    inputs = _inputs(document, model)
    strings = copied_bytes = 0
    for one in inputs:
        if one.dtype is DType.BYTES:
            strings += one.count
        if one.portion is not None:
            copied_bytes += one.portion.size
        elif one.dtype in _DECODED:
            copied_bytes += one.binary_size or 0
    if strings:
        raw.check_bytes_elements((strings,), model, limits.bytes_elements)
    has_text_id = isinstance(parameters.get("sequence_id"), str)
    fields = (
        outputs,
        string_of(document, "id", default=""),
        uint_of(parameters, "priority"),
        uint_of(parameters, "timeout"),
        (string_of if has_text_id else uint_of)(parameters, "sequence_id"),
        bool_of(parameters, "sequence_start"),
        bool_of(parameters, "sequence_end"),
        _custom_parameters(parameters),
    )
    return InferHeader(inputs, fields, form, portions, *_extents(inputs), copied_bytes)


def explained(error: Invalid, text: BytesLike) -> Invalid:
    """The error for a text that is not JSON, with the supported way to send what it seems to be."""
    start = bytes(memoryview(text)[:4])
    if not start:
        return Invalid(f"{error}; {_EXPECTED}")
    for magic, kind in _FILES.items():
        if start.startswith(magic):
            return Invalid(f"{error}: the body is {kind}; {_FILE_HINT}")
    if start.startswith(b"{'"):
        return Invalid(f"{error} ({_QUOTES_HINT})")
    return Invalid(f"{error} ({_BINARY_HINT})") if _BEHIND_THE_JSON in str(error) else error


def parse_large_header(text: memoryview, model: str, limits: ElementLimits, pause: Pause) -> InferHeader:
    """The header of a large text, in steps. Its inputs' data is still to be decoded. Raises as `parse_header` does."""
    try:
        rest, arrays, mark = outline(text, limits.json_elements, pause)
    except Invalid as error:
        raise explained(error, text) from None
    with collector_paused():
        header = parse_header(rest, model, limits)
    places = [one.data for one in header.inputs if one.data is not None]
    if places != [[mark, place] for place in range(len(arrays))]:
        raise Invalid("Unable to parse 'data': it is a member of an input, once")
    data = iter(arrays)
    inputs = tuple(one if one.data is None else replace(one, data=next(data)) for one in header.inputs)
    return replace(header, inputs=inputs)


# ---------------------------------------------------------------------------------------------- inputs and outputs


def _inputs(document: Mapping[str, Any], model: str) -> tuple[InputHeader, ...]:
    inputs: dict[str, InputHeader] = {}
    for position, entry in enumerate(array_of(document, "inputs")):
        name = _name(entry, "inputs", position)
        if name in inputs:
            raise Invalid(f"input '{name}' already exists in request")
        inputs[name] = _input(entry, name, model)
    return tuple(inputs.values())


def _input(entry: dict[str, Any], name: str, model: str) -> InputHeader:
    where = f" (input '{name}')"
    wire = string_of(entry, "datatype", where)
    dtype = BY_WIRE.get(wire)
    if dtype is None:
        raise Invalid(f"invalid datatype '{wire}' for input '{name}'; use one of {', '.join(BY_WIRE)}")
    shape = _shape(entry, where)
    count = raw.element_count(name, shape, dtype)
    parameters = object_of(entry, "parameters", where)
    portion = _portion(parameters, where)
    size = uint_of(parameters, "binary_data_size", where) if "binary_data_size" in parameters else None
    data = entry.get("data")
    if (data is None) + (size is None) + (portion is None) != 2:
        ways = {"'data'": data, "'binary_data_size'": size, "'shared_memory_region'": portion}
        given = [name for name, value in ways.items() if value is not None]
        found = f"{' and '.join(given)} were given" if given else "none was given"
        raise Invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {found} for input '{name}'"
        )
    nbytes = portion.size if portion is not None else size
    if nbytes is not None:
        raw.check_size(name, model, dtype, count, nbytes)
    elif not isinstance(data, list):
        raise wrong_type("data", "array", where)
    else:
        check_json(name, dtype)
    is_base64 = data is not None and parameters.get("content_type") == "base64"
    if is_base64 and dtype is not DType.BYTES:
        raise Invalid(f"'content_type' in 'parameters' is base64, which is for BYTES and not for {dtype}{where}")
    return InputHeader(name, dtype, shape, count, size, data, portion, is_base64)


def check_json(name: str, dtype: DType) -> None:
    """Raises Invalid if an input of this type cannot be sent as JSON."""
    if dtype in (DType.FP16, DType.BF16):
        raise Invalid(
            f"receiving {dtype} data via JSON is not supported. Please use the binary data format for input {name}"
        )


def _extents(inputs: Iterable[InputHeader]) -> tuple[tuple[raw.Extent, ...], int]:
    extents = []
    end = 0
    for one in inputs:
        if not one.binary_size or one.dtype in _DECODED:
            return (), 0
        extents.append(raw.Extent(one.name, one.shape, one.dtype.numpy, end))
        end += one.binary_size
    return tuple(extents), end


def _shape(entry: Mapping[str, Any], where: str) -> tuple[int, ...]:
    shape = array_of(entry, "shape", where, is_required=True)
    for position, dim in enumerate(shape):
        if type(dim) is not int or dim < 0:
            text = json.dumps(dim)
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise wrong_type("shape", "unsigned-integer", f"{where[:-1]}: dimension {position} is {shown})")
    return tuple(shape)


def _outputs(
    document: Mapping[str, Any], default_is_binary: bool
) -> tuple[tuple[str, ...] | None, AnswerForm, Mapping[str, Portion]]:
    listed: dict[str, bool] = {}
    classes: dict[str, int] = {}
    portions: dict[str, Portion] = {}
    for position, entry in enumerate(array_of(document, "outputs")):
        name = _name(entry, "outputs", position)
        if name in listed:
            raise Invalid(f"output '{name}' already exists in request")
        where = f" (output '{name}')"
        parameters = object_of(entry, "parameters", where)
        listed[name] = bool_of(parameters, "binary_data", where)
        if count := uint_of(parameters, "classification", where):
            classes[name] = count
        if portion := _portion(parameters, where):
            portions[name] = portion
            if count or listed[name]:
                other = "'classification'" if count else "'binary_data'"
                raise Invalid(f"{other} cannot be set for an output that goes to shared memory{where}")
    return tuple(listed) or None, AnswerForm(default_is_binary, listed, classes), portions


def _portion(parameters: Mapping[str, Any], where: str) -> Portion | None:
    if "shared_memory_region" not in parameters:
        return None
    if "shared_memory_byte_size" not in parameters:
        raise missing("shared_memory_byte_size", where)
    return Portion(
        string_of(parameters, "shared_memory_region", where),
        uint_of(parameters, "shared_memory_offset", where),
        uint_of(parameters, "shared_memory_byte_size", where),
    )


def _custom_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Parameter]:
    custom: dict[str, Parameter] = {}
    for key, value in parameters.items():
        if key in KNOWN_PARAMETERS or key == BINARY_OUTPUT:
            continue
        if key.startswith(RESERVED_PREFIX):
            raise reserved(key)
        if not is_parameter(value):
            raise Invalid(
                f"parameter '{key}' has invalid type; it should be a string, a number of at most 64 bits or a boolean"
            )
        custom[key] = value
    return custom


def _name(entry: Any, where: str, position: int) -> str:
    if not isinstance(entry, dict):
        raise wrong_type(where, "object", f" ({where}[{position}])")
    return string_of(entry, "name", f" ({where}[{position}])")
