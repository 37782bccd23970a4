"""Limits of messages, checked on their bytes before protobuf makes an object for each part of them.

Decides how many entries a repeated or map field of messages may have (inputs, outputs, parameters, as over HTTP), how
many elements typed contents may have, and how many fields a message has at most altogether. Only large messages are
checked here: a small one cannot have enough parts to matter, and the limits of an inference request are checked again
when it is decoded. The size of a message after decompression is grpcio's limit. Does not know what the fields mean, and
leaves malformed bytes to protobuf. Callers: `decode`, `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from flowserve.errors import Invalid, TooLarge
from flowserve.memory.raw import BYTES_ELEMENTS_MAX
from flowserve.runtime.protocol import ITEMS_MAX

TYPED_ELEMENTS_MAX: Final = 1 << 19  # numbers in `contents`, which become Python objects: 60 ns of the event loop each
FIELDS_MAX: Final = 65_536  # of all nested messages together; each costs 0.3 us here
CHECKED_BYTES_MIN: Final = 16_384
_NUMBERS_MAX: Final = TYPED_ELEMENTS_MAX + FIELDS_MAX  # dims of shapes among them; `decode` counts typed contents alone
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types
_STRINGS: Final = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})
_WIDTH: Final = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}


class MessageBounds:
    """The limits of one class of messages. `strings_max`: elements of repeated strings (BYTES elements in typed
    contents), which are not counted as fields. `items_max`: entries of a repeated or map field.
    """

    def __init__(self, descriptor: Any, strings_max: int = BYTES_ELEMENTS_MAX, items_max: int = ITEMS_MAX) -> None:
        self._name = descriptor.full_name
        self._items_max = items_max
        self._level = _Level(descriptor, {})
        self._strings_max = max(strings_max, ITEMS_MAX)  # raw tensors are strings too

    def check(self, data: bytes) -> None:
        """Raises `Invalid`, or `TooLarge`, if a message exceeds a limit."""
        if len(data) < CHECKED_BYTES_MIN:
            return
        try:
            self._check(data, 0, len(data), self._level, _Room(FIELDS_MAX, self._strings_max, _NUMBERS_MAX))
        except IndexError:
            return  # it is cut short, as protobuf will report

    def _check(self, data: bytes, at: int, end: int, level: _Level, room: _Room) -> None:
        """Check the fields from `at` to `end`."""
        entries: dict[int, int] = {}
        while at < end:
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if number in level.strings:
                room.strings -= 1
                if room.strings < 0:
                    raise TooLarge(f"the {self._name} message has more than {self._strings_max} strings in one field")
            else:
                room.fields -= 1
                if room.fields < 0:
                    raise TooLarge(f"the {self._name} message has more than {FIELDS_MAX} fields")
            if wire == _SIZED:
                size, at = _varint(data, at)
                stop = at + size
                nested = level.nested.get(number)
                if nested is not None:
                    entries[number] = count = entries.get(number, 0) + 1
                    if count > self._items_max and number in level.repeated:
                        raise too_many(level.repeated[number], f"the {self._name} message", self._items_max)
                    self._check(data, at, min(stop, end), nested, room)
                elif number in level.widths:
                    room.numbers -= _packed_count(data, at, min(stop, end), level.widths[number])
                    if room.numbers < 0:
                        raise too_many_numbers(f"the {self._name} message")
                at = stop
            elif wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _FIXED64:
                at += 8
            elif wire == _FIXED32:
                at += 4


@dataclass(slots=True)
class _Room:
    """How much more a message may have."""

    fields: int
    strings: int
    numbers: int


class _Level:
    """The fields of a message class that are checked, by number: those that are messages (`nested`), the names of those
    that repeat (`repeated`), repeated strings, and the bytes of each number in repeated numeric fields, 0 if it varies
    (`widths`).
    """

    def __init__(self, descriptor: Any, known: dict[str, _Level]) -> None:
        known[descriptor.full_name] = self
        self.nested: dict[int, _Level] = {}
        self.repeated: dict[int, str] = {}
        self.strings: set[int] = set()
        self.widths: dict[int, int] = {}
        fields: Mapping[int, Any] = descriptor.fields_by_number
        for number, field in fields.items():
            if field.message_type is not None:
                self.nested[number] = known.get(field.message_type.full_name) or _Level(field.message_type, known)
                if field.is_repeated:
                    self.repeated[number] = field.name
            elif field.is_repeated and field.type in _STRINGS:
                self.strings.add(number)
            elif field.is_repeated:
                self.widths[number] = _WIDTH.get(field.type, 0)


def too_many(field: str, where: str, items_max: int = ITEMS_MAX) -> Invalid:
    """The error for more than `items_max` inputs, outputs or parameters."""
    return Invalid(f"{where} has more than {items_max} {field}, which is the most that is accepted")


def too_many_numbers(where: str) -> TooLarge:
    """The error for more than TYPED_ELEMENTS_MAX numbers in typed contents."""
    return TooLarge(
        f"{where} has more than {TYPED_ELEMENTS_MAX} numbers in typed contents; raw_input_contents has no such limit"
    )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = data[at]
    at += 1
    if value > 127:
        value &= 127
        shift = 7
        while (more := data[at]) > 127 and shift < 63:
            value |= (more & 127) << shift
            shift += 7
            at += 1
        value |= more << shift
        at += 1
    return value, at


def _packed_count(data: bytes, start: int, stop: int, width: int) -> int:
    """The number of packed numbers; a varint ends with its only byte below 128."""
    if width:
        return (stop - start) // width
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, stop - start, start) < 128))
