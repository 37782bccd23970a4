"""An inference request's body becomes a `Request`.

Decides where the binary tensors are in the body, and how JSON data becomes arrays. Binary tensors are views into the
body. A tensor is copied, once, only if its address is not aligned for its type, or if it is BYTES or BOOL, whose wire
form differs from the array. Decides also which bodies take too long for the event loop: those are decoded in steps, on
a thread (`LargeBody`). request_json.py decides the valid JSON; the engine checks whether the tensors fit the model.
"""

from __future__ import annotations

import math
from binascii import a2b_base64
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.http.api.large_json import LargeArray
from flowserve.http.api.request_json import (
    ALL_BINARY,
    AnswerForm,
    InferHeader,
    InputHeader,
    parse_header,
    parse_large_header,
)
from flowserve.memory import raw
from flowserve.memory.arena import Arena
from flowserve.memory.client_memory import ClientMemory, RegionWindow
from flowserve.runtime.protocol import ElementLimits
from flowserve.runtime.threads import INLINE_BYTES_MAX, Pause
from flowserve.values import Array, BytesLike, DType, Request, TensorSpec

_CACHED_HEADERS: Final = 256
_CACHED_HEADER_BYTES: Final = 4096
_NO_ROOM: Final[Mapping[str, Array]] = {}
_INTS: Final = frozenset({int})
_JSON_TYPES: Final[Mapping[DType, frozenset[type]]] = {
    DType.BOOL: frozenset({bool}),
    DType.BYTES: frozenset({str}),
    DType.FP32: frozenset({int, float}),
    DType.FP64: frozenset({int, float}),
}
_JSON_NAMES: Final[Mapping[type, str]] = {
    str: "strings",
    bool: "booleans",
    int: "integers",
    float: "fractions",
    dict: "objects",
    type(None): "null",
}


class Decoder:
    """Bodies to requests. Keeps the checked JSON of binary requests by its bytes: clients mostly send the same
    header again."""

    def __init__(self, client_memory: ClientMemory, limits: ElementLimits | None = None) -> None:
        self.client_memory = client_memory
        self.limits = limits or ElementLimits()
        self._headers: dict[tuple[bytes, str], InferHeader] = {}

    def decode(self, body: BytesLike, header_length: int | None, model: str) -> tuple[Request, AnswerForm] | None:
        """The request, and the form of its response; None if decoding takes long, which is work for a `LargeBody`.
        `header_length` is Inference-Header-Content-Length, None where there is none.

        Raises `Invalid`, naming the field, `TooLarge`, and what `ClientMemory` raises.
        """
        if header_length is None:
            header_length = len(body)
            if header_length > INLINE_BYTES_MAX:
                return None
            header = parse_header(body, model, self.limits)
        else:
            if not 0 <= header_length <= len(body):
                raise _wrong_length(header_length, body)
            if header_length > INLINE_BYTES_MAX:
                return None
            text = bytes(body[:header_length])
            header = self._headers.get((text, model)) or self._header(text, model)  # the messages name the model
        if header.extents and header.nbytes == len(body) - header_length:
            inputs = raw.numbers_at(body, header_length, header.extents)
        elif header.copied_bytes > INLINE_BYTES_MAX:
            return None
        else:
            inputs = _arrays(header, body, header_length, model, _windows(header, self.client_memory), no_pause)
        form = header.form
        if header.portions:
            form = replace(form, windows=self.client_memory.windows(header.portions))
        return Request(inputs, *header.fields), form

    def _header(self, text: bytes, model: str) -> InferHeader:
        header = parse_header(text, model, self.limits)
        if len(text) <= _CACHED_HEADER_BYTES and all(one.data is None for one in header.inputs):
            if len(self._headers) >= _CACHED_HEADERS:
                self._headers.clear()
            self._headers[text, model] = header
        return header


class LargeBody:
    """Decodes one body as `Decoder.decode` does. `parse` and `arrays` take long and run on a thread; they call `pause`
    between two steps. `prepare` runs on the event loop between them.
    """

    def __init__(self, decoder: Decoder, body: BytesLike, header_length: int | None, model: str) -> None:
        self._decoder = decoder
        self._body = body
        self._offset = len(body) if header_length is None else header_length
        self._model = model
        self._header: InferHeader
        self._windows: Mapping[str, RegionWindow]
        self._room: dict[str, Array] = {}
        self._stays_encoded = False
        self.form: AnswerForm

    def parse(self, pause: Pause) -> Request:
        """The request with stand-ins for its inputs: arrays of their type and shape, without memory. Raises `Invalid`
        and `TooLarge`.
        """
        if not 0 <= self._offset <= len(self._body):
            raise _wrong_length(self._offset, self._body)
        text = memoryview(self._body)[: self._offset]
        self._header = header = parse_large_header(text, self._model, self._decoder.limits, pause)
        inputs = {one.name: raw.stand_in(one.name, one.dtype, one.shape) for one in header.inputs}
        return Request(inputs, *header.fields)

    def prepare(self, arena: Arena | None) -> None:
        """Find the client's memory, and room for large inputs: in `arena`, the memory of the process that reads them,
        if there is one. Raises what `ClientMemory` raises.
        """
        memory, header = self._decoder.client_memory, self._header
        self._windows = _windows(header, memory)
        self.form = replace(header.form, windows=memory.windows(header.portions))
        if arena is None:
            return
        self._stays_encoded = True
        for one in header.inputs:
            nbytes = one.count * one.dtype.itemsize
            is_copied = one.portion is not None or (isinstance(one.data, LargeArray) and one.data.count == one.count)
            if is_copied and nbytes > INLINE_BYTES_MAX and one.dtype not in (DType.BYTES, DType.BOOL):
                self._room[one.name] = arena.lease(nbytes).view()

    def arrays(self, pause: Pause) -> dict[str, Array]:
        """The inputs. Raises `Invalid`."""
        header, body, offset, windows = self._header, self._body, self._offset, self._windows
        return _arrays(header, body, offset, self._model, windows, pause, self._room, stays_encoded=self._stays_encoded)


def decode_raw(
    body: BytesLike, model: str, inputs: Mapping[str, TensorSpec], max_batch_size: int
) -> tuple[Request, AnswerForm]:
    """The request whose whole body is the model's one input, of batch 1. Raises `Invalid` if its shape cannot be
    inferred.
    """
    if len(inputs) != 1:
        raise Invalid(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs "
            f"in '{model}' model configuration"
        )
    (spec,) = inputs.values()
    batches = max_batch_size > 0
    if spec.dtype is DType.BYTES:
        if spec.dims != (1,):
            raise Invalid(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        element = np.empty((1, 1) if batches else 1, np.object_)
        element[...] = bytes(body)
        return Request({spec.name: element}), ALL_BINARY
    return Request({spec.name: raw_numbers(body, model, spec, batches=batches)}), ALL_BINARY


def raw_numbers(body: BytesLike, model: str, spec: TensorSpec, *, batches: bool) -> Array:
    """An input of numbers, of batch 1, that is the whole `body`. Raises `Invalid` if its shape cannot be inferred."""
    shape = (*((1,) if batches else ()), *_deduced(spec, len(body)))
    count = raw.element_count(spec.name, shape, spec.dtype)
    raw.check_size(spec.name, model, spec.dtype, count, len(body))
    return raw.numbers(body, 0, spec.name, spec.dtype, shape, count)


def _deduced(spec: TensorSpec, nbytes: int) -> tuple[int, ...]:
    if spec.dims.count(-1) > 1:
        raise Invalid(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    row = math.prod(dim for dim in spec.dims if dim != -1) * spec.dtype.itemsize
    return tuple(nbytes // row if dim == -1 and row else dim for dim in spec.dims)


def _wrong_length(header_length: int, body: BytesLike) -> Invalid:
    return Invalid(f"inference header size should be in range (0, {len(body)}), got: {header_length}")


def no_pause() -> None:
    """For a body that is decoded at once."""


# ---------------------------------------------------------------------------------------------- binary


def _windows(header: InferHeader, client_memory: ClientMemory) -> dict[str, RegionWindow]:
    """The places of the inputs that are in the client's memory. Raises what `ClientMemory` raises."""
    return {one.name: client_memory.window(one.portion) for one in header.inputs if one.portion is not None}


def _arrays(
    header: InferHeader,
    body: BytesLike,
    offset: int,
    model: str,
    windows: Mapping[str, RegionWindow],
    pause: Pause,
    room: Mapping[str, Array] = _NO_ROOM,
    *,
    stays_encoded: bool = False,
) -> dict[str, Array]:
    """`windows`: the inputs in the client's memory. `room`: where to place inputs that are decoded or copied, as bytes;
    others get memory of their own. `stays_encoded`: as for `raw.decode_large`.
    """
    arrays: dict[str, Array] = {}
    end = len(body)
    for one in header.inputs:
        size = one.binary_size
        if size is None:
            if one.portion is not None:
                data = windows[one.name].read(room.get(one.name))
                pause()
                arrays[one.name] = raw.decode_large(
                    data, one.name, model, one.dtype, one.shape, one.count, pause, stays_encoded=stays_encoded
                )
                continue
            array = json_array(one, room.get(one.name))
            if stays_encoded and one.dtype is DType.BYTES and isinstance(one.data, LargeArray):
                array = raw.EncodedBytes.of(raw.encode_in_steps(array, pause), one.name, model, one.shape)
            arrays[one.name] = array
            continue
        if size > end - offset:
            missing = size - (end - offset)
            raise Invalid(
                f"unexpected size for input '{one.name}', expecting {missing} additional bytes for model '{model}'"
            )
        if one.dtype is DType.BYTES:
            block = memoryview(body)[offset : offset + size]
            arrays[one.name] = raw.decode_large(
                block, one.name, model, one.dtype, one.shape, one.count, pause, stays_encoded=stays_encoded
            )
            pause()
        else:
            arrays[one.name] = raw.numbers(body, offset, one.name, one.dtype, one.shape, one.count)
        offset += size
    if offset != end:
        raise Invalid(
            f"unexpected additional input data for model '{model}': {end - offset} bytes after the last input"
        )
    return arrays


# ---------------------------------------------------------------------------------------------- JSON


def json_array(header: InputHeader, room: Array | None = None) -> Array:
    """The array of an input whose data is JSON. `room` is where a large one is placed. Raises `Invalid`."""
    data = header.data
    assert data is not None  # InputHeader promises one of the three
    if not isinstance(data, LargeArray):
        values = _flattened(data)
        if len(values) != header.count:
            raise _wrong_count(header, len(values))
        return raw.shaped(_converted(values, header), header.name, header.shape)
    if data.count != header.count and max(data.count, header.count) > 1:  # a single one may be an empty array
        raise _wrong_count(header, data.count)
    flat: Array = np.empty(header.count, header.dtype.numpy) if room is None else room.view(header.dtype.numpy)
    done = 0

    def take(piece: list[Any]) -> None:
        nonlocal done
        values = _flattened(piece)
        if done + len(values) <= header.count:
            flat[done : done + len(values)] = _converted(values, header)
        done += len(values)

    data.read(take)
    if done != header.count:
        raise _wrong_count(header, done)
    return raw.shaped(flat, header.name, header.shape)


def _wrong_count(header: InputHeader, count: int) -> Invalid:
    return Invalid(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field (input '{header.name}': "
        f"shape {list(header.shape)} holds {header.count} elements, 'data' has {count})"
    )


def _converted(values: list[Any], header: InputHeader) -> Array:
    """`values` of JSON as a flat array of the input's type. Raises `Invalid`."""
    allowed = _JSON_TYPES.get(header.dtype, _INTS)
    found = set(map(type, values)) - allowed
    if found:
        names = " and ".join(sorted(_JSON_NAMES.get(kind, kind.__name__) for kind in found))
        remedy = "; write strings in double quotes" if header.dtype is DType.BYTES else ""
        text = f"Unable to parse 'data': input '{header.name}' is {header.dtype}, its data holds {names}{remedy}"
        raise Invalid(text)
    if header.dtype is DType.BYTES:
        array: Array = np.empty(len(values), np.object_)
        try:
            if header.is_base64:
                array[:] = [a2b_base64(text, strict_mode=True) for text in values]
            else:
                array[:] = [text.encode() for text in values]
        except UnicodeEncodeError:
            text = f"input '{header.name}' holds a string that is not valid Unicode"
            raise Invalid(f"Unable to parse 'data': {text}") from None
        except ValueError as error:
            text = f"input '{header.name}' holds a string that is not base64: {error}"
            raise Invalid(f"Unable to parse 'data': {text}") from None
        return array
    try:
        with np.errstate(over="ignore"):  # a number too large for FP32 becomes infinity, as everywhere
            return np.array(values, header.dtype.numpy)
    except OverflowError:
        raise Invalid(f"Unable to parse 'data': input '{header.name}' holds a number outside {header.dtype}") from None


def _flattened(data: list[Any]) -> list[Any]:
    """`data` without its nesting; its depth was limited when it was parsed."""
    while True:
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if kinds != {list}:
            return _leaves(data)
        data = list(chain.from_iterable(data))


def _leaves(data: list[Any]) -> list[Any]:
    """The same for a mix of lists and other values; those are not visited again for every level of the lists."""
    flat: list[Any] = []
    waiting = [iter(data)]
    while waiting:
        for one in waiting[-1]:
            if type(one) is list:
                waiting.append(iter(one))
                break
            flat.append(one)
        else:
            waiting.pop()
    return flat
