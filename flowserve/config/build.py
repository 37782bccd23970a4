"""Fills a message of the schema from a syntax tree, with the place of every field and all type errors.

Decides the accepted spellings of values in each notation, and that a mistake in a file is reported with its line, one
in JSON with its field. Checks types, not rules: whether `max_batch_size: -1` is valid is decided in `rules`. Caller:
`parse`.

Decides also what a field or a key that is given twice means, as protobuf's parsers do: in a map the last value of a key
counts, which is a warning. A singular field twice is a mistake in a file; in JSON its last value counts, unless it is
an object or a member of a oneof. A key twice in one JSON object is a mistake.

The schema, fields by name with their kinds, is derived once from the descriptors of a generated module.
It reads the descriptors' own messages, which are stable, rather than protobuf's reflection API, which renames
properties between releases. Callers: `convert`, `parse`, `load`, `placement`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Literal

from google.protobuf import descriptor_pb2
from google.protobuf.message import Message as ProtoMessage

from flowserve.config import model_config_pb2
from flowserve.config.suggest import did_you_mean
from flowserve.config.syntax import ConfigBlock, ConfigEntry, ConfigList, ConfigScalar, Text, Value
from flowserve.errors import Place, Problem, Problems

RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


OWN_NUMBERS: Final = 1000  # Triton's schema has no field from this number on


@dataclass(frozen=True, slots=True)
class Field:
    """`kind` is "string", "bool", "float", "enum", "message" or an integer's name; `type` names its message or enum.
    `is_own`: Triton's schema does not have it.
    """

    name: str
    kind: str
    type: str
    is_repeated: bool
    is_map: bool
    oneof: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    fields: Mapping[str, Field]
    by_json_name: Mapping[str, Field]


MESSAGES: Final[dict[str, Message]] = {}
ENUMS: Final[dict[str, dict[str, int]]] = {}


def _read(
    prefix: str, messages: Iterable[descriptor_pb2.DescriptorProto], enums: Iterable[descriptor_pb2.EnumDescriptorProto]
) -> None:
    for enum in enums:
        ENUMS[f"{prefix}.{enum.name}"] = {value.name: value.number for value in enum.value}
    for message in messages:
        name = f"{prefix}.{message.name}"
        maps = {f".{name}.{entry.name}" for entry in message.nested_type if entry.options.map_entry}
        fields = {
            field.name: Field(
                name=field.name,
                kind=descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
                .removeprefix("TYPE_")
                .lower()
                .replace("double", "float"),
                type=field.type_name.removeprefix("."),
                is_repeated=field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
                is_map=field.type_name in maps,
                oneof=message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
                is_own=field.number >= OWN_NUMBERS,
            )
            for field in message.field
        }
        MESSAGES[name] = Message(name, fields, {field.json_name: fields[field.name] for field in message.field})
        _read(name, message.nested_type, message.enum_type)


def add_schema(module: Any) -> None:
    """Add the messages of a generated module, so that files of them can be read."""
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    _read(file.package, file.message_type, file.enum_type)


add_schema(model_config_pb2)
MODEL_CONFIG: Final = MESSAGES["inference.ModelConfig"]


Format = Literal["pbtxt", "json"]
Plain = str | int | float | bool

TWICE: Final = "R17"  # the rule that warns about what is given twice
# Parsing stops after this number; a file with more mistakes is not a configuration.
PROBLEMS_MAX: Final = 100
BOOLS: Final = dict.fromkeys(("true", "True", "t", "1"), True) | dict.fromkeys(("false", "False", "f", "0"), False)
INTEGER: Final = re.compile(r"-?(0[xX][0-9a-fA-F]+|[0-9]+)")
INFINITE: Final = re.compile(r"-?(inf|infinity|nan)", re.IGNORECASE)


# Other tools' names of data types; by similarity alone TYPE_FLOAT would be corrected to TYPE_INT8.
_OTHER_NAMES: Final = {
    "FLOAT": "TYPE_FP32",
    "FLOAT32": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "HALF": "TYPE_FP16",
    "FLOAT64": "TYPE_FP64",
    "DOUBLE": "TYPE_FP64",
    "BFLOAT16": "TYPE_BF16",
    "INT": "TYPE_INT32",
    "LONG": "TYPE_INT64",
    "BYTES": "TYPE_STRING",
    "STR": "TYPE_STRING",
}


class WrongValue(Exception):
    """A value of the wrong type; the text names the expected one."""


class Builder:
    """Fills messages from trees, and collects `places`, `problems`, `warnings` and the `broken` paths; a field with a
    problem stays unset.
    """

    def __init__(self, text: Text, notation: Format) -> None:
        self.places: dict[str, Place] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.broken: set[str] = set()
        self._text = text
        self._is_json = notation == "json"
        self._path = ""  # path of the current field
        self._inside: dict[str, list[str]] = {}  # the paths in each value of a map, by its path

    def fill(self, message: ProtoMessage, schema: Message, block: ConfigBlock, prefix: str = "") -> None:
        """Fill `message` from `block`. `prefix` is the path of the message, with a trailing dot."""
        seen: dict[str, ConfigEntry] = {}
        for entry in block.entries:
            self._path = prefix + entry.name
            field = self._field(schema, entry)
            is_null = isinstance(entry.value, ConfigScalar) and (entry.value.kind, entry.value.text) == ("word", "null")
            if field is None or (self._is_json and is_null):
                continue
            if not self._is_clash(field, entry, seen):
                self._path = prefix + field.name
                self._set(message, field, entry, self._path)

    def _field(self, schema: Message, entry: ConfigEntry) -> Field | None:
        field = schema.fields.get(entry.name)
        if field is None and self._is_json:
            field = schema.by_json_name.get(entry.name)
        if field is None:
            text = f'Message type "{schema.name}" has no field named "{entry.name}"'
            self._problem(entry.at, text, did_you_mean(entry.name, schema.fields))
        return field

    def _is_clash(self, field: Field, entry: ConfigEntry, seen: dict[str, ConfigEntry]) -> bool:
        """Whether the field, or another member of its oneof, was given before and may not be; records a problem."""
        if field.is_repeated and not self._is_json:
            return False
        first = seen.setdefault(field.oneof or field.name, entry)
        if first is entry:
            return False
        if self._is_json and not field.oneof and (field.is_repeated or field.kind != "message"):
            what = "all its values are used" if field.is_repeated else "the last one counts"
            self._warn(entry.at, f'field "{field.name}" is given more than once; {what}')
            return False
        where = "" if self._is_json else f"the first is at {self._text.place(first.at)}"
        if first.name == entry.name:
            self._problem(entry.at, f'Non-repeated field "{field.name}" is specified multiple times', where)
        else:
            text = f'Field "{field.name}" is specified along with field "{first.name}", another member of oneof'
            self._problem(entry.at, f'{text} "{field.oneof}"', f"keep one of them{where and '; '}{where}")
        return True

    def _set(self, message: ProtoMessage, field: Field, entry: ConfigEntry, path: str) -> None:
        self.places.setdefault(path, self._place(entry.at))
        if field.is_map:
            self._set_map(message, field, entry, path)
        elif field.is_repeated:
            self._append(message, field, entry, path)
        elif isinstance(entry.value, ConfigList):
            self._problem(entry.value.at, f'field "{field.name}" takes one value, not a list')
        elif field.kind == "message":
            child = getattr(message, field.name)
            child.SetInParent()
            self._fill_child(child, field, entry.value, path)
        else:
            plain = self._plain(field, entry.value)
            if plain is not None:
                setattr(message, field.name, plain)

    def _append(self, message: ProtoMessage, field: Field, entry: ConfigEntry, path: str) -> None:
        if self._is_json and not isinstance(entry.value, ConfigList):
            self._problem(entry.value.at, f'field "{field.name}" takes a list')
            return
        target = getattr(message, field.name)
        for index, (at, value) in enumerate(_each(entry), len(target)):
            self._path = f"{path}[{index}]"
            item_path = f"{path}[{len(target)}]"
            self.places[item_path] = self._place(at)
            if field.kind == "message":
                self._fill_child(target.add(), field, value, item_path)
            elif (plain := self._plain(field, value)) is not None:
                target.append(plain)

    def _fill_child(self, child: ProtoMessage, field: Field, value: Value, path: str) -> None:
        if isinstance(value, ConfigBlock):
            self.fill(child, MESSAGES[field.type], value, path + ".")
        else:
            wanted = "an object" if self._is_json else f"a block: {field.name} {{ ... }}"
            self._problem(value.at, f'field "{field.name}" takes {wanted}')

    def _set_map(self, message: ProtoMessage, field: Field, entry: ConfigEntry, path: str) -> None:
        key_field, value_field = (MESSAGES[field.type].fields[name] for name in ("key", "value"))
        target = getattr(message, field.name)
        keys: set[str] = set()  # of one JSON object, as written
        for at, key, value in self._pairs(field, entry):
            plain_key = self._plain(key_field, key)
            if plain_key is None:
                continue
            item_path = self._path = f"{path}[{plain_key}]"
            twice = f'key "{plain_key}" is given twice in "{field.name}"'
            if self._is_json and isinstance(key, ConfigScalar):
                if key.text in keys:
                    self._problem(at, twice)
                    continue
                keys.add(key.text)
            if item_path in self.places:
                where = "" if self._is_json else f"the one before is at {self.places[item_path]}"
                self._warn(at, f"{twice}; the last one counts", where)
                for inner in self._inside.pop(item_path, ()):
                    del self.places[inner]
                target.pop(plain_key, None)
            self.places[item_path] = self._place(at)
            if value_field.kind == "message":
                child, before = target[plain_key], len(self.places)
                if value is not None:
                    self._fill_child(child, value_field, value, item_path)
                self._inside[item_path] = [*islice(reversed(self.places), len(self.places) - before)]
                continue
            plain = "" if value is None else self._plain(value_field, value)
            if plain is not None:
                target[plain_key] = plain

    def _pairs(self, field: Field, entry: ConfigEntry) -> Iterator[tuple[int, Value, Value | None]]:
        """(offset of the key, key, value) of each entry of a JSON object or of text-format key-value blocks."""
        if self._is_json:
            if isinstance(entry.value, ConfigBlock):
                for pair in entry.value.entries:
                    yield pair.at, ConfigScalar(pair.at, "string", pair.name), pair.value
            else:
                self._problem(entry.value.at, f'field "{field.name}" takes an object')
            return
        schema = MESSAGES[field.type]
        for at, value in _each(entry):
            if not isinstance(value, ConfigBlock):
                self._problem(value.at, f'field "{field.name}" takes a block: {field.name} {{ key: ... value: ... }}')
                continue
            given: dict[str, ConfigEntry] = {}
            for pair in value.entries:
                member = self._field(schema, pair)
                if member is not None and not self._is_clash(member, pair, given):
                    given[member.name] = pair
            is_text = schema.fields["key"].kind == "string"
            empty = ConfigScalar(at, "string", "") if is_text else ConfigScalar(at, "number", "0")
            key = given.get("key", ConfigEntry(at, "key", empty))
            yield key.at, key.value, given["value"].value if "value" in given else None

    def _plain(self, field: Field, value: Value) -> Plain | None:
        """The value as a Python object, or None with a recorded problem."""
        if not isinstance(value, ConfigScalar):
            noun = "block" if isinstance(value, ConfigBlock) else "list"
            self._problem(value.at, f'field "{field.name}" takes a plain value, not a {noun}')
            return None
        try:
            if field.kind == "string":
                return self._string(value)
            if field.kind == "bool":
                return self._bool(value)
            if field.kind == "float":
                return self._float(value)
            if field.kind == "enum":
                return self._enum(field, value)
            return self._integer(field.kind, value)
        except WrongValue as wrong:
            self._problem(value.at, f'field "{field.name}": {wrong}')
            return None

    def _string(self, value: ConfigScalar) -> str:
        if value.kind != "string":
            raise WrongValue(f'Expected string, found {value.text} (did you mean "{value.text}", in quotes?)')
        try:
            value.text.encode()
        except UnicodeEncodeError:
            raise WrongValue("the string holds half of a surrogate pair") from None
        return value.text

    def _bool(self, value: ConfigScalar) -> bool:
        is_bool = value.kind == "word" or (value.kind == "number" and not self._is_json)
        if is_bool and value.text in BOOLS:
            return BOOLS[value.text]
        raise WrongValue(f"Expected true or false, found {_shown(value)}")

    def _float(self, value: ConfigScalar) -> float:
        if value.kind != "string" or self._is_json:
            with suppress(ValueError):
                return float(value.text if INFINITE.fullmatch(value.text) else value.text.rstrip("fF"))
        raise WrongValue(f"Expected a number, found {_shown(value)}")

    def _integer(self, kind: str, value: ConfigScalar) -> int:
        number: int | None = None
        if value.kind == "number" or (value.kind == "string" and self._is_json):
            number = _json_integer(value.text) if self._is_json else _text_integer(value.text)
        if number is None:
            raise WrongValue(f"Expected integer, found {_shown(value)}")
        low, high = RANGES[kind]
        if not low <= number <= high:
            raise WrongValue(f"Integer out of range ({value.text}); {kind} holds {low} to {high}")
        return number

    def _enum(self, field: Field, value: ConfigScalar) -> int:
        members = ENUMS[field.type]
        short = field.type.rpartition(".")[2]
        if value.kind == "number":
            number = _text_integer(value.text)
            if number is not None and number in members.values():
                return number
            raise WrongValue(f'Unknown enumeration value of "{value.text}" for {short}; known are {", ".join(members)}')
        if value.kind == "word" or self._is_json:
            name = value.text.upper() if self._is_json else value.text
            if name in members:
                return members[name]
            wanted = value.text.upper()
            meant = _OTHER_NAMES.get(wanted.removeprefix("TYPE_"), "")
            hint = f'did you mean "{meant}"?' if meant in members else did_you_mean(wanted, members)
            hint = hint or did_you_mean(f"TYPE_{wanted}", members) or f"known are {', '.join(members)}"
            raise WrongValue(f'Unknown enumeration value of "{value.text}" for {short}; {hint}')
        raise WrongValue(f"Expected one of {', '.join(members)} without quotes, found {_shown(value)}")

    def _place(self, at: int) -> Place:
        """The place of an offset. JSON comes from programs, so its places are field paths instead of columns."""
        place = self._text.place(at)
        return replace(place, path=self._path) if self._is_json else place

    def _warn(self, at: int, message: str, hint: str = "") -> None:
        """Record a warning; the first ones are enough."""
        if len(self.warnings) < PROBLEMS_MAX:
            self.warnings.append(Problem(message, self._place(at), TWICE, hint))

    def _problem(self, at: int, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, self._place(at), hint=hint))
        self.broken.add(self._path)
        if len(self.problems) == PROBLEMS_MAX:
            raise Problems([*self.problems, Problem("more mistakes follow", self._place(at))])


def _each(entry: ConfigEntry) -> list[tuple[int, Value]]:
    """The values of a repeated field, each with its offset: that of the field's name, or its own in a list."""
    if isinstance(entry.value, ConfigList):
        return [(value.at, value) for value in entry.value.values]
    return [(entry.at, entry.value)]


def _text_integer(text: str) -> int | None:
    if not INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("-")
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") and len(digits) > 1 else 10
    try:
        return int(text, base)
    except ValueError:  # 089, or more digits than Python converts
        return None


def _json_integer(text: str) -> int | None:
    """An integer in one of JSON's forms: 1, "1", 1.0 or 1e0."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        return int(number) if number.is_integer() else None
    return None


def _shown(value: ConfigScalar) -> str:
    return f'"{value.text}"' if value.kind == "string" else value.text
