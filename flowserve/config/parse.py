"""Configuration text to message, with the place of every field, and back.

Decides the maximum size of a configuration, that all mistakes of one text are reported together, and that text written
by flowserve is protobuf's text format as Triton reads it, with fields in the schema's order. Both directions use the
schema, so an unknown field is an error in both. Does not decide whether the contents are valid (`rules`) or supported
(`unsupported`). Callers: `load`, `authoring`, the load API, test tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict

from flowserve.config import model_config_pb2 as pb
from flowserve.config.build import MODEL_CONFIG, Builder, Format
from flowserve.config.suggest import nearest
from flowserve.config.syntax import Text, parse_json, parse_pbtxt
from flowserve.config.types import SourceMap
from flowserve.errors import NO_PERMISSION, Place, Problem, Problems

# Real configurations have a few kilobytes. The limit avoids seconds of parsing for a file of another kind.
SIZE_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Parsed:
    """The contents of a text. `problems` are all unknown fields, wrong types and repeated fields, sorted by place;
    fields with problems are not in the `message`. `broken` are the top-level fields that contain such mistakes.
    `warnings` are about values that do not count, because a later one is given.
    """

    message: pb.ModelConfig
    source: SourceMap
    problems: tuple[Problem, ...] = ()
    broken: frozenset[str] = frozenset()
    warnings: tuple[Problem, ...] = ()


def parse_model_config(
    text: str,
    file: str,
    format: Format = "pbtxt",  # noqa: A002, the term that users know
) -> tuple[pb.ModelConfig, SourceMap]:
    """The message of `text` if it has no mistakes. Raises `Problems` otherwise."""
    parsed = parse(text, file, format)
    if parsed.problems:
        raise Problems(parsed.problems)
    return parsed.message, parsed.source


def parse(text: str, file: str, format: Format = "pbtxt") -> Parsed:  # noqa: A002, the term that users know
    """Parse as much as possible. `file` is the file name of places. Raises `Problems` with a single place if the text
    has a syntax error.
    """
    if len(text) > SIZE_MAX_BYTES:
        raise Problems([_too_large(file)])
    source = Text(text, file)
    tree = parse_json(source) if format == "json" else parse_pbtxt(source)
    builder = Builder(source, format)
    message = pb.ModelConfig()
    builder.fill(message, MODEL_CONFIG, tree)
    problems = sorted(builder.problems, key=lambda problem: problem.place or Place(file))
    broken = frozenset(map(field_of, builder.broken))
    return Parsed(message, SourceMap(file, builder.places), tuple(problems), broken, tuple(builder.warnings))


def field_of(path: str) -> str:
    """The top-level field of a path; an unknown name counts as the most similar field."""
    name = path.partition(".")[0].partition("[")[0]
    return name if name in MODEL_CONFIG.fields else nearest(name, MODEL_CONFIG.fields) or name


def read_text(path: Path, file: str) -> str:
    """A configuration file's text. Raises `Problems` if it cannot be read, is too large, or is not UTF-8."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():
            raise Problems([Problem("cannot be read: it is a pipe or a device and not a file", Place(file))])
        with path.open("rb") as stream:
            raw = stream.read(SIZE_MAX_BYTES + 1)
    except OSError as error:
        hint = NO_PERMISSION if isinstance(error, PermissionError) else ""
        text = f"cannot be read: {error.strerror or type(error).__name__}"
        raise Problems([Problem(text, Place(file), hint=hint)]) from None
    if len(raw) > SIZE_MAX_BYTES:
        raise Problems([_too_large(file)])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_start = raw.rfind(b"\n", 0, error.start) + 1
        column = len(raw[line_start : error.start].decode(errors="replace")) + 1
        place = Place(file, raw.count(b"\n", 0, error.start) + 1, column)
        message = f"not UTF-8 text: byte 0x{raw[error.start]:02x}"
        raise Problems([Problem(message, place, hint="is this a text-format file?")]) from None


def _too_large(file: str) -> Problem:
    return Problem(f"larger than {SIZE_MAX_BYTES >> 20} MiB, which is too large for a configuration", Place(file, 1, 1))


def config_message(config: Mapping[str, Any], file: str) -> pb.ModelConfig:
    """The message of a configuration in JSON form. `file` is used in error messages. Raises Problems."""
    return parse_model_config(json.dumps(config, default=_plain), file, "json")[0]


def _plain(value: object) -> int | str:
    """Integers of other libraries as int; anything else as text, which the schema then reports."""
    return int(value) if isinstance(value, Integral) else repr(value)


def config_text(config: Mapping[str, Any], file: str) -> str:
    """The contents of a config.pbtxt."""
    return text_format.MessageToString(config_message(config, file), as_utf8=True)


def config_fields(text: str, file: str) -> tuple[dict[str, Any], SourceMap]:
    """The fields of a config.pbtxt in JSON form, without defaults. Raises Problems."""
    message, source = parse_model_config(text, file)
    return MessageToDict(message, preserving_proto_field_name=True), source
