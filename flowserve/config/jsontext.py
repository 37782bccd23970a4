"""Reads JSON into the same tree of places that pbtxt.py makes.

Decided here: JSON's grammar with positions. What the values mean (numbers in strings, names of either spelling) is for
build.py.
"""

from __future__ import annotations

import json
import re
from typing import Final

from flowserve.config.source import DEPTH_MAX, Block, Entry, Items, Scalar, Text, Value

STRING: Final = json.JSONDecoder()
SPACE: Final = re.compile(r"[ \t\r\n]*+")
PLAIN: Final = re.compile(
    r"(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)|(?P<word>true|false|null)"
)


def parse_json(text: Text) -> Block:
    """The tree of a whole document, which must be an object. Raises `Problems` with the place where it is not JSON."""
    parser = _Parser(text)
    parser.skip()
    value = parser.value(1)
    if not isinstance(value, Block):
        text.fail(value.at, "a configuration in JSON is an object: it begins with {")
    parser.skip()
    if parser.at < len(text.text):
        text.fail(parser.at, "unexpected text after the end of the object")
    return value


class _Parser:
    """`at` is the offset of the next character to read."""

    def __init__(self, text: Text) -> None:
        self.at = 0
        self._text = text
        self._source = text.text

    def skip(self) -> None:
        match = SPACE.match(self._source, self.at)
        self.at = match.end() if match else self.at

    def value(self, depth: int) -> Value:
        at = self.at
        if depth > DEPTH_MAX:
            self._text.too_deep(at)
        character = self._source[at : at + 1]
        if character == '"':
            return Scalar(at, "string", self._string())
        if character == "{":
            return self._object(depth)
        if character == "[":
            return self._array(depth)
        match = PLAIN.match(self._source, at)
        if match is None:
            self._text.fail(at, "Expected a value, found " + (repr(character) if character else "the end of the file"))
        self.at = match.end()
        return Scalar(at, "number" if match.lastgroup == "number" else "word", match.group())

    def _object(self, depth: int) -> Block:
        at, entries = self.at, list[Entry]()
        while self._more("}", first=not entries):
            name_at = self.at
            if self._source[self.at : self.at + 1] != '"':
                self._text.fail(self.at, 'Expected a field name in double quotes or "}"')
            name = self._string()
            self.skip()
            if self._source[self.at : self.at + 1] != ":":
                self._text.fail(self.at, 'Expected ":"')
            self.at += 1
            self.skip()
            entries.append(Entry(name_at, name, self.value(depth + 1)))
        return Block(at, tuple(entries))

    def _array(self, depth: int) -> Items:
        at, values = self.at, list[Value]()
        while self._more("]", first=not values):
            values.append(self.value(depth + 1))
        return Items(at, tuple(values))

    def _more(self, closing: str, *, first: bool) -> bool:
        """Steps over the opening bracket or the comma to the next element; False past the closing bracket."""
        if first:
            self.at += 1
        self.skip()
        character = self._source[self.at : self.at + 1]
        if character == closing:
            self.at += 1
            return False
        if not first:
            if character != ",":
                self._text.fail(self.at, f'Expected "," or "{closing}"')
            self.at += 1
            self.skip()
        return True

    def _string(self) -> str:
        try:
            value, self.at = STRING.raw_decode(self._source, self.at)
        except json.JSONDecodeError as error:
            self._text.fail(error.pos, error.msg)
        return str(value)
