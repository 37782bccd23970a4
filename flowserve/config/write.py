"""A configuration as the text of its file, and a file's text as the fields that somebody wrote.

Decided here: that what Python writes is protobuf's text format as Triton reads it, fields in the schema's order. Both
ways lead through the schema, so a field that it does not have is a mistake here as anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict

from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.parse import parse_model_config
from flowserve.config.types import SourceMap


def message_of(config: Mapping[str, Any], file: str) -> ModelConfigProto:
    """`config` is as JSON spells it. `file` stands in messages. Raises Problems."""
    return parse_model_config(json.dumps(config, default=_plain), file, "json")[0]


def _plain(value: object) -> int | str:
    """Numbers of other libraries are numbers; of anything else the schema says what it wanted."""
    return int(value) if isinstance(value, Integral) else repr(value)


def text_of(config: Mapping[str, Any], file: str) -> str:
    """The contents of a config.pbtxt."""
    return text_format.MessageToString(message_of(config, file), as_utf8=True)


def fields_of(text: str, file: str) -> tuple[dict[str, Any], SourceMap]:
    """What a config.pbtxt says, as JSON spells it: only what is written, nothing filled in. Raises Problems."""
    message, source = parse_model_config(text, file)
    return MessageToDict(message, preserving_proto_field_name=True), source
