"""The schema equals Triton's, its generated code is up to date, and it works in one process with Triton's client."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from flowserve.config import model_config_pb2
from tests.support.generated_code import generate


@pytest.fixture(scope="module")
def theirs() -> FileDescriptorProto:
    """The configuration message of Triton's client library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the age of its generated code
        from tritonclient.grpc import model_config_pb2 as client
    return describe(client)


def describe(module: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def facts(file: FileDescriptorProto) -> set[tuple[object, ...]]:
    """Every field and enumeration value with its number and type."""
    found: set[tuple[object, ...]] = set()

    def visit(prefix: str, messages: Any, enums: Any) -> None:
        for enum in enums:
            found.update((prefix, enum.name, value.name, value.number) for value in enum.value)
        for message in messages:
            name = f"{prefix}.{message.name}"
            for field in message.field:
                oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
                found.add((name, field.name, field.number, field.label, field.type, field.type_name, oneof))
            visit(name, message.nested_type, message.enum_type)

    visit(file.package, file.message_type, file.enum_type)
    return found


def test_the_generated_code_is_what_the_generator_makes() -> None:
    for path, text in generate().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tests.support.generated_code"


def test_names_numbers_and_types_are_those_of_tritons_client(theirs: FileDescriptorProto) -> None:
    ours = facts(describe(model_config_pb2))
    missing = {fact for fact in facts(theirs) if fact not in ours}
    assert not missing


def test_flowserves_own_fields_of_tritons_messages_are_numbered_from_1000(theirs: FileDescriptorProto) -> None:
    known = {fact[0] for fact in facts(theirs)}
    extra = {fact for fact in facts(describe(model_config_pb2)) - facts(theirs) if fact[0] in known}
    assert extra
    assert all(isinstance(fact[2], int) and fact[2] >= 1000 for fact in extra)


@pytest.mark.usefixtures("theirs")
def test_tritons_client_reads_the_message_in_the_same_process() -> None:
    from tritonclient.grpc import model_config_pb2 as client

    ours = model_config_pb2.ModelConfig(name="m", max_batch_size=8)
    ours.input.add(name="X", data_type=model_config_pb2.TYPE_FP32, dims=[-1, 3])
    assert str(client.ModelConfig.FromString(ours.SerializeToString())) == str(ours)
