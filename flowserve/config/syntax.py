"""The syntax of configuration files: text to a tree of names, values and positions.

Decides the tree, which is the same for both notations, and their grammars: JSON, and the part of protobuf's text format
that configurations use, with comments, `,` and `;` after a field, `field { }`, `field: { }`, `field < >`, lists,
adjacent strings, all escapes and number notations. Extensions and Any values are not part of a configuration and are
refused. protobuf's and Python's own parsers are not used, because they do not keep positions, and protobuf's stops at
the first unknown field. Does not know the schema and does not interpret values (`build`). Callers: `parse`, `build`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from flowserve.errors import Place, Problem, Problems

# The schema is seven levels deep. The limit prevents a RecursionError for hostile input.
DEPTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class ConfigScalar:
    """One value as written. A "string" is already unquoted; a "number" keeps its sign; a "word" is any bare word."""

    at: int
    kind: Literal["string", "number", "word"]
    text: str


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """`name: value`; `at` is the offset of the name."""

    at: int
    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class ConfigBlock:
    at: int
    entries: tuple[ConfigEntry, ...]


@dataclass(frozen=True, slots=True)
class ConfigList:
    at: int
    values: tuple[Value, ...]


Value = ConfigScalar | ConfigBlock | ConfigList


class Text:
    """A file's contents, with conversion of offsets to places."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, at: int) -> Place:
        line = bisect_right(self._line_starts, at)
        return Place(self.file, line, at - self._line_starts[line - 1] + 1)

    def fail(self, at: int, message: str, hint: str = "") -> NoReturn:
        """Raise `Problems` for a syntax error, after which parsing cannot continue."""
        raise Problems([Problem(message, self.place(at), hint=hint)])

    def too_deep(self, at: int) -> NoReturn:
        self.fail(at, f"nested deeper than {DEPTH_MAX} levels")


# ---------------------------------------------------------------------------------------------- text format


TOKEN: Final = re.compile(
    r"""
      (?P<space> (?: [ \t\r\n\f\v]++ | \#[^\n]*+ )++ )
    | (?P<word> [A-Za-z_][A-Za-z0-9_]*+ )
    | (?P<number> 0[xX][0-9a-fA-F]++ | (?: [0-9]++ (?: \. [0-9]*+ )?+ | \. [0-9]++ ) (?: [eE][+-]?[0-9]++ )?+ [fF]?+ )
    | (?P<string> "(?: [^"\\\n]++ | \\[^\n] )*+" | '(?: [^'\\\n]++ | \\[^\n] )*+' )
    | (?P<symbol> [:{}<>\[\],;-] )
    """,
    re.VERBOSE,
)
ESCAPE: Final = re.compile(
    rb"\\(?:(?P<octal>[0-7]{1,3})|[xX](?P<hex>[0-9a-fA-F]{1,2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    rb"|(?P<one>[\x80-\xff]+|.))"
)
ESCAPES: Final = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
CLOSING: Final = {"{": "}", "<": ">"}
END: Final = "end"
MERGE: Final = re.compile(r"^(<{7}|={7}|>{7})", re.MULTILINE)
# Characters from other notations, or inserted by an editor, with a hint for each.
JUNK: Final = {"=": 'a value stands behind ":"', "/": 'a comment begins with "#"'} | dict.fromkeys(
    "“”„‟‘’‚‛«»`´", "a string stands in straight quotes"
)


def parse_pbtxt(text: Text) -> ConfigBlock:
    """The tree of a whole file. Raises `Problems` with the place of the first syntax error."""
    return ConfigBlock(0, _PbtxtParser(text).entries(END))


class _PbtxtParser:
    """Recursive descent with one token of lookahead: `_kind` is a group of TOKEN, the symbol itself, or END; `_value`
    its text; `_at` its offset.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._next_at = 0
        self._depth = 0
        self._lists = 0  # number of open lists
        self._advance()

    def _advance(self) -> None:
        source, at = self._text.text, self._next_at
        match = TOKEN.match(source, at)
        if match and match.lastgroup == "space":
            at = match.end()
            match = TOKEN.match(source, at)
        self._at = at
        if match is None:
            if at < len(source):
                self._fail_at_junk(source[at])
            self._kind = self._value = END
            return
        self._kind = match.lastgroup or END
        self._value = match.group()
        self._next_at = match.end()
        if self._kind == "symbol":
            self._kind = self._value
        elif self._kind == "number" and source[self._next_at : self._next_at + 1].isalnum():
            self._text.fail(at, f"Invalid number: {self._value}{source[self._next_at]}")

    def _fail_at_junk(self, character: str) -> None:
        if character in "\"'":
            self._text.fail(self._at, "String literals cannot cross line boundaries", "is the closing quote missing?")
        hint = self._merge() or JUNK.get(character, "is this a text-format file?")
        if character.isspace() or unicodedata.category(character) == "Cf":
            hint = "it looks like a space, or like nothing; write a space for it"
        self._text.fail(self._at, f"unexpected character {character!r}", hint)

    def _merge(self) -> str:
        return "this line is of a merge that was left with conflicts" if MERGE.match(self._text.text, self._at) else ""

    def _accept(self, kind: str) -> bool:
        if self._kind != kind:
            return False
        self._advance()
        return True

    def _expected(self, what: str, hint: str = "") -> NoReturn:
        found = "the end of the file" if self._kind == END else self._value
        self._text.fail(self._at, f"Expected {what}, found {found}", hint)

    def entries(self, closing: str, opened_at: int = 0) -> tuple[ConfigEntry, ...]:
        entries = []
        while not self._accept(closing) if closing != END else self._kind != END:
            entries.append(self._entry(closing, opened_at))
        return tuple(entries)

    def _entry(self, closing: str, opened_at: int) -> ConfigEntry:
        at, name = self._at, self._value
        if self._kind == "[":
            self._text.fail(at, "extensions and Any values are not part of a model configuration")
        if self._kind != "word":
            wanted = "a field name" if closing == END else f'a field name or "{closing}"'
            self._expected(wanted, self._why_no_name(closing, opened_at))
        self._advance()
        has_colon = self._accept(":")
        if self._kind in CLOSING:
            value: Value = self._block()
        elif self._kind == "[":
            value = self._items(has_colon)
        elif has_colon:
            value = self._scalar()
        else:
            self._expected('":"')
        if not self._accept(","):
            self._accept(";")
        return ConfigEntry(at, name, value)

    def _why_no_name(self, closing: str, opened_at: int) -> str:
        if self._kind == END or (self._kind == "]" and self._lists):
            return f'what opens at {self._text.place(opened_at)} is not closed with "{closing}"'
        if self._kind == "string":
            return "names of fields stand without quotes; what has keys is written { key: ... value: ... }"
        if self._merge():
            return self._merge()
        if self._kind == "{" and not self._text.text[: self._at].strip():
            return "is it JSON? This file is text format, as in max_batch_size: 8"
        if self._kind in CLOSING.values() and closing == END:
            return "all that was opened before it is closed already"
        return ""

    def _block(self) -> ConfigBlock:
        at, closing = self._at, CLOSING[self._kind]
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._text.too_deep(at)
        self._advance()
        entries = self.entries(closing, at)
        self._depth -= 1
        return ConfigBlock(at, entries)

    def _items(self, has_colon: bool) -> ConfigList:
        at = self._at
        self._lists += 1
        self._advance()
        values: list[Value] = []
        while not self._accept("]"):
            if values and not self._accept(","):
                self._expected('"," or "]"')
            if values and self._kind == "]":
                self._expected("a value", 'leave out the "," before it')
            if self._kind in CLOSING:
                values.append(self._block())
            elif has_colon:
                values.append(self._scalar())
            else:
                self._expected('"{" (a list of plain values wants ":" before its "[")')
        self._lists -= 1
        return ConfigList(at, tuple(values))

    def _scalar(self) -> ConfigScalar:
        at = self._at
        if self._kind == "string":
            return ConfigScalar(at, "string", self._strings())
        sign = "-" if self._accept("-") else ""
        if self._kind not in ("number", "word"):
            self._expected("a value")
        scalar = ConfigScalar(at, "number" if self._kind == "number" else "word", sign + self._value)
        self._advance()
        return scalar

    def _strings(self) -> str:
        """Adjacent strings are concatenated; their escapes may together encode UTF-8 bytes."""
        at, raw = self._at, bytearray()
        while self._kind == "string":
            raw += ESCAPE.sub(self._escape, self._utf8(self._value[1:-1]))
            self._advance()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._text.fail(at, "string is not valid UTF-8 after its escapes are resolved")

    def _escape(self, match: re.Match[bytes]) -> bytes:
        kind, digits = match.lastgroup, match.group(match.lastgroup or 0).decode()
        if kind == "one":
            if digits not in ESCAPES:
                self._text.fail(self._at, f"Invalid escape sequence \\{digits[0]} in a string")
            return ESCAPES[digits].encode()
        code = int(digits, 8 if kind == "octal" else 16)
        if kind in ("octal", "hex"):
            return bytes([code & 0xFF])
        if code > 0x10FFFF:
            self._text.fail(self._at, f"\\U{digits} is not a Unicode character")
        return self._utf8(chr(code))

    def _utf8(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            self._text.fail(self._at, "a string holds half of a surrogate pair")


# ---------------------------------------------------------------------------------------------- JSON


JSON_STRING: Final = json.JSONDecoder()
JSON_SPACE: Final = re.compile(r"[ \t\r\n]*+")
JSON_PLAIN: Final = re.compile(
    r"(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)|(?P<word>true|false|null)"
)


def parse_json(text: Text) -> ConfigBlock:
    """The tree of a whole document, which must be an object. Raises `Problems` with the place of a syntax error."""
    parser = _JsonParser(text)
    value = parser.value(1)
    if not isinstance(value, ConfigBlock):
        text.fail(value.at, "a configuration in JSON is an object: it begins with {")
    if parser.peek():
        text.fail(parser.at, "unexpected text after the end of the object")
    return value


class _JsonParser:
    """`at` is the offset of the next character to read."""

    def __init__(self, text: Text) -> None:
        self.at = 0
        self._text = text
        self._source = text.text

    def peek(self) -> str:
        """Advance over white space. The next character, "" at the end."""
        match = JSON_SPACE.match(self._source, self.at)
        self.at = match.end() if match else self.at
        return self._source[self.at : self.at + 1]

    def value(self, depth: int) -> Value:
        character, at = self.peek(), self.at
        if depth > DEPTH_MAX:
            self._text.too_deep(at)
        if character == '"':
            return ConfigScalar(at, "string", self._string())
        if character == "{":
            return self._object(depth)
        if character == "[":
            return self._array(depth)
        match = JSON_PLAIN.match(self._source, at)
        if match is None:
            self._text.fail(at, "Expected a value, found " + (repr(character) if character else "the end of the file"))
        self.at = match.end()
        return ConfigScalar(at, "number" if match.lastgroup == "number" else "word", match.group())

    def _object(self, depth: int) -> ConfigBlock:
        at, entries = self.at, list[ConfigEntry]()
        while self._more("}", first=not entries):
            if self.peek() != '"':
                self._text.fail(self.at, 'Expected a field name in double quotes or "}"')
            name_at, name = self.at, self._string()
            if self.peek() != ":":
                self._text.fail(self.at, 'Expected ":"')
            self.at += 1
            entries.append(ConfigEntry(name_at, name, self.value(depth + 1)))
        return ConfigBlock(at, tuple(entries))

    def _array(self, depth: int) -> ConfigList:
        at, values = self.at, list[Value]()
        while self._more("]", first=not values):
            values.append(self.value(depth + 1))
        return ConfigList(at, tuple(values))

    def _more(self, closing: str, *, first: bool) -> bool:
        """Advance over the opening bracket or the comma; False after the closing bracket."""
        if first:
            self.at += 1
        character = self.peek()
        if character != closing and first:
            return True
        if character not in (closing, ","):
            self._text.fail(self.at, f'Expected "," or "{closing}"')
        self.at += 1
        return character == ","

    def _string(self) -> str:
        try:
            value, self.at = JSON_STRING.raw_decode(self._source, self.at)
        except json.JSONDecodeError as error:
            self._text.fail(error.pos, error.msg)
        return str(value)
