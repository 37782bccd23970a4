"""The door for text that somebody wrote: a configuration's text becomes a message and the place of every field.

Decided here: how large a configuration may be, and that all mistakes of one text are reported together. Whether what it
says makes sense is decided in rules/, whether this server can do it in unsupported.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.config.build import Builder, Format
from flowserve.config.doubt import field_of
from flowserve.config.jsontext import parse_json
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.pbtxt import parse_pbtxt
from flowserve.config.schema import MODEL_CONFIG
from flowserve.config.source import Text
from flowserve.config.types import SourceMap
from flowserve.errors import Place, Problem, Problems

# Real configurations have a few kilobytes. The bound keeps a file that is something else from costing seconds.
SIZE_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text says. `problems` are every unknown field, wrong type and repeated field, sorted by place; what is
    wrong is not in the `message`. `broken` are the configuration's own fields with such mistakes in them.
    """

    message: ModelConfigProto
    source: SourceMap
    problems: tuple[Problem, ...] = ()
    broken: frozenset[str] = frozenset()


def parse_model_config(
    text: str,
    file: str,
    format: Format = "pbtxt",  # noqa: A002, the word users know it by
) -> tuple[ModelConfigProto, SourceMap]:
    """What `text` says, where all of it is right. Raises `Problems` as `parse` does, and with those that it finds."""
    parsed = parse(text, file, format)
    if parsed.problems:
        raise Problems(parsed.problems)
    return parsed.message, parsed.source


def parse(text: str, file: str, format: Format = "pbtxt") -> Parsed:  # noqa: A002, the word users know it by
    """As far as it can be read. `file` is the name that places carry. Raises `Problems` where the text is not of that
    format at all, with the one place where that shows.
    """
    if len(text) > SIZE_MAX_BYTES:
        raise Problems([_too_large(file)])
    source = Text(text, file)
    tree = parse_json(source) if format == "json" else parse_pbtxt(source)
    builder = Builder(source, format)
    message = ModelConfigProto()
    builder.fill(message, MODEL_CONFIG, tree)
    problems = sorted(builder.problems, key=lambda problem: problem.place or Place(file))
    return Parsed(message, SourceMap(file, builder.places), tuple(problems), frozenset(map(field_of, builder.broken)))


def read_text(path: Path, file: str) -> str:
    """A configuration file's text. Raises `Problems` where it cannot be read, is too large, or is not UTF-8."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():
            raise Problems([Problem("cannot be read: it is a pipe or a device and not a file", Place(file))])
        with path.open("rb") as stream:
            raw = stream.read(SIZE_MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Problems([Problem(f"cannot be read: {reason}", Place(file))]) from None
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
