"""The configuration schema for the builder: fields by name, with their kinds.

Derived once from the descriptor in model_config_pb2. It reads the descriptor's own message, which is stable, rather
than protobuf's reflection API, which renames properties between releases. Callers: `build`, `convert`, `parse`,
`error_cascade`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from flowserve.config.model_config_pb2 import DESCRIPTOR

INTEGERS: Final[Mapping[int, tuple[str, int, int]]] = {
    FieldDescriptorProto.TYPE_INT32: ("int32", -(2**31), 2**31 - 1),
    FieldDescriptorProto.TYPE_INT64: ("int64", -(2**63), 2**63 - 1),
    FieldDescriptorProto.TYPE_UINT32: ("uint32", 0, 2**32 - 1),
    FieldDescriptorProto.TYPE_UINT64: ("uint64", 0, 2**64 - 1),
}
KINDS: Final[Mapping[int, str]] = {
    **{number: name for number, (name, _, _) in INTEGERS.items()},
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_DOUBLE: "float",
    FieldDescriptorProto.TYPE_ENUM: "enum",
    FieldDescriptorProto.TYPE_MESSAGE: "message",
}
RANGES: Final[Mapping[str, tuple[int, int]]] = {name: (low, high) for name, low, high in INTEGERS.values()}


@dataclass(frozen=True, slots=True)
class Field:
    """`kind` is "string", "bool", "float", "enum", "message" or an integer's name; `type` names its message or enum."""

    name: str
    json_name: str
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


def _read() -> tuple[dict[str, Message], dict[str, dict[str, int]]]:
    file = FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    found: dict[str, DescriptorProto] = {}
    enums: dict[str, dict[str, int]] = {}

    def visit(prefix: str, nested: list[DescriptorProto], listed: list[EnumDescriptorProto]) -> None:
        for enum in listed:
            enums[f"{prefix}.{enum.name}"] = {value.name: value.number for value in enum.value}
        for message in nested:
            name = f"{prefix}.{message.name}"
            found[name] = message
            visit(name, list(message.nested_type), list(message.enum_type))

    visit(file.package, list(file.message_type), list(file.enum_type))
    return {name: _message(name, message, found) for name, message in found.items()}, enums


def _message(name: str, message: DescriptorProto, all_messages: Mapping[str, DescriptorProto]) -> Message:
    fields = []
    for field in message.field:
        type_name = field.type_name.removeprefix(".")
        fields.append(
            Field(
                name=field.name,
                json_name=field.json_name,
                kind=KINDS[field.type],
                type=type_name,
                is_repeated=field.label == FieldDescriptorProto.LABEL_REPEATED,
                is_map=type_name in all_messages and all_messages[type_name].options.map_entry,
                oneof=message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
            )
        )
    return Message(name, {field.name: field for field in fields}, {field.json_name: field for field in fields})


MESSAGES, ENUMS = _read()
MODEL_CONFIG: Final = MESSAGES["inference.ModelConfig"]
