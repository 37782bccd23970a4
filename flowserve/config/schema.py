"""The configuration schema for the builder: fields by name, with their kinds.

Derived once from the descriptor in model_config_pb2. It reads the descriptor's own message, which is stable, rather
than protobuf's reflection API, which renames properties between releases. Callers: `build`, `convert`, `parse`,
`load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from flowserve.config.model_config_pb2 import DESCRIPTOR

RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True)
class Field:
    """`kind` is "string", "bool", "float", "enum", "message" or an integer's name; `type` names its message or enum."""

    name: str
    kind: str
    type: str
    is_repeated: bool
    is_map: bool
    oneof: str


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    fields: Mapping[str, Field]
    by_json_name: Mapping[str, Field]


MESSAGES: Final[dict[str, Message]] = {}
ENUMS: Final[dict[str, dict[str, int]]] = {}


def _read(prefix: str, messages: Iterable[DescriptorProto], enums: Iterable[EnumDescriptorProto]) -> None:
    for enum in enums:
        ENUMS[f"{prefix}.{enum.name}"] = {value.name: value.number for value in enum.value}
    for message in messages:
        name = f"{prefix}.{message.name}"
        maps = {f".{name}.{entry.name}" for entry in message.nested_type if entry.options.map_entry}
        fields = {
            field.name: Field(
                name=field.name,
                kind=FieldDescriptorProto.Type.Name(field.type)
                .removeprefix("TYPE_")
                .lower()
                .replace("double", "float"),
                type=field.type_name.removeprefix("."),
                is_repeated=field.label == FieldDescriptorProto.LABEL_REPEATED,
                is_map=field.type_name in maps,
                oneof=message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
            )
            for field in message.field
        }
        MESSAGES[name] = Message(name, fields, {field.json_name: fields[field.name] for field in message.field})
        _read(name, message.nested_type, message.enum_type)


_FILE: Final = FileDescriptorProto()
DESCRIPTOR.CopyToProto(_FILE)
_read(_FILE.package, _FILE.message_type, _FILE.enum_type)
MODEL_CONFIG: Final = MESSAGES["inference.ModelConfig"]
