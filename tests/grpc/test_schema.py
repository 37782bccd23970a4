"""The proto file has the messages and calls of Triton's client, and both work in one process."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.grpc import service_pb2 as triton

from flowserve.grpc import service_pb2
from flowserve.grpc.service import CALLS, INFER_CALL, STREAM_CALL


def _file(module: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


@pytest.fixture
def pair() -> tuple[FileDescriptorProto, FileDescriptorProto]:
    return _file(service_pb2), _file(triton)


def _shapes(prefix: str, messages: Any) -> dict[str, list[tuple[Any, ...]]]:
    found = {}
    for one in messages:
        fields = [(f.name, f.number, f.type, f.label, f.type_name, f.HasField("oneof_index")) for f in one.field]
        found[f"{prefix}.{one.name}"] = sorted(fields)
        found |= _shapes(f"{prefix}.{one.name}", one.nested_type)
    return found


def test_every_message_has_the_fields_that_tritons_client_knows(pair: tuple[Any, Any]) -> None:
    ours, theirs = (_shapes("", file.message_type) for file in pair)
    assert {name: ours.get(name) for name in theirs} == theirs


def test_every_call_that_tritons_client_knows_is_answered(pair: tuple[Any, Any]) -> None:
    def calls(file: FileDescriptorProto) -> dict[str, tuple[Any, ...]]:
        (service,) = file.service
        return {m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming) for m in service.method}

    ours, theirs = map(calls, pair)
    assert {name: ours.get(name) for name in theirs} == theirs
    assert {*CALLS, INFER_CALL, STREAM_CALL} == ours.keys()
