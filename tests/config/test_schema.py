"""The schema equals Triton's, its generated code is up to date, and it works in one process with Triton's client."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given

from flowserve.config import model_config_pb2
from flowserve.config.build import MODEL_CONFIG
from flowserve.config.convert import to_json
from flowserve.config.load import Draft, finish
from flowserve.config.parse import parse_model_config
from flowserve.config.types import Completion
from flowserve.runtime.loading.reading import read_apart
from tests.config.test_pbtxt import entries
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


# ---------------------------------------------------------------------------------------------- the JSON


@pytest.fixture(scope="module")
def as_triton() -> Callable[[Any], Any]:
    """`as_triton(json)`: Triton's own message of a configuration in JSON; fails for a field that it does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tritonclient.grpc import model_config_pb2 as client

    return lambda found: json_format.ParseDict(found, client.ModelConfig())


AsTriton = Callable[[Any], Any]


@given(entries(MODEL_CONFIG, 3, own=False))
def test_property_the_json_of_a_configuration_is_of_tritons_schema(as_triton: AsTriton, text: str) -> None:
    message = parse_model_config(text, "m/config.pbtxt")[0]
    theirs = as_triton(to_json(message))
    assert model_config_pb2.ModelConfig.FromString(theirs.SerializeToString()) == message


GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/*.pbtxt"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_json_of_files_for_triton_is_of_its_schema(
    draft: Callable[..., Draft], as_triton: AsTriton, path: Path
) -> None:
    text = path.read_text(encoding="utf-8")
    name = parse_model_config(text, path.name)[0].name or path.stem
    assert as_triton(finish(draft(text, name=name), Completion()).json).name == name


def test_a_field_of_flowserve_is_in_the_json_where_the_file_sets_it(as_triton: AsTriton) -> None:
    steps = 'step [ { model_name: "a" }, { model_name: "b" when { tensor: "t" } } ]'
    found = to_json(parse_model_config(f"ensemble_scheduling {{ {steps} }}", "m/config.pbtxt")[0])
    plain, own = found["ensemble_scheduling"]["step"]
    assert not {"when", "each", "name"} & plain.keys()
    assert own["when"][0]["tensor"] == "t"
    assert "fill" not in found["ensemble_scheduling"]
    with pytest.raises(json_format.ParseError, match="when"):
        as_triton(found)


def test_the_json_of_every_example_is_of_tritons_schema_unless_its_file_has_other_fields(
    root: Path, as_triton: AsTriton
) -> None:
    configs = read_apart([root / "graphs"]).configs
    own = set()
    for name, config in configs.items():
        try:
            as_triton(config.json)
        except json_format.ParseError:
            own.add(name)
    assert len(configs) > 20
    assert own == {"detect_language_cascade", "read_text"}  # `when` and `each`
