"""A body of multipart/form-data becomes a `Request`: one part for each input, as `curl -F IMAGE=@photo.png` sends it.

Decides the meaning of a part. For an input of BYTES the content is one element; several parts with its name are its
elements in order, one for each row of a batch where the deployment batches. For an input of numbers a file (a part
with a file name) has them in little-endian order, any other part has them as JSON. The response is JSON. The parts
are found by python-multipart. Does not know which tensors fit the deployment: the engine checks that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from flowserve.errors import Invalid
from flowserve.http.api.decode import json_array, raw_numbers
from flowserve.http.api.json_bodies import load_json
from flowserve.http.api.request_json import AnswerForm, InputHeader, check_json
from flowserve.memory import raw
from flowserve.runtime.protocol import ITEMS_MAX
from flowserve.runtime.threads import Pause
from flowserve.values import Array, BytesLike, DType, Request, TensorSpec

FORM: Final = b"multipart/form-data"
_PIECE_BYTES: Final = 1 << 17
_JSON_BYTES_MAX: Final = 1 << 16  # of the numbers of one part
ALL_JSON: Final = AnswerForm()


@dataclass(slots=True)
class _Part:
    name: str = ""
    is_file: bool = False
    content: bytearray = field(default_factory=bytearray)


def boundary_of(content_type: bytes) -> bytes:
    """The boundary of a body of this content type. Raises Invalid."""
    boundary: bytes | None = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Invalid("multipart/form-data without a boundary in its Content-Type")
    return boundary


def decode_form(
    body: BytesLike,
    boundary: bytes,
    model: str,
    inputs: Mapping[str, TensorSpec],
    max_batch_size: int,
    pause: Pause,
) -> Request:
    """The request in a form; `inputs` are the deployment's. Calls `pause` between pieces of 128 KiB. Raises Invalid."""
    parts: dict[str, list[_Part]] = {}
    for part in _parts(body, boundary, pause):
        parts.setdefault(part.name, []).append(part)
    batches = max_batch_size > 0
    return Request({name: _input(name, found, inputs.get(name), model, batches) for name, found in parts.items()})


def _input(name: str, parts: list[_Part], spec: TensorSpec | None, model: str, batches: bool) -> Array:
    if spec is None or spec.dtype is DType.BYTES:  # the engine refuses an input that does not exist
        elements = np.empty(len(parts), np.object_)
        elements[:] = [bytes(part.content) for part in parts]
        rank = 1 if spec is None else len(spec.dims) + batches
        # Rows come first; an input without dimensions has one element.
        return elements.reshape(len(parts) if rank else (), *(1,) * (rank - 1))
    if len(parts) > 1:
        raise Invalid(f"input '{name}' is in {len(parts)} parts of the form; numbers are in one")
    (part,) = parts
    if part.is_file:
        return raw_numbers(bytes(part.content), model, spec, batches=batches)
    return _numbers(name, part.content, spec, batches)


def _numbers(name: str, text: bytearray, spec: TensorSpec, batches: bool) -> Array:
    """Numbers as JSON: one number, or lists that are nested as the input's dimensions, with or without the batch's."""
    check_json(name, spec.dtype)
    if len(text) > _JSON_BYTES_MAX:
        raise Invalid(f"input '{name}' has more than {_JSON_BYTES_MAX} bytes of JSON in a form; send a file with bytes")
    try:
        value = load_json(bytes(text))
    except Invalid as error:
        raise Invalid(f"input '{name}' of the form is no JSON: {error}") from None
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    rank = len(spec.dims) + batches
    shape = [1] * (rank - len(shape)) + shape
    count = raw.element_count(name, tuple(shape), spec.dtype)
    data = value if isinstance(value, list) else [value]
    return json_array(InputHeader(name, spec.dtype, tuple(shape), count, None, data))


def _parts(body: BytesLike, boundary: bytes, pause: Pause) -> list[_Part]:
    """The parts of a form. Raises Invalid."""
    parts: list[_Part] = []
    head: dict[bytes, bytes] = {}
    header_name, header_value = bytearray(), bytearray()
    is_over = False

    def begin() -> None:
        if len(parts) == ITEMS_MAX:
            raise Invalid(f"a form of more than {ITEMS_MAX} parts")
        parts.append(_Part())
        head.clear()

    def add_name(data: bytes, start: int, end: int) -> None:
        header_name.extend(data[start:end])  # python-multipart limits its length

    def add_value(data: bytes, start: int, end: int) -> None:
        header_value.extend(data[start:end])

    def end_header() -> None:
        head[bytes(header_name).lower()] = bytes(header_value)
        header_name.clear()
        header_value.clear()

    def end_head() -> None:
        kind, options = parse_options_header(head.get(b"content-disposition", b""))
        name = options.get(b"name")
        if kind != b"form-data" or not name:
            raise Invalid(f"part {len(parts) - 1} of the form has no name, which is that of an input")
        parts[-1].name = name.decode("utf-8", "replace")
        parts[-1].is_file = b"filename" in options

    def add_data(data: bytes, start: int, end: int) -> None:
        parts[-1].content += data[start:end]

    def finish() -> None:
        nonlocal is_over
        is_over = True

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin,
            "on_header_field": add_name,
            "on_header_value": add_value,
            "on_header_end": end_header,
            "on_headers_finished": end_head,
            "on_part_data": add_data,
            "on_end": finish,
        },
    )
    view = memoryview(body)
    try:
        for start in range(0, len(view), _PIECE_BYTES):
            parser.write(bytes(view[start : start + _PIECE_BYTES]))
            pause()
    except FormParserError as error:
        raise Invalid(f"the body is no multipart/form-data: {error}") from None
    if not is_over:
        raise Invalid("the body is no multipart/form-data: its last boundary is missing")
    return parts
